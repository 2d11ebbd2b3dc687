"""Failures that the training runtime survives, counted: killed workers and trainers, torn saves, orphans, compilation.

    python benchmarks/survive.py [--quick] [--only NAME ...] [--times N] [--seed 0]

  workers   PPO on CartPole, on dm_control's fish/swim and on the NES, with 2 workers that are signalled at three random
            moments, twice by SIGKILL and once by SIGSTOP; at least two must be replaced. The SHA-256 of weights,
            optimizer and metrics must equal that of an undisturbed training. Workers alternate between fork and fork
            server
  trainer   trainings killed by SIGKILL at a random moment (every second one twice) and restarted: the SHA-256 of
            weights, optimizer, replay and metrics must equal that of an undisturbed training
  saves     SIGKILL while checkpoints are being saved: every checkpoint can be loaded, and the newest is not older than
            the last one reported as complete
  orphans   a trainer with 2 workers is killed, while it starts or while it trains, half of the times with a stopped
            worker: none of its processes is left, and nothing in /dev/shm
  compiled  a checkpoint of a compiled or uncompiled policy resumes in a compiled or uncompiled one, strictly

A trainer that ends before its kill is repeated and not counted. Only processes that this program has started are
signalled. All files are in a temporary folder. The last line is JSON; the exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import importlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
    os.environ.setdefault(variable, "1")  # this process forks, and its trainings must be reproducible to the bit
warnings.filterwarnings("ignore", message=".*DISPLAY.*")

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402 (every optimizer imports it, and trainings are forked from here)

from looplab import trainkit  # noqa: E402
from looplab.errors import LabError  # noqa: E402
from looplab.recipes.mario.mario.env import INFO_FIELDS, MarioEnv  # noqa: E402
from looplab.recipes.mario.mario.metrics import FIELDS  # noqa: E402
from looplab.recipes.mario.mario.shaping import SHAPING_INFO_FIELDS, RewardShaping  # noqa: E402
from looplab.rl import SupervisedVectorEnv  # noqa: E402
from looplab.rl.impala import Impala, ImpalaSettings  # noqa: E402
from looplab.rl.metrics import MetricsWriter, exact_rows  # noqa: E402
from looplab.rl.policies import make_policy  # noqa: E402
from looplab.rl.ppo import Ppo, PpoSettings  # noqa: E402
from looplab.rl.replay import PrioritizedReplay  # noqa: E402
from looplab.rl.runner import Runner, TrainingPlan  # noqa: E402

Context = Literal["fork", "forkserver"]
CONTEXTS: tuple[Context, ...] = ("fork", "forkserver")
KINDS = ("ppo", "ppo-overlap", "impala-per", "impala-per-overlap", "ppo-memory")
HITS = 3
LIMIT = 180.0
"""Seconds after which a training counts as hung, which is a failure."""
HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")


def pole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


def fish() -> gym.Env[Any, Any]:
    from vector import Swim

    return gym.wrappers.DtypeObservation(Swim(), np.float32)


def nes() -> gym.Env[Any, Any]:
    return RewardShaping(MarioEnv(noops=30))


@dataclass(frozen=True)
class World:
    make: Callable[[], gym.Env[Any, Any]]
    envs: int
    updates: int
    """Updates of a training whose workers are signalled; a few seconds."""
    width: int
    info_fields: tuple[str, ...] = ()


WORLDS = {
    "pole": World(pole, 4, 60, 64),
    "fish": World(fish, 4, 66, 64),
    "nes": World(nes, 2, 30, 32, tuple(dict.fromkeys((*SHAPING_INFO_FIELDS, *INFO_FIELDS)))),
}


@dataclass(frozen=True)
class Training:
    world: str = "pole"
    kind: str = "ppo"
    updates: int = 40
    workers: int = 0
    context: Context = "fork"
    step_deadline: float = 15.0
    backend: str | None = None
    """Backend of torch.compile; None: not compiled."""


@dataclass(frozen=True)
class Count:
    """Result of one row of the table."""

    ok: int
    of: int
    note: str


# What happens in a training's own process


def digest(state: Any) -> str:
    found = hashlib.sha256()
    for leaf in leaves(state):
        found.update(leaf)
    return found.hexdigest()


def leaves(state: Any) -> Iterator[bytes]:
    if isinstance(state, dict):
        for key in sorted(state, key=str):
            yield str(key).encode()
            yield from leaves(state[key])
    elif isinstance(state, list | tuple):
        for value in state:
            yield from leaves(value)
    elif isinstance(state, torch.Tensor | np.ndarray):
        yield f"{state.dtype} {tuple(state.shape)}".encode()
        yield state.detach().numpy().tobytes() if isinstance(state, torch.Tensor) else state.tobytes()
    else:
        yield repr(state).encode()


def build(training: Training, out: Path) -> tuple[SupervisedVectorEnv, Runner]:
    world = WORLDS[training.world]
    torch.set_num_threads(1)
    torch.manual_seed(3)
    envs = SupervisedVectorEnv(
        [world.make] * world.envs, workers=training.workers, context=training.context, snapshot_every=20,
        step_deadline=training.step_deadline, reset_deadline=30.0, max_restarts=100, info_fields=world.info_fields,
    )  # fmt: skip
    spaces = (envs.single_observation_space, envs.single_action_space)
    policy = make_policy(*spaces, hidden_size=8 * training.kind.endswith("memory"), width=world.width)
    ppo = training.kind.startswith("ppo")
    learner: Any = Ppo(policy, PpoSettings(epochs=2), 0) if ppo else Impala(policy, ImpalaSettings())
    plan = TrainingPlan(
        training.updates * 16 * world.envs, rollout=16, overlap=training.kind.endswith("overlap"), save_every=3,
        replay_batch=32, replay_every=2, compile=training.backend == "inductor",
    )  # fmt: skip
    metrics = MetricsWriter(trainkit.Logger(out / "metrics.jsonl"), extra_fields=FIELDS)
    replay = None if ppo else PrioritizedReplay(entries=512, seed=1)
    runner = Runner(envs, learner, plan, out_dir=out, metrics=metrics, seed=0, replay=replay)
    if training.backend == "eager":
        policy.compile(backend="eager")
    return envs, runner


def train(training: Training, out: Path) -> None:
    """Train to the end, resuming if possible, and write hashes of the final state."""
    began = time.monotonic()
    envs, runner = build(training, out)
    runner.run()
    result = {
        "weights": digest(runner.learner.policy.state_dict()),
        "learner": digest(runner.learner.state_dict()),
        "replay": digest(runner.replay and runner.replay.state_dict()),
        "counters": digest(runner.counters),
        "metrics": digest(exact_rows(out / "metrics.jsonl")),
    }
    restarts = sum(report.restarts for report in envs.diagnostics())
    report = {"result": result, "restarts": restarts, "seconds": time.monotonic() - began}
    trainkit.atomic_write(out / "result.json", json.dumps(report).encode())
    envs.close()


# Processes


def forked(work: Callable[[], object], log: Path) -> int:
    """Run a function in a process and session of its own, which ends with this process; return its pid."""
    sys.stdout.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == parent:
            os.setsid()
            with open(log, "ab", buffering=0) as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            work()
            code = 0
    finally:  # whatever happened, this copy must not continue as its parent
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)


def wait(pid: int, seconds: float = LIMIT) -> int:
    """Return the exit code of a process, negative for signals. A hung process is killed."""
    gate = select.poll()
    watched = os.pidfd_open(pid)
    gate.register(watched, select.POLLIN)
    if not gate.poll(seconds * 1000):
        os.kill(pid, signal.SIGKILL)
    os.close(watched)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def running(pid: int) -> bool:
    """Return whether a child is still running; it stays a zombie until `wait`."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def rows(out: Path) -> int:
    try:
        return (out / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:  # not written yet, or just moved aside
        return 0


def until(condition: Callable[[], bool], seconds: float = LIMIT) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.003)
    return True


