"""edit, propose, check."""

from __future__ import annotations

import json
import re

import pytest

OT = {
    "ot": {
        "lambda_ot": 0.2,
        "loss_config": {
            "reg": 0.2,
            "tau_src": 0.5,
            "tau_tgt": 0.5,
            "features": [{"weight_label": 0.02}, {"weight_label": 0.04}],
        },
    }
}


def variant_of(lab, done) -> object:
    return lab.folder / done.out.splitlines()[-1]


# -- edit


def test_edit_writes_a_variant_beside_its_base_and_says_what_changed(lab) -> None:
    before = (lab.folder / "configs/base.json").read_text()
    done = lab("edit", "configs/base.json", "--change", "train.lr@mul=2", "--change", "steps@add=1")
    variant = variant_of(lab, done)
    assert re.fullmatch(r"base_[a-z0-9]{6}\.json", variant.name)
    assert variant.parent == lab.folder / "configs"
    changed = json.loads(variant.read_text())
    assert (changed["train"]["lr"], changed["steps"]) == (0.2, 4)
    assert "train.lr: 0.1 → 0.2" in done.out
    assert (lab.folder / "configs/base.json").read_text() == before


def test_edit_takes_changes_as_the_older_tool_did(lab) -> None:
    lab.write("act.json", json.dumps(OT))
    done = lab(
        *("edit", "--base-cfg", "act.json", "--reason", "reg+tau"),
        *("--changes", "ot.loss_config.reg@mul=1.5", "ot.loss_config.tau_src@set=1.0"),
        *("ot.loss_config.features.*.weight_label@mul=0.5", "ot.lambda_ot@set=0.12"),
    )
    ot = json.loads(variant_of(lab, done).read_text())["ot"]
    assert ot["loss_config"]["reg"] == pytest.approx(0.3)
    assert ot["loss_config"]["tau_src"] == 1.0
    assert [feature["weight_label"] for feature in ot["loss_config"]["features"]] == [0.01, 0.02]
    assert ot["lambda_ot"] == 0.12


def test_edit_keeps_the_comments_and_the_order_of_yaml(lab) -> None:
    text = "# the base\ntrain:\n  lr: 0.1  # tuned by hand\n  batch: 32\n# how long\nsteps: 3\n"
    lab.write("base.yaml", text)
    done = lab("edit", "base.yaml", "--change", "train.lr@set=0.2")
    assert variant_of(lab, done).read_text() == text.replace("0.1", "0.2")


def test_edit_keeps_the_comments_of_toml(lab) -> None:
    text = '# the base\nsteps = 3\n\n[train]\nlr = 0.1 # tuned\nname = "x"\n'
    lab.write("base.toml", text)
    done = lab("edit", "base.toml", "--change", "train.lr@set=0.2")
    assert variant_of(lab, done).read_text() == text.replace("0.1", "0.2")


def test_edit_writes_to_another_folder_where_told(lab) -> None:
    done = lab("edit", "configs/base.json", "--change", "steps@set=9", "--out-dir", "new/place")
    assert variant_of(lab, done).parent == lab.folder / "new/place"


def test_edit_says_what_it_did_beside_the_wish(lab) -> None:
    done = lab("edit", "configs/base.json", "--changes", "train.batch@mul=1.01", "extra@set=1", "train.lr@set=0.1")
    assert "train.batch is an int" in done.out
    assert "extra was not in the config; added" in done.out
    assert "changed nothing" in done.out


def test_edit_is_recorded_with_parent_and_reason(lab) -> None:
    done = lab("edit", "configs/base.json", "--change", "steps@set=9", "--reason", "longer")
    ((data,),) = lab.ask("SELECT data FROM events WHERE kind='variant written'")
    assert json.loads(data) == {
        "variant": str(variant_of(lab, done).relative_to(lab.folder)),
        "parent": "configs/base.json",
        "edits": ["steps@set=9"],
        "reason": "longer",
    }
    lab("verify")


def test_edit_outside_of_a_lab_only_writes_the_file(lab, tmp_path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "base.json").write_text('{"a": 1}')
    told = lab("edit", "base.json", "--change", "a@set=2", "--json", cwd=alone).json()
    assert told["recorded"] is False
    assert sorted(path.name for path in alone.iterdir()) == sorted(["base.json", told["variant"]])
    assert "is not in a lab" in lab("edit", "base.json", "--change", "a@set=2", "--run", code=2, cwd=alone).err


