"""The run folder, with one contract for all kinds of runs: names, atomic writes, pointers, the capsule."""
