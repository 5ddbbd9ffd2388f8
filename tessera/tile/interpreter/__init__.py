"""Tile IR on NumPy: the meaning of the language, and what finds races and bad accesses."""
