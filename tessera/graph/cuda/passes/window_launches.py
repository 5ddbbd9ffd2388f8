"""Pooling of images and cotangents where they lie and in the types in which they lie.

    cast(window_max_vjp(cast(g), cast(x)))         ->  a launch, a thread for each patch of x
    cast(window_spread(div(cast(g), number)))      ->  window_spread of its own, by elements
    window_max(x)                                  ->  a launch, where windows overlap
    window_max(transpose(x))                       ->  transpose(window_max(x)), by three axes

Images whose channels lie together have windows of one channel along a third axis: threads beside
each other have neighbours in memory. By planes each read a sector of its own: the largest of 3 x 3
in steps of 2 of [64, 64, 112, 112] took 604 us, its gradient 1,900 (bf16, H200, 2026-11-28).

Gradients that are neither open into smaller ops.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from ....kernels.windows import (
    LANES,
    gradient_axis,
    reduce_windows,
    reduced_axis,
    window_form,
    window_max_gradient,
)
from ....numerics import as_type
from ....tensor import Tensor
from ... import functions as F
from ...element import Element, index_names
from ...expand import expand_by
from ...flops import per_operand
from ...ir import Graph, Node, Value, uses
from ...op import Aval
from ...ops.window_reductions import WINDOW_MAX, WINDOW_MAX_VJP, WINDOW_SPREAD, WINDOW_SUM
from ...ops.windows import windows_side_by_side
from ...schedule.library_call import library_call
from ...schedule.loop_axes import extents_of
from ...schedule.loop_dtypes import is_narrow
from ...simplify import Rewriter, rebuild, remove_dead
from .window_reductions import WINDOWS

F32 = as_type("f32")
MOST = 1 << 31  # elements that the kernel does not count to
MOST_READ, MOST_WINDOWS = 64, 16  # elements and windows that a thread of it has in registers
MOST_TERMS = 32  # windows that an element is in, which are read one by one
AXES = 3
Ints = tuple[int, ...]


def open_windows(graph: Graph) -> Graph:
    """Reductions of windows in smaller ops, which `reduce_windows` reads through, and gradients
    that no kernel here takes, whose largest elements are those then."""
    takes: dict[Any, Callable[[Node], bool]] = {
        WINDOW_MAX: lambda _: False, WINDOW_SUM: lambda _: False,
        WINDOW_MAX_VJP: _is_taken, WINDOW_SPREAD: _has_few_terms}
    return expand_by(graph, lambda node: (
        (node.op.expand_gpu or node.op.expand) if node.op in takes and not takes[node.op](node)
        else None))


def spread_windows(graph: Graph) -> Graph:
    """The graph with gradients of pooling as ops of kernels here, which read what is stored."""
    def begun(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if node.op is WINDOW_MAX_VJP:
            return _emitted(rw, node, GRADIENT, tuple(_stored(rw, v) for v in inputs),
                            node.outputs[0].aval.type, **node.attrs)
        if node.op is WINDOW_SPREAD:
            source, divisor = _divided(rw, inputs[0])
            return _emitted(rw, node, SPREAD, (_stored(rw, source),), F32, way="sum",
                            divisor=divisor, each=True, **node.attrs)
        return None

    def rounded(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        """What is written down as it is rounded alone."""
        made = rw.producer.get(inputs[0]) if node.op.name == "cast" else None
        if made is None or made.op not in (GRADIENT, SPREAD) or read[node.inputs[0]] > 1:
            return None
        to = node.outputs[0].aval
        if to.dtype.bits != 16 or not is_narrow(to.dtype) or (
                to.type.policy.rounding != "nearest_even" or to.type.policy.saturate):
            return None
        return _emitted(rw, made, made.op, made.inputs, to.type, **made.attrs)

    graph = rebuild(graph, begun)
    read = uses(graph)
    return remove_dead(rebuild(graph, rounded))


def launch_windows(graph: Graph) -> Graph:
    """The graph with gradients of largest elements, and windows that share elements, as launches.
    Stands behind the passes that say how images lie."""
    return expand_by(graph, lambda node: (
        _launched(node.outputs[0].aval.type) if node.op is GRADIENT
        else _reduced(node) if _overlaps(node) else None))


def with_channels_last(node: Node) -> dict[str, Any] | None:
    """The attributes of an op on windows of images where the channels are a third axis, the last;
    None for other ops."""
    if node.op not in (*WINDOWS.values(), GRADIENT) or len(node.attrs["window"]) != 2 or (
            node.outputs[0].aval.ndim != 4):
        return None
    more = {"window": 1, "stride": 1, "dilation": 1, "before": 0, "padding": (0, 0)}
    return {k: (*v, more[k]) if k in more else v for k, v in node.attrs.items()}


def _emitted(rw: Rewriter, node: Node, op: Any, inputs: tuple[Value, ...], to: Any,
             **attrs: Any) -> Value:
    out = Value(Aval(node.outputs[0].aval.shape, to))
    rw.add(Node(op, inputs, attrs, (out,), rw.where))
    return out


def _stored(rw: Rewriter, x: Value) -> Value:
    """What was widened from 16 bits, as it is stored."""
    made = rw.made_by(x, "cast")
    if made is None:
        return x
    source = made.inputs[0]
    return source if source.aval.dtype.bits == 16 and is_narrow(source.aval.dtype) else x


def _divided(rw: Rewriter, x: Value) -> tuple[Value, float]:
    made = rw.made_by(x, "div")
    by = None if made is None else rw.made_by(made.inputs[1], "constant")
    if made is None or by is None:
        return x, 1.0
    return made.inputs[0], float(by.attrs["value"])


def _is_known(*values: Value) -> bool:
    return all(isinstance(n, int) and n for v in values for n in v.aval.shape) and all(
        v.aval.dtype is F32.dtype and prod(v.aval.shape) < MOST for v in values)


# --- the largest --------------------------------------------------------------------------------
GRADIENT = library_call("window_max_gradient")


def _is_taken(node: Node) -> bool:
    window = node.attrs["window"]
    if len(window) > AXES or not _is_known(*node.inputs):
        return False
    form = _form(*map(extents_of, node.inputs), **node.attrs)
    return len(form.elements) <= MOST_READ and len(form.windows) <= MOST_WINDOWS


def _form(places: Ints, spatial: Ints, window: Ints, stride: Ints, dilation: Ints,
          padding: Any) -> Any:
    rank = len(window)
    return window_form(
        _axes(gradient_axis, spatial[-rank:], places[-rank:], window, stride, dilation,
              tuple(before for before, _ in padding)),
        not windows_side_by_side(spatial[-rank:], window, stride, dilation, padding))


def _axes(axis: Any, *each: Ints) -> tuple[Any, ...]:
    """Of three axes, the first ones of one element."""
    return tuple(axis(*of) for of in (*((1, 1, 1, 1, 1, 0),) * (AXES - len(each[0])),
                                      *zip(*each, strict=True)))


def _launched(to: Any) -> Any:
    def launch(g: Tensor, x: Tensor, **attrs: Any) -> Tensor:
        form = _form(tuple(map(int, g.shape)), tuple(map(int, x.shape)), **attrs)
        images = prod(x.shape[:x.ndim - len(attrs["window"])])
        dx = F.zeros((prod(x.shape),), to)
        window_max_gradient.launcher(lanes=LANES)(
            F.flatten(x), F.flatten(g), dx, count=images * prod(a.patches for a in form.axes),
            form=form)
        return F.reshape(dx, x.shape)

    return launch


# --- windows that overlap ------------------------------------------------------------------------
def _overlaps(node: Node) -> bool:
    """Whether threads that have some of the windows read each element that these share once. The
    largest of 3 x 3 in steps of 2 takes 25 reads for four windows, where one by one it takes 36."""
    if node.op not in WINDOWS.values() or len(node.attrs["window"]) > AXES:
        return False
    (x,), (y,) = node.inputs, node.outputs
    form = _reading_form(extents_of(y), extents_of(x), **node.attrs)
    alone = prod(node.attrs["window"]) * len(form.windows)
    return len(form.elements) < min(alone, MOST_READ + 1) and all(
        0 < prod(extents_of(v)) < MOST for v in (x, y))


def _reading_form(places: Ints, spatial: Ints, window: Ints, stride: Ints, dilation: Ints,
                  before: Ints, **attrs: Any) -> Any:
    rank = len(window)
    return window_form(_axes(reduced_axis, spatial[-rank:], places[-rank:], window, stride,
                             dilation, before))


def _reduced(node: Node) -> Any:
    out, form = node.outputs[0].aval, _reading_form(
        extents_of(node.outputs[0]), extents_of(node.inputs[0]), **node.attrs)

    def launch(x: Tensor, way: str, window: Ints, divisor: float = 1.0, **attrs: Any) -> Tensor:
        images = prod(out.shape[:out.ndim - len(window)])
        y = F.zeros((prod(out.shape),), out.type)
        reduce_windows.launcher(lanes=LANES)(
            F.flatten(x), y, count=images * prod(a.patches for a in form.axes), form=form, way=way,
            divisor=divisor)
        return F.reshape(y, out.shape)

    return launch


# --- sums ---------------------------------------------------------------------------------------
def _terms(window: Ints, stride: Ints, dilation: Ints) -> Ints:
    """Windows that may have an element, along each axis."""
    return tuple(d * (k - 1) // s + 1 for k, s, d in zip(window, stride, dilation, strict=True))


def _has_few_terms(node: Node) -> bool:
    a = node.attrs
    return _is_known(*node.inputs, *node.outputs) and prod(
        _terms(a["window"], a["stride"], a["dilation"])) <= MOST_TERMS


def _element(g: Aval, spatial: Ints, window: Ints, stride: Ints, dilation: Ints, padding: Any,
             **attrs: Any) -> Element:
    """Of element o = s w + d i - b, window w is (o + b) // s - r and d i = (o + b) % s + s r."""
    lead, at = g.ndim - len(spatial), []
    terms = _terms(window, stride, dilation)
    for i, (k, s, d, (b, _), n) in enumerate(zip(window, stride, dilation, padding, terms,
                                                 strict=True)):
        o = f"(o{lead + i} + {b})" if b else f"o{lead + i}"
        number = f"{o} // {s}" if s > 1 else o
        number = f"{number} - r{i}" if n > 1 else number
        within = f"{o} % {s} + r{i} * {s}" if s > 1 else f"r{i}"
        tests = [f"(({within}) % {d} == 0)"] * (d > 1) + [
            f"({within} <= {d * (k - 1)})"] * ((n - 1) * s + s - 1 > d * (k - 1))
        at.append(f"where({' & '.join(tests)}, {number}, -1)" if tests else number)
    return Element(f"x0[{index_names([*range(lead), *at])}]", over=terms)


SPREAD = library_call("window_spread", element=_element, flops=per_operand)


__all__ = ["launch_windows", "open_windows", "spread_windows", "with_channels_last"]
