"""The runner of the benchmarks: figures are kept, and one that got worse than its noise is named."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import run as bench  # noqa: E402
import storm  # noqa: E402

ENTRY = bench.Entry(
    benchmark="launch", command=["launch.py", "--quick"], date="2026-11-18T00:00:00+00:00", commit="abc",
    machine={"cpu": "a", "cores": 2, "python": "3.11", "system": "6"}, load_before=0.1, load_after=0.2, seconds=1.0,
)  # fmt: skip


def with_figures(load: float = 0.1, **figures: float) -> bench.Entry:
    return replace(ENTRY, figures=figures, load_before=load)


HISTORY = [with_figures(x_bare=value, rows_per_s=1000 * value) for value in (1.9, 2.0, 2.1, 2.0, 1.95)]


def test_a_figure_within_its_noise_is_not_named() -> None:
    assert bench.worse_figures(with_figures(x_bare=2.1, rows_per_s=1900), HISTORY) == []


def test_a_figure_that_got_worse_is_named_whichever_way_is_better() -> None:
    slower, fewer = bench.worse_figures(with_figures(x_bare=2.6, rows_per_s=1200), HISTORY)
    assert "x_bare is 2.6, was 2 ±" in slower
    assert "rows_per_s is 1200, was 2000 ±" in fewer
    assert bench.worse_figures(with_figures(x_bare=1.2, rows_per_s=4000), HISTORY) == []


def test_only_the_same_machine_under_the_same_load_is_compared() -> None:
    assert bench.worse_figures(with_figures(load=30.0, x_bare=9.0), HISTORY) == []
    other = replace(with_figures(x_bare=9.0), machine={**ENTRY.machine, "cpu": "b"})
    assert bench.worse_figures(other, HISTORY) == []
    assert bench.worse_figures(with_figures(x_bare=9.0), HISTORY[:3]) == []  # too few to know the noise


@pytest.mark.parametrize(("code", "failure"), [
    ("print('a table'); print('{\"x_bare\": 2.0}'); print('done')", ""),
    ("print('no figures')", "no line of figures"),
    ("import sys; sys.exit('the reason')", "exit code 1: the reason"),
    ("import time; time.sleep(60)", "took longer than 1 s"),
])  # fmt: skip
def test_a_benchmark_ends_with_its_figures_or_with_the_reason(tmp_path: Path, code: str, failure: str) -> None:
    script = tmp_path / "benchmarks" / "toy.py"
    script.parent.mkdir()
    script.write_text(code)
    entry = bench.run_benchmark(script, ["--quick"], 1.0 if "sleep" in code else 60.0)
    assert entry.failure == failure
    bench.append_to_history(tmp_path / "history.jsonl", entry)
    (again,) = bench.read_history(tmp_path / "history.jsonl")
    assert again == entry
    assert again.figures == ({"x_bare": 2.0} if not failure else {})


def test_the_history_of_the_repository_can_be_read_and_drawn(tmp_path: Path) -> None:
    history = bench.read_history(bench.HISTORY)
    assert all(entry.figures or entry.failure for entry in history)
    pytest.importorskip("matplotlib")
    (picture,) = bench.plot(HISTORY, tmp_path)
    assert picture.stat().st_size > 1000
    assert "| x_bare | 2.1 | 2 ±" in bench.table(with_figures(x_bare=2.1), HISTORY)


def test_the_results_have_the_last_figures_of_each_command_and_keep_what_people_wrote() -> None:
    page = "# Results\n\nBy hand.\n"
    failed = replace(ENTRY, failure="exit code 1: no disk", figures={})
    full = replace(with_figures(x_bare=1.5), command=["launch.py"], load_before=0.3)
    page = bench.with_section(page, bench.results_section([*HISTORY, full, failed]))
    for words in ("By hand.", "| x_bare | 1.95 | 2 ± 0.22 (4) | less is better |", "| x_bare | 1.5 |  | less is better |",
                  "**`python benchmarks/launch.py`**, 2026-11-18, commit abc, a, 2 cores, Python 3.11, load 0.3 before"):  # fmt: skip
        assert page.count(words) == 1, words
    page += "\nMore by hand.\n"
    again = bench.with_section(page, bench.results_section([*HISTORY, with_figures(x_bare=1.8)]))
    assert again.count("x_bare") == 1
    assert "| x_bare | 1.8 |" in again
    assert again.startswith("# Results\n\nBy hand.\n")
    assert again.endswith("\nMore by hand.\n")


def test_nested_figures_are_rows_of_the_table_and_empty_ones_are_not() -> None:
    figures = {"peers": {"wandb": {"rows": 5}, "csv": 2}, "interval": None, "left_out": {}, "list": [], "x": 0}
    assert bench.flat(figures) == {"peers: wandb: rows": 5, "peers: csv": 2, "x": 0}


def test_curves_are_drawn_with_where_they_bend(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curves = {"status": {"10": 0.1, "100": 0.1, "1000": 0.5}, "rows": {"10": 0.1, "100": 1.0}}
    entry = replace(ENTRY, figures={"curves": curves, "status_bends_at": 1000, "rows_bends_at": 100})
    assert bench.plot([entry], tmp_path)[-1] == tmp_path / "launch-curves.png"


def test_a_storm_has_one_attack_that_lasts_and_the_others_in_turn() -> None:
    assert list(storm.plan(["endurance"])) == [("endurance", 0)]
    planned = list(itertools.islice(storm.plan(["texts", "endurance", "soak"]), 5))
    assert planned == [("endurance", 0), ("texts", 0), ("soak", 0), ("texts", 1), ("soak", 1)]
    assert {"kills", "soak", "endurance"} <= {*storm.CLASSES}


@pytest.mark.slow
@pytest.mark.parametrize("script", bench.benchmarks([], full=True), ids=lambda path: path.stem)
def test_a_benchmark_starts(script: Path) -> None:
    """All that it imports of looplab and of the recipes is there; what it needs of others may be missing."""
    for package in ("torch", "gymnasium", "transformers", "stable_baselines3"):
        pytest.importorskip(package)
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("way", "figures"), [
    ("less", "launch.x_bare launch.x_sbatch launch.x_ray_tasks launch.ms_per_run decide.regret_x_tpe_60"),
    ("less", "decide.cpu_ms_per_proposal decide.regret_x_best_peer fidelity.epochs_x_best_peer judge.aa_drift"),
    ("less", "judge.runs_to_decide ingest.lag_s_p99 ingest.core_share onboard.seconds_to_first_run_median storm.leaks"),
    ("less", "page.update_lag_s_median page.server_mb page.csp_violations page.page_kb cli.status_100k_s storm.lost"),
    ("more", "judge.power_1sigma ingest.rows_per_s onboard.unedited_share page.x_optuna_dashboard_first_table"),
    ("more", "rl.ppo_x_sb3 drone.x_before drone.agent_steps_s drone.x_puffer esm_study.esm measure.wandb_x_leet"),
    ("less", "autopilot.x_bare autopilot.overhead_ms checkpoint.load_ms checkpoint.ckpt_stall_ms ingest.lag_s_p99"),
    ("none", "ingest.load checkpoint.torch_save_ms mario_speed.mario2_async_frames replay.cpprb_entries_per_s_256"),
    ("none", "launch.bare_ms_per_run launch.plain_ms_per_run storm.tried esm_study.majority judge.aa_real_ratchet"),
])  # fmt: skip
def test_which_way_a_figure_is_better(way: str, figures: str) -> None:
    for name in figures.split():
        assert bench.direction_of(*name.split(".")) == way, name


def test_every_benchmark_is_found_by_its_name() -> None:
    names = [path.stem for path in bench.benchmarks([], full=True)]
    assert not {"launch_cluster", "decide_peers", "decide_problems", "run"} & {*names}
    assert {"launch", "cli", "measure", "judge", "page", "rl", "esm", "ingest", "decide", "onboard"} <= {*names}
    with pytest.raises(SystemExit, match="there is no benchmark lunch"):
        bench.benchmarks(["lunch"], full=False)
    for path in bench.benchmarks([], full=False):
        assert "--quick" in path.read_text(), f"{path.name} belongs to ONLY_FULL"
