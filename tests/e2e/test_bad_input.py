"""Mistakes: exit code 2, one short message that says where, no traceback, and nothing written."""

from __future__ import annotations

import json

import pytest


def told(lab, *command: str, code: int = 2) -> str:
    """What the command says of a mistake, after checking that it did nothing else."""
    before = lab.tree()
    done = lab(*command, code=code)
    assert lab.tree() == before
    assert not done.out
    assert len(done.err) < 600
    return done.err


def test_broken_yaml(lab) -> None:
    lab.write("lab.yaml", "study: toy\nlaunch: [\n")
    assert f"{lab.folder}/lab.yaml:3: broken YAML" in told(lab, "run")


def test_a_lab_file_that_is_empty(lab) -> None:
    lab.write("lab.yaml", "")
    assert "lab.yaml: is empty" in told(lab, "run")


def test_a_lab_file_that_is_a_folder(lab) -> None:
    (lab.folder / "lab.yaml").unlink()
    (lab.folder / "lab.yaml").mkdir()
    assert "lab.yaml: is a folder" in told(lab, "run")


def test_a_lab_file_that_is_not_utf_8(lab) -> None:
    lab.write("lab.yaml", b"study: toy\nbase: \xff\xfe\n")
    assert "lab.yaml:2: is not UTF-8" in told(lab, "run")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", "plan", "run"])
def test_a_file_of_the_lab_that_is_a_link_to_itself(lab, command: str) -> None:
    lab.configure(proposers=[{"queue": "loop.yaml"}])
    (lab.folder / "loop.yaml").symlink_to("loop.yaml")
    assert "loop.yaml" in told(lab, command)


def test_no_lab_at_all(lab) -> None:
    (lab.folder / "lab.yaml").unlink()
    for command in ("run", "check", "status", "show", "verify", "stop"):
        assert "no lab.yaml in" in told(lab, command)


def test_a_lab_that_is_not_where_it_was_said_to_be(lab) -> None:
    assert "no lab.yaml in /nowhere" in told(lab, "run", "--lab", "/nowhere")


# -- what the lab file says: (changes, where, what)

