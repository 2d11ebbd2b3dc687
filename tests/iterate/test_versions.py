"""Single versions, in this process: what an agent may try, and what may change outside."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from looplab.agents.confine import COMPLETE, landlock_version
from looplab.errors import LabError
from looplab.iterate import settings as reading
from looplab.iterate.record import VersionHistory, VersionLedger
from looplab.iterate.versions import IterateOptions, Iteration
from looplab.ledger.catalogue import AgentAskedEvent, IterateBeganEvent, VersionBegunEvent
from looplab.ledger.ledger import Ledger

_spec = importlib.util.spec_from_file_location("versions_project", Path(__file__).with_name("project.py"))
assert _spec is not None
assert _spec.loader is not None
project = importlib.util.module_from_spec(_spec)
sys.modules["versions_project"] = project
_spec.loader.exec_module(project)


class Lab:
    def __init__(self, root: Path, below: str = "lab") -> None:
        self.beside = root / "beside"
        self.folder = project.make(root / below, self.beside)
        self.told: list[str] = []

    def change(self, **more: object) -> None:
        """Change the settings."""
        path = self.folder / "iterate.yaml"
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}, indent=1))
        project.git(self.folder, "commit", "-qam", "settings")

    def agent(self, more: str) -> None:
        """Append code to the agent's script."""
        path = self.beside / "agent.py"
        path.write_text(path.read_text() + more)

    def free_agent(self, more: str) -> None:
        """Append code to the script of an agent that may write anywhere."""
        self.agent(more)
        settings = json.loads((self.folder / "iterate.yaml").read_text())
        self.change(agent={**settings["agent"], "dangerous": True})

    def go(self, start: int, end: int | None = None, retries: int = 1) -> VersionHistory:
        settings = reading.load(self.folder, {})
        ledger = VersionLedger(Ledger(self.folder / ".looplab/ledger.db"))
        spec = reading.make_spec(settings.agent, reading.Flags())
        limits = reading.limits_of(settings.agent)
        Iteration(self.folder, settings, ledger, spec, limits, IterateOptions(retries), self.told.append).run(
            start, end or start
        )
        return ledger.history()

    @property
    def calls(self) -> list[str]:
        found: list[str] = project.lines(self.beside / "calls")
        return found


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def last(history: VersionHistory, version: int = 2) -> tuple[str | None, str]:
    attempt = history.last(version)
    assert attempt is not None
    return attempt.end, attempt.why


HIDDEN = """
subprocess.run("git config user.name x && git config user.email x@localhost", shell=True, check=True)
Path("evaluate.py").chmod(0o644)
honest = Path("evaluate.py").read_text()
Path("evaluate.py").write_text("print('always the best')")
subprocess.run(["git", "commit", "-qam", "tidy up"], check=True)
Path("evaluate.py").write_text(honest)
subprocess.run(["git", "update-index", "--assume-unchanged", "evaluate.py"], check=True)
"""
FORGED = """
subprocess.run([sys.executable, "-c", '''
from pathlib import Path
from looplab.ledger.ledger import Ledger
ledger = Ledger(Path("../../ledger.db"))
with ledger.write():
    ledger.append_event("version champion", "iterate", "v2", {"why": "I say so"})
'''], check=True)
"""


@pytest.mark.parametrize(
    ("cheat", "said"),
    [
        ("Path('experiments/v1/note').write_text('x')", "experiments/v1/note was added"),
        ("Path('experiments/v9').mkdir(); Path('experiments/v9/x').touch()", "experiments/v9/x was added"),
        ("Path('iterate.yaml').unlink()", "iterate.yaml was removed"),
        ("(beside.parent / 'lab/evaluate.py').write_text('x')", "a frozen file of the lab itself was changed"),
        ("(beside.parent / 'lab/.looplab/iterate/v2.seals.json').write_text('{}')", "the list of sealed files"),
        (HIDDEN, "its commits change evaluate.py"),
        (FORGED, "the ledger has events of versions that looplab did not write"),
    ],
)
def test_whoever_changes_what_is_sealed_is_void(lab: Lab, cheat: str, said: str) -> None:
    lab.free_agent(f"\n{cheat}\n")
    end, why = last(lab.go(2))
    assert end == "void"
    assert said in why
    assert any("DANGEROUS" in line for line in lab.told)
    assert project.branches(lab.folder) == ["looplab/v2-failed-1"]
    assert lab.calls == ["v2"]  # a cheat is not asked again


