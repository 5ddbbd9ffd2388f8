"""What to change about an access that conflicts or scatters, from the Tile IR around it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..tile.interpreter.access_costs import WARP, Pattern
from ..tile.ir.ir import Function, Op, Operand, SSAValue, defining_ops, definitions, walk
from ..tile.ir.shared_layout import BANKS, WORD_BYTES, SharedLayout
from ..tile.ir.types import Buffer, Scalar

# Accesses of single lanes: where their indices begin among the operands.
FIRST_INDEX = {"load_element": 1, "store_element": 2, "load_pair": 1, "store_pair": 3, "atomic": 2,
               "store_span": 4,
               "atomic_cas": 3}
GOOD = 0.7  # of the sectors needed: a row that begins inside a sector moves 5 for 4


def lane_axes(function: Function, pattern: Pattern) -> tuple[bool, ...]:
    """Along which axes of the place the lanes of a warp differ; () for vector accesses, whose
    lanes are neighbours by what they do."""
    types = definitions(function)
    made = defining_ops(function.body)

    def varies(x: Any) -> bool:
        t = types.get(x) if isinstance(x, SSAValue) else None
        return isinstance(t, Scalar) and not t.uniform

    for op in walk(function.body):
        if not isinstance(op, Op) or op.name not in FIRST_INDEX or op.where is None:
            continue
        same = (op.where.file, op.where.line) == (pattern.where.file, pattern.where.line)
        writes = op.name not in ("load_element", "load_pair")
        if same and writes == pattern.write and _base(made, op.args[0]) == pattern.memory:
            return tuple(map(varies, op.args[FIRST_INDEX[op.name]:]))
    return ()


def _base(made: dict[Operand, Op], place: Any) -> str:
    """The tensor or buffer that a place belongs to."""
    while (op := made.get(place)) is not None and op.name != "allocate":
        place = op.args[0]
    return str(place.name)


def sector_advice(function: Function, pattern: Pattern) -> str:
    if pattern.efficiency >= GOOD:
        return ""
    axes = lane_axes(function, pattern)
    if len(axes) > 1 and any(axes[:-1]) and not axes[-1]:
        return (f"neighbouring lanes walk down axis {axes.index(True)} of {pattern.memory}: swap "
                "the axes of the loop, so that the lane's number is the last index")
    return (f"neighbouring lanes are not at neighbouring elements of {pattern.memory}: make the "
            "lane's number the last index without a factor, or go through shared memory")


def bank_advice(function: Function, pattern: Pattern) -> str:
    if pattern.degree < 2:
        return ""
    axes = lane_axes(function, pattern)
    buffer = next((t for v, t in definitions(function).items()
                   if v.name == pattern.memory and isinstance(t, Buffer)), None)
    if buffer is not None and len(axes) > 1 and any(axes[:-1]) and not axes[-1]:
        return _column_advice(pattern, buffer)
    return (f"neighbouring lanes of {pattern.memory} are a multiple of the banks apart: let them "
            "touch neighbouring elements")


def _column_advice(pattern: Pattern, buffer: Buffer) -> str:
    """For lanes down a column: the first of swizzle and padding that makes it better."""
    *lead, columns = buffer.shape
    itemsize = max(1, buffer.dtype.bits // 8)
    pad = max(1, WORD_BYTES // itemsize)
    swizzled = _column_degree(columns, itemsize, "xor")
    padded = _column_degree(columns + pad, itemsize, None)
    shape = ", ".join(map(str, [*lead, columns]))
    if buffer.swizzle is None and swizzled < pattern.degree and swizzled <= padded:
        return (f'{pattern.memory} = ts.tile.alloc_shared(({shape}), {buffer.dtype}, '
                f'swizzle="xor"): {_conflict_text(swizzled)}')
    if padded < pattern.degree:
        wider = ", ".join(map(str, [*lead, columns + pad]))
        return (f"{pattern.memory} = ts.tile.alloc_shared(({wider}), {buffer.dtype}), the last "
                f"{'column' if pad == 1 else f'{pad} columns'} unused: {_conflict_text(padded)}")
    return (f"lanes walk down axis 0 of {pattern.memory}: swap the axes, so that the lane's number "
            "is the last index")


def _column_degree(columns: int, itemsize: int, swizzle: str | None) -> int:
    """The conflicts of a warp that reads down a column."""
    rows = np.arange(WARP)
    words = np.unique(SharedLayout(WARP, columns, itemsize, swizzle).word(rows, 0 * rows))
    return int(np.bincount(words % BANKS).max())


def _conflict_text(degree: int) -> str:
    return "no conflict" if degree == 1 else f"{degree}-way"


__all__ = ["bank_advice", "lane_axes", "sector_advice"]
