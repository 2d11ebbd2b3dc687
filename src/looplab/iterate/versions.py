"""Drive the agent from version to version: prepare, ask, check, measure, judge, merge.

Every step is recorded in the ledger before and after it is done. If the process is killed, the same command continues
with the unfinished step: an agent that has answered is not asked again, a measured version is not measured again, and a
failed attempt is kept as a branch.
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
from looplab.agents.run import check_spec, find_program, new_log, run_agent
from looplab.agents.sandbox import confinement_of
from looplab.config.files import canonical_json, dump_json, write_atomic
from looplab.config.lab import load_lab
from looplab.config.state import home, state_folder
from looplab.errors import LabError
from looplab.iterate import gates, prompt, seal, trial
from looplab.iterate.gates import GateFinding, Measured
from looplab.iterate.git import Repo, Worktree
from looplab.iterate.jobs import Training, check_trained, trainings
from looplab.iterate.record import Attempt, Call, VersionHistory, VersionLedger, findings_to_json
from looplab.iterate.settings import FILE, IterateConfig
from looplab.iterate.verdict import interval, judge
from looplab.judge.base import Verdict
from looplab.ledger import catalogue
from looplab.ledger.view import JOBS_SUFFIX
from looplab.loop.lock import engine_pid
from looplab.loop.submitting import engine_log, start_engine
from looplab.runs.tree import copy as copy_below
from looplab.runs.tree import remove as remove_below
from looplab.untrusted import real_path

HOME = ".looplab/iterate"
RESULT = "evaluation.json"
"""File in a version's folder with the result of the frozen evaluation and the verdict."""
WAIT_S = 0.5
"""Seconds between two looks at the trainings of a version."""
MAX_ENGINES = 3
"""Engines that are started for the trainings of a version before it is given up."""
SHOWN = 160
"""Characters of an agent's message that are shown."""


@dataclass(frozen=True, slots=True)
class IterateOptions:
    """Options of the command line."""

    retries: int
    """Number of times the agent may fix a version that does not pass a gate."""
    continue_on_failure: bool = False
    """Whether to go to the next version after a failed one."""