def test_edit_in_json(lab) -> None:
    told = lab("edit", "configs/base.json", "--change", "steps@set=9", "--reason", "why", "--json").json()
    assert told["changes"] == {"steps": {"old": 3, "new": 9}}
    assert (told["parent"], told["reason"], told["recorded"]) == ("configs/base.json", "why", True)


def test_edit_with_run_runs_the_variant_alone(lab) -> None:
    lab.queue("train.lr@set=0.2")
    done = lab(*("edit", "configs/base.json", "--change", "train.lr@set=0.3", "--run", "--", "--flag", "x"))
    (run,) = lab.runs()
    about = lab.read(run, "run.json")
    assert about["proposer"] == "base"
    assert f"/{about['base'].rpartition('/')[2]}" in done.out
    assert lab.read(run, "config.json")["train"]["lr"] == 0.3
    assert lab.read(run, "seen.json")["argv"] == ["--flag", "x"]


@pytest.mark.slow
def test_edit_with_run_does_not_change_what_resume_goes_on_with(lab) -> None:
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3")
    lab("run", "--concurrency", "1", "--rounds", "2")
    lab("edit", "configs/base.json", "--change", "train.lr@set=0.5", "--run")
    lab("resume")
    assert len(lab.runs()) == 3  # the two rounds that `run` was to have, and the variant
    lab("run")
    assert len(lab.runs()) == 4


def test_edit_with_run_in_json_is_one_object_a_line(lab) -> None:
    lines = lab("edit", "configs/base.json", "--change", "train.lr@set=0.3", "--run", "--json").lines()
    assert lines[0]["changes"] == {"train.lr": {"old": 0.1, "new": 0.3}}
    assert lines[-1]["counts"] == {"ok": 1}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["configs/base.json", "--change", "train.lrr@mul=2"], "train.lr"),
        (["configs/base.json", "--change", "train.lr@mull=2"], "mul"),
        (["configs/base.json", "--change", "train.lr=2"], "train.lr@set=2"),
        (["configs/base.json", "--change", "train.lr@set=fast"], "float"),
        (["configs/base.json"], "--change"),
        (["nowhere.json", "--change", "a@set=1"], "nowhere.json"),
        (["--change", "a@set=1"], "no config given"),
    ],
)
def test_a_bad_edit_is_told_and_writes_nothing(lab, arguments: list[str], word: str) -> None:
    before = lab.tree()
    assert word in lab("edit", *arguments, code=2).err
    assert lab.tree() == before


# -- propose


def test_a_proposal_waits_and_is_run(lab) -> None:
    done = lab("propose", "--change", "train.lr@set=0.3", "--reason", "near the best", "--hypothesis", "lower loss")
    assert "is queued (1 waiting)" in done.out
    assert "1 proposal waiting" in lab("status").out
    lab("run", "--concurrency", "1")
    run = lab.all("run.json")[1]
    assert (run["proposer"], run["reason"], run["hypothesis"]) == ("person", "near the best", "lower loss")
    assert run["parent"] == lab.runs()[0].name  # the best when its turn came


def test_several_changes_are_one_proposal(lab) -> None:
    told = lab("propose", "--change", "train.lr@set=0.3", "train.batch@mul=2", "--parent", "base", "--json").json()
    assert told["edits"] == ["train.lr@set=0.3", "train.batch@mul=2"]
    lab("run")
    assert lab.all("config.json")[1]["train"] == {"lr": 0.3, "batch": 64}


def test_a_proposal_may_start_from_any_run(lab) -> None:
    lab.queue("train.lr@set=0.3", "train.lr@set=0.9")
    lab("run", "--concurrency", "1")
    lab("propose", "--change", "train.batch@set=1", "--parent", "3")
    lab("run")
    assert lab.all("run.json")[3]["parent"] == lab.runs()[2].name
    assert lab.all("config.json")[3]["train"] == {"lr": 0.9, "batch": 1}


def test_a_proposal_that_would_be_rejected_is_told_at_once(lab) -> None:
    done = lab("propose", "--change", "train.lr@mul=70")  # it depends on the run that is best when its turn comes
    assert "it would currently be rejected: train.lr: 7 is above 1" in done.out
    assert lab("propose", "--change", "train.lr@set=0.2", "--json").json()["refused"] is None


