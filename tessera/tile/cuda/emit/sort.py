"""Sorting rows: a bitonic network over the bits of the position.

Keys are integers in whose order the numbers stand: NaN last, and first in descending order, where
keys are inverted. For argsort the position is part of the key, so equal elements keep their order.
A merge of 2^s elements begins by comparing mirrored positions (all lower bits flipped) and goes on
with single bits; the smaller key always goes down (Batcher 1968, with Knuth's mirrored first step).

Rows that fit into the registers of their threads stay there: elements are exchanged in a thread, by
shuffles, and through shared memory between warps. Longer ones are sorted in shared memory.
"""

from __future__ import annotations

import itertools
from math import prod

from tessera.numerics import DType
from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.layout_conversion import convert_layout, indices, pool
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.cuda.intrinsics.reduce import padded
from tessera.tile.cuda.intrinsics.sort import by_cost, kinds_of, steps_of, whole
from tessera.tile.ir.ir import Op
from tessera.tile.ir.register_layout import RegisterLayout

REGISTERS = 64  # most of them, of 32 bits, that the keys of a thread may take


@emits("sort", "argsort")
def _sort(e: Emitter, op: Op) -> None:
    (x,), (made,) = op.args, op.outs
    layout, dtype = e.layout(x), e.dtype(x)
    tag = ("u" if dtype.kind == "uint" else "") + kind_of(dtype)
    how = f"{op.name!r}, {tag!r}, {bool(op.attr['descending'])}"
    words = sum(2 if k == "i64" else 1 for k in kinds_of(op.name, tag))
    if whole(layout).count * words <= REGISTERS and e.warp_bits:
        rows, text = by_cost(layout), e.name(x)
        if op.attr.get("bitonic"):  # what stands where counts
            text = convert_layout(e, text, layout, rows, dtype)
            layout = rows
        done = _in_registers(e, op.name, how, text, layout, rows, tag,
                             bool(op.attr.get("bitonic")))
        e.define(made, convert_layout(e, done, rows, e.layout(x), made.type.dtype))
        return
    e.define(made, _in_memory(e, op.name, how, e.name(x), layout, dtype, tag))


def _in_registers(e: Emitter, name: str, how: str, text: str, layout: RegisterLayout,
                  rows: RegisterLayout, tag: str, bitonic: bool) -> str:
    """The network by comparisons in a thread, between lanes, and between warps, which meet in
    shared memory for each."""
    last, full = len(rows.shape) - 1, whole(rows)
    kinds, count, threads = kinds_of(name, tag), full.count, 1 << len(rows.threads)
    make = e.use("sort_keys", f"use(sort.keys({how}, {layout.text!r}, {layout.shape}))")
    keys = [e.fresh("key") for _ in kinds]
    e.line(f"{', '.join(keys)} = {make}({text}, {e.index(layout, last)})")
    warps = {bit[1] for bit in rows.threads[e.warp_bits:] if bit and bit[0] == last}
    head = f"{name!r}, {tag!r}, {rows.text!r}, {rows.shape}"

    def done(call: str, *args: str) -> None:
        found = [e.fresh("key") for _ in kinds]
        e.line(f"{', '.join(found)} = {call}({', '.join([*keys, *args])})")
        keys[:] = found

    def between_warps(flips: tuple[int, ...]) -> bool:
        return bool(warps & {*flips})

    for meets, run in itertools.groupby(steps_of(rows, bitonic), key=between_warps):
        steps = tuple(run)
        if not meets:
            done(e.use("sort_steps", f"use(sort.in_warp({head}, {steps}))"), e.thread)
            continue
        size = threads * count * sum(8 if k == "i64" else 4 for k in kinds)
        for flips in steps:
            at, used = pool(e, size)
            if used:
                e.sync()
            put = e.use("put_keys", f"use(sort.put_keys({name!r}, {tag!r}, {count}, {threads}))")
            e.line(f"{put}({', '.join([*keys, at, e.thread])})")
            e.sync()
            done(e.use("sort_across", f"use(sort.across({head}, {flips}, {threads}))"), at,
                 e.thread)
    get = e.use("sorted_values", f"use(sort.values({how}, {rows.text!r}, {rows.shape}))")
    made = e.fresh("sorted")
    e.line(f"{made} = {get}({', '.join(keys)})")
    return made


def _in_memory(e: Emitter, name: str, how: str, text: str, layout: RegisterLayout, dtype: DType,
               tag: str) -> str:
    """Rows in shared memory, padded to powers of two: each step is a loop over all pairs."""
    kinds = kinds_of(name, tag)
    rows, width = prod(layout.shape[:-1]), padded(layout.shape)[-1]
    sizes = [8 if k == "i64" else 4 for k in kinds]
    at, used = pool(e, rows * width * sum(sizes))
    if used:
        e.sync()
    shape = (rows, width)
    clear = e.use("pad_rows", f"use(sort.pad({how}, {shape}))")
    store = e.use("put_rows", f"use(sort.put({how}, {layout.text!r}, {layout.shape}))")
    step = e.use("sort_step", f"use(sort.step({how}, {shape}))")
    size, bit = e.fresh("size"), e.fresh("stride")
    if width > layout.shape[-1]:
        _loop(e, rows * width, clear, at)
        e.sync()
    e.line(f"{store}({', '.join([text, at, *indices(e, layout)])})")
    e.line(f"{size} = i32(2)")
    with e.block(f"while {size} <= {width}"):
        e.line(f"{bit} = i32({size} >> 1)")
        with e.block(f"while {bit} > 0"):
            e.sync()
            _loop(e, rows * width // 2, step, at, size, bit)
            e.line(f"{bit} = i32({bit} >> 1)")
        e.line(f"{size} = i32({size} * 2)")
    e.sync()
    load = e.use("get_rows", f"use(sort.get({how}, {layout.text!r}, {layout.shape}))")
    made = e.fresh("sorted")
    e.line(f"{made} = {load}({', '.join([at, *indices(e, layout)])})")
    return made


def _loop(e: Emitter, count: int, call: str, *args: str) -> None:
    """call(0 .. count - 1, ...), dealt to the threads; what is beyond `count` does nothing."""
    i = e.fresh("iteration")
    e.line(f"{i} = i32(0)")
    with e.block(f"while {i} < {count}"):
        e.line(f"{call}(i32({i} + {e.thread}), {', '.join(args)})")
        e.line(f"{i} = i32({i} + {e.lanes})")
