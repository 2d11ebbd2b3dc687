"""Git command line: worktrees, branches, commits and merges of a lab."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from looplab.errors import LabError
from looplab.runs.git import NOBODY, git, require_work_tree
from looplab.runs.tree import make_writable, remove

CACHE = "__pycache__"


class Repo:
    """The repository that contains a lab."""

    def __init__(self, lab: Path) -> None:
        self.lab = lab.resolve()
        top = git(lab, "rev-parse", "--show-toplevel", ok=True)
        if not top or not git(lab, "rev-parse", "--verify", "HEAD", ok=True):
            hint = "git init && git add -A && git commit -m start"
            raise LabError("the lab is not in git, or has no commit yet: versions are branches", file=lab, hint=hint)
        self.top = require_work_tree(self.lab, Path(top))
        self.prefix = self.lab.relative_to(self.top.resolve())
        """Path of the lab in the repository."""

    def branch(self) -> str:
        """Return the branch that the lab is on."""
        name = git(self.lab, "symbolic-ref", "--short", "HEAD", ok=True)
        if not name:
            raise LabError("the lab is not on a branch (detached HEAD)", file=self.lab, hint="git switch to a branch")
        return name

    def head(self) -> str:
        """Return the commit of HEAD."""
        return git(self.lab, "rev-parse", "HEAD")

    def commit_of(self, branch: str) -> str:
        """Return the commit of a branch; empty if there is none."""
        return git(self.lab, "rev-parse", "--verify", "--quiet", f"refs/heads/{branch}", ok=True)

    def unsaved(self, paths: list[str]) -> list[str]:
        """Return the paths of the lab, among these, that have uncommitted changes: a worktree would not have them."""
        # Do not look into submodules: git would run programs that their configuration names.
        options = ("--porcelain", "--no-renames", "--untracked-files=normal", "--ignore-submodules=dirty", "-z")
        found = git(self.lab, "status", *options, "--", *paths)
        return [line[3:] for line in found.split("\0") if line and CACHE not in line]

    def contains(self, commit: str) -> bool:
        """Return whether the lab's branch contains a commit."""
        return git(self.lab, "merge-base", commit, "HEAD", ok=True) == commit

    def merge(self, commit: str, message: str) -> None:
        """Merge a commit into the lab's branch, fast-forward if possible."""
        if self.contains(commit):
            return
        try:
            git(self.lab, *self._identity(), "merge", "-m", message, commit)
        except LabError as error:
            git(self.lab, "merge", "--abort", ok=True)
            hint = "commit or stash the files in the way, then repeat the command"
            raise LabError(error.message, file=self.lab, hint=hint) from None

    def differs(self, old: str, new: str, paths: list[str]) -> str:
        """Return the first file below these paths of the lab that differs between two commits; empty if none does."""
        where = [str(self.prefix / path) for path in paths]
        return git(self.top, "diff-tree", "-r", "--name-only", old, new, "--", *where).partition("\n")[0]

    def tree_of(self, commit: str, folder: str) -> str:
        """Return git's hash of a folder of the lab in a commit; empty if it is not there."""
        return git(self.lab, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}:./{folder}", ok=True)

    def rename(self, old: str, new: str) -> None:
        """Rename a branch, unless the new name exists."""
        if self.commit_of(old) and not self.commit_of(new):
            git(self.lab, "branch", "-m", old, new)

    def push_settings(self) -> str:
        """Return a hash of the settings that decide where `push` goes."""
        listed = git(self.lab, "config", "-z", "--get-regexp", r"^(remote|url|push)\.", ok=True)
        return hashlib.sha256(listed.encode(errors="surrogateescape")).hexdigest()

    def push(self) -> str:
        """Push the lab's branch; return the error message, empty on success."""
        try:
            # The repository may configure another program; the command line takes precedence.
            git(self.lab, "push", "--receive-pack=git-receive-pack", *self._upstream())
        except LabError as error:
            return error.message
        return ""

    def _upstream(self) -> tuple[str, ...]:
        """Return the arguments that set the branch's upstream, if it has none: `origin`, or the only remote."""
        if git(self.lab, "rev-parse", "--abbrev-ref", "--symbolic-full-name", "@{upstream}", ok=True):
            return ()
        remotes = git(self.lab, "remote", ok=True).split()
        remote = "origin" if "origin" in remotes else remotes[0] if len(remotes) == 1 else None
        return () if remote is None else ("--set-upstream", remote, self.branch())

    def _identity(self) -> tuple[str, ...]:
        known = git(self.lab, "config", "user.name", ok=True) and git(self.lab, "config", "user.email", ok=True)
        return () if known else NOBODY

    # -- worktrees

    def add_tree(self, tree: Path, branch: str, commit: str) -> Worktree:
        """Create a worktree on a new branch; remove what an earlier attempt left."""
        self.drop_tree(tree)
        tree.parent.mkdir(parents=True, exist_ok=True)
        git(self.lab, "worktree", "add", "--quiet", "-B", branch, str(tree), commit)
        return self.tree(tree)

    def tree(self, tree: Path) -> Worktree:
        return Worktree(self, tree)

    def drop_tree(self, tree: Path) -> None:
        """Remove a worktree, even if it is read-only or broken."""
        home = self.lab / ".looplab"
        name = tree.relative_to(home)
        make_writable(home, name)
        if tree.exists():
            git(self.lab, "worktree", "remove", "--force", "--force", "--", str(tree), ok=True)
            remove(home, name)
        git(self.lab, "worktree", "prune")