def workers_of(pid: int) -> list[psutil.Process]:
    """Return the worker processes of a trainer that can still be signalled."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                helper = process.ppid() == pid and any(name in " ".join(process.cmdline()) for name in HELPERS)
                if not helper and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
                    found.append(process)
    return found


def session(leader: int) -> list[int]:
    """Return the processes left in a session, without zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(its_session) == leader and state not in "ZX":
                    found.append(int(entry.name))
    return found


class Progress:
    """Shows the count on a terminal, and prints failures at once."""

    def __init__(self, name: str, times: int) -> None:
        self.name, self.times = name, times
        self.ok = self.done = 0
        self.began = time.monotonic()
        self._show()

    def add(self, failure: str | None) -> None:
        self.done += 1
        self.ok += failure is None
        if failure is not None:
            print(f"\n{self.name} {self.done - 1}: {failure}", file=sys.stderr)
        self._show()

    def _show(self) -> None:
        if not sys.stderr.isatty():
            return
        spent = time.monotonic() - self.began
        ending = "\n" if self.done == self.times else ""
        text = f"\r{self.name}: {self.ok} of {self.done} survived, {self.times} to be done, {spent:.0f} s "
        print(text, end=ending, file=sys.stderr, flush=True)


def tail(out: Path) -> str:
    return "\n".join((out / "log").read_text(errors="replace").splitlines()[-15:])


