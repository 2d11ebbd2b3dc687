"""Rules on the metrics of running runs: conditions to watch for, and the action to take."""
