"""A storm of attacks on a lab, by class: what was tried, and what held.

    python benchmarks/storm.py [--quick] [--minutes M] [--seed N] [--jobs J] [--only CLASS] [--replay CLASS:N]

Each attack builds a small lab, does its damage (hostile texts and files, damage to the ledger, kills, moved labs,
programs in git's configuration, planted secrets …), and then asks for what must hold afterwards:

- no command ends in a traceback or hangs, and `resume` works, twice (else it is *wedged*);
- every training that was started is in the record (else *lost*), and none was started twice (*twice*);
- nothing outside of the lab was changed, and no secret is in its files (*outside*);
- `verify` names the damage, and after `reindex` it says that the record is whole;
- at the end no process, zombie, shared memory or folder is left behind, and neither handles nor memory have grown.

One attack, `endurance`, lasts as long as the storm: a continuous study whose engine, supervisor, trainings, page and
agent are killed, on a disk that is full or slow, with clocks that jump and folders that are deleted. The others are
short, and are made beside it, class by class.

Attacks are drawn from a seed; one that did not hold is printed with the command that makes it again, alone. The random
choices are the same then; the moment of a kill also depends on the machine. Commands are forks of this process, which
has looplab imported: ten times as many attacks in the same time.

Time is boxed: no attack begins after the given time, and one that has not ended a little later is cut off and counted
neither as tried nor as held. Classes that were not reached are named.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from storm_soak import endurance, soak

ENDURANCE = "endurance"
"""The attack that lasts as long as the storm."""
TIMEOUT_S = 120.0
"""A command that takes longer is wedged."""
LEAK_PATIENCE_S = 60.0
"""How long processes of ended attacks may take to end."""
QUICK_S, QUICK_CUT_S = 42.0, 8.0
"""With --quick: until when attacks begin, and how long after that they may take."""
TRAIN = """\
import json, os, sys
config = json.load(open(os.environ["LOOPLAB_CONFIG"]))
run = os.environ["LOOPLAB_RUN_DIR"]
with open(os.environ["STORM_STARTED"], "a") as file:
    file.write(os.path.basename(run) + chr(10))
with open(os.environ["LOOPLAB_METRICS"], "a") as file:
    print(json.dumps({"step": 1, "loss": (config["x"] - 30) ** 2}), file=file)
"""
SECRET = "storm-" + "q7Rk2mXw9ZpLs4Tv"
WEDGED, LOST, TWICE, OUTSIDE = "wedged", "lost", "twice", "outside"


class Broken(Exception):
    """What must hold did not."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


