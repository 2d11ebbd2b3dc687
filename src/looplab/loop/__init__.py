"""The engine: the only place that knows the whole way, from a proposal to its record."""
