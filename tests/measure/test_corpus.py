"""Excerpts of what projects print, each with all metrics that are read from it: `name.txt` and `name.json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from looplab.measure.base import Batch, merge
from looplab.measure.stdout import StdoutSource

CORPUS = Path(__file__).parent / "corpus"
NAMES = sorted(path.stem for path in CORPUS.glob("*.txt"))


def to_points(batch: Batch) -> dict[str, list[list[float]]]:
    return {
        name: [list(point) for point in zip(curve.steps, curve.values, strict=True)] for name, curve in batch.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_exactly_the_metrics_of_a_project_are_read(name: str) -> None:
    found = to_points(StdoutSource(CORPUS / f"{name}.txt").poll(final=True))
    assert found == json.loads((CORPUS / f"{name}.json").read_text())


def test_the_corpus_has_projects_and_noise() -> None:
    assert len(NAMES) > 70
    noise = [name for name in NAMES if name.startswith("noise_")]
    assert len(noise) >= 4
    assert all(json.loads((CORPUS / f"{name}.json").read_text()) == {} for name in noise)


@pytest.mark.parametrize("name", NAMES)
def test_the_division_into_polls_does_not_matter(tmp_path: Path, name: str) -> None:
    data = (CORPUS / f"{name}.txt").read_bytes()
    path = tmp_path / "train.log"
    source, parts = StdoutSource(path), {}
    with path.open("ab", buffering=0) as file:
        for start in range(0, len(data), 97):
            file.write(data[start : start + 97])
            merge(parts, source.poll())
    merge(parts, source.poll(final=True))
    assert to_points(parts) == to_points(StdoutSource(CORPUS / f"{name}.txt").poll(final=True))
