"""Mixture of experts: each token goes to the one or few experts that its router prefers.

    y = ts.moe(x, router, (w1, w2), axis="ep", capacity_factor=1.25, top_k=2)

On a mesh the experts lie on the ranks of an axis, and so do the tokens: an all_to_all takes tokens
to their experts, another brings the results back. Without a mesh the same function runs in one
process.
Shazeer et al. 2017, arXiv:1701.06538; Lepikhin et al. 2020 (GShard), arXiv:2006.16668; Fedus et al.
2021 (Switch), arXiv:2101.03961.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tessera.ad.vmap import vmap
from tessera.dims import show_shape, size_of
from tessera.errors import ArgumentError, ShapeError
from tessera.graph import functions as F
from tessera.graph import tree
from tessera.graph.operand import convert, dequantized, public, store, to_compute
from tessera.graph.trace import apply, current_builder
from tessera.tensor import Tensor

from ...lazy_dataclass import dataclass
from ..device_mesh import Mesh
from ..layout import Layout, Split
from ..sharding.constraints import SHARD
from .token_slots import fill_slots, read_slots

Expert = Callable[[Any, Tensor], Tensor]


@public
def moe(x: Any, router: Any, experts: Any, axis: str = "ep", *, top_k: int = 1,
        capacity_factor: float | None = 1.25, expert: Callable | None = None,
        data: str | Sequence[str] = (), groups: int | None = None, balance: bool = False) -> Any:
    """y_t = sum over the chosen e of g_te expert_e(x_t), where g_t = softmax(x_t router).

    x: [..., D] tokens   router: [D, E]   y: [..., Dv] of x's type
    experts   (w1 [E, D, F], w2 [E, F, Dv]): expert_e(x) = gelu(x w1_e) w2_e; or any tree of
              tensors whose first extent is E, with `expert`
    expert    f(the tree of one expert, its tokens [C, D]) -> [C, Dv]; where fewer than C tokens
              came, the rest are copies of one of the group's, whose results nobody reads
    top_k     experts of a token. With 1 its result is weighted by its gate, as in Switch; with more
              the gates of the chosen are divided by their sum, as in GShard
    capacity_factor  an expert takes ceil(factor top_k S / E) of the S tokens of a group, first
              choices first and then in order; for the others its result is 0, without an error.
              None: all of them
    groups    into how many groups of equal size the tokens are cut, in order; each has its own
              capacity. Default: one per rank that holds tokens
    axis, data  the mesh axes of the experts, and those that split the tokens further
    balance   (y, loss) instead: E sum_e f_e p_e, with f_e the part of the tokens whose first choice
              is e, and p_e the mean gate of e over all tokens; 1 when all experts get the same
    A pass sends the E C rows of a group to their experts and back, (n - 1)/n of them to other
    ranks, in x's type. Gates are computed in f32.
    Raises ShapeError, ArgumentError, AxisError for an axis that the mesh does not have.
    Fedus et al. 2021, arXiv:2101.03961, eqs. 2 to 6; Lepikhin et al. 2020, arXiv:2006.16668,
    algorithm 1.
    """
    tokens, weight = dequantized(x), dequantized(router)
    params, run = _experts(experts, expert)
    E = _check(tokens, weight, params, top_k, capacity_factor)
    place = _token_axes((tokens, weight, *tree.flatten(params)[0]), axis, data)
    G = place.groups if groups is None else groups
    flat, valid = _grouped(tokens, G)  # [G, S, D], [G, S, 1] or None
    flat = place.tokens(flat)
    gates = F.softmax(F.matmul(to_compute(flat), to_compute(weight)), axis=-1)
    S = flat.shape[1]
    capacity = S if capacity_factor is None else \
        min(S, max(1, math.ceil(capacity_factor * top_k * S / E)))
    route = _route(gates, valid, top_k, capacity)
    sent = F.broadcast_to(F.expand_dims(flat, 2), (G, S, top_k, flat.shape[-1]))
    held = fill_slots(sent, route.slots, E * capacity)  # [G, E C, D]
    if expert is not None:
        held = _with_tokens(held, route.counts, flat, capacity)
    made = _on_experts(held, params, run, place, capacity)  # [G, E C, Dv]
    back = to_compute(read_slots(made, route.slots))  # [G, S, K, Dv]
    y = F.sum(back * F.expand_dims(route.weights, -1), axis=2)
    y = store(_ungrouped(y, tokens), tokens.type)
    return (y, _balance(gates, route.first, valid, tokens)) if balance else y


# --- arguments -----------------------------------------------------------------------------------
def _experts(experts: Any, expert: Expert | None) -> tuple[Any, Expert]:
    if expert is not None:
        return tree.map_tree(dequantized, experts), expert
    pair = isinstance(experts, tuple | list) and len(experts) == 2
    if not pair or any(dequantized(w).ndim != 3 for w in experts):
        raise ArgumentError("experts are two weights, w1 [E, D, F] and w2 [E, F, Dv], or a tree of "
                            "tensors with a function",
                            hint="ts.moe(x, router, params, expert=lambda p, x: x @ p)")
    return tuple(map(dequantized, experts)), _two_layers


def _two_layers(weights: tuple, x: Tensor) -> Tensor:
    w1, w2 = weights
    return F.matmul(F.gelu(F.matmul(x, w1)), w2)


def _check(x: Tensor, router: Tensor, params: Any, top_k: int, factor: float | None) -> int:
    """The number of experts."""
    if x.ndim < 2 or router.ndim != 2 or x.shape[-1] != router.shape[0]:
        raise ShapeError(f"tokens [..., D] and a router [D, E], got {show_shape(x.shape)} and "
                         f"{show_shape(router.shape)}")
    if not all(isinstance(n, int) for n in (*x.shape, *router.shape)):
        raise ShapeError(f"the capacity of experts follows from extents: {show_shape(x.shape)} "
                         "must be numbers", hint="trace with tensors or types of known extents")
    E: int = router.shape[1]
    leaves, structure = tree.flatten(params)
    for path, p in zip(tree.paths(structure), leaves, strict=True):
        if p.ndim < 1 or p.shape[0] != E:
            raise ShapeError(f"experts[{path or ''}] is {show_shape(p.shape)}; its first extent "
                             f"must be the number of experts, {E}")
    if not 1 <= top_k <= E:
        raise ArgumentError(f"top_k={top_k} of {E} experts")
    if factor is not None and not factor > 0:
        raise ArgumentError(f"capacity_factor must be positive, got {factor}",
                            hint="None: experts take all tokens that choose them")
    return E


# --- where things lie ------------------------------------------------------------------------
@dataclass(frozen=True)
class _TokenAxes:
    """Groups of tokens lie on the data axes and the experts' axis, buffers of experts on that."""

    mesh: Mesh | None
    axis: str
    data: tuple[str, ...]

    @property
    def groups(self) -> int:
        return 1 if self.mesh is None else self.mesh.size((*self.data, self.axis))

    def tokens(self, x: Tensor) -> Tensor:
        """[G, ...] with G split over all axes."""
        return self._lay(x, (*self.data, self.axis))

    def buffers(self, x: Tensor) -> Tensor:
        """[G, E, ...] with G split over the data axes, E over that of the experts."""
        return self._lay(x, self.data, (self.axis,))

    def _lay(self, x: Tensor, *axes: tuple[str, ...]) -> Tensor:
        if self.mesh is None:
            return x
        splits = tuple(map(Split, axes)) + (Split(),) * (x.ndim - len(axes))
        return apply(SHARD, x, layout=Layout(self.mesh, splits))


