"""The Python API: what it does is what the command line does, on the same study."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import looplab
from looplab import Choice, Float, Int, LabError
from looplab.loop.outcome import Ending

TRAINER = """
import json, os, sys
config = json.load(open(os.environ["LOOPLAB_CONFIG"]))
loss = (config["lr"] - 0.3) ** 2 + config["layers"] / 100
open(os.environ["LOOPLAB_METRICS"], "a").write(json.dumps({"step": 1, "loss": loss}) + "\\n")
"""
BASE = {"lr": 0.1, "layers": 2, "act": "relu", "seed": 0}
KNOBS = {"lr": Float(1e-3, 1.0, log=True), "layers": Int(1, 8), "act": Choice("relu", "gelu")}
SLOTS = {"count": 2, "gpus": "none", "cores": "none"}


def define(folder: Path, **more: Any) -> looplab.Study:
    (folder / "train.py").write_text(TRAINER)
    settings: dict[str, Any] = {"proposers": [{"search": "random"}], "slots": SLOTS, "budget": {"runs": 6}, **more}
    command = ["{python}", "train.py"]
    return looplab.create_study(
        folder, "toy", trainer=command, base=BASE, knobs=KNOBS, metric="loss", goal="min", **settings
    )


def command_line(folder: Path, *words: str) -> Any:
    done = subprocess.run([sys.executable, "-m", "looplab", *words, "--lab", str(folder), "--json"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    return json.loads(done.stdout)


def test_a_study_of_python_is_the_study_of_the_command_line(tmp_path: Path) -> None:
    study = define(tmp_path)
    events: list[looplab.EngineEvent] = []
    result = study.run(callbacks=[events.append])
    assert result.ok
    assert result.outcome.ending is Ending.DONE
    assert len(study.runs) == 6
    best = study.best
    assert best is not None
    assert best.objective == min(run.objective for run in study.runs if run.objective is not None)
    ended = [event for event in events if isinstance(event, looplab.RunEnded)]
    assert {event.run for event in ended} == {run.id for run in study.runs}
    assert all(event.status == "ok" and event.objective is not None for event in ended)
    status = command_line(tmp_path, "status")["studies"][0]
    assert (status["study"], status["best"]["id"], status["used"]["runs"]) == ("toy", best.id, 6)
    assert study.run_named("best").id == best.id
    assert best.config()["lr"] != BASE["lr"] or best.role == "base"
    assert (tmp_path / "outputs/toy/report.html").exists()
    assert command_line(tmp_path, "verify")["whole"] is True


def test_the_same_definition_again_changes_nothing_and_another_one_replaces_it(tmp_path: Path) -> None:
    define(tmp_path)
    before = (tmp_path / "lab.yaml").stat().st_ino
    define(tmp_path)
    assert (tmp_path / "lab.yaml").stat().st_ino == before
    define(tmp_path, budget={"runs": 7})
    assert "7" in (tmp_path / "lab.yaml").read_text()


def test_a_lab_file_that_a_person_changed_is_not_overwritten(tmp_path: Path) -> None:
    define(tmp_path)
    path = tmp_path / "lab.yaml"
    path.write_text(path.read_text().replace('"runs": 6', '"runs": 9'))
    with pytest.raises(LabError, match="by hand"):
        define(tmp_path)
    assert '"runs": 9' in path.read_text()
    define(tmp_path, overwrite=True)
    assert '"runs": 6' in path.read_text()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"budget": {"rums": 3}}, "did you mean 'runs'"), ({"judge": object()}, "cannot be written")],
)
def test_a_mistake_in_a_definition_is_named_and_leaves_the_lab_as_it_was(
    tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    define(tmp_path)
    before = (tmp_path / "lab.yaml").read_text()
    with pytest.raises(LabError, match=message):
        define(tmp_path, **wrong)
    assert (tmp_path / "lab.yaml").read_text() == before


def test_a_name_cannot_lead_out_of_the_lab(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    with pytest.raises(LabError, match="cannot be a study's name"):
        looplab.create_study(
            tmp_path / "lab", "../out", trainer=["true"], base=BASE, knobs=KNOBS, metric="loss", goal="min"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["lab"]
    assert not list((tmp_path / "lab").iterdir())


def test_events_can_be_iterated_and_leaving_the_loop_stops_the_study(tmp_path: Path) -> None:
    study = define(tmp_path, budget={"runs": 40})
    for event in study.events():
        if isinstance(event, looplab.RunEnded):
            break
    done = len([run for run in study.runs if run.state == "ended"])
    assert 0 < done < 40
    assert not [run for run in study.runs if run.state == "running"]
    assert len([event for event in study.events(runs=done + 1) if isinstance(event, looplab.RunEnded)]) >= 1


def test_an_exception_in_a_callback_ends_the_study_cleanly(tmp_path: Path) -> None:
    study = define(tmp_path, budget={"runs": 40})

    def fail(event: looplab.EngineEvent) -> None:
        if isinstance(event, looplab.RunEnded):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        study.run(callbacks=[fail])
    assert all(run.state != "running" for run in study.runs)
    assert len(study.runs) < 40


def test_a_judged_study_has_a_champion_and_verdicts_with_their_evidence(tmp_path: Path) -> None:
    study = define(
        tmp_path, proposers=[], seed="seed", budget={"rounds": 4},
        judge={"baseline_seeds": 2, "replicates": 2, "max_replicates": 2}, deterministic=True,
    )  # fmt: skip
    assert (study.champion, study.verdicts) == (None, [])
    study.propose(["lr@set=0.3"], "the optimum")
    study.run()
    champion = study.champion
    assert champion is not None
    assert champion.config()["lr"] == 0.3
    given = {verdict.run: verdict for verdict in study.verdicts}[champion.id]
    assert (given.verdict, champion.verdict) == ("keep", "keep")
    assert given.effect is not None
    assert math.isclose(given.effect, 0.04)


def test_ask_and_tell_train_in_the_callers_process(tmp_path: Path) -> None:
    study = define(tmp_path)
    asked = []
    with study.ask_tell(runs=5) as loop:
        while (trial := loop.ask()) is not None:
            asked.append(trial.run)
            loss = (trial.config["lr"] - 0.3) ** 2
            loop.log(trial, {"loss": loss + 1}, step=1)
            if len(asked) == 3:
                loop.tell(trial, ok=False)
            else:
                loop.tell(trial, {"loss": loss}, step=2)
    assert loop.result is not None
    assert loop.result.outcome.ending is Ending.DONE
    runs = study.runs
    assert sorted(run.id for run in runs) == sorted(asked)
    assert [run.status for run in runs].count("failed") == 1
    best = study.best
    assert best is not None
    assert best.objective is not None
    assert math.isclose(best.objective, (best.config()["lr"] - 0.3) ** 2)
    with pytest.raises(LabError, match="has ended"):
        loop.tell(trial_of(best), {"loss": 0.0})
    assert command_line(tmp_path, "verify")["whole"] is True


def trial_of(run: looplab.Run) -> looplab.Trial:
    return looplab.Trial(run.id, run.config(), None, run.folder, run.folder / "metrics.jsonl")


def test_trials_of_a_killed_process_are_lost_and_the_study_continues(tmp_path: Path) -> None:
    define(tmp_path)
    code = f"""
        import os, signal, looplab
        with looplab.open({str(tmp_path)!r}).study().ask_tell() as loop:
            loop.tell(loop.ask(), {{"loss": 1.0}})
            loop.ask()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert killed.returncode == -signal.SIGKILL
    study = looplab.open(tmp_path).study()
    study.resume()
    statuses = [run.status for run in study.runs]
    assert statuses.count("ok") >= 4
    assert set(statuses) == {"ok", "lost"}


