"""Stages with fingerprinted artifacts, suites of them, and cases."""
