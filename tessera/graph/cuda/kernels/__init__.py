"""The kernel of each kind of group: its schedule, and its text in the tile language."""
