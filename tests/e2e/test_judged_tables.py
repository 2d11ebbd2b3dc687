"""What the tables of the command line say where there is a judge: configs with their means, verdicts, a champion."""

from __future__ import annotations

from typing import Any

import pytest

TRAINER = """\
import json, os, random
config = json.load(open(os.environ["LOOPLAB_CONFIG"]))
score = config["x"] + random.Random(str(config["seed"])).gauss(0, 0.05)
score += random.Random(f"{config['seed']} {config['x']}").gauss(0, 0.02)
with open(os.environ["LOOPLAB_METRICS"], "a") as file:
    print(json.dumps({"step": 1, "score": score}), file=file)
"""


@pytest.fixture
def judged(lab: Any) -> Any:
    lab.write("train.py", TRAINER)
    lab.write("configs/base.json", '{"x": 0.5, "seed": 3}')
    lab.configure(
        objective={"metric": "score", "goal": "max"},
        knobs={"x": {"type": "float", "low": 0, "high": 1}},
        judge={"baseline_seeds": 4, "replicates": 3, "max_replicates": 8},
        round_size=3,
        budget={"rounds": 2},
    )
    return lab


def rows(out: str) -> list[str]:
    """The lines of the final table."""
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("run ") and "verdict" in line)
    return lines[start + 1 : lines.index("", start)]


def test_a_finished_study_shows_its_champion_with_its_mean_and_how_sure_that_is(judged: Any) -> None:
    judged.queue("x@set=0.9", "x@set=0.1")
    out = judged("run").out
    table = rows(out)
    assert len(table) == 3  # replicates are in the means, not in rows of their own
    champion = table[0].split()[0]
    assert table[0].split()[1] == "*"
    assert " ± " in table[0]
    assert "keep" in table[0]
    assert f"champion: {champion}, better than the base by 0.4" in out
    assert "pairs, p " in out
    assert "one run is a hint" not in out

    status = judged("status").out
    assert f"Champion {champion} is better than the base by" in status
    assert sorted(line.split()[0] for line in rows(status) if line[0] != " ") == sorted(
        line.split()[0] for line in table
    )
    assert "the latest 3 of " in status
    assert "runs, without replicates that have ended" in status
    told = judged("status", "--json").json()["studies"][0]["judge"]
    assert told["champion"] == champion
    assert told["gain"]["effect"] == pytest.approx(0.4, abs=0.1)

    shown = judged("show", champion).out
    assert "verdict: keep. Better: " in shown
    assert f"{champion} over all its seeds: " in shown
    evidence = judged("show", champion, "--json").json()
    assert evidence["verdict"]["verdict"] == "keep"
    assert evidence["point"]["n"] == len(evidence["point"]["runs"]) > 3
    replicate = evidence["point"]["runs"][1]
    assert f"replicate of {champion}, seed" in judged("show", replicate).out


def test_a_study_in_which_nothing_was_better_says_so(judged: Any) -> None:
    judged.queue("x@set=0.1")
    out = judged("run").out
    assert "the base: nothing has beaten it yet" in out
    assert "Nothing has beaten the base yet (1 challenger judged)" in judged("status").out
    assert "Nothing has beaten the base yet" in (judged.outputs() / "report.md").read_text()


def test_without_a_judge_the_best_run_is_called_a_hint(judged: Any) -> None:
    judged.configure(judge=None)
    judged.queue("x@set=0.9")
    out = judged("run").out
    assert "one run is a hint, not a result" in out
    assert "verdict" not in out
    assert judged("status", "--json").json()["studies"][0]["judge"] is None
