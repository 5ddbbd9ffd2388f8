"""Choices of blocks that are measured on a GPU, and the tables that they are written to."""
