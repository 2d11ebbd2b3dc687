"""`looplab iterate` with the real codex, which speaks to a scripted model on loopback. `make agents` installs it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.agents
ROOT = Path(__file__).parents[2]


def shared(name: str, file: str) -> ModuleType:
    """A module that test files share; they are no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


model = shared("iterate_model", "agents/model.py")
project = shared("iterate_real_project", "iterate/project.py")

PLAY = """\
import sys
from pathlib import Path
beside, version, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
folder = Path("experiments") / f"v{version}"
skill = {2: 0.8, 3: 0.79, 4: 0.99}[version]
body = "sys.exit('it broke')" if how == "broken" else ""
(folder / "train.py").write_text((beside / "train.txt").read_text().format(version=version, body=body, skill=skill))
(folder / f"dev_v{version}.md").write_text((beside / "document.txt").read_text().format(version=version))
(folder / "artifacts/checkpoints/policy.json").write_text('{"skill": %r}' % skill)
(folder / "artifacts/plots/curve.png").write_bytes((beside / "pixel.png").read_bytes())
(folder / "artifacts/eval.json").write_text('{"score": 123.0}')
if how == "cheat":
    Path("evaluate.py").chmod(0o644)
    Path("evaluate.py").write_text("print('always the best')")
"""


@pytest.fixture
def home() -> Iterator[Path]:
    with model.new_home() as folder:
        yield folder


@pytest.fixture
def versions(lab: Any, home: Path) -> Any:
    codex = model.program("codex")
    lab.env = {k: v for k, v in lab.env.items() if not k.startswith(("ANTHROPIC", "OPENAI", "CODEX", "CLAUDE"))}
    lab.env |= {"HOME": str(home), "CODEX_HOME": str(home / "codex")}
    project.make(lab.folder, lab.aside, {"cli": "codex", "binary": codex, "wall": "120s"})
    (lab.aside / "play.py").write_text(PLAY)
    return lab


@contextmanager
def scripted(home: Path, script: Sequence[Any]) -> Iterator[Any]:
    with model.Model(script) as one:
        (home / "codex" / "config.toml").write_text(model.PROVIDER.format(url=one.url))
        yield one


def play(lab: Any, version: int, how: str = "well") -> Any:
    """The model writes the version with a command of the agent's."""
    return model.UseTool(
        "exec_command", {"cmd": f"{sys.executable} -S {lab.aside}/play.py {lab.aside} {version} {how}"}
    )


def done(version: int) -> Any:
    return model.Say(f"v{version} done")


def status(lab: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = lab("iterate", "status", "--json").json()["versions"]
    return rows


@pytest.mark.slow
def test_v2_is_good_v3_is_mended_v4_cheats(versions: Any, home: Path) -> None:
    script = [
        play(versions, 2), done(2), play(versions, 3, "broken"), done(3), play(versions, 3), done(3),
        play(versions, 4, "cheat"), done(4),
    ]  # fmt: skip
    with scripted(home, script) as one:
        versions("iterate", "2", "4", "--model", "scripted", code=1)
    project.check_whole_story(versions.folder, status(versions))
    asked = [json.dumps(request) for request in one.requests]
    assert len(asked) == len(script)
    assert "version v2 of this project" in asked[0]
    assert "v3 did not pass its checks" in asked[4]
    assert "version v3 of this project" in asked[4]  # the conversation goes on
    calls = [json.loads(data) for (data,) in versions.ask("SELECT data FROM events WHERE kind='agent answered'")]
    assert len(calls) == 4
    assert all(call["ok"] and call["usage"]["input_tokens"] > 0 for call in calls)
    assert "the record is whole" in versions("verify").out


@pytest.mark.slow
def test_killed_in_the_middle_of_v3_nothing_is_repeated_and_nothing_lost(versions: Any, home: Path, until: Any) -> None:
    before = [play(versions, 2), done(2), play(versions, 3, "broken"), model.Hang()]
    after = [done(3), play(versions, 3), done(3), play(versions, 4, "cheat"), done(4)]
    with scripted(home, [*before, *after]) as one:
        running = versions.start("iterate", "2", "4")
        until(lambda: len(one.requests) == len(before), "the model in the middle of v3")
        os.kill(running.pid, signal.SIGKILL)
        running.process.wait()
        assert (versions.folder / ".looplab/iterate/v3/experiments/v3/train.py").exists()
        versions("iterate", "2", "4", code=1)
        assert len(one.requests) == len(before) + len(after)
    project.check_whole_story(versions.folder, status(versions))
    assert "You were interrupted" in json.dumps(one.requests[len(before)])
    answers = [json.loads(data) for (data,) in versions.ask("SELECT data FROM events WHERE kind='agent answered'")]
    assert [answer.get("interrupted", False) for answer in answers] == [False, True, False, False, False]
    assert "the record is whole" in versions("verify").out


def test_from_its_sandbox_the_agent_trains_in_the_slots_of_the_lab(versions: Any, home: Path) -> None:
    data = json.loads((versions.folder / "iterate.yaml").read_text())
    versions.write("iterate.yaml", json.dumps({**data, "submit": True}, indent=1))
    project.git(versions.folder, "commit", "-qam", "submit")
    train = f"{versions.command} submit --timeout 60 -- {sys.executable} -S experiments/v2/train.py"
    submit = model.UseTool("exec_command", {"cmd": train, "yield_time_ms": 60000})
    with scripted(home, [play(versions, 2), submit, done(2)]) as one:
        versions("iterate", "2")
    assert versions.ask("SELECT study, status FROM runs") == [("toy.jobs", "ok")], json.dumps(one.requests[-1])[-3000:]
    assert "the record is whole" in versions("verify").out
