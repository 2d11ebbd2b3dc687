"""Versions: an agent writes the next step of the code in a worktree of its own, and the lab decides what it is worth.

`iterate` (versions.py) drives the agent from version to version; gates.py looks at what it left behind, verdict.py
compares it with the champion, record.py reads from the ledger how far each version has come, tour.py shows them all.
"""
