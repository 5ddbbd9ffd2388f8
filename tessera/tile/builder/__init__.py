"""Builds Tile IR: emits ops by their types, and keeps what is known of values, edges and memory."""
