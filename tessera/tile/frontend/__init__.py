"""A kernel's Python to Tile IR: its source, the tracer, parameters and results."""
