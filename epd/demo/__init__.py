"""`epd demo`: a whole deployment for one question about one picture, and where its time went."""

from epd.demo.run import DemoOptions, run_demo

__all__ = ["DemoOptions", "run_demo"]
