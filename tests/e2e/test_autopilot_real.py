"""The whole autopilot with the real codex and the real claude, which speak to a scripted model on loopback.

`make agents` installs them. No account, no network, a clean environment.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.agents
ROOT = Path(__file__).parents[2]

_spec = importlib.util.spec_from_file_location("scripted_model", ROOT / "tests/agents/model.py")
assert _spec is not None
assert _spec.loader is not None
model = importlib.util.module_from_spec(_spec)
sys.modules["scripted_model"] = model
_spec.loader.exec_module(model)


@pytest.fixture
def home() -> Iterator[Path]:
    with model.new_home() as folder:
        yield folder


def pilot(
    lab: Any, home: Path, cli: str, script: Sequence[Any], *args: str, wrapper: Sequence[str] = (), **settings: Any
) -> Any:
    with model.Model(script) as scripted:
        environ = {"HOME": str(home), "CODEX_HOME": str(home / "codex")}
        named: list[str] = []
        if cli == "codex":
            (home / "codex" / "config.toml").write_text(model.PROVIDER.format(url=scripted.url))
        else:
            given = {
                "ANTHROPIC_BASE_URL": scripted.url,
                "ANTHROPIC_API_KEY": "not-a-real-key",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "CLAUDE_CODE_MAX_RETRIES": "0",
            }
            environ |= given
            named = list(given)
        lab.env = {
            key: value
            for key, value in lab.env.items()
            if not key.startswith(("ANTHROPIC", "OPENAI", "CODEX", "CLAUDE"))
        }
        agent = {"cli": cli, "binary": model.program(cli), "env": named, "wall": "60s", "tries": 2, **settings}
        lab.configure(proposers=[{"agent": agent}], constraints=["train.batch % 2 == 0"])
        done = lab.start("autopilot", *args, env=environ, wrapper=wrapper).ended()
        return done, scripted


def write(cli: str, lab: Any, answer: Any) -> Any:
    """The model writes the answer's file with the agent's own tool."""
    text = json.dumps(answer)
    if cli == "codex":
        return model.UseTool("exec_command", {"cmd": f"printf '%s' '{text}' > next_config.json"})
    return model.UseTool("Write", {"file_path": str(lab.folder / "proposals/next_config.json"), "content": text})


def say(cli: str, answer: Any) -> Any:
    """The final message, in the form that the schema asks for: claude has a tool for it."""
    return model.Say(json.dumps(answer)) if cli == "codex" else model.UseTool("StructuredOutput", answer)


def done_by(cli: str) -> Any:
    """It has written the file, and says no more than it must."""
    return say(cli, {"proposals": []})


def proposal(*edits: str) -> dict[str, Any]:
    words = {"reason": "seen in the curves", "hypothesis": "it falls", "parent": ""}
    return {"proposals": [{"edits": list(edits), "region": [], **words}]}


both = pytest.mark.parametrize("cli", ["codex", "claude"])


@pytest.mark.slow
@both
def test_good_refused_and_forbidden_proposals_and_a_rate_limit(lab: Any, home: Path, cli: str) -> None:
    done, scripted = pilot(
        lab, home, cli,
        [
            write(cli, lab, proposal("train.lr@set=0.2")), done_by(cli),
            write(cli, lab, proposal("train.batch@set=33")), done_by(cli),  # breaks the constraint
            write(cli, lab, {"train": {"batch": 34}}), done_by(cli),
            model.Refuse(),  # 429
            write(cli, lab, proposal("train.optimiser@set=adam")), done_by(cli),  # outside of the list
            write(cli, lab, proposal("train.lr@set=0.3")), done_by(cli),
        ],
        "--runs", "3",
    )  # fmt: skip
    assert [config["train"] for config in lab.all("config.json")] == [
        {"lr": 0.1, "batch": 32}, {"lr": 0.2, "batch": 32}, {"lr": 0.2, "batch": 34}, {"lr": 0.3, "batch": 32},  # from the best, which is the second
    ]  # fmt: skip
    refused = lab.ask("SELECT edits, problems FROM proposals WHERE status='rejected'")
    assert len(refused) == 2
    assert "train.optimiser" in refused[1][1]
    asked = [str(request) for request in scripted.requests]
    assert any("could not be used" in text and "train.batch % 2 == 0" in text for text in asked)
    assert done.code == 0
    assert len(list((lab.folder / "agent_runs").glob("*.jsonl"))) == 5
    spent = lab.ask("SELECT data FROM events WHERE kind='agent answered'")
    assert all(json.loads(data)["usage"]["input_tokens"] > 0 for (data,) in spent)
    assert "proposals" in lab("agent-log", "--only", "final").out
    assert lab("verify").code == 0


@pytest.mark.slow
@both
def test_a_call_that_hangs_is_killed_at_its_limit_and_the_study_ends_well(lab: Any, home: Path, cli: str) -> None:
    done, _ = pilot(lab, home, cli, [model.Hang()], "--runs", "1", wall="6s", call_retries=0)
    assert "wall limit" in done.out
    assert [about["proposer"] for about in lab.all("run.json")] == ["base", "search"]


@pytest.mark.slow
@both
def test_a_repeat_and_another_seed_go_back_to_the_agent(lab: Any, home: Path, cli: str) -> None:
    lab.base(seed=1)
    lab.configure(knobs={**lab.study["knobs"], "seed": {"type": "int"}})
    answers = [proposal("train.lr@set=0.2"), proposal("seed@set=7"), proposal("train.lr@set=0.2", "seed@set=1")]
    answers[2]["proposals"][0]["parent"] = "base"
    script = [say(cli, answer) for answer in (*answers, proposal("train.lr@set=0.4"))]
    _, scripted = pilot(lab, home, cli, script, "--runs", "2", tries=3)
    assert [config["train"]["lr"] for config in lab.all("config.json")] == [0.1, 0.2, 0.4]
    first = lab.runs()[1].name
    asked = "\n".join(str(request) for request in scripted.requests)
    assert f"only the seed differs from run {first}" in asked
    assert f"an exact repeat of run {first}" in asked


@both
def test_the_final_message_is_an_answer_too(lab: Any, home: Path, cli: str) -> None:
    pilot(lab, home, cli, [say(cli, proposal("train.lr@set=0.25"))], "--runs", "1")
    assert lab.all("config.json")[1]["train"]["lr"] == 0.25


# -- writing outside its folder


def outside(cli: str, lab: Any) -> list[Any]:
    """The model tries to change the trainer, the lab file, BEST, a recorded run and a file outside the lab."""
    paths = [
        lab.folder / "train.py",
        lab.folder / "lab.yaml",
        lab.outputs() / "BEST",
        lab.folder.parent / "outside.txt",
    ]
    if cli == "codex":
        patch = (
            "*** Begin Patch\n*** Update File: ../train.py\n@@\n-import json, os, sys, time\n+import os\n*** End Patch"
        )
        steps = [f"echo '# changed' >> {path}" for path in paths]
        steps += ["echo '# changed' >> ../train.py", "rm ../lab.yaml", f"apply_patch <<'EOF'\n{patch}\nEOF"]
        return [model.UseTool("exec_command", {"cmd": step}) for step in steps]
    steps = []
    for path in paths:
        steps.append(model.UseTool("Read", {"file_path": str(path)}))
        steps.append(model.UseTool("Write", {"file_path": str(path), "content": "changed"}))
    edit = {"file_path": str(paths[0]), "old_string": "import json, os, sys, time", "new_string": "import os"}
    bash = {"command": f"echo changed >> {paths[0]}", "description": "x"}
    return [*steps, model.UseTool("Edit", edit), model.UseTool("Bash", bash)]


@pytest.mark.slow
@pytest.mark.parametrize("landlock", [True, False])
@both
def test_nothing_outside_its_folder_is_changed_and_its_answer_counts(
    lab: Any, home: Path, cli: str, landlock: bool
) -> None:
    # The lab is below the temporary folder, where codex's sandbox would let it write by default.
    lab("run")
    before = {name: (lab.folder / name).read_bytes() for name in ("train.py", "outputs/toy/BEST")}
    temporary = [model.UseTool("exec_command", {"cmd": "mktemp && echo 1 > $(mktemp) && echo made"})]
    steps = [*outside(cli, lab), *(temporary if cli == "codex" else [])]
    wrapper = () if landlock else (sys.executable, str(ROOT / "tests/no_landlock.py"))
    script = [*steps, write(cli, lab, proposal("train.lr@set=0.2")), done_by(cli)]
    done, scripted = pilot(lab, home, cli, script, "--runs", "1", wrapper=wrapper)
    assert not scripted.script  # all of it was tried
    assert [config["train"]["lr"] for config in lab.all("config.json")] == [0.1, 0.2]
    assert (lab.folder / "train.py").read_bytes() == before["train.py"]
    assert not (lab.folder.parent / "outside.txt").exists()
    assert "toy" in (lab.folder / "lab.yaml").read_text()
    assert not lab.ask("SELECT 1 FROM events WHERE kind IN ('files changed', 'alarm')")  # not even for a moment
    if cli == "codex":
        assert "made" in str(scripted.requests[-1])
    elif not landlock:
        assert "NOT confined" in done.out
    assert lab("verify").code == 0
