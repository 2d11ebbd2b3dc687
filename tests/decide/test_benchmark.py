"""benchmarks/decide.py: how it talks to other tools, and what it says about few seeds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import decide  # noqa: E402

TOOL = """\
import json, os, sys
for line in sys.stdin:
    request = json.loads(line)
    if "peer" in request:
        print("a study", file=sys.stderr, flush=True)
        continue
    if request.get("ask") == 0:
        sys.stdin.readline()  # for ever
    if request.get("ask") == -1:
        sys.exit("ValueError: no such point")
    print(json.dumps({"points": [[os.getpid()]], "cpu": 1.5}), flush=True)
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a tool whose points are the id of its process."""
    script = tmp_path / "tool.py"
    script.write_text(TOOL)
    python = tmp_path / "cache/toy/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setattr(decide, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(decide.decide_peers, "__file__", str(script))
    yield "toy"
    for process, stderr in decide.InEnvironment._idle.values():
        process.kill()
        process.communicate()
        stderr.close()
    decide.InEnvironment._idle.clear()


def test_the_process_of_a_tool_does_one_study_after_the_other(tool: str) -> None:
    first = decide.InEnvironment(tool, space=[], seed=0, runs=1, batch=1)
    (process,) = first.ask(1)
    beside = decide.InEnvironment(tool, space=[], seed=1, runs=1, batch=1)
    assert beside.ask(1) != [process]  # the first study still runs
    assert first.cpu == 1.5
    first.close()
    again = decide.InEnvironment(tool, space=[], seed=2, runs=1, batch=1)
    assert again.cpu == 0.0
    assert again.ask(1) == [process]
    again.close()
    beside.close()


def test_a_tool_that_does_not_answer_fails_and_the_next_study_has_a_new_process(
    tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = decide.InEnvironment(tool, space=[], seed=0, runs=1, batch=1)
    process = peer.ask(1)
    with monkeypatch.context() as patch:
        patch.setattr(decide, "PATIENCE", 0.1)
        with pytest.raises(decide.PeerFailed, match=r"no answer for 0\.1 s"):
            peer.ask(0)
    peer.close()
    after = decide.InEnvironment(tool, space=[], seed=1, runs=1, batch=1)
    assert after.ask(1) != process
    with pytest.raises(decide.PeerFailed, match="ValueError: no such point"):
        after.ask(-1)
    after.close()


@pytest.mark.parametrize(("problems", "seeds", "known"), [(3, 1, False), (8, 1, True), (3, 3, True)])
def test_an_interval_from_few_seeds_is_from_the_problems_and_from_few_of_both_there_is_none(
    problems: int, seeds: int, known: bool
) -> None:
    names = [f"problem{i}" for i in range(problems)]
    curves = {}
    for i, name in enumerate(names):
        for seed in range(seeds):
            for way, regret in (("optuna_tpe", 1.0), ("search", (1.0, 0.25)[i % 2]), ("random", 9.0)):
                curves[f"{name}/sequential/{way}/{seed}"] = decide.Curve([regret] * 60, [regret] * 60, [1.0] * 60)
    results = decide.Results(curves, "best run")
    results._best = dict.fromkeys(names, 0.0)
    ratio = results.ratio(names, "sequential", "search", "optuna_tpe")
    assert ratio is not None
    assert (ratio.interval is not None) == known
    if ratio.interval is not None:
        assert 0.25 <= ratio.interval[0] < ratio.value < ratio.interval[1] <= 1.0
