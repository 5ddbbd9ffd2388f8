"""Reductions over the groups of a cluster: each sends what it has to all of them, and each combines
what has come, in the order of their numbers. Shared memory that the others write.

Stores are asynchronous and counted by a barrier of the group that gets them (PTX ISA 9.7.9
st.async). Barriers are made before any group sends: all of a cluster meet for that, behind what the
kernel asked for before, such as loads.

Numbers that warps have met for are sent behind that meeting, put together by who sends them, and
waited for where they are needed. A run of such ops has one barrier, which counts all that comes.

In a loop two buffers and barriers take turns. Who sends for iteration i + 2 has got what all sent
for i + 1, before which, by a barrier of the group, all threads there had read what came for i.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tessera import hooks
from tessera.lazy_dataclass import dataclass
from tessera.tile.cuda.emit.emitter import INDENT, EmittedLine, Emitter, intrinsic
from tessera.tile.cuda.emit.memory_operands import FAR, place_of
from tessera.tile.cuda.emit.reduce import flat_index, meetings
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.emit.thread_elements import narrow
from tessera.tile.cuda.emit.warps import tag_of
from tessera.tile.cuda.intrinsics.clusters import sent_bytes
from tessera.tile.cuda.intrinsics.reduce import reached
from tessera.tile.cuda.ptx.mbarrier import BARRIER_BYTES
from tessera.tile.ir.errors import KernelError
from tessera.tile.ir.ir import For, Node, Op, SSAValue, regions, uses, walk
from tessera.tile.ir.register_layout import RegisterLayout
from tessera.tile.ops.cluster import NAMES
from tessera.tile.passes.cluster_groups import cluster_of, cluster_ops

BUFFERS = 2


@dataclass(frozen=True)
class ClusterExchange:
    """What a run of ops has sent and waits for, as expressions: the barrier that counts all their
    bytes, the parity of the phase that ends, which of two buffers takes what comes, and the result
    of each op then.  count: the variable of a loop's exchanges, "" outside"""

    barrier: str
    parity: str = "i32(0)"
    turn: str = ""
    count: str = ""
    results: tuple[str, ...] = ()


@emits(*NAMES)
def _exchange(e: Emitter, op: Op) -> None:
    """All of a run of such ops are sent before they are waited for, once: here, or behind the
    meeting of warps that made what is sent."""
    if op.attr["groups"] == 1:
        return e.define(op.outs[0], e.name(op.args[0]))
    run = _runs(e)[op.outs[0].value]
    if op is not run[0]:
        return None
    if op.outs[0].value not in _under_way(e):
        if e.loops and op.outs[0].value not in _behind_barriers(e):
            e.sync()  # what came in the iteration before has been read by all threads
        _send(e, run, {})
    sent = _under_way(e).pop(op.outs[0].value)
    wait = e.use("cluster_await", "use('mbarrier_wait')")
    e.line(f"{wait}(i32({sent.barrier}), {sent.parity})")
    for one, result in zip(run, sent.results, strict=True):
        e.define(one.outs[0], result)
    if sent.count:
        e.line(f"{sent.count} = i32({sent.count} + 1)")
    return None


def _under_way(e: Emitter) -> dict[SSAValue, ClusterExchange]:
    """By the result of the first of a run: what has been sent."""
    made = e.memo.setdefault("cluster exchanges", {})
    assert isinstance(made, dict)
    return made


def _send_parts(e: Emitter, parts: dict[SSAValue, str]) -> set[SSAValue]:
    """Sends what warps have met for where a run of exchanges needs just that and nobody else does:
    who sends a number puts it together, and other threads go on.  parts: by result, how"""
    run = next((r for r in _runs(e).values() if [o.args[0] for o in r] == list(parts)), None)
    if run is None or any(_uses(e)[v] > 1 for v in parts) or e.loops and (
            run[0].outs[0].value not in _behind_barriers(e)) or not _in_same_block(e, run[0],
                                                                                   [*parts]):
        return set()
    _send(e, run, parts)
    return set(parts)


hooks.behind_meetings.append(_send_parts)


def _uses(e: Emitter) -> dict[SSAValue, int]:
    if "uses" not in e.memo:
        e.memo["uses"] = uses(e.function.body)
    made = e.memo["uses"]
    assert isinstance(made, dict)
    return made


def _in_same_block(e: Emitter, op: Op, values: list[SSAValue]) -> bool:
    """Whether an op stands in the same block as those that make these."""
    def look(nodes: tuple[Node, ...]) -> bool:
        if op in nodes:
            made = {d.value for n in nodes if isinstance(n, Op) for d in n.outs}
            return made.issuperset(values)
        return any(look(region) for n in nodes for region in regions(n))

    return look(e.function.body)


