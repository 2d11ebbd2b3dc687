"""Everything that happened: studies, rounds, proposals, runs, verdicts, and a hash-chained record of events."""