@dataclass(slots=True)
class Storm:
    """One attack: its lab, its random numbers, and what was seen so far."""

    folder: Path
    rng: random.Random
    extra: str = ""
    """What the trainer does besides."""
    names: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """How long an attack without an end of its own lasts."""

    @property
    def lab(self) -> Path:
        return self.folder / "lab"

    @property
    def started(self) -> list[str]:
        """The runs whose training has begun, one line each time."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "started").read_text().split()
        return []

    def build(self, *, queue: int = 3, **settings: Any) -> None:
        self.lab.mkdir(exist_ok=True)
        (self.folder / "victim").mkdir(exist_ok=True)
        (self.folder / "victim" / "kept.txt").write_text("kept")
        (self.lab / "train.py").write_text(TRAIN + self.extra)
        (self.lab / "base.json").write_text('{"x": 1, "note": ""}')
        entries = [{"edits": [f"x@set={x}"]} for x in self.rng.sample(range(10, 100), queue)]
        (self.lab / "queue.json").write_text(json.dumps({"proposals": entries}))
        study: dict[str, Any] = {
            "study": "toy", "launch": {"command": ["{python}", "-S", "train.py"], "grace": 1},
            "base": "base.json", "objective": {"metric": "loss", "goal": "min"},
            "knobs": {"x": {"type": "int", "low": 0, "high": 100}, "note": {"type": "str"}},
            "proposers": [{"queue": "queue.json"}], "slots": {"count": 2, "gpus": "none", "cores": "none"},
        }  # fmt: skip
        (self.lab / "lab.yaml").write_text(json.dumps({**study, **settings}))

    def start(self, *argv: str, cwd: Path | None = None, **env: str) -> tuple[int, Path]:
        """Start a command; return its pid and the file with what it prints."""
        log = self.folder / f"out-{len(self.names)}"
        self.names.append(" ".join(argv)[:60])
        pid = os.fork()
        if pid:
            return pid, log
        code = 99
        try:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for number, target in ((nothing, 0), (descriptor, 1), (descriptor, 2)):
                os.dup2(number, target)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            os.chdir(cwd or self.lab)
            os.environ.update({"STORM_STARTED": str(self.folder / "started"), **env})
            if "LD_PRELOAD" in env:
                os.execv(sys.executable, [sys.executable, "-m", "looplab", *argv])
            sys.argv = ["looplab", *argv]
            from looplab.cli.main import main

            try:
                main()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            import traceback

            with contextlib.suppress(Exception), log.open("a") as file:
                traceback.print_exc(file=file)
        finally:
            os._exit(code)

    def end(self, pid: int, timeout: float = TIMEOUT_S) -> int:
        """Wait for a command; one that hangs is killed, and the attack has not held."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise Broken(WEDGED, f"{self.names[-1]} did not end")

    def call(self, *argv: str, codes: tuple[int, ...] = (0, 1, 2, 3), cwd: Path | None = None, **env: str) -> str:
        """Run a command; return what it printed. A traceback or another exit code is what must not be."""
        pid, log = self.start(*argv, cwd=cwd, **env)
        code = self.end(pid)
        text = log.read_bytes().decode(errors="replace") if log.exists() else ""
        if "Traceback (most recent call last)" in text:
            raise Broken(WEDGED, f"{argv[0]}: {text.strip().splitlines()[-1][:300]}")
        if code not in codes:
            raise Broken(WEDGED, f"{' '.join(argv)[:80]}: exit {code}: {text[-600:]}")
        return text

    def settle(self, *, whole: bool = True, lost: bool = True, argv: tuple[str, ...] = ("resume",), **env: str) -> None:
        """Ask for what must hold after an attack."""
        for _ in range(2):
            self.call(*argv, codes=(0, 1), **env)
        for command in (("status",), ("show",), ("plan",)):
            self.call(*command)
        if whole:
            self.call("verify", codes=(0,))
        self.check_once(lost=lost)

    def check_started(self) -> None:
        started = self.started
        if len(started) != len(set(started)):
            raise Broken(TWICE, f"started twice: {sorted(run for run in set(started) if started.count(run) > 1)}")

    def check_once(self, *, lost: bool = True) -> None:
        """No run was started twice, no number given twice, and all that were started are in the ledger."""
        self.check_started()
        started = self.started
        with contextlib.closing(sqlite3.connect(self.lab / ".looplab/ledger.db")) as db:
            rows = db.execute("SELECT id, n, state, config_hash, role FROM runs WHERE study='toy'").fetchall()
        known = {row[0] for row in rows}
        if lost and set(started) - known:
            raise Broken(LOST, f"not in the ledger: {sorted(set(started) - known)}")
        if len({row[1] for row in rows}) != len(rows):
            raise Broken(TWICE, "a number was given twice")
        configs = [row[3] for row in rows if row[4] != "base"]  # a base that does not work is run again, on purpose
        if len(configs) != len(set(configs)):
            raise Broken(TWICE, "a config was run twice")
        self.check_outside()

    def check_outside(self) -> None:
        # A training that leads out of the lab by one link may itself have put another link there.
        files = [entry.name for entry in os.scandir(self.folder / "victim") if not entry.is_symlink()]
        if files != ["kept.txt"] or (self.folder / "victim" / "kept.txt").read_text() != "kept":
            raise Broken(OUTSIDE, "a file outside of the lab was changed")

    def fail(self, kind: str, why: str) -> NoReturn:
        raise Broken(kind, why)

    @staticmethod
    def with_argument(text: str) -> list[int]:
        """The processes that have this text in an argument, without this one."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().split(b"\0")
                if any(text.encode() in word for word in words) and int(path.parent.name) != os.getpid():
                    found.append(int(path.parent.name))
        return found

    def run_folders(self) -> list[Path]:
        return sorted(path.parent.parent for path in (self.lab / "outputs").glob("toy/*/record/run.json"))


# -- what is hostile


def hostile_text(rng: random.Random) -> str:
    parts = [
        "\ud83d", "\ude80", "\ud83d\ude80", "\x1b[2J\x1b]0;owned\x07", "\u202eevil\u202c", "\r\n", "\x00", "\x7f", "\x9b31m",
        "<script>alert(1)</script>", "[link](javascript:alert(1))", "=cmd|'/c calc'!A1", "'; DROP TABLE runs; --",
        "`rm -rf /`", "$(touch victim)", "../../victim", "a" * 5000, "日本語", "🚀", "|", "\t", "\u2028", "\ufeff", "%s%n",
        "{python}", "{{x}}", "***", "NaN", "null",
    ]  # fmt: skip
    return "".join(rng.choice(parts) for _ in range(rng.randrange(1, 6)))


def as_argument(text: str) -> str:
    """What a shell could pass: bytes without NUL; halves of pairs become bytes that are not UTF-8."""
    return os.fsdecode(text.encode("utf-8", "surrogatepass").replace(b"\0", b"")) or "x"


def hostile_value(rng: random.Random) -> str:
    nested = rng.choice([50, 900, 3000, 100_000])
    return rng.choice(
        [
            "9" * 20, "-" + "9" * 25, "9" * 5000, "1e999", "NaN", "-Infinity", "[" * nested + "]" * nested,
            '{"a":' * min(nested, 5000) + "1" + "}" * min(nested, 5000), '"\\ud83d"', "0x10", "1_000", "true", "''", "[]",
            "~", "*a", "&a 1", "!!python/object:os.system ls", "2026-01-01",
        ]
    )  # fmt: skip


# -- the classes


def texts(storm: Storm) -> None:
    """People's words: reasons, hypotheses, notes, edits with any text."""
    storm.build(queue=1)
    for _ in range(3):
        argv = ["propose", "--change", f"note@set={json.dumps(hostile_text(storm.rng))}", "--reason"]
        storm.call(*(as_argument(one) for one in (*argv, hostile_text(storm.rng))))
    storm.call("say", as_argument(hostile_text(storm.rng)))
    storm.call("run", codes=(0, 1), PYTHONIOENCODING=storm.rng.choice(["utf-8", "latin-1", "ascii"]))
    storm.settle()
    shown = storm.call("status") + storm.call("show") + (storm.lab / "outputs/toy/labbook.md").read_text()
    if any(mark in shown for mark in ("\x1b", "\u202e", "\x9b")):
        raise Broken(OUTSIDE, "a control character reached the terminal or the lab book")


