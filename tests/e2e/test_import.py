"""`looplab import`: recorded runs of other tools become runs of a study."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest


def autopilot_runs(root: Path) -> Path:
    """Run folders as the PufferLib autopilot leaves them; three have no trainer_summary.json."""
    for n in range(8):
        run = root / f"2025-01-0{n + 1}T000000Z"
        run.mkdir(parents=True)
        config = {"env_name": "drone", "train": {"lr": 0.05 * (n + 1), "batch": 16 * (n + 1)}, "sleep": 0.0}
        (run / "config.json").write_text(json.dumps(config))
        (run / "override.json").write_text(json.dumps({"train": {"lr": 0.05 * (n + 1)}}))
        (run / "run.json").write_text(json.dumps({"run_id": run.name, "metadata": {"mode": "quick"}}))
        if n < 5:
            said = {"run_id": run.name, "train": {"seed": 42}, "metrics": {"loss": 0.5 + 0.1 * n, "sps": 100}}
            (run / "trainer_summary.json").write_text(json.dumps(said))
            (run / "train.log").write_text("hello WANDB_API_KEY=sk-ant-REDACTED\n")
    return root


@pytest.fixture
def autopilot(tmp_path: Path) -> Path:
    return autopilot_runs(tmp_path / "autopilot" / "runs")


def imported(lab: Any) -> list[tuple[Any, ...]]:
    return lab.ask("SELECT id, objective, round, proposer, started FROM runs WHERE role='imported' ORDER BY n")


def test_recorded_runs_become_runs_of_the_study_and_are_marked_everywhere(lab: Any, autopilot: Path) -> None:
    done = lab("import", autopilot)
    assert "5 runs imported" in done.out
    for n in (6, 7, 8):
        assert f"not imported: {autopilot}/2025-01-0{n}T000000Z: it has no trainer_summary.json" in done.out
    rows = imported(lab)
    assert [round(row[1], 3) for row in rows] == [0.5, 0.6, 0.7, 0.8, 0.9]
    assert {row[2:] for row in rows} == {(0, "import", None)}
    assert "5 imported" in lab("status").out
    facts = lab("status", "--json").json()["studies"][0]
    assert facts["counts"] == {"imported": 5}
    assert facts["used"]["runs"] == facts["used"]["rounds"] == 0
    assert facts["best"] is None
    shown = lab("show", "2")
    assert "imported from" in shown.out
    assert lab("show", "2", "--json").json()["run"]["role"] == "imported"
    assert lab("query", "SELECT role, count(*) FROM runs GROUP BY 1", "--json").json()
    lab("report")
    report = (lab.outputs() / "report.md").read_text()
    assert "## Imported runs" in report
    assert "Round 0" not in report
    assert "whole" in lab("verify").out
    assert "imported" in (lab.outputs() / "labbook.md").read_text()


def test_values_go_into_the_base_and_what_is_not_said_is_named(lab: Any, autopilot: Path) -> None:
    told = lab("import", autopilot, "--json").json()
    assert len(told["unreadable"]) == 3
    first = told["imported"][0]
    assert set(first["knobs"]) == {"train.lr", "train.batch", "sleep"}
    assert set(first["assumed"]) == {"wait", "exit"}
    config = lab.read(lab.runs()[0], "config.json") if lab.runs() else {}
    assert config["train"] == {"lr": 0.05, "batch": 16}
    assert config["steps"] == 3


def test_secrets_of_other_tools_are_not_copied(lab: Any, autopilot: Path) -> None:
    for run in autopilot.iterdir():
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**config, "wandb": {"api_key": "abcdefghijklmnop1234567890"}}))
        (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1, "token": "hf_abcdefghijklmnopqrstuvwxyz01"}\n')
    lab("import", autopilot)
    files = [path for path in lab.outputs().rglob("*") if path.is_file()]
    text = b"".join(path.read_bytes() for path in files) + (lab.folder / ".looplab/ledger.db").read_bytes()
    assert b"abcdefghijklmnop1234567890" not in text
    assert b"hf_abcdefghijklmnopqrstuvwxyz01" not in text


def test_importing_again_imports_nothing_twice(lab: Any, autopilot: Path) -> None:
    lab("import", autopilot)
    again = lab("import", autopilot)
    assert "0 runs imported, 5 already known" in again.out
    moved = autopilot.rename(autopilot.with_name("moved"))
    assert "0 runs imported, 5 already known" in lab("import", moved).out
    (moved / "2025-01-01T000000Z" / "trainer_summary.json").write_text('{"metrics": {"loss": 0.1}}')
    lab("import", moved)
    assert len(imported(lab)) == 6  # moved and changed: another run


def test_a_dry_run_writes_nothing(lab: Any, autopilot: Path) -> None:
    before = lab.tree()
    done = lab("import", autopilot, "--dry-run")
    assert "5 runs would be imported" in done.out
    assert lab.tree() == before


def test_runs_after_an_import_are_counted_judged_and_best_on_their_own(lab: Any, autopilot: Path) -> None:
    lab.configure(seed=None, judge={"baseline_seeds": 2, "replicates": 2, "max_replicates": 3}, budget={"runs": 5})
    lab("import", autopilot)
    lab("run", "--rounds", "1")
    assert lab.count(role="base") == 1
    assert lab.count() - len(imported(lab)) <= 5
    best = lab.ask("SELECT best FROM studies")[0][0]
    assert best not in {row[0] for row in imported(lab)}
    assert not lab.ask("SELECT * FROM verdicts WHERE run IN (SELECT id FROM runs WHERE role='imported')")
    assert lab("show", "LATEST", "--json").json()["run"]["role"] != "imported"
    assert "whole" in lab("verify").out


def test_an_imported_config_may_be_run_here(lab: Any, autopilot: Path) -> None:
    """A program may propose what another tool has tried; it is not a repetition."""
    lab("import", autopilot)
    lab.write("rules.yaml", "rules:\n  - {name: lr, when: objective > 0, once: true, edits: "
              "['train.lr@set=0.05', 'train.batch@set=16']}\n")  # fmt: skip
    lab.configure(proposers=[{"rules": "rules.yaml"}])
    lab("run", "--rounds", "2")
    assert lab.count(role="trial") == 1


def test_search_uses_imported_points(lab: Any, autopilot: Path) -> None:
    knobs = {key: lab.study["knobs"][key] for key in ("train.lr", "train.batch")}
    lab.configure(proposers=[{"search": {"sampler": "auto", "startup": 4}}], knobs=knobs)
    lab("import", autopilot)
    lab("run", "--rounds", "2")
    reasons = [row[0] for row in lab.ask("SELECT reason FROM runs WHERE role='trial'")]
    assert reasons
    assert all("expected improvement on" in reason for reason in reasons)  # 5 points are imported
    assert lab("plan", "--rounds", "3", "--json").json()["runs"]


def test_the_tables_are_rebuilt_with_imported_runs(lab: Any, autopilot: Path) -> None:
    lab("import", autopilot)
    lab("run", "--rounds", "1")
    before = lab.ask("SELECT id, n, round, role, status, objective, point FROM runs ORDER BY n")
    rounds = lab.ask("SELECT n FROM rounds")
    lab("reindex")
    assert lab.ask("SELECT id, n, round, role, status, objective, point FROM runs ORDER BY n") == before
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm", "journal.jsonl"):
        (lab.folder / ".looplab" / name).unlink(missing_ok=True)
    for backup in (lab.folder / ".looplab" / "backups").glob("*"):
        backup.unlink()
    lab("reindex")
    assert lab.ask("SELECT id, n, round, role, status, objective, point FROM runs ORDER BY n") == before
    assert lab.ask("SELECT n FROM rounds") == rounds
    assert "0 runs imported, 5 already known" in lab("import", autopilot).out
    assert "whole" in lab("verify").out


@pytest.mark.slow
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("before", [True, False])
def test_an_import_that_is_killed_is_completed(lab: Any, autopilot: Path, before: bool, calls: int) -> None:
    """Killed before or after the ledger knows the run, while its folder has a hidden name."""
    lab.write("site/sitecustomize.py", f"""
