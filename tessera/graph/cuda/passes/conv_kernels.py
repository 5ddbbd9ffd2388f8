"""Convolutions and their adjoints by the library's kernels, which unfold no windows.

Channels with filters of their own are added up without matmuls (depthwise_convs.py). Of others,
floats of 16 bits: where copies pick the pixels of windows, images of a multiple of 16 channels, and
of few, are multiplied by wgmma (window_kernels.py). Elsewhere pixels are gathered and multiplied by
mma. What is left are matmuls of unfolded windows: of other types, and of few channels, since a
matmul of 3 channels and 49 taps together is full where 49 of 3 channels are not. Windows of one
pixel are their images, and unfold to no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from ....kernels.cards import multiprocessors_of
from ....kernels.conv import Geometry, conv_filters, conv_images
from ....numerics import Policy, as_type
from ....runtime.generations import Generation
from ....tensor import Tensor
from ... import functions as F
from ...expand import Rule, expand_by
from ...ir import Graph, Node, Value, readers_of
from ...op import Aval, GraphOp
from ...operand import convert
from ...ops.conv_products import CONV, CONV_FILTER, CONV_INPUT, CONVOLUTIONS
from ...trace import apply
from .depthwise_convs import depthwise_rules, is_depthwise
from .window_kernels import (
    POINTS,
    few_channel_rules,
    geometry_of,
    has_channels_last,
    has_few_channels,
    is_pointwise,
    results_of,
    rules,
    unfolds,
)

F32 = as_type("f32")
LEAST = 16  # channels of a group: the depth of one mma of 16 bits
GROUPS_PER_MULTIPROCESSOR = 2


def use_conv_kernels(graph: Graph, chip: Generation) -> Graph:
    """The graph with the convolutions that the kernels take as their launches. Where copies unfold
    images, or images come with their channels together, windows of one pixel are matmuls of such
    images, too."""
    graph = expand_by(graph, lambda node: _padded(node, chip))
    launches = {n: rule for n in graph.nodes if (rule := _launch_of(n, chip)) is not None}
    last = has_channels_last(graph) or any(
        is_depthwise(n) or _unfolded(n, chip) for n in launches)
    graph = _rounded(graph, launches)

    def chosen(node: Node) -> Rule | None:
        if last and is_pointwise(node):
            return POINTS[node.op]
        return _launch_of(node, chip)

    return expand_by(graph, chosen)


def _launch_of(node: Node, chip: Generation) -> Rule | None:
    """The launches that a convolution, or an adjoint of one, becomes."""
    if is_depthwise(node):
        return depthwise_rules(chip)[node.op]
    if not _is_taken(node):
        return None
    full = prod(_window(node)) > 1 and _channels(node) >= LEAST
    return _unfolded(node, chip) or (_gathered_rules(chip)[node.op] if full else None)


def _unfolded(node: Node, chip: Generation) -> Rule | None:
    """The same where copies unfold its images."""
    if has_few_channels(node, chip):
        return few_channel_rules(chip)[node.op]
    return rules(chip)[node.op] if unfolds(node, chip) else None


def _padded(node: Node, chip: Generation) -> Rule | None:
    """The same with filters of zeros behind its own, where copies unfold that alone: the last
    convolution of a model that makes images has three filters, or four."""
    if not _is_taken(node) or _unfolded(node, chip) is not None:
        return None
    count = node.inputs[1].aval.shape[node.op is CONV_FILTER]
    assert isinstance(count, int)
    more = -count % LEAST
    return partial(PADDED[node.op], more) if more and unfolds(_wider(node, more), chip) else None


def _wider(node: Node, more: int) -> Node:
    """A node of as many filters more."""
    first, second, out = (v.aval for v in (*node.inputs, *node.outputs))
    if node.op is CONV:
        second, out = _longer(second, 0, more), _longer(out, 1, more)
    elif node.op is CONV_INPUT:
        first, second = _longer(first, 1, more), _longer(second, 0, more)
    else:
        second, out = _longer(second, 1, more), _longer(out, 0, more)
    return Node(node.op, (Value(first), Value(second)), node.attrs, (Value(out),), node.where)


def _longer(a: Aval, axis: int, more: int) -> Aval:
    return Aval(tuple(n + more if i == axis else n for i, n in enumerate(a.shape)), a.type)


def _more(x: Tensor, axis: int, more: int) -> Tensor:
    """With zeros behind along an axis."""
    return F.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)])


def _padded_conv(more: int, x: Tensor, w: Tensor, **attrs: Any) -> Tensor:
    return apply(CONV, x, _more(w, 0, more), **attrs)[:, :w.shape[0]]


def _padded_input(more: int, g: Tensor, w: Tensor, **attrs: Any) -> Tensor:
    return apply(CONV_INPUT, _more(g, 1, more), _more(w, 0, more), **attrs)


def _padded_filter(more: int, x: Tensor, g: Tensor, **attrs: Any) -> Tensor:
    return apply(CONV_FILTER, x, _more(g, 1, more), **attrs)[:g.shape[1]]


PADDED: dict[GraphOp, Callable[..., Tensor]] = {
    CONV: _padded_conv, CONV_INPUT: _padded_input, CONV_FILTER: _padded_filter}


def _rounded(graph: Graph, launches: Container[Node]) -> Graph:
    """The graph whose launches say where a cast to the type of their operands is all that reads
    them: the kernel rounds then, and writes half as much."""
    readers = readers_of(graph)
    nodes = []
    for node in graph.nodes:
        found = readers.get(node.outputs[0], []) if node.outputs else []
        if node.op in (CONV, CONV_INPUT) and node in launches and len(found) == 1 and (
                node.outputs[0] not in graph.outputs and found[0].op.name == "cast"):
            to = found[0].attrs["to"]
            if to.dtype is node.inputs[0].aval.dtype and replace(
                    to.policy, accum=None) == Policy():
                node = Node(node.op, node.inputs, {**node.attrs, "rounds": to}, node.outputs,
                            node.where)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _is_taken(node: Node) -> bool:
    if node.op not in CONVOLUTIONS:
        return False
    avals = [v.aval for v in (*node.inputs, *node.outputs)]
    if not all(isinstance(n, int) and n for a in avals for n in a.shape) or avals[0].ndim > 4:
        return False
    dtype = avals[0].dtype
    return (dtype.kind == "float" and dtype.bits == 16 and node.attrs["accum"].name == "f32"
            and max(prod(_window(node)), *node.attrs["stride"]) > 1)


def _channels(node: Node) -> int:
    """Of a group, of images or results."""
    return min(a.shape[1] // node.attrs["groups"] for a in _images(node))


def _window(node: Node) -> tuple[int, ...]:
    return node.attrs.get("window") or tuple(node.inputs[1].aval.shape[2:])


def _images(node: Node) -> list[Any]:
    """Those of a node's types that are images or results of a convolution."""
    first, second, out = (v.aval for v in (*node.inputs, *node.outputs))
    return [first, second] if node.op is CONV_FILTER else [first, out]