WRONG: dict[str, tuple[dict, str, list[str]]] = {
    "an unknown key": ({"objektive": {}}, "objektive", ["unknown key 'objektive'", "did you mean 'objective'"]),
    "an unknown key inside": (
        {"slots": {"count": 1, "per_gpus": 2}},
        "slots",
        ["unknown key 'slots.per_gpus'", "did you mean 'per_gpu'"],
    ),
    "an unknown key in a list": (
        {"proposers": [{"que": "queue.yaml"}]},
        "proposers",
        ["unknown key 'proposers.0.que'", "did you mean 'queue'"],
    ),
    "a wrong type": ({"slots": {"count": "two"}}, "slots", ["slots.count takes a whole number, not 'two'"]),
    "a number that is too small": (
        {"budget": {"runs": 0}},
        "budget",
        ["budget.runs takes a number of at least 1, not 0"],
    ),
    "a wrong choice": (
        {"objective": {"metric": "loss", "goal": "minn"}},
        "objective",
        ["objective.goal takes 'max' or 'min', not 'minn'"],
    ),
    "a wrong moment": (
        {"objective": {"metric": "loss", "goal": "min", "at": "end"}},
        "objective",
        ["first, last, best"],
    ),
    "a wrong duration": (
        {"launch": {"command": ["true"], "timeout": "soon"}},
        "launch",
        ["launch.timeout", "'soon' is not a duration"],
    ),
    "no command": ({"launch": {}}, "launch", ["'launch.command' is missing"]),
    "an empty command": ({"launch": {"command": []}}, "launch", ["launch.command takes at least 1 entry"]),
    "a variable without quotes": (
        {"launch": {"command": ["true", {"config": None}]}},
        "launch",
        ["launch.command.1 takes text", '"{config}"'],
    ),
    "a number in a command": (
        {"launch": {"command": ["true", 3]}},
        "launch",
        ["launch.command.1 takes text", "quotes"],
    ),
    "devices of a wrong kind": ({"slots": {"gpus": "all"}}, "slots", ["slots.gpus"]),
    "a name that cannot be a folder": ({"study": "../x"}, "study", ["cannot be a study's name"]),
    "a bound that is no number": (
        {"knobs": {"train.lr": {"type": "float", "low": float("nan")}}},
        "knobs",
        ["train.lr: low takes a finite number"],
    ),
    "an unknown key of a knob": (
        {"knobs": {"train.lr": {"type": "float", "lowe": 0}}},
        "knobs",
        ["train.lr: unknown key 'lowe'", "did you mean 'low'?"],
    ),
    "a knob upside down": ({"knobs": {"train.lr": {"low": 2, "high": 1}}}, "knobs", ["low 2 is above high 1"]),
    "a bad edit in a mode": (
        {"modes": {"quick": ["steps@sett=1"]}},
        "modes",
        ["modes.quick.0", "no op `sett`", "`set`"],
    ),
    "a bad constraint": ({"constraints": ["train.lr <"]}, "constraints", ["constraints.0", "train.lr <"]),
    "a call in a constraint": ({"constraints": ["exec('x')"]}, "constraints", ["unknown function exec"]),
    "a bad expression to derive from": ({"derive": {"train.x": "1 +"}}, "derive", ["derive.train.x", "1 +"]),
    "keys that are derived from each other": (
        {"derive": {"a": "b", "b": "a"}},
        "derive",
        ["a", "depend on each other"],
    ),
    "a bad expression to normalise by": (
        {"normalise": [{"set": "steps", "to": "1 +"}]},
        "normalise",
        ["normalise.0.to"],
    ),
    "a base out of the lab": ({"base": "../base.json"}, "base", ["../base.json leads out of the lab"]),
    "a queue out of the lab": (
        {"proposers": [{"queue": "/etc/passwd"}]},
        "proposers",
        ["/etc/passwd leads out of the lab"],
    ),
    "data out of the lab": ({"data": ["configs", "../../x"]}, "data", ["data.1: ../../x leads out of the lab"]),
    "a working folder out of the lab": (
        {"launch": {"command": ["true"], "cwd": ".."}},
        "launch",
        ["launch.cwd: .. leads out of the lab"],
    ),
    "a trainer that is not on PATH": (
        {"launch": {"command": ["no-such-trainer", "x"]}},
        "launch",
        ["trainer not found: 'no-such-trainer'"],
    ),
    "a trainer that is not there": (
        {"launch": {"command": ["./train.sh"]}},
        "launch",
        ["trainer not found", "train.sh"],
    ),
    "a trainer that cannot be run": ({"launch": {"command": ["./train.py"]}}, "launch", ["train.py is not executable"]),
    "a pattern that is none": (
        {"measure": {"stdout": ["loss ("]}},
        "measure",
        ["'loss ('", "not a regular expression"],
    ),
    "a source that is not known": ({"measure": {"sources": ["paper"]}}, "measure", ["paper"]),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_in_the_lab_file_is_told_with_its_line(lab, mistake: str) -> None:
    changes, key, words = WRONG[mistake]
    lab.configure(**changes)
    lab.write("lab.yaml", (lab.folder / "lab.yaml").read_text().replace("NaN", ".nan"))
    said = told(lab, "run")
    assert f"{lab.folder}/lab.yaml:{lab.line(key)}: " in said
    for word in words:
        assert word in said


def test_two_mistakes_are_told_at_once(lab) -> None:
    lab.configure(slots={"count": "two"}, objektive={})
    said = told(lab, "run")
    assert "slots.count" in said
    assert f"line {lab.line('objektive')}: unknown key 'objektive'" in said


def test_a_mistake_in_what_studies_have_in_common_is_told_where_it_stands(lab) -> None:
    lab.write(
        "lab.yaml", 'launch: {command: ["true"]}\nslots: {count: two}\nstudies:\n  - study: one\n  - study: two\n'
    )
    assert "lab.yaml:2: slots.count" in told(lab, "run")


@pytest.mark.parametrize("where", ["command", "env"])
def test_an_unknown_variable_in_a_template(lab, where: str) -> None:
    launch = lab.study["launch"]
    if where == "command":
        lab.configure(launch={**launch, "command": [*launch["command"], "{confg}"]})
    else:
        lab.configure(launch={**launch, "env": {"A": "{confg}"}})
    assert "unknown variable {confg}" in told(lab, "run")


def test_two_studies_of_one_name(lab) -> None:
    lab.write("lab.yaml", 'launch: {command: ["true"]}\nstudies:\n  - study: one\n  - study: one\n')
    assert "lab.yaml:4: two studies have the name 'one'" in told(lab, "run")


def test_a_trainer_is_looked_for_before_anything_starts_also_in_the_background(lab) -> None:
    lab.configure(launch={"command": ["no-such-trainer"]})
    assert "trainer not found" in told(lab, "run", "--detach")


# -- configs and queues


def test_a_broken_config(lab) -> None:
    lab.write("configs/base.json", '{\n  "train": {"lr": 0.1,}\n}\n')
    assert f"{lab.folder}/configs/base.json:2: broken JSON" in told(lab, "run")


def test_a_missing_config(lab) -> None:
    (lab.folder / "configs/base.json").unlink()
    assert "configs/base.json: there is no such file" in told(lab, "run")


def test_no_config_at_all(lab) -> None:
    lab.configure(base=[])
    assert "no base config" in told(lab, "run")


def test_a_config_that_is_no_mapping(lab) -> None:
    lab.write("configs/base.json", "[1, 2]")
    assert "configs/base.json" in told(lab, "run")


def test_a_config_out_of_a_knobs_range(lab) -> None:
    lab.base(train={"lr": 7, "batch": 0})
    said = told(lab, "run")
    assert "configs/base.json" in said
    assert "train.lr: 7 is above 1" in said
    assert "train.batch: 0 is below 1" in said


def test_a_config_that_breaks_a_constraint(lab) -> None:
    lab.configure(constraints=["train.batch % 5 == 0"])
    assert "train.batch % 5 == 0" in told(lab, "run")


def test_a_mode_that_does_not_fit_the_config(lab) -> None:
    lab.configure(modes={"quick": ["stepz@mul=1"]})
    said = told(lab, "run", "--mode", "quick")
    assert "configs/base.json" in said
    assert "steps" in said


def test_configs_named_on_the_command_line(lab) -> None:
    assert "nope.json: there is no such file" in told(lab, "run", "--cfgs", "nope.json")
    assert "leads out of the lab" in told(lab, "run", "--cfgs", "/etc/passwd")
    assert "named twice" in told(lab, "run", "--cfgs", "configs/base.json", "configs/base.json")


QUEUES = {
    "broken YAML": ("proposals: [\n", ":2: broken YAML"),
    "no list": ("edits: []\n", "a queue file must contain a list `proposals:`"),
    "a list at the top": (
        "- {edits: [a@set=1]}\n",
        ":1: a queue file must contain a list `proposals:` (as in proposals: [",
    ),
    "no edits": ("proposals:\n  - {reason: x}\n", ":2: proposal 1 needs a list `edits:`"),
    "a misspelt key": ("proposals:\n  - {edit: [a@set=1]}\n", ":2: proposal 1: unknown key 'edit' (known: edits,"),
    "an unknown key": ("proposals:\n  - {edits: [a@set=1], why: x}\n", ":2: proposal 1: unknown key 'why'"),
    "a bad edit": ("proposals:\n  - {edits: [a@set=1]}\n  - {edits: [a@sett=1]}\n", ":3: `a@sett=1`"),
}


@pytest.mark.parametrize("mistake", QUEUES)
def test_a_mistake_in_the_queue(lab, mistake: str) -> None:
    text, words = QUEUES[mistake]
    lab.queue()
    lab.write("queue.yaml", text)
    assert f"queue.yaml{words}" in told(lab, "run").replace("queue.yaml: ", "queue.yaml")


def test_plan_and_check_find_a_mistake_in_the_queue_too(lab) -> None:
    lab.queue("train.lr@sett=1")
    for command in ("plan", "check"):
        assert "queue.yaml:2: `train.lr@sett=1`" in told(lab, command)


def test_a_queue_that_is_not_there(lab) -> None:
    lab.queue()
    (lab.folder / "queue.yaml").unlink()
    assert "queue.yaml: there is no such file" in told(lab, "run")


# -- the command line

WORDS: dict[str, tuple[list[str], str]] = {
    "an unknown command": (["rum"], "rum"),
    "an unknown option": (["run", "--cfg", "x"], "--cfg"),
    "an unknown study": (["run", "--study", "toi"], "did you mean 'toy'"),
    "an unknown mode": (["run", "--mode", "slow"], "modes: quick"),
    "a device twice": (["run", "--gpus", "0,0"], "listed twice"),
    "more slots than devices": (["run", "--gpus", "0", "--concurrency", "3"], "more slots"),
    "no slots": (["run", "--concurrency", "0"], "--concurrency"),
    "no runs": (["run", "--runs", "0"], "--runs"),
    "no number": (["run", "--rounds", "many"], "--rounds"),
}


@pytest.mark.parametrize("mistake", WORDS)
def test_a_mistake_on_the_command_line(lab, mistake: str) -> None:
    command, word = WORDS[mistake]
    assert word in told(lab, *command)


def test_a_command_that_needs_a_record_before_there_is_one(lab) -> None:
    for command in (["show"], ["stop"], ["attach"], ["resume"], ["verify"]):
        assert "looplab run" in told(lab, *command)


@pytest.mark.slow
def test_an_unknown_run(lab) -> None:
    lab("run")
    for command in (["show", "9"], ["logs", "zzzz"], ["diff", "1", "9"], ["stop", "9"]):
        said = told(lab, *command)
        assert "has no run" in said
        assert lab.runs()[0].name in said


def test_a_mistake_in_json_is_json(lab) -> None:
    lab.configure(slots={"count": "two"})
    done = lab("run", "--json", code=2)
    error = json.loads(done.out)
    assert error["file"] == f"{lab.folder}/lab.yaml"
    assert error["line"] == lab.line("slots")
    assert "slots.count" in error["error"]
