"""Intrinsics of the warp-specialised form, as Operations for `use`: rings, operands, statistics.

Offsets are in bytes of the kernel's dynamic shared memory. A ring's barriers are full[slots], then
empty[slots]; its position is a slot and the parity of the phase that comes next.
"""

from __future__ import annotations

import functools
from typing import Any

from tessera.numerics import DType, find_dtype
from tessera.runtime.generations import TensorCopies
from tessera.tile.cuda.builder import Builder
from tessera.tile.cuda.instruction import InstructionForm, Kind, Operand, Operation
from tessera.tile.cuda.instruction_names import find_instruction
from tessera.tile.cuda.intrinsics.formats import access, decode, encode_half, kind_of
from tessera.tile.cuda.intrinsics.shared_memory import slot_address
from tessera.tile.cuda.ptx import matrix, memory, tma, warp
from tessera.tile.cuda.ptx.mbarrier import BARRIER_BYTES
from tessera.tile.ir.register_layout import RegisterLayout, registers_of_rows

FLT_MAX = 3.4028234663852886e38
MOST_ROWS = TensorCopies.most_box  # of a tile
QUAD = (1, 2)  # lane distances inside of the four lanes that share a row


def operands(**kinds: Kind) -> tuple[Operand, ...]:
    return tuple(Operand(name, kind) for name, kind in kinds.items())


def barrier(b: Builder, offset: int, slot: Any) -> Any:
    """The address of a slot's barrier."""
    return b.add(b.add(b.shared_base(), b.i32(offset)), b.shl(slot, b.i32(3)))


