"""Gates: documents, files, artifacts, a training that runs, schedules, a measured value."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

from looplab.iterate import gates
from looplab.iterate.gates import GateFinding, Measured
from looplab.iterate.settings import Evaluate, Schedule, Smoke

SECTIONS = [["Plan", "计划"], ["Observations", "观察"], ["Runs", "运行"], ["Results", "结果"], ["Learning"]]
ENGLISH = "# v2\n## Plan\na\n## Observations\nb\n## Runs\n### one\nc\n## Results\nd\n## Learning\ne\n"
CHINESE = "# v2\n## 实验计划\n甲\n## 观察\n乙\n## 运行记录\n丙\n## 结果（指标）\n丁\n## Learning & 下一步\n戊\n"


def refusals(findings: list[GateFinding]) -> list[str]:
    return [finding.why for finding in findings if finding.stops]


def document(folder: Path, text: str) -> list[str]:
    (folder / "dev_v2.md").write_text(text)
    return refusals(gates.check_document(folder / "dev_v2.md", SECTIONS))


@pytest.mark.parametrize("text", [ENGLISH, CHINESE])
def test_a_document_with_all_sections_passes_whichever_heading_they_have(tmp_path: Path, text: str) -> None:
    assert document(tmp_path, text) == []


def test_missing_and_empty_sections_are_named(tmp_path: Path) -> None:
    assert document(tmp_path, ENGLISH.replace("## Plan", "Plan")) == ["dev_v2.md has no section 'Plan'"]
    assert document(tmp_path, ENGLISH.replace("\ne\n", "\n<!-- later -->\n---\n")) == [
        "the section 'Learning' of dev_v2.md is empty"
    ]
    assert document(tmp_path, ENGLISH.replace("### one\nc\n", "### one\n")) == [
        "the section 'Runs' of dev_v2.md is empty"
    ]
    assert refusals(gates.check_document(tmp_path / "dev_v9.md", SECTIONS)) == ["dev_v9.md is missing"]


def test_the_title_is_not_a_section(tmp_path: Path) -> None:
    text = ENGLISH.replace("# v2\n", "# v2: plan and results\n", 1).replace("## Results\nd\n", "")
    assert document(tmp_path, text) == ["dev_v2.md has no section 'Results'"]


def test_a_heading_inside_a_code_block_is_not_a_heading(tmp_path: Path) -> None:
    assert document(tmp_path, ENGLISH.replace("## Results\nd\n", "```\n## Results\nd\n```\n")) == [
        "dev_v2.md has no section 'Results'"
    ]


def test_artifacts_must_be_there_and_not_empty(tmp_path: Path) -> None:
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / ".gitkeep").touch()
    (tmp_path / "plots" / "empty.png").touch()
    assert refusals(gates.check_artifacts(tmp_path, ["plots/*"])) == ["no non-empty file matches plots/*"]
    (tmp_path / "plots" / "full.png").write_text("x")
    assert refusals(gates.check_artifacts(tmp_path, ["plots/*"])) == []


def test_links_out_of_the_version_and_repositories_in_it_are_refused(tmp_path: Path) -> None:
    version = tmp_path / "v2"
    (version / "inner" / ".git").mkdir(parents=True)
    (version / "policy").symlink_to("/etc/passwd")
    (version / "same").symlink_to("inner")
    why = refusals(gates.check_files(version))
    assert len(why) == 2
    assert "nested repository" in " ".join(why)
    assert "policy is a link out of" in " ".join(why)


def smoke(tmp_path: Path, code: str, timeout: float = PATIENCE_S) -> GateFinding:
    (tmp_path / "train.py").write_text(code)
    command = Smoke(command=["{python}", "-S", "{version}/train.py", "{scratch}"], timeout=timeout)
    variables: dict[str, str | Path] = {"python": sys.executable, "version": tmp_path}
    return gates.check_smoke(command, variables, tmp_path, tmp_path / "smoke.log")


def test_a_smoke_run_that_ends_well_passes_and_leaves_nothing_in_the_version(tmp_path: Path) -> None:
    assert smoke(tmp_path, "import sys; open(sys.argv[1] + '/checkpoint', 'w').close(); print('trained')").ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["smoke.log", "train.py"]
    assert (tmp_path / "smoke.log").read_text() == "trained\n"


def test_a_smoke_run_that_crashes_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    found = smoke(tmp_path, "raise ValueError('it broke')")
    assert found.stops
    assert "exit code 1" in found.why
    assert "ValueError: it broke" in found.why


def test_a_smoke_run_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    code = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
open({str(tmp_path / "pid.new")!r}, "w").write(str(child.pid))
os.rename({str(tmp_path / "pid.new")!r}, {str(tmp_path / "pid")!r})
time.sleep(600)
"""
    for timeout in (2, 8, 32, 128):  # until there was time to start it
        found = smoke(tmp_path, code, timeout=timeout)
        assert f"longer than {timeout} s" in found.why
        if (tmp_path / "pid").exists():
            break
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + PATIENCE_S  # it was signalled; how soon it is gone depends on the machine
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_smoke_run_sees_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-abcdefghijklmnopqrstuv")
    assert smoke(tmp_path, "import os, sys; sys.exit('OPENAI_API_KEY' in os.environ)").ok


