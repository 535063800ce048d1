"""The rooms that must be the same in every training script of the collection."""

__version__ = "0.1.0"
