"""Convolutions of channels by filters of their own, and their adjoints, in launches.

Images [N, C, H, W] are transposed in front and results behind, as where copies unfold images
(window_kernels.py), with whose transposes these meet and cancel.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from ....kernels.cards import multiprocessors_of
from ....kernels.conv import Geometry
from ....kernels.depthwise import (
    depthwise_backward,
    depthwise_forward,
    depthwise_weights,
    row_parts,
    strips_of,
)
from ....numerics import as_type
from ....runtime.generations import Generation
from ....tensor import Tensor
from ....tile.ir.schedule import Schedule
from ... import functions as F
from ...expand import Rule
from ...ir import Node
from ...op import GraphOp
from ...ops.conv_products import CONV, CONV_FILTER, CONV_INPUT, CONVOLUTIONS
from .window_kernels import geometry_of, images_of, pixels, results_of

F32 = as_type("f32")
BLOCK = 1024  # elements
MOST_CHANNELS = 64  # of a block
MOST_COLUMNS = 32  # of a window, which are unrolled
MANY, NARROW = 3, Schedule(warps=8)  # parts of a row, of which threads have half as many channels
GROUPS_PER_MULTIPROCESSOR = 8  # that add up filters


def is_depthwise(node: Node) -> bool:
    """Whether each group of a convolution, or of an adjoint of one, has one channel."""
    if node.op not in CONVOLUTIONS:
        return False
    avals = [v.aval for v in (*node.inputs, *node.outputs)]
    if not all(isinstance(n, int) and n for a in avals for n in a.shape) or avals[0].ndim > 4:
        return False
    dtype, images = avals[0].dtype, avals[2 if node.op is CONV_INPUT else 0]
    window = node.attrs.get("window") or avals[1].shape[2:]
    return (1 < node.attrs["groups"] == images.shape[1] and window[-1] <= MOST_COLUMNS
            and dtype.name in ("f16", "bf16", "f32") and node.attrs["accum"] is F32.dtype)


def forward(x: Tensor, w: Tensor, accum: Any, groups: int, rounds: Any = F32, **attrs: Any
            ) -> Tensor:
    places = results_of(x.shape[2:], w.shape[2:], **attrs)
    geometry = geometry_of(tuple(w.shape[2:]), tuple(x.shape[2:]), places, **attrs)
    Y = _forward(_repeated(x, w.shape[0] // groups), w, geometry, x.shape[0], rounds)
    return images_of(Y, (x.shape[0], *places))


def _forward(X: Tensor, w: Tensor, geometry: Geometry, images: int, result: Any) -> Tensor:
    """[places, filters]"""
    Y = F.zeros((images * prod(geometry.results), w.shape[0]), result)
    parts = row_parts(geometry)
    kernel = depthwise_forward if len(parts) < MANY else depthwise_forward.with_schedule(NARROW)
    kernel(X, _taps(w), Y, geometry, parts, strips_of(geometry), _strips(images, geometry),
           **_block(w.shape[0]))
    return Y


def _strips(images: int, geometry: Geometry) -> int:
    return images * geometry.results[0] * strips_of(geometry)


def backward(g: Tensor, w: Tensor, spatial: tuple, accum: Any, groups: int, rounds: Any = F32,
             **attrs: Any) -> Tensor:
    geometry = geometry_of(tuple(w.shape[2:]), spatial, tuple(g.shape[2:]), **attrs)
    each = w.shape[0] // groups
    result = rounds if each == 1 else F32
    if prod(geometry.stride) == 1:
        w = F.flip(w, tuple(range(2, w.ndim)))
        D = _forward(pixels(g), w, geometry.backwards, g.shape[0], result)
    else:
        D = F.zeros((g.shape[0] * prod(spatial), w.shape[0]), result)
        depthwise_backward(pixels(g), _taps(w), D, geometry, **_block(w.shape[0]))
    if each > 1:
        D = F.cast(F.sum(F.reshape(D, (D.shape[0], groups, each)), axis=-1), rounds)
    return images_of(D, (g.shape[0], *spatial))


def weights(chip: Generation, x: Tensor, g: Tensor, window: tuple, accum: Any, groups: int,
            **attrs: Any) -> Tensor:
    """In parts of the places, then added."""
    geometry = geometry_of(tuple(window), tuple(x.shape[2:]), tuple(g.shape[2:]), **attrs)
    Q, C, block = _strips(g.shape[0], geometry), g.shape[1], _block(g.shape[1])
    wanted = GROUPS_PER_MULTIPROCESSOR * multiprocessors_of(chip)
    parts = max(1, wanted // (-(-C // block["BN"]) * geometry.window[0]))
    depth = -(-Q // (parts * block["BM"])) * block["BM"]
    X, G, made = _repeated(x, C // groups), pixels(g), list[Tensor]()
    for part in row_parts(geometry):
        taps = geometry.window[0], len(part.reads[0])
        D = F.zeros((-(-Q // depth), prod(taps), C))
        depthwise_weights(X, G, D, geometry, part, strips_of(geometry), Q, depth, **block)
        made.append(F.reshape(F.sum(D, axis=0), (*taps, C)))
    w = made[0] if len(made) == 1 else F.concatenate(made, axis=1)
    return F.reshape(F.moveaxis(w, -1, 0), (C, 1, *window))


def _repeated(x: Tensor, each: int) -> Tensor:
    """[N H W, C each]: channels as often as filters read them."""
    X = pixels(x)
    return X if each == 1 else F.repeat(X, each, 1)


def _taps(w: Tensor) -> Tensor:
    """[O, 1, KH, KW] as [KH KW, O]"""
    return F.transpose(F.reshape(w, (w.shape[0], prod(w.shape[2:]))))


def _block(channels: int) -> dict[str, int]:
    columns = min(MOST_CHANNELS, max(8, 1 << (channels - 1).bit_length()))
    return {"BM": BLOCK // columns, "BN": columns}


def depthwise_rules(chip: Generation) -> dict[GraphOp, Rule]:
    return {CONV: forward, CONV_INPUT: backward, CONV_FILTER: partial(weights, chip)}


__all__ = ["depthwise_rules", "is_depthwise"]
