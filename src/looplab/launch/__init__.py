"""Slots with pinned devices and cores, and executors that start, stop and adopt runs in them."""
