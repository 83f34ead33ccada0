"""The coordinator's HTTP: OpenAI's API for clients, and what workers and operators call."""