def test_proposals_of_python_wait_in_the_same_queue(tmp_path: Path) -> None:
    study = define(tmp_path, proposers=[])
    number = study.propose({"lr": 0.3, "act": "gelu"}, "try both")
    study.run(rounds=1)
    (run,) = [run for run in study.runs if run.reason == "try both"]
    assert (run.config()["lr"], run.config()["act"]) == (0.3, "gelu")
    rows = study.frame("proposals")
    assert list(rows[rows["id"] == number]["status"]) == ["accepted"]


@pytest.mark.parametrize("edits", [{"lrr": 0.3}, ["lr@set=99"], ["lr=0.3"]])
def test_a_proposal_that_can_never_run_is_refused(tmp_path: Path, edits: Any) -> None:
    study = define(tmp_path, proposers=[])
    with pytest.raises(looplab.LabError, match="lr"):
        study.propose(edits, "no chance")
    assert not (tmp_path / ".looplab" / "ledger.db").exists()


def test_an_unknown_option_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unknown option 'round'"):
        define(tmp_path).run(round=1)


def test_the_public_names_are_listed_and_cost_nothing_until_they_are_used() -> None:
    assert set(looplab.__all__) < set(dir(looplab))
    assert all(getattr(looplab, name) is not None for name in looplab.__all__)
    code = "import sys, looplab; print('pydantic' in sys.modules, 'sqlite3' in sys.modules, looplab.Float.__name__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False", "Float"]
    assert os.path.exists(Path(looplab.__file__).with_name("py.typed"))
