"""Fully sharded data parallel: parameters split over the data parallel ranks, whole only in use.

    params = ts.dist.fsdp(params, axis="dp", mesh=mesh)

Each use of a parameter gathers it and frees it again, in the backward pass too, and its gradient
comes as a part. On GPUs some stay from one use to the next (sharding/collective_order.py). The mark
is in the layout of the tensor, so it passes through ts.jit and ts.grad.
Zhao et al. 2023, arXiv:2304.11277, sections 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tessera.errors import ArgumentError
from tessera.graph import tree
from tessera.runtime.arrays import is_array
from tessera.tensor import Tensor, as_tensor

from ..device_mesh import Mesh
from ..layout import Layout, replicated
from ..tensor import distribute, need_mesh
from .matching_layouts import split_over


def fsdp(params: Any, axis: str = "dp", mesh: Mesh | None = None) -> Any:
    """Parameters split over an axis: gathered just in time for each use, and freed after it.

    params: a tree of tensors; plain ones must be the same on all ranks   mesh: of plain ones
    (default: that of the distributed ones, or the open one)
    Parameters are what `ts.param` marks, or all float tensors where it marks none. One is split
    along its first dimension that is not split yet and has as many elements as the axis has ranks;
    one without such a dimension stays whole. Other plain tensors, as tables of integers, are
    repeated on the mesh; other leaves stay as they are.
    On GPUs up to 4 GiB of what was gathered stay until the next use in a step. Between hosts those
    of up to 256 KiB come together, 4 MiB in one message, and stay until the next one.
    Sends per step P (n - 1)/n bytes forward, the same backward but for what has stayed, and that of
    the gradients.
    Raises AxisError for an axis that the mesh does not have, ArgumentError for a tree without
    parameters, and for a leaf that may be meant as one: an array or a float where none is marked.
    """
    leaves, structure = tree.flatten(params)
    chosen = parameters_of("fsdp", leaves, structure)
    known = mesh_of(leaves, mesh)
    return tree.unflatten(structure, [
        _split(p, axis, known) if is_param else repeated(p, known)
        for p, is_param in zip(leaves, chosen, strict=True)])


def parameters_of(what: str, leaves: Sequence[Any], structure: tree.TreeDef) -> list[bool]:
    """Of each leaf, whether it is trained: what is marked, as for optimizers, or every float tensor
    where nothing is."""
    floats = [isinstance(p, Tensor) and p.dtype.kind == "float" for p in leaves]
    marked = [f and p.is_param for f, p in zip(floats, leaves, strict=True)]
    if any(marked):
        return marked
    for path, p in zip(tree.paths(structure), leaves, strict=True):
        if isinstance(p, float) or (is_array(p) and not isinstance(p, Tensor) and
                                    as_tensor(p).dtype.kind == "float"):
            raise ArgumentError(f"{what}: parameter {path!r} is {type(p).__name__}, not a tensor",
                                hint="ts.param(x) makes a parameter of an array, and where some "
                                "are marked so, other leaves stay as they are")
    if not any(floats):
        raise ArgumentError(f"{what}: there are no parameters among the {len(leaves)} leaves",
                            hint="parameters are float tensors: ts.param(x) makes one of an array")
    return floats


def mesh_of(leaves: Sequence[Any], mesh: Mesh | None = None) -> Mesh | None:
    """The mesh of a tree's plain tensors: the one given, or that of the distributed ones."""
    return mesh or next((p.layout.mesh for p in leaves
                         if isinstance(p, Tensor) and p.layout is not None), None)


def repeated(leaf: Any, mesh: Mesh | None) -> Any:
    """A plain tensor on all ranks of a mesh, so that the first step gets what later ones do;
    another leaf as it is."""
    if not isinstance(leaf, Tensor) or leaf.layout is not None or leaf.scale is not None:
        return leaf
    return distribute(leaf, replicated(need_mesh(mesh), leaf.ndim))


def _split(p: Tensor, axis: str, mesh: Mesh | None) -> Tensor:
    layout: Layout = p.layout or replicated(need_mesh(mesh), p.ndim)
    layout = split_over(layout.unmarked(), tuple(p.shape), axis)
    if layout.dim_of(axis) is not None:
        layout = replace(layout, regather=(axis,))
    return distribute(p, layout)


__all__ = ["fsdp"]
