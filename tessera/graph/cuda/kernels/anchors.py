"""Axes of what a product or attention computes, for the loop that runs on its result."""

from __future__ import annotations

from math import prod

from ....kernels.matmul_blocks import STEP_BYTES, lines_of
from ...ir import Node
from ...schedule.loop_axes import Frame, extents_of


def anchor_frame(anchor: Node, space: tuple[int, ...]) -> Frame | None:
    """The axes of a product's or attention's result for a loop over `space` behind it, of which
    several may be one of these: (M, N), (Z, M, N), or (head, S, E); None when the space is another
    one."""
    extents, runs, end = anchor_extents(anchor), list[tuple[int, ...]](), len(space)
    for extent in reversed(extents[1:]):  # from the last axis on, as few as make one
        begin = max(end - 1, 0)
        while begin and prod(space[begin:end]) < extent:
            begin -= 1
        if not end or prod(space[begin:end]) != extent:
            return None
        runs, end = [tuple(range(begin, end)), *runs], begin
    return Frame(space, (tuple(range(end)), *runs)) if prod(space[:end]) == extents[0] else None


def anchor_extents(anchor: Node) -> tuple[int, ...]:
    """(M, N) of one product, (Z, M, N) of a batch, (heads, S, E) of attention."""
    if "causal" in anchor.attrs:
        q, v = extents_of(anchor.inputs[0]), extents_of(anchor.inputs[2])
        return prod(q[:-2]), q[-2], v[-1]
    shape = extents_of(anchor.outputs[0])
    return shape if len(shape) == 2 else (prod(shape[:-2]), *shape[-2:])


def whole_steps(product: Node) -> int:
    """K of all pairs of operands of a product, each up to the end of its last step."""
    step = 8 * STEP_BYTES // product.inputs[0].aval.dtype.bits
    return sum(-(-extents_of(a)[-1 if way == "n" else -2] // step) * step for a, way in zip(
        product.inputs[::2], product.attrs["layout"][::2], strict=True))


def whole_rows(product: Node) -> bool:
    """Whether rows of all operands begin at multiples of 16 bytes, as TMA reads them."""
    return all(extents_of(v)[-1] * v.aval.dtype.bits % 128 == 0 for v in product.inputs)


def row_lines(product: Node) -> tuple[float, float]:
    """Lines of L2 that 128 bytes of a row of either operand are: of the worst of several pairs."""
    lines = [lines_of(extents_of(v)[-1] * v.aval.dtype.bits // 8) for v in product.inputs]
    return max(lines[::2]), max(lines[1::2])


__all__ = ["anchor_extents", "anchor_frame", "row_lines", "whole_rows", "whole_steps"]
