"""scan, map, reduce, associative_scan: loops over nested values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..dims import Dim, show_shape
from ..errors import ArgumentError, ShapeError
from ..graph import functions as F
from ..graph import tree
from ..graph.ir import Graph, Value
from ..graph.op import Aval
from ..graph.operand import axis_index, convert
from ..graph.signature import Static, callable_name, is_data
from ..graph.trace import aval_of
from ..tensor import Tensor, as_tensor
from .scan import INDEX, Loop, element
from .subgraphs import BOOLS, Packed, Result, close_graph, is_float, trace_body
from .transform import need_function
from .vmap import vmap


def scan(f: Callable, init: Any, xs: Any = None, length: int | None = None,
         reverse: bool = False) -> tuple[Any, Any]:
    """(carry, ys) of the loop  carry, ys[t] = f(carry, xs[t])  for t = 0, 1, ... or backwards.

    init: any nested value of tensors; f returns one of the same structure, shapes and types
    xs: a nested value of tensors [T, ...], or None with `length`   ys: results stacked, [T, ...]
    Differentiable in both modes; reverse mode keeps the carries and recomputes the rest. Random
    draws in f differ from iteration to iteration. Raises ArgumentError, ShapeError.
    """
    need_function(f, "scan", ("carry", "x"))
    return scan_named(f, init, xs, length, reverse, "scan")


def scan_named(f: Callable, init: Any, xs: Any, length: int | None, reverse: bool, what: str
          ) -> tuple[Any, Any]:
    """scan; what: the function that the user called, for messages."""
    carry, seqs = Packed(init), Packed(xs)
    carry.need_unscaled(f"{what}: carry")
    seqs.need_unscaled(f"{what}: xs")
    extent = _length(seqs, length, what)
    body, results = _trace_step(f, carry, seqs, what)
    loop_body, captured = close_graph(body)
    moving, fixed = _moving(loop_body, len(carry.tensors))
    loop = Loop(_hoist(loop_body, moving, fixed, len(seqs.tensors)), len(moving),
                len(seqs.tensors), extent, bool(reverse))
    start = carry.tensors
    out = loop.run([*(start[i] for i in moving), *seqs.tensors, *(start[i] for i in fixed),
                    *captured])
    final = list(start)
    for i, c in zip(moving, out, strict=False):
        final[i] = c
    made = out[len(moving):]
    return carry.after(final), results.stacked(made, [0] * len(made))


def _length(seqs: Packed, length: int | None, what: str) -> Any:
    """The number of iterations. Raises ShapeError when the sequences disagree."""
    number = isinstance(length, int | float | np.integer) and not isinstance(length, bool)
    if not (length is None or isinstance(length, Dim) or (
            number and length >= 0 and length == int(length))):
        raise ArgumentError(f"{what}: length={length!r}", hint="a whole number of iterations")
    extent: Any = length
    first = "length"
    for name, x in zip(seqs.names("xs"), seqs.tensors, strict=True):
        if not x.ndim:
            raise ShapeError(f"{what}: {name} is a scalar", hint="the loop runs over axis 0 of xs")
        if extent is not None and x.shape[0] != extent:
            raise ShapeError(f"{what}: {name} {show_shape(x.shape)} has {x.shape[0]} elements "
                             f"along axis 0, {first} has {extent}")
        if extent is None:
            extent, first = x.shape[0], name
    if extent is None:
        raise ArgumentError("scan without xs needs length=", hint="ts.scan(f, init, length=8)")
    return extent


def _trace_step(f: Callable, carry: Packed, seqs: Packed, what: str) -> tuple[Graph, Result]:
    """The body, and how a result is built. Python numbers in init take the type f gives them."""
    box = list[Result]()

    def step(index: Tensor, *args: Tensor) -> list[Tensor]:
        n = len(carry.tensors)
        made = f(carry.build(args[:n]), seqs.build(args[n:]))
        if not (isinstance(made, tuple) and len(made) == 2):
            raise ArgumentError(
                f"scan: {callable_name(f)} must return (carry, y), it returns "
                f"{type(made).__name__}", hint="return carry, None when nothing is stacked")
        box[:] = [Result(made[1])]
        return [*carried_tensors(made[0], carry, what), *box[0].tensors]

    def trace_it() -> Graph:
        avals = [INDEX, *map(aval_of, carry.tensors), *map(element, seqs.tensors)]
        return trace_body(step, avals, callable_name(f), index=0)

    return trace_carrying(trace_it, carry, what), box[0]


def trace_carrying(trace_it: Callable[[], Graph], carry: Packed, what: str) -> Graph:
    """The body of a loop, whose first outputs are its carry after an iteration. Traced again while
    Python numbers in the initial carry take another type, which one may do because another did,
    and bools become data; raises ShapeError."""
    for _ in range(2 * len(carry.flat) + 1):
        n = len(carry.tensors)
        graph = trace_it()
        if n == len(carry.tensors) and not _widen(carry, [v.aval for v in graph.outputs[:n]]):
            break
    check_carry(what, carry, graph)
    return graph


def carried_tensors(value: Any, carry: Packed, what: str) -> list[Tensor]:
    """The tensors of a returned carry, which must have the structure of the first. A bool that an
    iteration changes becomes data, and the body is to be traced again; other Python objects must
    be returned as they were. Raises ArgumentError."""
    leaves = tree.leaves_like(value, carry.treedef, f"{what}: the returned carry")
    for i in set(range(len(leaves))).difference(carry.places):
        was, now = carry.flat[i], leaves[i]
        if now is was or (not isinstance(now, Tensor) and Static(now) == Static(was)):
            continue
        if not (isinstance(was, BOOLS) and is_data(now)):
            name = tree.paths(carry.treedef, "carry")[i]
            got = aval_of(now) if isinstance(now, Tensor) else repr(now)
            raise ArgumentError(
                f"{what}: {name} is {was!r} before an iteration and {got} after it",
                hint="what an iteration changes starts as a tensor or a number; other Python "
                "objects in a carry stay as they are", code="E_CARRY")
        carry.take_in(i)
    return [as_tensor(leaves[i]) for i in carry.places]


def _widen(carry: Packed, found: Sequence[Aval]) -> bool:
    """Give Python numbers in the initial carry the type that the loop returns for them."""
    changed = False
    for k, (i, aval) in enumerate(zip(carry.places, found, strict=True)):
        t = carry.tensors[k]
        weak = isinstance(carry.flat[i], (*BOOLS, int, float)) and aval.shape == ()
        if weak and t.type != aval.type and (is_float(aval) or not is_float(t)):
            carry.tensors[k], changed = convert(t, aval.type), True
    return changed


def check_carry(what: str, carry: Packed, body: Graph) -> None:
    """Raise ShapeError naming the leaf whose type or shape an iteration changes, and the line that
    gave it the other one."""
    for name, t, v in zip(carry.names("carry"), carry.tensors, body.outputs, strict=False):
        if aval_of(t) != v.aval:
            raise ShapeError(
                f"{what}: {name} is {aval_of(t)} before an iteration and {v.aval} after it"
                f"{_origin(body, v)}",
                hint="a carry keeps its shape and type: ts.cast_like(new, old), or start from "
                "zeros of the type that comes out", code="E_CARRY")


def _origin(body: Graph, value: Value) -> str:
    """Where the body made a value; nothing for what it was given."""
    node = next((n for n in body.nodes if value in n.outputs), None)
    return "" if node is None or node.where is None else (
        f", as {node.op.name} makes it at {node.where}")


def _moving(body: Graph, n: int) -> tuple[list[int], list[int]]:
    """Carries that an iteration may change, and those that it returns as they came."""
    fixed = [i for i in range(n) if body.outputs[i] is body.inputs[1 + i]]
    return [i for i in range(n) if i not in fixed], fixed


def _hoist(body: Graph, moving: list[int], fixed: list[int], n_xs: int) -> Graph:
    """The body with its fixed carries as constants: reverse mode then keeps no copies of them."""
    n = len(moving) + len(fixed)
    index, carry = body.inputs[0], body.inputs[1: 1 + n]
    xs, consts = body.inputs[1 + n: 1 + n + n_xs], body.inputs[1 + n + n_xs:]
    inputs = (index, *(carry[i] for i in moving), *xs, *(carry[i] for i in fixed), *consts)
    outputs = (*(body.outputs[i] for i in moving), *body.outputs[n:])
    return replace(body, inputs=inputs, outputs=outputs)


def map_(f: Callable, xs: Any) -> Any:
    """f of each element of xs along axis 0, results stacked: a loop, one element at a time.

    xs: a nested value of tensors [T, ...]. Unlike vmap it needs no batching rules, and memory is
    that of one element. Raises ShapeError when the sequences disagree.
    """
    need_function(f, "map", ("x",))
    if not Packed(xs).tensors:
        raise ArgumentError("map needs at least one tensor in xs", hint="ts.map(f, xs)")

    def step(_: None, x: Any) -> tuple[None, Any]:
        return None, f(x)

    step.__name__ = callable_name(f)
    return scan_named(step, None, xs, None, False, "map")[1]


map_.__name__ = map_.__qualname__ = "map"


# --- trees of an associative operation --------------------------------------------------------
def _along(xs: Any, axis: int, what: str) -> tuple[Any, int, list[int]]:
    """(xs with `axis` first, its extent, the axis per leaf). Raises ShapeError."""
    flat, structure = tree.flatten(xs)
    tensors = [as_tensor(x) for x in flat]
    axes = [axis_index(axis, x.ndim) for x in tensors]
    extents = {x.shape[a] for x, a in zip(tensors, axes, strict=True)}
    if len(extents) != 1:
        raise ShapeError(f"{what} needs tensors of one extent along axis {axis}, got "
                         f"{', '.join(show_shape(x.shape) for x in tensors) or 'none'}")
    (extent,) = extents
    if not isinstance(extent, int) or extent == 0:
        raise ShapeError(f"{what} needs a known extent of at least 1 along axis {axis}, "
                         f"got {extent}")
    moved = [F.moveaxis(x, a, 0) for x, a in zip(tensors, axes, strict=True)]
    return tree.unflatten(structure, moved), extent, axes


def _rows(xs: Any, start: int, stop: int, step: int = 1) -> Any:
    return tree.map_tree(lambda x: x[start:stop:step], xs)


def reduce(op: Callable, xs: Any, axis: int = 0) -> Any:
    """op(op(x_0, x_1), op(x_2, x_3)), ...: one value from the slices along an axis.

    op: associative; two slices (nested values as xs is) -> one   xs: [..., T, ...], T >= 1
    The tree is fixed: neighbours are paired level by level, an odd last one moves up as it is. It
    depends on T alone, so results are equal bit for bit everywhere. Raises ShapeError.
    """
    need_function(op, "reduce", ("a", "b"))
    level, extent, _ = _along(xs, axis, "reduce")
    combine = vmap(op)
    while extent > 1:
        even = extent - extent % 2
        pairs = combine(_rows(level, 0, even, 2), _rows(level, 1, even, 2))
        if extent % 2:
            last = _rows(level, extent - 1, extent)
            pairs = tree.map_tree(lambda a, b: F.concatenate([a, b]), pairs, last)
        level, extent = pairs, even // 2 + extent % 2
    return tree.map_tree(lambda x: x[0], level)


def associative_scan(op: Callable, xs: Any, axis: int = 0) -> Any:
    """y_t = op(...op(op(x_0, x_1), x_2)..., x_t) for all t, in log2(T) levels of a fixed tree.

    op: associative, on slices as in ts.reduce   xs, ys: [..., T, ...]
    Blelloch 1990, CMU-CS-90-190.
    """
    need_function(op, "associative_scan", ("a", "b"))
    moved, extent, axes = _along(xs, axis, "associative_scan")
    out = _prefixes(vmap(op), moved, extent)
    flat, structure = tree.flatten(out)
    return tree.unflatten(structure, [F.moveaxis(y, 0, a)
                                      for y, a in zip(flat, axes, strict=True)])


def _prefixes(combine: Callable, xs: Any, extent: int) -> Any:
    if extent == 1:
        return xs
    even = extent - extent % 2
    odd = _prefixes(combine, combine(_rows(xs, 0, even, 2), _rows(xs, 1, even, 2)), extent // 2)
    first = _rows(xs, 0, 1)
    if extent == 2:
        return tree.map_tree(lambda a, b: F.concatenate([a, b]), first, odd)
    count = (extent - 1) // 2
    evens = combine(_rows(odd, 0, count), _rows(xs, 2, extent, 2))
    evens = tree.map_tree(lambda a, b: F.concatenate([a, b]), first, evens)
    return tree.map_tree(_interleave, evens, odd)


def _interleave(a: Tensor, b: Tensor) -> Tensor:
    """a_0 b_0 a_1 b_1 ...; a may have one more than b."""
    n = b.shape[0]
    both = F.stack([a[:n], b], axis=1)
    mixed = F.reshape(both, (2 * n, *b.shape[1:]))
    return mixed if a.shape[0] == n else F.concatenate([mixed, a[n:]])
