"""The run folder: one contract for every loop. Names, whole writes, pointers, the capsule."""
