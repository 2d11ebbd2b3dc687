"""looplab: an autonomous laboratory for machine-learning training.

Importing this package is nearly free: trainers import `looplab.trainkit` inside their own process.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False  # importing `typing` would cost more than all the rest
if TYPE_CHECKING:
    from looplab.frames import load as load


def __getattr__(name: str) -> object:
    if name == "load":
        from looplab.frames import load

        return load
    raise AttributeError(f"module 'looplab' has no attribute {name!r}")