def _behind_barriers(e: Emitter) -> set[SSAValue]:
    """The ops in whose loop all threads of a group meet anyway, once an iteration."""
    if "cluster barriers" not in e.memo:
        found: set[SSAValue] = set()
        for loop in walk(e.function.body):
            if isinstance(loop, For):
                ops = [n for n in loop.body if isinstance(n, Op)]
                if any(n.name == "barrier" or n.outs and n.outs[0].value in meetings(e)
                       for n in ops):
                    found |= {n.outs[0].value for n in ops if n.name in NAMES}
        e.memo["cluster barriers"] = found
    made = e.memo["cluster barriers"]
    assert isinstance(made, set)
    return made


def _runs(e: Emitter) -> dict[SSAValue, list[Op]]:
    """By result: the ops that follow each other with nothing between, none of another's result."""
    if "cluster runs" not in e.memo:
        found: dict[SSAValue, list[Op]] = {}
        ops = _exchanges(e)

        def look(nodes: tuple[Node, ...]) -> None:
            run: list[Op] = []
            for node in nodes:
                if isinstance(node, Op) and node in ops:
                    made = {o.outs[0].value for o in run}
                    run = run if run and not made & set(node.args) else []
                    run.append(node)
                    found[node.outs[0].value] = run
                else:
                    run = []
                    for region in regions(node):
                        look(region)

        look(e.function.body)
        e.memo["cluster runs"] = found
    runs = e.memo["cluster runs"]
    assert isinstance(runs, dict)
    return runs


def _send(e: Emitter, run: list[Op], parts: dict[SSAValue, str]) -> None:
    """Sends what a group has to all groups. parts: how who sends them puts numbers together."""
    meet = _barrier_of(e, run)
    expect = e.use("expect", "use('mbarrier_arrive_expect')")
    counted = sum(sent_bytes(tag_of(e, o.args[0]), e.layout(o.args[0]).shape, o.attr["groups"])
                  for o in run)
    e.line(f"if {e.thread} == 0: {expect}(i32({meet.barrier}), i32({counted}))")
    results = tuple(_send_one(e, one, meet, parts) for one in run)
    _under_way(e)[run[0].outs[0].value] = replace(meet, results=results)


def _send_one(e: Emitter, op: Op, meet: ClusterExchange, parts: dict[SSAValue, str]) -> str:
    """What each group makes of what all have sent, once it has come."""
    (x,), groups, tag = op.args, op.attr["groups"], tag_of(e, op.args[0])
    layout, shape, size = e.layout(x), e.layout(x).shape, 8 if tag.endswith("64") else 4
    elements = prod(reached(layout))
    bytes_ = size * groups * elements
    at, place = e.scratch(BUFFERS * bytes_ if e.loops else bytes_), flat_index(e, layout)
    if meet.turn:
        at = f"{at} + {bytes_} * {meet.turn}"
    rank = e.once("rank", e.use("cluster_rank", "use('cluster_ctarank')") + "()")
    many, to, who = _senders(e, layout, groups)
    send = e.use("send", intrinsic("clusters.send", tag, layout.text, shape, many))
    there = f"i32({at} + {size} * ({rank} * {elements} + {place})), i32({meet.barrier}), {to}"
    if x in parts:
        e.line(f"if {who} != 0: {send}({parts[x]}, {there}, i32(1))")
    else:
        e.line(f"{send}({e.name(x)}, {there}, {who})")
    read = e.use("get_parts", intrinsic("reduce.get", NAMES[op.name], tag, layout.text, shape,
                                        groups))
    return f"{read}(i32({at} + {size} * {place}))"


def _senders(e: Emitter, layout: RegisterLayout, groups: int) -> tuple[int, str, str]:
    """(groups that a thread sends to, the first of them, whether it sends): where neighbours have
    the same elements, each sends to a group."""
    low = groups - 1
    if all(1 << i & low == 0 or i in layout.replicas or i >= len(layout.threads)
           for i in range(low.bit_length())) and e.lanes >= groups:
        bits = sum(1 << i for i in layout.replicas) | -1 << len(layout.threads)
        bits &= (1 << (e.lanes - 1).bit_length()) - 1 & ~low
        return 1, e.once("to_group", f"i32({e.thread} & {low})"), e.once(
            "sends", f"i32(({e.thread} & {bits}) == 0)")
    return groups, "i32(0)", e.owner(layout) or "i32(1)"


def _exchanges(e: Emitter) -> list[Op]:
    """The reductions of the kernel."""
    return [op for op in cluster_ops(e.function) if op.name in NAMES]


