"""Git, by its command line: worktrees, branches, commits and merges of a lab."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from looplab.errors import LabError
from looplab.runs.git import NOBODY, git, require_work_tree
from looplab.runs.tree import make_writable, remove

CACHE = "__pycache__"


class Repo:
    """The repository that a lab lies in."""

    def __init__(self, lab: Path) -> None:
        self.lab = lab.resolve()
        top = git(lab, "rev-parse", "--show-toplevel", ok=True)
        if not top or not git(lab, "rev-parse", "--verify", "HEAD", ok=True):
            hint = "git init && git add -A && git commit -m start"
            raise LabError("the lab is not in git, or has no commit yet: versions are branches", file=lab, hint=hint)
        self.top = require_work_tree(self.lab, Path(top))
        self.below = self.lab.relative_to(self.top.resolve())
        """The lab's place in the repository."""

    def branch(self) -> str:
        """The branch that the lab is on."""
        name = git(self.lab, "symbolic-ref", "--short", "HEAD", ok=True)
        if not name:
            raise LabError("the lab is on no branch (detached HEAD)", file=self.lab, hint="git switch to a branch")
        return name

    def head(self) -> str:
        return git(self.lab, "rev-parse", "HEAD")

    def commit_of(self, branch: str) -> str:
        """The commit of a branch; empty if there is none."""
        return git(self.lab, "rev-parse", "--verify", "--quiet", f"refs/heads/{branch}", ok=True)

    def unsaved(self, paths: list[str]) -> list[str]:
        """Which of these paths of the lab differ from what is committed; a worktree would not have them."""
        # Of submodules only their commit counts: git would run programs that their configuration names.
        options = ("--porcelain", "--no-renames", "--untracked-files=normal", "--ignore-submodules=dirty", "-z")
        found = git(self.lab, "status", *options, "--", *paths)
        return [line[3:] for line in found.split("\0") if line and CACHE not in line]

    def contains(self, commit: str) -> bool:
        return git(self.lab, "merge-base", commit, "HEAD", ok=True) == commit

    def merge(self, commit: str, message: str) -> None:
        """Into the lab's branch: by going forward where that is possible, else by a merge."""
        if self.contains(commit):
            return
        try:
            git(self.lab, *self._identity(), "merge", "-m", message, commit)
        except LabError as error:
            git(self.lab, "merge", "--abort", ok=True)
            hint = "commit or put aside what is in its way, then give the same command again"
            raise LabError(error.message, file=self.lab, hint=hint) from None

    def differs(self, old: str, new: str, paths: list[str]) -> str:
        """The first of these paths of the lab that two commits have in different form; empty if there is none."""
        where = [str(self.below / path) for path in paths]
        return git(self.top, "diff-tree", "-r", "--name-only", old, new, "--", *where).partition("\n")[0]

    def rename(self, old: str, new: str) -> None:
        if self.commit_of(old) and not self.commit_of(new):
            git(self.lab, "branch", "-m", old, new)

    def push_settings(self) -> str:
        """A digest of what says where `push` goes."""
        listed = git(self.lab, "config", "-z", "--get-regexp", r"^(remote|url|push)\.", ok=True)
        return hashlib.sha256(listed.encode(errors="surrogateescape")).hexdigest()

    def push(self) -> str:
        """Push the lab's branch; gives why it did not work, or nothing."""
        try:
            # The repository may name another program, and of two settings git takes the first.
            git(self.lab, "push", "--receive-pack=git-receive-pack")
        except LabError as error:
            return error.message
        return ""

    def _identity(self) -> tuple[str, ...]:
        known = git(self.lab, "config", "user.name", ok=True) and git(self.lab, "config", "user.email", ok=True)
        return () if known else NOBODY

    # -- worktrees

    def add_tree(self, tree: Path, branch: str, commit: str) -> Worktree:
        """A fresh worktree on a new branch; what is left of an earlier attempt to make it goes."""
        self.drop_tree(tree)
        tree.parent.mkdir(parents=True, exist_ok=True)
        git(self.lab, "worktree", "add", "--quiet", "-B", branch, str(tree), commit)
        return self.tree(tree)

    def tree(self, tree: Path) -> Worktree:
        return Worktree(self, tree)

    def drop_tree(self, tree: Path) -> None:
        home = self.lab / ".looplab"
        name = tree.relative_to(home)
        make_writable(home, name)
        if tree.exists():
            git(self.lab, "worktree", "remove", "--force", "--force", "--", str(tree), ok=True)
            remove(home, name)
        git(self.lab, "worktree", "prune")


class Worktree:
    """The worktree of one version. Git is told where its own files are: what an agent writes to `.git` is not read."""

    def __init__(self, repo: Repo, path: Path) -> None:
        self.repo = repo
        self.path = path
        self.lab = path / repo.below
        common = Path(git(repo.lab, "rev-parse", "--path-format=absolute", "--git-common-dir"))
        self._env = {"GIT_DIR": str(self._own_folder(common)), "GIT_WORK_TREE": str(path)}

    def _own_folder(self, common: Path) -> Path:
        for folder in sorted((common / "worktrees").glob("*")):
            pointer = folder / "gitdir"
            if pointer.exists() and Path(pointer.read_text().strip()).parent == self.path:
                return folder
        raise LabError(f"git knows no worktree {self.path}", hint="remove the folder, then give the same command again")

    def git(self, *args: str, ok: bool = False) -> str:
        return git(self.path, *args, env=self._env, ok=ok)

    def commit(self, branch: str, message: str, leave: tuple[str, ...] = ()) -> str:
        """Commit everything that git does not ignore, but for these paths, to the branch; gives its commit."""
        self.git("symbolic-ref", "HEAD", f"refs/heads/{branch}")  # wherever the agent may have gone
        # Git would look for changes inside of submodules, by programs that their configuration names.
        left_out = [f":(exclude,top,literal){path}" for path in (*leave, *self._submodules())]
        self.git("add", "-A", "--", ".", *left_out, f":(exclude,top,glob)**/{CACHE}/**")
        if self.git("diff-index", "--cached", "--name-only", "HEAD", "--"):
            self.git(*self.repo._identity(), "commit", "--quiet", "--no-verify", "-m", message)
        return self.git("rev-parse", "HEAD")

    def _submodules(self) -> list[str]:
        """The submodules, as paths of the repository."""
        listed = self.git("ls-files", "--stage", "--full-name", "-z", "--", ":/")
        return [entry.partition("\t")[2] for entry in listed.split("\0") if entry.startswith("160000 ")]

    def ignored(self, below: str) -> list[str]:
        """Files below this folder of the lab that git ignores, as paths of the lab: they are in no commit."""
        where = str(self.repo.below / below)
        listed = self.git("ls-files", "--others", "--ignored", "--exclude-standard", "-z", "--", where)
        return [os.path.relpath(name, self.repo.below) for name in listed.split("\0") if name]
