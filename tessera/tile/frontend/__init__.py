"""A kernel's Python to Tile IR: tracing, expressions, loops, subscripts, facts about edges."""