import os, signal
rename = os.rename
left = {calls}
def killing(source, target, **rest):
    global left
    if "/.import-" in str(source):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return rename(source, target, **rest)
os.rename = killing
if {before}:
    from looplab.ledger.study import StudyLedger
    real = StudyLedger.record_import
    def record(self, *args, **rest):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *args, **rest)
    StudyLedger.record_import = record
""")  # fmt: skip
    killed = lab("import", autopilot, code=None, env={"PYTHONPATH": str(lab.folder / "site")})
    assert killed.code == -signal.SIGKILL
    assert lab("verify", code=None).code == 0
    lab("run", "--rounds", "1")
    assert not list(lab.outputs().glob(".import-*"))
    lab("import", autopilot)
    assert len(imported(lab)) == 5
    assert len({row[1] for row in imported(lab)}) == 5
    assert "whole" in lab("verify").out


def test_nothing_is_imported_while_an_engine_runs(lab: Any, autopilot: Path) -> None:
    lab.base(wait="gate")
    running = lab.start("run", "--rounds", "1")
    lab.until_at_work()
    assert "has an engine already" in lab("import", autopilot, code=None).err
    lab.open_gate()
    running.ended()


def test_names_are_mapped(lab: Any, tmp_path: Path) -> None:
    run = tmp_path / "elsewhere" / "a"
    run.mkdir(parents=True)
    (run / "metrics.csv").write_text("step,objective_value\n1,0.4\n2,0.3\n")
    (run / "config.yaml").write_text("optimizer:\n  learning_rate: 0.2\n")
    told = lab("import", tmp_path / "elsewhere", "--json", "--map", "objective_value=loss",
               "--map", "optimizer.learning_rate=train.lr").json()  # fmt: skip
    assert told["imported"][0]["objective"] == 0.3
    assert told["imported"][0]["knobs"] == ["train.lr"]


def test_what_is_not_a_run_is_an_error(lab: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no runs found" in lab("import", tmp_path / "empty", code=1).out
    assert "no such folder" in lab("import", tmp_path / "gone", code=1).out
    assert "--map" in lab("import", tmp_path / "empty", "--map", "x", code=2).err
    assert "nothing to import" in lab("import", code=2).err


def test_hostile_folders_are_named_and_harm_nothing(lab: Any, tmp_path: Path) -> None:
    for name, write in {
        "pipe": lambda run: os.mkfifo(run / "metrics.jsonl"),
        "deep": lambda run: (run / "trainer_summary.json").write_text("[" * 100_000),
        "loop": lambda run: os.symlink("metrics.jsonl", run / "metrics.jsonl"),
        "zero": lambda run: os.symlink("/dev/zero", run / "metrics.jsonl"),
    }.items():
        run = tmp_path / "bad" / name
        run.mkdir(parents=True)
        write(run)
        (run / "config.json").write_text('{"train": {"lr": 1e999, "batch": "\\ud83d"}}')
    good = tmp_path / "bad" / "good"
    good.mkdir()
    (good / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    (good / "config.json").write_text('{"train": {"lr": NaN, "batch": "\\u001b[2J"}}')
    done = lab("import", tmp_path / "bad")
    assert "1 run imported" in done.out
    assert done.out.count("not imported: ") >= 3
    assert "\x1b[2J" not in done.out + lab("show", "1").out
    assert "whole" in lab("verify").out


@pytest.mark.slow
def test_trials_of_optuna_are_imported(lab: Any, tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    url = f"sqlite:///{tmp_path}/x.db"
    for name in ("mine", "other"):
        study = optuna.create_study(storage=url, study_name=name, direction="minimize")
        for lr in (0.1, 0.2, 0.3):
            distributions = {"lr": optuna.distributions.FloatDistribution(0.001, 1)}
            study.add_trial(optuna.trial.create_trial(params={"lr": lr}, distributions=distributions, value=lr * 2))
        study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL))
    before = (tmp_path / "x.db").read_bytes()
    assert "--optuna-study" in lab("import", "--optuna", url, code=2).err
    told = lab("import", "--optuna", url, "--optuna-study", "mine", "--json").json()
    assert [one["objective"] for one in told["imported"]] == [0.2, 0.4, 0.6]
    assert told["imported"][0]["knobs"] == ["train.lr"]
    assert len(told["unreadable"]) == 1
    assert (tmp_path / "x.db").read_bytes() == before
    assert lab("import", "--optuna", url, "--optuna-study", "mine", "--json").json()["imported"] == []
    lab.configure(objective={"metric": "loss", "goal": "max"})
    assert "minimize" in lab("import", "--optuna", url, "--optuna-study", "other", code=2).err


def test_a_journal_of_optuna_is_imported(lab: Any, tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(storage=JournalStorage(JournalFileBackend(str(tmp_path / "x.log"))))
    study.optimize(lambda trial: trial.suggest_float("train.lr", 0.01, 0.5), n_trials=2)
    assert len(lab("import", "--optuna", tmp_path / "x.log", "--json").json()["imported"]) == 2


def test_agents_and_rules_are_told_of_imported_runs(lab: Any, autopilot: Path) -> None:
    lab("import", autopilot)
    lab.write("rules.py", "def decide(summary, history):\n"
              "    n = sum(one['role'] == 'imported' for one in history)\n"
              "    return [{'edits': [f'train.batch@set={n + 100}'], 'reason': 'seen'}]\n")  # fmt: skip
    lab.configure(proposers=[{"rules": "rules.py"}])
    lab("run", "--rounds", "2")
    assert lab.read(lab.runs()[-1], "config.json")["train"]["batch"] == 105
    lab.write(
        "agent.py", "import sys\nopen('../seen.txt', 'w').write(sys.stdin.read() + ' '.join(sys.argv))\nprint('{}')\n"
    )
    from looplab.config.lab import load_lab
    from looplab.decide.history import History
    from looplab.decide.prompt import TEMPLATE, render_prompt
    from looplab.ledger.ledger import Ledger
    from looplab.ledger.study import StudyLedger
    from looplab.loop.setup import make_guard

    study = load_lab(lab.folder).study(None)
    record = StudyLedger(Ledger(lab.folder / ".looplab/ledger.db"), "toy")
    prompt = render_prompt(
        TEMPLATE, study, make_guard(study), record, History(record, lab.outputs()), lab.outputs(),
        parent=None, parent_config={"train": {"lr": 0.1}}, n=1, answer="x", budget="",
    )  # fmt: skip
    assert "imported; not run here" in prompt
    assert "train.lr=0.05" in prompt


def test_an_imported_run_cannot_be_reproduced(lab: Any, autopilot: Path) -> None:
    lab("import", autopilot)
    assert "was imported" in lab("reproduce", "1", code=2).err


@pytest.mark.slow
def test_imported_runs_follow_a_changed_objective(lab: Any, autopilot: Path) -> None:
    lab("import", autopilot)
    lab("run", "--rounds", "1")
    before = imported(lab)
    lab("remeasure")
    assert imported(lab) == before
    lab.configure(objective={"metric": "sps", "goal": "max"})
    lab("remeasure", code=None)
    assert [row[1] for row in imported(lab)] == [100.0] * 5
    assert lab.ask("SELECT best FROM studies")[0][0] not in {row[0] for row in imported(lab)}
    assert "whole" in lab("verify").out
