"""The capsule: everything needed to repeat a run. Code, program, environment, machine, data.

Data that many runs share (the patch of uncommitted changes, the list of packages) is stored once, by its hash, next to
the runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplab.errors import LabError
from looplab.runs.code import CodeFiles
from looplab.runs.folder import hash_file, keep_shared
from looplab.runs.git import PLAIN_DIFF, git_bytes, isolated
from looplab.runs.redact import is_secret_file, redact_bytes, redact_env
from looplab.untrusted import UntrustedError, open_regular

KEPT_VARIABLES = (
    "ACCELERATE_", "CONDA_", "CUDA_", "CUBLAS_", "HF_", "HIP_", "JAX_", "LD_LIBRARY_PATH", "LOOPLAB_", "MKL_", "NCCL_",
    "NUMEXPR_", "NVIDIA_", "OMP_", "ONEAPI_", "OPENBLAS_", "PATH", "PYTHON", "PYTORCH_", "RANK", "TF_", "TOKENIZERS_",
    "TORCH", "TRANSFORMERS_", "VIRTUAL_ENV", "WANDB_", "WORLD_SIZE", "XLA_", "ZE_",
)  # fmt: skip
FRESH_S = 1.0
"""Seconds for which git's answer may be reused."""
STALE_S = 10.0
"""The same for runs that are prepared together in one transaction."""
GIT_S = 20.0
UNTRACKED = (
    "ls-files", "--others", "--exclude-standard", "--directory", "--no-empty-directory", "--full-name", "-z", "--", ".",
)  # fmt: skip
TRACKED = ("ls-files", "-v", "--stage", "--full-name", "-z", "--", ".")
FLAGGED = re.compile(rb"(?:^|(?<=\0))([a-zS]) [^\t\0]*+\t([^\0]++)")
"""Matches files in that listing that git is configured not to compare."""
SUBMODULE = re.compile(rb"(?:^|(?<=\0)). 160000 [^\t\0]*+\t([^\0]++)")
MOST_UNTRACKED = 50
"""Maximum number of untracked files to name; the others are counted."""
NO_FILTER = ("unspecified", "unset")

ASK_PATH = "import json, sys; print(json.dumps({'version': sys.version, 'path': sys.path}))"


def _names(listed: bytes) -> list[str]:
    return listed.decode(errors="replace").split("\0")[:-1]


