"""Coding agents: codex, claude or any command, as one event stream, with one cost account and hard limits.

`run_agent` (run.py) asks an agent one thing and gives an `Answer`; base.py has the words, account.py the sums, log.py
reads what agents did. Each kind of agent is one file: how it is started, and what its lines mean.
"""