def values(storm: Storm) -> None:
    """Numbers and structures in proposals, queues and configs."""
    storm.build(queue=1)
    where = storm.rng.choice(["propose", "queue", "config", "base"])
    value = hostile_value(storm.rng)
    if where == "propose":
        storm.call("propose", "--change", f"x@set={value[:100_000]}")
    elif where == "queue":
        (storm.lab / "queue.json").write_text(f'{{"proposals": [{{"edits": ["x@set=7"], "reason": {value}}}]}}')
    elif where == "config":
        (storm.lab / "other.yaml").write_text(f"x: 5\nnote: {value}\n")
        storm.call("run", "--cfgs", "other.yaml")
    else:
        (storm.lab / "base.json").write_text(f'{{"x": 1, "note": {value}}}')
    for command in ("check", "plan", "run"):
        storm.call(command)
    (storm.lab / "base.json").write_text('{"x": 1, "note": ""}')
    (storm.lab / "queue.json").write_text('{"proposals": []}')
    storm.call("run", codes=(0, 1))
    storm.settle()


def files(storm: Storm) -> None:
    """Files that are not what they should be: pipes, devices, links, folders, bombs."""
    storm.build(queue=1)
    name = storm.rng.choice(["queue.json", "base.json", "lab.yaml"])
    path = storm.lab / name
    good = path.read_bytes()
    path.unlink()
    kind = storm.rng.choice(["fifo", "zero", "loop", "folder", "bomb", "random", "latin", "deep", "missing", "nul"])
    if kind == "fifo":
        os.mkfifo(path)
    elif kind in ("zero", "loop"):
        path.symlink_to("/dev/zero" if kind == "zero" else path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "bomb":
        levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 10)]
        path.write_text("l0: &l0 [x, x]\n" + "\n".join(levels) + "\n")
    elif kind != "missing":
        content = {
            "random": storm.rng.randbytes(3000), "latin": "x: é\n".encode("latin-1"), "deep": b"[" * 50_000,
            "nul": b"\0" * 100_000,
        }  # fmt: skip
        path.write_bytes(content[kind])
    for command in ("check", "plan", "run"):
        storm.call(command, "--lab", str(storm.lab))
    with contextlib.suppress(FileNotFoundError):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    path.write_bytes(good)
    storm.call("run", codes=(0, 1))
    storm.settle()


def prints(storm: Storm) -> None:
    """What a trainer prints."""
    lines = [
        "'step' + ' ' * 3000 + 'x'", "'loss=' + '9' * 8000 + 'z'", "'Epoch ' * 200", "'a=1 ' * 5000", "'[' * 10000",
        "'{\"loss\": ' + '[' * 3000", "'loss: ' + 'nan ' * 1000", "'=' * 20000", "'1/' * 9000", "'\\x1b[31m' * 3000",
        "'\\ud800'", "'x' * 3_000_000", "'step 1 loss ' * 2000", "'(' * 5000 + ')' * 5000",
    ]  # fmt: skip
    chosen = storm.rng.sample(lines, 3)
    storm.extra = "".join(f"sys.stdout.buffer.write(({one}).encode('utf-8', 'replace') + b'\\n')\n" for one in chosen)
    storm.build(queue=2)
    storm.call("run", codes=(0, 1))
    storm.settle()
    storm.call("logs", "-n", "2")


def leftovers(storm: Storm) -> None:
    """What a trainer leaves in its folder."""
    record = "os.path.join(run, 'record')"
    does = [
        "open('metrics.jsonl','w').write('['*3000)", "open('trainer_summary.json','w').write('{\"a\":'*3000)",
        "os.mkfifo('metrics.csv')", "os.symlink('progress.csv','progress.csv')", "os.symlink('/dev/zero','results.json')",
        "os.mkdir('trainer_summary.json')", f"os.remove({record}+'/train.log'); os.mkdir({record}+'/train.log')",
        f"open({record}+'/process.json','w').write('{{}}')", f"open({record}+'/exit.json','w').write('{{}}')",
        f"os.mkdir({record}+'/summary.json')", f"os.mkdir({record}+'/exit.json')",
        f"import shutil; shutil.rmtree({record})", f"os.chmod({record}, 0)",
        "open('events.out.tfevents.1','wb').write(bytes(4_000_000))",
        "open('events.out.tfevents.2','wb').write(b'\\xff\\xff\\xff\\x7f'+bytes(100))",
        "open('run-x.wandb','wb').write(os.urandom(9000))", "open('metrics.jsonl','w').write('{\"loss\": 1'+'0'*400+'}\\n')",
        "open('metrics.jsonl','w').write('{\"\\\\ud800\": 1}\\n')", "open('progress.csv','w').write('a,a\\n1'+','*9999)",
        f"os.rename({record}, {record}+'2')", "os.symlink('/etc/passwd', 'metrics.txt')",
    ]  # fmt: skip
    storm.extra = "os.chdir(run)\n" + "".join(
        f"try:\n    {one}\nexcept OSError: pass\n" for one in storm.rng.sample(does, storm.rng.randrange(1, 4))
    )
    storm.build(queue=2)
    storm.call("run", codes=(0, 1), STORM_TOKEN=SECRET)
    storm.settle(whole=False)
    storm.call("verify", codes=(0, 1))