def finish(pid: int, out: Path) -> dict[str, Any] | str:
    """Return the result that a training has written, or why there is none."""
    code = wait(pid)
    if code != 0:
        return f"ended with {code}:\n{tail(out)}"
    report: dict[str, Any] = json.loads((out / "result.json").read_text())
    return report


def undisturbed(training: Training, folder: Path) -> dict[str, Any]:
    out = folder / f"whole-{training.world}-{training.kind}"
    out.mkdir()
    report = finish(forked(partial(train, training, out), out / "log"), out)
    if isinstance(report, str):
        raise SystemExit(f"the undisturbed training fails: {training}: {report}")
    return report


def difference(report: dict[str, Any] | str, whole: dict[str, Any]) -> str | None:
    if isinstance(report, str):
        return report
    different = [name for name, value in whole["result"].items() if report["result"][name] != value]
    return f"other {', '.join(different)}" if different else None


# The rows of the table


def survive_workers(times: int, quick: bool, rng: random.Random, folder: Path) -> Count:
    for package in ("dm_control.suite", "stable_retro"):  # imported here, so that forked trainings and workers need not
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    worlds = []
    for name, world in WORLDS.items():
        if wait(forked(lambda make=world.make: make().close(), folder / f"{name}.log")) == 0:  # type: ignore[misc]
            worlds.append(name)
        else:
            why = (folder / f"{name}.log").read_text().strip().splitlines()[-1:]
            print(f"{name} is not available and is skipped: {' '.join(why)}")
    wholes: dict[str, dict[str, Any]] = {}
    hits = 0
    alive: dict[str, list[int]] = {name: [0, 0] for name in worlds}
    progress = Progress("workers", times)
    for number in range(times):
        name = worlds[number % len(worlds)]
        training = Training(
            name, updates=WORLDS[name].updates // (1 + quick), workers=2, context=CONTEXTS[number // len(worlds) % 2],
            step_deadline=0.5,
        )  # fmt: skip
        if name not in wholes:
            wholes[name] = undisturbed(replace(training, context="fork", step_deadline=15.0), folder)
        out = folder / f"workers{number}"
        out.mkdir()
        pid = forked(partial(train, training, out), out / "log")
        pace = wholes[name]["seconds"] / training.updates
        for turn, row in enumerate(sorted(rng.sample(range(int(0.9 * training.updates)), HITS))):
            until(lambda out=out, row=row, pid=pid: not running(pid) or rows(out) >= row)  # type: ignore[misc]
            time.sleep(pace * rng.random())
            until(lambda pid=pid: not running(pid) or bool(workers_of(pid)))  # type: ignore[misc]
            with contextlib.suppress(psutil.NoSuchProcess):
                victims = workers_of(pid)
                if victims:
                    rng.choice(victims).send_signal(signal.SIGSTOP if turn == HITS - 1 else signal.SIGKILL)
        report = finish(pid, out)
        failure = difference(report, wholes[name])
        if failure is None and isinstance(report, dict):
            hits += report["restarts"]
            if report["restarts"] < 2:
                failure = f"only {report['restarts']} workers were replaced"
        alive[name][0] += failure is None
        alive[name][1] += 1
        progress.add(failure and f"{training}: {failure}")
        shutil.rmtree(out)
    note = ", ".join(f"{name} {ok}/{of}" for name, (ok, of) in alive.items() if of)
    return Count(progress.ok, times, f"{note}; {hits} workers replaced")


