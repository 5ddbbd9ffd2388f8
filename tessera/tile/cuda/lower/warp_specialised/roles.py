"""Two programs out of one: the slice that fills the rings, and the rest, which reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tessera.numerics import i32
from tessera.tile.cuda.lower.warp_specialised.program import BufferRing, Load, Refused
from tessera.tile.cuda.lower.warp_specialised.rewrite import (
    Maker,
    Nodes,
    Table,
    is_op,
    map_blocks,
    ops_in,
    out,
    reads,
    substituted,
)
from tessera.tile.ir.ir import (
    Const,
    For,
    Function,
    If,
    Node,
    Op,
    Operand,
    SSAValue,
    While,
    outs_of,
    regions,
    walk,
    with_regions,
)
from tessera.tile.ir.types import TileType
from tessera.tile.passes.simplify import simplify


def producer_of(function: Function, rings: tuple[BufferRing, ...], maker: Maker) -> Nodes:
    """The slice of the body that fills rings: a fill stands where its last load stood."""
    ring_of = {load.name: r for r in rings for load in r.loads}

    def block(nodes: Nodes) -> list[Node]:
        kept: list[Node] = []
        views: dict[tuple[Load, ...], list[SSAValue]] = {f: [] for r in rings for f in r.fills}
        for node in nodes:
            if not is_op(node, "ring_load"):
                kept.append(node)
                continue
            assert isinstance(node, Op) and isinstance(node.args[0], SSAValue)
            ring = ring_of[out(node).name]
            fill = ring.fill(out(node).name)
            views[fill].append(node.args[0])
            if len(views[fill]) == len(fill):
                kept.append(maker.op("ring_fill", views[fill], where=node.where,
                                     ring=ring.name, loads=tuple(x.name for x in fill)))
        return kept

    sliced = slice_of(map_blocks(function.body, block), "ring_fill")
    if any(isinstance(maker.types[d.value], TileType) for n in walk(sliced) for d in outs_of(n)):
        raise Refused("what is loaded depends on what was computed from tiles")
    return sliced


def dealer_of(producer: Nodes, rings: tuple[BufferRing, ...], maker: Maker) -> Nodes:
    """What brings rows into the order of codes, when they have come: a slice of the producer's
    program. Raises Refused."""
    names = {r.name for r in rings if r.dealt}
    if not names:
        return ()
    if ops_in(producer, "mail_put"):
        raise Refused("rows are dealt in the order of codes, and tiles as multiprocessors get free")

    def block(nodes: Nodes) -> list[Node]:
        return [maker.op("ring_deal", (), where=n.where, ring=n.attr["ring"])
                if isinstance(n, Op) and is_op(n, "ring_fill") and n.attr["ring"] in names else n
                for n in nodes]

    return maker.copy(slice_of(map_blocks(producer, block), "ring_deal"), {})[0]


def ahead_of(producer: Nodes, rings: tuple[BufferRing, ...], maker: Maker, count: int) -> Nodes:
    """What asks L2 for the packed weights of the first iterations of this block's first tile."""
    loads = {load.name for r in rings for load in r.loads if load.codes}
    if not (count and loads) or ops_in(producer, "mail_put"):
        return ()

    def fill(n: Op) -> Op | None:
        kept = [(v, name) for v, name in zip(n.args, n.attr["loads"], strict=True) if name in loads]
        return maker.op("ring_ahead", [v for v, _ in kept], where=n.where, ring=n.attr["ring"],
                        loads=tuple(name for _, name in kept)) if kept else None

    def block(nodes: Nodes) -> list[Node]:
        made = [fill(n) if isinstance(n, Op) and is_op(n, "ring_fill") else n for n in nodes]
        return [n for n in made if n is not None]

    def limited(nodes: Nodes, outer: bool) -> list[Node]:
        kept: list[Node] = []
        for n in nodes:
            if isinstance(n, For):
                span = maker.op("mul", (n.step, Const(1 if outer else count, i32)), "span")
                end = maker.op("add", (n.lo, out(span)), "end")
                last = maker.op("minimum", (n.hi, out(end)), "end")
                kept += [span, end, last]
                n = replace(n, hi=out(last), body=tuple(limited(n.body, False)))
            kept.append(n)
        return kept

    some = slice_of(map_blocks(producer, block), "ring_ahead")
    return maker.copy(tuple(limited(some, True)), {})[0]


def slice_of(nodes: Nodes, *names: str, wanted: frozenset[SSAValue] = frozenset()) -> Nodes:
    """The ops of these names, the control around them, and what these and `wanted` need."""
    return _sliced(nodes, _needed(nodes, names, wanted), names)


