"""iterate.yaml and the variables that override it."""

from __future__ import annotations

from pathlib import Path

import pytest

from looplab.agents.run import check_spec
from looplab.errors import LabError
from looplab.iterate.settings import Flags, VersionAgent, find_folder, load, make_spec, read_flags

GOOD = """\
frozen: [evaluate.py]
smoke: {command: ["{python}", "{version}/train.py", --smoke, --out, "{scratch}"], timeout: 3m}
evaluate:
  command: ["{python}", evaluate.py, "{version}", "{result}"]
  metric: survival_rate
  values: survival_values
agent: {cli: codex, wall: 2h}
judge: {alpha: 0.1, min_effect: 1%}
"""


def written(folder: Path, text: str) -> Path:
    (folder / "iterate.yaml").write_text(text)
    return folder


def test_missing_settings_have_their_defaults(tmp_path: Path) -> None:
    settings = load(written(tmp_path, GOOD), {})
    assert settings.smoke is not None
    assert settings.smoke.timeout == 180
    assert settings.agent.wall == 7200
    assert settings.judge.min_effect.relative == 0.01
    assert settings.sections == [["Plan"], ["Observations"], ["Runs"], ["Results"], ["Learning"]]
    assert (settings.experiments, settings.logs, settings.retries) == ("experiments", "agent_runs", 1)
    assert (settings.push, settings.venv, settings.submit, settings.instructions) == (False, True, True, [])


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("frozen:", "frozn:", 1, "did you mean 'frozen'"),
        ("  metric: survival_rate\n", "", 3, "'evaluate.metric' is missing"),
        ("  values:", "  valuse:", 6, "did you mean 'values'"),
        ("wall: 2h", "wall: soon", 7, "not a duration"),
        ('"{result}"', '"{output}"', 4, "{output} is unknown"),
        ("[evaluate.py]", "[../evaluate.py]", 1, "leads out of the lab"),
        ("alpha: 0.1", "alpha: 0.7", 8, "judge.alpha"),
        ("frozen: [evaluate.py]", "sections: [Plan, []]", 1, "sections.1"),
        ("frozen: [evaluate.py]", "environment: {binry: X}", 1, "'binary'"),
    ],
)
def test_a_mistake_is_reported_with_its_line(tmp_path: Path, old: str, new: str, line: int, message: str) -> None:
    with pytest.raises(LabError, match=message) as caught:
        load(written(tmp_path, GOOD.replace(old, new)), {})
    assert caught.value.line == line


def test_the_folder_is_the_one_that_is_given_or_named_or_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = tmp_path / "lab"
    (lab / "deep" / "er").mkdir(parents=True)
    written(lab, GOOD)
    monkeypatch.chdir(lab / "deep" / "er")
    assert find_folder(None, {}) == lab
    monkeypatch.chdir(tmp_path)
    assert find_folder(None, {"LOOPLAB_WORKDIR": str(lab)}) == lab
    with pytest.raises(LabError, match=r"no iterate\.yaml"):
        find_folder(None, {})


def test_folders_of_versions_and_logs_come_from_the_environment(tmp_path: Path) -> None:
    environ = {"LOOPLAB_EXPERIMENTS_ROOT": "versions", "LOOPLAB_RUN_LOG_DIR": "agent_logs"}
    settings = load(written(tmp_path, GOOD), environ)
    assert (settings.experiments, settings.logs) == ("versions", "agent_logs")
    with pytest.raises(LabError, match="LOOPLAB_EXPERIMENTS_ROOT=/elsewhere is not a folder inside the lab"):
        load(tmp_path, {"LOOPLAB_EXPERIMENTS_ROOT": "/elsewhere"})


