"""Pooling: reductions of the windows of images, which never lie in memory.

    reduce_max(reshape(unfold(pad(cast(x)))))      ->  cast(window_max(x))
    reduce_sum(reshape(transpose(reshape(x))))     ->  window_sum(x)        # windows side by side

Each element of the result reads those of its window where they lie, in the type in which they lie.
A largest element passes padding of -inf by, as a sum does zeros.
"""

from __future__ import annotations

from math import inf, prod

from ....lazy_dataclass import dataclass
from ....numerics import as_type
from ...element import Element, index_names
from ...flops import per_operand
from ...ir import Graph, Node, Value
from ...op import Aval
from ...schedule.library_call import library_call
from ...schedule.loop_axes import extents_of
from ...schedule.loop_dtypes import is_narrow
from ...simplify import Rewriter, rebuild, remove_dead

MOST = 32  # elements of a window, which are read one by one
F32 = as_type("f32").dtype
NEUTRAL = {"max": -inf, "min": inf, "sum": 0.0}
KNOWN = ("constant", "full", "broadcast_to")  # what is made of these is folded
Ints = tuple[int, ...]


def _element(x: Aval, way: str, window: Ints, stride: Ints, dilation: Ints, before: Ints,
             divisor: float = 1.0) -> Element:
    lead = x.ndim - len(window)
    at = [f"o{lead + i} * {s} + r{i} * {d} - {b}" for i, (s, d, b) in
          enumerate(zip(stride, dilation, before, strict=True))]
    return Element(f"x0[{index_names([*range(lead), *at])}]", over=window, way=way)


WINDOWS = {way: library_call(f"window_{way}", element=_element, flops=per_operand)
           for way in NEUTRAL}


@dataclass(frozen=True)
class _Windows:
    """x: [lead, spatial]; its windows [lead, window, places]."""

    x: Value
    window: Ints
    stride: Ints
    dilation: Ints
    before: Ints

    def within(self, rw: Rewriter, way: str) -> _Windows:
        """The same of what was padded with what counts nothing."""
        pad = rw.made_by(self.x, "pad")
        if pad is None or any(pad.attrs["holes"]):
            return self
        fill, lead = rw.made_by(pad.inputs[1], "constant"), self.x.aval.ndim - len(self.window)
        sides = pad.attrs["before"], pad.attrs["after"]
        if fill is None or fill.attrs["value"] != NEUTRAL[way] or any(
                any(side[:lead]) or min(side) < 0 for side in sides):
            return self
        before = tuple(a + b for a, b in zip(self.before, sides[0][lead:], strict=True))
        return _Windows(pad.inputs[0], self.window, self.stride, self.dilation, before)


def reduce_windows(graph: Graph) -> Graph:
    """The graph with reductions of windows of floats by kernels of their own."""
    return remove_dead(rebuild(rebuild(graph, _reduced), _divided))


def _divided(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
    """A sum of windows over a number, rounded: a mean of 16 bits."""
    if node.op.name != "cast":
        return None
    quotient = rw.made_by(inputs[0], "div")
    total = None if quotient is None else rw.made_by(quotient.inputs[0], WINDOWS["sum"].name)
    by = None if quotient is None else rw.made_by(quotient.inputs[1], "constant")
    to = node.outputs[0].aval
    if total is None or by is None or "divisor" in total.attrs or not is_narrow(to.dtype) or (
            to.type.policy.rounding != "nearest_even"):
        return None
    out = Value(to)
    rw.add(Node(total.op, total.inputs, {**total.attrs, "divisor": by.attrs["value"]}, (out,),
                rw.where))
    return out


def _reduced(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
    """A reduction of windows of more than one place, in the type in which they lie."""
    way = node.op.reduction
    if way not in NEUTRAL or {inputs[0].aval.dtype.name, node.attrs.get("accum", F32).name} != {
            "f32"}:
        return None
    windows = _windows(rw, node, inputs[0])
    if windows is None or prod(windows.window) > MOST or prod(extents_of(node.outputs[0])) == prod(
            extents_of(node.outputs[0])[:node.attrs["axis"][0]]):
        return None
    windows = windows.within(rw, way).within(rw, way)  # that of ceil_mode is a second one
    if (made := rw.producer.get(windows.x)) is not None and made.op.name in KNOWN:
        return None
    cast, whole = rw.made_by(windows.x, "cast"), node.outputs[0].aval
    halved = cast is not None and cast.inputs[0].aval.dtype.bits == 16 and is_narrow(
        cast.inputs[0].aval.dtype)
    x = cast.inputs[0] if cast is not None and halved else windows.x
    kept = whole.type if way == "sum" else x.aval.type
    out = Value(Aval(whole.shape, kept))
    rw.add(Node(WINDOWS[way], (x,), {
        "way": way, "window": windows.window, "stride": windows.stride,
        "dilation": windows.dilation, "before": windows.before}, (out,), rw.where))
    return out if kept == whole.type else rw.emit("cast", out, source=kept, to=whole.type)


def _windows(rw: Rewriter, node: Node, x: Value) -> _Windows | None:
    """The windows whose places a node reduces: all of them, as one axis."""
    axis, flat = node.attrs["axis"], rw.made_by(x, "reshape")
    if len(axis) > 1 or node.attrs["keepdims"] or flat is None or any(
            not isinstance(n, int) for v in (x, flat.inputs[0]) for n in v.aval.shape):
        return None
    made, lead = rw.producer.get(flat.inputs[0]), axis[0]
    found = None if made is None else _unfolded(made) or _side_by_side(rw, made, lead)
    if found is None or found.x.aval.ndim - len(found.window) != lead:
        return None
    cut = extents_of(flat.inputs[0])
    want = (*cut[:lead], prod(found.window), *cut[lead + len(found.window):])
    return found if extents_of(x) == want else None


def _unfolded(made: Node) -> _Windows | None:
    if made.op.name != "unfold" or any(b for pair in made.attrs["padding"] for b in pair):
        return None
    a = made.attrs
    return _Windows(made.inputs[0], a["window"], a["stride"], a["dilation"],
                    (0,) * len(a["window"]))


def _side_by_side(rw: Rewriter, made: Node, lead: int) -> _Windows | None:
    """[lead, places and window by turns] with the window's axes in front."""
    cut = rw.made_by(made.inputs[0], "reshape") if made.op.name == "transpose" else None
    if cut is None or made.inputs[0].aval.ndim - lead not in (4, 6):
        return None
    x, parts = cut.inputs[0], extents_of(made.inputs[0])
    places_at = range(lead, len(parts), 2)
    order = (*range(lead), *(a + 1 for a in places_at), *places_at)
    whole = (*parts[:lead], *(parts[a] * parts[a + 1] for a in places_at))
    if made.attrs["axes"] != order or extents_of(x) != whole:
        return None
    window = tuple(parts[a + 1] for a in places_at)
    return _Windows(x, window, window, (1,) * len(window), (0,) * len(window))


__all__ = ["reduce_windows"]
