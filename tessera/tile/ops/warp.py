"""Warp collectives: shuffles, votes, reductions and scans over the 32 lanes of a warp.

All lanes of a warp must arrive together; a group whose size is no multiple of 32 has a last,
smaller warp.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.numerics import DType, bool_, uint32
from tessera.tile.builder import rules
from tessera.tile.ir.errors import DivergenceError, RuleError
from tessera.tile.ir.op_record import declare
from tessera.tile.ir.types import Scalar, TileType
from tessera.tile.ops.ids import WARP

KINDS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def _require_warps(m: Any, op: Any) -> None:
    """Every warp arrives whole or not at all."""
    mask = m.mask
    if mask is None or mask.shape[1] == 1:
        return
    for start in range(0, m.lanes, WARP):
        part = mask[:, start:start + WARP]
        if (part.any(axis=1) & ~part.all(axis=1)).any():
            raise DivergenceError(f"{op.name} needs all lanes of a warp, but some are elsewhere",
                                  where=op.where, hint="move it out of the branch, and mask its "
                                  "operand instead: ts.tile.where(c, x, 0.0)")


def _lanes(m: Any, x: Any) -> np.ndarray:
    return np.broadcast_to(x, (np.shape(x)[0], m.lanes))


def _scalar(types: Any, what: str) -> Scalar:
    if not all(isinstance(t, Scalar) for t in types):
        raise RuleError(f"{what} exchanges numbers of lanes, got {', '.join(map(str, types))}",
                        "of a tile: ts.tile.row_sum and the like")
    return Scalar(types[0].dtype, False)


def _shuffle(name: str, doc: str, source: Any) -> None:
    def meaning(m: Any, op: Any, x: Any, lane: Any) -> Any:
        _require_warps(m, op)
        full = _lanes(m, x)
        own = m.lane_ids().astype(np.int64)
        base = own // WARP * WARP
        size = np.minimum(WARP, m.lanes - base)
        at = np.broadcast_to(source(own - base, np.asarray(lane, np.int64), size),
                             np.broadcast_shapes(full.shape, np.shape(lane)))
        ok = (at >= 0) & (at < size)
        index = np.where(ok, base + at, own)
        wide = np.broadcast_to(full, index.shape)
        return np.take_along_axis(wide, index, axis=1)

    meaning.__doc__ = doc
    declare(rule=lambda types, attrs: _scalar(types[:1], name), run=True, name=name)(meaning)


_shuffle("shuffle", "x of the given lane of the warp.", lambda own, lane, n: lane % n)
_shuffle("shuffle_down", "x of the lane that many further; its own past the end.",
         lambda own, lane, n: own + lane)
_shuffle("shuffle_up", "x of the lane that many before; its own before the start.",
         lambda own, lane, n: own - lane)
_shuffle("shuffle_xor", "x of the lane whose number differs in these bits.",
         lambda own, lane, n: own ^ lane)


def _by_warp(m: Any, full: np.ndarray, f: Any) -> np.ndarray:
    parts = [np.broadcast_to(f(full[:, s:s + WARP]), full[:, s:s + WARP].shape)
             for s in range(0, m.lanes, WARP)]
    return np.concatenate(parts, axis=1)


def _reduction(kind: str, word: str) -> None:
    def meaning(m: Any, op: Any, x: Any) -> Any:
        _require_warps(m, op)
        return _by_warp(m, _lanes(m, x), lambda p: KINDS[kind].reduce(p, axis=1, keepdims=True))

    meaning.__doc__ = f"The {word} of x over the warp, in every lane."
    declare(rule=lambda types, attrs: _scalar(types, f"warp_{kind}"), run=True,
            name=f"warp_{kind}")(meaning)


for _kind, _word in (("sum", "sum"), ("max", "largest"), ("min", "smallest")):
    _reduction(_kind, _word)


@declare(rule=lambda types, attrs: _scalar(types, "warp_scan"), run=True)
def warp_scan(m: Any, op: Any, x: Any) -> Any:
    """Sums of x over the lanes of the warp up to this one."""
    _require_warps(m, op)
    return _by_warp(m, _lanes(m, x), lambda p: np.cumsum(p, axis=1, dtype=p.dtype))


def _group(kind: str, word: str) -> None:
    def meaning(m: Any, op: Any, x: Any) -> Any:
        return KINDS[kind].reduce(_lanes(m, x), axis=1, keepdims=True)

    meaning.__doc__ = f"The {word} of x over all lanes of the group: a uniform number."
    declare(rule=lambda types, attrs: Scalar(_scalar(types, f"group_{kind}").dtype), run=True,
            group=True, name=f"group_{kind}")(meaning)


for _kind, _word in (("sum", "sum"), ("max", "largest"), ("min", "smallest")):
    _group(_kind, _word)


# --- votes ------------------------------------------------------------------------------------
def _vote_rule(name: str, dtype: DType = bool_) -> Any:
    def rule(types: Any, attrs: Any) -> Scalar:
        if any(isinstance(t, TileType) for t in types):
            raise RuleError(f"{name} asks the lanes of a warp, got {types[0]}",
                            "of a tile: ts.tile.reduce_max(t) is whether some element holds, "
                            "ts.tile.reduce_min(t) whether all do")
        rules.logical(types, attrs)
        return Scalar(dtype, False)

    return rule


def _vote(name: str, doc: str, f: Any) -> None:
    def meaning(m: Any, op: Any, x: Any) -> Any:
        _require_warps(m, op)
        return _by_warp(m, _lanes(m, x), lambda p: f(p, axis=1, keepdims=True))

    meaning.__doc__ = doc
    declare(rule=_vote_rule(name), run=True, name=name)(meaning)


_vote("vote_any", "Whether the condition holds in some lane of the warp.", np.any)
_vote("vote_all", "Whether the condition holds in all lanes of the warp.", np.all)


@declare(rule=_vote_rule("ballot", uint32), run=True)
def ballot(m: Any, op: Any, x: Any) -> Any:
    """Bit l is set where the condition holds in lane l of the warp."""
    _require_warps(m, op)

    def bits(p: np.ndarray) -> np.ndarray:
        weights = (np.uint64(1) << np.arange(p.shape[1], dtype=np.uint64))
        return (p * weights).sum(axis=1, keepdims=True).astype(np.uint32)

    return np.concatenate([np.broadcast_to(bits(_lanes(m, x)[:, s:s + WARP]),
                                           _lanes(m, x)[:, s:s + WARP].shape)
                           for s in range(0, m.lanes, WARP)], axis=1)
