"""Names in the checkpoints of older versions, translated when a checkpoint is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STATE_KEYS = {
    "seen": "obs", "begins": "episode_starts", "logs": "log_probs", "memory": "hidden_state", "chance": "rng",
    "next_seen": "next_obs", "next_memory": "next_hidden_state",
}  # fmt: skip
PARAMETER_PREFIXES = {"eyes.": "encoder.", "spread": "log_std"}


def rename_keys(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with the present names of its keys."""
    return {STATE_KEYS.get(name, name): value for name, value in state.items()}


def rename_transition_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a replay with their present names; only those that an older runner stored are renamed."""
    stored_by_runner = {"next_seen", "next_memory"} <= fields.keys()
    return rename_keys(fields) if stored_by_runner else dict(fields)


def rename_parameters(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy's parameters under their present names."""
    renamed = {}
    for name, value in state_dict.items():
        for old, new in PARAMETER_PREFIXES.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
        renamed[name] = value
    return renamed
