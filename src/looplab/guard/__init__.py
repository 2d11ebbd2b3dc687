"""What a proposal must meet before it may take a slot: knobs, normalisers, derived keys, constraints."""
