"""Text generation backends: one contract (`base.py`), one module per engine."""

from .base import Backend, Completion, GenerationSession, Injection, ModelOptions, SamplingParams, make_backend

__all__ = [
    "Backend", "Completion", "GenerationSession", "Injection", "ModelOptions", "SamplingParams", "make_backend",
]  # fmt: skip
