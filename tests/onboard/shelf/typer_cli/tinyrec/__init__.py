"""tinyrec: matrix factorization for people in a hurry."""
__version__ = "0.3.1"
