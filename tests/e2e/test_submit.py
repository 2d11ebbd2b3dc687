"""A command handed in with `submit`: the study's slots, limits and budget, and no run lost or made twice."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from looplab.config.edits import Edit, Op
from looplab.decide.queue import waiting
from looplab.ledger.audit import audit
from looplab.ledger.ledger import Ledger
from looplab.ledger.plan import Job, RunPlan
from looplab.ledger.rebuild import reindex
from looplab.ledger.study import StudyLedger
from looplab.loop.decision import ProposalRejected, decide_job
from looplab.loop.submitting import JobQueue, SubmittedJob

JOBS = "toy.jobs"
JOB = '''\
"""Says that it began, waits for a file of the lab where it is told to, and ends with a code."""
import json, os, sys, time

lab = os.environ["LOOPLAB_LAB"]
options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
with open(os.path.join(lab, "ran"), "a") as file:
    print(os.environ["LOOPLAB_RUN_ID"], file=file)
print("began", *sys.argv[1:], flush=True)
deadline = time.monotonic() + 600
while "gate" in options and not os.path.exists(os.path.join(lab, options["gate"])):
    if time.monotonic() > deadline:
        sys.exit("waited too long")
    time.sleep(0.01)
with open(os.environ["LOOPLAB_METRICS"], "a") as file:
    print(json.dumps({"step": 1, "loss": 0.25}), file=file)
with open(os.path.join(os.environ["LOOPLAB_RUN_DIR"], "seen.json"), "w") as file:
    json.dump({"cwd": os.getcwd(), "argv": sys.argv[1:], "env": dict(os.environ)}, file)
print("the end", flush=True)
sys.exit(int(options.get("exit", 0)))
'''
PYTHON = (sys.executable, "-S")


@pytest.fixture
def jobs(lab: Any) -> Any:
    lab.write("job.py", JOB)
    return lab


def times_run(lab: Any) -> int:
    path = lab.folder / "ran"
    return len(path.read_text().splitlines()) if path.exists() else 0


def kill(running: Any) -> None:
    running.send(signal.SIGKILL)
    running.process.wait()


def test_a_command_is_run_and_what_it_prints_is_streamed(jobs: Any, until: Any) -> None:
    call = jobs.start("submit", "--", *PYTHON, "job.py", "gate=gate", "{as given}", "two words")
    until(lambda: "began gate=gate {as given} two words\n" in call.out, "its first line, while it runs")
    assert "the end" not in call.out
    jobs.open_gate()
    done = call.ended()
    assert done.out.splitlines()[-1] == "the end"
    (run,) = jobs.runs(JOBS)
    assert f"run {run.name} in cpu" in done.err
    assert "ok after" in done.err
    assert "loss 0.25" in done.err
    assert jobs.read(run, "seen.json")["argv"] == ["gate=gate", "{as given}", "two words"]
    assert "the record is whole" in jobs("verify").out


def test_it_gets_what_every_run_gets_but_no_config(jobs: Any) -> None:
    jobs.configure(launch={**jobs.study["launch"], "env": {"FROM_THE_LAB": "{run_id}"}}, slots={"gpus": ["3"]})
    told = jobs("submit", "--json", "--name", "a try", "--", *PYTHON, "job.py").json()
    env = jobs.read(Path(told["folder"]), "seen.json")["env"]
    assert env["FROM_THE_LAB"] == env["LOOPLAB_RUN_ID"] == told["run"]
    assert env["CUDA_VISIBLE_DEVICES"] == "3"
    assert env["LOOPLAB_STUDY"] == told["study"] == JOBS
    assert "LOOPLAB_CONFIG" not in env
    assert (told["status"], told["exit_code"], told["objective"]["value"]) == ("ok", 0, 0.25)
    assert told["tail"] == ["began", "the end"]
    assert jobs.ask("SELECT reason FROM runs") == [("a try",)]


@pytest.mark.parametrize(
    ("code", "command"), [(7, "raise SystemExit(7)"), (128 + 9, "import os; os.kill(os.getpid(), 9)")]
)
def test_its_exit_code_is_passed_on(jobs: Any, code: int, command: str) -> None:
    done = jobs("submit", "--", *PYTHON, "-c", command, code=code)
    assert "failed" in done.err


@pytest.mark.slow
def test_it_waits_until_a_slot_is_free(jobs: Any, until: Any) -> None:
    jobs.configure(slots={"count": 1, "gpus": "none"})
    first = jobs.start("submit", "--", *PYTHON, "job.py", "gate=gate")
    until(lambda: "began" in first.out, "the first command")
    second = jobs.start("submit", "--", *PYTHON, "job.py", "n=2")
    until(lambda: "waiting for a slot\n" in second.error, "the second one to wait")
    third = jobs.start("submit", "--", *PYTHON, "job.py", "n=3")
    until(lambda: "waiting for a slot (1 ahead of you)" in third.error, "the third one to wait behind it")
    assert times_run(jobs) == 1
    jobs.open_gate()
    for call in (first, second, third):
        assert "the end" in call.ended().out
    assert [run["reason"].split()[-1] for run in jobs.all("run.json", JOBS)] == ["gate=gate", "n=2", "n=3"]


def test_two_at_the_same_time_are_both_served(jobs: Any, until: Any) -> None:
    calls = [jobs.start("submit", "--", *PYTHON, "job.py", "gate=gate", f"n={n}") for n in (1, 2)]
    until(lambda: jobs.check_started() or times_run(jobs) == 2, "both running in two slots")
    jobs.open_gate()
    for call in calls:
        assert "the end" in call.ended().out


def test_the_same_twice_at_the_same_time_is_one_run(jobs: Any, until: Any) -> None:
    calls = [jobs.start("submit", "--", *PYTHON, "job.py", "gate=gate") for _ in range(2)]
    until(lambda: all("began" in call.out for call in calls), "both calls to see it")
    jobs.open_gate()
    for call in calls:
        assert "the end" in call.ended().out
    assert times_run(jobs) == 1


@pytest.mark.slow
def test_a_training_outlives_its_caller_and_the_next_call_is_told_its_end(jobs: Any, until: Any) -> None:
    command = ("submit", "--", *PYTHON, "job.py", "gate=gate", "exit=5")
    call = jobs.start(*command)
    until(lambda: "began" in call.out, "the training")
    kill(call)
    jobs.open_gate()
    until(lambda: jobs.count(state="ended") == 1, "its end, without a caller")
    done = jobs(*command, code=5)
    assert done.out == "began gate=gate exit=5\nthe end\n"
    assert "not run again" in done.err
    assert times_run(jobs) == 1
    jobs(*command, code=5)  # now it was told: the same again is a new run
    assert times_run(jobs) == 2


def test_a_call_while_it_runs_attaches_to_it(jobs: Any, until: Any) -> None:
    command = ("submit", "--", *PYTHON, "job.py", "gate=gate")
    first = jobs.start(*command)
    until(lambda: "began" in first.out, "the training")
    kill(first)
    second = jobs.start(*command)
    until(lambda: "began" in second.out, "what it has printed so far")
    assert "attached" in second.error
    jobs.open_gate()
    assert second.ended().out.splitlines()[-1] == "the end"
    assert times_run(jobs) == 1


@pytest.mark.slow
def test_an_engine_that_is_killed_is_replaced_and_adopts_the_training(jobs: Any, until: Any) -> None:
    call = jobs.start("submit", "--", *PYTHON, "job.py", "gate=gate", "exit=3")
    until(lambda: "began" in call.out, "the training")
    os.kill(int((jobs.folder / f".looplab/{JOBS}.lock").read_text().split()[0]), signal.SIGKILL)
    until(
        lambda: call.process.poll() is not None or len(jobs.ask("SELECT id FROM sessions WHERE study=?", JOBS)) == 2,
        "another engine",
    )
    jobs.open_gate()
    assert "the end" in call.ended(3).out
    assert times_run(jobs) == 1
    assert "the record is whole" in jobs("verify").out


def test_an_edited_script_is_another_command(jobs: Any, until: Any) -> None:
    command = ("submit", "--", *PYTHON, "job.py", "gate=gate")
    call = jobs.start(*command)
    until(lambda: "began" in call.out, "the training")
    kill(call)
    jobs.open_gate()
    jobs.write("job.py", JOB.replace("the end", "another end"))
    assert jobs(*command).out.splitlines()[-1] == "another end"
    assert times_run(jobs) == 2


@pytest.mark.slow
def test_again_runs_it_anew(jobs: Any) -> None:
    detached = jobs("submit", "--detach", "--json", "--", *PYTHON, "job.py").json()
    assert detached["call"] == "new"
    other = jobs("submit", "--again", "--json", "--", *PYTHON, "job.py").json()
    assert other["run"] != detached["run"]
    assert times_run(jobs) == 2


@pytest.mark.slow
def test_a_detached_command_is_told_by_the_next_call(jobs: Any, until: Any) -> None:
    done = jobs("submit", "--detach", "--", *PYTHON, "job.py", "gate=gate")
    assert "the same call attaches" in done.out
    jobs.open_gate()
    until(lambda: jobs.count(state="ended") == 1, "its end")
    told = jobs("submit", "--json", "--", *PYTHON, "job.py", "gate=gate").json()
    assert (told["call"], told["exit_code"]) == ("earlier", 0)
    assert times_run(jobs) == 1


@pytest.mark.slow
def test_an_interrupt_leaves_it_running(jobs: Any, until: Any) -> None:
    call = jobs.start("submit", "--", *PYTHON, "job.py", "gate=gate")
    until(lambda: "began" in call.out, "the training")
    call.send(signal.SIGINT)
    (run,) = jobs.runs(JOBS)
    assert f"`looplab stop {run.name} --study {JOBS}` stops it" in call.ended(130).err
    jobs.open_gate()
    until(lambda: jobs.count(status="ok") == 1, "its end")


@pytest.mark.slow
def test_a_command_can_be_looked_at_and_stopped_by_its_study(jobs: Any, until: Any) -> None:
    call = jobs.start("submit", "--", *PYTHON, "job.py", "gate=never")
    until(lambda: "began" in call.out, "the training")
    assert [study["study"] for study in jobs("status", "--json").json()["studies"]] == ["toy", JOBS]
    assert jobs("logs", "--study", JOBS).out == "began gate=never\n"
    assert "job.py" in jobs("show", "--study", JOBS).out
    assert "an engine is running" in jobs("reindex", code=3).err
    assert "has stopped" in jobs("stop", "1", "--study", JOBS).out
    assert "stopped" in call.ended(128 + signal.SIGTERM).err


@pytest.mark.slow
def test_a_waiting_call_does_not_start_an_engine_that_a_person_has_stopped(jobs: Any, until: Any) -> None:
    jobs.configure(slots={"count": 1, "gpus": "none"})
    first = jobs.start("submit", "--", *PYTHON, "job.py", "gate=gate")
    until(lambda: "began" in first.out, "the first command")
    second = jobs.start("submit", "--", *PYTHON, "job.py", "n=2")
    until(lambda: "waiting" in second.error, "the second one to wait")
    jobs("stop", "--study", JOBS)
    first.ended(128 + signal.SIGTERM)
    assert "was stopped before the command" in second.ended(2).err
    assert times_run(jobs) == 1
    assert "the end" in jobs("submit", "--", *PYTHON, "job.py", "n=2").out
    assert times_run(jobs) == 2


@pytest.mark.slow
def test_who_stops_listening_was_not_told(jobs: Any, until: Any) -> None:
    reader, writer = os.pipe()
    call = jobs.start("submit", "--", *PYTHON, "job.py", "gate=gate", stdout=writer)
    os.close(writer)
    until(lambda: times_run(jobs) == 1, "the training")
    os.close(reader)
    jobs.open_gate()
    call.ended(128 + signal.SIGPIPE)
    until(lambda: jobs.count(state="ended") == 1, "its end")
    assert jobs("submit", "--json", "--", *PYTHON, "job.py", "gate=gate").json()["call"] == "earlier"


@pytest.mark.slow
def test_a_timeout_ends_it(jobs: Any) -> None:
    done = jobs("submit", "--timeout", "1", "--", *PYTHON, "-c", "import time; time.sleep(600)", code=124)
    assert "timeout after" in done.err
    assert "is not a duration" in jobs("submit", "--timeout", "soon", "--", "true", code=2).err


def test_the_studys_own_limit_holds_too(jobs: Any) -> None:
    jobs.configure(launch={**jobs.study["launch"], "timeout": 1})
    jobs("submit", "--timeout", "1h", "--", *PYTHON, "-c", "import time; time.sleep(600)", code=124)


@pytest.mark.slow
def test_a_budget_that_is_used_refuses_it(jobs: Any) -> None:
    jobs.configure(budget={"runs": 2})
    jobs("run")
    jobs("submit", "--", *PYTHON, "job.py")
    done = jobs("submit", "--", *PYTHON, "job.py", code=2)
    assert "the command was rejected: the budget of 2 runs is used" in done.err
    jobs("propose", "--change", "train.lr@set=0.2")
    jobs("run", code=None)
    assert jobs.count(study="toy") == 1, "what a command used is missing for the study"
    assert times_run(jobs) == 1


def test_one_that_waits_while_the_budget_is_used_up_is_refused(jobs: Any, until: Any) -> None:
    jobs.configure(budget={"device_hours": 2 / 3600}, slots={"count": 1, "gpus": "none"})
    first = jobs.start("submit", "--", *PYTHON, "job.py", "gate=gate")
    until(lambda: "began" in first.out, "the first command")
    second = jobs.start("submit", "--", *PYTHON, "job.py", "n=2")
    assert "device-hours is used" in second.ended(2).err
    jobs.open_gate()
    first.ended()
    assert times_run(jobs) == 1


@pytest.mark.slow
def test_a_budget_that_is_raised_serves_the_next_call(jobs: Any) -> None:
    jobs.configure(budget={"runs": 1})
    jobs("submit", "--", *PYTHON, "job.py")
    jobs.configure(budget={"runs": 2})
    jobs("submit", "--", *PYTHON, "job.py")
    assert times_run(jobs) == 2


@pytest.mark.slow
def test_a_device_has_a_run_of_the_study_or_a_command_never_both(jobs: Any, until: Any) -> None:
    jobs.configure(slots={"gpus": ["0"]})
    jobs.base(wait="study-gate")
    study = jobs.start("run")
    jobs.until_at_work()
    call = jobs.start("submit", "--", *PYTHON, "job.py")
    until(lambda: "waiting for a slot" in call.error, "the command to wait for the device")
    assert times_run(jobs) == 0
    jobs.open_gate("study-gate")
    study.ended()
    assert "the end" in call.ended().out


def test_a_command_runs_in_the_folder_it_is_called_in(jobs: Any, tmp_path: Path) -> None:
    jobs.write("experiments/v1/job.py", JOB)
    there = jobs.folder / "experiments/v1"
    told = jobs("submit", "--json", "--", *PYTHON, "job.py", cwd=there).json()
    run = Path(told["folder"])
    assert jobs.read(run, "seen.json")["cwd"] == str(there)
    assert jobs.read(run, "config.json")["cwd"] == "experiments/v1"
    assert list(jobs.read(run, "config.json")["files"]) == ["experiments/v1/job.py"]
    assert "leads out of the lab" in jobs("submit", "--lab", jobs.folder, "--", "true", cwd=tmp_path, code=2).err


def test_a_checkout_below_dot_looplab_belongs_to_the_lab(jobs: Any) -> None:
    def git(*args: str, cwd: Path = jobs.folder) -> str:
        words = ["git", "-c", "user.name=t", "-c", "user.email=t@t", *args]
        return subprocess.run(words, cwd=cwd, check=True, capture_output=True, text=True).stdout.strip()

    jobs.write(".gitignore", "outputs/\n.looplab/\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    tree = jobs.folder / ".looplab/iterate/v2"
    git("worktree", "add", "-q", "-b", "v2", str(tree))
    (tree / "job.py").write_text(JOB.replace("the end", "the end of v2"))
    git("commit", "-qam", "second", cwd=tree)
    told = jobs("submit", "--json", "--", *PYTHON, "job.py", cwd=tree).json()
    run = Path(told["folder"])
    assert run.parent == jobs.outputs(JOBS)
    assert told["tail"][-1] == "the end of v2"
    capsule = jobs.read(run, "run.json")["capsule"]
    assert (capsule["cwd"], capsule["code"]["commit"]) == (str(tree), git("rev-parse", "HEAD", cwd=tree))


def test_the_engine_ends_when_there_is_nothing_more_to_do(jobs: Any, until: Any) -> None:
    jobs("submit", "--", *PYTHON, "job.py")
    until(lambda: jobs.ask("SELECT how FROM sessions WHERE study=?", JOBS) == [("done",)], "its end")


def test_the_engine_stays_as_long_as_its_patron_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("looplab.loop.submitting.IDLE_S", 0.0)
    with subprocess.Popen(["sleep", "600"]) as owner_pid:
        queue = JobQueue(owner_pid.pid)
        assert queue.thinking
        owner_pid.kill()
    assert not queue.thinking
    assert not JobQueue(0).thinking


@pytest.mark.slow
def test_mistakes_are_told_before_anything_is_run(jobs: Any) -> None:
    for words, why in [
        (("--",), "no command is given"),
        (("job.py",), "the command comes after `--`"),
        (("stray", "--", "job.py"), "the command comes after `--`"),
        (("--", "no-such-program"), "'no-such-program' is not on PATH"),
        (("--", "./job.py"), "is not executable"),
        (("--", "true", "--api-key=abcdefgh"), "the arguments contain a secret"),
    ]:
        assert why in jobs("submit", *words, code=2).err
    assert not jobs.outputs(JOBS).exists()
    jobs.configure(study=None, studies=[{"study": "toy"}, {"study": JOBS}])
    assert "rename that study" in jobs("submit", "--study", "toy", "--", "true", code=2).err


def encoded(job: Job) -> tuple[str, ...]:
    """A job as version 0.1 recorded it: edits of an empty config."""
    return tuple(str(Edit(key, Op.NEW, value)) for key, value in job.to_dict().items())


def test_a_command_is_recorded_as_what_it_is_and_comes_back(tmp_path: Path) -> None:
    call = SubmittedJob(("./x", "@set=1", "a\nb", "{c}", "ü", ""), "/lab/x", "1e3", {"a=b.py": "f"})
    job = call.job(2.5)
    assert job == Job(call.argv, "1e3", {"a=b.py": "f"}, 2.5)
    assert Job.from_edits(encoded(job)) == job
    plan = RunPlan(job.to_dict(), job=job)
    assert RunPlan.from_dict(plan.to_dict(), plan.config) == plan
    assert RunPlan.from_dict({**plan.to_dict(), "job": True}, plan.config) == plan
    record = StudyLedger(Ledger(tmp_path / "ledger.db"), JOBS)
    new, old = (record.propose("job", edits, "x", job=one) for edits, one in (((), job), (encoded(job), None)))
    assert new is not None
    assert old is not None
    for number in (new, old):
        row = record.proposal(number)
        assert (row.job, row.edits, row.words) == (job, (), (shlex.join(job.argv),))
    first = next(record.ledger.events()).data
    assert (first["edits"], first["job"]) == ([], job.to_dict())
    assert audit(record.ledger, tmp_path).findings == ()
    record.ledger.close()
    reindex(tmp_path / "ledger.db", tmp_path)
    record = StudyLedger(Ledger(tmp_path / "ledger.db"), JOBS)
    assert [row.job for row in record.proposals()] == [job, job]


@pytest.mark.parametrize("kept", [["argv"], {"argv": ["true"]}, {"cwd": "."}])
def test_a_command_that_cannot_be_read_is_rejected(tmp_path: Path, kept: Any) -> None:
    record = StudyLedger(Ledger(tmp_path / "ledger.db"), JOBS)
    number = record.propose("job", (), "x")
    assert number is not None
    with record.ledger.write():
        record.ledger.execute("UPDATE proposals SET edits=?", (json.dumps(kept),))
    with pytest.raises(ProposalRejected, match="not a command"):
        decide_job(waiting(record.proposal(number)))


@pytest.mark.slow
def test_commands_that_an_earlier_version_recorded_are_still_run(jobs: Any) -> None:
    jobs("submit", "--", *PYTHON, "job.py", "first")
    ledger = Ledger(jobs.folder / ".looplab/ledger.db")
    job = Job((*PYTHON, "job.py", "old"), ".", {})
    StudyLedger(ledger, JOBS).propose("job", encoded(job), "an old one", source="job:0:0")
    ledger.close()
    jobs("submit", "--", *PYTHON, "job.py", "third")
    assert [config["argv"][-1] for config in jobs.all("config.json", JOBS)] == ["first", "old", "third"]
    jobs("verify")
    state = jobs.folder / ".looplab"
    for path in (*state.glob("ledger.db*"), *state.glob("backups/*"), state / "journal.jsonl", state / "head"):
        path.unlink()
    jobs("reindex")  # from the run folders alone
    rows = StudyLedger(Ledger.open_readonly(state / "ledger.db"), JOBS).proposals()
    assert [row.job.argv[-1] for row in rows if row.job is not None] == ["first", "old", "third"]
    jobs("verify")


def test_time_that_two_engines_were_at_work_counts_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    sessions = [("toy", 0.0, 10.0), (JOBS, 5.0, 7.0), (JOBS, 8.0, 14.0), ("toy", 20.0, 21.0)]
    with ledger.write():
        for study, began, ended in sessions:
            ledger.execute(
                "INSERT INTO sessions (study, host, pid, ticks, began, seen, ended) VALUES (?,'',0,0,?,?,?)",
                (study, began, ended, ended),
            )
        StudyLedger(ledger, JOBS).plan(
            round=1,
            proposal=None,
            proposer="job",
            parent=None,
            base="job",
            reason="",
            config_hash="",
            devices=1,
            plan=RunPlan({}),
        )
    for study in ("toy", JOBS):
        usage = StudyLedger(ledger, study).shared_usage()
        assert (usage.wall, usage.runs) == (15.0, 1)
    ledger.close()