# --- rings ------------------------------------------------------------------------------------
@functools.cache
def ring_init(slots: int, barriers: int, arrivals: int, dealers: int = 0) -> Operation:
    """() -> barriers of a ring; `arrivals` warps give a slot back, `dealers` threads deal it."""
    def body(b: Builder) -> None:
        for i in range((3 if dealers else 2) * slots):
            at = b.add(b.shared_base(), b.i32(barriers + BARRIER_BYTES * i))
            count = (1, arrivals, dealers)[i // slots]
            b.call(find_instruction("mbarrier_init"), at, b.i32(count))

    return Operation("ring_init", 0, lambda: InstructionForm((), (), body))


def _next(b: Builder, slots: int, slot: Any, phase: Any) -> list[Any]:
    after = b.add(slot, b.i32(1))
    wrapped = b.compare("==", after, b.i32(slots))
    return [b.select(wrapped, b.i32(0), after), b.xor(phase, b.to_int(wrapped))]


@functools.cache
def ring_next(slots: int) -> Operation:
    """(slot, phase) -> the position after it."""
    def body(b: Builder, slot: Any, phase: Any) -> list[Any]:
        return _next(b, slots, slot, phase)

    form = InstructionForm(operands(slot="i32", phase="i32"), operands(next="i32", parity="i32"),
                           body)
    return Operation("ring_next", 2, lambda *_: form)


@functools.cache
def ring_acquire(slots: int, barriers: int, copied_bytes: int) -> Operation:
    """(slot, phase): waits until the slot is empty and expects its bytes."""
    def body(b: Builder, slot: Any, phase: Any) -> None:
        b.call(find_instruction("mbarrier_wait"),
               barrier(b, barriers + BARRIER_BYTES * slots, slot), phase)
        b.call(find_instruction("mbarrier_arrive_expect"), barrier(b, barriers, slot),
               b.i32(copied_bytes))

    form = InstructionForm(operands(slot="i32", phase="i32"), (), body)
    return Operation("ring_acquire", 2, lambda *_: form)


@functools.cache
def ring_drain(slots: int, barriers: int) -> Operation:
    """(slot, phase): waits until all slots are empty."""
    def body(b: Builder, slot: Any, phase: Any) -> None:
        for _ in range(slots):
            b.call(find_instruction("mbarrier_wait"),
                   barrier(b, barriers + BARRIER_BYTES * slots, slot), phase)
            slot, phase = _next(b, slots, slot, phase)

    form = InstructionForm(operands(slot="i32", phase="i32"), (), body)
    return Operation("ring_drain", 2, lambda *_: form)


@functools.cache
def ring_copy_part(rank: int, offset: int, slot_bytes: int, barriers: int, panels: int,
                   panel_bytes: int, panel_columns: int, blocks: int, row: int, rows: int
                   ) -> Operation:
    """(slot, map, number of the block in its cluster, coordinates innermost first): this block's
    rows of each panel of a tile, for all blocks. row: the coordinate of rows; rows: of a tile."""
    part_bytes, part = panel_bytes // blocks, rows // blocks

    def body(b: Builder, slot: Any, map_: Any, which: Any, *at: Any) -> None:
        base = slot_address(b, offset, slot, slot_bytes)
        base = b.add(base, b.mul(which, b.i32(part_bytes)))
        where = list(at)
        where[row] = b.add(at[row], b.mul(which, b.i32(part)))
        for p in range(panels):
            b.call(tma.load(rank, multicast=True), b.add(base, b.i32(p * panel_bytes)), map_,
                   b.add(where[0], b.i32(p * panel_columns)), *where[1:],
                   barrier(b, barriers, slot), b.i32((1 << blocks) - 1))

    args = (Operand("slot", "i32"), Operand("map", "i64"), Operand("which", "i32"),
            *(Operand(f"c{i}", "i32") for i in range(rank)))
    form = InstructionForm(args, (), body)
    return Operation("ring_copy_part", len(args), lambda *_: form)


@functools.cache
def ring_copy(rank: int, offset: int, slot_bytes: int, barriers: int, panels: int,
              panel_bytes: int, panel_columns: int, streamed: bool = False, joined: bool = False
              ) -> Operation:
    """(slot, map, coordinates innermost first): one copy for each panel of a tile, or of all where
    they are joined: then the map has an axis of panels. streamed: its bytes leave L2 first."""
    def body(b: Builder, slot: Any, map_: Any, first: Any, *rest: Any) -> None:
        base = slot_address(b, offset, slot, slot_bytes)
        policy = [b.const("i64", memory.POLICIES["evict_first"])] if streamed else []
        if joined:
            b.call(tma.load(rank + 1, hint=streamed), base, map_, b.i32(0), *rest,
                   b.udiv(first, b.i32(panel_columns)), barrier(b, barriers, slot), *policy)
            return
        for p in range(panels):
            to, column = b.add(base, b.i32(p * panel_bytes)), b.add(first, b.i32(p * panel_columns))
            b.call(tma.load(rank, hint=streamed), to, map_, column, *rest,
                   barrier(b, barriers, slot), *policy)

    args = (Operand("slot", "i32"), Operand("map", "i64"),
            *(Operand(f"c{i}", "i32") for i in range(rank)))
    form = InstructionForm(args, (), body)
    return Operation("ring_copy", len(args), lambda *_: form)


@functools.cache
def ring_copy_windows(offset: int, slot_bytes: int, barriers: int, panels: int, panel_bytes: int,
                      panel_columns: int, geometry: tuple) -> Operation:
    """(slot, map, place, column): one copy for each panel of a tile of unfolded images.

    geometry: channels, window, stride, dilation, before, images, results, steps
    Rows in front of the first are of images of negative numbers, which are zeros, as are all that
    there are not; no tile reaches from so far in front to the first.
    """
    channels, window, stride, dilation, before, _, results, _ = geometry
    front = -(-MOST_ROWS // (results[0] * results[1]))  # images

    def body(b: Builder, slot: Any, map_: Any, place: Any, column: Any) -> None:
        base = slot_address(b, offset, slot, slot_bytes)
        first = b.i32(-MOST_ROWS)
        place = b.select(b.compare("<", place, first), first, place)
        place = b.add(place, b.i32(front * results[0] * results[1]))
        row = b.udiv(place, b.i32(results[1]))
        w, h = _begin(b, b.urem(place, b.i32(results[1])), 1), _begin(
            b, b.urem(row, b.i32(results[0])), 0)
        image = b.sub(b.udiv(row, b.i32(results[0])), b.i32(front))
        for p in range(panels):
            at = b.add(column, b.i32(p * panel_columns))
            tap = b.udiv(at, b.i32(channels))
            down, right = b.udiv(tap, b.i32(window[1])), b.urem(tap, b.i32(window[1]))
            inside = b.compare("<", down, b.i32(window[0]))  # no image has the number -1
            b.call(tma.load_windows(), b.add(base, b.i32(p * panel_bytes)), map_,
                   b.urem(at, b.i32(channels)), w, h, b.select(inside, image, b.i32(-1)),
                   barrier(b, barriers, slot),
                   b.mul(right, b.i32(dilation[1])), b.mul(down, b.i32(dilation[0])))

    def _begin(b: Builder, number: Any, axis: int) -> Any:
        return b.sub(b.mul(number, b.i32(stride[axis])), b.i32(before[axis]))

    form = InstructionForm((Operand("slot", "i32"), Operand("map", "i64"), *operands(
        place="i32", column="i32")), (), body)
    return Operation("ring_copy_windows", 4, lambda *_: form)


@functools.cache
def ring_wait(*barriers: int) -> Operation:
    """(slot, phase) -> the slot, once it is full, and in order where other barriers say so."""
    def body(b: Builder, slot: Any, phase: Any) -> Any:
        for at in barriers:
            b.call(find_instruction("mbarrier_wait"), barrier(b, at, slot), phase)
        return slot

    form = InstructionForm(operands(slot="i32", phase="i32"), operands(d="i32"), body)
    return Operation("ring_wait", 2, lambda *_: form)


@functools.cache
def ring_release(slots: int, barriers: int, maybe: bool) -> Operation:
    """(slot, lead): one lane of each warp arrives at `empty`. maybe: the slot may be -1, none."""
    def body(b: Builder, slot: Any, lead: Any) -> None:
        if maybe:
            lead = b.select(b.compare("<", slot, b.i32(0)), b.i32(0), lead)
        b.call(find_instruction("mbarrier_arrive_if"),
               barrier(b, barriers + BARRIER_BYTES * slots, slot), lead)

    form = InstructionForm(operands(slot="i32", lead="i32"), (), body)
    return Operation("ring_release", 2, lambda *_: form)


@functools.cache
def ring_release_all(slots: int, barriers: int, blocks: int, maybe: bool) -> Operation:
    """(slot, lane): lanes of each warp arrive at `empty` of all blocks of the cluster."""
    def body(b: Builder, slot: Any, lane: Any) -> None:
        on = b.compare("<", lane, b.i32(blocks))
        if maybe:
            on = b.and_(on, b.compare(">=", slot, b.i32(0)))
        b.call(find_instruction("mbarrier_arrive_remote"),
               barrier(b, barriers + BARRIER_BYTES * slots, slot), lane, b.to_int(on))

    form = InstructionForm(operands(slot="i32", lane="i32"), (), body)
    return Operation("ring_release_all", 2, lambda *_: form)


# --- operands of matmuls -----------------------------------------------------------------------
@functools.cache
def describe(offset: int, slot_bytes: int, group_bytes: int, bits: int) -> Operation:
    """(slot, warpgroup) -> the matrix descriptor of this warpgroup's part; bits: its constants."""
    high = bits - ((bits >> 63) << 64)  # as a signed constant

    def body(b: Builder, slot: Any, group: Any) -> Any:
        at = slot_address(b, offset, slot, slot_bytes)
        if group_bytes:
            at = b.add(at, b.mul(group, b.i32(group_bytes)))
        low = b.lshr(b.and_(at, b.i32(0x3FFFF)), b.i32(4))
        return b.or_(b.zext(low, "i64"), b.const("i64", high))

    form = InstructionForm(operands(slot="i32", group="i32"), operands(d="i64"), body)
    return Operation("describe", 2, lambda *_: form)


def _fragments(b: Builder, base: Any, thread: Any, panel_bytes: int, width: int, row_bytes: int
               ) -> list[Any]:
    """A's registers of the warp's 16 rows, by ldmatrix from panels of rows of `width` bytes,
    swizzled as wide. All lanes have read when it ends: the slot may go back."""
    steps, shift = width // 32, {128: 0, 64: 1, 32: 2}[width]  # of a panel; rows of 128 bytes
    lane = b.and_(thread, b.i32(31))
    row = b.or_(b.shl(b.lshr(thread, b.i32(5)), b.i32(4)), b.and_(lane, b.i32(15)))
    base = b.add(base, b.shl(row, b.i32(7 - shift)))
    half = b.lshr(lane, b.i32(4))
    line = b.and_(b.lshr(lane, b.i32(shift)), b.i32(width // 16 - 1))
    out: list[Any] = []
    for step in range(row_bytes // 32):
        chunk = b.xor(b.or_(half, b.i32(2 * (step % steps))), line)
        at = b.add(b.add(base, b.shl(chunk, b.i32(4))), b.i32(step // steps * panel_bytes))
        out += b.call(matrix.ldmatrix(4), at)
    b.call(find_instruction("sync_warp"), b.i32(-1))
    return out


def _pairs(b: Builder, base: Any, thread: Any, panel_bytes: int, width: int, row_bytes: int,
           d: DType) -> list[Any]:
    """The same of 32 or 8 bits, two neighbours at a time: of 8 columns, rows l / 4 and 8 below."""
    shift = {128: 0, 64: 1, 32: 2}[width]
    lane = b.and_(thread, b.i32(31))
    row, pair = b.lshr(lane, b.i32(2)), b.and_(lane, b.i32(3))
    line = b.or_(b.shl(b.lshr(thread, b.i32(5)), b.i32(4)), row)
    inside = b.shl(b.and_(pair, b.i32(1)), b.i32(3)) if d.bits == 32 else b.shl(pair, b.i32(1))
    base = b.add(b.add(base, b.shl(line, b.i32(7 - shift))), inside)
    turn = b.and_(b.lshr(row, b.i32(shift)), b.i32(width // 16 - 1))
    first = b.xor(b.lshr(pair, b.i32(1)), turn) if d.bits == 32 else turn
    element, vector = ("f32", 2) if d.name == "f32" else access(d, 2)
    out: list[Any] = []
    for byte in range(0, row_bytes, d.bits):
        chunk = b.shl(b.xor(first, b.i32(byte % width // 16)), b.i32(4))
        for down in (0, 8):
            to = byte // width * panel_bytes + down * width + byte % 16
            read = b.call(memory.ld("shared", element, vector),
                          b.add(b.add(base, chunk), b.i32(to)))
            out += read if element == "f32" else decode(b, d, [read], 2)
    b.call(find_instruction("sync_warp"), b.i32(-1))
    return out


@functools.cache
def hold(offset: int, slot_bytes: int, panel_bytes: int, width: int, row_bytes: int) -> Operation:
    """(slot, thread) -> A's registers of the warp's 16 rows."""
    def body(b: Builder, slot: Any, thread: Any) -> list[Any]:
        base = slot_address(b, offset, slot, slot_bytes)
        return _fragments(b, base, thread, panel_bytes, width, row_bytes)

    form = InstructionForm(operands(slot="i32", thread="i32"),
                           (Operand("d", "i32", row_bytes // 8),), body)
    return Operation("hold", 2, lambda *_: form)


@functools.cache
def read_tile(offset: int, slot_bytes: int, panel_bytes: int, width: int, row_bytes: int,
              dtype: str) -> Operation:
    """(slot, thread) -> the numbers that A's registers have two of each, of 8, 16 or 32 bits in
    memory."""
    d = find_dtype(dtype)

    def body(b: Builder, slot: Any, thread: Any) -> list[Any]:
        base = slot_address(b, offset, slot, slot_bytes)
        if d.bits != 16:
            return _pairs(b, base, thread, panel_bytes, width, row_bytes, d)
        words = _fragments(b, base, thread, panel_bytes, width, row_bytes)
        return decode(b, d, words, 2 * len(words))

    form = InstructionForm(operands(slot="i32", thread="i32"),
                           (Operand("d", kind_of(d), 4 * row_bytes // d.bits),), body)
    return Operation("read_tile", 2, lambda *_: form)


@functools.cache
def read_row(offset: int, slot_bytes: int, layout: str, shape: tuple[int], dtype: str) -> Operation:
    """(slot, thread part of the index) -> the numbers of 16 or 32 bits that this thread holds of a
    row. All lanes have read when it ends: the slot may go back."""
    whole, d = RegisterLayout.parse(layout, shape), find_dtype(dtype)
    width, size, kind = min(whole.run(0), 128 // d.bits), d.bits // 8, kind_of(d)
    element, vector = ("f32", width) if d.name == "f32" else access(d, width)

    def body(b: Builder, slot: Any, index: Any) -> list[Any]:
        at = slot_address(b, offset, slot, slot_bytes)
        at = b.add(at, b.mul(index, b.i32(size)))
        found: list[Any] = []
        for (first,) in whole.bases[::width]:
            read = b.call(memory.ld("shared", element, vector), b.add(at, b.i32(size * first)))
            words = read if isinstance(read, list) else [read]
            found += words if element == "f32" else decode(b, d, words, width)
        b.call(find_instruction("sync_warp"), b.i32(-1))
        return found

    form = InstructionForm(operands(slot="i32", index="i32"), (Operand("d", kind, whole.count),),
                           body)
    return Operation("read_row", 2, lambda *_: form)


# --- statistics of rows -----------------------------------------------------------------------
@functools.cache
def lane_sum(layout: str, shape: tuple[int, int]) -> Operation:
    """(fragment) -> the sums of this lane's part of its rows, each as one chain."""
    whole = RegisterLayout.parse(layout, shape)
    rest = whole.drop(1)
    rows = registers_of_rows(whole)

    def body(b: Builder, x: list[Any]) -> list[Any]:
        return [functools.reduce(b.fadd, [x[i] for i in rows[base[0]]]) for base in rest.bases]

    form = InstructionForm((Operand("x", "f32", whole.count),), (Operand("d", "f32", rest.count),),
                           body)
    return Operation("lane_sum", 1, lambda _: form)


@functools.cache
def quad_sum(count: int) -> Operation:
    """(summands) -> the sums over the four lanes that share a row, in each of them."""
    def body(b: Builder, x: list[Any]) -> list[Any]:
        for distance in QUAD:
            x = [b.fadd(v, b.call(warp.shfl("bfly", "f32"), v, b.i32(distance))) for v in x]
        return x

    part = (Operand("x", "f32", count),)
    form = InstructionForm(part, (Operand("d", "f32", count),), body)
    return Operation("quad_sum", 1, lambda _: form)


@functools.cache
def any_differs(count: int, value: float) -> Operation:
    """(fragment) -> 1 in all lanes of a warp when an element of one of them is not `value`."""
    def body(b: Builder, x: list[Any]) -> Any:
        found = functools.reduce(b.or_, [b.compare("!=", v, b.const("f32", value)) for v in x])
        return b.call(find_instruction("vote_any"), b.to_int(found))

    form = InstructionForm((Operand("x", "f32", count),), operands(d="i32"), body)
    return Operation("any_differs", 1, lambda _: form)


@functools.cache
def pin(layout: str, shape: tuple[int, int], registers: int, offset: int) -> Operation:
    """(fragment): a store of the sum of its first registers that never happens, for the sum is not
    FLT_MAX, which the assembler cannot know (it deletes a test of `sum < 0`)."""
    whole = RegisterLayout.parse(layout, shape)
    rows = registers_of_rows(whole)

    def body(b: Builder, x: list[Any]) -> None:
        sums = [functools.reduce(b.fadd, [x[i] for i in part if i < registers])
                for part in rows.values() if part[0] < registers]
        total = functools.reduce(b.fadd, sums)
        at = b.add(b.shared_base(), b.i32(offset))
        b.call(memory.st("shared", "f32", guarded=True), at, total,
               b.to_int(b.compare("==", total, b.const("f32", FLT_MAX))))

    form = InstructionForm((Operand("x", "f32", whole.count),), (), body)
    return Operation("pin", 1, lambda _: form)


@functools.cache
def quotient(rows: tuple[int, ...], count: int) -> Operation:
    """(x, y) -> x * (1 / y), 0 for 0 / 0. rows: which of the `count` numbers y goes with each x;
    one reciprocal each."""
    def body(b: Builder, x: list[Any], y: list[Any]) -> list[Any]:
        inverse = [b.call(find_instruction("rcp_rn"), v) for v in y]
        nothing = b.const("f32", 0.0)
        zero = [b.compare("==", v, nothing) for v in y]
        return [b.select(b.and_(zero[i], b.compare("==", v, nothing)), nothing,
                         b.fmul(v, inverse[i])) for v, i in zip(x, rows, strict=True)]

    args = (Operand("x", "f32", len(rows)), Operand("y", "f32", count))
    form = InstructionForm(args, (Operand("d", "f32", len(rows)),), body)
    return Operation("quotient", 2, lambda *_: form)


# --- results ----------------------------------------------------------------------------------
@functools.cache
def store_quads(layout: str, shape: tuple[int, int], dtype: str) -> Operation:
    """(fragment, address of the lane's row and column 0, bytes of a row, lane % 4, rows left,
    columns left): two rows of a lane in pieces of 16 bytes.

    Four lanes share a row and each holds two columns of every eight; a 4 x 4 transpose among them
    gives each lane eight neighbouring columns of its own.
    """
    whole = RegisterLayout.parse(layout, shape)
    names = {"at": "i64", "pitch": "i64", "quad": "i32", "rows": "i32", "columns": "i32"}

    def body(b: Builder, x: list[Any], at: Any, pitch: Any, quad: Any, rows: Any,
             columns: Any) -> None:
        left = b.sub(columns, b.shl(quad, b.i32(3)))
        for row, parts in registers_of_rows(whole).items():
            line = b.add(at, b.mul(pitch, b.const("i64", row)))
            inside = b.compare("<", b.i32(row), rows)
            _store_row(b, dtype, [x[i] for i in parts], line, quad, lambda first, inside=inside: b.
                       and_(inside, b.compare("<", b.i32(first), left)))

    args = (Operand("x", "f32", whole.count),
            *(Operand(n, k) for n, k in names.items()))  # type: ignore[arg-type]
    form = InstructionForm(args, (), body)
    return Operation("store_quads", len(args), lambda *_: form)


def _store_row(b: Builder, dtype: str, x: list[Any], line: Any, quad: Any, on: Any) -> None:
    """What four lanes hold of a row, to the address of its column 0. on: of the first column of 32
    whether they are written."""
    odd, high = (b.true(b.and_(quad, b.i32(m))) for m in QUAD)
    line = b.add(line, b.shl(b.zext(quad, "i64"), b.const("i64", 4)))
    for first in range(0, len(x), 8):
        words = encode_half(b, dtype, x[first:first + 8])
        b.call(memory.st("global", "b32", 4, guarded=True), b.add(line, b.const("i64", 8 * first)),
               _transposed(b, words, odd, high), b.to_int(on(4 * first)))


def _store_pairs(b: Builder, x: list[Any], line: Any, quad: Any, on: Any) -> None:
    """The same of 32 bits: two columns of every eight."""
    line = b.add(line, b.shl(b.zext(quad, "i64"), b.const("i64", 3)))
    for first in range(0, len(x), 2):
        words = [b.bitcast(v, "i32") for v in x[first:first + 2]]
        b.call(memory.st("global", "b32", 2, guarded=True), b.add(line, b.const("i64", 16 * first)),
               words, b.to_int(on))


@functools.cache
def store_windows(layout: str, shape: tuple[int, int], dtype: str, geometry: tuple) -> Operation:
    """(fragment, address of the images, pixels, place of the lane's row 0, column, lane % 4): as
    store_quads, each row to the pixel of its window.

    geometry: as of ring_copy_windows; all columns lie in one pixel
    """
    whole = RegisterLayout.parse(layout, shape)
    channels, window, stride, dilation, before, images, results, _ = geometry

    def body(b: Builder, x: list[Any], base: Any, pixels: Any, place: Any, column: Any,
             quad: Any) -> None:
        tap = b.udiv(column, b.i32(channels))
        taps = b.udiv(tap, b.i32(window[1])), b.urem(tap, b.i32(window[1]))
        channel = b.zext(b.urem(column, b.i32(channels)), "i64")
        for row, parts in registers_of_rows(whole).items():
            number = b.add(place, b.i32(row))
            line = b.udiv(number, b.i32(results[1]))
            inside, at = b.true(b.i32(1)), b.udiv(line, b.i32(results[0]))
            for axis, n in ((0, b.urem(line, b.i32(results[0]))),
                            (1, b.urem(number, b.i32(results[1])))):
                index = b.add(b.sub(b.mul(n, b.i32(stride[axis])), b.i32(before[axis])),
                              b.mul(taps[axis], b.i32(dilation[axis])))
                inside = b.and_(inside, b.compare("<", index, b.i32(images[axis]), unsigned=True))
                at = b.add(b.mul(at, b.i32(images[axis])), index)
            inside = b.and_(inside, b.compare("<", at, pixels))
            element = b.add(b.mul(b.sext(at, "i64"), b.const("i64", channels)), channel)
            at = b.add(base, b.mul(element, b.const("i64", find_dtype(dtype).bits // 8)))
            found = [x[i] for i in parts]
            if dtype == "f32":
                _store_pairs(b, found, at, quad, inside)
            else:
                _store_row(b, dtype, found, at, quad, lambda _, inside=inside: inside)

    args = (Operand("x", "f32", whole.count), Operand("base", "i64"), *operands(
        pixels="i32", place="i32", column="i32", quad="i32"))
    form = InstructionForm(args, (), body)
    return Operation("store_windows", len(args), lambda *_: form)


def _transposed(b: Builder, words: list[Any], odd: Any, high: Any) -> list[Any]:
    """Word i of lane j of a quad <-> word j of lane i, for words 4 columns apart in i."""
    x = list(words)

    def swap(i: int, k: int, bit: Any, distance: int) -> None:
        give, keep = b.select(bit, x[i], x[k]), b.select(bit, x[k], x[i])
        got = b.call(warp.shfl("bfly"), give, b.i32(distance))
        x[i], x[k] = b.select(bit, got, keep), b.select(bit, keep, got)

    for i, k in ((0, 1), (2, 3)):
        swap(i, k, odd, 1)
    for i, k in ((0, 2), (1, 3)):
        swap(i, k, high, 2)
    return x


@functools.cache
def store_panels(layout: str, shape: tuple[int, int], dtype: str, rank: int, row_axis: int,
                 offset: int, buffers: int) -> Operation:
    """(fragment, map, thread, coordinates innermost first): the 16 rows of each warp leave by TMA,
    64 columns at a time; what is left at the end with columns in front of it, which leave twice.

    A panel is 16 rows of 128 bytes, swizzled as the descriptor says; a warp has `buffers` of them
    from `offset` on and waits only before it writes one again. So no barrier of warps is needed,
    and what lies outside of the tensor is cut off by TMA. row_axis: of the coordinates.
    """
    whole = RegisterLayout.parse(layout, shape)
    number, size = whole.number, 16 * 128
    blocks = sorted({base[0] for base in whole.bases if not base[0] & 8})

    def body(b: Builder, x: list[Any], map_: Any, thread: Any, *at: Any) -> None:
        mine = b.call(warp.shfl("idx"), b.lshr(thread, b.i32(5)), b.i32(0))  # this warp
        lane = b.and_(thread, b.i32(31))
        base = slot_address(b, offset, mine, buffers * size)
        line = b.add(base, b.shl(b.and_(lane, b.i32(15)), b.i32(7)))
        half, turn = b.lshr(lane, b.i32(4)), b.and_(lane, b.i32(7))
        places = [b.add(line, b.shl(b.xor(b.or_(half, b.i32(2 * i)), turn), b.i32(4)))
                  for i in range(4)]
        first = b.add(at[row_axis], b.shl(mine, b.i32(4)))
        panels = [(row, min(column, shape[1] - 64)) for row in blocks
                  for column in range(0, shape[1], 64)]
        for n, (row, column) in enumerate(panels):
            buffer = b.i32(n % buffers * size)
            b.call(tma.bulk_wait(min(n, buffers - 1), read=True))
            b.call(find_instruction("sync_warp"), b.i32(-1))
            for i, place in enumerate(places):
                pairs = [(row + down, column + 16 * i + right) for right in (0, 8)
                         for down in (0, 8)]
                found = [x[number[r, c + j]] for r, c in pairs for j in (0, 1)]
                b.call(matrix.stmatrix(4), b.add(place, buffer), encode_half(b, dtype, found))
            b.call(find_instruction("fence_async_shared"))
            b.call(find_instruction("sync_warp"), b.i32(-1))
            where = [b.add(at[0], b.i32(column)), *at[1:]]
            where[row_axis] = b.add(first, b.i32(row))
            with b.when(b.compare("==", lane, b.i32(0))):
                b.call(tma.store(rank), map_, *where, b.add(base, buffer))
                b.call(find_instruction("bulk_commit"))

    args = (Operand("x", "f32", whole.count), Operand("map", "i64"),
            Operand("thread", "i32"), *(Operand(f"c{i}", "i32") for i in range(rank)))
    form = InstructionForm(args, (), body)
    return Operation("store_panels", len(args), lambda *_: form)


@functools.cache
def store_turned_panels(layout: str, shape: tuple[int, int], dtype: str, rank: int, row_axis: int,
                        offset: int, buffers: int, rows: int) -> Operation:
    """The same of an accumulator's transpose: a warp has 16 columns of the tile, which leave `rows`
    rows at a time. A panel has rows of 32 bytes, swizzled so."""
    whole = RegisterLayout.parse(layout, shape)
    number, size = whole.number, 16 * 128
    blocks = sorted({base[1] for base in whole.bases if not base[1] & 8})

    def body(b: Builder, x: list[Any], map_: Any, thread: Any, *at: Any) -> None:
        mine = b.call(warp.shfl("idx"), b.lshr(thread, b.i32(5)), b.i32(0))  # this warp
        lane = b.and_(thread, b.i32(31))
        base = slot_address(b, offset, mine, buffers * size)
        seventh, eight = b.and_(lane, b.i32(7)), b.lshr(lane, b.i32(3))  # row of a matrix, which
        line = b.or_(b.shl(b.lshr(eight, b.i32(1)), b.i32(3)), seventh)
        half = b.and_(b.xor(eight, b.lshr(seventh, b.i32(2))), b.i32(1))
        place = b.add(base, b.or_(b.shl(line, b.i32(5)), b.shl(half, b.i32(4))))
        first = b.add(at[0], b.shl(mine, b.i32(4)))
        panels = [(min(row, shape[0] - rows), column) for column in blocks
                  for row in range(0, shape[0], rows)]
        for n, (row, column) in enumerate(panels):
            buffer = n % buffers * size
            b.call(tma.bulk_wait(min(n, buffers - 1), read=True))
            b.call(find_instruction("sync_warp"), b.i32(-1))
            for down in range(0, rows, 16):
                found = [x[number[row + down + below + j, column + right]]
                         for below in (0, 8) for right in (0, 8) for j in (0, 1)]
                b.call(matrix.stmatrix(4, trans=True), b.add(place, b.i32(buffer + 32 * down)),
                       encode_half(b, dtype, found))
            b.call(find_instruction("fence_async_shared"))
            b.call(find_instruction("sync_warp"), b.i32(-1))
            where = [b.add(first, b.i32(column)), *at[1:]]
            where[row_axis] = b.add(at[row_axis], b.i32(row))
            with b.when(b.compare("==", lane, b.i32(0))):
                b.call(tma.store(rank), map_, *where, b.add(base, b.i32(buffer)))
                b.call(find_instruction("bulk_commit"))

    args = (Operand("x", "f32", whole.count), Operand("map", "i64"),
            Operand("thread", "i32"), *(Operand(f"c{i}", "i32") for i in range(rank)))
    form = InstructionForm(args, (), body)
    return Operation("store_turned_panels", len(args), lambda *_: form)
