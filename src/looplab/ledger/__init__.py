"""The record of a lab: studies, rounds, proposals, runs and verdicts, with a hash-chained log of events."""
