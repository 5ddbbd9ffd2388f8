"""Numbers of groups and lanes."""

from __future__ import annotations

from math import prod

from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.ir.ir import Op, walk
from tessera.tile.ir.op_record import OPS
from tessera.tile.passes.cluster_groups import cluster_of


def group_number(e: Emitter) -> str:
    """The linear number of the group in the launch."""
    if e.facts.batched:
        first = e.once("first_block", e.word(0, "i32"))
        return e.once("group", f"i32({e.block_number} - {first})")
    return e.numbered_block("group")


def axes_of_grid(e: Emitter) -> int:
    """Axes that the body asks for: later ones vary faster, as in the interpreter."""
    asked = [n.attr["axis"] for n in e.made_by.values()
             if OPS[n.name].family == "ids" and n.attr.get("axis") is not None]
    return max([*asked, len(e.function.grid) - 1]) + 1


@emits("group_id")
def _group_id(e: Emitter, op: Op) -> None:
    (made,) = op.outs
    axis = op.attr["axis"]
    if axis is None:
        e.define(made, group_number(e))
        return
    e.define(made, coordinate(e, axis))


def coordinate(e: Emitter, axis: int) -> str:
    """The coordinate of the group: row-major, the last axis of the grid varies fastest."""
    if axes_of_grid(e) == 2 and in_bands(e):
        return band_coordinate(e, axis)
    count = axes_of_grid(e)
    if len(e.grid) == count and not e.facts.batched:
        return known_coordinate(e, axis)
    divide = e.use("divide", "use(fragments.udiv)")
    rest = e.use("remainder", "use(fragments.urem)")
    sizes = [e.param("axis", f"groups_{a}", "i32", a) for a in range(axis, count)]
    number = group_number(e)
    if sizes[1:]:
        number = f"{divide}({number}, i32({' * '.join(sizes[1:])}))"
    if axis:
        number = f"{rest}({number}, {sizes[0]})"
    return e.once(f"group_{axis}", number)


def known_coordinate(e: Emitter, axis: int) -> str:
    """The same where extents are known: a division by a number is a multiplication, which the
    loads of a short block need not wait for."""
    behind, number = prod(e.grid[axis + 1:]), group_number(e)
    if behind > 1:
        number = f"{e.use('divide', 'use(fragments.udiv)')}({number}, i32({behind}))"
    if axis:
        number = f"{e.use('remainder', 'use(fragments.urem)')}({number}, i32({e.grid[axis]}))"
    return e.once(f"group_{axis}", number)


BAND = 8  # rows of groups that run together


def in_bands(e: Emitter) -> bool:
    """Whether groups are numbered in bands: matmuls read the same rows and columns, which then
    stay in the L2 cache. The order of groups is free where nothing asks for their linear number,
    and no cluster is made of those that follow each other."""
    names = {(n.name, n.attr.get("axis")) for n in walk(e.function.body) if isinstance(n, Op)}
    return ("matmul", None) in names and cluster_of(e.function) == 1 and (
        not names & {("group_id", None), ("linear_id", None)})


def band_coordinate(e: Emitter, axis: int) -> str:
    """Bands of BAND rows (the last may have fewer), down the rows of a band first."""
    divide = e.use("divide", "use(fragments.udiv)")
    rest = e.use("remainder", "use(fragments.urem)")
    smaller = e.use("smaller", "use(elementwise.operation('minimum', 'i32'))")
    down, across = (e.param("axis", f"groups_{a}", "i32", a) for a in (0, 1))
    number, size = group_number(e), f"i32({across} * {BAND})"
    band = e.once("band", f"{divide}({number}, {size})")
    inside = e.once("in_band", f"{rest}({number}, {size})")
    rows = e.once("rows", f"{smaller}(i32({BAND}), i32({down} - {band} * {BAND}))")
    if axis:
        return e.once("group_1", f"{divide}({inside}, {rows})")
    return e.once("group_0", f"i32({band} * {BAND} + {rest}({inside}, {rows}))")


@emits("num_groups")
def _num_groups(e: Emitter, op: Op) -> None:
    (made,) = op.outs
    axis = op.attr["axis"]
    e.define(made, e.param("groups", "groups", "i32") if axis is None
             else e.param("axis", f"groups_{axis}", "i32", axis))


@emits("local_id")
def _local_id(e: Emitter, op: Op) -> None:
    e.define(op.outs[0], e.thread)


@emits("linear_id")
def _linear_id(e: Emitter, op: Op) -> None:
    e.define(op.outs[0], f"i32({group_number(e)} * {e.lanes} + {e.thread})")


@emits("lane_id")
def _lane_id(e: Emitter, op: Op) -> None:
    e.define(op.outs[0], f"i32({e.thread} & 31)")


@emits("warp_id")
def _warp_id(e: Emitter, op: Op) -> None:
    e.define(op.outs[0], f"i32({e.thread} >> 5)")


@emits("group_size")
def _group_size(e: Emitter, op: Op) -> None:
    e.define(op.outs[0], f"i32({e.lanes})")
