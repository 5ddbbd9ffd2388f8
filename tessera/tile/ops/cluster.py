"""Reductions over the groups of a cluster, and their shared memory.

A cluster is so many groups that follow each other in the launch. They run at one time, so that each
can hold a part of what is reduced, or of a line that is transformed, and exchange what they found.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tessera.tile.builder import edge_rules
from tessera.tile.builder.op_tracer import OpTracer
from tessera.tile.interpreter.sanitizer import CLUSTER_EPOCH
from tessera.tile.ir.errors import BoundsError, DivergenceError, KernelError, RuleError
from tessera.tile.ir.op_record import declare
from tessera.tile.ir.types import PEER, Buffer, Scalar, TileType

KINDS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
SIZES = (1, 2, 4, 8, 16)
NAMES = {f"cluster_{kind}": f"reduce_{kind}" for kind in KINDS}  # of what each group does alone


def _rule(types: Any, attrs: dict[str, Any]) -> TileType:
    if not isinstance(types[0], TileType):
        raise RuleError(f"a cluster reduces tiles, got {types[0]}",
                        "of each group's rows: ts.tile.row_sum(x)")
    _require_size(attrs["groups"])
    return types[0]


def _require_size(groups: int) -> None:
    if groups not in SIZES:
        raise RuleError(f"a cluster of {groups} groups: there are {SIZES}")


def _require_whole(m: Any, op: Any, groups: int) -> None:
    together = m.active_groups().reshape(-1, groups) if m.count % groups == 0 else None
    if together is None:
        raise KernelError(f"{op.name} needs all groups of a cluster at one time, but groups of "
                          "this kernel wait for others in loops", where=op.where)
    if (together.any(axis=1) & ~together.all(axis=1)).any():
        raise DivergenceError(f"{op.name} needs all {groups} groups of a cluster, but some are "
                              "elsewhere", where=op.where,
                              hint="move it out of the branch that depends on the group")


def _reduction(kind: str, word: str) -> None:
    def meaning(m: Any, op: Any, x: Any, groups: Any = 2) -> Any:
        many = op.attr["groups"]
        _require_whole(m, op, many)
        whole = np.broadcast_to(x, (m.count, *x.shape[1:])).reshape(-1, many, *x.shape[1:])
        made = KINDS[kind].reduce(whole, axis=1, dtype=x.dtype)
        return np.repeat(made, many, axis=0)

    def lower(t: OpTracer, x: Any, groups: Any) -> Any:
        return t.ir.emit(f"cluster_{kind}", [t.ir.value_of(x)],
                         groups=t.ir.constant_int(groups, "groups"))

    meaning.__doc__ = f"The {word} of a tile over the `groups` groups of a cluster, in all of them."
    declare(rule=_rule, attrs=("groups",), run=True, group=True, name=f"cluster_{kind}",
            lower=lower, layouts="same", edges=edge_rules.first_operand_edges)(meaning)


for _kind, _word in (("sum", "sum"), ("max", "largest"), ("min", "smallest"),
                     ("prod", "product")):
    _reduction(_kind, _word)


# --- shared memory ------------------------------------------------------------------------------
def _peer_rule(types: Any, attrs: Any) -> Buffer:
    buffer, rank = types
    if not isinstance(buffer, Buffer) or buffer.space != "shared":
        raise RuleError(f"{buffer} is no shared buffer of a group", "ts.tile.alloc_shared(...)")
    if not isinstance(rank, Scalar):
        raise RuleError(f"{rank} is no number of a group of a cluster")
    if buffer.dtype.bits != 32:
        raise RuleError(f"elements of {buffer.dtype} in another group's shared memory",
                        "ones of 32 bits")
    _require_size(attrs["groups"])
    return replace(buffer, space=PEER)


@declare(rule=_peer_rule, attrs=("groups",), run=True, alias=True,
         lower=lambda t, buffer, rank, groups: t.ir.emit(
             "cluster_shared", [buffer, rank], groups=t.ir.constant_int(groups, "groups")))
def cluster_shared(m: Any, op: Any, buffer: Any, rank: Any, groups: Any = 2) -> Any:
    """The shared buffer as the group `rank` of the cluster of `groups` has it: to write elements
    of, which that group reads behind a cluster_barrier. Each lane may write to another group."""
    many = op.attr["groups"]
    active = m.active((m.count, rank.shape[1]))
    ranks = np.broadcast_to(rank, active.shape)
    bad = active & ((ranks < 0) | (ranks >= many))
    if bad.any():
        raise BoundsError(f"group {int(ranks[bad][0])} of a cluster of {many}", where=op.where)
    return replace(buffer, peer=(np.clip(ranks, 0, many - 1), many))


def _barrier_rule(types: Any, attrs: Any) -> Any:
    _require_size(attrs["groups"])
    return ()


def _barrier(t: OpTracer, groups: Any, words: Any = 0) -> Any:
    return t.ir.emit("cluster_barrier", [], groups=t.ir.constant_int(groups, "groups"),
                     words=t.ir.constant_int(words, "words"))


@declare(rule=_barrier_rule, attrs=("groups", "words"), run=True, effect="sync", group=True,
         by_thread=True, lower=_barrier)
def cluster_barrier(m: Any, op: Any, groups: Any = 2, words: Any = 0) -> None:
    """All lanes of the `groups` groups of a cluster wait for each other; what they wrote before, in
    each other's shared memory too, is visible after it.

    words: that each group gets, from all of them, since it began. Lanes wait for these alone, which
    is sooner, and for no group that sends none. A kernel has one such barrier, in no loop.
    """
    many, words = op.attr["groups"], op.attr.get("words", 0)
    _require_whole(m, op, many)
    on = m.active_groups()
    if words and (m.sent[on] != words).any():
        got = int(m.sent[on][m.sent[on] != words][0])
        raise KernelError(f"{op.name} waits for {words} words and a group gets {got}",
                          where=op.where, hint="as many as all groups write to each group's memory")
    latest = np.repeat(m.epoch.reshape(-1, many).max(axis=1), many)
    m.epoch[on] = (latest[on] // CLUSTER_EPOCH + 1) * CLUSTER_EPOCH
    if m.sanitizer is not None:
        for cluster in m.groups[on, 0].reshape(-1, many):
            m.sanitizer.clocks.cluster_barrier(cluster)


__all__ = ["NAMES", "SIZES"]
