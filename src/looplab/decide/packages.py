"""The packages that samplers import, and whether they are installed."""

from __future__ import annotations

from importlib.util import find_spec

from looplab.config.lab import SearchConfig
from looplab.errors import LabError

NEEDS = {
    "auto": ("numpy", "scipy", "threadpoolctl"),
    "tpe": ("optuna", "scipy"),
    "cmaes": ("cmaes", "optuna", "scipy"),
    "gp": ("optuna", "scipy", "torch"),
    "random": ("numpy",),
    "grid": (),
    "qmc": ("numpy", "scipy"),
}
"""The packages that a sampler imports."""


def check_packages(settings: SearchConfig) -> None:
    """Raise a LabError that names the packages that the sampler needs and that are not installed."""
    missing = [name for name in NEEDS.get(settings.sampler, ("optuna", "scipy")) if not is_installed(name)]
    if missing:
        packages = "looplab[search]" if missing != ["torch"] else "torch"
        without = "grid, random, qmc and auto work without Optuna" if "optuna" in missing else ""
        raise LabError(
            f"search: {settings.sampler} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} "
            "not installed",
            hint="; ".join(filter(None, (f"pip install '{packages}'", without))),
        )


def is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:
        return False
