"""EPD: Encode-Prefill-Decode serving of vision-language models.

Importing this package needs neither torch nor sglang; engines are imported by their worker only.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