class Iteration:
    """The versions of one lab. `tell` receives a line of progress at every step."""

    def __init__(
        self, lab: Path, settings: IterateConfig, ledger: VersionLedger, spec: AgentSpec, limits: Limits,
        options: IterateOptions, tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.lab = lab.resolve()
        self.settings = settings
        self.ledger = ledger
        self.spec = spec
        self.limits = limits
        self.options = options
        self.tell = tell
        self.repo = Repo(self.lab)
        self._push_settings = self.repo.push_settings() if settings.push else ""
        self.logs = self.lab / settings.logs
        self.python = trial.python_of(self.lab, settings.venv)
        self.frozen = list(dict.fromkeys([*settings.frozen, FILE, *(["lab.yaml"] if self._exists("lab.yaml") else [])]))

    def _exists(self, name: str) -> bool:
        return (self.lab / name).exists()

    def check(self) -> None:
        """Raise LabError for problems that can be found before anything starts; warn if code is not confined."""
        check_spec(self.spec, self.limits)
        find_program(self.spec, os.environ.get("PATH"))
        for name in (*self.settings.frozen, self.settings.sop):
            if not self._exists(name):
                raise LabError(f"{name} is not in the lab", file=self.lab / FILE, hint="see frozen and sop")

        states = (home(self.lab), state_folder(self.lab))
        for path in self._smoke_writable():
            if not path.is_dir():
                raise LabError(f"smoke.writable: there is no folder {path}", file=self.lab / FILE)
            if any(state.is_relative_to(path) or path.is_relative_to(state) for state in states):
                raise LabError(f"smoke.writable: {path} contains the ledger", file=self.lab / FILE)
        if warning := confinement_of(self.spec).warning:
            self.tell(f"WARNING: {warning}")
        if self.settings.smoke and not landlock_version():
            self.tell("WARNING: the kernel has no Landlock, so smoke runs of versions are NOT confined. Code that "
                      "the agent wrote can change any of your files, including the ledger")  # fmt: skip

    def _smoke_writable(self) -> list[Path]:
        named = self.settings.smoke.writable if self.settings.smoke else []
        return [real_path(self.lab / Path(name).expanduser()) for name in named]

    # -- a range of versions

    def run(self, start: int, end: int) -> bool:
        """Run all versions of the range in order; return False if one failed."""
        self.check()
        if forged := self.ledger.begin():
            self.tell(f"ALARM: {forged}")
        history = self.ledger.history()
        if history.range is None or history.range[:2] != (start, end):
            self.ledger.record(catalogue.IterateBeganEvent(start=start, end=end))
            history = self.ledger.history()
        assert history.range is not None
        since = history.range[2]
        ok = True
        for number in range(start, end + 1):
            last = self.ledger.history().last(number)
            if last is not None and last.end == "merged":
                self.tell(f"v{number} already exists ({last.branch})")
                continue
            if last is None or last.end is None or last.ended < since:
                last = self._version(number)
            if last.end != "merged":
                ok = False
                self.tell(f"v{number} {last.end}: {last.why.splitlines()[0]} (kept as {last.branch})")
                if not self.options.continue_on_failure:
                    break
        self.ledger.record(catalogue.IterateEndedEvent(ok=ok))
        return ok

    # -- one version

    def _version(self, number: int) -> Attempt:
        """Run one attempt at a version, from its current step to its end."""
        attempt = self._attempt(number)
        while attempt.end is None:
            self._step(attempt)
            attempt = self._attempt(number)
        return attempt

    def _attempt(self, number: int) -> Attempt:
        """Return the attempt that is in progress or has just ended; start one if there is none."""
        history = self.ledger.history()
        last = history.last(number)
        since = history.range[2] if history.range else 0
        if last is not None and (last.end is None or last.ended > since):
            return last
        if (self.lab / self.settings.experiments / f"v{number}").exists():
            hint = "start after it, or remove it"
            raise LabError(
                f"{self.settings.experiments}/v{number} already exists, and looplab did not create it", hint=hint
            )
        self._check_committed(number)
        n = last.n + 1 if last else 1
        while self.repo.commit_of(branch := f"looplab/v{number}" + (f"-try{n}" if n > 1 else "")):
            n += 1
        event = catalogue.VersionBegunEvent(
            attempt=n, branch=branch, base=self.repo.head(), onto=self.repo.branch(), folder=self._folder(number)
        )
        self.ledger.record(event, number)
        found = self.ledger.history().last(number)
        assert found is not None
        return found

    def _step(self, attempt: Attempt) -> None:
        """Do the next step of an attempt."""
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

    def _folder(self, number: int) -> str:
        """Return the folder of a version, relative to the lab."""
        return f"{self.settings.experiments}/v{number}"

    def _tree(self, number: int) -> Path:
        return self.lab / HOME / f"v{number}"

    def _other_versions(self, lab: Path, number: int) -> list[str]:
        """Return the folders of all other versions."""
        found = (lab / self.settings.experiments).glob("v[0-9]*")
        return sorted(str(path.relative_to(lab)) for path in found if path.name != f"v{number}")

    def previous(self, number: int) -> int | None:
        """Return the newest existing version before this one."""
        existing = [int(p.name[1:]) for p in (self.lab / self.settings.experiments).glob("v*") if p.name[1:].isdigit()]
        return max((n for n in existing if n < number), default=None)

    def _check_committed(self, number: int) -> None:
        """Raise LabError if files that the worktree needs are not committed."""
        unsaved = self.repo.unsaved([*self.frozen, self.settings.experiments])
        if unsaved:
            hint = "commit it, or add it to .gitignore; then repeat the command"
            raise LabError(f"not committed, so the worktree of v{number} would not have it: {unsaved[0]}", hint=hint)

    def _prepare(self, attempt: Attempt) -> None:
        number = attempt.version
        self._baseline(number)
        self._check_committed(number)
        base = self.repo.head()
        self.ledger.record(catalogue.VersionPreparingEvent(), number)
        tree = self.repo.add_tree(self._tree(number), attempt.branch, base)
        if not (tree.lab / FILE).exists():
            raise LabError(f"{FILE} is not in git", file=self.lab / FILE, hint="git add and git commit the lab")
        self._copy_artifacts(tree, number)
        if self.settings.venv and self._exists("venv") and not (tree.lab / "venv").exists():
            (tree.lab / "venv").symlink_to(self.lab / "venv")
        for name in prompt.ARTIFACTS:
            folder = tree.lab / self.settings.experiments / f"v{number}" / "artifacts" / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".gitkeep").touch()
        paths = [*self.frozen, *self._other_versions(tree.lab, number)]
        seals = seal.seal(tree.lab, paths)
        seal.make_read_only(tree.lab, paths)
        write_atomic(self._seals_path(number), dump_json(seals))
        event = catalogue.VersionPreparedEvent(
            base=base, seals=seal.digest(seals), sealed=len(seals),
            frozen=seal.digest(seal.seal(self.lab, self.settings.frozen)), champion=self._seal_champion(),
        )  # fmt: skip
        self.ledger.record(event, number)
        self.tell(
            f"v{number}: worktree {tree.path.relative_to(self.lab)} on {attempt.branch}, {len(seals)} files sealed"
        )

    def _seal_champion(self) -> str:
        """Return a hash of the champion's files in the lab, which may be measured again; empty if there is none."""
        champion = self.ledger.history().champion
        folder = f"{self.settings.experiments}/v{champion}"
        return seal.digest(seal.seal(self.lab, [folder])) if champion is not None and self._exists(folder) else ""

    def _seals_path(self, number: int) -> Path:
        return self.lab / HOME / f"v{number}.seals.json"

    def _copy_artifacts(self, tree: Worktree, number: int) -> None:
        """Copy files that git ignores, such as checkpoints, of the previous version and of the champion."""
        for version in {self.previous(number), self.ledger.history().champion} - {None}:
            source = self.lab / self.settings.experiments / f"v{version}"
            target = tree.lab / self.settings.experiments / f"v{version}"
            for path in seal.files_of(source, ["."]):
                copy = target / path.relative_to(source)
                if target.is_dir() and not copy.exists() and not path.is_symlink():
                    copy_below(source, target, path.relative_to(source))

    # -- asking

    def _ask(self, attempt: Attempt, ask: int) -> None:
        number = attempt.version
        tree = self._tree(number) / self.repo.prefix
        earlier = attempt.calls[-1] if attempt.calls else None
        session = None
        text: list[str] = []
        if earlier is not None and earlier.ok and earlier.session and earlier.cli == self.spec.cli:
            session = AgentSession(earlier.session)  # it remembers the task
        else:
            text.append(
                prompt.make(self.settings, number, self.previous(number), self.lab, self._uses_submit(), self.python)
            )
        if ask > 1:
            text.append(prompt.make_retry(attempt.findings[ask - 1], number))
        if earlier is not None and earlier.interrupted:
            text.append(prompt.INTERRUPTED)
        log = new_log(self.logs, f"v{number - 1}-to-v{number}", time_last=True)
        retry = f" again (retry {ask - 1} of {self.options.retries})" if ask > 1 else ""
        self.tell(f"v{number}: asking {self.spec.cli}{retry}; log {os.path.relpath(log, self.lab)}")
        event = catalogue.AgentAskedEvent(
            call=log.stem, version=number, ask=ask, log=str(log), cli=self.spec.cli, n=1, attempt=attempt.n, parent=None
        )
        self.ledger.record(event)
        self._ensure_engine()
        answer = run_agent(
            self._spec_with_ledger(), "\n\n".join(text), cwd=tree, log=log, limits=self.limits, resume=session,
            on_event=self._show,
        )  # fmt: skip
        self._answered(log.stem, answer)

    def _uses_submit(self) -> bool:
        return self.settings.submit and self._exists("lab.yaml")

    def _ensure_engine(self) -> None:
        """Start an engine for the agent's submissions. It is not a child of the agent, since it would end with it."""
        if not self._uses_submit():
            return
        if not self._has_engine():
            start_engine(self.lab, load_lab(self.lab).study(self.settings.study).name, owner_pid=os.getpid())

    def _has_engine(self) -> bool:
        study = load_lab(self.lab).study(self.settings.study).name
        return engine_pid(self.lab, study + JOBS_SUFFIX) is not None

    def _spec_with_ledger(self) -> AgentSpec:
        """Return the spec with write access to the ledger, through which `looplab submit` reaches the lab."""
        named = [str(self.lab / Path(name).expanduser()) for name in self.spec.writable]
        ledger = {str(home(self.lab)): None, str(state_folder(self.lab)): None} if self._uses_submit() else {}
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
        event = catalogue.AgentAnsweredEvent(
            call=call, ok=answer.ok, why=answer.why, usage=usage, seconds=round(answer.seconds, 3),
            attempts=answer.attempts, session=answer.session.id if answer.session else None,
        )  # fmt: skip
        self.ledger.record(event)

    def _recover(self, call: Call) -> None:
        """Record a call that was running when looplab ended: with its answer if it finished, else as interrupted."""
        log = Path(call.log)
        answer = read_end(log)
        if answer is not None:
            self._answered(call.id, answer)
            return
        kill_marked(str(log))  # it ends with looplab, but not at once; two must not write to one worktree
        self.tell(f"the agent had not finished when looplab ended; asking it to continue (log {log.name})")
        why = "looplab ended before it had answered"
        event = catalogue.AgentAnsweredEvent(call=call.id, ok=False, why=why, usage={}, interrupted=True)
        self.ledger.record(event)

    # -- checking

    def _check(self, attempt: Attempt) -> None:
        number, ask = attempt.version, attempt.ask
        call = attempt.calls[-1]
        self._wait_for_trainings(attempt)
        self.ledger.record(catalogue.VersionCheckingEvent(ask=ask), number)
        tree = self.repo.tree(self._tree(number))
        void = self._tampered(attempt, tree)
        findings = [] if void else [GateFinding(call.ok, "agent", call.why or "it succeeded")]
        if call.ok and not void:
            findings += self._check_scope(attempt, tree)
            findings += self._gates(attempt, tree)
            void = self._tampered(attempt, tree)  # the smoke run is the agent's code, too
        if not void and not any(finding.stops for finding in findings):
            findings += self._measure(attempt, tree, ask)
            void = self._tampered(attempt, tree)  # and the evaluation may load it
        if void:
            findings.append(GateFinding(False, "frozen", void))
        for finding in findings:
            if not finding.ok:
                self.tell(f"v{number}: {'warning: ' if finding.warning else ''}{finding.what}: {_short(finding.why)}")
        event = catalogue.VersionCheckedEvent(ask=ask, findings=findings_to_json(findings), void=void)
        self.ledger.record(event, number)

    def _trainings(self, attempt: Attempt) -> list[Training]:
        """Return what this attempt submitted."""
        if not self._uses_submit():
            return []
        study = load_lab(self.lab).study(self.settings.study).name
        return trainings(self.ledger.ledger, study, f"{HOME}/v{attempt.version}", attempt.began)

    def _wait_for_trainings(self, attempt: Attempt) -> None:
        """Wait until everything that the agent submitted has ended: a version is not judged while it trains."""
        shown: list[str] = []
        engines = 0
        while open_ones := [one.command for one in self._trainings(attempt) if one.status is None]:
            if open_ones != shown:
                self.tell(f"v{attempt.version}: waiting for {len(open_ones)} training(s) it submitted: {open_ones[0]}")
                shown = open_ones
            if not self._has_engine():
                engines += 1
                if engines > MAX_ENGINES:
                    log = engine_log(self.lab, load_lab(self.lab).study(self.settings.study).name)
                    self.tell(f"v{attempt.version}: the submitted trainings did not run; see {log}")
                    return
                self._ensure_engine()
            time.sleep(WAIT_S)

    def _check_scope(self, attempt: Attempt, tree: Worktree) -> list[GateFinding]:
        """Check that only the version's folder was changed. New files elsewhere are set aside before the smoke run."""
        assert attempt.prepared is not None
        folder = self._folder(attempt.version)
        sealed = tuple(str(self.repo.prefix / name) for name in self._sealed_paths(attempt.version))  # void, if changed
        ignore = (*self._never_committed(), *sealed)
        changed, new = tree.changed_outside(attempt.prepared["base"], folder, ignore)
        aside = self.lab / HOME / f"v{attempt.version}.left-out"
        for name in new:
            aside.mkdir(parents=True, exist_ok=True)
            copy_below(tree.path, aside, name)
            remove_below(tree.path, name)
        found = [GateFinding(False, "scope", f"{name} was changed; only {folder}/ may be") for name in changed]
        if new:
            why = f"left out, because only {folder}/ may change: {', '.join(new[:5])} (kept in {aside})"
            found.append(GateFinding(False, "scope", why, warning=True))
        return found or [GateFinding(True, "scope", f"only {folder}/ was changed")]

    def _tampered(self, attempt: Attempt, tree: Worktree) -> str:
        """Return what was changed that must not change; empty if nothing was."""
        assert attempt.prepared is not None
        try:
            before = json.loads(self._seals_path(attempt.version).read_text())
        except (OSError, ValueError):
            before = {}
        if forged := self._check_ledger(attempt.version):
            return forged
        if seal.digest(before) != attempt.prepared["seals"]:
            return "the list of sealed files was changed"
        now = seal.seal(tree.lab, [*self.frozen, *self._other_versions(tree.lab, attempt.version)])
        found = seal.changes(before, now)
        if not found and seal.digest(seal.seal(self.lab, self.settings.frozen)) != attempt.prepared["frozen"]:
            found = ["a frozen file of the lab itself was changed"]
        if not found and attempt.prepared.get("champion", "") not in ("", self._seal_champion()):
            found = ["the champion's folder in the lab itself was changed"]
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        return "; ".join(found[:5]) + more

    def _check_ledger(self, number: int) -> str:
        """Return how code of the version tampered with the ledger in this attempt; empty if it did not."""
        if found := self.ledger.check(number):
            self.tell(
                f"ALARM: v{number}: {found}. Versions are compared with the values from before; see `looplab verify`"
            )
        attempt = self.ledger.history().last(number)
        return attempt.forged if attempt is not None else ""

    def _gates(self, attempt: Attempt, tree: Worktree) -> list[GateFinding]:
        number, settings = attempt.version, self.settings
        version = tree.lab / settings.experiments / f"v{number}"
        found = gates.check_document(version / f"dev_v{number}.md", settings.sections)
        found += gates.check_files(version)
        found += gates.check_artifacts(version, settings.artifacts)
        found += gates.check_values(version, settings.values)
        if settings.trained and self._uses_submit():
            found += check_trained(version, settings.trained, self._trainings(attempt), version.parent)
        if settings.schedule:
            found += gates.check_schedule(version, settings.schedule)
        if settings.smoke:
            variables = self._variables(version, number)
            if settings.venv and (tree.lab / "venv").exists():
                variables["python"] = trial.python_of(tree.lab, True)  # the lab's, or one that the agent created
            log = self.lab / HOME / f"v{number}.smoke.log"
            writable = [tree.path, *self._smoke_writable()] if landlock_version() else None
            found.append(gates.check_smoke(settings.smoke, variables, tree.lab, log, writable))
        return found

    def _variables(self, version: Path, number: int) -> dict[str, str | Path]:
        return {"python": self.python, "version": version, "number": str(number), "lab": self.lab}

    def _measure(self, attempt: Attempt, tree: Worktree, ask: int) -> list[GateFinding]:
        """Run the frozen evaluation on the worktree, once per request."""
        number = attempt.version
        version = tree.lab / self.settings.experiments / f"v{number}"
        if attempt.measured_ask == ask and attempt.measured is not None:
            measured: Measured | GateFinding = attempt.measured
        else:
            measured = self._evaluate(number, version, ask)
        if isinstance(measured, GateFinding):
            return [measured]
        result = f"{self.settings.evaluate.metric} {measured.value:g}, measured by the frozen evaluation"
        return [
            GateFinding(True, "evaluation", result),
            *gates.compare_declared(version, self.settings.evaluate, measured),
        ]

    # -- measuring and judging

    def fingerprint(self) -> str:
        """Return a hash of the evaluation; results of different evaluations cannot be compared."""
        evaluation = self.settings.evaluate
        how = canonical_json([evaluation.command, evaluation.metric, evaluation.values]).decode()
        return seal.digest({**seal.seal(self.lab, self.settings.frozen), "": how})[:16]

    def _evaluate(self, number: int, version: Path, ask: int | None) -> Measured | GateFinding:
        self.ledger.record(catalogue.VersionMeasuringEvent(ask=ask), number)
        log = self.lab / HOME / f"v{number}.evaluation.log"
        found = gates.evaluate(self.settings.evaluate, self._variables(version, number), self.lab, log)
        self._check_ledger(number)
        if isinstance(found, Measured):
            event = catalogue.VersionMeasuredEvent(
                ask=ask, metric=self.settings.evaluate.metric, value=found.value, values=list(found.values),
                fingerprint=self.fingerprint(), folder=self._folder(number),
            )  # fmt: skip
            self.ledger.record(event, number)
            self.tell(f"v{number}: {self.settings.evaluate.metric} {found.value:g}")
        return found

    def _baseline(self, number: int) -> None:
        """Measure the previous version and make it the champion, if there is no champion."""
        before = self.previous(number)
        if before is None or self.ledger.history().champion is not None:
            return
        found: Measured | GateFinding | None = self.ledger.history().measured.get((before, self.fingerprint()))
        if found is None:
            self.tell(f"measuring v{before}, to compare with")
            found = self._evaluate(before, self.lab / self.settings.experiments / f"v{before}", None)
        if isinstance(found, Measured):
            self.ledger.record(catalogue.VersionChampionEvent(why="the first measured version"), before)
        else:
            self.tell(f"v{before} cannot be measured, so v{number} has no version to beat: {_short(found.why)}")

    def _measure_champion(self, history: VersionHistory) -> Measured | None:
        """Return the champion's result under the current evaluation; measure it again if necessary."""
        if history.champion is None:
            return None
        known = history.measured.get((history.champion, self.fingerprint()))
        if known is not None:
            return known
        self.tell(f"the evaluation changed: measuring the champion v{history.champion} again")
        found = self._evaluate(history.champion, self.lab / self.settings.experiments / f"v{history.champion}", None)
        if isinstance(found, Measured):
            return found
        raise LabError(f"the champion v{history.champion} cannot be measured by the current evaluation: {found.why}",
                       hint="restore its artifacts, or the evaluation that measured it")  # fmt: skip

    def _judge(self, attempt: Attempt) -> None:
        assert attempt.measured is not None
        history = self.ledger.history()
        champion = self._measure_champion(history)
        name = f"v{history.champion}" if history.champion is not None else None
        ruling = judge(
            attempt.measured, champion, name, self.settings.judge, self.settings.evaluate.goal, history.spent
        )
        self.ledger.record(catalogue.VersionJudgedEvent(**ruling.to_dict()), attempt.version)
        self.tell(f"v{attempt.version}: {ruling.verdict}. {ruling.why}")

    # -- ending

    def _merge(self, attempt: Attempt) -> None:
        """Commit the agent's work and merge it into the lab's branch, whether it is the champion or not."""
        number = attempt.version
        assert attempt.ruling is not None
        assert attempt.measured is not None
        here = self.repo.branch()
        if here != attempt.onto:
            raise LabError(f"v{number} started on branch {attempt.onto}, the lab is on {here}",
                           hint=f"git switch {attempt.onto}, then repeat the command")  # fmt: skip
        self.ledger.record(catalogue.VersionMergingEvent(), number)
        verdict = attempt.ruling["verdict"]
        subject = f"v{number}: {verdict}, {self.settings.evaluate.metric} {attempt.measured.value:g}"
        version = self._folder(number)
        commit = attempt.commit
        if not commit:
            tree = self.repo.tree(self._tree(number))
            write_atomic(tree.lab / version / RESULT, dump_json(self._result(attempt)))
            commit = self._commit(attempt, tree, f"{subject}\n\n{attempt.ruling['why']}", self.lab)
        if changed := self.repo.differs(attempt.base, commit, self._sealed_paths(number)):
            self._close(attempt, "void", f"its commits change {changed}")
            return
        self.repo.merge(commit, f"Merge {attempt.branch}")
        self.repo.drop_tree(self._tree(number))
        self._seals_path(number).unlink(missing_ok=True)
        with self.ledger.ledger.write():
            code = self.repo.tree_of(commit, self._folder(number))
            merged = catalogue.VersionMergedEvent(commit=commit, branch=attempt.branch, into=here, code=code)
            self.ledger.record(merged, number)
            if verdict == Verdict.KEEP:
                self.ledger.record(catalogue.VersionChampionEvent(why=attempt.ruling["why"]), number)
        self.tell(f"v{number}: merged into {here} ({commit[:10]})")
        if self.settings.push and (error := self._push()):
            self.tell(f"v{number}: not pushed: {error}")

    def _push(self) -> str:
        """Push the lab's branch; return the error message, empty on success.

        A repository on this machine runs its own hooks when it is pushed to, so it must be the one that the user chose.
        """
        if self.repo.push_settings() != self._push_settings:
            return "the repository's remote settings were changed; check them, then `git push`"
        return self.repo.push()

    def _commit(self, attempt: Attempt, tree: Worktree, message: str, target: Path) -> str:
        """Commit the agent's work and copy what git ignores to the target, so that the worktree can be removed."""
        commit = tree.commit(attempt.branch, message, self._never_committed())
        for name in tree.ignored(f"{self.settings.experiments}/v{attempt.version}"):
            if not (tree.lab / name).is_symlink():
                target.mkdir(parents=True, exist_ok=True)
                copy_below(tree.lab, target, name)
        self.ledger.record(catalogue.VersionCommittedEvent(commit=commit), attempt.version)
        return commit

    def _sealed_paths(self, number: int) -> list[str]:
        return [*self.frozen, *self._other_versions(self.lab, number)]

    def _never_committed(self) -> tuple[str, ...]:
        """Return paths that are never committed: the link to the environment, and looplab's own folders."""
        return tuple(str(self.repo.prefix / name) for name in ("venv", ".looplab", "outputs", "agent_runs"))

    def _result(self, attempt: Attempt) -> dict[str, object]:
        assert attempt.measured is not None
        bounds = interval(attempt.measured)
        return {
            "version": attempt.version,
            "metric": self.settings.evaluate.metric,
            "value": attempt.measured.value,
            "interval": list(bounds) if bounds else None,
            "values": list(attempt.measured.values),
            "evaluation": self.fingerprint(),
            **(attempt.ruling or {}),
        }

    def _close(self, attempt: Attempt, how: str, why: str) -> None:
        """Keep a failed attempt as a branch, with a copy of what git ignores, and remove its worktree."""
        number = attempt.version
        branch = f"looplab/v{number}-failed-{attempt.n}"
        self.ledger.record(catalogue.VersionClosingEvent(how=how), number)
        if not attempt.commit and self._tree(number).exists():
            aside = self.lab / HOME / f"v{number}-failed-{attempt.n}"
            self._commit(attempt, self.repo.tree(self._tree(number)), f"v{number}: {how}\n\n{why}", aside)
        self.repo.drop_tree(self._tree(number))
        self.repo.rename(attempt.branch, branch)
        self._seals_path(number).unlink(missing_ok=True)
        why = why.encode("utf-8", "replace").decode()
        event = catalogue.VersionFailedEvent(how=how, why=why, branch=branch, commit=self.repo.commit_of(branch))
        self.ledger.record(event, number)


def _short(text: str) -> str:
    """Return the first and last line of a text, cut to SHOWN characters."""
    lines: Sequence[str] = [line for line in text.strip().splitlines() if line.strip()]
    first = lines[0].strip() if lines else ""
    last = f" … {lines[-1].strip()}" if len(lines) > 1 else ""
    joined = first + last
    return joined if len(joined) <= SHOWN else joined[: SHOWN - 1] + "…"
