"""Reductions over the groups of a cluster: each sends what it has to all of them, and each combines
what has come, in the order of their numbers.

Stores are asynchronous and counted by a barrier of the group that gets them (PTX ISA 9.7.9
st.async). Barriers are made before any group sends: all of a cluster meet for that, behind what the
kernel asked for before, such as loads.
"""

from __future__ import annotations

from math import prod

from tessera.tile.cuda.emit.emitter import INDENT, EmittedLine, Emitter, intrinsic
from tessera.tile.cuda.emit.reduce import flat_index
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.emit.warps import tag_of
from tessera.tile.cuda.intrinsics.clusters import BARRIER_BYTES, sent_bytes
from tessera.tile.cuda.intrinsics.reduce import padded
from tessera.tile.ir.ir import Op
from tessera.tile.ops.cluster import NAMES
from tessera.tile.passes.cluster_groups import cluster_of, cluster_ops


@emits(*NAMES)
def _exchange(e: Emitter, op: Op) -> None:
    (x,), groups, tag = op.args, op.attr["groups"], tag_of(e, op.args[0])
    layout, shape, size = e.layout(x), e.layout(x).shape, 8 if tag.endswith("64") else 4
    if groups == 1:
        return e.define(op.outs[0], e.name(x))
    barrier, elements = _barrier(e, op), prod(padded(shape))
    at, place = e.scratch(size * groups * elements), flat_index(e, layout)
    if e.loops:  # what the iteration before brought has been read everywhere
        _meet(e, "cluster_arrive")
    expect = e.use("expect", "use('mbarrier_arrive_expect')")
    e.line(f"if {e.thread} == 0: {expect}({barrier}, i32({sent_bytes(tag, shape, groups)}))")
    rank = e.once("rank", e.use("cluster_rank", "use('cluster_ctarank')") + "()")
    send = e.use("send", intrinsic("clusters.send", tag, layout.text, shape, groups))
    first = e.owner(layout) or "i32(1)"
    e.line(f"{send}({e.name(x)}, i32({at} + {size} * ({rank} * {elements} + {place})), {barrier}, "
           f"{first})")
    wait, parity = e.use("cluster_await", "use('mbarrier_wait')"), "i32(0)"
    if e.loops:
        parity = e.fresh("parity")
        e.top.append(EmittedLine(f"{INDENT}{parity} = i32(0)"))
    e.line(f"{wait}({barrier}, {parity})")
    if e.loops:
        e.line(f"{parity} = i32({parity} ^ 1)")
    read = e.use("get_parts", intrinsic("reduce.get", NAMES[op.name], tag, layout.text, shape,
                                        groups))
    e.define(op.outs[0], f"{read}({at} + {size} * {place})")
    return None


def _barrier(e: Emitter, op: Op) -> str:
    """The address of this op's barrier. The first op makes those of all, and waits for the cluster
    to have made them."""
    ops = cluster_ops(e.function)
    if "cluster" not in e.memo:
        e.cluster = cluster_of(e.function)
        at = e.memo["cluster"] = e.scratch(BARRIER_BYTES * len(ops))
        init = e.use("cluster_init", intrinsic("clusters.init", len(ops)))
        fence = e.use("fence_init", "use('fence_mbarrier_init')")
        arrive = e.use("cluster_begin", "use('cluster_arrive_relaxed')")
        e.top += [EmittedLine(INDENT + text) for text in (
            f"if {e.thread} == 0: {init}({at})", f"{fence}()", f"{arrive}()")]
        wait = e.use("cluster_wait", "use('cluster_wait')") + "()"
        if e.depth == 1:
            e.line(wait)
        else:
            e.top.append(EmittedLine(INDENT + wait))
    number = [n.outs[0].value for n in ops].index(op.outs[0].value)
    return f"i32({e.memo['cluster']} + {BARRIER_BYTES * number})"


def _meet(e: Emitter, arrive: str) -> None:
    e.line(e.use(arrive, f"use({arrive!r})") + "()")
    e.line(e.use("cluster_wait", "use('cluster_wait')") + "()")