TRACE = [{"iteration": 1, "lr": 0.1, "survival": 0.3, "boost": 0}, {"iteration": 2, "lr": 0.01, "survival": 0.5}]


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"lr": {"start": 0.1, "end": 0.01}}, None),
        ({"lr": [0.1, 0.01]}, None),
        ({"lr": 0.01}, None),
        ({"lr": {"start": 0.1, "end": 0.001}}, "lr never reached 0.001: first 0.1, last 0.01"),
        ({"penalty": 0.08}, "penalty never reached 0.08: not in the trace"),
        ({"stage": {"metric": "survival", "above": 0.5}}, None),
        ({"stage": {"metric": "survival", "above": 0.9}}, "the gate stage never fired: survival must be above 0.9, it reached 0.5"),
        ({"gates": {"stage": {"metric": "survival", "below": 0.1}}}, "the gate stage never fired"),
        ({"boost": {"fires": True}}, "the gate boost never fired"),
        ({"schedules": {"lr": 0.01}, "gates": {"iteration": True}}, None),
    ],
)  # fmt: skip
def test_what_was_declared_and_never_came_is_reported(tmp_path: Path, declared: Any, message: str | None) -> None:
    (tmp_path / "schedule.json").write_text(json.dumps(declared))
    (tmp_path / "trace.json").write_text(json.dumps({"trace": TRACE}))
    for strict in (False, True):
        findings = gates.check_schedule(tmp_path, Schedule(declared="schedule.json", trace="trace.json", strict=strict))
        assert all(finding.ok for finding in findings) == (message is None)
        assert message is None or message in findings[0].why
        assert any(finding.stops for finding in findings) == (strict and message is not None)


def test_a_schedule_that_cannot_be_read_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "schedule.json").write_text("[1]")
    findings = gates.check_schedule(tmp_path, Schedule(declared="schedule.json", trace="trace.json"))
    assert [(finding.ok, finding.stops) for finding in findings] == [(False, False)]
    (tmp_path / "trace.json").write_text("[]")
    assert (
        "must be an object"
        in gates.check_schedule(tmp_path, Schedule(declared="schedule.json", trace="trace.json"))[0].why
    )


def evaluated(tmp_path: Path, result: str, code: int = 0) -> Measured | GateFinding:
    (tmp_path / "evaluate.py").write_text(
        f"import sys; open(sys.argv[1], 'w').write({result!r}) if {result!r} else None; sys.exit({code})"
    )
    evaluation = Evaluate(
        command=["{python}", "-S", "evaluate.py", "{result}"],
        metric="score.mean",
        values="score.all",
        timeout=PATIENCE_S,
    )
    return gates.evaluate(evaluation, {"python": sys.executable}, tmp_path, tmp_path / "evaluation.log")


def test_numbers_come_from_the_evaluation(tmp_path: Path) -> None:
    assert evaluated(tmp_path, '{"score": {"mean": 0.5, "all": [0, 1]}}') == Measured(0.5, (0.0, 1.0))


@pytest.mark.parametrize(
    ("result", "code", "message"),
    [
        ("", 0, "wrote no result"),
        ("", 3, "exit code 3"),
        ('{"score": {"mean": NaN, "all": []}}', 0, "not a finite number"),
        ('{"score": {"all": []}}', 0, "not a finite number"),
        ('{"score": {"mean": 1, "all": [1, null]}}', 0, "not a list of finite numbers"),
        ("[]", 0, "not a finite number"),
    ],
)
def test_an_evaluation_without_a_number_is_a_finding(tmp_path: Path, result: str, code: int, message: str) -> None:
    found = evaluated(tmp_path, result, code)
    assert isinstance(found, GateFinding)
    assert found.stops
    assert message in found.why


def test_a_pipe_where_a_file_should_be_is_a_finding_and_nobody_waits(tmp_path: Path) -> None:
    for name in ("dev_v2.md", "declared.json", "trace.json"):
        os.mkfifo(tmp_path / name)
    assert "cannot be read" in gates.check_document(tmp_path / "dev_v2.md", ["Plan"])[0].why
    found = gates.check_schedule(tmp_path, Schedule(declared="declared.json", trace="trace.json"))
    assert [finding.ok for finding in found] == [False, False]


def test_json_of_a_version_that_is_nested_too_deeply_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "declared.json").write_text("[" * 100_000)
    (tmp_path / "trace.json").write_text("[]")
    found = gates.check_schedule(tmp_path, Schedule(declared="declared.json", trace="trace.json"))
    assert "nested too deeply" in found[0].why
