"""Hyperparameters in TensorBoard's event files, as written by the HParams plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from looplab.measure import wire
from looplab.measure.tensorboard import RecordFile

_SUMMARY, _VALUE, _METADATA, _PLUGIN_DATA, _CONTENT = 5, 1, 9, 1, 2
_SESSION_START, _HPARAMS, _KEY, _MAP_VALUE = 3, 1, 1, 2
_NUMBER, _STRING, _BOOL = 2, 3, 4
_FOOT = 4
MAX_RECORDS = 10_000
"""Records that are searched; hyperparameters are among the first ones."""


def read_hparams(path: Path) -> dict[str, Any]:
    """Return the hyperparameters in an event file; empty if there are none or they cannot be read."""
    hparams: dict[str, Any] = {}
    n_records = 0
    for messages in RecordFile(path, lambda: None).blocks():
        for message in messages:
            try:
                _read_event(message, hparams)
            except (ValueError, IndexError):
                continue
        n_records += len(messages)
        if hparams or n_records > MAX_RECORDS:
            break
    return hparams


def _read_event(message: bytes, hparams: dict[str, Any]) -> None:
    budget = wire.DecodeBudget()
    end = len(message) - _FOOT
    for summary in _messages(message, 0, end, _SUMMARY, budget):
        for value in _messages(message, summary.start, summary.end, _VALUE, budget):
            for metadata in _messages(message, value.start, value.end, _METADATA, budget):
                for plugin in _messages(message, metadata.start, metadata.end, _PLUGIN_DATA, budget):
                    _read_plugin(message, plugin, hparams, budget)


def _read_plugin(data: bytes, plugin: wire.WireField, hparams: dict[str, Any], budget: wire.DecodeBudget) -> None:
    parts = list(wire.fields(data, plugin.start, plugin.end, budget))
    if not any(part.number == 1 and wire.text(data, part) == "hparams" for part in parts):
        return
    for content in parts:
        if content.number != _CONTENT or content.kind != wire.LENGTH:
            continue
        for session in _messages(data, content.start, content.end, _SESSION_START, budget):
            for entry in _messages(data, session.start, session.end, _HPARAMS, budget):
                _read_entry(data, entry, hparams, budget)


def _read_entry(data: bytes, entry: wire.WireField, hparams: dict[str, Any], budget: wire.DecodeBudget) -> None:
    name = ""
    value: float | str | bool | None = None
    for part in wire.fields(data, entry.start, entry.end, budget):
        if part.number == _KEY:
            name = wire.text(data, part)
        elif part.number == _MAP_VALUE and part.kind == wire.LENGTH:
            for inner in wire.fields(data, part.start, part.end, budget):
                if inner.number == _NUMBER:
                    value = wire.double(data, inner)
                elif inner.number == _STRING:
                    value = wire.text(data, inner)
                elif inner.number == _BOOL:
                    value = bool(inner.value)
    if name and value is not None:
        hparams[name] = value


def _messages(data: bytes, start: int, end: int, number: int, budget: wire.DecodeBudget) -> list[wire.WireField]:
    """Return the embedded messages with this field number."""
    return [
        part for part in wire.fields(data, start, end, budget) if part.number == number and part.kind == wire.LENGTH
    ]
