"""Mixed precision training experiments: one recipe, every precision, from command to table."""

__version__ = "0.1.0"
