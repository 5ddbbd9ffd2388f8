"""Where the blocks of groups begin: group_id(axis) * size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tessera.tile.ir.ir import Function, GridAxis, Op, Operand


def times_group(x: Operand, made: Mapping[Operand, Op]) -> tuple[int | None, Operand] | None:
    """Of the number of a group times something: the axis of the grid, None for all of it, and by
    what; None for anything else."""
    op = made.get(x)
    number = made.get(op.args[0]) if op is not None and op.name == "mul" else None
    if op is None or number is None or number.name != "group_id":
        return None
    return number.attr["axis"], op.args[1]


def blocks_of_grid(function: Function, made: Mapping[Operand, Op],
                   number: Callable[[Operand], int | None]) -> Iterator[tuple[Operand, GridAxis]]:
    """Values at which blocks of an axis of the grid begin, whole and side by side. number: of what
    is known."""
    for value in made:
        axis, size = times_group(value, made) or (None, None)
        if axis is None or size is None or axis >= len(function.grid):
            continue
        grid = function.grid[axis]
        if (grid.lo, grid.stride) == ("0", False) and number(size) == grid.block:
            yield value, grid


__all__ = ["blocks_of_grid", "times_group"]
