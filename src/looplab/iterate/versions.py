"""Driving the agent from version to version: prepare, ask, verify, check, measure, judge, merge; then the next one.

Every step is in the ledger before and after it is done. Killed at any moment and started again with the same command,
it goes on with the step that was under way: an agent that had answered is not asked again, what was measured is not
measured again, and a failed attempt is kept as a branch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from looplab.agents.base import AgentEvent, AgentSession, AgentSpec, Answer, Command, Limits, Message, Trouble
from looplab.agents.confine import landlock_version
from looplab.agents.log import read_end
from looplab.agents.process import kill_marked
from looplab.agents.run import check_spec, find_program, run_agent
from looplab.agents.sandbox import confinement_of
from looplab.config.files import canonical_json, dump_json, write_atomic
from looplab.config.lab import load_lab
from looplab.errors import LabError
from looplab.iterate import gates, prompt, seal, trial
from looplab.iterate.gates import GateFinding, Measured
from looplab.iterate.git import Repo, Worktree
from looplab.iterate.record import Attempt, Call, VersionHistory, VersionLedger, told
from looplab.iterate.settings import FILE, IterateConfig
from looplab.iterate.verdict import interval, judge
from looplab.judge.base import Verdict
from looplab.ledger.study import JOBS_SUFFIX
from looplab.loop.lock import engine_pid
from looplab.loop.submitting import start_engine
from looplab.runs.tree import copy as copy_below
from looplab.untrusted import real_path

HOME = ".looplab/iterate"
RESULT = "evaluation.json"
"""In a version's folder: what the frozen evaluation measured, and the verdict."""
SHOWN = 160


@dataclass(frozen=True, slots=True)
class IterateOptions:
    """What the command line says."""

    retries: int
    """How often the agent is asked again when a gate is not passed."""
    continue_on_failure: bool = False


