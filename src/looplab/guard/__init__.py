"""Checks of a proposal before it may use a slot: knobs, normalisers, derived keys, constraints."""

from looplab.guard.guard import Guard, GuardError, Problem, Ruling
from looplab.guard.knobs import Knob

__all__ = ["Guard", "GuardError", "Knob", "Problem", "Ruling"]
