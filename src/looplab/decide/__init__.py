"""Proposers: who decides what is tried next. One file each."""
