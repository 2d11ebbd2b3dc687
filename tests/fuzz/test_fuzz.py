"""Hostile input of every kind that looplab reads: it is used, refused with a reason, or skipped; nothing else happens.

Each test starts from real files, which are changed byte by byte and piece by piece. What once went wrong is kept in
`corpus/`, by kind, and is tried first. An input that fails is written there as `found`, as small as hypothesis could
make it: rename it and commit it with the repair. `make storm` tries more examples, and others for each SEED.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from looplab.config.edits import apply_edits, parse_edit
from looplab.config.expression import compile_expression
from looplab.config.lab import load_lab
from looplab.decide.rules import read_rules
from looplab.errors import LabError
from looplab.measure.base import MetricSource
from looplab.measure.csv import CsvSource
from looplab.measure.jsonl import JsonlSource
from looplab.measure.stdout import StdoutSource
from looplab.measure.tensorboard import TensorBoardSource
from looplab.measure.wandb_log import WandbSource
from looplab.report.archive import is_archive

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
WORDS = [
    "", " ", "0", "-1", "1e999", "nan", "null", "true", "[]", "{}", "'", '"', ":", "- ", "*", "&a ", "*a", "!!python/none",
    "../..", "/etc/passwd", "\x00", "\x1b[2J", "\ud7ff", "𝛂", "\u202e", "@mul=2", "@del", "{config}", "{}", "%", "|", "9" * 400,
    "[" * 300, "__import__('os')", "a.b.*.c", "\\", "\n", "\t", "\r\n", "---\n", "? ", "<<: ", "#",
]  # fmt: skip
"""Pieces that parsers stumble over."""
LABS = sorted(path.read_text() for path in (ROOT / "src/looplab/recipes").glob("*/lab.yaml"))
RULES = sorted(path.read_text() for path in (ROOT / "src/looplab/recipes").glob("*/rules.yaml"))
EDITS = ["train.lr@mul=0.5", "features.*.weight@set=0.1", "layers@append=64", "a.b@del", "name@set='x y'", "n@max=3"]
EXPRESSIONS = [
    "step >= 300 and train.loss > 10", "all(f.weight > 0 for f in features)", "ceil_to(a, b) if c else -d ** 2",
    "'eval-logloss' < 0.4", "min(a, b) in (1, 2)", "clamp(x, 0, 1) == `y`",
]  # fmt: skip


def kept(kind: str) -> list[bytes]:
    """What once went wrong."""
    return [path.read_bytes() for path in sorted((CORPUS / kind).glob("*"))]


@contextlib.contextmanager
def keeping(kind: str, data: bytes | str, corpus: Path = CORPUS) -> Iterator[None]:
    """Write an input that fails to the corpus; hypothesis tries the smallest one last, so that one remains."""
    try:
        yield
    except Exception:
        (corpus / kind).mkdir(parents=True, exist_ok=True)
        (corpus / kind / "found").write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "replace"))
        raise


def test_an_input_that_fails_is_kept_as_small_as_possible(tmp_path: Path) -> None:
    @given(st.text())
    @settings(max_examples=200)
    def attempt(text: str) -> None:
        with keeping("lab", text, tmp_path):
            assert len(text) < 3

    with pytest.raises(AssertionError):
        attempt()
    assert len((tmp_path / "lab" / "found").read_text()) == 3


@st.composite
def changed_text(draw: Any, seeds: list[str]) -> str:
    """A real text with pieces cut out, repeated, moved and replaced."""
    text = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        a, b = sorted(draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
        b = min(b, a + draw(st.integers(0, 40)))
        piece = draw(st.sampled_from(WORDS) | st.text(max_size=6) | st.just(text[a:b] * 2))
        text = text[:a] + piece + text[b:]
    return text


@st.composite
def changed_bytes(draw: Any, seeds: list[bytes]) -> bytes:
    """A real file with bytes changed, cut out, repeated or cut off; lengths in it become large."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "cut", "off", "repeat", "length", "insert"])):
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at : at + draw(st.integers(1, 200))]
            case "off":
                del data[at:]
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 300))]
            case "length":
                data[at : at + 8] = struct.pack(
                    "<Q", draw(st.sampled_from([0, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1]))
                )
            case "insert":
                data[at:at] = draw(st.binary(max_size=20))
    return bytes(data)


# -- what people write


