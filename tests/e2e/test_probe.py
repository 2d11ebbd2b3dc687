"""probe: which setting is fastest on this machine, with a trainer whose speed is known, hangs and crashes included."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

TRAINER = '''\
"""Its speed is 1000 a worker up to 4 workers, and a little with the batch; some settings hang, crash or shake."""
import json, os, sys, time
config = json.load(open(os.environ["LOOPLAB_CONFIG"]))
workers, envs = config["vec"]["workers"], config["vec"]["envs"]
lab = os.environ["LOOPLAB_LAB"]
open(os.path.join(lab, "executed"), "a").write(f"{workers}x{envs}\\n")
if workers == 3:
    sys.exit("workers 3: no shared memory")
speed = 1000 * min(workers, 4) + envs
with open(os.environ["LOOPLAB_METRICS"], "a") as file:
    for step in range(config["steps"]):
        shake = 1 + 0.9 * (-1) ** step * (workers == 6)
        slow_start = 0.1 if step < config["steps"] // 4 else 1
        print(json.dumps({"step": step, "sps": speed * shake * slow_start}), file=file, flush=True)
        if workers == 8 and step == 10:
            time.sleep(1200)
while config["gate"] and workers == 4 and not os.path.exists(os.path.join(lab, config["gate"])):
    time.sleep(0.01)
'''
KNOBS = {
    "vec.workers": {"type": "int", "low": 1, "high": 16},
    "vec.envs": {"type": "int", "low": 1, "high": 64},
    "steps": {"type": "int", "low": 1, "high": 10000},
}
SWEEP = {"vec.workers": [2, 4], "vec.envs": [8, 16]}


@pytest.fixture
def probed(lab: Any) -> Any:
    lab.write("train.py", TRAINER)
    lab.write("configs/base.json", json.dumps({"vec": {"workers": 1, "envs": 8}, "steps": 10000, "gate": ""}))
    lab.configure(modes=None, knobs=KNOBS, objective={"metric": "reward", "goal": "max"}, proposers=None)
    probe_of(lab)
    return lab


def probe_of(lab: Any, **changes: Any) -> None:
    probe = {"sweep": SWEEP, "edits": ["steps@set=40"], "timeout": 600, "stall": 500}
    lab.configure(probe={**probe, **changes})


def result(done: Any) -> Any:
    return done.lines()[-1]


def status_of(told: Any) -> dict[tuple[int, int], str]:
    return {(s["values"]["vec.workers"], s["values"]["vec.envs"]): s["status"] for s in told["settings"]}


def executed(lab: Any) -> list[str]:
    path = Path(lab.folder / "executed")
    return path.read_text().split() if path.exists() else []


def test_the_fastest_setting_is_recommended_as_edits(probed: Any) -> None:
    done = probed("probe")
    # 4 x 16 gives 4016, but 4 x 8 with 4008 is as fast and cheaper; the base, 1 x 8, is measured too.
    assert "recommended: vec.workers@set=4 vec.envs@set=8" in done.out
    assert "the cheapest within 3% of the fastest, vec.workers=4, vec.envs=16 (4,016)" in done.out
    assert "3.98 times the base" in done.out
    entry = json.loads((probed.folder / "proposals" / "probe.json").read_text())
    assert entry["edits"] == ["vec.workers@set=4", "vec.envs@set=8"]
    assert sorted(executed(probed)) == ["1x8", "2x16", "2x8", "4x16", "4x8"]
    assert {config["steps"] for config in probed.all("config.json", "toy.probe")} == {40}
    assert probed("verify").code == 0


@pytest.mark.slow
def test_the_command_that_is_told_puts_the_setting_in_the_queue(probed: Any) -> None:
    words = next(line for line in probed("probe").out.splitlines() if "try it: looplab " in line).split()
    probed(*words[words.index("looplab") + 1 :])
    assert probed.ask("SELECT edits FROM proposals WHERE study='toy'") == [('["vec.workers@set=4","vec.envs@set=8"]',)]


def test_runs_go_one_after_the_other_with_all_cores(probed: Any) -> None:
    probed("probe")
    about = probed.all("run.json", "toy.probe")
    assert {tuple(run["cores"]) for run in about} == {tuple(sorted(os.sched_getaffinity(0)))}
    spans = sorted((e["started"], e["ended"]) for e in probed.all("exit.json", "toy.probe"))
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


@pytest.mark.slow
def test_what_hangs_crashes_or_shakes_is_never_recommended(probed: Any) -> None:
    probe_of(probed, sweep={"vec.workers": [2, 3, 6, 8, 32], "vec.envs": [8]}, stall=10)
    told = result(probed("probe", "--json"))
    found = status_of(told)
    assert found[2, 8] == found[1, 8] == "stable"
    assert found[3, 8] == "failed: its last line: workers 3: no shared memory"
    assert found[6, 8].startswith("varies by")
    assert found[8, 8] == "stalled"
    assert found[32, 8].startswith("not run: vec.workers: 32 is above")
    assert "32x8" not in executed(probed)
    assert told["recommended"]["values"] == {"vec.workers": 2, "vec.envs": 8}


def test_a_run_that_takes_too_long_is_not_stable(probed: Any) -> None:
    probe_of(probed, sweep={"vec.workers": [8], "vec.envs": [8]}, timeout=2)
    assert status_of(result(probed("probe", "--json", code=None)))[8, 8] == "not done after 2 s"


@pytest.mark.slow
def test_a_probe_that_was_done_is_not_run_again_but_a_fresh_one_is(probed: Any) -> None:
    probed("probe")
    again = probed("probe")
    assert "have been measured" in again.out
    assert "recommended: vec.workers@set=4 vec.envs@set=8" in again.out
    assert len(executed(probed)) == 5
    told = result(probed("probe", "--fresh", "--json"))
    assert told["probe"] == "toy.probe2"
    assert len(executed(probed)) == 10
    assert result(probed("probe", "--json"))["probe"] == "toy.probe2"
    assert len(executed(probed)) == 10


@pytest.mark.slow
def test_a_larger_sweep_runs_only_what_is_new_and_other_edits_run_all(probed: Any) -> None:
    probed("probe")
    probe_of(probed, sweep={"vec.workers": [2, 4, 5], "vec.envs": [8, 16]})
    probed("probe")
    assert sorted(executed(probed)[5:]) == ["5x16", "5x8"]
    probe_of(probed, edits=["steps@set=60"])
    told = result(probed("probe", "--json"))
    assert len(executed(probed)) == 12
    assert {setting["rows"] for setting in told["settings"]} == {60}


@pytest.mark.slow
def test_a_killed_probe_goes_on_where_it_was(probed: Any, until: Any) -> None:
    probe_of(probed, edits=["steps@set=40", "gate@set=gate"])
    engine = probed.start("probe")
    until(lambda: "4x8" in executed(probed), "the run that waits")
    os.kill(engine.pid, signal.SIGKILL)
    engine.process.wait()
    before = len(executed(probed))
    assert "is still running" in probed("probe", "--fresh", code=3).err
    probed.open_gate()
    told = result(probed("probe", "--json"))
    assert set(status_of(told).values()) == {"stable"}
    assert len(executed(probed)) == 5 > before
    assert sorted(executed(probed)) == ["1x8", "2x16", "2x8", "4x16", "4x8"]
    assert probed("verify").code == 0


def test_a_run_that_only_its_folder_knows_of_is_not_measured_beside(probed: Any) -> None:
    probe_of(probed, sweep={"vec.workers": [2], "vec.envs": [8]})
    probed("probe")
    last = probed.runs("toy.probe")[-1]  # as it is when the engine is killed at the very start of a run
    for name in ("exit.json", "process.json", "summary.json"):
        (last / "record" / name).unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(probed.folder / ".looplab" / "ledger.db")) as db, db:
        db.execute("UPDATE runs SET state='planned', status=NULL WHERE id=?", (last.name,))
    assert f"run {last.name} of the last probe is still running" in probed("probe", "--fresh", code=3).err


def test_a_run_that_a_person_stopped_is_made_again(probed: Any, until: Any) -> None:
    probe_of(probed, sweep={"vec.workers": [4]}, edits=["steps@set=40", "gate@set=gate"])
    engine = probed.start("probe")
    until(lambda: "4x8" in executed(probed), "the run that waits")
    engine.send(signal.SIGTERM)
    done = engine.ended(130)
    assert "1 run to go" in done.out
    assert "the probe is not done" in done.out
    assert not (probed.folder / "proposals" / "probe.json").exists()
    probed.open_gate()
    told = result(probed("probe", "--json"))
    assert executed(probed) == ["1x8", "4x8", "4x8"]
    assert told["recommended"]["values"]["vec.workers"] == 4


def test_a_probe_does_not_begin_beside_the_study(probed: Any) -> None:
    probed.write("configs/base.json", json.dumps({"vec": {"workers": 4, "envs": 8}, "steps": 5, "gate": "gate"}))
    engine = probed.start("run", "--runs", "1")
    probed.until_at_work()
    assert "would disturb" in probed("probe", code=3).err
    probed.open_gate()
    engine.ended(None)


def test_a_swept_key_that_is_no_knob_is_tried_and_said_to_be_none(probed: Any) -> None:
    probed.configure(knobs={"vec.envs": KNOBS["vec.envs"]})
    done = probed("probe")
    assert "recommended: vec.workers@set=4 vec.envs@set=8" in done.out
    assert "vec.workers is not a knob of the study" in done.out


def test_settings_that_the_guard_makes_the_same_are_run_once(probed: Any) -> None:
    probed.configure(normalise=[{"set": "vec.envs", "to": "ceil_to(vec.envs, vec.workers)"}])
    probe_of(probed, sweep={"vec.workers": [4], "vec.envs": [7, 8]})
    told = result(probed("probe", "--json"))
    assert executed(probed) == ["1x8", "4x8"]
    assert any("the same as" in setting["status"] for setting in told["settings"])
    assert told["recommended"]["edits"] == ["vec.workers@set=4", "vec.envs@set=8"]


def test_repeats_are_counted_with_the_base(probed: Any) -> None:
    probe_of(probed, sweep={"vec.workers": [1, 2], "vec.envs": [8]}, repeats=3)
    told = result(probed("probe", "--json"))
    assert executed(probed) == ["1x8", "2x8"] * 3  # by turns, so that a slow minute does not hit one setting alone
    assert [len(setting["runs"]) for setting in told["settings"]] == [3, 3]
    assert [setting["base"] for setting in told["settings"]] == [True, False]


def test_without_any_stable_setting_the_exit_code_says_so(probed: Any) -> None:
    probe_of(probed, metric="fps")
    done = probed("probe", code=1)
    assert "no setting is stable: name the metric that the trainer measures" in done.out
    assert "fps was not measured; it measured sps" in done.out


def test_a_study_that_asks_for_exec_shows_what_would_be_tried(probed: Any) -> None:
    probed.configure(needs_exec=True)
    done = probed("probe")
    assert "vec.workers=4, vec.envs=16" in done.out
    assert executed(probed) == []
    assert not (probed.folder / ".looplab").exists()


@pytest.mark.slow
def test_mistakes_are_told_with_their_line(probed: Any) -> None:
    probed.configure(derive={"vec.envs": "vec.workers * 2"})
    assert f"lab.yaml:{probed.line('probe')}: probe.sweep: vec.envs is derived" in probed("probe", code=2).err
    probed.configure(derive=None)
    probe_of(probed, edits=["stepz@mul=2"])
    assert f"lab.yaml:{probed.line('probe')}: configs/base.json: " in probed("probe", code=2).err
    probe_of(probed)
    probed.configure(launch={"command": ["no-such-program"]})
    assert f"lab.yaml:{probed.line('launch')}: " in probed("probe", code=2).err
    probed.configure(probe=None)
    assert "has no `probe` section" in probed("probe", code=2).err
