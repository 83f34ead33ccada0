"""Model checkpoints that ship with EPD, and finding the folder of one by name or path."""

from epd.checkpoints.resolve import bundled_names, resolve

__all__ = ["bundled_names", "resolve"]