def _needed(nodes: Nodes, names: tuple[str, ...], wanted: frozenset[SSAValue]
            ) -> set[SSAValue]:
    """What the ops read, and the control around them, with all that these need."""
    sources: dict[SSAValue, set[SSAValue]] = {}
    work: list[SSAValue] = [*wanted]
    for node in walk(nodes):
        for d, values in _made_from(node):
            sources.setdefault(d, set()).update(v for v in values if isinstance(v, SSAValue))
        if is_op(node, *names):
            work += reads(node)
        elif not isinstance(node, Op) and ops_in((node,), *names):
            work += [x for x in _control(node) if isinstance(x, SSAValue)]
    needed: set[SSAValue] = set()
    while work:
        v = work.pop()
        if v not in needed:
            needed.add(v)
            work += sources.get(v, set())
    return needed


def loads_ahead(function: Function, maker: Maker) -> Iterator[Op]:
    """The loads of tiles that a producer can bring: nothing that is computed from tiles decides
    where they lie, or whether they are done."""
    sources = [made for node in walk(function.body) for made in _made_from(node)]
    late, before = set[SSAValue](), -1
    while len(late) > before:
        before = len(late)
        late |= {d for d, values in sources if any(
            v in late or isinstance(maker.type(v), TileType) for v in values)}

    def block(nodes: Nodes) -> Iterator[Op]:
        for node in nodes:
            if isinstance(node, Op):
                if node.name == "load_tile" and late.isdisjoint(node.args):
                    yield node
            elif late.isdisjoint(_control(node)):
                for region in regions(node):
                    yield from block(region)

    return block(function.body)


def _control(node: Node) -> tuple[Operand, ...]:
    if isinstance(node, For):
        return (node.lo, node.hi, node.step)
    return (node.cond,)  # type: ignore[union-attr]


def _made_from(node: Node) -> list[tuple[SSAValue, tuple[Operand, ...]]]:
    """(a value, what decides it) for each value that a node defines."""
    if isinstance(node, Op):
        return [(d.value, node.args) for d in node.outs]
    control = _control(node)
    if isinstance(node, If):
        return [(d.value, (*control, x, y)) for d, x, y in zip(
            node.outs, node.thens, node.elses, strict=True)]
    made = [(d.value, (*control, x, y)) for d, x, y in zip(
        node.carried, node.inits, node.yields, strict=True)]
    return [*made, (node.var.value, control)] if isinstance(node, For) else made


def _sliced(nodes: Nodes, needed: set[SSAValue], names: tuple[str, ...]) -> Nodes:
    """The nodes that define a needed value or have one of the names."""
    kept: list[Node] = []
    for node in nodes:
        wanted = any(d.value in needed for d in outs_of(node))
        if isinstance(node, Op):
            if wanted or node.name in names:
                kept.append(node)
        elif wanted or ops_in((node,), *names):
            inner = with_regions(node, lambda region: _sliced(region, needed, names))
            assert not isinstance(inner, Op)
            kept.append(_trimmed(inner, needed))
    return tuple(kept)


def _trimmed(node: For | While | If, needed: set[SSAValue]) -> Node:
    """Without the results that nothing needs."""
    keep = [i for i, d in enumerate(outs_of(node)) if d.value in needed]

    def of(xs: tuple) -> tuple:
        return tuple(xs[i] for i in keep)

    if isinstance(node, If):
        return replace(node, outs=of(node.outs), thens=of(node.thens), elses=of(node.elses))
    return replace(node, carried=of(node.carried), inits=of(node.inits), yields=of(node.yields))


def consumer_of(function: Function, rings: tuple[BufferRing, ...], maker: Maker) -> Nodes:
    """The body in which the first reader of a load waits for the slot that holds it."""
    ring_of = {load.name: r for r in rings for load in r.loads}

    def block(nodes: Nodes) -> list[Node]:
        loads = {out(n): n for n in nodes
                 if isinstance(n, Op) and n.name == "ring_load"}
        table: Table = {}
        kept: list[Node] = []
        for node in nodes:
            if isinstance(node, Op) and node in loads.values():
                continue
            for value in (v for v in loads if v in reads(node) and v not in table):
                kept += _waited(ring_of[value.name], loads[value], loads, table, maker)
            kept += substituted((node,), table)
        return kept

    body = map_blocks(function.body, block)
    return simplify(replace(function, body=body)).body


def _waited(ring: BufferRing, load: Op, loads: dict[SSAValue, Op], table: Table, maker: Maker
            ) -> list[Node]:
    """The wait for a slot and the tiles in it; `table` gains what stands for the loads."""
    wait = maker.op("ring_wait", (), f"{ring.name}_slot", where=load.where, ring=ring.name)
    made: list[Node] = [wait]
    by_name = {v.name: v for v in loads}
    for x in ring.fill(out(load).name):
        value = by_name[x.name]
        tile = maker.op("slot_tile", (out(wait),), x.name, where=loads[value].where,
                        ring=ring.name, load=x.name, dtype=x.dtype, shape=x.shape)
        table[value] = out(tile)
        made.append(tile)
    return made
