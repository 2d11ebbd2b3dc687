"""Configs: reading and writing them, dotted paths, the edit language, safe expressions, and the lab file."""
