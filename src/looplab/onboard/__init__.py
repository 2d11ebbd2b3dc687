"""Understand other people's training scripts: their options, their metrics, and a lab for them."""
