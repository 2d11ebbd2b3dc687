"""`looplab iterate` as a user runs it: a scripted agent writes v2, breaks and mends v3, and cheats in v4."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

_spec = importlib.util.spec_from_file_location("iterate_project", Path(__file__).parents[1] / "iterate/project.py")
assert _spec is not None
assert _spec.loader is not None
project = importlib.util.module_from_spec(_spec)
sys.modules["iterate_project"] = project
_spec.loader.exec_module(project)

STORY = ["v2", "v3", "v3 again", "v4"]


@pytest.fixture
def versions(lab: Any) -> Any:
    """The lab as a project with versions, in git."""
    project.make(lab.folder, lab.aside)
    return lab


def status(lab: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = lab("iterate", "status", "--json").json()["versions"]
    return rows


def calls(lab: Any) -> list[str]:
    return project.lines(lab.aside / "calls")


@pytest.mark.slow
def test_good_versions_are_merged_a_broken_one_is_mended_and_a_cheat_is_void(versions: Any) -> None:
    done = versions("iterate", "2", "4", code=1)
    assert calls(versions) == STORY
    project.check_whole_story(versions.folder, status(versions))
    assert "it broke" in (versions.aside / "prompt-v3-again").read_text()
    assert "v4 void: evaluate.py was changed (kept as looplab/v4-failed-1)" in done.out
    assert project.lines(versions.aside / "evaluations") == ["v1", "v2", "v3"]
    assert "the record is whole" in versions("verify").out
    shown = versions("status", "--json").json()["versions"]
    assert [(one["version"], one["state"], one["champion"]) for one in shown][1:] == [
        (2, "merged", 1), (3, "merged", 0), (4, "void", 0),
    ]  # fmt: skip
    assert re.search(r"v2 \*\s+merged\s+\S+ 0\.8\d+\s+keep", versions("status").out)
    table = versions("iterate", "status").out
    assert re.search(r"v2 \*\s+merged\s+1\s+7 ok, 1 warning\s+0\.8\d+ \[0\.8\d*, 0\.8\d+\]\s+keep\s+looplab/v2", table)
    assert "4 agent calls" in table
    versions("tour")
    check_tour((versions.folder / "outputs/tour.html").read_text())


def check_tour(page: str) -> None:
    """One page over all versions, which needs nothing else and shows what agents wrote as text."""
    for word in ("v2: 0.8341, keep", "evaluate.py was changed", "data:image/png;base64,", "train.py against v1"):
        assert word in page, word
    assert "Skill &lt;b&gt;helps&lt;/b&gt; in v3." in page
    assert "<script" not in page
    assert "default-src 'none'" in page
    assert not re.search(r"(?:src|href)=\"(?!data:)", page)


@pytest.mark.slow
def test_a_version_that_is_there_is_not_made_again_and_a_failed_one_is_tried_anew(versions: Any) -> None:
    versions("iterate", "2", "4", code=1)
    versions("iterate", "2", "4", code=1)
    assert calls(versions) == [*STORY, "v4"]
    assert {"looplab/v4-failed-1", "looplab/v4-failed-2"} <= set(project.branches(versions.folder))
    assert versions("iterate", "2", "3").code == 0
    assert calls(versions) == [*STORY, "v4"]


def kill_at(lab: Any, until: Any, mark: str) -> None:
    """SIGKILL of looplab alone when the story has come to this point."""
    (lab.aside / f"hold-{mark}").touch()
    running = lab.start("iterate", "2", "4")
    until((lab.aside / f"at-{mark}").exists, f"{mark}")
    os.kill(running.pid, signal.SIGKILL)
    running.process.wait()


def at_work(pid: str) -> bool:
    """Whether a process is there, and not only waits for somebody to notice its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_killed_while_the_agent_works_the_same_command_lets_it_go_on(versions: Any, until: Any) -> None:
    agent, hold = versions.aside / "agent.py", versions.aside / "hold-v3"
    stubborn = "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    pid = '(beside / f"pid-{interrupted}").write_text(str(os.getpid()))\n'
    agent.write_text(stubborn + agent.read_text().replace("skill =", f"{pid}skill =", 1))
    kill_at(versions, until, "v3")
    old = (versions.aside / "pid-False").read_text()
    assert status(versions)[-1]["state"] == "agent running"
    running = versions.start("iterate", "2", "4")
    until((versions.aside / "pid-True").exists, "the agent, asked again")
    assert not at_work(old)  # two must not write in one worktree
    hold.unlink()
    running.ended(1)
    assert calls(versions) == ["v2", "v3 after an interruption", "v3 again", "v4"]
    project.check_whole_story(versions.folder, status(versions))
    assert "the record is whole" in versions("verify").out


@pytest.mark.slow
def test_killed_while_the_gates_look_nothing_is_asked_again(versions: Any, until: Any) -> None:
    kill_at(versions, until, "smoke")
    (versions.aside / "hold-smoke").unlink()
    assert calls(versions) == ["v2", "v3", "v3 again"]
    versions("iterate", "2", "4", code=1)
    assert calls(versions) == STORY
    project.check_whole_story(versions.folder, status(versions))
    assert "the record is whole" in versions("verify").out


def test_only_one_at_a_time(versions: Any, until: Any) -> None:
    (versions.aside / "hold-v2").touch()
    running = versions.start("iterate", "2")
    until((versions.aside / "at-v2").exists, "v2")
    assert "already" in versions("iterate", "2", code=3).err
    (versions.aside / "hold-v2").unlink()
    running.ended()
    assert calls(versions) == ["v2"]


