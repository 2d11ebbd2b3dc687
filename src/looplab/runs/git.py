"""Git by its command line, without running any program that a repository's configuration names.

Agents can write to a lab and so to the configuration of its repository. Programs named there (hooks, filters, external
diffs, merge drivers, credential helpers …) therefore never run. Programs named in the user's or the system's
configuration (git-lfs, for example) run where a work tree is changed. Reading a work tree (`isolated`) uses no
configuration and runs no programs at all.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from looplab.errors import LabError

GIT_S = 300.0
NEUTRAL = (
    "--no-pager",
    *("-c", "core.hooksPath=/dev/null"),
    *("-c", "core.fsmonitor=false"),
    *("-c", "commit.gpgSign=false"),
    *("-c", "push.gpgSign=false"),
    *("-c", "submodule.recurse=false"),
    *("-c", "push.recurseSubmodules=no"),
)
NOBODY = ("-c", "user.name=looplab", "-c", "user.email=looplab@localhost")
PLAIN_DIFF = (
    "--binary", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--src-prefix=a/", "--dst-prefix=b/",
    "--ignore-submodules=dirty",
)  # fmt: skip
"""Options of `git diff` for a patch that `git apply` accepts everywhere. Changes inside submodules are not checked:
git would run programs there."""
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
OWN_SCOPES = ("local", "worktree")
"""Scopes of configuration that belong to the repository."""
NAMES_PROGRAM = re.compile(
    r"filter\..*\.(clean|smudge|process)|diff\.external|diff\..*\.(command|textconv)|merge\..*\.driver"
    r"|gpg\.(.*\.)?(program|defaultkeycommand)|core\.(sshcommand|gitproxy|askpass|editor|alternaterefscommand)"
    r"|credential\.(.*\.)?helper|remote\..*\.vcs"
    r"|lfs\.(.*\.)?(standalonetransferagent|sshtransfer)|lfs\.customtransfer\..*|lfs\.extension\..*",
    re.DOTALL,
)
RUNS_PROGRAMS = {"add", "apply", "commit", "diff", "log", "merge", "notes", "push", "status", "worktree"}
"""Commands that may run such programs."""
PROTOCOLS = dict.fromkeys(("clone", "push"), "file:git:http:https:ssh")
"""Protocols of the commands that may contact another repository. No other command may, not even to fetch objects that
a partial clone lacks: the repository's configuration names the source and the program."""
HARMLESS = r"^core\.(autocrlf|eol|filemode|symlinks|ignorecase|excludesfile)$"
"""Settings that control how a work tree is compared."""


def git(
    where: Path,
    *args: str,
    env: dict[str, str] | None = None,
    ok: bool = False,
    timeout: float = GIT_S,
    alone: bool = False,
) -> str:
    """Return git's output as text.

    Args:
        where: Working directory.
        args: Arguments of git.
        env: Additional variables. Inherited variables such as GIT_DIR are ignored.
        ok: Whether to return an empty text if git fails.
        timeout: Seconds.
        alone: Whether to run git in its own session, so that Ctrl-C for the engine does not reach it.

    Raises:
        LabError: Git is not installed, failed, or took longer than `timeout` seconds.
    """
    try:
        printed = git_bytes(where, *args, env=env, timeout=timeout, alone=alone)
    except GitError:
        if ok:
            return ""
        raise
    return printed.decode(errors="surrogateescape").rstrip("\n")


class GitError(LabError):
    """A git command failed."""


def git_bytes(
    where: Path,
    *args: str,
    env: dict[str, str] | None = None,
    stdin: bytes = b"",
    timeout: float = GIT_S,
    alone: bool = False,
) -> bytes:
    """Like `git`, for output that is not text."""
    command = _command_of(args)
    configured = command in RUNS_PROGRAMS and "GIT_CONFIG_COUNT" not in (env or {})  # not `isolated`
    overrides = _without_own_programs(where, env, timeout) if configured else []
    env = {"GIT_ALLOW_PROTOCOL": PROTOCOLS.get(command, ""), **(env or {})}
    return _run(where, [*NEUTRAL, *overrides, *args], env=env, stdin=stdin, timeout=timeout, alone=alone)


def _command_of(args: Sequence[str]) -> str:
    """Return the git command after any `-c` options."""
    return next((arg for before, arg in zip(("", *args), args, strict=False) if "-c" not in (before, arg)), "")


def _without_own_programs(where: Path, env: dict[str, str] | None, timeout: float) -> list[str]:
    """Return options that replace the programs that the repository names by the user's own, or by none."""
    try:
        listed = _run(where, ["config", "--list", "--show-scope", "-z"], env=env, timeout=timeout, alone=True)
    except GitError:  # not a repository: the command itself will fail
        return []
    parts = listed.decode(errors="surrogateescape").split("\0")
    trusted: dict[str, list[str]] = {}
    own: dict[str, None] = {}
    for scope, entry in zip(parts[::2], parts[1::2], strict=False):
        key, _, value = entry.partition("\n")
        if NAMES_PROGRAM.fullmatch(key.lower()):
            if scope in OWN_SCOPES:
                own[key] = None
            elif scope in ("system", "global"):
                trusted.setdefault(key, []).append(value)
    # A merge driver cannot be empty: `false` leaves a conflict.
    nothing = {key: "false" if key.startswith("merge.") else "" for key in own}
    return [w for key in own for value in (nothing[key], *trusted.get(key, ())) for w in ("-c", f"{key}={value}")]