def _begin(e: Emitter) -> None:
    """All groups of a cluster have begun behind this, with what stands at the top of the kernel."""
    e.cluster = cluster_of(e.function)
    arrive = e.use("cluster_begin", "use('cluster_arrive_relaxed')")
    e.top.append(EmittedLine(f"{INDENT}{arrive}()"))
    wait = e.use("cluster_wait", "use('cluster_wait')") + "()"
    if e.depth == 1:
        e.line(wait)
    else:
        e.top.append(EmittedLine(INDENT + wait))


def _barrier_of(e: Emitter, run: list[Op]) -> ClusterExchange:
    """The barrier of a run. The first one makes those of all, and waits for the cluster to have
    made them."""
    firsts = list(dict.fromkeys(r[0].outs[0].value for r in _runs(e).values()))
    if "cluster" not in e.memo:
        at = e.memo["cluster"] = e.scratch(BUFFERS * BARRIER_BYTES * len(firsts))
        init = e.use("cluster_init", intrinsic("clusters.init", BUFFERS * len(firsts)))
        fence = e.use("fence_init", "use('fence_mbarrier_init')")
        e.top += [EmittedLine(INDENT + text) for text in (
            f"if {e.thread} == 0: {init}({at})", f"{fence}()")]
        _begin(e)
    number = firsts.index(run[0].outs[0].value)
    barrier = f"{e.memo['cluster']} + {BUFFERS * BARRIER_BYTES * number}"
    if not e.loops:
        return ClusterExchange(barrier)
    count, turn = e.fresh("exchanges"), e.fresh("turn")
    e.top.append(EmittedLine(f"{INDENT}{count} = i32(0)"))
    e.line(f"{turn} = i32({count} & 1)")
    return ClusterExchange(f"{barrier} + {BARRIER_BYTES} * {turn}", f"i32({count} >> 1 & 1)",
                           turn, count)


# --- shared memory --------------------------------------------------------------------------------
@emits("cluster_shared")
def _peer(e: Emitter, op: Op) -> None:
    """Its address for the group that has it. Nobody writes to a group that has not begun."""
    buffer, rank = op.args
    place, made = place_of(e, buffer), e.fresh("far")
    if op.attr["groups"] == 1:
        e.places[op.outs[0].value] = place
        return
    if "cluster begun" not in e.memo:
        e.memo["cluster begun"] = True
        if _words(e):
            at = e.memo["words"] = e.scratch(BARRIER_BYTES, 8)
            init, fence = (e.use("cluster_init", intrinsic("clusters.init", 1)),
                           e.use("fence_init", "use('fence_mbarrier_init')"))
            e.top += [EmittedLine(f"{INDENT}if {e.thread} == 0: {init}({at})"),
                      EmittedLine(f"{INDENT}{fence}()")]
        if not _exchanges(e):
            _begin(e)
    far = e.use("far_address", "use('mapa')")
    e.line(f"{made} = {far}(i32({place.base}), {narrow(e, rank)})")
    if _words(e):
        e.line(f"{made}_counts = {far}(i32({e.memo['words']}), {narrow(e, rank)})")
    e.places[op.outs[0].value] = replace(place, space=FAR, base=made, rank=rank)


def _words(e: Emitter) -> int:
    """That a barrier counts, for which writes to other groups are asynchronous; 0: none does."""
    barriers = [op for op in walk(e.function.body) if isinstance(op, Op)
                and op.name == "cluster_barrier" and op.attr["groups"] > 1]
    words = max((op.attr.get("words", 0) for op in barriers), default=0)
    if words and (len(barriers) > 1 or _exchanges(e)):
        raise KernelError("a barrier that counts words beside others of the cluster",
                          where=barriers[0].where, hint="cluster_barrier(groups), without words")
    return words


@emits("cluster_barrier")
def _barrier(e: Emitter, op: Op) -> None:
    if op.attr["groups"] == 1:
        return e.sync()
    e.cluster = cluster_of(e.function)
    if words := _words(e):
        if e.loops:
            raise KernelError("a barrier that counts words in a loop", where=op.where,
                              hint="cluster_barrier(groups), without words")
        expect = e.use("expect", "use('mbarrier_arrive_expect')")
        wait = e.use("cluster_await", "use('mbarrier_wait')")
        e.line(f"if {e.thread} == 0: {expect}(i32({e.memo['words']}), i32({4 * words}))")
        e.line(f"{wait}(i32({e.memo['words']}), i32(0))")
        return None
    for name in ("cluster_arrive", "cluster_wait"):
        e.line(e.use(name, f"use({name!r})") + "()")
    return None
