"""Reductions: within the registers of a thread, over the lanes of a warp, over the warps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from tessera import hooks
from tessera.lazy_dataclass import dataclass
from tessera.numerics import DType
from tessera.tile.cuda.emit.elementwise import number
from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.instruction import kind_bytes
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.cuda.intrinsics.reduce import reached
from tessera.tile.ir.ir import For, Node, Op, SSAValue, regions
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.register_layout import RegisterLayout

# Reads of a thread, from which a barrier more costs less. While all read all, sums of the columns
# of [16384, 4096] bf16 in blocks of 64 rows and 64 columns took 32.1 us in 2 warps, 36.9 in 4 (32
# reads), 95 in 8 (64), 322 in 16 (H200, 2026-11-28).
SHARED_OUT = 64


@emits(*(name for name, op in OPS.items() if op.joined_by))
def _reduction(e: Emitter, op: Op) -> None:
    meeting = meetings(e).get(op.outs[0].value)
    if meeting is not None:
        if op is meeting.ops[0]:
            _emit_block_reductions(e, meeting)
        return
    tag, whole = _tag(e, op), op.attr["axis"] is None
    text, layout, axis = _first_parts(e, op)
    if not whole and layout.shape[:axis] + layout.shape[axis + 1:] and (
            e.layout(op.outs[0].value) != layout.drop(axis)):  # it is layout.divided(axis)
        e.define(op.outs[0], f"{_of_warps(e, layout, axis, op.name, tag, True)}({text})")
        return
    _define(e, op, reduced(e, text, layout, axis, op.name, tag), layout.drop(axis))


def _first_parts(e: Emitter, op: Op) -> tuple[str, RegisterLayout, int]:
    """What threads combine, how it lies, and along which axis."""
    text, layout, axis = _inside(e, op), e.layout(op.args[0]), op.attr["axis"]
    if axis is None:
        return *_of_threads(e, text, layout, op.name, _tag(e, op)), 0
    return text, layout, axis


def _of_threads(e: Emitter, text: str, layout: RegisterLayout, name: str, tag: str
                ) -> tuple[str, RegisterLayout]:
    """What each thread has of a whole tile, along the first axis alone, and its layout, whose one
    axis all threads share: none exchanges a value for each row, and warps meet once."""
    shared = tuple(bit and (0, i) for i, bit in enumerate(layout.threads))
    if len(layout.shape) == 1:
        return text, layout
    for axis in range(len(layout.shape) - 1, 0, -1):
        make = e.use(name, f"use(reduce.reduce({name!r}, {tag!r}, {layout.text!r}, {layout.shape}, "
                     f"{axis}, ()))")
        text, layout = f"{make}({text})", layout.drop(axis)
    return text, replace(layout, threads=shared)


def _inside(e: Emitter, op: Op) -> str:
    """What is combined: with what changes nothing outside of the tile."""
    axis, layout, text, dtype = op.attr["axis"], e.layout(op.args[0]), e.name(op.args[0]), e.dtype(
        op.args[0])
    for a in range(len(layout.shape)) if axis is None else [axis]:
        if layout.overhangs(a):
            text = inside_only(e, text, layout, a, kind_of(dtype), neutral(op.name, dtype))
    return text


def _tag(e: Emitter, op: Op) -> str:
    dtype = e.dtype(op.args[0])
    return ("u" if dtype.kind == "uint" else "") + kind_of(dtype)


def _define(e: Emitter, op: Op, text: str, layout: RegisterLayout) -> None:
    whole = op.attr["axis"] is None or not layout.shape
    e.define(op.outs[0], f"{e.use('pick', 'use(fragments.pick(0))')}({text})" if whole else text)


def neutral(name: str, dtype: object) -> str:
    """What changes nothing, as text in the header."""
    assert isinstance(dtype, DType)
    value = OPS[name].neutral
    assert value is not None, name
    if dtype.kind != "float" and abs(value) == float("inf"):
        value = int(dtype.max if value > 0 else dtype.min)
    return number(value, dtype)


def inside_only(e: Emitter, text: str, layout: RegisterLayout, axis: int, kind: str,
                fill: str) -> str:
    """The fragment with `fill` in registers that lie outside of the tile."""
    make = e.use("inside", f"use(tiles.mask({layout.text!r}, {layout.shape}, {axis}, {kind!r}, "
                 f"{fill}))")
    return f"{make}({text}, i32({layout.shape[axis]} - {e.index(layout, axis)}))"


@dataclass(frozen=True)
class Meeting:
    """Reductions over warps that stand side by side, none of another's result: warps write what
    they found for all of them, and meet once. apart: in a loop with a barrier, or another one with
    its own, between what threads read of one iteration and what they write in the next."""

    ops: tuple[Op, ...]
    apart: bool


def meetings(e: Emitter) -> dict[SSAValue, Meeting]:
    """By the result of each."""
    if "meetings" not in e.memo:
        found: dict[SSAValue, Meeting] = {}

        def look(nodes: tuple[Node, ...], loop: bool) -> None:
            runs: list[list[Op]] = []
            for before, node in zip((None, *nodes), nodes, strict=False):
                if isinstance(node, Op):
                    if _is_block_reduction(e, node):
                        beside = runs and before is runs[-1][-1] and not {
                            o.outs[0].value for o in runs[-1]} & set(node.args)
                        runs[-1].append(node) if beside else runs.append([node])
                else:
                    for region in regions(node):
                        look(region, isinstance(node, For))
            for run in runs:
                apart = loop and (len(runs) > 1 or any(
                    isinstance(n, Op) and n.name == "barrier" for n in nodes))
                found.update({op.outs[0].value: Meeting(tuple(run), apart) for op in run})

        look(e.function.body, False)
        e.memo["meetings"] = found
    made = e.memo["meetings"]
    assert isinstance(made, dict)
    return made


def _is_block_reduction(e: Emitter, op: Op) -> bool:
    """Whether the warps of a group meet for a reduction, once."""
    if not OPS[op.name].joined_by:
        return False
    layout, axis = e.layout(op.args[0]), op.attr["axis"]
    axes = range(len(layout.shape)) if axis is None else (axis,)
    return any(i >= e.warp_bits for a in axes for i in layout.thread_bits(a))


def _emit_block_reductions(e: Emitter, meeting: Meeting) -> None:
    parts = list[tuple[str, RegisterLayout, int]]()
    for op in meeting.ops:
        text, layout, axis = _first_parts(e, op)
        part = e.fresh("part")
        e.line(f"{part} = {_of_warps(e, layout, axis, op.name, _tag(e, op))}({text})")
        parts.append((part, layout, axis))
    if e.loops and not meeting.apart:
        e.sync()
    stored = {op.outs[0].value: _store_partials(e, *part, op.name, _tag(e, op))
              for part, op in zip(parts, meeting.ops, strict=True)}
    e.sync()
    reads = _combined(e, stored)
    numbers = any(op.attr["axis"] is None for op in meeting.ops)
    taken = set() if numbers else {v for take in hooks.behind_meetings for v in take(e, reads)}
    for op, (_, layout, axis) in zip(meeting.ops, parts, strict=True):
        if (result := op.outs[0].value) not in taken:
            _define(e, op, reads[result], layout.drop(axis))


def reduced(e: Emitter, text: str, layout: RegisterLayout, axis: int, name: str, tag: str) -> str:
    """A fragment of layout.drop(axis) with the combined values, in all threads."""
    make = _of_warps(e, layout, axis, name, tag)
    if not _warps(e, layout, axis):
        return f"{make}({text})"
    part = e.fresh("part")
    e.line(f"{part} = {make}({text})")
    if e.loops:
        e.sync()
    stored = _store_partials(e, part, layout, axis, name, tag)
    e.sync()
    return _combined(e, {None: stored})[None]


def _warps(e: Emitter, layout: RegisterLayout, axis: int) -> tuple[int, ...]:
    return tuple(i for i in layout.thread_bits(axis) if i >= e.warp_bits)


def _of_warps(e: Emitter, layout: RegisterLayout, axis: int, name: str, tag: str,
              divided: bool = False) -> str:
    """The function that combines what each warp has."""
    lanes = tuple(1 << i for i in layout.thread_bits(axis) if i < e.warp_bits)
    return e.use(name, f"use(reduce.reduce({name!r}, {tag!r}, {layout.text!r}, {layout.shape}, "
                 f"{axis}, {lanes}{', True' if divided else ''}))")


@dataclass(frozen=True)
class Partials:
    """What each of `count` warps, or groups of them, has found of each of `elements` values, in
    shared memory from `at` on. layout: of what everybody reads of it."""

    name: str
    tag: str
    layout: RegisterLayout
    at: str
    count: int
    elements: int

    @property
    def shared_out(self) -> bool:
        """Whether threads combine it among them before everybody reads: else each combines all that
        it has registers for, and so do others that have the same."""
        return self.count * self.layout.count >= SHARED_OUT

    def read(self, e: Emitter, at: str, count: int) -> str:
        read = e.use("get_parts", f"use(reduce.get({self.name!r}, {self.tag!r}, "
                     f"{self.layout.text!r}, {self.layout.shape}, {count}))")
        return f"{read}({at} + {kind_bytes(self.tag)} * {flat_index(e, self.layout)})"


def _store_partials(e: Emitter, part: str, layout: RegisterLayout, axis: int, name: str,
                    tag: str) -> Partials:
    """Each warp writes what it found."""
    rest, warps = layout.drop(axis), _warps(e, layout, axis)
    size = kind_bytes(tag)
    count, elements = 1 << len(warps), prod(reached(rest))
    made = Partials(name, tag, rest, "", count, elements)
    at = e.scratch(size * (count + made.shared_out) * elements)
    write = e.use("put_parts", f"use(reduce.put({tag!r}, {rest.text!r}, {rest.shape}))")
    e.line(f"{write}({part}, {at} + {size} * ({part_of(e, warps)} * {elements} + "
           f"{flat_index(e, rest)}), {writer(e, layout, layout.thread_bits(axis))})")
    return replace(made, at=at)


def _combined(e: Emitter, stored: dict[Any, Partials]) -> dict[Any, str]:
    """By what each is of: what everybody reads behind the barrier, combined."""
    reads: dict[Any, str] = {}
    for of, p in stored.items():
        size, at = kind_bytes(p.tag), p.at
        if p.shared_out:
            at = f"{p.at} + {size * p.count * p.elements}"
            share = min(p.elements, 1 << (e.lanes.bit_length() - 1))  # of threads, or elements
            mine = f"({e.thread} & {share - 1})"
            join = e.use("join_parts", f"use(reduce.join({p.name!r}, {p.tag!r}, {p.count}, "
                         f"{p.elements}, {share}))")
            e.line(f"{join}({p.at} + {size} * {mine}, {at} + {size} * {mine}, "
                   f"i32({e.thread} < {share}))")
        reads[of] = p.read(e, at, 1 if p.shared_out else p.count)
    if any(p.shared_out for p in stored.values()):
        e.sync()
    return reads


def flat_index(e: Emitter, layout: RegisterLayout) -> str:
    """The thread part of the row-major number of an element of the padded tile."""
    text = "i32(0)"
    for axis, n in enumerate(reached(layout)):
        part = e.index(layout, axis)
        text = part if text == "i32(0)" else f"({text}) * {n} + {part}"
    return f"({text})"


def part_of(e: Emitter, warps: Sequence[int]) -> str:
    """Which part of what is combined this warp has found. warps: the bits of threads that tell."""
    return e.once("part_of", "i32({})".format(
        " | ".join(f"({e.thread} >> {bit} & 1) << {i}" for i, bit in enumerate(warps))))


def writer(e: Emitter, layout: RegisterLayout, combined: Sequence[int]) -> str:
    """Whether this thread writes for its warp: the first among those with the same result.
    combined: the bits of threads along the axes that are reduced."""
    same = {*(i for i in combined if i < e.warp_bits), *layout.replicas,
            *range(len(layout.threads), (e.lanes - 1).bit_length())}
    return e.once("writes", f"i32(({e.thread} & {sum(1 << i for i in same)}) == 0)")
