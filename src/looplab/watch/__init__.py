"""Rules on the metrics of runs that are still at work: what to look out for, and what to do then."""
