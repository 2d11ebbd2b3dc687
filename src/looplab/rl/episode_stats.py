"""Statistics of episodes and infos, accumulated from one metrics row to the next over all envs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from looplab.rl.metrics import SCHEMA, MetricField

Array = NDArray[Any]


class EpisodeStats:
    """Accumulates returns, episode lengths, and the metrics that are declared as reductions of an info key."""

    def __init__(self, num_envs: int, fields: Iterable[MetricField] = SCHEMA) -> None:
        """
        Args:
            num_envs: Number of envs.
            fields: Declared metrics; those with `info` are computed here.
        """
        self._by_info: dict[str, list[MetricField]] = {}
        for field in fields:
            if field.info is not None:
                self._by_info.setdefault(field.info, []).append(field)
        self._num_envs = num_envs
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self._episode_max = {field.name: self._unknown() for field in self._fields_with("episode_max")}
        self._clear()

    def _clear(self) -> None:
        self._sums: dict[str, float] = {}
        """Fields of the reductions "sum" and "count"."""
        self._last: dict[str, float] = {}
        self._max: dict[str, float] = {}
        self._means: dict[str, tuple[float, int]] = {}
        """Sum and number of values."""
        self._ended_returns: list[float] = []
        self._ended_lengths: list[int] = []
        self._ended_max: dict[str, list[float]] = {name: [] for name in self._episode_max}

    def _unknown(self) -> Array:
        return np.full(self._num_envs, np.nan)

    def _fields_with(self, reduction: str) -> list[MetricField]:
        return [field for fields in self._by_info.values() for field in fields if field.reduce == reduction]

    def add(self, rewards: Array, terminated: Array, truncated: Array, valid: Array, infos: Mapping[str, Any]) -> None:
        """Add one step of all envs.

        Args:
            rewards: Rewards, [envs].
            terminated: Whether each episode terminated.
            truncated: Whether each episode was truncated.
            valid: False where the env only reset; its info is then ignored.
            infos: Infos of the vector env: arrays by key, with a mask under `_key`.
        """
        self._returns += rewards
        self._lengths += valid
        if infos:
            self._add_infos(valid, infos)
        ended = terminated | truncated
        if ended.any():
            for env in np.flatnonzero(ended):
                self._ended_returns.append(float(self._returns[env]))
                self._ended_lengths.append(int(self._lengths[env]))
                for name, maxima in self._episode_max.items():
                    self._ended_max[name].append(float(maxima[env]))
            self._returns[ended] = 0.0
            self._lengths[ended] = 0
            for maxima in self._episode_max.values():
                maxima[ended] = np.nan

    def _add_infos(self, valid: Array, infos: Mapping[str, Any]) -> None:
        for info, fields in self._by_info.items():
            if info not in infos:
                continue
            mask = infos[f"_{info}"] & valid
            for field in fields:
                self._add_info(field, infos[info], mask)

    def _add_info(self, field: MetricField, values: Array, mask: Array) -> None:
        name = field.name
        if field.reduce == "count":
            self._sums[name] = self._sums.get(name, 0.0) + float(mask.sum())
            return
        known = np.asarray(values[mask], float)
        if field.reduce == "sum":
            self._sums[name] = self._sums.get(name, 0.0) + float(known.sum())
        elif not len(known):
            return
        elif field.reduce == "last":
            self._last[name] = float(known[-1])
        elif field.reduce == "mean":
            total, count = self._means.get(name, (0.0, 0))
            self._means[name] = total + float(known.sum()), count + len(known)
        elif field.reduce == "max":
            self._max[name] = max(self._max.get(name, -np.inf), float(known.max()))
        else:
            maxima = self._episode_max[name]
            maxima[mask] = np.fmax(maxima[mask], known)

    def pop_row(self) -> dict[str, float]:
        """Return the metrics since the last call and start over. What was not measured is missing, never 0."""
        row: dict[str, float] = {**self._sums, **self._last}
        if self._ended_returns:
            returns, lengths = np.array(self._ended_returns), np.array(self._ended_lengths, float)
            row["episodes"] = float(len(returns))
            row["episode_return_mean"], row["episode_return_max"] = float(returns.mean()), float(returns.max())
            row["episode_length_mean"] = float(lengths.mean())
            for name, ended in self._ended_max.items():
                known = np.array(ended)[~np.isnan(ended)]
                if len(known):
                    row[name] = float(known.mean())
        row |= {name: total / count for name, (total, count) in self._means.items()}
        row |= self._max
        self._clear()
        return row

    def state_dict(self) -> dict[str, Any]:
        return {
            "returns": self._returns, "lengths": self._lengths, "episode_max": dict(self._episode_max),
            "sums": dict(self._sums), "last": dict(self._last), "max": dict(self._max),
            "means": {name: list(pair) for name, pair in self._means.items()},
            "ended_returns": np.array(self._ended_returns), "ended_lengths": np.array(self._ended_lengths, np.int64),
            "ended_max": {name: np.array(ended) for name, ended in self._ended_max.items()},
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "ended" in state:
            state = self._upgrade(state)
        self._clear()
        self._returns, self._lengths = np.array(state["returns"]), np.array(state["lengths"])
        for name in self._episode_max:
            saved = state["episode_max"].get(name)
            self._episode_max[name] = self._unknown() if saved is None else np.array(saved)
        self._sums, self._last, self._max = dict(state["sums"]), dict(state["last"]), dict(state["max"])
        self._means = {name: (pair[0], pair[1]) for name, pair in state["means"].items()}
        self._ended_returns = np.array(state["ended_returns"], float).tolist()
        self._ended_lengths = np.array(state["ended_lengths"], np.int64).tolist()
        unknown = [np.nan] * len(self._ended_returns)
        self._ended_max = {
            name: np.array(state["ended_max"].get(name, unknown), float).tolist() for name in self._episode_max
        }

    def _upgrade(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of an older checkpoint in the present form.

        Older versions had exactly one position in the infos, for which they kept its mean, its maximum and the maximum
        of each episode.
        """
        total, highest, count = state["x"]
        return {
            "returns": state["returns"], "lengths": state["lengths"], "sums": state["sums"], "last": state["last"],
            "ended_returns": [row[0] for row in state["ended"]], "ended_lengths": [row[1] for row in state["ended"]],
            "episode_max": dict.fromkeys(self._episode_max, state["furthest"]),
            "ended_max": {name: [row[2] for row in state["ended"]] for name in self._episode_max},
            "means": {field.name: [total, count] for field in self._fields_with("mean") if count},
            "max": {field.name: highest for field in self._fields_with("max") if count},
        }  # fmt: skip
