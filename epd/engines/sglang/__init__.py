"""The production engine: an unmodified SGLang server of one stage, supervised and under a lease."""