def survive_trainer(times: int, quick: bool, rng: random.Random, folder: Path) -> Count:
    wholes: dict[str, dict[str, Any]] = {}
    kills = early = 0
    progress = Progress("trainer", times)
    for number in range(times):
        training = Training(kind=KINDS[number % len(KINDS)])
        if training.kind not in wholes:
            wholes[training.kind] = undisturbed(training, folder)
        whole = wholes[training.kind]
        out = folder / f"trainer{number}"
        out.mkdir()
        wanted = 1 + number // len(KINDS) % 2
        hit = 0
        while hit < wanted:
            start = rows(out)
            pid = forked(partial(train, training, out), out / "log")
            row = rng.randrange(training.updates - 2)
            until(lambda out=out, row=row, pid=pid: not running(pid) or rows(out) >= row)  # type: ignore[misc]
            # If those rows already exist, the moment is between the start and the end of the remaining training.
            left = training.updates - start if row <= start else 1
            time.sleep(whole["seconds"] * left / training.updates * rng.random())
            os.kill(pid, signal.SIGKILL)
            if wait(pid) == -signal.SIGKILL:
                hit += 1
                early += not (out / "checkpoints" / "latest").exists()
            else:  # it ended before the kill: repeat it
                shutil.rmtree(out)
                out.mkdir()
                hit = 0
        kills += hit
        progress.add(difference(finish(forked(partial(train, training, out), out / "log"), out), whole))
        shutil.rmtree(out)
    return Count(progress.ok, times, f"{kills} kills, {early} of them before the first checkpoint; {', '.join(wholes)}")


WIDTH = 25_000


def content(step: int) -> bytes:
    return step.to_bytes(8, "little") * WIDTH


def save_repeatedly(folder: Path, number: int, writer: int) -> None:
    """Save one checkpoint after the other; report the step of each complete one."""
    found = trainkit.newest(folder)
    first = step = 0 if found is None else found.step
    background = number % 3 != 0
    checkpoints = trainkit.Checkpoints(folder, keep=1 + number % 2, background=background)
    while True:
        step += 1
        checkpoints.save({"a": content(step), "w": torch.full((1000,), step)}, step, ("latest", "best")[step % 2])
        whole = step - background  # a checkpoint written in the background is complete when the next save returns
        if whole > first:
            os.write(writer, whole.to_bytes(8, "little"))


