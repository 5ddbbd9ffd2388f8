"""Convolutions of images whose channels lie together, as matmuls of unfolded images that are never
unfolded in memory: copies to shared memory pick the pixels of the windows (tile.windows).

Images [N, C, H, W] are transposed in front and results behind. In a chain those transposes meet and
cancel, and what is done to each element goes through them (`sink_transposes`), so that images stay
as [N, H, W, C] from the first convolution to the last.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from ....kernels.cards import card_for
from ....kernels.conv import (
    Geometry,
    conv_backward,
    conv_backward_strided,
    conv_forward,
    conv_weights,
)
from ....kernels.matmul_blocks import BLOCK_US, MatmulBlocks, MatmulExtents, choose_blocks
from ....numerics import as_type
from ....runtime.generations import Generation, WarpgroupMatmul
from ....tensor import Tensor
from ....tile.ops.windows import Windows
from ... import functions as F
from ...expand import Rule
from ...ir import Graph, Node, Value
from ...op import Aval, GraphOp
from ...operand import convert
from ...ops.contract import matmul_compute
from ...ops.conv_products import CONV, CONV_FILTER, CONV_INPUT
from ...simplify import Rewriter, rebuild, remove_dead
from .data_movement import is_plain_loop
from .space_to_depth import Patches, filters_from, filters_of, patches_of
from .window_launches import with_channels_last

F32 = as_type("f32")
STEPS = 64, 32, 16  # channels of 16 bits that a copy may bring of a pixel, and depths of a step
STORED = 32  # channels that rows of a result have at least where they go to pixels of their own
EIGHT = 8  # elements of 16 bits: where rows that copies read begin
FEW = 16  # channels
TO_FRONT = 0, 3, 1, 2  # [N, H, W, C] as [N, C, H, W]
TO_BACK = 0, 2, 3, 1


# --- which ------------------------------------------------------------------------------------
def unfolds(node: Node, chip: Generation) -> bool:
    """Whether copies unfold the images of a convolution or of one of its adjoints."""
    unit = chip.warpgroup_matmul
    first, second, out = (v.aval for v in (*node.inputs, *node.outputs))
    images, results = (out, first) if node.op is CONV_INPUT else (
        first, second if node.op is CONV_FILTER else out)
    if unit is None or node.attrs["groups"] > 1:
        return False
    channels, filters = images.shape[1], results.shape[1]
    geometry = _geometry(node, images, results)
    if node.op is CONV_INPUT:
        strided = max(geometry.stride) > 1
        if strided and (max(geometry.dilation) > 1 or channels % STORED):
            return False
        channels, filters = filters, channels
        geometry = geometry.readers if strided else geometry.backwards
    windows, copies = Windows.of({"channels": channels, **geometry._asdict()}), unit.copies
    return (channels % STEPS[-1] == 0 and filters % EIGHT == 0
            and windows.reach <= copies.most_corner and windows.offset <= copies.most_offset
            and max(windows.geometry.stride) <= copies.most_stride)


def has_few_channels(node: Node, chip: Generation) -> bool:
    """Whether it is unfolded after pixels were joined (space_to_depth.py)."""
    first, second, out = (v.aval for v in (*node.inputs, *node.outputs))
    filters = (second if node.op is CONV_FILTER else out).shape[1]
    return (node.op is not CONV_INPUT and chip.warpgroup_matmul is not None
            and node.attrs["groups"] == 1 and first.ndim == 4 and first.shape[1] < FEW
            and filters % EIGHT == 0 and set(node.attrs["dilation"]) == {1})


def _geometry(node: Node, images: Any, results: Any) -> Geometry:
    window = node.attrs.get("window") or node.inputs[1].aval.shape[2:]
    return geometry_of(tuple(window), tuple(images.shape[2:]), tuple(results.shape[2:]),
                       node.attrs["stride"], node.attrs["padding"], node.attrs["dilation"])


def geometry_of(window: tuple, images: tuple, results: tuple, stride: tuple, padding: tuple,
                dilation: tuple) -> Geometry:
    """Of one axis as of two, the first of one pixel."""
    first = (1,) * (2 - len(window))
    before = (0,) * len(first) + tuple(a for a, _ in padding)
    return Geometry(first + window, first + stride, first + dilation, before, first + images,
                    first + results)


# --- launches ---------------------------------------------------------------------------------
def rules(chip: Generation) -> dict[GraphOp, Rule]:
    """In launches, for a chip whose copies unfold images."""
    unit = chip.warpgroup_matmul

    def forward(x: Tensor, w: Tensor, accum: Any, groups: int, rounds: Any = F32,
                **attrs: Any) -> Tensor:
        places = results_of(x.shape[2:], w.shape[2:], **attrs)
        geometry = geometry_of(tuple(w.shape[2:]), tuple(x.shape[2:]), places, **attrs)
        Y = _forward(pixels(x), taps(w), geometry, rounds, unit)
        return images_of(Y, (x.shape[0], *places))

    def backward(g: Tensor, w: Tensor, spatial: tuple, accum: Any, groups: int, rounds: Any = F32,
                 **attrs: Any) -> Tensor:
        geometry = geometry_of(tuple(w.shape[2:]), spatial, tuple(g.shape[2:]), **attrs)
        if prod(geometry.stride) == 1 and step_of(g.shape[1]) < STEPS[0]:
            turned = F.swapaxes(F.flip(w, tuple(range(2, w.ndim))), 0, 1)
            D = _forward(pixels(g), taps(turned), geometry.backwards, rounds, unit)
        else:
            D = F.zeros((g.shape[0] * prod(spatial), w.shape[1]), rounds)
            _backward(pixels(g), taps(w), D, geometry, unit)
        return images_of(D, (g.shape[0], *spatial))

    def weights(x: Tensor, g: Tensor, window: tuple, accum: Any, groups: int,
                **attrs: Any) -> Tensor:
        geometry = geometry_of(tuple(window), tuple(x.shape[2:]), tuple(g.shape[2:]), **attrs)
        D = _weights(pixels(x), pixels(g), geometry, unit)
        return F.moveaxis(F.reshape(D, (g.shape[1], *window, x.shape[1])), -1, 1)

    return {CONV: forward, CONV_INPUT: backward, CONV_FILTER: weights}


def few_channel_rules(chip: Generation) -> dict[GraphOp, Rule]:
    """The same of images of few channels, whose own gradient is left to matmuls."""
    unit = chip.warpgroup_matmul

    def forward(x: Tensor, w: Tensor, accum: Any, groups: int, rounds: Any = F32,
                **attrs: Any) -> Tensor:
        places = results_of(x.shape[2:], w.shape[2:], **attrs)
        geometry = geometry_of(tuple(w.shape[2:]), tuple(x.shape[2:]), places, **attrs)
        p = Patches.of(geometry, x.shape[1])
        X = patches_of(F.transpose(x, TO_BACK), p, geometry)
        W = filters_of(F.transpose(w, TO_BACK), p, geometry)
        return images_of(_forward(X, W, p.geometry, rounds, unit), (x.shape[0], *places))

    def weights(x: Tensor, g: Tensor, window: tuple, accum: Any, groups: int,
                **attrs: Any) -> Tensor:
        geometry = geometry_of(tuple(window), tuple(x.shape[2:]), tuple(g.shape[2:]), **attrs)
        p = Patches.of(geometry, x.shape[1])
        X = patches_of(F.transpose(x, TO_BACK), p, geometry)
        D = _weights(X, pixels(g), p.geometry, unit)
        return F.transpose(filters_from(D, p, geometry, x.shape[1]), TO_FRONT)

    return {CONV: forward, CONV_FILTER: weights}


def _forward(X: Tensor, W: Tensor, geometry: Geometry, result: Any,
             unit: WarpgroupMatmul | None) -> Tensor:
    """[places, filters]"""
    P, (M, K) = X.shape[0] // prod(geometry.images) * prod(geometry.results), W.shape
    Y = F.zeros((P, M), result)
    b = _blocks(P, M, K, result, unit, _unfolded_size(X, geometry) + M * K)
    conv_forward(X, W, Y, geometry, BM=b.rows, BN=b.columns)
    return Y


def _backward(G: Tensor, W: Tensor, D: Tensor, geometry: Geometry,
              unit: WarpgroupMatmul | None) -> None:
    """Into D [pixels, channels]. A step of the sums lies in one pixel of a window, since filters
    are read as they lie."""
    (S, C), classes, depth = D.shape, prod(geometry.stride), W.shape[0] * geometry.taps
    step = step_of(W.shape[0])
    fit = [n for n in BLOCK_US if classes == 1 or C % n[1] == n[1] % STORED == 0]
    b = _blocks(S, C, -(-depth // classes), D.type, unit, prod(G.shape) + prod(W.shape), fit)
    if classes == 1:
        conv_backward(G, W, D, geometry.backwards, BM=b.rows, BN=b.columns, BK=step)
        return
    patches = geometry.patches
    places = S // prod(geometry.images) * prod(patches.results)
    conv_backward_strided(G, W, D, geometry, geometry.readers, patches, classes=classes,
                          places=places, BM=b.rows, BN=b.columns, BK=step)


def _weights(X: Tensor, G: Tensor, geometry: Geometry, unit: WarpgroupMatmul | None) -> Tensor:
    """[filters, taps and channels], in parts of the places, then added."""
    (P, M), K = G.shape, X.shape[1] * geometry.taps
    b = _blocks(M, K, P, F32, unit, _unfolded_size(X, geometry) + P * M, split=True)
    D = F.zeros((b.parts, M, K))
    conv_weights(X, G, D, geometry, b.depth or P, BM=b.rows, BN=b.columns)
    return F.reshape(D, (M, K)) if b.parts == 1 else F.sum(D, axis=0)


def _blocks(M: int, N: int, K: int, result: Any, unit: WarpgroupMatmul | None, read: int,
            blocks: Iterable[tuple[int, int]] = BLOCK_US, split: bool = False) -> MatmulBlocks:
    """Of some blocks the quickest; narrow ones are for narrow results. read: elements."""
    extents, blocks = MatmulExtents(M, N, K, 16, result.dtype.bits, read=read), tuple(blocks)
    fit = tuple(b for b in blocks if b[1] >= min(N, STEPS[0])) or blocks
    return choose_blocks(extents, fit, split, card_for(unit))


def _unfolded_size(X: Tensor, g: Geometry) -> int:
    """Elements of images that windows reach, each once."""
    reached = (min(i, n * k) for i, n, k in zip(g.images, g.results, g.window, strict=True))
    return prod(X.shape) // prod(g.images) * prod(reached)


def step_of(channels: int) -> int:
    """How many channels a copy brings."""
    return next(n for n in STEPS if channels % n == 0)


def pixels(x: Tensor) -> Tensor:
    """[N, C, H, W] as [N H W, C]"""
    return F.reshape(F.moveaxis(x, 1, -1), (x.shape[0] * prod(x.shape[2:]), x.shape[1]))


def taps(w: Tensor) -> Tensor:
    """[O, C, KH, KW] as [O, KH KW C]"""
    return F.reshape(F.moveaxis(w, 1, -1), (w.shape[0], prod(w.shape[1:])))


def images_of(Y: Tensor, places: tuple) -> Tensor:
    """[N H W, C] as [N, C, H, W]"""
    return convert(F.moveaxis(F.reshape(Y, (*places, Y.shape[1])), -1, 1), F32)


def results_of(spatial: tuple, window: tuple, stride: tuple, padding: tuple,
               dilation: tuple) -> tuple[int, ...]:
    return tuple((n + a + b - d * (k - 1) - 1) // s + 1 for n, k, s, (a, b), d in
                 zip(spatial, window, stride, padding, dilation, strict=True))


# --- windows of one pixel -----------------------------------------------------------------------
def is_pointwise(node: Node) -> bool:
    """Whether a convolution of two axes, or an adjoint of one, multiplies each pixel by itself."""
    if node.op not in POINTS:
        return False
    window = node.attrs.get("window") or node.inputs[1].aval.shape[2:]
    return (prod(window) == prod(node.attrs["stride"]) == node.attrs["groups"] == 1
            and len(window) == 2 and not any(map(any, node.attrs["padding"])))


def has_channels_last(graph: Graph) -> bool:
    """Whether images of a convolution of single pixels are given as transposed [N, H, W, C]."""
    fronts = {v for n in graph.nodes if _fronts(n) for v in n.outputs}
    return any(is_pointwise(n) and n.inputs[0] in fronts for n in graph.nodes)


def _point_forward(x: Tensor, w: Tensor, accum: Any, **attrs: Any) -> Tensor:
    y = matmul_compute(pixels(x), F.swapaxes(taps(w), 0, 1), accum)
    return F.transpose(F.reshape(y, (x.shape[0], *x.shape[2:], w.shape[0])), TO_FRONT)


def _point_backward(g: Tensor, w: Tensor, accum: Any, **attrs: Any) -> Tensor:
    x = matmul_compute(pixels(g), taps(w), accum)
    return F.transpose(F.reshape(x, (g.shape[0], *g.shape[2:], w.shape[1])), TO_FRONT)


def _point_weights(x: Tensor, g: Tensor, accum: Any, **attrs: Any) -> Tensor:
    w = matmul_compute(F.swapaxes(pixels(g), 0, 1), pixels(x), accum)
    return F.reshape(w, (g.shape[1], x.shape[1], 1, 1))


POINTS: dict[GraphOp, Rule] = {CONV: _point_forward, CONV_INPUT: _point_backward,
                               CONV_FILTER: _point_weights}


# --- transposes ---------------------------------------------------------------------------------
def sink_transposes(graph: Graph) -> Graph:
    """Ops of each element, and reductions, before images are transposed to [N, C, H, W] and not
    behind it."""
    if not any(_fronts(node) for node in graph.nodes):
        return graph

    def visit(rw: Rewriter, node: Node, inputs: tuple[Value, ...]) -> Value | None:
        if len(node.outputs) != 1 or not any(_is_channels_first(rw, v) for v in inputs):
            return None
        if (attrs := with_channels_last(node)) is not None and _is_channels_first(rw, inputs[-1]):
            return _of_windows(rw, node, inputs, attrs)
        if node.op.reduction and len(inputs) == 1 and "axis" in node.attrs:
            return _reduced(rw, node, inputs[0])
        if is_plain_loop(node) and node.outputs[0].aval.ndim == 4:
            made = rw.emit(node.op.name, *(_channels_last(rw, v) for v in inputs), **node.attrs)
            return rw.emit("transpose", made, axes=TO_FRONT)
        return None

    return remove_dead(rebuild(graph, visit))


def _fronts(node: Node) -> bool:
    return node.op.name == "transpose" and tuple(node.attrs["axes"]) == TO_FRONT


def _is_channels_first(rw: Rewriter, v: Value) -> bool:
    made = rw.producer.get(v)
    return made is not None and _fronts(made)


def _channels_last(rw: Rewriter, v: Value) -> Value:
    """An operand with its channels behind: as it was before it was transposed, a number as it is,
    and others transposed."""
    if _is_channels_first(rw, v):
        return rw.producer[v].inputs[0]
    if v.aval.ndim == 0:
        return v
    if v.aval.ndim < 4:
        v = rw.emit("reshape", v, shape=(1,) * (4 - v.aval.ndim) + tuple(v.aval.shape))
    return rw.emit("transpose", v, axes=TO_BACK)


def _of_windows(rw: Rewriter, node: Node, inputs: tuple[Value, ...], attrs: dict[str, Any]
                ) -> Value:
    shape = node.outputs[0].aval.shape
    out = Value(Aval(tuple(shape[a] for a in TO_BACK), node.outputs[0].aval.type))
    rw.add(Node(node.op, tuple(_channels_last(rw, v) for v in inputs), attrs, (out,), rw.where))
    return rw.emit("transpose", out, axes=TO_FRONT)


def _reduced(rw: Rewriter, node: Node, x: Value) -> Value | None:
    attrs = dict(node.attrs)
    axis = tuple(TO_FRONT[a] for a in attrs["axis"])
    left = [a for a in TO_FRONT if a not in axis]
    if not attrs.get("keepdims") and left != sorted(left):
        return None
    made = rw.emit(node.op.name, _channels_last(rw, x), **{**attrs, "axis": tuple(sorted(axis))})
    return rw.emit("transpose", made, axes=TO_FRONT) if attrs.get("keepdims") else made


__all__ = ["POINTS", "few_channel_rules", "geometry_of", "has_channels_last", "has_few_channels",
           "images_of", "is_pointwise", "pixels", "results_of", "rules", "sink_transposes",
           "unfolds"]
