"""The contract of samplers for `search: {sampler: …}`: functions that return an Optuna sampler."""

from __future__ import annotations

from typing import Any

from looplab.config.lab import SearchConfig
from looplab.decide.axes import Axis
from looplab.decide.optuna_models import OptunaModel
from looplab.decide.points import SearchPoint
from looplab.decide.sampling import generator
from looplab.guard.knobs import Knob


class SamplerContract:
    """What a search needs of a sampler. Subclasses define `make_sampler`; Optuna's own suite
    (`optuna.testing.pytest_samplers`) tests the rest."""

    options: dict[str, Any] = {}  # noqa: RUF012 (subclasses replace it)

    def make_sampler(self, seed: int, **options: Any) -> Any:
        """Return an Optuna sampler, as the entry point does."""
        raise NotImplementedError

    def _draws(self, seed: int, n: int) -> list[dict[str, Any]]:
        knobs = [
            Knob("lr", type="float", low=1e-5, high=1e-1, log=True),
            Knob("layers", type="int", low=1, high=8),
            Knob("act", choices=("relu", "tanh", "gelu")),
        ]
        axes = [axis for knob in knobs if isinstance(axis := Axis.from_knob(knob.path, knob, None), Axis)]
        model = OptunaModel(SearchConfig(), axes, "min", lambda seed: self.make_sampler(seed, **self.options))
        points = [
            SearchPoint({"lr": 10.0 ** -(1 + i % 4), "layers": 1 + i % 8, "act": i % 3}, values=[float(i)])
            for i in range(12)
        ]
        points.append(SearchPoint({"lr": 0.05, "layers": 8, "act": 0}, crashes=1))
        points.append(SearchPoint({"lr": 0.01, "layers": 4, "act": 1}, pending=1))
        return [model.draw(generator(seed, count), points, []) for count in range(n)]

    def test_draws_are_inside_the_space_whatever_has_failed_or_is_pending(self) -> None:
        for params in self._draws(seed=0, n=10):
            assert 1e-5 <= params["lr"] <= 1e-1
            assert params["layers"] in range(1, 9)
            assert params["act"] in range(3)

    def test_the_same_seed_draws_the_same_points(self) -> None:
        assert self._draws(seed=1, n=4) == self._draws(seed=1, n=4)

    def test_other_seeds_draw_other_points(self) -> None:
        assert self._draws(seed=1, n=4) != self._draws(seed=2, n=4)
