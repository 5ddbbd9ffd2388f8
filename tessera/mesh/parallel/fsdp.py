"""Fully sharded data parallel: parameters split over the data parallel ranks, whole only in use.

    params = ts.dist.fsdp(params, axis="dp", mesh=mesh)

Each use of a parameter gathers it and frees it again, in the backward pass too, and its gradient
comes as a part. On GPUs some stay from one use to the next (sharding/collective_order.py). The mark
is in the layout of the tensor, so it passes through ts.jit and ts.grad.
Zhao et al. 2023, arXiv:2304.11277, sections 3.2 and 3.3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tessera.errors import ArgumentError
from tessera.graph import tree
from tessera.tensor import Tensor

from ..device_mesh import Mesh
from ..layout import Layout, replicated
from ..tensor import distribute, need_mesh
from .matching_layouts import split_over


def fsdp(params: Any, axis: str = "dp", mesh: Mesh | None = None) -> Any:
    """Parameters split over an axis: gathered just in time for each use, and freed after it.

    params: a tree of tensors; plain ones must be the same on all ranks   mesh: of plain ones
    (default: that of the distributed ones, or the open one)
    A parameter is split along its first dimension that is not split yet and has as many elements
    as the axis has ranks; one without such a dimension stays whole.
    On GPUs up to 4 GiB of what was gathered stay until the next use in a step.
    Sends per step P (n - 1)/n bytes forward, the same backward but for what has stayed, and that of
    the gradients.
    Raises AxisError for an axis that the mesh does not have.
    """
    leaves, structure = tree.flatten(params)
    for path, p in zip(tree.paths(structure), leaves, strict=True):
        if not isinstance(p, Tensor):
            raise ArgumentError(f"fsdp: parameter {path!r} is {type(p).__name__}, not a tensor",
                                hint="ts.param(x) makes a parameter of an array")
    known = mesh or next((p.layout.mesh for p in leaves if p.layout is not None), None)
    return tree.unflatten(structure, [_split(p, axis, known) for p in leaves])


def _split(p: Tensor, axis: str, mesh: Mesh | None) -> Tensor:
    layout: Layout = p.layout or replicated(need_mesh(mesh), p.ndim)
    layout = split_over(layout.unmarked(), tuple(p.shape), axis)
    if layout.dim_of(axis) is not None:
        layout = replace(layout, regather=(axis,))
    return distribute(p, layout)


__all__ = ["fsdp"]
