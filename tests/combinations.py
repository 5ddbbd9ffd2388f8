"""Functions that combine two tuples of tiles, for the tests of every target."""

from __future__ import annotations

from tessera.tile import MODULE as tile


def linear(a, b):
    """Two steps g, x of y <- g y + x as one."""
    return a[0] * b[0], a[1] * b[0] + b[1]


def later(a, b):
    """The larger value with its place; the first of equal ones."""
    more = b[0] > a[0]
    return tile.where(more, b[0], a[0]), tile.where(more, b[1], a[1])


__all__ = ["later", "linear"]
