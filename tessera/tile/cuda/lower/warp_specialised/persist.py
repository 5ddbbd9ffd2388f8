"""The loop over tiles of a persistent block, and the order that keeps shared data in L2.

Groups of a grid become iterations of a loop: block b does tiles b, b + blocks, ... Axes on which
every load depends (a batch) are the slowest. What then remains is walked in strips: of a matmul,
some rows of tiles side by side; of attention, as many heads as have their keys and values in L2.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tessera.dims import Dim
from tessera.lazy_dataclass import dataclass
from tessera.runtime.generations import PipelineDefaults
from tessera.tile.cuda.lower.warp_specialised.program import (
    MAIL_NUMBERS,
    PipelineKnobs,
    Refused,
)
from tessera.tile.cuda.lower.warp_specialised.rewrite import (
    INT,
    Maker,
    Nodes,
    is_op,
    is_part,
    map_blocks,
    number,
    ops_in,
    out,
    substituted,
)
from tessera.tile.cuda.lower.warp_specialised.runs import Runs, find_runs, run_length, split_run
from tessera.tile.ir.ir import (
    Def,
    For,
    Function,
    Node,
    Op,
    Operand,
    SSAValue,
    While,
    defining_ops,
    operands,
    walk,
)
from tessera.tile.ir.schedule import shares_rows
from tessera.tile.ir.types import GlobalTensor
from tessera.tile.passes.single_iterations import extent_of


@dataclass(frozen=True)
class Order:
    """As the attributes of tile_order; reach: bytes that one index of the strip reads, as factors
    (numbers and extents), or () when `raster` is known. widened: the strip is wider where it has
    few tiles, so that those who come last find short ones."""

    order: tuple[int, ...]
    outer: int
    reversed: int | None
    raster: int
    reach: tuple[int | Dim, ...] = ()
    widened: bool = False


def rank_of(function: Function) -> int:
    """Axes of the grid that the function counts."""
    if function.launch == "axes":
        return len(function.grid)
    used = [n.attr["axis"] for n in ops_in(function.body, "group_id", "num_groups")]
    if None in used:
        raise Refused("it uses the linear number of its group")
    return max(used, default=0) + 1


def dependence(function: Function, but: Collection[SSAValue] = ()
               ) -> dict[SSAValue, frozenset[int]]:
    """The grid axes on which each value depends. but: variables of loops taken to depend on none
    for where their loops begin."""
    found: dict[SSAValue, frozenset[int]] = {}
    for node in walk(function.body):
        used = [found.get(x, frozenset()) for x in operands(node) if isinstance(x, SSAValue)]
        axes = frozenset().union(*used)
        if isinstance(node, Op):
            if node.name == "group_id" and node.attr["axis"] is not None:
                axes = frozenset({node.attr["axis"]})
            found |= {d.value: axes for d in node.outs}
        elif isinstance(node, For):
            begins = () if node.var.value in but else (node.lo,)
            found[node.var.value] = frozenset().union(
                *(found.get(x, frozenset()) for x in (*begins, node.step)
                  if isinstance(x, SSAValue)))
    return found


def choose_order(function: Function, pipeline: PipelineKnobs,
                 defaults: PipelineDefaults) -> Order:
    """From what the loads depend on; the pipeline's raster and reversed axis win.

    Where tiles take different numbers of iterations, what neighbours read overlaps, wherever each
    of them begins.
    """
    ragged = {n.var.value for n in _ragged_loops(function)}
    depends, rank = dependence(function, ragged), rank_of(function)
    loops = [n for n in walk(function.body) if isinstance(n, For)]
    inner = [load for n in loops for load in ops_in(n.body, "ring_load")] \
        or ops_in(function.body, "ring_load")
    axes = [depends[load.args[0]] for load in inner]  # type: ignore[index]
    shared = sorted(frozenset.intersection(*axes))
    rest = [a for a in range(rank) if a not in shared]
    reversed_axis = pipeline.reversed
    if reversed_axis is None:
        bounds = [a for n in loops if isinstance(n.hi, SSAValue)
                  for a in depends.get(n.hi, frozenset())]
        reversed_axis = min((a for a in bounds if a in rest), default=None)
    alike = shared and not any(a in ax for ax in axes for a in rest)
    if alike and rest and pipeline.cluster > 1 and not ragged:
        # Blocks of a cluster are neighbours on an axis along which every tile reads the same.
        return Order((*shared, *rest), len(shared), reversed_axis,
                     pipeline.raster or pipeline.cluster)
    if alike:
        # Every tile along `rest` reads the same: keep some of the last shared axis together.
        order = (*shared[:-1], shared[-1], *rest)
        raster = pipeline.raster or (defaults.strip if ragged else 0)
        return Order(order, len(shared) - 1, reversed_axis, raster,
                     () if raster else _reach(function, inner, depends),
                     bool(ragged and rest and not pipeline.raster and pipeline.tiles == "dynamic"))
    strip = next((a for a in rest if (a in axes[0]) != _rows_shared(function, pipeline)),
                 rest[0] if rest else 0)
    order = (*shared, strip, *(a for a in rest if a != strip))
    return Order(order, min(len(shared), rank - 1), reversed_axis,
                 pipeline.raster or _strip(function, defaults))


def uneven(function: Function) -> bool:
    """Whether some tiles take more iterations than others, but for the last of parts of a sum."""
    return bool(_ragged_loops(function))


def _ragged_loops(function: Function) -> list[For]:
    depends = dependence(function)
    made = defining_ops(function.body)
    return [n for n in walk(function.body)
            if isinstance(n, For) and not (extent_of(n, made) or _is_part(n, made, depends))
            and any(depends.get(x) for x in (n.lo, n.hi) if isinstance(x, SSAValue))]


def _is_part(loop: For, made: Mapping[Operand, Op], depends: Mapping[SSAValue, frozenset[int]]
             ) -> bool:
    """Whether it ends a number of steps behind its start that is the same for all tiles, or where
    something else ends: `range(lo, minimum(end, lo + depth), 64)`."""
    end = made.get(loop.hi)
    if end is None or end.name != "minimum":
        return False
    sums = [made[x] for x in end.args if is_op(made.get(x), "add")]
    return any(op.args[0] == loop.lo and not (isinstance(op.args[1], SSAValue) and depends.get(
        op.args[1])) for op in sums)


def _rows_shared(function: Function, pipeline: PipelineKnobs) -> bool:
    """Whether blocks of a cluster do tiles of the same rows, and not of the same columns."""
    matmuls = ops_in(function.body, "async_matmul")
    return pipeline.cluster > 1 and all(
        shares_rows(n.outs[0].type.shape) for n in matmuls)  # type: ignore[union-attr]


def _strip(function: Function, defaults: PipelineDefaults) -> int:
    rows = max(n.outs[0].type.shape[0]  # type: ignore[union-attr]
               for n in ops_in(function.body, "async_matmul"))
    return max(1, defaults.strip_rows // rows)


def _reach(function: Function, loads: list[Op], depends: dict[SSAValue, frozenset[int]]
           ) -> tuple[int | Dim, ...]:
    """Bytes of the loaded tensors for one index of the group axes, as factors."""
    views = {out(n): n for n in walk(function.body) if is_part(n)}
    types = {p.value: p.type for p in function.params}
    view = views[loads[0].args[0]]  # type: ignore[index]
    tensor = types[view.args[0]]  # type: ignore[index]
    assert isinstance(tensor, GlobalTensor)
    free = [d for d, x in zip(tensor.dims, view.args[1:], strict=True)
            if not (isinstance(x, SSAValue) and depends.get(x))]
    return (len(loads) * max(1, tensor.dtype.bits // 8), *free)


def runs_of(function: Function, pipeline: PipelineKnobs) -> Runs | None:
    """Of the tiles of a function with ring_loads."""
    return find_runs(function, dependence(function), rank_of(function), pipeline)


def loop_over_tiles(function: Function, nodes: Nodes, order: Order, maker: Maker,
                    pipeline: PipelineKnobs, producer: bool, defaults: PipelineDefaults,
                    runs: Runs | None = None) -> Nodes:
    """The nodes of one role inside the loop over this block's tiles.

    Tiles 'dynamic': the producer takes numbers from a counter and tells the consumers by mail where
    those tiles lie: the divisions are its own. Blocks of a cluster do neighbours of the strip axis,
    of which there may be some more than the grid has.
    """
    rank = len(order.order)
    made: list[Node] = []

    def scalar(name: str, *args: Operand, hint: str, **attrs: Any) -> SSAValue:
        made.append(maker.op(name, args, hint, **attrs))
        return out(made[-1])  # type: ignore[arg-type]

    counts = [scalar("num_groups", hint=f"groups_{a}", axis=a) for a in range(rank)]
    if (many := pipeline.cluster) > 1:
        strip = order.order[order.outer]
        whole = scalar("floordiv", scalar("add", counts[strip], number(many - 1), hint="n"),
                       number(many), hint="clusters")
        counts[strip] = scalar("mul", whole, number(many), hint=f"groups_{strip}")
    tiles = counts[0]
    for count in counts[1:]:
        tiles = scalar("mul", tiles, count, hint="tiles")
    if runs is not None:
        whole, blocks = counts[runs.axis], scalar("block_count", hint="blocks")
        length, counts[runs.axis] = run_length(tiles, blocks, counts, runs.axis, scalar)
        tiles = counts[0]
        for count in counts[1:]:
            tiles = scalar("mul", tiles, count, hint="runs")
    raster = _raster(function, order, counts, scalar, defaults)
    first = scalar("block_number", hint="block")
    step = scalar("block_count", hint="blocks")
    if pipeline.divided > 1:
        parts = scalar("part_count", hint="parts", parts=pipeline.divided)
        first, step = (scalar("floordiv", x, parts, hint=x.name) for x in (first, step))
    tile = maker.define("tile", INT)
    at = [maker.define(f"group_{a}", INT) for a in range(rank)]
    place = Op("tile_order", (tile.value, raster, *counts), tuple(at),
               (("order", order.order), ("outer", order.outer), ("reversed", order.reversed)))
    if runs is not None:
        nodes = _run(nodes, runs, at, length, whole, maker)
    body = (place, *_coordinates(nodes, at))
    if pipeline.tiles != "dynamic":
        return (*made, For(tile, first, tiles, step, (), (), body, ()))
    if rank >= MAIL_NUMBERS:
        raise Refused(f"its grid has {rank} axes, and a producer tells {MAIL_NUMBERS - 1} of the "
                      "tile that it took")
    if producer:
        return (*made, *_sending(tile, first, tiles, place, body[1:], maker))
    return (_receiving(at, body[1:], maker),)


def _run(nodes: Nodes, runs: Runs, at: list[Def], length: SSAValue, count: SSAValue, maker: Maker
         ) -> Nodes:
    """What the tiles of a run do once, and a loop over them."""
    once, each = split_run(nodes, runs)
    begin = maker.op("mul", (at[runs.axis].value, length), "begin")
    end = maker.op("add", (out(begin), length), "end")
    last = maker.op("minimum", (out(end), count), "end")
    tile = maker.define(f"group_{runs.axis}", INT)
    inner = [*at]
    inner[runs.axis] = tile
    loop = For(tile, out(begin), out(last), number(1), (), (), tuple(_coordinates(each, inner)), ())
    return (*once, begin, end, last, loop)


def _sending(tile: Def, first: SSAValue, tiles: SSAValue, place: Op, body: Nodes, maker: Maker
             ) -> list[Node]:
    """The producer's loop over the numbers that it gets. place: where such a tile lies."""
    test = maker.op("lt", (tile.value, tiles), "more")
    step = maker.op("next_tile", (tile.value, tiles), "tile")
    told = maker.op("mail_put", [number(1), *(d.value for d in place.outs)])
    loop = While((tile,), (first,), (test,), out(test), (place, told, *body, step), (out(step),))
    return [loop, maker.op("mail_put", [number(0)] * (1 + len(place.outs)))]


