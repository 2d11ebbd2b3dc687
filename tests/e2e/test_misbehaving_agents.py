"""Agents that misbehave: nothing that they do outside their folder counts or survives, and the study goes on.

The agents are small programs. The first call misbehaves and still proposes `lr 0.2`; further calls propose `lr 0.3`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import until

from looplab.agents.confine import COMPLETE, landlock_version

NO_LANDLOCK = (sys.executable, str(Path(__file__).parents[1] / "no_landlock.py"))
confined = pytest.mark.skipif(landlock_version() < COMPLETE, reason="needs Landlock (Linux 6.2)")

AGENT = """\
import json, os, shutil, signal, stat, subprocess, sys, time
from pathlib import Path
prompt = sys.stdin.read()
lab = Path({lab!r})
outputs = lab / "outputs/toy"
runs = sorted(path.parent.parent for path in outputs.glob("0*/record/run.json"))
with open("calls", "a") as file:
    file.write("x")
n = os.path.getsize("calls")
Path(f"prompt-{{n}}").write_text(prompt)
refused = []


def attempt(what, *args):
    try:
        what(*args)
    except OSError as error:
        refused.append(f"{{type(error).__name__}}: {{error.filename}}")


def answer(lr):
    return {{"proposals": [{{"edits": [f"train.lr@set={{lr}}"], "reason": f"call {{n}}", "hypothesis": "", "parent": ""}}]}}


def append(path, text="\\n# changed\\n"):
    with open(path, "a") as file:
        file.write(text)


text = json.dumps(answer(0.2 if n == 1 else 0.3))
if n == 1:
{body}
Path(f"refused-{{n}}.json").write_text(json.dumps(refused))
if text is not None:
    print(text)
"""


def some(rows: dict[str, Any], *always: str) -> list[Any]:
    """All rows; those that are not named here only in the slow part of the tests."""
    return [name if name in always else pytest.param(name, marks=pytest.mark.slow) for name in rows]


class Misbehaving:
    """A lab with such an agent."""

    def __init__(self, lab: Any, body: str, **agent: Any) -> None:
        self.lab = lab
        program = lab.aside / "agent.py"
        lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
        program.write_text(AGENT.format(lab=str(lab.folder), body=lines))
        settings = {"cli": "command", "command": [sys.executable, "-S", str(program)], "wall": 300, "tries": 2, **agent}
        lab.configure(proposers=[{"agent": settings}])

    @property
    def folder(self) -> Path:
        return Path(self.lab.folder / "proposals")

    def rates(self) -> list[float]:
        return [config["train"]["lr"] for config in self.lab.all("config.json")]

    def refused(self, call: int = 1) -> list[str]:
        found: list[str] = json.loads((self.folder / f"refused-{call}.json").read_text())
        return found

    def prompt(self, call: int) -> str:
        return (self.folder / f"prompt-{call}").read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [json.loads(data) for (data,) in self.lab.ask("SELECT data FROM events WHERE kind=? ORDER BY seq", kind)]

    def is_well(self) -> None:
        """The record is whole, and the study can be resumed."""
        self.lab("verify")
        self.lab("resume")


def contents(lab: Any) -> dict[str, bytes]:
    names = ["train.py", "lab.yaml", "configs/base.json"]
    return {name: (lab.folder / name).read_bytes() for name in names}


# -- writing outside its folder

OUTSIDE = """
for path in (lab / "train.py", lab / "lab.yaml", lab / "configs/base.json", outputs / "BEST", outputs / "LATEST",
             lab / ".looplab/ledger.db", runs[0] / "metrics.jsonl", runs[0] / "record/summary.json",
             runs[0] / "record/config.json", lab.parent / "outside.txt", "/tmp/outside-of-the-lab.txt"):
    attempt(append, path)
