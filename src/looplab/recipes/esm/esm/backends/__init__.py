"""Where the tokens come from: one contract (`base.py`), one file per engine."""

from .base import Backend, Injection, ModelSettings, Piece, Sampling, Session, make_backend

__all__ = ["Backend", "Injection", "ModelSettings", "Piece", "Sampling", "Session", "make_backend"]
