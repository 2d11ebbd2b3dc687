"""Versions one by one, in this process: what an agent may try, and what the world may do meanwhile."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from looplab.errors import LabError
from looplab.iterate import settings as reading
from looplab.iterate.record import Book, Story
from looplab.iterate.versions import Iteration, Options
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
        """Of the settings."""
        path = self.folder / "iterate.yaml"
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}, indent=1))
        project.git(self.folder, "commit", "-qam", "settings")

    def agent(self, more: str) -> None:
        """What the agent does in addition, at its end."""
        path = self.beside / "agent.py"
        path.write_text(path.read_text() + more)

    def go(self, start: int, end: int | None = None, retries: int = 1) -> Story:
        settings = reading.load(self.folder, {})
        book = Book(Ledger(self.folder / ".looplab/ledger.db"))
        spec = reading.make_spec(settings.agent, reading.Flags())
        limits = reading.limits_of(settings.agent)
        Iteration(self.folder, settings, book, spec, limits, Options(retries), self.told.append).run(
            start, end or start
        )
        return book.story()

    @property
    def calls(self) -> list[str]:
        found: list[str] = project.lines(self.beside / "calls")
        return found


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def last(story: Story, version: int = 2) -> tuple[str | None, str]:
    attempt = story.last(version)
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
    ledger.record("version champion", "iterate", "v2", why="I say so")
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
        (FORGED, "the ledger has events of versions that are not from here"),
    ],
)
def test_whoever_changes_what_is_sealed_is_void(lab: Lab, cheat: str, said: str) -> None:
    lab.agent(f"\n{cheat}\n")
    end, why = last(lab.go(2))
    assert end == "void"
    assert said in why
    assert project.branches(lab.folder) == ["looplab/v2-failed-1"]
    assert lab.calls == ["v2"]  # a cheat is not asked again


def test_the_checkpoint_of_another_version_is_refused_and_git_of_the_agents_own_is_not_used(lab: Lab) -> None:
    lab.agent("""
Path(".git").unlink()
subprocess.run(["git", "init", "-q"], check=True)
Path(folder, "artifacts/checkpoints/policy.json").unlink()
Path(folder, "artifacts/checkpoints/policy.json").symlink_to(Path("experiments/v1/artifacts/checkpoints/policy.json").resolve())
""")
    end, why = last(lab.go(2, retries=0))
    assert end == "failed"
    assert "a link that leads out of the version" in why
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
    story = lab.go(3)
    assert project.lines(lab.beside / "evaluations") == ["v1", "v2", "v3", "v2"]
    attempt = story.last(3)
    assert attempt is not None
    assert attempt.ruling is not None
    assert attempt.ruling["n"] == 20


def test_where_the_version_before_cannot_be_measured_the_first_good_one_is_the_champion(lab: Lab) -> None:
    (lab.folder / "experiments/v1/artifacts/checkpoints/policy.json").unlink()
    story = lab.go(2)
    assert story.champion == 2
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


def test_the_lab_on_another_branch_is_told_and_nothing_is_lost(lab: Lab) -> None:
    lab.agent("\nsubprocess.run(['git', 'switch', '-qc', 'other'], cwd=beside.parent / 'lab', check=True)\n")
    with pytest.raises(LabError, match="was begun on branch main, the lab is on other"):
        lab.go(2)
    project.git(lab.folder, "switch", "-q", "main")
    assert last(lab.go(2)) == ("merged", "")
    assert lab.calls == ["v2"]


def test_what_is_in_the_way_of_a_merge_is_told_and_nothing_is_lost(lab: Lab) -> None:
    lab.agent("\nPath('shared.txt').write_text('of the agent')\n")
    (lab.folder / "shared.txt").write_text("of a person")
    with pytest.raises(LabError, match=r"shared\.txt"):
        lab.go(2)
    (lab.folder / "shared.txt").unlink()
    assert last(lab.go(2)) == ("merged", "")
    assert (lab.folder / "shared.txt").read_text() == "of the agent"
    assert lab.calls == ["v2"]


def test_a_worktree_that_was_removed_is_a_failed_attempt(lab: Lab) -> None:
    lab.agent("\nimport shutil; shutil.rmtree(Path.cwd())\n")
    assert last(lab.go(2)) == ("failed", "its worktree is gone")


def test_it_is_pushed_only_when_asked(lab: Lab, tmp_path: Path) -> None:
    project.git(tmp_path, "init", "-q", "--bare", "-b", "main", "remote.git")
    project.git(lab.folder, "remote", "add", "origin", str(tmp_path / "remote.git"))
    project.git(lab.folder, "push", "-q", "-u", "origin", "main")
    remote: Callable[[], str] = lambda: project.git(tmp_path / "remote.git", "log", "-1", "--format=%s", "main")  # noqa: E731
    lab.go(2)
    assert remote() == "start"
    lab.change(push=True)
    lab.go(3)
    assert remote().startswith("v3: discard")


def test_a_lab_outside_of_git_is_told_what_to_do(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    (lab.folder / ".git").rename(tmp_path / "gone")
    with pytest.raises(LabError, match="git init"):
        lab.go(2)