@pytest.mark.skipif(landlock_version() < COMPLETE, reason="needs Linux 6.2")
def test_the_kernel_keeps_an_agent_from_writing_outside_its_worktree(lab: Lab) -> None:
    evaluator = lab.folder / "evaluate.py"
    honest = evaluator.read_text()
    lab.agent("\n(beside.parent / 'lab/evaluate.py').write_text('x')\n")
    end, why = last(lab.go(2))
    assert (end, evaluator.read_text()) == ("failed", honest)
    assert "Permission denied" in why


def test_the_checkpoint_of_another_version_is_refused_and_git_of_the_agents_own_is_not_used(lab: Lab) -> None:
    lab.agent("""
Path(".git").unlink()
subprocess.run(["git", "init", "-q"], check=True)
Path(folder, "artifacts/checkpoints/policy.json").unlink()
Path(folder, "artifacts/checkpoints/policy.json").symlink_to(Path("experiments/v1/artifacts/checkpoints/policy.json").resolve())
""")
    end, why = last(lab.go(2, retries=0))
    assert end == "failed"
    assert "a link out of the version" in why
    assert project.git(lab.folder, "show", "looplab/v2-failed-1:experiments/v2/train.py").startswith("# version 2")


def test_an_agent_that_fails_is_asked_again_and_then_the_version_fails(lab: Lab) -> None:
    lab.agent("\nsys.exit('no more words')\n")
    end, why = last(lab.go(2))
    assert end == "failed"
    assert "no more words" in why
    assert lab.calls == ["v2", "v2 again"]
    assert project.git(lab.folder, "log", "--format=%s", "looplab/v2-failed-1").splitlines()[0] == "v2: failed"


def test_a_new_attempt_gets_a_branch_of_its_own(lab: Lab) -> None:
    agent = (lab.beside / "agent.py").read_text()
    lab.agent("\nsys.exit(1)\n")
    lab.go(2, retries=0)
    (lab.beside / "agent.py").write_text(agent)
    assert last(lab.go(2)) == ("merged", "")
    assert project.branches(lab.folder) == ["looplab/v2-failed-1", "looplab/v2-try2"]


def test_another_evaluation_measures_the_champion_again(lab: Lab) -> None:
    lab.go(2)
    (lab.folder / "evaluate.py").write_text(project.EVALUATE.replace("range(16)", "range(20)"))
    project.git(lab.folder, "commit", "-qam", "more episodes")
    history = lab.go(3)
    assert project.lines(lab.beside / "evaluations") == ["v1", "v2", "v3", "v2"]
    attempt = history.last(3)
    assert attempt is not None
    assert attempt.ruling is not None
    assert attempt.ruling["n"] == 20


def test_where_the_version_before_cannot_be_measured_the_first_good_one_is_the_champion(lab: Lab) -> None:
    (lab.folder / "experiments/v1/artifacts/checkpoints/policy.json").unlink()
    history = lab.go(2)
    assert history.champion == 2
    assert "v1 cannot be measured" in " ".join(lab.told)


def test_versions_see_the_checkpoints_before_them_that_git_ignores(lab: Lab) -> None:
    lab.agent("\nassert Path('experiments/v1/artifacts/checkpoints/policy.json').read_text()\n")
    assert last(lab.go(2)) == ("merged", "")


