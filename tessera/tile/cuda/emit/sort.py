"""Sorting rows: a bitonic network over the bits of the position.

Keys are integers in whose order the numbers stand: NaN last, and first in descending order, where
keys are inverted. For argsort the position is part of the key, so equal elements keep their order.
A merge of 2^s elements begins by comparing mirrored positions (all lower bits flipped) and goes on
with single bits; the smaller key always goes down (Batcher 1968, with Knuth's mirrored first step).

Rows that fit into a warp are sorted in registers and by shuffles; longer ones in shared memory.
"""

from __future__ import annotations

from math import prod
from typing import Any

from tessera.numerics import DType
from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.layout_conversion import convert_layout, indices, pool
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.cuda.intrinsics.reduce import padded
from tessera.tile.cuda.intrinsics.sort import kinds_of
from tessera.tile.ir.ir import Op
from tessera.tile.ir.register_layout import WARP_BITS, Bit, RegisterLayout, bits_of

LLVM = Any
Key = tuple[LLVM, ...]  # one word, or a 64-bit number and a position
IN_WARP = 1024  # the longest row sorted by a warp
REGISTERS = 64  # most of them, of 32 bits, that it may take


@emits("sort", "argsort")
def _sort(e: Emitter, op: Op) -> None:
    (x,), (made,) = op.args, op.outs
    layout, dtype = e.layout(x), e.dtype(x)
    tag = ("u" if dtype.kind == "uint" else "") + kind_of(dtype)
    how = f"{op.name!r}, {tag!r}, {bool(op.attr['descending'])}"
    rows = in_warps(layout)
    words = sum(2 if k == "i64" else 1 for k in kinds_of(op.name, tag))
    short = 1 << bits_of(layout.shape[-1]) <= IN_WARP and rows.count * words <= REGISTERS
    if short and e.warp_bits:
        text = e.fresh("rows")
        e.line(f"{text} = {convert_layout(e, e.name(x), layout, rows, dtype)}")
        at = e.index(rows, len(rows.shape) - 1)
        sort = e.use(op.name, f"use(sort.in_warp({how}, {rows.text!r}, {rows.shape}))")
        done = e.fresh("sorted")
        e.line(f"{done} = {sort}({text}, {at}, {e.thread})")
        e.define(made, convert_layout(e, done, rows, layout, made.type.dtype))
        return
    e.define(made, _in_memory(e, op.name, how, e.name(x), layout, dtype, tag))


def in_warps(layout: RegisterLayout) -> RegisterLayout:
    """A layout whose rows lie in one warp each: as it is if they do, else the low bits of the
    position in registers, the next in lanes, and other axes first over the warps."""
    last = len(layout.shape) - 1
    if all(i < WARP_BITS for i in layout.thread_bits(last)):
        return layout
    along: list[Bit] = [(last, i) for i in range(bits_of(layout.shape[last]))]
    other: list[Bit] = [(a, i) for a in range(last) for i in range(bits_of(layout.shape[a]))]
    warps = max(0, len(layout.threads) - WARP_BITS)
    lanes = min(WARP_BITS, len(layout.threads))
    over = other[:warps]
    inner = [*along[max(0, len(along) - lanes):]]
    inner += other[len(over):len(over) + lanes - len(inner)]
    used = {*over, *inner}
    spread = [*inner, *([None] * (lanes - len(inner))), *over, *([None] * (warps - len(over)))]
    return RegisterLayout(layout.shape, tuple(b for b in (*along, *other) if b not in used),
                          tuple(spread))


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