def _token_axes(operands: Sequence[Tensor], axis: str, data: str | Sequence[str]) -> _TokenAxes:
    """The mesh of distributed operands, or of the function that is traced; none in other
    programs."""
    mesh = next((x.layout.mesh for x in operands if x.layout is not None),
                getattr(current_builder(), "mesh", None))
    axes = (data,) if isinstance(data, str) else tuple(data)
    if mesh is not None:
        for name in (axis, *axes):
            mesh.position(name)
        if len({axis, *axes}) != 1 + len(axes):
            raise ArgumentError(f"axis={axis!r} and data={axes} name an axis twice")
    return _TokenAxes(mesh, axis, axes)


def _grouped(x: Tensor, G: int) -> tuple[Tensor, Tensor | None]:
    """[G, S, D], with copies of the last token behind it where they do not divide, and then
    [G, S, 1]: 1 for tokens."""
    D, T = x.shape[-1], int(size_of(x.shape[:-1]))
    if isinstance(G, bool) or not isinstance(G, int) or G < 1:
        raise ArgumentError(f"groups is a number of groups, at least 1, got {G!r}")
    S = -(-T // G)
    flat, more = F.reshape(x, (T, D)), G * S - T
    if not more:
        return F.reshape(flat, (G, S, D)), None
    flat = F.concatenate([flat, *[F.stop_gradient(flat[-1:])] * more])
    valid = F.cast(F.less(F.arange(G * S), T), "f32")
    return F.reshape(flat, (G, S, D)), F.reshape(valid, (G, S, 1))


def _ungrouped(y: Tensor, x: Tensor) -> Tensor:
    G, S, D = y.shape
    flat, T = F.reshape(y, (G * S, D)), int(size_of(x.shape[:-1]))
    flat = flat if G * S == T else flat[:T]
    return F.reshape(flat, (*x.shape[:-1], D))


# --- routing -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Route:
    """Which slot each choice of each token takes, e C + its place there; E C when it has none.

    slots: [G, S, K] int64   weights: [G, S, K]   first: [G, S, E], 1 at the first choice
    counts: [G, 1, E], tokens that chose each expert, those without a place too
    """

    slots: Tensor
    weights: Tensor
    first: Tensor
    counts: Tensor


def _route(gates: Tensor, valid: Tensor | None, top_k: int, capacity: int) -> _Route:
    """First choices take their places before second ones, tokens in order."""
    E = gates.shape[-1]
    left, taken = F.stop_gradient(gates), None
    slots, weights, firsts = [], [], []
    for _ in range(top_k):
        chosen = F.argmax(left, axis=-1)  # [G, S]
        mask = F.one_hot(chosen, E, gates.type)  # [G, S, E]
        left = F.where(mask > 0, -1.0, left)
        weights.append(F.sum(gates * mask, axis=-1))
        mask = mask if valid is None else mask * valid
        before = F.cumsum(mask, axis=1) - mask
        before = before if taken is None else before + taken
        count = F.sum(mask, axis=1, keepdims=True)
        taken = count if taken is None else taken + count
        at = F.cast(F.sum(before * mask, axis=-1), "int64")
        goes = F.logical_and(at < capacity, F.sum(mask, axis=-1) > 0)
        slots.append(F.where(goes, chosen * capacity + at, E * capacity))
        firsts.append(mask)
    gate = F.stack(weights, axis=-1)
    if top_k > 1:
        gate = gate / F.sum(gate, axis=-1, keepdims=True)
    assert taken is not None  # top_k is at least 1
    return _Route(F.stack(slots, axis=-1), gate, firsts[0], taken)


def _with_tokens(held: Tensor, counts: Tensor, flat: Tensor, capacity: int) -> Tensor:
    """A token of the group in place of the zeros of each empty slot: an expert that divides by the
    norm of a row would make NaN of those, and the gradient of its weights 0 times that."""
    G, slots, D = held.shape
    E = slots // capacity
    empty = F.reshape(F.arange(capacity), (1, 1, capacity)) >= F.reshape(counts, (G, E, 1))
    return F.where(F.reshape(empty, (G, slots, 1)), F.stop_gradient(flat[:, :1]), held)


def _on_experts(held: Tensor, params: Any, run: Expert, place: _TokenAxes, capacity: int) -> Tensor:
    """Every expert on its slots of all groups.   [G, E C, D] -> [G, E C, Dv]"""
    G, slots, D = held.shape
    E = slots // capacity
    there = place.buffers(F.reshape(held, (G, E, capacity, D)))
    there = F.reshape(F.transpose(there, (1, 0, 2, 3)), (E, G * capacity, D))
    made = vmap(run)(params, there)  # [E, G C, Dv]
    if made.ndim != 3 or tuple(made.shape[:2]) != (E, G * capacity):
        raise ShapeError(f"an expert gives {show_shape(made.shape[1:])} for tokens "
                         f"{show_shape((G * capacity, D))}, not one row each")
    made = convert(made, held.type) if made.dtype.kind == "float" else made
    made = F.reshape(made, (E, G, capacity, made.shape[-1]))
    made = place.buffers(F.transpose(made, (1, 0, 2, 3)))
    return place.tokens(F.reshape(made, (G, slots, made.shape[-1])))


def _balance(gates: Tensor, first: Tensor, valid: Tensor | None, x: Tensor) -> Tensor:
    T, E = int(size_of(x.shape[:-1])), gates.shape[-1]
    gates = gates if valid is None else gates * valid
    f = F.sum(F.stop_gradient(first), axis=(0, 1)) / T
    return E * F.sum(f * (F.sum(gates, axis=(0, 1)) / T))


__all__ = ["moe"]
