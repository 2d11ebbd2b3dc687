"""Proposers, which decide what to try next, one per module."""
