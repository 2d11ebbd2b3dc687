"""looplab: an autonomous lab for machine-learning training.

Importing this package is nearly free: trainers import `looplab.trainkit` inside their own process, and the names below
are imported when they are first used.
"""

__version__ = "0.2.0"

TYPE_CHECKING = False  # importing `typing` would cost more than all the rest
if TYPE_CHECKING:
    from looplab.api.ask_tell import AskTell, Trial
    from looplab.api.define import Choice, Float, Int, create_study
    from looplab.api.frames import load
    from looplab.api.study import Lab, Run, RunVerdict, Study
    from looplab.api.study import open_lab as open
    from looplab.decide.optuna_sampler import GaussianProcessSampler
    from looplab.errors import BusyError, LabError
    from looplab.loop.events import AlarmRaised, EngineEvent, RunEnded, RunLaunched, VerdictGiven

__all__ = [
    "AlarmRaised", "AskTell", "BusyError", "Choice", "EngineEvent", "Float", "GaussianProcessSampler", "Int", "Lab",
    "LabError", "Run", "RunEnded", "RunLaunched", "RunVerdict", "Study", "Trial", "VerdictGiven", "create_study",
    "load", "open",
]  # fmt: skip

_HOMES = {
    "AskTell": "api.ask_tell", "Trial": "api.ask_tell",
    "Choice": "api.define", "Float": "api.define", "Int": "api.define", "create_study": "api.define",
    "Lab": "api.study", "Run": "api.study", "RunVerdict": "api.study", "Study": "api.study", "open": "api.study",
    "GaussianProcessSampler": "decide.optuna_sampler",
    "BusyError": "errors", "LabError": "errors", "load": "api.frames",
    "AlarmRaised": "loop.events", "EngineEvent": "loop.events", "RunEnded": "loop.events",
    "RunLaunched": "loop.events", "VerdictGiven": "loop.events",
}  # fmt: skip
"""Public names and the modules that define them."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'looplab' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"looplab.{_HOMES[name]}")
    found = globals()[name] = getattr(module, "open_lab" if name == "open" else name)
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
