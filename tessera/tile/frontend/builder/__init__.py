"""Builds the Tile IR of a trace: ops, and what is known of its values, edges, grid and memory."""
