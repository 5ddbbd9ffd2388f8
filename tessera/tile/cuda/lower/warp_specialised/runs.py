"""Loops that multiply nothing and are the same for all tiles along an axis of the grid, such as the
statistics of rows that are normalised and multiplied by many columns: a block does several such
tiles one after another, a run, and those loops once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tessera.lazy_dataclass import dataclass
from tessera.tile.cuda.lower.warp_specialised.program import PipelineKnobs
from tessera.tile.cuda.lower.warp_specialised.rewrite import (
    Nodes,
    made_by,
    number,
    ops_in,
    out,
    reads,
)
from tessera.tile.ir.ir import For, Function, Node, Op, Operand, SSAValue, operands, walk
from tessera.tile.ir.op_record import OPS

MOST = 8  # tiles of a run
# What such a loop takes of a tile's time, as a fraction: both read the same rows.
SHARE = 1, 2


@dataclass(frozen=True)
class Runs:
    """loads: of the loops that are the same along this axis of the grid."""

    loads: frozenset[str]
    axis: int


def find_runs(function: Function, depends: dict[SSAValue, frozenset[int]], rank: int,
              pipeline: PipelineKnobs) -> Runs | None:
    """depends: axes of the grid, of each value."""
    loops = [n for n in function.body if isinstance(n, For) and ops_in((n,), "ring_load")]
    plain = [n for n in loops if not ops_in((n,), "async_matmul")]
    if pipeline.tiles != "static" or pipeline.together > 1 or not plain or plain == loops:
        return None
    used = {x for n in walk(tuple(plain)) for x in operands(n) if isinstance(x, SSAValue)}
    axes = frozenset().union(*(depends.get(x, frozenset()) for x in used))
    along = [a for a in range(rank) if a not in axes]
    loads = frozenset(out(n).name for n in ops_in(tuple(plain), "ring_load"))
    first, _ = _with_sources(function.body, plain)
    simple = all(n in plain or isinstance(n, Op) and OPS[n.name].effect == "pure" for n in first)
    return Runs(loads, along[0]) if len(along) == 1 and simple else None


def split_run(nodes: Nodes, runs: Runs) -> tuple[Nodes, Nodes]:
    """The nodes of a role: what a run does once, and what each of its tiles does."""
    def once(node: Node) -> bool:
        names = {n for op in ops_in((node,), "ring_fill") for n in op.attr["loads"]}
        names |= {op.attr["load"] for op in ops_in((node,), "slot_tile")}
        return isinstance(node, For) and bool(names) and names <= runs.loads

    return _with_sources(nodes, [n for n in nodes if once(n)])


def _with_sources(nodes: Nodes, wanted: Collection[Node]) -> tuple[Nodes, Nodes]:
    """(the wanted ones and all that they are made from, the others)."""
    needed: set[SSAValue] = set()
    first: list[Node] = []
    for node in reversed(nodes):
        if node in wanted or made_by(node) & needed:
            needed |= reads(node)
            first.insert(0, node)
    return tuple(first), tuple(n for n in nodes if n not in first)


def run_length(tiles: Operand, blocks: Operand, counts: list[SSAValue], axis: int,
               scalar: Callable[..., SSAValue]) -> tuple[SSAValue, SSAValue]:
    """(tiles of a run, runs along the axis): as many as a block has tiles, up to MOST, or one where
    blocks would wait for each other for longer than runs save."""
    def ceil(x: Operand, by: Operand) -> SSAValue:
        less = scalar("sub", by, number(1), hint="run")
        return scalar("floordiv", scalar("add", x, less, hint="run"), by, hint="run")

    tiles, count = (scalar("maximum", x, number(1), hint="run") for x in (tiles, counts[axis]))
    waves = ceil(tiles, blocks)
    length = ceil(waves, ceil(waves, number(MOST)))
    length = ceil(count, ceil(count, length))
    rows = scalar("floordiv", tiles, count, hint="run")
    rounds = ceil(scalar("mul", rows, ceil(count, length), hint="run"), blocks)
    part, whole = map(number, SHARE)
    alone = scalar("mul", waves, number(SHARE[0] + SHARE[1]), hint="run")
    each = scalar("add", scalar("mul", length, whole, hint="run"), part, hint="run")
    saved = scalar("sub", alone, scalar("mul", rounds, each, hint="run"), hint="run")
    use = scalar("minimum", scalar("maximum", scalar("add", saved, number(1), hint="run"),
                                   number(0), hint="run"), number(1), hint="run")
    more = scalar("mul", use, scalar("sub", length, number(1), hint="run"), hint="run")
    length = scalar("add", more, number(1), hint="run")
    return length, ceil(counts[axis], length)


__all__ = ["Runs", "split_run", "find_runs", "run_length"]
