"""Ops that say how a distributed value is to lie; the value itself stays the same.

`ts.shard(x, spec)` puts a value in a layout. A collective called by hand on a distributed tensor
is such a constraint too: the tensor is the whole one on every rank, so all_gather can only mean
"not split over that axis", reduce_scatter "split over it", all_reduce "added up". Gradients are
aligned with what they are gradients of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tessera import hooks
from tessera.errors import ArgumentError
from tessera.graph import functions as F
from tessera.graph.ir import Node
from tessera.graph.op import VIEW, GraphOp, sample
from tessera.graph.operand import dequantized, public
from tessera.graph.trace import apply, current_builder
from tessera.tensor import Tensor

from ..collectives.record import COLLECTIVES, Collective
from ..device_mesh import Mesh
from ..layout import Layout, Split
from ..spec import ShardSpec
from ..tensor import distribute, need_mesh, resolve
from .partitioned_steps import CONSTRAINTS


# --- shard ---------------------------------------------------------------------------------------
def _batched_layout(layout: Layout) -> Layout:
    """The layout of every element of a batch, whose new first dimension is whole."""
    return replace(layout, splits=(Split(), *layout.splits))


SHARD = GraphOp(
    "shard",
    shape=lambda x, layout: x,
    ref=lambda x, layout: x,
    vjp=lambda g, y, x, layout: (apply(LIKE, g, x),),
    jvp=lambda ts, y, x, layout: apply(SHARD, ts[0], layout=layout),
    batch=lambda size, batched, x, layout: (
        apply(SHARD, x, layout=_batched_layout(layout)), True),
    memory=VIEW,
    samples=(sample((2, 3), layout=Layout(Mesh(("cpu:0",), ("dp",), (1,)),
                                          (Split(("dp",)), Split()))),),
    doc="a value in a layout of its mesh",
)
CONSTRAINTS["shard"] = lambda node, at: node.attrs["layout"]


@public
def shard(x: Any, layout: Any, mesh: Any = None) -> Tensor:
    """x in another layout: a constraint inside a compiled function, a move of its parts outside.

    x: a distributed tensor, or a value made of some
    layout: as for `ts.dist.tensor`, or "replicate": the whole on every rank, as a plain tensor is
    Sends what ranks lack, nothing when they have it. Raises ArgumentError where no mesh is known.
    """
    x = dequantized(x)
    builder = getattr(x, "builder", None)
    known = mesh or (x.layout.mesh if x.layout is not None else getattr(builder, "mesh", None))
    if layout == "replicate":
        if known is None:
            return x
        layout = ShardSpec(replicate=True)
    found = layout if isinstance(layout, Layout) else \
        resolve(layout, need_mesh(known), x.shape, x.type)
    if x.layout is None and builder is None:
        return distribute(x, found)
    return apply(SHARD, x, layout=found)


hooks.shard.fill(shard)


# --- like ----------------------------------------------------------------------------------------
LIKE = GraphOp(
    "shard_like",
    shape=lambda g, x: g,
    ref=lambda g, x=None: g,  # a view is made of its first operand alone
    vjp=lambda g, y, a, x: (g, None),
    jvp=lambda ts, y, a, x: ts[0],
    batch=lambda size, batched, g, x: (
        apply(LIKE, g, x) if all(batched) else g, batched[0]),
    memory=VIEW,
    drops=(1,),
    samples=(sample((2, 3), (2, 3)),),
    doc="a value in the layout of another",
)
CONSTRAINTS["shard_like"] = lambda node, at: at[1].settled().unmarked()


def _align(g: Tensor, x: Tensor) -> Tensor:
    """g in the layout of x. Sends nothing: what is no distributed tensor all ranks have whole."""
    builder = getattr(g, "builder", None)
    if builder is None and g.layout is None and x.layout is not None:
        return distribute(g, x.layout.settled().unmarked())
    return apply(LIKE, g, x) if getattr(builder, "mesh", None) is not None else g


hooks.align.fill(_align)


# --- collectives on whole tensors ----------------------------------------------------------------
def _constrained(node: Node, at: Sequence[Layout]) -> Layout:
    """The layout that a collective called by hand leaves its operand in."""
    attrs = node.attrs
    whole = COLLECTIVES[attrs["kind"]].on_whole
    assert whole is not None  # `constrain` refuses the others
    return whole.layout(at[0].settled(), attrs["axes"], attrs["dim"], attrs["concat"])


CONSTRAINTS["constrain"] = _constrained


def _constrain_batch(size: Any, batched: tuple, x: Tensor, **attrs: Any) -> tuple:
    dims = {k: attrs[k] + (attrs[k] >= 0) for k in ("dim", "concat")}
    return apply(CONSTRAIN, x, **{**attrs, **dims}), True


def _constrain_vjp(g: Tensor, y: Tensor, x: Tensor, *, kind: str, dim: int, concat: int,
                   **attrs: Any) -> tuple:
    """The adjoint's constraint; what moves a split from one dimension to another takes it back."""
    which = COLLECTIVES[kind]
    assert which.on_whole is not None
    if "split" in which.dims:
        dim, concat = concat, dim
    return (apply(CONSTRAIN, g, kind=which.on_whole.adjoint, dim=dim, concat=concat, **attrs),)


CONSTRAIN = GraphOp(
    "constrain",
    shape=lambda x, **attrs: x,
    ref=lambda x, **attrs: x,
    vjp=_constrain_vjp,
    jvp=lambda ts, y, x, **attrs: (
        None if ts[0] is None else apply(CONSTRAIN, ts[0], **attrs)),
    batch=_constrain_batch,
    memory=VIEW,
    samples=(sample((2, 3), kind="all_reduce", axes=("dp",), dim=-1, concat=-1),
             sample((2, 3), kind="all_gather", axes=("dp", "tp"), dim=-1, concat=-1),
             sample((2, 3), kind="reduce_scatter", axes=("dp",), dim=0, concat=-1)),
    doc="a collective called by hand on a distributed value: where it is to lie",
)


def constrain(kind: str, x: Tensor, axes: Sequence[str], *, dim: int = -1, concat: int = -1
              ) -> Tensor:
    """A collective called by hand on a distributed value. Raises ArgumentError for those that say
    nothing about a whole tensor."""
    if COLLECTIVES[kind].on_whole is None:
        raise ArgumentError(f"{kind} of a distributed tensor: it is the same whole on all ranks",
                            hint="x.local is this rank's part; or ts.shard(x, spec)")
    return apply(CONSTRAIN, x, kind=kind, axes=tuple(axes), dim=dim, concat=concat)


def _in_global_view(which: Collective, x: Tensor, axis: Any, mesh: Any, /, *, dtype: Any = None,
                    key: Any = None, index: Any = None, dim: int = -1, op: str = "sum",
                    split: int = 0, concat: int = -1, **attrs: Any) -> Tensor:
    """A collective of collectives/functions.py on a value that is whole: see `constrain`."""
    known = x.layout.mesh if x.layout is not None else getattr(current_builder(), "mesh", mesh)
    axes = known.axes if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
    for name in axes:
        known.position(name)
    given = {"dim": dim, "op": op, "split": split, "concat": concat, **attrs}
    if which.on_whole is not None:
        which.check(tuple(x.shape), known.size(axes),
                    **{name: given[name] for name in which.samples[0].attrs})
    at = split if "split" in which.dims else dim
    y = constrain(which.name, x, axes, dim=at, concat=concat)
    return y if dtype is None else F.cast(y, dtype)


hooks.global_view.fill(_in_global_view)


__all__ = ["CONSTRAIN", "LIKE", "SHARD", "constrain", "shard"]
