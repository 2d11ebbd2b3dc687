"""Every plug-in of the example passes the contract of its kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from looplab_example.agent import ParrotAdapter
from looplab_example.alert import FileAlert
from looplab_example.condition import JumpCondition
from looplab_example.executor import ListingExecutor
from looplab_example.proposer import HalvingProposer
from looplab_example.reader import DefineReader
from looplab_example.sampler import HillClimbSampler
from looplab_example.source import TsvSource

from looplab.launch.base import ExecutorContext
from looplab.testing import (
    AgentContract,
    AlertContract,
    ConditionContract,
    ExecutorContract,
    ProposerContract,
    ReaderContract,
    SamplerContract,
    SourceContract,
)


class TestTsv(SourceContract):
    detects_damage = False

    def open_source(self, path: Path) -> TsvSource:
        return TsvSource(path)

    def encode(self, rows: list[dict[str, float]]) -> list[bytes]:
        names = ["step", "loss", "acc"]
        lines = ["\t".join(str(row.get(name, "")) for name in names) + "\n" for row in rows]
        head = "\t".join(names) + "\n"
        return [text.encode() for text in ([head + lines[0], *lines[1:]] if lines else [head])]


class TestHalving(ProposerContract):
    name = "halving"

    def make_proposer(self, context: Any) -> HalvingProposer:
        return HalvingProposer(context, knob="x")


class TestHill(SamplerContract):
    def make_sampler(self, seed: int, **options: Any) -> HillClimbSampler:
        return HillClimbSampler(seed, **options)


class TestListing(ExecutorContract):
    @pytest.fixture(autouse=True)
    def _lab(self, tmp_path: Path) -> None:
        self.lab = tmp_path

    def make_executor(self) -> ListingExecutor:
        return ListingExecutor(ExecutorContext(self.lab, "study"))


class TestJump(ConditionContract):
    matching = {"loss": [1.0, 0.9, 0.8, 5.0, 0.7]}  # noqa: RUF012
    harmless = {"loss": [1.0, 0.9, 0.8, 0.7]}  # noqa: RUF012

    def make_condition(self, context: Any) -> JumpCondition:
        return JumpCondition(context)


class TestFile(AlertContract):
    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "alarms.txt"

    def make_alert(self) -> FileAlert:
        return FileAlert(str(self.path))

    def received(self) -> list[str]:
        return self.path.read_text().splitlines()


class TestParrot(AgentContract):
    stream = (json.dumps({"say": "hello"}), json.dumps({"done": True, "tokens": 3}))

    def make_adapter(self) -> ParrotAdapter:
        return ParrotAdapter()


TRAIN = """
import json, sys
DEFAULTS = {"lr": 0.1, "hidden": 32, "nesterov": False, "seed": 0}
settings = dict(DEFAULTS)
for word in sys.argv[1:]:
    if word.startswith('-D'):
        key, _, text = word[2:].partition('=')
        settings[key] = type(DEFAULTS[key])(text == 'True' if isinstance(DEFAULTS[key], bool) else text)
print(json.dumps(settings))
"""


class TestDefine(ReaderContract):
    files = {"train.py": TRAIN}  # noqa: RUF012
    changes = {"lr": 0.5, "hidden": 64, "nesterov": True}  # noqa: RUF012

    def make_reader(self) -> DefineReader:
        return DefineReader()

    def printed(self, text: str) -> dict[str, Any]:
        return json.loads(text)
