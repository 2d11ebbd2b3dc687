"""Episodic steering memory: mine, select, remember, steer."""
