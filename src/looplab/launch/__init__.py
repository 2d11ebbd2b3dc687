"""Where runs run: slots with pinned devices and cores, and executors that start, stop and adopt trainings."""
