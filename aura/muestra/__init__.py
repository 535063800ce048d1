"""The built-in corpus `muestra`: grammatical Spanish prose, deterministic by seed, any size."""

from aura.muestra.text import document, documents

__all__ = ["document", "documents"]