def test_a_lab_may_be_a_folder_of_a_repository(tmp_path: Path) -> None:
    top = tmp_path / "repository"
    lab = Lab(tmp_path, "repository/lab")
    (top / "beside").rename(tmp_path / "link")
    (top / "beside").symlink_to(tmp_path / "beside")
    (lab.folder / ".git").rename(top / ".git")
    project.git(top, "add", "-A", "lab")
    project.git(top, "commit", "-qm", "moved")
    assert last(lab.go(2)) == ("merged", "")
    assert project.git(top, "log", "-1", "--format=%s").startswith("v2: keep")
    assert (lab.folder / "experiments/v2/evaluation.json").exists()
    assert project.git(top, "status", "--porcelain", "lab") == ""


def test_the_lab_on_another_branch_is_reported_and_nothing_is_lost(lab: Lab) -> None:
    lab.free_agent("\nsubprocess.run(['git', 'switch', '-qc', 'other'], cwd=beside.parent / 'lab', check=True)\n")
    with pytest.raises(LabError, match="started on branch main, the lab is on other"):
        lab.go(2)
    project.git(lab.folder, "switch", "-q", "main")
    assert last(lab.go(2)) == ("merged", "")
    assert lab.calls == ["v2"]


def test_what_is_in_the_way_of_a_merge_is_reported_and_nothing_is_lost(lab: Lab) -> None:
    mine = lab.folder / "experiments/v2/train.py"
    lab.free_agent(f"\nmine = Path({str(mine)!r})\nmine.parent.mkdir()\nmine.write_text('of a person')\n")
    with pytest.raises(LabError, match=r"train\.py"):
        lab.go(2)
    mine.unlink()
    assert last(lab.go(2)) == ("merged", "")
    assert "# version 2" in mine.read_text()
    assert lab.calls == ["v2"]


def test_new_files_outside_of_the_version_are_left_out_and_named(lab: Lab) -> None:
    lab.agent("\nPath('last.md').write_text('done')\nPath('notes').mkdir()\nPath('notes/a.txt').write_text('a')\n")
    assert last(lab.go(2)) == ("merged", "")
    assert any("left out" in line and "last.md, notes/a.txt" in line for line in lab.told)
    assert not (lab.folder / "last.md").exists()
    assert "last.md" not in project.git(lab.folder, "ls-files")
    assert (lab.folder / ".looplab/iterate/v2.left-out/notes/a.txt").read_text() == "a"


def test_a_version_that_needs_a_file_that_is_left_out_fails(lab: Lab) -> None:
    lab.agent("""
Path("helper.py").write_text("x = 1")
path = folder / "train.py"
path.write_text("import sys; sys.path.insert(0, '.'); import helper\\n" + path.read_text())
""")
    state, why = last(lab.go(2, retries=0))
    assert state == "failed"
    assert "No module named 'helper'" in why


def test_changing_other_files_is_refused(lab: Lab) -> None:
    (lab.folder / "README.md").write_text("read me")
    project.git(lab.folder, "add", "README.md")
    project.git(lab.folder, "commit", "-qm", "readme")
    lab.agent("\nPath('README.md').write_text('mine')\n")
    assert last(lab.go(2, retries=0)) == ("failed", "scope: README.md was changed; only experiments/v2/ may be")


def test_a_worktree_that_was_removed_is_a_failed_attempt(lab: Lab) -> None:
    lab.free_agent("\nimport shutil; shutil.rmtree(Path.cwd())\n")
    assert last(lab.go(2)) == ("failed", "its worktree is gone")


def test_it_is_pushed_only_when_asked(lab: Lab, tmp_path: Path) -> None:
    project.git(tmp_path, "init", "-q", "--bare", "-b", "main", "remote.git")
    project.git(lab.folder, "remote", "add", "origin", str(tmp_path / "remote.git"))
    project.git(lab.folder, "push", "-q", "-u", "origin", "main")
    remote: Callable[[], str] = lambda: project.git(tmp_path / "remote.git", "log", "-1", "--format=%s", "main")  # noqa: E731
    lab.go(2)
    assert remote() == "start"
    project.git(lab.folder, "branch", "--unset-upstream")
    lab.change(push=True)
    lab.go(3)
    assert remote().startswith("v3: discard")