class Capsules:
    """Makes the capsules of one study; queries git, the interpreter and the machine only when needed."""

    def __init__(self, lab: Path, study: Path, prints: Fingerprints | None = None) -> None:
        self._lab = lab
        self._study = study
        self._code: dict[str, Any] = {}
        self._files = CodeFiles(lab)
        self._code_at = -math.inf
        self._pythons: dict[str, dict[str, Any]] = {}
        self._machine = machine()
        self._prints = prints or Fingerprints(lab, ())
        self._env = redact_env({k: v for k, v in os.environ.items() if k.startswith(KEPT_VARIABLES)})

    def refresh(self, age: float = FRESH_S) -> None:
        """Query git about the code, unless that was done within the last `age` seconds."""
        if time.monotonic() - self._code_at > age:
            self._code = {**self.code(), "files": self._files.keep(self._study)}
            self._code_at = time.monotonic()

    @property
    def current(self) -> Mapping[str, Any]:
        """The state of the code at the last `refresh`."""
        return self._code

    def code_names(self) -> set[str]:
        """Return the files that are the lab's code: source files, and tracked ones; relative to the lab."""
        names = set(self._files.now())
        if in_git(self._lab):
            with contextlib.suppress(LabError, OSError), isolated(self._lab, timeout=GIT_S) as (_, env):
                listed = self._ask(env, "ls-files", "-z", "--", ".").split(b"\0")
                names.update(os.fsdecode(name) for name in listed[:-1])
        return names

    def make(
        self,
        argv: Sequence[str],
        program: str,
        env: Mapping[str, str],
        seeds: Mapping[str, Any],
        code: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the capsule of a run.

        Args:
            argv: Its command, without secrets.
            program: Its executable.
            env: Variables that the run gets in addition to looplab's own environment, without secrets.
            seeds: Its random seeds by name.
            code: The code that it runs; None: the current one.
        """
        if code is None:
            self.refresh(STALE_S)
        if program not in self._pythons:
            self._pythons[program] = self._ask_python(program)
        return {
            "argv": list(argv),
            "program": program,
            "cwd": str(self._lab),
            "env": {**self._env, **env},
            "code": self._code if code is None else dict(code),
            "python": self._pythons[program],
            "machine": self._machine,
            "seeds": dict(seeds),
            "data": self._prints.now(),
        }

    def code(self) -> dict[str, Any]:
        """Return the current state of the lab's code according to git."""
        found: dict[str, Any] = {"commit": None}
        if not in_git(self._lab):
            return found
        try:
            with isolated(self._lab, timeout=GIT_S) as (commit, env):
                found = {"commit": commit, "dirty": None, "patch": None}
                patch = self._patch(self._lab, env, commit)
                untracked = _names(self._ask(env, *UNTRACKED))
                elsewhere = self._changed_elsewhere(env, commit)
        except (LabError, OSError) as error:
            why = getattr(error, "message", None) or str(error)
            return {**found, "dirty": None, "why": why}
        kept = clean_patch(patch, self._lab)
        return {
            **found,
            "dirty": bool(patch),
            "patch": keep_shared(self._study, kept.patch, "code", ".patch") if kept.patch else None,
            "untracked": untracked[:MOST_UNTRACKED],
            "untracked_count": len(untracked),
            **({"elsewhere": elsewhere[:MOST_UNTRACKED]} if elsewhere else {}),
            **({"left_out": kept.left_out} if kept.left_out else {}),
            **({"redacted": kept.redacted} if kept.redacted else {}),
        }

    def _ask(self, env: dict[str, str], *args: str, stdin: bytes = b"", where: Path | None = None) -> bytes:
        return git_bytes(where or self._lab, *args, env=env, stdin=stdin, timeout=GIT_S, alone=True)

    def _patch(self, where: Path, env: dict[str, str], commit: str) -> bytes:
        """Return the uncommitted changes below a folder.

        Raises:
            LabError: A patch cannot represent them: they go through a git filter or are inside a submodule.
        """
        listed = self._ask(env, *TRACKED, where=where)
        if flagged := FLAGGED.findall(listed):
            env = self._without_flags(env, flagged)
        patch = self._ask(env, "diff", *PLAIN_DIFF, commit, "--", ".", where=where)
        if patch and (filtered := self._filtered(where, env, commit)):
            raise LabError(f"{filtered} goes through a git filter, which is not run")
        for name in [os.fsdecode(found[1]) for found in SUBMODULE.finditer(listed)]:
            folder = Path(env["GIT_WORK_TREE"], name)
            if os.path.lexists(folder / ".git"):
                with isolated(folder, timeout=GIT_S) as (head, inner):
                    if self._patch(folder, inner, head):
                        raise LabError(f"the submodule {name} has uncommitted changes, which are not kept")
        return patch

    def _without_flags(self, env: dict[str, str], flagged: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
        """Return an environment with an index in which git compares these files, too.

        They are marked `--assume-unchanged` or `--skip-worktree`. Files that a sparse checkout omits stay marked.
        """
        top = os.fsencode(env["GIT_WORK_TREE"])
        names = [name for tag, name in flagged if tag not in b"Ss" or os.path.lexists(os.path.join(top, name))]
        stdin = b"".join(name + b"\0" for name in names)
        index = f"{env['GIT_DIR']}/index"
        shutil.copy2(env["GIT_INDEX_FILE"], index)  # with its time: git compares the content of files that are as new
        env = {**env, "GIT_INDEX_FILE": index}
        for flag in ("--no-assume-unchanged", "--no-skip-worktree"):
            self._ask(env, "update-index", "-z", flag, "--stdin", stdin=stdin, where=Path(env["GIT_WORK_TREE"]))
        return env

    def _changed_elsewhere(self, env: dict[str, str], commit: str) -> list[str]:
        """Return the changed files of the repository outside the lab; they are listed but not stored."""
        below = self._lab.resolve().relative_to(Path(env["GIT_WORK_TREE"]).resolve())
        if below == Path():
            return []
        outside = ("--", ":/", f":(exclude,top,literal){below}")
        return _names(self._ask(env, "diff", *PLAIN_DIFF, "--name-only", "-z", commit, *outside))

    def _filtered(self, where: Path, env: dict[str, str], commit: str) -> str | None:
        """Return a changed file that goes through a git filter (git-lfs, for example), or None; its patch is wrong."""
        names = self._ask(env, "diff", *PLAIN_DIFF, "--name-only", "-z", commit, "--", ".", where=where)
        top = Path(env["GIT_WORK_TREE"])
        attributes = self._ask(env, "check-attr", "-z", "--stdin", "filter", stdin=names, where=top)
        parts = attributes.decode(errors="replace").split("\0")
        driven = (name for name, value in zip(parts[::3], parts[2::3], strict=False) if value not in NO_FILTER)
        return next(driven, None)

    def _ask_python(self, program: str) -> dict[str, Any]:
        """Return facts about the trainer's interpreter, if its program is one; else about looplab's own."""
        python = program if Path(program).name.startswith("python") else sys.executable
        if os.path.samefile(python, sys.executable):
            listing: dict[str, Any] | None = {"version": sys.version, "packages": installed(sys.path)}
        else:
            listing = None
            with contextlib.suppress(OSError, subprocess.TimeoutExpired, ValueError):
                asked = subprocess.run([python, "-c", ASK_PATH], cwd=self._lab, capture_output=True, timeout=GIT_S)
                answer = json.loads(asked.stdout)
                listing = {"version": answer["version"], "packages": installed(answer["path"])}
        text = json.dumps(listing, indent=1).encode()
        return {
            "executable": python,
            "version": listing["version"].split()[0] if listing else None,
            "packages": keep_shared(self._study, text, "packages", ".json") if listing else None,
        }


@dataclass(frozen=True, slots=True)
class CleanPatch:
    """A patch without secrets."""

    patch: bytes
    left_out: dict[str, str | None]
    """Changed files that usually contain secrets, such as `.env`, with the SHA-256 of their content; None: deleted."""
    redacted: list[str]
    """Files whose changes contain a hidden secret: these parts cannot be applied."""


def clean_patch(patch: bytes, lab: Path) -> CleanPatch:
    """Remove secrets from a git patch: whole files by their name, others by their content."""
    start = b"diff --git "
    head, *parts = re.split(rb"^diff --git ", patch, flags=re.MULTILINE)
    kept, left_out, redacted = [head], {}, []
    for part in parts:
        name = _patched_file(part)
        if is_secret_file(name):
            # Names in a patch are relative to the repository, which may be larger than the lab.
            places = (parent / name for parent in (lab, *lab.parents))
            left_out[name] = next((digest for place in places if (digest := hash_file(place)) is not None), None)
            continue
        # A binary patch is encoded, so secrets in it have no recognisable shape.
        clean = part if b"\nGIT binary patch\n" in part else redact_bytes(part)
        if clean != part:
            redacted.append(name)
        kept.append(start + clean)
    return CleanPatch(b"".join(kept), left_out, redacted)


def _patched_file(part: bytes) -> str:
    """Return the file of a part of a patch, from its lines `+++ b/…` or `--- a/…`, else from its first line."""
    for mark in (
        rb"^\+\+\+ \"?b/(.*?)\"?\t?$",
        rb"^--- \"?a/(.*?)\"?\t?$",
        rb"^rename to (.*)$",
        rb"\A.* \"?b/(.*?)\"?$",
    ):
        found = re.search(mark, part, re.MULTILINE)
        if found:
            return os.fsdecode(found[1])
    return ""


def in_git(lab: Path) -> bool:
    """Return whether a lab is in a git repository."""
    return any(os.path.lexists(folder / ".git") for folder in (lab.resolve(), *lab.resolve().parents))


def doubt(code: Mapping[str, Any]) -> str | None:
    """Return why a capsule does not identify the code that ran; None: it does, or the lab was not in git."""
    return f"it is not known which code ran: {code['why']}" if code.get("why") else None


class Fingerprints:
    """Hashes of files and folders of a lab; unchanged ones are not read again."""

    def __init__(self, lab: Path, paths: Sequence[Path]) -> None:
        self._lab = lab
        self._paths = paths
        self._known: dict[Path, tuple[tuple[tuple[str, int, int], ...], str]] = {}

    def now(self) -> dict[str, str]:
        return {os.path.relpath(path, self._lab.resolve()): self._hash(path) for path in self._paths}

    def digest(self) -> str:
        """Return one hash of all of them; empty if there are no paths."""
        return hashlib.sha256(json.dumps(self.now()).encode()).hexdigest()[:16] if self._paths else ""

    def _hash(self, path: Path) -> str:
        try:
            stamps = tuple((str(f), (s := f.stat()).st_size, s.st_mtime_ns) for f in _files_of(path))
            known = self._known.get(path)
            if known is None or known[0] != stamps:
                known = self._known[path] = (stamps, hash_tree(path))
            return known[1]
        except FileNotFoundError:
            return "missing"
        except UntrustedError:
            return "not a file"


def installed(path: Sequence[str]) -> list[str]:
    """Return the distributions on an interpreter's search path, from the names of their metadata folders."""
    found: set[str] = set()
    for folder in path:
        with contextlib.suppress(OSError):
            names = [entry.name for entry in os.scandir(folder or ".")]
            found.update(name.rpartition(".")[0] for name in names if name.endswith((".dist-info", ".egg-info")))
    return sorted((name.replace("-", "==", 1) for name in found), key=str.lower)


def machine() -> dict[str, Any]:
    """Return facts about this machine: host, system, CPU, memory, GPUs."""
    model = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory / 2**30, 1),
        "gpus": _gpus(),
    }


def _gpus() -> list[str]:
    try:
        import pynvml

        pynvml.nvmlInit()
        return [
            str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)))
            for i in range(pynvml.nvmlDeviceGetCount())
        ]
    except ImportError:
        return []
    except pynvml.NVMLError:
        return []


def _files_of(path: Path) -> list[Path]:
    """Return the files below a folder in a fixed order, or the file itself."""
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def hash_tree(path: Path) -> str:
    """Return one hash of a file, or of all files below a folder with their names."""
    total = hashlib.sha256()
    for file in _files_of(path):
        with open_regular(file) as stream:
            total.update(str(file.relative_to(path)).encode() + b"\0")
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()