def _receiving(at: list[Def], body: Nodes, maker: Maker) -> Node:
    """The consumers' loop, until there is no tile any more."""
    some = maker.define("some", INT)
    get = Op("mail_get", (), (some, *at), (("count", 1 + len(at)),))
    test = maker.op("gt", (some.value, number(0)), "more")
    return While((), (), (get, test), out(test), body, ())


def _raster(function: Function, order: Order, counts: list[SSAValue], scalar: Any,
            defaults: PipelineDefaults) -> Operand:
    """The width of a strip: a number, or what fits L2, up to defaults.strip: tiles that read the
    same follow each other closely."""
    if order.widened:  # by 8 of up to 8 tiles, 4 of up to 16, 2 of up to 32
        many = counts[order.order[order.outer + 1]]
        eights = scalar("floordiv", scalar("add", many, number(7), hint="strip"), number(8),
                        hint="strip")
        times = scalar("maximum", scalar("floordiv", number(8), eights, hint="strip"), number(1),
                       hint="strip")
        return scalar("mul", times, number(order.raster), hint="strip")
    if not order.reach:
        return number(order.raster)
    constants = dict(function.constants)
    size, names = 1, []
    for factor in order.reach:
        text = str(factor)
        if text in constants or text.isdigit():
            size *= int(constants.get(text, 0) or text)
        elif any(p.value.name == text for p in function.params):
            names.append(SSAValue(text))
        else:
            return number(defaults.strip)
    left: Operand = number(max(1, defaults.shared_l2_bytes // size))
    for name in names:
        left = scalar("floordiv", left, name, hint="strip")
    left = scalar("minimum", left, number(defaults.strip), hint="strip")
    return scalar("maximum", left, number(1), hint="strip")


def _coordinates(nodes: Nodes, at: list[Def]) -> Nodes:
    """group_id(axis) -> the tile's coordinate."""
    table = {out(n): at[n.attr["axis"]].value for n in ops_in(nodes, "group_id")}
    kept = map_blocks(nodes, lambda block: (
        n for n in block if not (isinstance(n, Op) and n.name == "group_id")))
    return substituted(kept, table)


__all__ = ["Order", "choose_order", "loop_over_tiles", "rank_of"]