def survive_saves(times: int, quick: bool, rng: random.Random, folder: Path) -> Count:
    place = folder / "saves"
    place.mkdir()
    torn = loaded = last = 0
    progress = Progress("saves", times)
    for number in range(times):
        reader, writer = os.pipe()
        pid = forked(partial(save_repeatedly, place, number, writer), folder / "saves.log")
        os.close(writer)
        select.select([reader], [], [], LIMIT)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        code = wait(pid)
        reported = b""
        while more := os.read(reader, 1 << 16):
            reported += more
        os.close(reader)
        torn += any(path.name.startswith(".") for path in place.iterdir())
        messages: list[str] = []
        found = trainkit.newest(place, messages.append)
        last = max(last, int.from_bytes(reported[-8:], "little"))
        failure = None
        if code != -signal.SIGKILL:
            failure = f"the saving ended by itself, with {code}: {(folder / 'saves.log').read_text()[-1000:]}"
        elif not reported or found is None or found.step < last:
            failure = f"step {last} was reported complete, the newest is {found and found.step}"
        else:
            try:
                every = [trainkit.load(path) for path in place.iterdir() if not path.name.startswith(".")]
                loaded += len(every)
                good = (one.state["a"] == content(one.step) and int(one.state["w"][-1]) == one.step for one in every)
                failure = None if all(good) and not messages else f"not what was saved; {messages}"
            except LabError as error:
                failure = str(error)
        progress.add(failure)
    return Count(progress.ok, times, f"{torn} with an incomplete one next to it; {loaded} loads; up to step {last}")


def survive_orphans(times: int, quick: bool, rng: random.Random, folder: Path) -> Count:
    """Cycle through eight cases: two contexts, training or starting, all workers running or one of them stopped."""
    cases: dict[str, list[int]] = {}
    seen = 0
    progress = Progress("orphans", times)
    for number in range(times):
        context, starting, stopped = CONTEXTS[number % 2], number // 2 % 2 == 1, number // 4 % 2 == 1
        out = folder / f"orphans{number}"
        out.mkdir()
        training = Training(updates=1_000_000, workers=2, context=context)
        before = set(os.listdir("/dev/shm"))
        pid = forked(partial(train, training, out), out / "log")
        until(lambda: not running(pid) or (bool(workers_of(pid)) if starting else rows(out) > 0))  # noqa: B023
        time.sleep(rng.random() * 0.5)
        victims = workers_of(pid)
        if stopped and victims:  # a stopped worker cannot notice that its parent is gone
            with contextlib.suppress(psutil.NoSuchProcess):
                rng.choice(victims).send_signal(signal.SIGSTOP)
        seen += len(session(pid)) - 1
        os.kill(pid, signal.SIGKILL)
        code = wait(pid)
        failure = None
        if code != -signal.SIGKILL:
            failure = f"the trainer ended by itself, with {code}:\n{tail(out)}"
        elif not until(lambda: not session(pid), 15):  # noqa: B023
            failure = f"left are {', '.join(map(str, session(pid)))}"
            for left in session(pid):
                os.kill(left, signal.SIGKILL)
        elif names := [name for name in set(os.listdir("/dev/shm")) - before if not held(f"/dev/shm/{name}")]:
            failure = f"left in /dev/shm: {', '.join(names)}"
        case = f"{context} {'starting' if starting else 'training'}{', a worker stopped' * stopped}"
        count = cases.setdefault(case, [0, 0])
        count[0] += failure is None
        count[1] += 1
        progress.add(failure and f"{case}: {failure}")
        shutil.rmtree(out)
    missed = "; ".join(f"{case} {ok} of {of}" for case, (ok, of) in cases.items() if ok < of)
    return Count(progress.ok, times, f"{len(cases)} cases, {seen} processes below the trainers; {missed or 'all gone'}")


def held(path: str) -> bool:
    """Return whether a running process has the file open or mapped: it then belongs to another program."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if path in Path(f"/proc/{process.pid}/maps").read_text():
                return True
            if any(os.readlink(fd) == path for fd in Path(f"/proc/{process.pid}/fd").iterdir()):
                return True
    return not os.path.exists(path)


def policy_of(runner: Runner, backend: str | None) -> Any:
    """Return the policy, or torch.compile's wrapper of it, which has other names for the same weights."""
    return torch.compile(runner.learner.policy, backend=backend) if backend else runner.learner.policy


def save_compiled(training: Training, out: Path) -> None:
    train(training, out)
    _, runner = build(training, out)
    runner.training_state.resume(out / "checkpoints")
    state = policy_of(runner, training.backend).state_dict()
    if all(name.startswith("_orig_mod.") for name in state) != bool(training.backend):
        raise RuntimeError(f"unexpected names: {', '.join(state)}")
    with trainkit.Checkpoints(out / "wrapped") as checkpoints:
        checkpoints.save({"policy": state}, 1)