class Iteration:
    """The versions of one lab. `tell` gets a line for people at every step."""

    def __init__(
        self, lab: Path, settings: IterateConfig, book: VersionLedger, spec: AgentSpec, limits: Limits,
        options: IterateOptions, tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.lab = lab.resolve()
        self.settings = settings
        self.book = book
        self.spec = spec
        self.limits = limits
        self.options = options
        self.tell = tell
        self.repo = Repo(self.lab)
        self._push_settings = self.repo.push_settings() if settings.push else ""
        self.logs = self.lab / settings.logs
        self.python = trial.python_of(self.lab, settings.venv)
        self.frozen = list(dict.fromkeys([*settings.frozen, FILE, *(["lab.yaml"] if self._here("lab.yaml") else [])]))

    def _here(self, name: str) -> bool:
        return (self.lab / name).exists()

    def check(self) -> None:
        """What can be wrong before anything is started."""
        check_spec(self.spec, self.limits)
        find_program(self.spec, os.environ.get("PATH"))
        for name in (*self.settings.frozen, self.settings.sop):
            if not self._here(name):
                raise LabError(f"{name} is not in the lab", file=self.lab / FILE, hint="see frozen and sop")

        ledger = self.lab / ".looplab"
        for path in self._smoke_writable():
            if not path.is_dir():
                raise LabError(f"smoke.writable: there is no folder {path}", file=self.lab / FILE)
            if ledger.is_relative_to(path) or path.is_relative_to(ledger):
                raise LabError(f"smoke.writable: {path} has the ledger in it", file=self.lab / FILE)
        if warning := confinement_of(self.spec).warning:
            self.tell(f"WARNING: {warning}")
        if self.settings.smoke and not landlock_version():
            self.tell("WARNING: without Landlock in the kernel, smoke runs of versions are NOT confined. Code that "
                      "the agent wrote can change any file of yours, the ledger included")  # fmt: skip

    def _smoke_writable(self) -> list[Path]:
        named = self.settings.smoke.writable if self.settings.smoke else []
        return [real_path(self.lab / Path(name).expanduser()) for name in named]

    # -- a range of versions

    def run(self, start: int, end: int) -> bool:
        """All versions of the range, in their order; False if one failed."""
        self.check()
        if forged := self.book.begin():
            self.tell(f"ALARM: {forged}")
        story = self.book.story()
        if story.range is None or story.range[:2] != (start, end):
            self.book.note("iterate began", start=start, end=end)
            story = self.book.story()
        assert story.range is not None
        since = story.range[2]
        well = True
        for number in range(start, end + 1):
            last = self.book.story().last(number)
            if last is not None and last.end == "merged":
                self.tell(f"v{number} is there already ({last.branch})")
                continue
            if last is None or last.end is None or last.ended < since:
                last = self._version(number)
            if last.end != "merged":
                well = False
                self.tell(f"v{number} {last.end}: {last.why.splitlines()[0]} (kept as {last.branch})")
                if not self.options.continue_on_failure:
                    break
        self.book.note("iterate ended", ok=well)
        return well

    # -- one version

    def _version(self, number: int) -> Attempt:
        """One attempt at a version, from wherever it stands to its end."""
        attempt = self._attempt(number)
        while attempt.end is None:
            self._step(attempt)
            attempt = self._attempt(number)
        return attempt

    def _attempt(self, number: int) -> Attempt:
        """The attempt that is under way or has just ended; a new one if there is none."""
        story = self.book.story()
        last = story.last(number)
        since = story.range[2] if story.range else 0
        if last is not None and (last.end is None or last.ended > since):
            return last
        if (self.lab / self.settings.experiments / f"v{number}").exists():
            hint = "begin after it, or remove it"
            raise LabError(f"{self.settings.experiments}/v{number} is there already, and not from here", hint=hint)
        self._ready(number)
        n = last.n + 1 if last else 1
        while self.repo.commit_of(branch := f"looplab/v{number}" + (f"-try{n}" if n > 1 else "")):
            n += 1
        self.book.note(
            "version begun", number, attempt=n, branch=branch, base=self.repo.head(), onto=self.repo.branch()
        )
        found = self.book.story().last(number)
        assert found is not None
        return found

    def _step(self, attempt: Attempt) -> None:
        """The next step of an attempt."""
        if attempt.prepared is None:
            self._prepare(attempt)
            return
        if not attempt.commit and not self._tree(attempt.version).exists():
            self._close(attempt, "failed", "its worktree is gone")
            return
        if attempt.calls and not attempt.calls[-1].answered:
            self._recover(attempt.calls[-1])
            return
        if not attempt.calls or attempt.calls[-1].interrupted:
            self._ask(attempt, attempt.ask + 1)
            return
        findings = attempt.findings.get(attempt.ask)
        if findings is None:
            self._check(attempt)
        elif attempt.void:
            self._close(attempt, "void", attempt.void)
        elif any(finding.stops for finding in findings):
            if attempt.ask <= self.options.retries:
                self._ask(attempt, attempt.ask + 1)
            else:
                self._close(attempt, "failed", "; ".join(f"{f.what}: {f.why}" for f in findings if f.stops))
        elif attempt.ruling is None:
            self._judge(attempt)
        else:
            self._merge(attempt)

    # -- preparing

    def _tree(self, number: int) -> Path:
        return self.lab / HOME / f"v{number}"

    def _others(self, lab: Path, number: int) -> list[str]:
        """The folders of all other versions."""
        found = (lab / self.settings.experiments).glob("v[0-9]*")
        return sorted(str(path.relative_to(lab)) for path in found if path.name != f"v{number}")

    def previous(self, number: int) -> int | None:
        """The newest version before this one that is there."""
        there = [int(p.name[1:]) for p in (self.lab / self.settings.experiments).glob("v*") if p.name[1:].isdigit()]
        return max((n for n in there if n < number), default=None)

    def _ready(self, number: int) -> None:
        """Whether a worktree would have all that it needs."""
        unsaved = self.repo.unsaved([*self.frozen, self.settings.experiments])
        if unsaved:
            hint = "git add and git commit it, or have git ignore it; then give the same command again"
            raise LabError(f"not committed, so the worktree of v{number} would not have it: {unsaved[0]}", hint=hint)

    def _prepare(self, attempt: Attempt) -> None:
        number = attempt.version
        self._baseline(number)
        self._ready(number)
        base = self.repo.head()
        self.book.note("version preparing", number)
        tree = self.repo.add_tree(self._tree(number), attempt.branch, base)
        if not (tree.lab / FILE).exists():
            raise LabError(f"{FILE} is not in git", file=self.lab / FILE, hint="git add and git commit the lab")
        self._bring_artifacts(tree, number)
        if self.settings.venv and self._here("venv") and not (tree.lab / "venv").exists():
            (tree.lab / "venv").symlink_to(self.lab / "venv")
        for name in prompt.ARTIFACTS:
            folder = tree.lab / self.settings.experiments / f"v{number}" / "artifacts" / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".gitkeep").touch()
        paths = [*self.frozen, *self._others(tree.lab, number)]
        seals = seal.seal(tree.lab, paths)
        seal.make_read_only(tree.lab, paths)
        write_atomic(self._seals(number), dump_json(seals))
        self.book.note(
            "version prepared", number, base=base, seals=seal.digest(seals), sealed=len(seals),
            frozen=seal.digest(seal.seal(self.lab, self.settings.frozen)), champion=self._seal_champion(),
        )  # fmt: skip
        self.tell(
            f"v{number}: worktree {tree.path.relative_to(self.lab)} on {attempt.branch}, {len(seals)} files sealed"
        )

    def _seal_champion(self) -> str:
        """A digest of the champion's files in the lab, by which it may be measured again; empty if there is none."""
        champion = self.book.story().champion
        folder = f"{self.settings.experiments}/v{champion}"
        return seal.digest(seal.seal(self.lab, [folder])) if champion is not None and self._here(folder) else ""

    def _seals(self, number: int) -> Path:
        return self.lab / HOME / f"v{number}.seals.json"

    def _bring_artifacts(self, tree: Worktree, number: int) -> None:
        """What git ignores (checkpoints, say) of the version before and of the champion, as copies."""
        for version in {self.previous(number), self.book.story().champion} - {None}:
            source = self.lab / self.settings.experiments / f"v{version}"
            target = tree.lab / self.settings.experiments / f"v{version}"
            for path in seal.files_of(source, ["."]):
                copy = target / path.relative_to(source)
                if target.is_dir() and not copy.exists() and not path.is_symlink():
                    copy_below(source, target, path.relative_to(source))

    # -- asking

    def _ask(self, attempt: Attempt, ask: int) -> None:
        number = attempt.version
        tree = self._tree(number) / self.repo.below
        earlier = attempt.calls[-1] if attempt.calls else None
        session = None
        text: list[str] = []
        if earlier is not None and earlier.ok and earlier.session and earlier.cli == self.spec.cli:
            session = AgentSession(earlier.session)  # it knows what it was asked
        else:
            text.append(prompt.make(self.settings, number, self.previous(number), self.lab, self._trains_here()))
        if ask > 1:
            text.append(prompt.refused(attempt.findings[ask - 1], number))
        if earlier is not None and earlier.interrupted:
            text.append(prompt.INTERRUPTED)
        log = new_log(self.logs, number)
        again = f" again ({ask - 1} of {self.options.retries})" if ask > 1 else ""
        self.tell(f"v{number}: {self.spec.cli} is asked{again}; log {os.path.relpath(log, self.lab)}")
        self.book.asked(log.stem, version=number, ask=ask, log=str(log), cli=self.spec.cli, n=1, attempt=attempt.n,
                        parent=None)  # fmt: skip
        self._serve_submits()
        answer = run_agent(
            self._with_slots(), "\n\n".join(text), cwd=tree, log=log, limits=self.limits, resume=session,
            on_event=self._show,
        )  # fmt: skip
        self._answered(log.stem, answer)

    def _trains_here(self) -> bool:
        return self.settings.submit and self._here("lab.yaml")

    def _serve_submits(self) -> None:
        """Have an engine at work for what the agent submits. It is not the agent's own: that would end with it."""
        if not self._trains_here():
            return
        study = load_lab(self.lab).study(self.settings.study).name
        if engine_pid(self.lab, study + JOBS_SUFFIX) is None:
            start_engine(self.lab, study, owner_pid=os.getpid())

    def _with_slots(self) -> AgentSpec:
        """The agent in its sandbox must reach the ledger, through which `looplab submit` speaks with the lab."""
        named = [str(self.lab / Path(name).expanduser()) for name in self.spec.writable]
        ledger = [str(self.lab / ".looplab")] if self._trains_here() else []
        return replace(self.spec, writable=(*ledger, *named))

    def _show(self, event: AgentEvent) -> None:
        if isinstance(event, Command):
            self.tell("  $ " + _short(event.command))
        elif isinstance(event, Message):
            self.tell("  " + _short(event.text))
        elif isinstance(event, Trouble):
            self.tell("  ! " + _short(event.text))

    def _answered(self, call: str, answer: Answer) -> None:
        usage = {key: value for key, value in asdict(answer.usage).items() if key not in ("scope", "message")}
        self.book.answered(
            call, ok=answer.ok, why=answer.why, usage=usage, seconds=round(answer.seconds, 3),
            attempts=answer.attempts, session=answer.session.id if answer.session else None,
        )  # fmt: skip

    def _recover(self, call: Call) -> None:
        """A call that was under way when looplab ended: its answer counts, if it came to its end."""
        log = Path(call.log)
        answer = read_end(log)
        if answer is not None:
            self._answered(call.id, answer)
            return
        kill_marked(str(log))  # it ends with looplab, but may take its time; two must not write in one worktree
        self.tell(f"the agent had not ended when looplab did; it is asked to go on (log {log.name})")
        why = "looplab ended before it had answered"
        self.book.answered(call.id, ok=False, why=why, usage={}, interrupted=True)

    # -- checking

    def _check(self, attempt: Attempt) -> None:
        number, ask = attempt.version, attempt.ask
        call = attempt.calls[-1]
        self.book.note("version checking", number, ask=ask)
        tree = self.repo.tree(self._tree(number))
        void = self._tampered(attempt, tree)
        findings = [] if void else [GateFinding(call.ok, "agent", call.why or "it ended well")]
        if call.ok and not void:
            findings += self._gates(attempt, tree)
            void = self._tampered(attempt, tree)  # the smoke run is code of the agent's, too
        if not void and not any(finding.stops for finding in findings):
            findings += self._measure(attempt, tree, ask)
            void = self._tampered(attempt, tree)  # and so may be what the evaluation loads
        if void:
            findings.append(GateFinding(False, "frozen", void))
        for finding in findings:
            if not finding.ok:
                self.tell(f"v{number}: {'warning: ' if finding.warning else ''}{finding.what}: {_short(finding.why)}")
        self.book.note("version checked", number, ask=ask, findings=told(findings), void=void)

    def _tampered(self, attempt: Attempt, tree: Worktree) -> str:
        """What was changed that must not change; empty if nothing was."""
        assert attempt.prepared is not None
        try:
            before = json.loads(self._seals(attempt.version).read_text())
        except (OSError, ValueError):
            before = {}
        if forged := self._forged(attempt.version):
            return forged
        if seal.digest(before) != attempt.prepared["seals"]:
            return "the list of sealed files is not the one that was made"
        now = seal.seal(tree.lab, [*self.frozen, *self._others(tree.lab, attempt.version)])
        found = seal.broken(before, now)
        if not found and seal.digest(seal.seal(self.lab, self.settings.frozen)) != attempt.prepared["frozen"]:
            found = ["a frozen file of the lab itself was changed meanwhile"]
        if not found and attempt.prepared.get("champion", "") not in ("", self._seal_champion()):
            found = ["the champion's folder in the lab itself was changed meanwhile"]
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        return "; ".join(found[:5]) + more

    def _forged(self, number: int) -> str:
        """What code of the version did to the ledger, in this attempt; empty: nothing."""
        if found := self.book.check(number):
            self.tell(f"ALARM: v{number}: {found}. Values from before are compared; `looplab verify` shows the ledger")
        attempt = self.book.story().last(number)
        return attempt.forged if attempt is not None else ""

    def _gates(self, attempt: Attempt, tree: Worktree) -> list[GateFinding]:
        number, settings = attempt.version, self.settings
        version = tree.lab / settings.experiments / f"v{number}"
        found = gates.check_document(version / f"dev_v{number}.md", settings.sections)
        found += gates.check_files(version)
        found += gates.check_artifacts(version, settings.artifacts)
        if settings.schedule:
            found += gates.check_schedule(version, settings.schedule)
        if settings.smoke:
            places = self._places(version, number)
            if settings.venv and (tree.lab / "venv").exists():
                places["python"] = trial.python_of(tree.lab, True)  # the lab's own, or one that the agent has made
            log = self.lab / HOME / f"v{number}.smoke.log"
            writable = [tree.path, *self._smoke_writable()] if landlock_version() else None
            found.append(gates.check_smoke(settings.smoke, places, tree.lab, log, writable))
        return found

    def _places(self, version: Path, number: int) -> dict[str, str | Path]:
        return {"python": self.python, "version": version, "number": str(number), "lab": self.lab}

    def _measure(self, attempt: Attempt, tree: Worktree, ask: int) -> list[GateFinding]:
        """The frozen evaluation of what is in the worktree; done once for each ask."""
        number = attempt.version
        version = tree.lab / self.settings.experiments / f"v{number}"
        if attempt.measured_ask == ask and attempt.measured is not None:
            measured: Measured | GateFinding = attempt.measured
        else:
            measured = self._evaluate(number, version, ask)
        if isinstance(measured, GateFinding):
            return [measured]
        said = f"{self.settings.evaluate.metric} {measured.value:g}, measured by the frozen evaluation"
        return [
            GateFinding(True, "evaluation", said),
            *gates.compare_declared(version, self.settings.evaluate, measured),
        ]

    # -- measuring and judging

    def fingerprint(self) -> str:
        """What measures: numbers of another evaluation cannot be compared."""
        evaluation = self.settings.evaluate
        how = canonical_json([evaluation.command, evaluation.metric, evaluation.values]).decode()
        return seal.digest({**seal.seal(self.lab, self.settings.frozen), "": how})[:16]

    def _evaluate(self, number: int, version: Path, ask: int | None) -> Measured | GateFinding:
        self.book.note("version measuring", number, ask=ask)
        log = self.lab / HOME / f"v{number}.evaluation.log"
        found = gates.evaluate(self.settings.evaluate, self._places(version, number), self.lab, log)
        self._forged(number)
        if isinstance(found, Measured):
            self.book.note("version measured", number, ask=ask, metric=self.settings.evaluate.metric,
                           value=found.value, values=list(found.values), fingerprint=self.fingerprint())  # fmt: skip
            self.tell(f"v{number}: {self.settings.evaluate.metric} {found.value:g}")
        return found

    def _baseline(self, number: int) -> None:
        """Where there is no champion yet, the version before is measured and becomes it."""
        before = self.previous(number)
        if before is None or self.book.story().champion is not None:
            return
        found: Measured | GateFinding | None = self.book.story().measured.get((before, self.fingerprint()))
        if found is None:
            self.tell(f"v{before} is measured, to compare with")
            found = self._evaluate(before, self.lab / self.settings.experiments / f"v{before}", None)
        if isinstance(found, Measured):
            self.book.note("version champion", before, why="the first that was measured")
        else:
            self.tell(f"v{before} cannot be measured, so v{number} has nothing to beat: {_short(found.why)}")

    def _champion(self, story: VersionHistory) -> Measured | None:
        """What the champion measures under the evaluation of today."""
        if story.champion is None:
            return None
        known = story.measured.get((story.champion, self.fingerprint()))
        if known is not None:
            return known
        self.tell(f"the evaluation is not what it was: the champion v{story.champion} is measured again")
        found = self._evaluate(story.champion, self.lab / self.settings.experiments / f"v{story.champion}", None)
        if isinstance(found, Measured):
            return found
        raise LabError(f"the champion v{story.champion} cannot be measured by the evaluation of today: {found.why}",
                       hint="bring back its artifacts, or the evaluation that it was measured by")  # fmt: skip

    def _judge(self, attempt: Attempt) -> None:
        assert attempt.measured is not None
        story = self.book.story()
        champion = self._champion(story)
        name = f"v{story.champion}" if story.champion is not None else None
        ruling = judge(attempt.measured, champion, name, self.settings.judge, self.settings.evaluate.goal, story.spent)
        self.book.note("version judged", attempt.version, **ruling.to_dict())
        self.tell(f"v{attempt.version}: {ruling.verdict}. {ruling.why}")

    # -- ending

    def _merge(self, attempt: Attempt) -> None:
        """Commit what the agent left and bring it into the lab's branch, whether it is the champion or not."""
        number = attempt.version
        assert attempt.ruling is not None
        assert attempt.measured is not None
        here = self.repo.branch()
        if here != attempt.onto:
            raise LabError(f"v{number} was begun on branch {attempt.onto}, the lab is on {here}",
                           hint=f"git switch {attempt.onto}, then give the same command again")  # fmt: skip
        self.book.note("version merging", number)
        verdict = attempt.ruling["verdict"]
        subject = f"v{number}: {verdict}, {self.settings.evaluate.metric} {attempt.measured.value:g}"
        version = f"{self.settings.experiments}/v{number}"
        commit = attempt.commit
        if not commit:
            tree = self.repo.tree(self._tree(number))
            write_atomic(tree.lab / version / RESULT, dump_json(self._result(attempt)))
            commit = self._commit(attempt, tree, f"{subject}\n\n{attempt.ruling['why']}", self.lab)
        if spoiled := self.repo.differs(attempt.base, commit, self._sealed_paths(number)):
            self._close(attempt, "void", f"its commits change {spoiled}")
            return
        self.repo.merge(commit, f"Merge {attempt.branch}")
        self.repo.drop_tree(self._tree(number))
        self._seals(number).unlink(missing_ok=True)
        with self.book.ledger.write():
            self.book.note("version merged", number, commit=commit, branch=attempt.branch, into=here)
            if verdict == Verdict.KEEP:
                self.book.note("version champion", number, why=attempt.ruling["why"])
        self.tell(f"v{number}: merged into {here} ({commit[:10]})")
        if self.settings.push and (trouble := self._push()):
            self.tell(f"v{number}: not pushed: {trouble}")

    def _push(self) -> str:
        """Push the lab's branch; returns why not, or nothing.

        A repository on this machine runs its own hooks when it is pushed to: it must be the one that the person named.
        """
        if self.repo.push_settings() != self._push_settings:
            return "the settings of the repository for remotes were changed meanwhile; look at them, then `git push`"
        return self.repo.push()

    def _commit(self, attempt: Attempt, tree: Worktree, message: str, target: Path) -> str:
        """Commit what the agent left, and bring what git ignores of it to the target: the worktree may go then."""
        commit = tree.commit(attempt.branch, message, self._left_out())
        for name in tree.ignored(f"{self.settings.experiments}/v{attempt.version}"):
            if not (tree.lab / name).is_symlink():
                target.mkdir(parents=True, exist_ok=True)
                copy_below(tree.lab, target, name)
        self.book.note("version committed", attempt.version, commit=commit)
        return commit

    def _sealed_paths(self, number: int) -> list[str]:
        return [*self.frozen, *self._others(self.lab, number)]

    def _left_out(self) -> tuple[str, ...]:
        """What is never committed: the link to the environment, and folders of looplab's own."""
        return tuple(str(self.repo.below / name) for name in ("venv", ".looplab", "outputs", "agent_runs"))

    def _result(self, attempt: Attempt) -> dict[str, object]:
        assert attempt.measured is not None
        reach = interval(attempt.measured)
        return {
            "version": attempt.version,
            "metric": self.settings.evaluate.metric,
            "value": attempt.measured.value,
            "interval": list(reach) if reach else None,
            "values": list(attempt.measured.values),
            "evaluation": self.fingerprint(),
            **(attempt.ruling or {}),
        }

    def _close(self, attempt: Attempt, how: str, why: str) -> None:
        """Keep a failed attempt as a branch, with what git ignores of it beside, and clear its worktree away."""
        number = attempt.version
        kept = f"looplab/v{number}-failed-{attempt.n}"
        self.book.note("version closing", number, how=how)
        if not attempt.commit and self._tree(number).exists():
            aside = self.lab / HOME / f"v{number}-failed-{attempt.n}"
            self._commit(attempt, self.repo.tree(self._tree(number)), f"v{number}: {how}\n\n{why}", aside)
        self.repo.drop_tree(self._tree(number))
        self.repo.rename(attempt.branch, kept)
        self._seals(number).unlink(missing_ok=True)
        self.book.note("version failed", number, how=how, why=why.encode("utf-8", "replace").decode(), branch=kept,
                       commit=self.repo.commit_of(kept))  # fmt: skip


def new_log(folder: Path, number: int) -> Path:
    """A new, empty `v2-to-v3-<stamp>.jsonl`; never one that exists."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"v{number - 1}-to-v{number}-{time.strftime('%Y%m%d-%H%M%S')}"
    for n in range(1, 1000):
        path = folder / (f"{name}.jsonl" if n == 1 else f"{name}-{n}.jsonl")
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue
        return path
    raise LabError(f"too many logs of the name {name}", file=folder)


def _short(text: str) -> str:
    line: Sequence[str] = [part for part in text.strip().splitlines() if part.strip()]
    first = line[0].strip() if line else ""
    last = f" … {line[-1].strip()}" if len(line) > 1 else ""
    whole = first + last
    return whole if len(whole) <= SHOWN else whole[: SHOWN - 1] + "…"
