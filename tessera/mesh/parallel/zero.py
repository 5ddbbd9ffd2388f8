"""ZeRO: what data parallel ranks would all hold the same is split over them.

    optimizer = ts.dist.zero(ts.optim.AdamW(), stage=2, axis="dp")
    state = optimizer.init(params)                  each rank holds its part of the moments
    params, state = optimizer.update(params, grads, state, lr)

Stage 1 splits the states of the optimizer, stage 2 gradients too, stage 3 the parameters too. The
weights after a step are those of a run without it.
Rajbhandari et al. 2020, arXiv:1910.02054, section 5.
"""

from __future__ import annotations

from typing import Any, Protocol

from tessera.errors import ArgumentError
from tessera.graph import tree
from tessera.graph.op import VIEW, GraphOp, sample
from tessera.graph.operand import describe
from tessera.graph.ops.gather import stretch
from tessera.graph.trace import apply, current_builder
from tessera.tensor import Tensor

from ...lazy_dataclass import dataclass
from ..device_mesh import Mesh
from ..sharding.partitioned_steps import CONSTRAINTS
from ..tensor import need_mesh
from .fsdp import fsdp, mesh_of, parameters_of, repeated
from .matching_layouts import is_distributed, lie_as, split_over


class Optimizer(Protocol):
    """What `zero` wraps: `ts.optim.AdamW`, or anything with these two methods."""

    def init(self, params: Any) -> Any: ...

    def update(self, params: Any, grads: Any, state: Any, lr: Any) -> tuple[Any, Any]: ...


SPLIT = GraphOp(
    "zero_split",
    shape=lambda x, like, axis: x,
    ref=lambda x, like=None, axis="": x,
    vjp=lambda g, y, x, like, axis: (g, None),
    jvp=lambda ts, y, x, like, axis: ts[0],
    batch=lambda size, batched, x, like, axis: (
        apply(SPLIT, stretch(x, size, batched[0]), stretch(like, size, batched[1]), axis=axis),
        True),
    memory=VIEW,
    drops=(1,),
    samples=(sample((2, 3), (2, 3), axis="dp"),),
    doc="what belongs to a parameter, split over an axis along which that is repeated",
)
CONSTRAINTS["zero_split"] = lambda node, at: split_over(
    at[1].settled().unmarked(), node.inputs[1].aval.shape, node.attrs["axis"])


@dataclass(frozen=True)
class Zero:
    """An optimizer whose states are split over data parallel ranks. Make one with
    `ts.dist.zero`."""

    optimizer: Optimizer
    stage: int
    axis: str = "dp"

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise ArgumentError(f"zero has stages 1, 2 and 3, got {self.stage!r}",
                                hint="1: states, 2: gradients too, 3: parameters too")
        for name in ("init", "update"):
            if isinstance(self.optimizer, type) or not callable(
                    getattr(self.optimizer, name, None)):
                raise ArgumentError(f"zero wraps an optimizer, got {self.optimizer!r}",
                                    hint='ts.dist.zero(ts.optim.AdamW(), stage=2, axis="dp")')

    def shard(self, params: Any) -> Any:
        """The parameters as the training step is to get them: split over the axis at stage 3, and
        gathered where they are used (ts.dist.fsdp); before that as they are. Plain tensors among
        distributed ones, or with a mesh open, are repeated on all ranks."""
        leaves, structure = tree.flatten(params)
        parameters_of("zero", leaves, structure)
        mesh = mesh_of(leaves) or need_mesh(None)
        mesh.position(self.axis)
        if self.stage == 3:
            return fsdp(params, axis=self.axis, mesh=mesh)
        return tree.unflatten(structure, [repeated(p, mesh) for p in leaves])

    def init(self, params: Any) -> Any:
        """The state before the first step, each tensor split over the axis. No rank holds a whole
        one at any time, where the optimizer makes states that lie as their parameter does, as
        `ts.zeros_like(p)` does; what it makes on no mesh, as `ts.zeros(n)`, is put there."""
        mesh = _need_distributed(params, self.axis)
        parts = tree.map_tree(lambda p: _flagged(self._split(p, p), p), params)
        state = self.optimizer.init(parts)
        if current_builder() is None:
            state = tree.map_tree(lambda x: repeated(x, mesh), state)
        return tree.map_tree(lambda x: self._split(x, x), state)

    def update(self, params: Any, grads: Any, state: Any, lr: Any) -> tuple[Any, Any]:
        """(params, state) after one step; both lie as before. From stage 2 on each rank gets its
        part of the gradients alone. Inside `ts.jit`, together with the backward pass, that is one
        reduce_scatter; gradients that were made before have been all-reduced by then.
        """
        if self.stage > 1:
            grads = tree.map_tree(lambda p, g: g if g is None else self._split(g, p), params, grads)
        new, made = self.optimizer.update(params, grads, state, lr)
        return _as_before(new, params), _as_before(made, state)

    def _split(self, x: Any, like: Any) -> Any:
        """x split as what belongs to `like`; what is no tensor as it is."""
        both = isinstance(x, Tensor) and isinstance(like, Tensor)
        return apply(SPLIT, x, like, axis=self.axis) if both and is_distributed(x, like) else x


def zero(optimizer: Optimizer, stage: int, axis: str = "dp") -> Zero:
    """An optimizer with its states (stage 1), gradients (2) and parameters (3) split over the ranks
    of an axis.

    optimizer: `ts.optim.AdamW()`, or anything with init(params) and update(params, grads, state,
    lr)   params: a tree of distributed tensors, repeated along the axis, and of what an optimizer
    leaves as it is
    The first dimension that is not split yet is, in blocks that differ by one element at most; a
    tensor without one of as many elements as there are ranks stays whole. Stage 3: train with
    params = optimizer.shard(params).
    Sends per step and rank, for parameters of P bytes and gradients of G on n ranks: 1: gradients
    all-reduced and parameters gathered, (2 G + P)(n - 1)/n; 2: (G + P)(n - 1)/n; 3: G + 2 P, times
    that. Raises ArgumentError for another stage.
    Rajbhandari et al. 2020, arXiv:1910.02054, section 5.
    """
    return Zero(optimizer, stage, axis)


def _need_distributed(params: Any, axis: str) -> Mesh | None:
    """The mesh of the parameters, where they are not values of a trace."""
    leaves, structure = tree.flatten(params)
    chosen = parameters_of("zero", leaves, structure)
    for path, p, is_param in zip(tree.paths(structure), leaves, chosen, strict=True):
        if is_param and not is_distributed(p):
            raise ArgumentError(f"parameter {path!r} is {describe(p)}, which lies on no mesh",
                                hint="params = optimizer.shard(params) repeats on all ranks what "
                                "lies on none; ts.dist.tensor(...) makes it there")
        if is_param and p.layout is not None:
            p.layout.mesh.position(axis)
    return mesh_of(leaves)


def _as_before(new: Any, old: Any) -> Any:
    """A tree that lies as the one it replaces; what is no tensor in either is as it is."""
    def placed(x: Any, y: Any) -> Any:
        both = isinstance(x, Tensor) and isinstance(y, Tensor)
        return _flagged(lie_as(x, y), y) if both else x

    return tree.map_tree(placed, new, old)


def _flagged(x: Any, like: Any) -> Any:
    if isinstance(x, Tensor) and isinstance(like, Tensor):
        x.is_param = like.is_param
    return x


__all__ = ["Zero", "zero"]