def _run(
    where: Path,
    args: list[str],
    *,
    env: dict[str, str] | None,
    stdin: bytes = b"",
    timeout: float,
    alone: bool,
) -> bytes:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    clean |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C", **(env or {})}
    command = " ".join([arg for arg in args if not arg.startswith("-") and "=" not in arg][:2])
    try:
        done = subprocess.run(
            ["git", *args], cwd=where, env=clean, capture_output=True, timeout=timeout, input=stdin,
            start_new_session=alone,
        )  # fmt: skip
    except FileNotFoundError:
        raise LabError("git is not installed" if where.is_dir() else f"there is no folder {where}") from None
    except subprocess.TimeoutExpired:
        raise LabError(f"git {command} took longer than {timeout:g} s") from None
    except (OSError, ValueError) as error:
        raise LabError(f"git {command} could not be started: {error}") from None
    if done.returncode != 0:
        output = done.stderr.decode(errors="replace").strip() or done.stdout.decode(errors="replace").strip()
        raise GitError(f"git {command} failed: {output or f'exit code {done.returncode}'}", file=where)
    return done.stdout


@contextmanager
def isolated(where: Path, *, timeout: float) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the commit of the work tree around `where`, and an environment in which git ignores its configuration.

    Git gets the objects and the index of the repository, and a configuration with only a few harmless settings. It
    cannot be made to run a program, not even by a concurrent change of the configuration.
    """
    queries = ("HEAD", "--show-object-format", "--show-toplevel", "--absolute-git-dir", "--git-common-dir")
    try:
        found = git(where, "rev-parse", "--path-format=absolute", *queries, timeout=timeout, alone=True).split("\n")
    except GitError as error:
        if "ambiguous argument 'HEAD'" not in str(error):
            raise
        raise GitError("its repository has no commit yet", file=where, hint="commit the files of the lab") from None
    if len(found) != len(queries):
        raise LabError("a path of the git repository has a line break")
    commit, object_format, top, own, common = found
    require_work_tree(where, Path(top))
    listed = git(where, "config", "-z", "--get-regexp", HARMLESS, ok=True, timeout=timeout, alone=True)
    settings = [entry.partition("\n")[::2] for entry in listed.split("\0") if "\n" in entry]
    with TemporaryDirectory(prefix="looplab-git-") as folder:
        for name in ("objects", "refs", "info"):
            os.mkdir(f"{folder}/{name}")
        Path(folder, "HEAD").write_text("ref: refs/heads/none\n")
        Path(folder, "config").write_text(
            f"[core]\n\trepositoryformatversion = 1\n[extensions]\n\tobjectformat = {object_format}\n"
        )
        for name in ("exclude", "attributes"):
            os.symlink(f"{common}/info/{name}", f"{folder}/info/{name}")
        yield (
            require_commit(commit),
            {
                "GIT_DIR": folder,
                "GIT_WORK_TREE": top,
                "GIT_INDEX_FILE": f"{own}/index",
                "GIT_OBJECT_DIRECTORY": f"{common}/objects",
                "GIT_OPTIONAL_LOCKS": "0",
                "GIT_CONFIG_GLOBAL": "/dev/null",
                "GIT_CONFIG_NOSYSTEM": "1",
                "GIT_CONFIG_COUNT": str(len(settings)),
                **{f"GIT_CONFIG_KEY_{n}": key for n, (key, _) in enumerate(settings)},
                **{f"GIT_CONFIG_VALUE_{n}": value for n, (_, value) in enumerate(settings)},
            },
        )


def work_tree(where: Path, *, timeout: float = GIT_S) -> Path:
    """Return the top folder of the work tree that contains a folder.

    Raises:
        LabError: There is none, or the repository's configuration names a work tree elsewhere.
    """
    return require_work_tree(where, Path(git(where, "rev-parse", "--show-toplevel", timeout=timeout)))


def require_work_tree(where: Path, top: Path) -> Path:
    """Return the top of a work tree if it contains the folder and a `.git`: `core.worktree` can name any folder."""
    if not where.resolve().is_relative_to(top.resolve()) or not os.path.lexists(top / ".git"):
        raise LabError(
            f"the work tree of the git repository is {top}", file=where, hint="git config --unset core.worktree"
        )
    return top


def require_commit(text: object) -> str:
    """Return the text if it is the full hash of a commit; else raise LabError."""
    if not isinstance(text, str) or not COMMIT.fullmatch(text):
        raise LabError(f"{str(text)[:80]!r} is not the hash of a commit")
    return text