def test_a_lab_may_declare_more_variables_and_our_own_win(tmp_path: Path) -> None:
    named = "environment: {experiments: VERSIONS, binary: CODEX_BIN, approval_flags: APPROVAL}\n"
    environ = {"VERSIONS": "versions", "CODEX_BIN": "/opt/codex", "APPROVAL": "--yolo"}
    settings = load(written(tmp_path, GOOD + named), environ)
    assert settings.experiments == "versions"
    assert load(tmp_path, {**environ, "LOOPLAB_EXPERIMENTS_ROOT": "mine"}).experiments == "mine"
    with pytest.raises(LabError, match="VERSIONS=/elsewhere is not a folder"):
        load(tmp_path, {"VERSIONS": "/elsewhere"})
    assert read_flags(environ, settings.environment) == Flags("/opt/codex", ("--yolo",), None)
    assert read_flags({**environ, "LOOPLAB_APPROVAL_FLAGS": ""}, settings.environment).approval == ()
    assert read_flags(environ) == Flags()


def test_without_variables_codex_runs_in_its_sandbox_and_prints_json() -> None:
    spec = make_spec(VersionAgent(model="m"), read_flags({}), ["--color", "never"])
    assert (spec.cli, spec.model, spec.dangerous, spec.sandbox) == ("codex", "m", False, "workspace-write")
    assert spec.extra_args == ("--color", "never")


def test_empty_json_flags_really_mean_none() -> None:
    flags = read_flags({"LOOPLAB_JSON_FLAGS": "", "LOOPLAB_AGENT_BIN": "/opt/codex"})
    assert flags == Flags("/opt/codex", None, ())
    spec = make_spec(VersionAgent(model="m"), flags, ["--search"])
    assert spec.cli == "command"  # its output is not JSON, so it is read like that of any command
    assert spec.command == (
        "/opt/codex", "exec", "--skip-git-repo-check", "--sandbox", "workspace-write", "--model", "m", "--search", "-"
    )  # fmt: skip


def test_other_json_flags_are_added() -> None:
    assert make_spec(VersionAgent(), read_flags({"LOOPLAB_JSON_FLAGS": "--json --color never"})).extra_args == (
        "--color",
        "never",
    )


def test_approval_flags_may_take_the_sandbox_away_and_are_known_to_be_dangerous() -> None:
    env = {"LOOPLAB_APPROVAL_FLAGS": "--dangerously-bypass-approvals-and-sandbox"}
    spec = make_spec(VersionAgent(), read_flags(env))
    assert spec.dangerous
    assert spec.extra_args == ()
    check_spec(spec)
    plain = make_spec(VersionAgent(), read_flags({**env, "LOOPLAB_JSON_FLAGS": ""}))
    assert "--dangerously-bypass-approvals-and-sandbox" in plain.command
    assert plain.dangerous


def test_empty_approval_flags_mean_none_and_leave_the_sandbox() -> None:
    spec = make_spec(VersionAgent(dangerous=True), read_flags({"LOOPLAB_APPROVAL_FLAGS": ""}))
    assert not spec.dangerous
    plain = make_spec(VersionAgent(), read_flags({"LOOPLAB_APPROVAL_FLAGS": "", "LOOPLAB_JSON_FLAGS": ""}))
    assert plain.command == ("codex", "exec", "--skip-git-repo-check", "-")


def test_approval_flags_may_name_a_sandbox() -> None:
    env = {"LOOPLAB_APPROVAL_FLAGS": "-s read-only", "LOOPLAB_AGENT_BIN": "mine"}
    spec = make_spec(VersionAgent(), read_flags(env))
    assert (spec.sandbox, spec.dangerous, spec.binary) == ("read-only", False, "mine")
    with pytest.raises(LabError, match="unknown sandbox 'sand'"):
        make_spec(VersionAgent(), read_flags({"LOOPLAB_APPROVAL_FLAGS": "--sandbox sand"}))
    with pytest.raises(LabError, match=r"LOOPLAB_JSON_FLAGS: .*quotation"):
        read_flags({"LOOPLAB_JSON_FLAGS": "'open"})


def test_the_flags_of_codex_do_not_reach_other_agents() -> None:
    spec = make_spec(
        VersionAgent(cli="claude"), read_flags({"LOOPLAB_JSON_FLAGS": "", "LOOPLAB_APPROVAL_FLAGS": "--yolo"})
    )
    assert (spec.cli, spec.dangerous, spec.extra_args) == ("claude", False, ())
