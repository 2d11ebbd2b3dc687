"""Checks of a proposal before it may use a slot: knobs, normalisers, derived keys, constraints."""

from looplab.guard.guard import Guard, Problem, Ruling
from looplab.guard.knobs import Knob

__all__ = ["Guard", "Knob", "Problem", "Ruling"]