attempt(os.truncate, lab / "train.py", 0)
attempt(os.unlink, lab / "train.py")
attempt(os.rename, lab / "train.py", lab / "gone.py")
attempt(os.rename, lab / "train.py", "mine.py")
attempt(os.link, lab / "train.py", "linked.py")
attempt(os.symlink, "/dev/null", lab / "numpy.py")
attempt(os.mkdir, lab / "torch")
attempt(shutil.rmtree, runs[0])
attempt(os.rename, lab / "proposals", lab / "elsewhere")
subprocess.run(["sh", "-c", f"echo x >> {lab}/train.py; rm -f {lab}/lab.yaml"], stderr=subprocess.DEVNULL)
Path(os.environ["TMPDIR"], "scratch").write_text("mine")
"""


@confined
def test_a_confined_agent_can_write_to_its_folder_and_nowhere_else(lab: Any) -> None:
    agent = Misbehaving(lab, OUTSIDE)
    before = contents(lab)
    done = lab("autopilot", "--runs", "1")
    assert contents(lab) == before
    assert len(agent.refused()) == 20
    assert agent.rates() == [0.1, 0.2]  # what it proposed in its own folder counts
    assert not (lab.folder.parent / "outside.txt").exists()
    assert not Path("/tmp/outside-of-the-lab.txt").exists()
    assert not agent.events("files changed")
    assert "NOT confined" not in done.out
    agent.is_well()


CHANGES = {
    "train.py": ("append(lab / 'train.py')", "train.py was changed"),
    "in the same time": (
        "was = os.stat(lab / 'train.py'); old = (lab / 'train.py').read_text()\n"
        "(lab / 'train.py').write_text(old.replace('1 / step', '0 / step'))\n"
        "os.utime(lab / 'train.py', ns=(was.st_atime_ns, was.st_mtime_ns))",
        "train.py was changed",
    ),
    "removed": ("os.unlink(lab / 'train.py')", "train.py was removed"),
    "a link": ("os.unlink(lab / 'train.py'); os.symlink('/dev/zero', lab / 'train.py')", "train.py was changed"),
    "a pipe": ("os.unlink(lab / 'train.py'); os.mkfifo(lab / 'train.py')", "train.py was changed"),
    "shadowed": ("(lab / 'random.py').write_text('')", "random.py was added"),
    "lab.yaml": ("append(lab / 'lab.yaml')", "lab.yaml was changed"),
    "base": ("append(lab / 'configs/base.json', ' ')", "configs/base.json was changed"),
    "metrics": ("append(runs[0] / 'metrics.jsonl', '{\"step\": 9, \"loss\": -1}\\n')", "metrics.jsonl was changed"),
    "summary": ("(runs[0] / 'record/summary.json').write_text('{\"objective\": 123.0}')", "summary.json was changed"),
    "config": ("(runs[0] / 'record/config.json').write_text('{}')", "record/config.json was changed"),
}


@pytest.mark.parametrize("name", some(CHANGES, "train.py", "summary"))
def test_what_an_unconfined_agent_changes_voids_its_answer_and_is_restored(lab: Any, name: str) -> None:
    body, said = CHANGES[name]
    agent = Misbehaving(lab, body, dangerous=True)
    lab.configure(watch=[{"stall": "1h", "alert": {"command": ["sh", "-c", "cat >> alerts.jsonl"]}}])
    before = contents(lab)
    done = lab("autopilot", "--runs", "1")
    assert contents(lab) == before
    assert agent.rates() == [0.1, 0.3]  # the answer of the first call never becomes a run
    assert said in done.out
    assert "DANGEROUS" in done.out
    (event,) = agent.events("files changed")
    assert (event["by"], [file["restored"] for file in event["files"]]) == ("agent", [True])
    assert said in agent.events("alarm")[0]["text"]
    assert agent.events("agent answered")[0]["void"].startswith(event["files"][0]["path"])
    assert said in (lab.outputs() / "labbook.md").read_text()
    assert said in (lab.folder / "alerts.jsonl").read_text()
    assert "void" in agent.prompt(2)
    if event["files"][0]["how"] != "removed":
        aside = [path for path in (lab.folder / ".looplab/quarantine").rglob("*") if os.path.lexists(path)]
        assert aside  # what it wrote is not lost
    agent.is_well()
    if name == "summary":
        lab("report")
        assert said in (lab.outputs() / "report.md").read_text().replace("\\", "")


def test_latest_and_best_are_set_right_whatever_an_unconfined_agent_makes_of_them(lab: Any) -> None:
    """By the comparison, or by the engine itself, whoever is first."""
    body = "(outputs / 'BEST').write_text('0099-none'); os.unlink(outputs / 'LATEST'); os.mkdir(outputs / 'LATEST')"
    agent = Misbehaving(lab, body, dangerous=True)
    lab("autopilot", "--runs", "1")
    assert (lab.outputs() / "LATEST").read_text().strip() == lab.runs()[-1].name
    assert (lab.outputs() / "BEST").read_text().strip() in {run.name for run in lab.runs()}
    agent.is_well()


@pytest.fixture
def warm(lab: Any) -> Any:
    """Its runs leave a checkpoint."""
    train = (lab.folder / "train.py").read_text()
    save = 'os.makedirs(run_dir + "/checkpoints"); open(run_dir + "/checkpoints/best.pt", "w").write("weights")\n'
    lab.write("train.py", train.replace("time.sleep(config", save + "time.sleep(config"))
    lab.base(autopilot={"resume_mode": "fresh", "resume_from": "latest"})
    lab.configure(
        warm_start={
            "mode": "autopilot.resume_mode", "from": "autopilot.resume_from", "checkpoint": "checkpoints/best.pt",
            "arguments": [],
        }
    )  # fmt: skip
    return lab


@pytest.mark.parametrize("path", ["outputs / 'models/best.pt'", "runs[0] / 'checkpoints/best.pt'"])
def test_weights_that_an_unconfined_agent_changes_are_restored(warm: Any, path: str) -> None:
    # The copy in models/ is made while the agent is asked, and would replace what it wrote before.
    wait = "import time; [time.sleep(0.02) for _ in range(10000) if not (outputs / 'models/best.json').exists()]"
    agent = Misbehaving(warm, f"{wait}; ({path}).write_text('mine')", dangerous=True)
    done = warm("autopilot", "--runs", "1")
    assert "best.pt was changed" in done.out
    assert agent.rates() == [0.1, 0.3]
    assert (warm.runs()[0] / "checkpoints/best.pt").read_text() == "weights"
    assert (warm.outputs() / "models/best.pt").read_text() == "weights"
    agent.is_well()


def test_large_weights_that_were_changed_cannot_be_restored_and_that_is_told(warm: Any) -> None:
    train = (warm.folder / "train.py").read_text()
    warm.write("train.py", train.replace('"weights"', '"w" * 2000000'))
    agent = Misbehaving(warm, "append(runs[0] / 'checkpoints/best.pt')", dangerous=True)
    done = warm("autopilot", "--runs", "1")
    assert "NOT restored" in done.out
    assert agent.rates() == [0.1, 0.3]


def test_without_landlock_it_is_told_loudly_and_changes_are_restored(lab: Any) -> None:
    agent = Misbehaving(lab, "append(lab / 'train.py')")
    before = contents(lab)
    done = lab.start("autopilot", "--runs", "1", wrapper=NO_LANDLOCK).ended()
    assert contents(lab) == before
    assert agent.rates() == [0.1, 0.3]
    assert "NOT confined" in done.out
    assert "NOT confined" in (lab.outputs() / "labbook.md").read_text()
    assert [event["text"] for event in agent.events("agent not confined")] == [
        "the kernel has no Landlock, so the agent (command) is NOT confined: it can change any of your files"
    ]
    checked = lab.start("check", wrapper=NO_LANDLOCK).ended()
    assert "WARNING: the kernel has no Landlock" in checked.out
    assert "WARNING" not in lab("check").out or landlock_version() < COMPLETE
    agent.is_well()


WAITS = """
Path("waiting").touch()
while not Path("go").exists():
    time.sleep(0.01)
