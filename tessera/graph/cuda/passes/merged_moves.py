"""Transposed elements whose axes are merged so that short runs of each stand in turn.

    reshape(transpose(reshape(broadcast_to(g))))      ->  moved(g)         # an average's gradient
    reshape(transpose(reshape(x)))                    ->  moved(x)         # pixels shuffled

Neighbours do not stay neighbours, so it is a copy; and where a run of memory has a few elements of
one row and a few of another, tiles of a transposition have as few. Here each element of the result
is read where it comes from, also where several come from one.
"""

from __future__ import annotations

from math import prod

from ...element import Element, index_names
from ...flops import none
from ...ir import Graph, Node, Value
from ...op import Aval
from ...schedule.library_call import library_call
from ...schedule.loop_axes import extents_of
from ...simplify import Rewriter, rebuild, remove_dead

SHORT = 16  # elements of a run from which tiles are as good
Ints = tuple[int, ...]


def _element(x: Aval, at: tuple[str, ...]) -> Element:
    return Element(f"x0[{index_names(at)}]")


MOVED = library_call("moved", element=_element, flops=none)


def gather_merged_moves(graph: Graph) -> Graph:
    """The graph with such copies as one gather."""
    return remove_dead(rebuild(graph, _with_merged_axes))


def _with_merged_axes(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
    if node.op.name != "reshape" or (turned := rw.made_by(inputs[0], "transpose")) is None:
        return None
    out = node.outputs[0].aval
    if out.type.dtype.packed or not all(
            isinstance(n, int) and n for v in (*turned.inputs, *inputs) for n in v.aval.shape):
        return None
    order, shape = turned.attrs["axes"], extents_of(inputs[0])
    runs = merged_axes(shape, extents_of(node.outputs[0]))
    if not runs or len(runs[-1]) < 2 or shape[-1] >= SHORT or order[-1] == len(order) - 1:
        return None
    source, kept = _before_repeats(rw, turned.inputs[0])
    text = dict(zip(order, _components(runs, shape), strict=True))
    x = rw.emit("reshape", source, shape=tuple(
        extents_of(turned.inputs[0])[a] for a in kept))
    made = Value(out)
    rw.add(Node(MOVED, (x,), {"at": tuple(text[a] for a in kept)}, (made,), rw.where))
    return made


def merged_axes(before: Ints, after: Ints) -> list[list[int]] | None:
    """The axes that each axis behind a reshape is made of; None where it cuts some."""
    found, a = list[list[int]](), 0
    for extent in after:
        run = list[int]()
        while prod(before[i] for i in run) < extent and a < len(before):
            run.append(a)
            a += 1
        if not run and a < len(before) and before[a] == 1:
            run.append(a)
            a += 1
        if prod(before[i] for i in run) != extent:
            return None
        found.append(run)
    return found if a == len(before) else None


def _components(runs: list[list[int]], shape: Ints) -> list[str]:
    """The place along each axis in front of the reshape, of an element behind it."""
    texts = []
    for o, run in enumerate(runs):
        for k, axis in enumerate(run):
            stride = prod(shape[i] for i in run[k + 1:])
            text = f"o{o} // {stride}" if stride > 1 else f"o{o}"
            texts.append(f"({text}) % {shape[axis]}" if k else text)
    return texts


def _before_repeats(rw: Rewriter, x: Value) -> tuple[Value, Ints]:
    """What x repeats, and the axes of x along which it does not."""
    cut = rw.made_by(x, "reshape")
    repeat = rw.made_by(x if cut is None else cut.inputs[0], "broadcast_to")
    whole = tuple(range(x.aval.ndim))
    if repeat is None:
        return x, whole
    y, shape = repeat.inputs[0], extents_of(repeat.outputs[0])
    given = (1,) * (len(shape) - y.aval.ndim) + extents_of(y)
    runs = merged_axes(extents_of(x), shape)
    if runs is None:
        return x, whole
    return y, tuple(a for run, n, m in zip(runs, given, shape, strict=True) if n == m for a in run)


__all__ = ["gather_merged_moves", "merged_axes"]
