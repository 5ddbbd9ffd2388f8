"""Convolutions and their adjoints by the library's kernels, which unfold no windows.

Floats of 16 bits, whose matmuls are mma: gathered operands do not come by TMA, which wgmma needs to
be fast. Others are left to matmuls of unfolded windows, and so are few channels: a matmul of 3
channels and 49 taps together is full where 49 of 3 channels are not. Windows of one pixel are their
images, and unfold to no copy.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ...kernels.conv import Geometry, conv_filters, conv_images
from ...tensor import Tensor
from .. import functions as F
from ..expand import Rule, expand_by
from ..ir import Graph, Node
from ..op import GraphOp
from ..ops.conv_products import CONV, CONV_FILTER, CONV_INPUT

LEAST = 16  # channels of a group: the depth of one mma of 16 bits
GROUPS = 264  # of threads that keep a large chip busy: two for each multiprocessor of an H100


def use_conv_kernels(graph: Graph) -> Graph:
    """The graph with the convolutions that the kernels take as their launches."""
    return expand_by(graph, lambda node: RULES[node.op] if node.op in RULES and _is_taken(node)
                     else None)


def _is_taken(node: Node) -> bool:
    avals = [v.aval for v in (*node.inputs, *node.outputs)]
    if not all(isinstance(n, int) and n for a in avals for n in a.shape) or avals[0].ndim > 4:
        return False
    dtype, groups = avals[0].dtype, node.attrs["groups"]
    channels = min(a.shape[1] // groups for a in _images(node))
    return (dtype.kind == "float" and dtype.bits == 16 and channels >= LEAST
            and node.attrs["accum"].name == "f32" and prod(_window(node)) > 1)


def _window(node: Node) -> tuple[int, ...]:
    return node.attrs.get("window") or tuple(node.inputs[1].aval.shape[2:])


def _images(node: Node) -> list[Any]:
    """Those of a node's types that are images or results of a convolution."""
    first, second, out = (v.aval for v in (*node.inputs, *node.outputs))
    return [first, second] if node.op is CONV_FILTER else [first, out]


# --- launches ---------------------------------------------------------------------------------
def _conv(x: Tensor, w: Tensor, accum: Any, groups: int, **attrs: Any) -> Tensor:
    places = _results(x.shape[2:], w.shape[2:], **attrs)
    geometry = _geometry(w.shape[2:], x.shape[2:], places, **attrs)
    y = _multiplied(x, _taps(w, groups, False), geometry, groups, w.shape[0] // groups, False)
    return F.reshape(y, (x.shape[0], w.shape[0], *places))


def _conv_input(g: Tensor, w: Tensor, spatial: tuple, accum: Any, groups: int,
                **attrs: Any) -> Tensor:
    geometry = _geometry(w.shape[2:], spatial, tuple(g.shape[2:]), **attrs)
    x = _multiplied(g, _taps(w, groups, True), geometry, groups, w.shape[1], True)
    return F.reshape(x, (g.shape[0], w.shape[1] * groups, *spatial))


def _multiplied(x: Tensor, w: Tensor, geometry: Geometry, groups: int, channels: int,
                back: bool) -> Tensor:
    """[images * groups, channels, places]"""
    n, depth = x.shape[0], x.shape[1] // groups
    X = F.reshape(x, (n * groups, depth, prod(x.shape[2:])))
    Y = F.zeros((n * groups, channels, prod(geometry.images if back else geometry.results)))
    conv_images(X, w, Y, geometry, groups=groups, back=back, BM=_block(channels),
                BN=min(_block(Y.shape[2]) * 2, 128), BK=_depth(depth))
    return Y


def _conv_filter(x: Tensor, g: Tensor, window: tuple, accum: Any, groups: int,
                 **attrs: Any) -> Tensor:
    """In parts of some images each, so that there are enough groups of threads, then added."""
    geometry = _geometry(window, x.shape[2:], tuple(g.shape[2:]), **attrs)
    n, C, M = x.shape[0], x.shape[1] // groups, g.shape[1] // groups
    m, c = _block(M), _block(C)
    blocks = -(-M // m) * -(-C // c) * groups * geometry.taps
    images = -(-n // min(n, max(1, GROUPS // blocks)))
    D = F.zeros((-(-n // images), groups * geometry.taps, M, C))
    conv_filters(F.reshape(x, (n * groups, C, prod(x.shape[2:]))),
                 F.reshape(g, (n * groups, M, prod(g.shape[2:]))), D, geometry, groups=groups,
                 images=images, BM=m, BN=c, BK=_depth(prod(g.shape[2:])))
    made = F.reshape(F.sum(D, axis=0), (groups, geometry.taps, M, C))
    return F.reshape(F.transpose(made, (0, 2, 3, 1)), (groups * M, C, *window))


def _taps(w: Tensor, groups: int, back: bool) -> Tensor:
    """[groups * taps, filters, C], or for the adjoint [groups * taps, C, filters]."""
    each, C, taps = w.shape[0] // groups, w.shape[1], prod(w.shape[2:])
    parts = F.transpose(F.reshape(w, (groups, each, C, taps)), (0, 3, 2, 1) if back else
                        (0, 3, 1, 2))
    return F.reshape(parts, (groups * taps, *parts.shape[2:]))


def _results(spatial: tuple, window: tuple, stride: tuple, padding: tuple,
             dilation: tuple) -> tuple[int, ...]:
    return tuple((n + a + b - d * (k - 1) - 1) // s + 1 for n, k, s, (a, b), d in
                 zip(spatial, window, stride, padding, dilation, strict=True))


def _geometry(window: tuple, images: tuple, results: tuple, stride: tuple, padding: tuple,
              dilation: tuple) -> Geometry:
    """Of one axis as of two, the first of one pixel."""
    first = (1,) * (2 - len(window))
    before = (0,) * len(first) + tuple(a for a, _ in padding)
    return Geometry(first + tuple(window), first + stride, first + dilation, before,
                    first + tuple(images), first + results)


def _block(n: int) -> int:
    """Rows or columns of a block for n of them."""
    return next((size for size in (16, 32, 64) if n <= size), 128)


def _depth(n: int) -> int:
    return next((size for size in (16, 32) if n <= size), 64)


RULES: dict[GraphOp, Rule] = {CONV: _conv, CONV_INPUT: _conv_input, CONV_FILTER: _conv_filter}

__all__ = ["use_conv_kernels"]
