"""Passes that make Tile IR ready for a GPU: operands placed, layouts chosen, barriers put in."""

from __future__ import annotations
