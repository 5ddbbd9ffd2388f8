"""Tile IR: its nodes and types, layouts, printed form, and schedules."""