"""


@confined
def test_what_a_person_changes_while_a_confined_agent_works_stays_and_is_told(lab: Any) -> None:
    agent = Misbehaving(lab, WAITS)
    engine = lab.start("autopilot", "--runs", "1")
    until((agent.folder / "waiting").exists, "the agent")
    changed = (lab.folder / "train.py").read_text() + "# by a person\n"
    lab.write("train.py", changed)
    (agent.folder / "go").touch()
    done = engine.ended()
    assert (lab.folder / "train.py").read_text() == changed
    assert agent.rates() == [0.1, 0.2]
    assert "train.py was changed while the agent ran, but not by the agent" in done.out
    (event,) = agent.events("files changed")
    assert event["by"] == "somebody else"
    # The next run may start within the second for which the state of the code is reused; else its change is an alarm.
    assert [event["code"] for event in agent.events("alarm")] in ([], [["train.py"]])


def test_what_a_person_changes_while_an_unconfined_agent_works_is_kept_aside(lab: Any) -> None:
    agent = Misbehaving(lab, WAITS, dangerous=True)
    engine = lab.start("autopilot", "--runs", "1")
    until((agent.folder / "waiting").exists, "the agent")
    lab.write("train.py", "# by a person\n")
    lab.write("notes.txt", "nobody's business\n")
    (agent.folder / "go").touch()
    engine.ended()
    (kept,) = (lab.folder / ".looplab/quarantine").rglob("train.py")
    assert kept.read_text() == "# by a person\n"
    assert agent.rates() == [0.1, 0.3]
    assert (lab.folder / "notes.txt").exists()


def test_an_answer_of_an_unconfined_agent_is_compared_after_a_crash_too(lab: Any) -> None:
    agent = Misbehaving(lab, "append(lab / 'train.py')", dangerous=True)
    engine = lab.start("autopilot", "--runs", "1")

    def answered() -> bool:
        logs = list((lab.folder / "agent_runs").glob("*.jsonl"))
        return any("looplab.end" in log.read_text() for log in logs)

    until(answered, "the answer")
    os.kill(engine.pid, 9)
    engine.process.wait()
    done = lab("resume")
    assert agent.rates() == [0.1, 0.3]
    if agent.events("files changed")[0]["files"][0]["restored"]:  # the engine lived long enough
        assert "# changed" not in (lab.folder / "train.py").read_text()
    else:
        assert "train.py was changed" in done.out
    lab("verify")


def test_an_agent_has_a_folder_of_its_own(lab: Any) -> None:
    agent = Misbehaving(lab, "pass", answer="next_config.json")
    assert "in its own folder" in lab("autopilot", "--runs", "1", code=2).err
    assert agent.rates() == []


# -- answers

HOSTILE = {
    "20 MB": ('Path("next_config.json").write_text(json.dumps({**answer(0.2), "more": "x" * 20_000_000}))', "larger"),
    "20 MB printed": ('text = json.dumps({**answer(0.2), "more": "x" * 20_000_000})', "1,000,000 characters"),
    "a link": (
        'Path("other.json").write_text(text); os.symlink("other.json", "next_config.json")',
        "symbolic link",
    ),
    "a link to a device": ('os.symlink("/dev/zero", "next_config.json")', "symbolic link"),
    "a pipe": ('os.mkfifo("next_config.json")', "not a file"),
    "a folder": ('os.makedirs("next_config.json/deep"); append("next_config.json/deep/x")', "is a folder"),
    "half an emoji": ('text = text.replace("train.lr", "train.\\\\ud83d").replace("call", "\\\\ud83d")', ""),
    "6,000 digits": ('text = \'{"proposals": [{"edits": [], "n": \' + "9" * 6000 + "}]}"', "digits"),
    "nesting": ('text = "[" * 200_000', "nested"),
    "not UTF-8": ('Path("next_config.json").write_bytes(b\'{"proposals": "\\xff\\xfe\')', "not JSON"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(HOSTILE, "20 MB", "a pipe", "a folder"))
def test_a_hostile_answer_is_refused_with_its_reason_and_the_next_one_is_run(lab: Any, name: str) -> None:
    body, said = HOSTILE[name]
    agent = Misbehaving(lab, body)
    lab("autopilot", "--runs", "1")
    assert agent.rates() == [0.1, 0.3]
    assert said in agent.prompt(2)
    assert len(agent.prompt(2)) < 100_000
    agent.is_well()
    size = sum(path.stat().st_size for path in lab.folder.rglob("*") if path.is_file() and path.parent != agent.folder)
    assert size < 40_000_000


@pytest.mark.slow
@pytest.mark.parametrize("name", some(HOSTILE, "a folder", "half an emoji"))
def test_a_refused_answer_never_stops_resume(lab: Any, name: str) -> None:
    agent = Misbehaving(lab, HOSTILE[name][0].replace("if n == 1", "if True"), tries=1)
    lab("autopilot", "--runs", "1", code=None)
    assert 0.2 not in agent.rates()
    lab("resume")
    assert len(agent.rates()) >= 2  # by the agent's next answer, or by whoever stands in for it
    lab("verify")


@pytest.mark.slow
def test_a_refused_edit_of_many_characters_is_cut_in_the_next_prompt(lab: Any) -> None:
    body = 'text = json.dumps({"proposals": [{"edits": ["train.lr@set=" + "9" * 90_000] * 8, "reason": "r" * 90_000}]})'
    agent = Misbehaving(lab, body)
    lab("autopilot", "--runs", "1")
    assert agent.rates() == [0.1, 0.3]
    assert len(agent.prompt(2)) < len(agent.prompt(1)) + 20_000
    agent.is_well()


PRINTS = """
line = "progress " * 8 + "\\n"
for _ in range(8_000):
    sys.stdout.write(line * 100)
    sys.stderr.write(line * 10)