def damage(storm: Storm) -> None:
    """Damage to the ledger: flips, garbage, truncation, old copies, missing files."""
    storm.build(queue=3)
    storm.call("run", codes=(0,))
    home = storm.lab / ".looplab"
    path = home / "ledger.db"
    old = storm.folder / "old.db"
    shutil.copy(path, old)
    pid, _ = storm.start("propose", "--change", "x@set=0")
    storm.end(pid)
    if storm.rng.random() < 0.5:  # leave a log behind, as a killed engine does
        pid = os.fork()
        if pid == 0:
            from looplab.ledger.ledger import Ledger
            from looplab.ledger.study import StudyLedger

            StudyLedger(Ledger(path), "toy").say("unsynced")
            os._exit(0)
        os.waitpid(pid, 0)
    events = _journal_length(home)
    kind = storm.rng.choice(
        ["flip", "flip", "flip", "page", "cut", "old", "gone", "empty", "header", "journal", "head"]
    )
    victim = home / storm.rng.choice(["ledger.db", "ledger.db", "ledger.db-wal"])
    victim = victim if victim.exists() else path
    content = bytearray(victim.read_bytes())
    if kind == "flip":
        for _ in range(storm.rng.choice([1, 1, 8])):
            at = storm.rng.randrange(len(content))
            content[at] ^= 1 << storm.rng.randrange(8)
        victim.write_bytes(content)
    elif kind == "page":
        at = storm.rng.randrange(max(1, len(content) // 4096)) * 4096
        content[at : at + 4096] = storm.rng.randbytes(4096)
        victim.write_bytes(content)
    elif kind == "cut":
        victim.write_bytes(content[: storm.rng.randrange(len(content))])
    elif kind == "old":
        for name in ("ledger.db-wal", "ledger.db-shm"):
            (home / name).unlink(missing_ok=True)
        shutil.copy(old, path)
    elif kind == "gone":
        for one in home.glob("ledger.db*"):
            one.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "header":
        path.write_bytes(storm.rng.randbytes(100) + bytes(content[100:]))
    elif kind == "journal":
        lines = (home / "journal.jsonl").read_bytes()
        at = storm.rng.randrange(len(lines))
        (home / "journal.jsonl").write_bytes(lines[:at] + storm.rng.choice([b"", b"\xff\x00", lines[at + 9 :]]))
    else:
        (home / storm.rng.choice(["head", "journal.jsonl"])).unlink()
    before = storm.started
    storm.call("verify", codes=(0, 1))
    storm.call("status")
    storm.call("resume")
    storm.check_started()
    storm.call("reindex", codes=(0,))
    storm.settle()
    if not set(before) <= set(storm.started) or len(set(storm.started)) != len(storm.started):
        raise Broken(TWICE, "trainings were started again")
    if kind not in ("journal", "head") and _journal_length(home) < events:
        raise Broken(LOST, "events were lost")


def _journal_length(home: Path) -> int:
    return (home / "journal.jsonl").read_bytes().count(b"\n")


def tampering(storm: Storm) -> None:
    """Rows and files that are changed behind looplab's back: verify finds them, reindex restores the rows."""
    storm.build(queue=3)
    storm.call("run", codes=(0,))
    runs = storm.run_folders()
    if storm.rng.random() < 0.5:
        columns = {
            "runs": ["reason='x'", "objective=-1", "status='lost'", "seed=99", "role='base2'", "n=n+50", "verdict='keep'",
                     "started=1.0", "point='y'", "parent='z'"],
            "proposals": ["hypothesis='x'", "reason='y'", "status='waiting'", "edits='[]'"],
            "rounds": ["closed=1.0"], "studies": ["best=NULL", "goal='max'"], "sessions": ["began=1.0"],
            "events": ["data='{}'", "kind='said'", "at=1.0", "hash='0'"],
        }  # fmt: skip
        table = storm.rng.choice(list(columns))
        with contextlib.closing(sqlite3.connect(storm.lab / ".looplab/ledger.db")) as db, db:
            (rowid,) = storm.rng.choice(db.execute(f"SELECT rowid FROM {table}").fetchall())
            db.execute(f"UPDATE {table} SET {storm.rng.choice(columns[table])} WHERE rowid=?", (rowid,))
        storm.call("verify", codes=(1,))
        storm.call("reindex", codes=(0,))
        storm.settle()
        return
    run = storm.rng.choice(runs)
    name = storm.rng.choice(
        ["summary.json", "exit.json", "process.json", "config.json", "run.json", "metrics.parquet", "train.log",
         "../metrics.jsonl", "../../labbook.md", "../../BEST"]
    )  # fmt: skip
    path = run / "record" / name
    if not path.exists():
        path = run / "record" / "exit.json"  # a run of less than 20 ms has no process.json
    content = path.read_bytes()
    if name.endswith("labbook.md"):
        path.write_bytes(content.replace(b"loss = ", b"loss = 9", 1))
    elif name.endswith("BEST"):
        path.write_text("0042-none\n")
    else:
        at = storm.rng.randrange(len(content) + 1)
        path.write_bytes(content[:at] + b" " + content[at:])
    storm.call("verify", codes=(1,))
    path.write_bytes(content)
    storm.settle()


def kills(storm: Storm) -> None:
    """SIGKILL of the engine at any moment."""
    storm.extra = f"import time; time.sleep({storm.rng.choice([0, 0.05, 0.2])})\n"
    storm.build(queue=6)
    for _ in range(storm.rng.randrange(1, 5)):
        pid, _ = storm.start("run")
        time.sleep(storm.rng.random() * 0.8)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        storm.end(pid)
        storm.call("verify", codes=(0, 1, 2))
    storm.call("run", codes=(0, 1))
    storm.settle()
    if len(storm.run_folders()) < 2:
        raise Broken(LOST, "the study did not continue")


def paths(storm: Storm) -> None:
    """Names that lead out of the lab, and questions that write."""
    storm.build(queue=1)
    storm.call("run", codes=(0,))
    out = str(storm.folder / "victim" / "new")
    attacks: list[list[str]] = [
        ["query", f"COPY (SELECT 1) TO '{out}'"], ["query", f"EXPORT DATABASE '{out}'"], ["query", f"ATTACH '{out}' AS v"],
        ["query", f"SELECT * FROM read_csv('{storm.folder}/victim/kept.txt')"], ["query", f"SET temp_directory='{out}'"],
        ["query", f"INSTALL httpfs; LOAD httpfs; COPY runs TO '{out}'"], ["query", f"CALL pragma_version(); EXPORT DATABASE '{out}'"],
        ["show", "../../victim"], ["logs", "../../victim"], ["run", "--cfgs", "../victim/kept.txt"],
        ["run", "--cfgs", f"{out}.json"], ["diff", "../../victim", "1"], ["stage", "--new", "--run-id", f"../../{out}"],
        ["propose", "--change", "x@set=3", "--parent", "../../victim"], ["show", "--study", "../../victim"],
        ["submit", "--study", "../victim", "--", "true"],
    ]  # fmt: skip
    for argv in storm.rng.sample(attacks, 4):
        storm.call(*argv)
    link = storm.lab / "outputs" / "toy" / "linked"
    link.symlink_to(storm.folder / "victim")
    for command in ("status", "report", "reindex", "verify"):
        storm.call(command)
    storm.settle(whole=False)


def links(storm: Storm) -> None:
    """Links that a training puts in the place of looplab's files and folders."""
    victim = repr(str(storm.folder / "victim"))
    does = [
        f"os.rename(run + '/record', run + '/old'); os.symlink({victim}, run + '/record')",
        f"shutil.rmtree(run + '/record'); os.symlink({victim}, run + '/record')",
        f"os.rename(run, home + '/' + os.path.basename(run)); os.symlink({victim}, run)",
        f"os.remove(study + '/labbook.md'); os.symlink({victim} + '/kept.txt', study + '/labbook.md')",
        f"os.symlink({victim} + '/kept.txt', study + '/BEST')", f"os.symlink({victim} + '/kept.txt', study + '/LATEST')",
        f"os.symlink({victim} + '/kept.txt', run + '/record/summary.json')",
        f"os.symlink({victim} + '/kept.txt', run + '/record/metrics.parquet')",
        f"os.symlink({victim} + '/kept.txt', run + '/record/exit.json.tmp' + str(os.getppid()))",
        f"os.rename(home + '/backups', home + '/old'); os.symlink({victim}, home + '/backups')",
        f"os.symlink({victim} + '/kept.txt', study + '/report.html')", f"os.symlink({victim}, study + '/plots')",
        f"os.rename(home + '/journal.jsonl', home + '/old.jsonl'); os.symlink({victim} + '/kept.txt', home + '/journal.jsonl')",
        f"os.symlink({victim} + '/kept.txt', home + '/x'); os.rename(home + '/x', home + '/head')",
    ]  # fmt: skip
    storm.extra = (
        "import shutil\nstudy = os.path.dirname(run)\nhome = os.path.join(os.environ['LOOPLAB_LAB'], '.looplab')\n"
    )
    for one in storm.rng.sample(does, 2):
        storm.extra += f"try:\n    {one}\nexcept OSError: pass\n"
    storm.build(queue=2)
    storm.call("run")
    for command in ("resume", "status", "report", "reindex", "verify"):
        storm.call(command)
    storm.check_outside()


def git(storm: Storm) -> None:
    """Programs that the lab's git configuration names are not run."""
    storm.build(queue=1)
    trap = storm.folder / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {storm.folder}/victim/trapped\ncat\n")
    trap.chmod(0o755)

    def ask(*argv: str) -> None:
        subprocess.run(["git", *argv], cwd=storm.lab, check=True, capture_output=True)

    (storm.lab / ".gitignore").write_text("outputs\n.looplab\n")
    ask("init", "-q")
    ask("add", ".")
    ask("-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "first")
    key = storm.rng.choice(
        ["core.fsmonitor", "diff.external", "diff.d.textconv", "filter.f.clean", "filter.f.smudge", "filter.f.process",
         "core.hooksPath", "include", "core.worktree", "partial clone", "core.pager", "hook", "core.sshCommand"]
    )  # fmt: skip
    (storm.lab / ".gitattributes").write_text("*.py filter=f diff=d\n")
    if key == "include":
        (storm.lab / ".git/more").write_text(f'[filter "f"]\n\tsmudge = {trap}\n\tclean = {trap}\n')
        ask("config", "include.path", "more")
    elif key == "core.worktree":
        ask("config", key, str(storm.folder / "victim"))
    elif key == "partial clone":
        for name, value in (("core.repositoryformatversion", "1"), ("extensions.partialclone", "origin")):
            ask("config", name, value)
        for name, value in (("promisor", "true"), ("url", str(storm.lab)), ("uploadpack", str(trap))):
            ask("config", f"remote.origin.{name}", value)
    elif key == "core.hooksPath":
        (storm.lab / "hooks").mkdir()
        for hook in ("post-checkout", "reference-transaction", "post-index-change"):
            shutil.copy(trap, storm.lab / "hooks" / hook)
        ask("config", key, "hooks")
    elif key == "hook":
        (storm.lab / ".git/hooks/post-checkout").write_text(trap.read_text())
        (storm.lab / ".git/hooks/post-checkout").chmod(0o755)
    else:
        ask("config", key, str(trap))
    with (storm.lab / "train.py").open("a") as file:
        file.write("# changed\n")
    storm.call("run", codes=(0, 1))
    (storm.lab / "train.py").write_text(TRAIN)
    if key == "partial clone":
        missing = subprocess.check_output(["git", "hash-object", "train.py"], cwd=storm.lab, text=True).strip()
        (storm.lab / ".git/objects" / missing[:2] / missing[2:]).unlink(missing_ok=True)
    storm.call("reproduce", "1")
    if (storm.folder / "victim" / "trapped").exists():
        raise Broken(OUTSIDE, f"git ran the program of {key}")
    storm.call("verify", codes=(0,))


DAEMON = """\
import time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (0, 1, 2):
            os.close(number)
        os.chdir("/")
        os.execve(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(%d)"], {})
    os._exit(0)
time.sleep(0.3)
"""


def daemons(storm: Storm) -> None:
    """Processes that a training leaves behind, without session, parent or environment."""
    mark = 90_000 + storm.rng.randrange(9_000)
    storm.extra = DAEMON % mark
    storm.build(queue=1)
    pid, _ = storm.start("run")
    if storm.rng.random() < 0.5:
        time.sleep(storm.rng.random() * 2)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    storm.end(pid)
    storm.call("run", codes=(0, 1))
    storm.settle()
    until = time.monotonic() + 20
    while left := storm.with_argument(f"time.sleep({mark})"):
        if time.monotonic() > until:
            for one in left:
                os.kill(one, signal.SIGKILL)
            raise Broken(OUTSIDE, "a daemon outlived its run")
        time.sleep(0.1)


def moves(storm: Storm) -> None:
    """Labs that are renamed, copied or lose their ledger while they run."""
    storm.extra = "import time; time.sleep(0.4)\n"
    storm.build(queue=4)
    kind = storm.rng.choice(["rename", "moved later", "copied", "ledger gone", "lock gone", "ledger replaced"])
    if kind in ("moved later", "copied"):
        storm.call("run", codes=(0,))
        other = storm.folder / "other"
        if kind == "copied":
            shutil.copytree(storm.lab, other)
            storm.call("resume", cwd=other, codes=(0, 1))
            storm.call("verify", cwd=other, codes=(0, 1))
        else:
            storm.lab.rename(other)
            storm.call("resume", cwd=other, codes=(0, 1))
            storm.call("verify", cwd=other, codes=(0,))
            other.rename(storm.lab)
        storm.settle()
        return
    pid, _ = storm.start("run")
    until = time.monotonic() + 60
    while not storm.started and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(storm.rng.random() * 0.5)
    if kind == "rename":
        other = storm.folder / "other"
        storm.lab.rename(other)
        storm.end(pid)
        if storm.lab.exists():
            raise Broken(OUTSIDE, "the old place was created again")
        other.rename(storm.lab)
    else:
        home = storm.lab / ".looplab"
        if kind == "lock gone":
            (home / "toy.lock").unlink()
        else:
            for path in home.glob("ledger.db*"):
                path.unlink()
            if kind == "ledger replaced":
                (home / "ledger.db").write_bytes(b"")
        storm.call("run", codes=(0, 1, 3))
        storm.end(pid)
        storm.call("reindex", codes=(0, 3))
    storm.call("run", codes=(0, 1))
    storm.settle(whole=kind == "rename")


def secrets(storm: Storm) -> None:
    """Secrets in the environment, in arguments, texts and files of a run land nowhere."""
    name = storm.rng.choice(
        ["DB_PASS", "MYSQL_PWD", "GITHUB_PAT", "API_KEYS", "HF_TOKEN", "MY_SECRET", "SLACK_WEBHOOK"]
    )
    storm.extra = (
        f"print(os.environ[{name!r}], json.dumps(os.environ[{name!r}]))\n"
        f"open(os.environ['LOOPLAB_METRICS'], 'a').write(json.dumps({{'step': 2, 'note': os.environ[{name!r}]}}) + '\\n')\n"
    )
    storm.build(queue=1)
    secret = SECRET + storm.rng.choice(["", '"quoted\\', "/a b", "é"])
    env = {name: secret}
    storm.call("propose", "--change", "x@set=9", "--reason", f"because {secret}", **env)
    storm.call("say", f"use {secret}", **env)
    storm.settle(argv=("run", "--", f"logger.api_key={secret}"), **env)
    storm.call("report", codes=(0, 1), **env)
    for path in (storm.lab / "outputs", storm.lab / ".looplab"):
        for file in path.rglob("*"):
            if file.is_file() and SECRET.encode() in file.read_bytes():
                raise Broken(OUTSIDE, f"a secret is in {file.relative_to(storm.lab)}")


def many(storm: Storm) -> None:
    """Long queues and many commands at once."""
    storm.build(queue=1, budget={"runs": 4})
    entries = [{"edits": [f"x@set={i % 100}"], "reason": str(i)} for i in range(storm.rng.choice([2_000, 8_000]))]
    (storm.lab / "queue.json").write_text(json.dumps({"proposals": entries}))
    pid, _ = storm.start("run")
    others = []
    for _ in range(4):
        argv = storm.rng.choice(
            [("say", "hello"), ("status",), ("verify",), ("propose", "--change", "x@set=1"), ("run",)]
        )
        others.append((*storm.start(*argv), argv[0]))
    for other, log, name in others:
        code = storm.end(other)
        text = log.read_text(errors="replace")
        if "Traceback" in text or "database is locked" in text or (name in ("say", "propose") and code != 0):
            raise Broken(WEDGED, f"{name}: exit {code}: {text[-300:]}")
    storm.end(pid)
    storm.call("run", codes=(0, 1))
    storm.call("verify", codes=(0,))


CLASSES: dict[str, Callable[[Storm], None]] = {
    one.__name__: one
    for one in (
        texts,
        values,
        files,
        prints,
        leftovers,
        damage,
        tampering,
        kills,
        paths,
        links,
        git,
        daemons,
        moves,
        secrets,
        many,
        soak,
        endurance,
    )
}


def _remove(folder: Path) -> None:
    subprocess.run(["chmod", "-R", "u+rwx", str(folder)], capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


def attack(name: str, number: int, seed: int, *, seconds: float, keep: bool = False) -> Broken | None:
    """Make one attack; return what did not hold."""
    folder = Path(tempfile.mkdtemp(prefix=f"storm-{name}-"))
    storm = Storm(folder, random.Random(f"{seed}:{name}:{number}"), seconds=seconds)
    try:
        CLASSES[name](storm)
        return None
    except Broken as broken:
        return broken
    except Exception as error:
        return Broken(WEDGED, f"the attack itself failed: {type(error).__name__}: {error}")
    finally:
        if keep:
            print(f"kept: {folder}")
        else:
            _remove(folder)


class Box:
    """Attacks in processes of their own, so that one that does not end can be cut off."""

    def __init__(self, seed: int, seconds: float) -> None:
        self.seed, self.seconds = seed, seconds
        self.home = Path(tempfile.mkdtemp(prefix="storm-"))
        self.running: dict[int, tuple[str, int, Path]] = {}
        self.shared, self.own = _shared_memory(), _own_use()
        with contextlib.suppress(OSError, AttributeError):  # what an attack leaves behind becomes our child
            ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)

    def start(self, name: str, number: int) -> None:
        result = self.home / f"{name}-{number}.json"
        pid = os.fork()
        if pid == 0:
            try:
                tempfile.tempdir = str(self.home)
                found = attack(name, number, self.seed, seconds=self.seconds)
                result.write_text(json.dumps([found.kind, str(found)] if found is not None else None))
            finally:
                os._exit(0)
        self.running[pid] = name, number, result

    def ended(self) -> Iterator[tuple[str, int, Broken | None]]:
        """The attacks that have ended since the last call."""
        while self.running:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid in self.running:
                name, number, result = self.running.pop(pid)
                found = json.loads(result.read_text()) if result.exists() else [WEDGED, "the attack itself was ended"]
                yield name, number, Broken(*found) if found else None

    def leaks(self) -> list[str]:
        """What the attacks that have ended left behind; processes get some seconds to end."""
        if self.running:
            return []
        until = time.monotonic() + LEAK_PATIENCE_S
        while (left := self._processes_left()) and time.monotonic() < until:
            time.sleep(0.1)
        found = [f"a process: {name}" for name in left]
        found += [f"shared memory: {name}" for name in sorted(_shared_memory() - self.shared)]
        found += [f"a folder: {path.name}" for path in sorted(self.home.glob("storm-*"))]
        handles, memory = _own_use()
        if handles > self.own[0] + 5:
            found.append(f"handles: {self.own[0]} at the start, {handles} at the end")
        if memory > self.own[1] + 100:
            found.append(f"memory: {self.own[1]:.0f} MB at the start, {memory:.0f} MB at the end")
        return found

    def _processes_left(self) -> list[str]:
        """Descendants that live, and zombies that are not ours to reap; our own are reaped."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        names = []
        for pid in _below(os.getpid()):
            with contextlib.suppress(OSError):
                if pid != os.getpid():
                    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    names.append(f"{pid} {state} {command[:100]}".strip())
        return names

    def cut_off(self) -> list[str]:
        """End what still runs; return its names."""
        names = [f"{name}:{number}" for name, number, _ in self.running.values()]
        self.running.clear()
        while below := [pid for pid in _below(os.getpid()) if pid != os.getpid()]:
            for pid in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.01)
        _remove(self.home)
        return names


def _shared_memory() -> set[str]:
    """Names of shared memory that looplab has made; other programs have some, too."""
    return {path.name for path in Path("/dev/shm").glob("*looplab*")}


def _own_use() -> tuple[int, float]:
    """Open handles of this process, and its memory in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _below(pid: int) -> Iterator[int]:
    """A process and all that descend from it."""
    yield pid
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from _below(int(child))


def plan(names: list[str]) -> Iterator[tuple[str, int]]:
    """Attacks with their numbers, class by class, without an end; the one that lasts is the first, and only once."""
    if ENDURANCE in names:
        yield ENDURANCE, 0
    others = [name for name in names if name != ENDURANCE]
    for number in itertools.count() if others else ():
        for name in others:
            yield name, number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less than 60 seconds, whatever the machine does")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="attacks at once")
    parser.add_argument("--only", action="append", choices=sorted(CLASSES), help="only this class; may be repeated")
    parser.add_argument("--replay", help="CLASS:N, one attack again, whose folder is kept")
    args = parser.parse_args()
    until = time.monotonic() + (QUICK_S if args.quick else 60 * args.minutes)
    cut = until + (QUICK_CUT_S if args.quick else TIMEOUT_S)
    import looplab.cli.app
    import looplab.cli.running
    import looplab.loop.engine  # noqa: F401 (before the first fork)

    if args.replay:
        name, _, number = args.replay.partition(":")
        broken = attack(name, int(number), args.seed, seconds=60 * args.minutes, keep=True)
        print(f"{args.replay}: " + (f"{broken.kind}: {broken}" if broken else "held"))
        return int(broken is not None)
    names = args.only or [name for name in CLASSES if name != ENDURANCE or not args.quick]
    tried = dict.fromkeys(names, 0)
    broken_by: dict[str, list[Broken]] = {name: [] for name in names}
    planned = plan(names)
    box = Box(args.seed, 60 * args.minutes)
    while time.monotonic() < (cut if box.running else until):
        while len(box.running) < args.jobs and time.monotonic() < until and (one := next(planned, None)):
            box.start(*one)
        for name, number, found in box.ended():
            tried[name] += 1
            if found is not None:
                broken_by[name].append(found)
                lasting = f" --minutes {args.minutes:g}" if name == ENDURANCE else ""
                again = f"python benchmarks/storm.py --seed {args.seed} --replay {name}:{number}{lasting}"
                print(f"{name}:{number} {found.kind}: {found}\n  again: {again}", flush=True)
        time.sleep(0.01)
    leaks = [] if args.quick else box.leaks()
    unfinished = box.cut_off()
    print(f"\n{'class':<12}{'tried':>7}{'held':>7}   seed {args.seed}")
    for name in names:
        print(f"{name:<12}{tried[name]:>7}{tried[name] - len(broken_by[name]):>7}   {CLASSES[name].__doc__}")
    if unfinished:
        print(f"cut off at the end, not counted: {', '.join(unfinished)}")
    if missed := [name for name in names if not tried[name]]:
        print(f"not reached in this time: {', '.join(missed)}")
    for leak in leaks:
        print(f"left behind: {leak}")
    kinds = [one.kind for found in broken_by.values() for one in found]
    total = sum(tried.values())
    figures = {
        "tried": total,
        "held": total - len(kinds),
        **{kind: kinds.count(kind) for kind in (WEDGED, LOST, TWICE, OUTSIDE)},
        "leaks": len(leaks),
        "classes": len(names) - len(missed),
    }
    print(json.dumps(figures))
    return int(bool(kinds or leaks))


if __name__ == "__main__":
    sys.exit(main())