def test_a_lab_outside_of_git_is_told_what_to_do(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    (lab.folder / ".git").rename(tmp_path / "gone")
    with pytest.raises(LabError, match="git init"):
        lab.go(2)


# -- tampering with the ledger

APPENDED = """
import json, sqlite3, sys
sys.path.insert(0, {source!r})
from pathlib import Path
from looplab.ledger.ledger import Ledger, link
ledger = Ledger(Path({ledger!r}))
event = next(e for e in ledger.events("iterate") if e.kind == "version measured" and e.run == "v1")
worse = {{**event.data, "value": event.data["value"] * 0.01, "values": [v * 0.01 for v in event.data["values"]]}}
"""
CHEATS = {
    "a value is appended": """
with ledger.write():
    ledger.append_event("version measured", "iterate", "v1", worse)
""",
    "a champion is appended": """
with ledger.write():
    ledger.append_event("version champion", "iterate", "v2", {"why": "I say so"})
""",
    "an event is changed": """
with ledger.write():
    ledger.execute("UPDATE events SET data=? WHERE seq=?", (json.dumps(worse), event.seq))
""",
    "the chain is rewritten": """
with ledger.write():
    ledger.execute("UPDATE events SET data=? WHERE seq=?", (json.dumps(worse), event.seq))
    before = "0" * 64
    for seq, at, kind, study, run, data, _ in ledger.rows("SELECT * FROM events ORDER BY seq"):
        before = link(before, seq, at, kind, study, run, data)
        ledger.execute("UPDATE events SET hash=? WHERE seq=?", (before, seq))
ledger.note_head()
""",
    "the end is cut off": """
with ledger.write():
    ledger.execute("DELETE FROM events WHERE seq>?", (event.seq,))
ledger._head = None
ledger.note_head()
""",
}


def cheating(lab: Lab, how: str) -> str:
    """Return code that changes the ledger in its own Python process."""
    import looplab

    text = APPENDED.format(source=str(Path(looplab.__file__).parents[1]), ledger=str(lab.folder / ".looplab/ledger.db"))
    path = lab.beside / "cheat.py"
    path.write_text(text + CHEATS[how])
    return f"import subprocess, sys; subprocess.run([{sys.executable!r}, {str(path)!r}], check=True)"


def smoke(lab: Lab, code: str) -> None:
    """Let the smoke run of v2, which is a little worse than v1, do this."""
    body = f"if '--smoke' in sys.argv:\n    {code}\n"
    agent = lab.beside / "agent.py"
    text = agent.read_text().replace('body = ""', f"body = {body!r}", 1).replace("{2: 0.8,", "{2: 0.1,", 1)
    agent.write_text(text)


def check_void(lab: Lab, history: VersionHistory) -> None:
    end, why = last(history)
    assert end == "void"
    assert any(line.startswith("ALARM: v2: ") and why in line for line in lab.told)
    assert history.champion == 1
    value = history.baselines[1].value
    assert value > 0.4
    again = VersionLedger(Ledger(lab.folder / ".looplab/ledger.db"))
    assert (again.history().champion, again.history().baselines[1].value) == (1, value)
    alarms = [event for event in again.ledger.events("iterate") if event.kind == "ledger forged"]
    assert [(event.run, event.data["why"]) for event in alarms] == [("v2", why)]


@pytest.mark.parametrize("how", CHEATS)
def test_an_agent_that_forges_the_ledger_is_void_and_the_champion_keeps_its_value(lab: Lab, how: str) -> None:
    lab.free_agent(f"\n{cheating(lab, how)}\n")
    check_void(lab, lab.go(2))


@pytest.mark.parametrize("how", CHEATS)
def test_a_smoke_run_that_forges_the_ledger_is_void_where_nothing_confines_it(
    lab: Lab, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("looplab.iterate.versions.landlock_version", lambda: 0)
    smoke(lab, cheating(lab, how))
    check_void(lab, lab.go(2))
    assert [line for line in lab.told if "NOT confined" in line] == [
        line for line in lab.told if line.startswith("WARNING")
    ]


def test_an_evaluation_whose_version_forges_the_ledger_makes_it_void(lab: Lab) -> None:
    evaluate = lab.folder / "evaluate.py"
    cheat = cheating(lab, "a value is appended")
    evaluate.write_text(f"{evaluate.read_text()}\nif skill == 0.8:\n    {cheat}\n")
    project.git(lab.folder, "commit", "-qam", "an evaluator that runs the version's code")
    check_void(lab, lab.go(2))


def test_after_a_forgery_the_next_version_is_compared_with_the_true_value(lab: Lab) -> None:
    lab.agent(f"\nif version == 2:\n    {cheating(lab, 'the chain is rewritten')}\n")
    lab.go(2)
    lab.agent("\nPath(folder, 'artifacts/checkpoints/policy.json').write_text('{\"skill\": 0.3}')\n")
    history = lab.go(5)
    attempt = history.last(5)
    assert attempt is not None
    assert attempt.ruling is not None
    assert (attempt.ruling["verdict"], attempt.ruling["champion"], history.champion) == ("discard", "v1", 1)


def test_a_forged_alarm_is_without_effect(lab: Lab) -> None:
    forged = """
with ledger.write():
    known = [[e.seq, e.at, e.kind, e.run, worse if e.seq == event.seq else e.data] for e in ledger.events("iterate")]
    ledger.append_event("ledger forged", "iterate", "v1", {"why": "x", "broken": None, "known": known})
"""
    CHEATS["an alarm is forged"] = forged
    try:
        lab.free_agent(f"\n{cheating(lab, 'an alarm is forged')}\n")
    finally:
        del CHEATS["an alarm is forged"]
    history = lab.go(2)
    assert last(history)[0] == "void"
    again = VersionLedger(Ledger(lab.folder / ".looplab/ledger.db")).history()
    assert again.baselines[1].value == history.baselines[1].value > 0.4


def test_a_ledger_that_was_replaced_ends_the_iteration(lab: Lab) -> None:
    lab.free_agent("""
import shutil
ledger = beside.parent / "lab/.looplab/ledger.db"
shutil.copy(ledger, beside / "copy")
(beside / "copy").replace(ledger)
""")
    with pytest.raises(LabError, match="replaced"):
        lab.go(2)


def test_events_that_an_agent_wrote_before_looplab_was_killed_do_not_count(lab: Lab) -> None:
    ledger = VersionLedger(Ledger(lab.folder / ".looplab/ledger.db"))
    lab.go(2)
    value = lab.go(2).measured
    ledger = VersionLedger(Ledger(lab.folder / ".looplab/ledger.db"))
    ledger.record(IterateBeganEvent(start=3, end=3))
    ledger.record(VersionBegunEvent(attempt=1, branch="looplab/v3", base="0", onto="main"), 3)
    log = str(lab.folder / "agent_runs/x.jsonl")
    asked = AgentAskedEvent(call="call", version=3, ask=1, log=log, cli="command", n=1, attempt=1, parent=None)
    ledger.record(asked)
    fingerprint = next(iter(value))[1]
    with ledger.ledger.write():
        forged = {"ask": 1, "value": 0.0, "values": [], "fingerprint": fingerprint}
        ledger.ledger.append_event("version measured", "iterate", "v2", forged)
    after = VersionLedger(Ledger(lab.folder / ".looplab/ledger.db"))
    assert "looplab did not write" in after.begin()
    assert after.history().measured == value
    attempt = after.history().last(3)
    assert attempt is not None
    assert "looplab did not write" in attempt.forged


def test_a_damaged_chain_is_reported_before_an_agent_is_asked(lab: Lab) -> None:
    lab.go(2)
    ledger = Ledger(lab.folder / ".looplab/ledger.db")
    with ledger.write():
        ledger.execute("UPDATE events SET data='{}' WHERE seq=1")
    with pytest.raises(LabError, match="damaged"):
        lab.go(3)
    assert lab.calls == ["v2"]


# -- confinement


@pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")
def test_a_smoke_run_writes_to_its_worktree_and_its_scratch_folder_only(lab: Lab) -> None:
    places = {"ledger": lab.folder / ".looplab", "lab": lab.folder, "beside the lab": lab.folder.parent, "tree": "."}
    code = f"""
import tempfile
seen = {{}}
places = { ({name: str(place) for name, place in places.items()})!r}
for name, place in {{**places, "tmp": tempfile.gettempdir()}}.items():
    try:
        Path(place, "x").write_text("x")
        Path(place, "x").unlink()
        seen[name] = True
    except OSError:
        seen[name] = False
try:
    os.kill({os.getpid()}, 0)
    seen["signal"] = True
except OSError:
    seen["signal"] = False
Path({str(lab.beside)!r}, "seen").write_text(json.dumps(seen))
"""
    (lab.beside / "try.py").write_text(code)
    smoke(lab, f"exec(Path({str(lab.beside / 'try.py')!r}).read_text())")
    assert last(lab.go(2, retries=0))[0] == "merged", lab.told
    seen = json.loads((lab.beside / "seen").read_text())
    signal_ = seen.pop("signal")
    assert seen == {"ledger": False, "lab": False, "beside the lab": False, "tmp": True, "tree": True}
    assert not signal_ or landlock_version() < 6


@pytest.mark.parametrize(("named", "said"), [(".", "contains the ledger"), ("missing", "there is no folder")])
def test_what_a_smoke_run_may_write_to_is_checked(lab: Lab, named: str, said: str) -> None:
    lab.change(smoke={"command": ["{python}"], "writable": [named]})
    with pytest.raises(LabError, match=said):
        lab.go(2)


def test_an_agent_that_changes_the_champions_files_in_the_lab_is_void(lab: Lab) -> None:
    file = lab.folder / "experiments/v1/artifacts/checkpoints/policy.json"
    lab.free_agent(f"\nPath({str(file)!r}).write_text('{{\"skill\": 0.01}}')\n")
    assert last(lab.go(2)) == ("void", "the champion's folder in the lab itself was changed")


def test_the_log_of_a_smoke_run_is_not_written_through_a_link(lab: Lab) -> None:
    victim = lab.beside / "victim"
    victim.write_text("kept")
    link = lab.folder / ".looplab/iterate/v2.smoke.log"
    lab.free_agent(f"\nimport os\nos.symlink({str(victim)!r}, {str(link)!r})\n")
    smoke(lab, "print('from the version')")
    lab.go(2)
    assert victim.read_text() == "kept"
    assert "from the version" in link.read_text()


def test_nothing_is_pushed_to_an_address_that_an_agent_has_set(lab: Lab, tmp_path: Path) -> None:
    for name in ("remote.git", "other.git"):
        project.git(tmp_path, "init", "-q", "--bare", "-b", "main", name)
    project.git(lab.folder, "remote", "add", "origin", str(tmp_path / "remote.git"))
    project.git(lab.folder, "push", "-q", "-u", "origin", "main")
    lab.change(push=True)
    setting = ["git", "-C", str(lab.folder), "config", "remote.origin.url", str(tmp_path / "other.git")]
    lab.free_agent(f"\nimport subprocess; subprocess.run({setting!r}, check=True)\n")
    lab.go(2)
    assert any("not pushed: the repository's remote settings" in line for line in lab.told)
    assert not list((tmp_path / "other.git/refs/heads").iterdir())
