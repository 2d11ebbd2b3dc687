"""Metrics of runs: sources that read the files of trainers, and summaries of their curves."""