def test_a_proposal_reaches_a_study_that_is_at_work(lab) -> None:
    lab.base(wait="gate")
    engine = lab.start("run", "--continuous", "--concurrency", "2")
    lab.until_at_work()
    lab("propose", "--change", "wait@set=", "--parent", "base")
    lab.until_ended(1)
    assert lab.count(state="running") == 1
    lab.open_gate()
    engine.ended()
    assert lab.count(status="ok") == 2


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--change", "train.lr=3"], "train.lr@set=3"),
        (["--change", "train.lr@set=0.3", "--parent", "9"], "looplab run"),
        (["--change", "train.lrr@set=0.3"], "train.lrr is not a knob; nearest: train.lr"),
        (["--change", "train.lrr@mul=2", "--parent", "base", "--json"], "nothing was queued"),
        (["--change", "train.lr@set=7"], "train.lr: 7 is above 1"),
        ([], "--change"),
    ],
)
def test_a_bad_proposal_is_told_and_writes_nothing(lab, arguments: list[str], word: str) -> None:
    before = lab.tree()
    assert word in lab("propose", *arguments, code=2).err
    assert lab.tree() == before


# -- check


def test_check_shows_the_knobs_and_writes_nothing(lab) -> None:
    lab.queue("train.lr@set=0.2")
    before = lab.tree()
    out = lab("check").out
    assert re.search(r"train\.lr +float, 0\.001 … 1, log +0\.1", out)
    assert "1 proposal in queue.yaml" in out
    assert "all is well" in out
    told = lab("check", "--json").json()
    assert told["studies"][0]["knobs"]["configs/base.json"]["train.lr"] == 0.1
    assert lab.tree() == before


def test_check_shows_the_command_of_the_base(lab) -> None:
    lab.configure(launch={"command": ["{python}", "train.py", "--out={run_dir}", "{flags}"], "config": "flags"})
    argv = lab("check", "--json").json()["studies"][0]["argv"]["configs/base.json"]
    assert argv[1:3] == ["train.py", f"--out={lab.outputs()}/0001-xxxx"]
    assert argv[argv.index("--train.lr") + 1] == "0.1"
    assert f"command for configs/base.json: {argv[0]} train.py --out=" in lab("check").out


def test_check_finds_what_run_would_refuse(lab) -> None:
    lab.base(train={"lr": 7})
    assert "configs/base.json: train.lr: 7 is above 1" in lab("check", code=2).err


def test_check_takes_other_configs_and_modes(lab) -> None:
    lab.base("other.json", train={"lr": 0.5})
    told = lab("check", "--cfgs", "other.json", "--mode", "quick", "--json").json()
    assert told["studies"][0]["bases"] == ["other.json"]


def test_check_names_knobs_and_proposals_that_are_misspelt(lab) -> None:
    lab.queue("train.rl@set=0.2", "train.lr@set=0.3")
    lab.configure(knobs={"train.lr": {"type": "float", "low": 0.001, "high": 1}, "train.sead": {"type": "int"}})
    out = lab("check").out
    assert "WARNING: no base config has the knob train.sead; did you mean " in out
    assert "WARNING: queue.yaml: train.rl@set=0.2 will be rejected: train.rl is not a knob" in out
    assert out.count("will be rejected") == 1
    assert "all is well" not in out


def test_check_says_that_a_search_has_no_objective_yet(lab) -> None:
    lab.configure(objective=None, proposers=[{"search": "auto"}])
    out = lab("check").out
    assert "WARNING: no objective yet, so `looplab run` cannot search: `looplab try` shows" in out
    assert "all is well" not in out
    assert "`looplab objective METRIC` writes it" in lab("run", code=2).err
    lab("objective", "loss", "--min")
    assert "no objective" not in lab("check").out


def test_a_judge_without_an_objective_does_not_block_the_commands_that_find_one(lab) -> None:
    lab.configure(objective=None, judge={"baseline_seeds": 3})
    refused = lab("check", code=2).err
    assert "judge needs an objective: name the metric to optimise (`looplab try` shows" in refused
    assert "likely objective: loss" in lab("try").out
    lab("objective", "loss", "--min")
    assert "all is well" in lab("check").out


def test_check_names_the_measured_metric_that_is_nearest_to_a_misspelt_objective(lab) -> None:
    def check(metric: str) -> str:
        lab.configure(objective={"metric": metric, "goal": "min"})
        return lab("check").out

    assert "WARNING" not in check("losss")  # nothing has been measured yet
    check("loss")
    lab("try")
    out = check("losss")
    assert "WARNING: objective: no run so far has measured 'losss'; did you mean loss?" in out
    assert "all is well" not in out
    assert "all is well" in check("loss")
    lab("run")
    assert "no run so far has measured 'score', only " in check("score")
