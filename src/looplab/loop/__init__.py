"""The engine: the only package that covers the whole path from a proposal to its record."""
