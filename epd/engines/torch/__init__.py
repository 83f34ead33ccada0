"""The reference engine on PyTorch: readable first, and equal to `transformers.generate`."""
