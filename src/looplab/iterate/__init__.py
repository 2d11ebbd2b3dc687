"""Versions: an agent writes the next version of the code in its own worktree; the lab checks, measures and judges it.

`iterate` (versions.py) drives the agent from version to version. gates.py checks what it wrote, verdict.py compares it
with the champion, record.py replays the state of each version from the ledger, tour.py renders all versions.
"""