def try_lab(text: str, folder: Path) -> None:
    (folder / "lab.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        assert load_lab(folder).studies
    except LabError as error:
        assert str(error).strip()


@given(changed_text(LABS))
def test_a_lab_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "lab"
    folder.mkdir(exist_ok=True)
    for one in [*(data.decode() for data in kept("lab")), text]:
        with keeping("lab", one):
            try_lab(one, folder)


@given(changed_text(RULES))
def test_rules_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "rules.yaml"
    for one in [*kept("rules"), text.encode("utf-8", "surrogatepass")]:
        path.write_bytes(one)
        with keeping("rules", one):
            try:
                read_rules(path)
            except LabError as error:
                assert str(error).strip()


@given(changed_text(EXPRESSIONS))
def test_an_expression_is_compiled_or_refused(text: str) -> None:
    for one in [*(data.decode() for data in kept("expression")), text]:
        with keeping("expression", one):
            try:
                compile_expression(one)
            except LabError as error:
                assert str(error).strip()


class Config(RuleBasedStateMachine):
    """A config that edits change, one after the other. It stays plain JSON, and no refused edit changes it."""

    @initialize()
    def start(self) -> None:
        self.config: Any = {
            "train": {"lr": 0.1, "steps": 100}, "features": [{"weight": 1.0}, {"weight": 2}], "layers": [64], "n": 3,
            "name": "a", "a": {"b": None},
        }  # fmt: skip
        self.edits: list[str] = []

    @rule(text=changed_text(EDITS))
    def edit(self, text: str) -> None:
        self.edits.append(text)
        with keeping("edits", json.dumps(self.edits)):
            self.apply(text)
            self.is_json()

    def apply(self, text: str) -> None:
        before = json.dumps(self.config)
        try:
            applied = apply_edits(self.config, [parse_edit(text)])
        except LabError as error:
            assert str(error).strip()
        else:
            assert json.dumps(self.config) == before, "the given config is never changed"
            if len(json.dumps(applied.config)) < 20_000:
                self.config = applied.config

    @rule(texts=st.lists(st.sampled_from(EDITS), min_size=1, max_size=3))
    def edit_together(self, texts: list[str]) -> None:
        try:
            self.config = apply_edits(self.config, texts).config
        except LabError as error:
            assert str(error).strip()

    @invariant()
    def is_json(self) -> None:
        config = getattr(self, "config", {})
        assert json.loads(json.dumps(config, allow_nan=False)) == config


Config.TestCase.settings = settings(stateful_step_count=15)
TestConfig = Config.TestCase


@pytest.mark.parametrize("edits", [json.loads(data) for data in kept("edits")])
def test_edits_that_once_went_wrong_are_applied_or_refused(edits: list[str]) -> None:
    config = Config()
    config.start()
    for text in edits:
        config.apply(text)
        config.is_json()


# -- what trainers and other tools leave behind


def wandb_seeds() -> list[bytes]:
    return [path.read_bytes()[:20_000] for path in sorted((ROOT / "tests/measure/data").glob("*.wandb"))]


def event_seeds() -> list[bytes]:
    """Event files as TensorBoard writes them: length, masked CRC, an event, masked CRC."""
    tensorboardx = pytest.importorskip("tensorboardX")
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        with tensorboardx.SummaryWriter(folder) as writer:
            for step in range(20):
                writer.add_scalar("train/loss", 1 / (step + 1), step)
                writer.add_text("note", "x" * step, step)
        return [path.read_bytes() for path in Path(folder).iterdir()]


def text_seeds() -> list[bytes]:
    rows = b"".join(b'{"step": %d, "loss": 0.%d, "note": "a"}\n' % (i, i) for i in range(20))
    return [rows, b"step,loss,acc\n1,0.5,\n2,nan,0.1\n", b"epoch 1: loss 0.5 val_loss=0.3\n| a/ |  |\n|  b | 1e3 |\n"]


SOURCES: dict[str, tuple[Callable[[Path], MetricSource], Callable[[], list[bytes]]]] = {
    "wandb": (WandbSource, wandb_seeds),
    "tfevents": (TensorBoardSource, event_seeds),
    "jsonl": (JsonlSource, text_seeds),
    "csv": (CsvSource, text_seeds),
    "log": (StdoutSource, text_seeds),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_damaged_file_of_metrics_is_read_as_far_as_it_goes(kind: str, tmp_path: Path) -> None:
    """Whole at once, or growing in two parts: the reader ends, and returns numbers."""
    make, seeds = SOURCES[kind]
    path = tmp_path / f"metrics.{kind}"

    def read(data: bytes, middle: int) -> None:
        path.unlink(missing_ok=True)
        path.write_bytes(data[:middle])
        source = make(path)
        for part in (b"", data[middle:]):
            with path.open("ab") as file:
                file.write(part)
            for _ in range(50):
                try:
                    batch = source.poll()
                except LabError:
                    return  # a reason for people; the run keeps its status
                if not batch:
                    break
                for curve in batch.values():
                    assert len(curve.steps) == len(curve.values)
                    assert all(isinstance(value, float | int) for value in curve.values)

    @given(changed_bytes(seeds()), st.integers(0, 2**16))
    @settings(max_examples=max(10, settings.default.max_examples // 2))  # type: ignore[union-attr]
    def attempt(data: bytes, middle: int) -> None:
        with keeping(kind, data):
            read(data, middle % (len(data) + 1))

    for data in kept(kind):
        read(data, len(data) // 2)
    attempt()


def parquet_seed(folder: Path) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "seed.parquet"
    pq.write_table(pa.table({"metric": ["loss", "acc"], "step": [1.0, 2.0], "value": [0.5, 0.1]}), path)
    return path.read_bytes()


def test_a_damaged_archive_is_recognised_or_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.parquet"

    @given(changed_bytes([parquet_seed(tmp_path)]))
    def attempt(data: bytes) -> None:
        path.write_bytes(data)
        with keeping("parquet", data):
            assert is_archive(path) in (True, False)

    for data in kept("parquet"):
        path.write_bytes(data)
        assert is_archive(path) in (True, False)
    attempt()


# -- what a browser sends


def test_the_page_answers_every_request_without_a_fault(tmp_path: Path) -> None:
    starlette = pytest.importorskip("starlette.testclient")
    from looplab.cli.labs import find_study
    from looplab.cli.page_control import LabSteering
    from looplab.ledger.ledger import Ledger
    from looplab.ledger.plan import RunPlan
    from looplab.ledger.study import StudyLedger
    from looplab.loop.lock import engine_pid
    from looplab.pipeline.overview import pipelines_of
    from looplab.ui.model import LabModel
    from looplab.ui.security import AccessRules
    from looplab.ui.server import PageHooks, PageServer

    lab = tmp_path / "lab"
    shutil.copytree(ROOT / "src/looplab/recipes/quickstart", lab, ignore=shutil.ignore_patterns("__pycache__"))
    ledger = Ledger(load_lab(lab).claim_ledger())
    study = StudyLedger(ledger, "digits")
    study.open("val/accuracy", "max")
    with ledger.write():
        study.begin_round()
        for number in range(3):
            run = study.plan(
                round=1, proposal=None, proposer="queue", parent=None, base="configs/baseline.json", reason="a reason",
                config_hash=f"{number:016x}", devices=1, plan=RunPlan({}),
            )  # fmt: skip
            study.ended(run.id, status="ok", code=0, signal=None, started=1e9, ended=1e9 + 1, objective=0.5, files={})
    ledger.close()
    access = AccessRules.make("a-token", 8000, host="127.0.0.1", names=[], control=True)
    model = LabModel(load_lab(lab), find_study=find_study, engine_pid=engine_pid)
    server = PageServer(model, access, PageHooks(pipelines_of, LabSteering(lab)))
    names = [route.path.removeprefix("/api/") for route in server.app.routes if route.path.startswith("/api/")]
    assert {"lab", "run", "record", "log", "file"} <= {*names}
    keys = [
        "study",
        "run",
        "name",
        "path",
        "after",
        "since",
        "seq",
        "metric",
        "metrics",
        "from",
        "to",
        "limit",
        "edits",
        "q",
    ]
    values = st.sampled_from(
        [*WORDS, "digits", "LATEST", "1", run.id, f"{run.id},1", "lab.yaml", "record/run.json"]
    ) | st.text(max_size=8)
    query = st.dictionaries(st.sampled_from(keys), values, max_size=4)
    body = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | values,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*keys, "action"]), inner, max_size=4)
        ),
        max_leaves=6,
    )
    trusted = {"origin": "http://localhost", "x-looplab-control": access.control_token}
    before = (lab / "lab.yaml").read_bytes()
    with starlette.TestClient(
        server.asgi, base_url="http://localhost", headers={"x-looplab-token": "a-token"}, raise_server_exceptions=True
    ) as client:

        def ask(name: str, query: dict[str, str], body: Any, post: bool) -> None:
            query = {key: value.encode("utf-8", "replace").decode() for key, value in query.items()}
            if post:
                text = json.dumps(body).encode("utf-8", "replace")
                answer = client.post(
                    "/api/control", content=text, headers={**trusted, "content-type": "application/json"}
                )
            else:
                answer = client.get(f"/api/{name}", params=query)
            assert answer.status_code < 500, (name, query, body, answer.text)

        @given(st.sampled_from(names), query, body, st.booleans())
        def attempt(name: str, query: dict[str, str], body: Any, post: bool) -> None:
            with keeping("page", json.dumps([name, query, body, post])):
                ask(name, query, body, post)

        for data in kept("page"):
            ask(*json.loads(data))
        attempt()
    assert (lab / "lab.yaml").read_bytes() == before
