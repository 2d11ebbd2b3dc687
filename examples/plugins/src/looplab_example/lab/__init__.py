"""A recipe: a lab that minimises a parabola and logs a .tsv file."""
