"""Coding agents: codex, claude or any command, as one event stream, with one cost account and hard limits.

`run_agent` (run.py) makes one call and returns an `Answer`. base.py defines the data types, account.py sums up costs,
log.py reads logs. Each kind of agent has one module: its command line, and the meaning of its output.
"""