def load_compiled(training: Training, out: Path, source: Path) -> None:
    """Load a checkpoint strictly into a new training and continue; load the weights alone into a wrapped policy."""
    result = json.loads((source / "result.json").read_text())["result"]
    _, runner = build(training, out)
    messages: list[str] = []
    runner.training_state.resume(source / "checkpoints", tell=messages.append)
    learner = runner.learner
    if messages or digest(learner.state_dict()) != result["learner"]:
        raise RuntimeError(f"the loaded state differs from the saved one: {messages}")
    for _ in range(3):
        runner.update()
    if digest(learner.policy.state_dict()) == result["weights"]:
        raise RuntimeError("the resumed training does not learn")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if bool(graphs) != bool(training.backend):
        raise RuntimeError(f"{graphs} graphs were compiled")
    wrapped = policy_of(runner, training.backend)
    messages = trainkit.load_into(wrapped, trainkit.load(source / "wrapped" / "latest").state["policy"])
    if messages or digest(learner.policy.state_dict()) != result["weights"]:
        raise RuntimeError(f"the loaded weights differ from the saved ones: {messages}")


def survive_compiled(times: int, quick: bool, rng: random.Random, folder: Path) -> Count:
    """With --quick, or without a compiler, graphs are captured but run by eager torch."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    backend = "inductor" if not quick and shutil.which(os.environ.get("CXX", "g++")) else "eager"
    directions = [(one, other) for one in (backend, None) for other in (None, backend)][:times]
    progress = Progress("compiled", len(directions))
    saved: dict[str | None, str | None] = {}
    for one, other in directions:
        source = folder / f"from-{one}"
        if one not in saved:
            source.mkdir()
            code = wait(forked(partial(save_compiled, Training(updates=4, backend=one), source), source / "log"))
            saved[one] = f"the saving ended with {code}:\n{tail(source)}" if code else None
        failure = saved[one]
        if failure is None:
            out = folder / f"from-{one}-to-{other}"
            out.mkdir()
            code = wait(forked(partial(load_compiled, Training(backend=other), out, source), out / "log"))
            failure = f"from {one} to {other}, ended with {code}:\n{tail(out)}" if code else None
        progress.add(failure)
    return Count(progress.ok, len(directions), f"torch.compile with {backend}")


@dataclass(frozen=True)
class Row:
    measure: Callable[[int, bool, random.Random, Path], Count]
    times: int
    quick: int


ROWS = {
    "workers": Row(survive_workers, 20, 3),
    "trainer": Row(survive_trainer, 50, 5),
    "saves": Row(survive_saves, 200, 20),
    "orphans": Row(survive_orphans, 24, 3),
    "compiled": Row(survive_compiled, 4, 4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--times", type=int, help="repetitions of each row")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    given = parser.parse_args()
    if given.times is not None and given.times < 1:
        parser.error("--times must be at least 1")
    found: dict[str, Count] = {}
    lines = []
    for name in given.only:
        row = ROWS[name]
        times = given.times or (row.quick if given.quick else row.times)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="survive-") as folder:
            rng = random.Random(f"{given.seed} {name}")
            count = found[name] = row.measure(times, given.quick, rng, Path(folder))
        lines.append(f"{name:<10}{f'{count.ok} of {count.of}':>12}{time.monotonic() - began:>8.0f} s   {count.note}")
    print("\n".join(lines))
    plain = {name: f"{count.ok}/{count.of}" for name, count in found.items()}
    numbers = {f"{name}_{key}": n for name, c in found.items() for key, n in (("ok", c.ok), ("n", c.of))}
    print(json.dumps({**plain, **numbers}), flush=True)
    sys.exit(any(count.ok < count.of for count in found.values()))


if __name__ == "__main__":
    main()
