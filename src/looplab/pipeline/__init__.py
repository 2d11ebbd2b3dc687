"""Pipelines: stages with fingerprinted artifacts, suites of datasets, and cases."""