def test_after_a_failure_the_range_goes_on_if_asked_to(versions: Any) -> None:
    versions("iterate", "3", "5", "--retries", "0", "--continue-on-failure", code=1)
    rows = status(versions)
    assert [(row["version"], row["state"]) for row in rows] == [
        (1, "baseline"),
        (3, "failed"),
        (4, "void"),
        (5, "merged"),
    ]
    assert rows[1]["gates"]["smoke"] == "failed"
    assert rows[1]["branch"] == "looplab/v3-failed-1"
    assert "experiments/v1/dev_v1.md" in (versions.aside / "prompt-v5").read_text()  # the newest that is there
    kept = versions.folder / ".looplab/iterate/v3-failed-1/experiments/v3/artifacts/checkpoints/policy.json"
    assert kept.exists()  # git ignores it, so no branch has it


def test_work_in_the_lab_meanwhile_ends_in_a_merge(versions: Any, until: Any) -> None:
    (versions.aside / "hold-v2").touch()
    running = versions.start("iterate", "2")
    until((versions.aside / "at-v2").exists, "v2")
    versions.write("notes.md", "of a person\n")
    project.git(versions.folder, "add", "notes.md")
    project.git(versions.folder, "commit", "-q", "-m", "notes")
    (versions.aside / "hold-v2").unlink()
    running.ended()
    assert len(project.git(versions.folder, "log", "-1", "--format=%P").split()) == 2
    assert (versions.folder / "notes.md").exists()
    assert (versions.folder / "experiments/v2/train.py").exists()


def test_what_is_not_committed_is_told_before_anything_is_begun(versions: Any) -> None:
    versions.write("evaluate.py", project.EVALUATE + "# better\n")
    err = versions("iterate", "2", code=2).err
    assert "not committed" in err
    assert "evaluate.py" in err
    assert calls(versions) == []
    project.git(versions.folder, "commit", "-qam", "better")
    versions("iterate", "2")
    assert calls(versions) == ["v2"]


def test_mistakes_are_told(versions: Any) -> None:
    assert "the last version (2) is before the first (3)" in versions("iterate", "3", "2", code=2).err
    assert "no agent 'bard'" in versions("iterate", "2", "--agent", "bard", code=2).err
    assert "there are no versions yet" in versions("tour", code=2).err
    assert "experiments/v1 already exists" in versions("iterate", "1", code=2).err


def test_folders_come_from_the_environment_and_arguments_reach_the_agent(versions: Any, tmp_path: Path) -> None:
    env = {"LOOPLAB_WORKDIR": str(versions.folder), "LOOPLAB_RUN_LOG_DIR": "codex_runs"}
    versions("iterate", "2", "--", "--search", cwd=tmp_path, env=env)
    (log,) = (versions.folder / "codex_runs").glob("*.jsonl")
    assert re.fullmatch(r"v1-to-v2-\d{8}-\d{6}\.jsonl", log.name)
    assert json.loads(log.read_text().splitlines()[0])["argv"][-1] == "--search"
    assert "v2 done" in versions("agent-log", "--only", "final").out


def test_the_agent_trains_through_the_slots_of_the_lab(versions: Any) -> None:
    data = json.loads((versions.folder / "iterate.yaml").read_text())
    agent = versions.aside / "agent.py"
    more = f'subprocess.run(["{versions.command}", "submit", "--", sys.executable, "-S", str(folder / "train.py")], check=True)\n'
    agent.write_text(agent.read_text().replace("if version == 4:", f"{more}if version == 4:", 1))
    versions.write("iterate.yaml", json.dumps({**data, "submit": True}, indent=1))
    project.git(versions.folder, "commit", "-qam", "submit")
    versions("iterate", "2")
    assert versions.ask("SELECT study, status FROM runs") == [("toy.jobs", "ok")]
    assert "looplab submit" in (versions.aside / "prompt-v2").read_text()
    assert "the record is whole" in versions("verify").out


LATE = """
import time
if "--smoke" not in sys.argv:
    time.sleep(3)
"""


def test_a_version_is_not_judged_while_it_trains(versions: Any) -> None:
    """The agent ends before its training does, in a shell that does not know `python`."""
    agent = versions.aside / "agent.py"
    more = f"""
body = {LATE!r}
(folder / "train.py").write_text((beside / "train.txt").read_text().format(version=version, body=body, skill=skill))
(folder / "artifacts/checkpoints/policy.json").unlink()
submit = ["{versions.command}", "submit", "--detach", "--", "python", "-S", str(folder / "train.py")]
subprocess.run(submit, check=True, env={{"PATH": "/nowhere", "HOME": "/"}})
"""
    agent.write_text(agent.read_text().replace("if version == 4:", f"{more}if version == 4:", 1))
    data = json.loads((versions.folder / "iterate.yaml").read_text())
    trained = {"submit": True, "trained": ["artifacts/checkpoints/*"]}
    versions.write("iterate.yaml", json.dumps({**data, **trained}, indent=1))
    project.git(versions.folder, "commit", "-qam", "submit")
    done = versions("iterate", "2")
    assert "waiting for 1 training(s) it submitted" in done.out
    assert "v2: merged" in done.out
    assert versions.ask("SELECT study, status FROM runs") == [("toy.jobs", "ok")]
    idle = agent.read_text().replace("subprocess.run(submit", "0 and subprocess.run(submit")
    copy = "import shutil; shutil.copy('experiments/v2/artifacts/checkpoints/policy.json', folder / 'artifacts/checkpoints')\n"
    agent.write_text(idle.replace("if version == 4:", f"{copy}if version == 4:", 1))
    assert "nothing was submitted" in versions("iterate", "3", "--retries", "0", code=1).out