class Worktree:
    """The worktree of one version. GIT_DIR is explicit, so that `.git`, which an agent may write to, is not read."""

    def __init__(self, repo: Repo, path: Path) -> None:
        self.repo = repo
        self.path = path
        self.lab = path / repo.prefix
        common = Path(git(repo.lab, "rev-parse", "--path-format=absolute", "--git-common-dir"))
        self._env = {"GIT_DIR": str(self._own_folder(common)), "GIT_WORK_TREE": str(path)}

    def _own_folder(self, common: Path) -> Path:
        for folder in sorted((common / "worktrees").glob("*")):
            pointer = folder / "gitdir"
            if pointer.exists() and Path(pointer.read_text().strip()).parent == self.path:
                return folder
        raise LabError(f"git does not know the worktree {self.path}", hint="remove the folder, then repeat the command")

    def git(self, *args: str, ok: bool = False) -> str:
        return git(self.path, *args, env=self._env, ok=ok)

    def commit(self, branch: str, message: str, leave: tuple[str, ...] = ()) -> str:
        """Commit everything that git does not ignore, except the paths in `leave`, to the branch; return the commit."""
        self.git("symbolic-ref", "HEAD", f"refs/heads/{branch}")  # whatever the agent checked out
        # Exclude submodules: git would run programs that their configuration names.
        excluded = [f":(exclude,top,literal){path}" for path in (*leave, *self._submodules())]
        self.git("add", "-A", "--", ".", *excluded, f":(exclude,top,glob)**/{CACHE}/**")
        if self.git("diff-index", "--cached", "--name-only", "HEAD", "--"):
            self.git(*self.repo._identity(), "commit", "--quiet", "--no-verify", "-m", message)
        return self.git("rev-parse", "HEAD")

    def changed_outside(self, base: str, folder: str, ignore: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
        """Return what differs from a commit outside a folder of the lab, as paths in the repository.

        Args:
            base: The commit.
            folder: Folder of the lab whose changes are expected.
            ignore: Other paths in the repository that do not count.

        Returns:
            Files of the commit that were changed or removed, or files that were committed since; and new files that are
            not in git.
        """
        options = ("-z", "--name-only", "--no-renames", "--ignore-submodules=dirty")
        changed = self.git("diff-index", *options, base, "--").split("\0")
        new = self.git("ls-files", "--others", "--exclude-standard", "-z", "--full-name", "--", ":/").split("\0")
        expected = (self.repo.prefix / folder, *(Path(name) for name in ignore))

        def is_outside(name: str) -> bool:
            path = Path(name)
            return bool(name) and CACHE not in path.parts and not any(path.is_relative_to(one) for one in expected)

        return [name for name in changed if is_outside(name)], [name for name in new if is_outside(name)]

    def _submodules(self) -> list[str]:
        """Return the submodules, as paths in the repository."""
        listed = self.git("ls-files", "--stage", "--full-name", "-z", "--", ":/")
        return [entry.partition("\t")[2] for entry in listed.split("\0") if entry.startswith("160000 ")]

    def ignored(self, folder: str) -> list[str]:
        """Return the files below a folder of the lab that git ignores, as paths in the lab."""
        where = str(self.repo.prefix / folder)
        listed = self.git("ls-files", "--others", "--ignored", "--exclude-standard", "-z", "--", where)
        return [os.path.relpath(name, self.repo.prefix) for name in listed.split("\0") if name]