# --- launches ---------------------------------------------------------------------------------
def _conv(x: Tensor, w: Tensor, accum: Any, groups: int, rounds: Any = F32,
          **attrs: Any) -> Tensor:
    places = results_of(x.shape[2:], w.shape[2:], **attrs)
    geometry = geometry_of(tuple(w.shape[2:]), tuple(x.shape[2:]), places, **attrs)
    y = _multiplied(x, _taps(w, groups, False), geometry, groups, w.shape[0] // groups, rounds)
    return convert(F.reshape(y, (x.shape[0], w.shape[0], *places)), F32)


def _conv_input(g: Tensor, w: Tensor, spatial: tuple, accum: Any, groups: int, rounds: Any = F32,
                **attrs: Any) -> Tensor:
    geometry = geometry_of(tuple(w.shape[2:]), spatial, tuple(g.shape[2:]), **attrs)
    x = _multiplied(g, _taps(w, groups, True), geometry, groups, w.shape[1], rounds, True)
    return convert(F.reshape(x, (g.shape[0], w.shape[1] * groups, *spatial)), F32)


def _multiplied(x: Tensor, w: Tensor, geometry: Geometry, groups: int, channels: int, rounds: Any,
                back: bool = False) -> Tensor:
    """[images * groups, channels, places]"""
    n, depth = x.shape[0], x.shape[1] // groups
    Y = F.zeros((n * groups, channels, prod(geometry.images if back else geometry.results)),
                rounds)
    m, p, k = _blocks(channels, Y.shape[2], min(depth, 32) if back else depth)
    conv_images(_pixels(x, groups), w, Y, geometry, groups=groups, back=back, BM=m, BN=p, BK=k)
    return Y


def _conv_filter(chip: Generation, x: Tensor, g: Tensor, window: tuple, accum: Any, groups: int,
                 **attrs: Any) -> Tensor:
    """In parts of some images each, so that there are enough groups of threads, then added."""
    geometry = geometry_of(tuple(window), tuple(x.shape[2:]), tuple(g.shape[2:]), **attrs)
    n, C, M = x.shape[0], x.shape[1] // groups, g.shape[1] // groups
    m, c, k = _blocks(M, C, prod(g.shape[2:]))
    blocks = -(-M // m) * -(-C // c) * groups * geometry.taps
    wanted = GROUPS_PER_MULTIPROCESSOR * multiprocessors_of(chip)
    images = -(-n // min(n, max(1, wanted // blocks)))
    D = F.zeros((-(-n // images), groups * geometry.taps, M, C))
    G = F.reshape(g, (n * groups, M, prod(g.shape[2:])))
    conv_filters(_pixels(x, groups), G, D, geometry, groups=groups, images=images, BM=m, BN=c,
                 BK=k)
    made = F.reshape(F.sum(D, axis=0), (groups, geometry.taps, M, C))
    return F.reshape(F.transpose(made, (0, 2, 3, 1)), (groups * M, C, *window))


def _pixels(x: Tensor, groups: int) -> Tensor:
    """[images * groups, pixels, channels]: a copy, that forward and the filters' adjoint share."""
    parts = F.reshape(x, (x.shape[0] * groups, x.shape[1] // groups, prod(x.shape[2:])))
    return F.swapaxes(parts, 1, 2)


def _taps(w: Tensor, groups: int, back: bool) -> Tensor:
    """[groups * taps, filters, C], or for the adjoint [groups * taps, C, filters]."""
    each, C, taps = w.shape[0] // groups, w.shape[1], prod(w.shape[2:])
    parts = F.transpose(F.reshape(w, (groups, each, C, taps)), (0, 3, 2, 1) if back else
                        (0, 3, 1, 2))
    return F.reshape(parts, (groups * taps, *parts.shape[2:]))


def _blocks(rows: int, columns: int, depth: int) -> tuple[int, int, int]:
    """Rows and columns of a block of the result, and the depth of a step, for these extents.

    bf16 [32, 128, 56, 56], 128 filters of 3 x 3, on an H200 on 2026-11-22: the result takes 233 us
    in steps of 64 and 289 us in steps of 32, the adjoint for the images 426 us and 307 us.
    """
    m, n = (next((size for size in (16, 32, 64) if e <= size), 128) for e in (rows, columns))
    return m, n, next((size for size in (16, 32) if depth <= size), 64)


def _gathered_rules(chip: Generation) -> dict[GraphOp, Rule]:
    return {CONV: _conv, CONV_INPUT: _conv_input, CONV_FILTER: partial(_conv_filter, chip)}


__all__ = ["use_conv_kernels"]