"""


@pytest.mark.slow
def test_an_agent_that_prints_much_has_a_bounded_log_and_its_last_line_is_the_answer(lab: Any) -> None:
    agent = Misbehaving(lab, PRINTS, log_mb=1)
    lab("autopilot", "--runs", "1")
    assert agent.rates() == [0.1, 0.2]
    (log,) = (lab.folder / "agent_runs").glob("*.jsonl")
    assert log.stat().st_size < 3_500_000  # the end has the last million characters once more
    assert log.with_suffix(".stderr").stat().st_size <= 1_100_000
    assert "were dropped here" in log.with_suffix(".stderr").read_text()
    shown = lab("agent-log").out
    assert "lines with" in shown
    assert "train.lr@set=0.2" in lab("agent-log", "--only", "final").out
    agent.is_well()


# -- secrets

KEY = 'tkn-ZZ99/not-a-known"shape-77'
LEAKS = {
    "a reason": 'text = json.dumps(answer(0.2)).replace("call 1", json.dumps("the key is " + key)[1:-1])',
    "the file": 'Path("next_config.json").write_text(json.dumps(answer(0.2)).replace("call 1", json.dumps(key)[1:-1]))',
    "escapes": 'Path("next_config.json").write_text(json.dumps(answer(0.2)).replace("call 1", escaped))',
    "printed escapes": 'text = json.dumps(answer(0.2)).replace("call 1", escaped)',
    "a refused edit": 'text = json.dumps({"proposals": [{"edits": ["train.lr@set=" + key]}]})',
    "a partial config": 'Path("next_config.json").write_text(json.dumps({"train": {"lr": key}, "reason": key}))',
    "escapes in a partial config": 'Path("next_config.json").write_text(\'{"train": {"lr": "\' + escaped + \'"}}\')',
    "a string knob": 'text = json.dumps({"proposals": [{"edits": ["note@set=" + key], "reason": key}]})',
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(LEAKS, "escapes", "a partial config"))
def test_a_key_that_reached_an_agent_is_in_no_file_and_not_in_the_terminal(lab: Any, name: str) -> None:
    body = 'key = os.environ["AGENT_ACCOUNT"]\nescaped = "".join(f"\\\\u{ord(c):04x}" for c in key)\n' + LEAKS[name]
    agent = Misbehaving(lab, body, env=["AGENT_ACCOUNT"])
    lab.base(note="")
    lab.configure(knobs={**lab.study["knobs"], "note": {"type": "str"}})
    done = lab("autopilot", "--runs", "1", env={"AGENT_ACCOUNT": KEY})
    assert len(agent.rates()) == 2
    lab("report")
    lab("verify")
    for path in lab.folder.rglob("*"):
        if path.is_file() and path.name != "seen.json":
            content = path.read_bytes()
            for secret in (KEY.encode(), json.dumps(KEY)[1:-1].encode(), b"\\u0074\\u006b\\u006e"):
                assert secret not in content, path
    assert KEY not in done.out + done.err


# -- processes


@pytest.mark.parametrize("dangerous", [False, True])
def test_a_daemon_of_an_agent_that_kills_its_warden_first_is_ended(lab: Any, dangerous: bool) -> None:
    if not dangerous and landlock_version() < 6:
        pytest.skip("needs Landlock 6 (Linux 6.12)")
    body = """
daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={}, start_new_session=True,
                          stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
Path("daemon").write_text(str(daemon.pid))
attempt(os.kill, os.getppid(), signal.SIGKILL)
"""
    agent = Misbehaving(lab, body, dangerous=dangerous)
    lab("autopilot", "--runs", "1", code=None)
    if not dangerous:
        assert agent.refused() == ["PermissionError: None"]
        assert agent.rates() == [0.1, 0.2]
    pid = int((agent.folder / "daemon").read_text())
    deadline = time.monotonic() + 30
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False
