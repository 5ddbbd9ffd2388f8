"""Where the elements of a tile lie: which register of which thread.

A layout is a permutation of bits. An index of a padded tile (extents rounded up to powers of two)
is made of bits (axis, bit); a register number and a thread number are made of bits too, and a
layout says which index bit each of those is. A thread bit that is none is a replica: threads that
differ only there hold the same elements. So

    index of register r of thread t, along an axis = base(r)[axis] + thread part(t)

with no bit in both parts, and every change of shape (a dropped, added or swapped axis) is a
relabelling of bits that moves no data.

Text form, as it stands in `Tile.layout`: register bits, a bar, thread bits, low bits first:
`1.0 0.3 | 1.1 1.2 0.0 0.1 0.2`, with `-` for a replica.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from math import prod

from ...lazy_dataclass import dataclass

Bit = tuple[int, int]  # (axis, bit of the index along it)
WARP_BITS = 5


def bits_of(extent: int) -> int:
    """Bits of an index below `extent`."""
    return (extent - 1).bit_length()


@dataclass(frozen=True)
class RegisterLayout:
    """registers, threads: the index bit of each bit of their number, lowest first."""

    shape: tuple[int, ...]
    registers: tuple[Bit, ...]
    threads: tuple[Bit | None, ...]

    # --- reading ------------------------------------------------------------------------------
    @functools.cached_property
    def bases(self) -> tuple[tuple[int, ...], ...]:
        """The register part of the index, for each register of the fragment.

        Registers that lie outside of the shape in every thread do not exist.
        """
        every = [self._base(r) for r in range(1 << len(self.registers))]
        return tuple(b for b in every if all(i < n for i, n in zip(b, self.shape, strict=True)))

    def _base(self, number: int) -> tuple[int, ...]:
        index = [0] * len(self.shape)
        for i, (axis, bit) in enumerate(self.registers):
            index[axis] |= (number >> i & 1) << bit
        return tuple(index)

    @functools.cached_property
    def number(self) -> dict[tuple[int, ...], int]:
        """Register part of an index -> position in the fragment."""
        return {base: i for i, base in enumerate(self.bases)}

    @property
    def count(self) -> int:
        """Registers of the fragment."""
        return len(self.bases)

    def terms(self, axis: int) -> tuple[tuple[int, int, int], ...]:
        """(first thread bit, first index bit, how many) of each run of thread bits of an axis."""
        runs: list[list[int]] = []
        for i, bit in enumerate(self.threads):
            if bit is None or bit[0] != axis:
                continue
            if runs and runs[-1][0] + runs[-1][2] == i and runs[-1][1] + runs[-1][2] == bit[1]:
                runs[-1][2] += 1
            else:
                runs.append([i, bit[1], 1])
        return tuple((a, b, n) for a, b, n in runs)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Thread bits that change nothing."""
        return tuple(i for i, bit in enumerate(self.threads) if bit is None)

    def run(self, axis: int) -> int:
        """Neighbours along an axis that a thread holds: 2, 4, 8, ...; 1 for none."""
        width = 1
        while (axis, bits_of(width * 2) - 1) in self.registers:
            width *= 2
        return width

    def reach(self, axis: int) -> int:
        """The largest index along an axis that some thread holds, plus one."""
        high = max((b[axis] for b in self.bases), default=0)
        return high + sum(1 << bit[1] for bit in self.threads if bit and bit[0] == axis) + 1

    def overhangs(self, axis: int) -> bool:
        """Whether some thread's register lies outside of the shape along an axis."""
        return self.reach(axis) > self.shape[axis]

    def thread_bits(self, axis: int) -> tuple[int, ...]:
        """Bits of the thread number that move along an axis."""
        return tuple(i for i, bit in enumerate(self.threads) if bit and bit[0] == axis)

    # --- relabelling --------------------------------------------------------------------------
    def drop(self, axis: int) -> RegisterLayout:
        """Without an axis, as after a reduction: threads that shared it become replicas."""
        def down(bit: Bit) -> Bit:
            return (bit[0] - (bit[0] > axis), bit[1])

        return RegisterLayout(self.shape[:axis] + self.shape[axis + 1:],
                              tuple(down(b) for b in self.registers if b[0] != axis),
                              tuple(down(b) if b and b[0] != axis else None for b in self.threads))

    def divided(self, axis: int) -> RegisterLayout | None:
        """As drop, with the rows of a thread divided among the lanes that shared them: the first
        bit of registers by the first bit of these lanes, and so on. None where several warps share
        them, or rows are not a power of two."""
        rest, lanes = self.drop(axis), self.thread_bits(axis)
        if rest.count != 1 << len(rest.registers) or any(i >= WARP_BITS for i in lanes):
            return None
        threads = list(rest.threads)
        for bit, lane in zip(rest.registers, lanes, strict=False):
            threads[lane] = bit
        return RegisterLayout(rest.shape, rest.registers[len(lanes):], tuple(threads))

    def first(self, k: int) -> RegisterLayout:
        """With k elements along the last axis, all of them in each thread that shares a row."""
        last = len(self.shape) - 1
        rows = self.drop(last)
        along = tuple((last, i) for i in range(bits_of(k)))
        return RegisterLayout((*rows.shape, k), (*along, *rows.registers), rows.threads)

    def insert(self, axis: int) -> RegisterLayout:
        """With a new axis of extent 1."""
        def up(bit: Bit) -> Bit:
            return (bit[0] + (bit[0] >= axis), bit[1])

        return RegisterLayout((*self.shape[:axis], 1, *self.shape[axis:]),
                              tuple(map(up, self.registers)),
                              tuple(up(b) if b else None for b in self.threads))

    def permuted(self, order: Sequence[int]) -> RegisterLayout:
        """Axis i of the result is axis order[i]."""
        place = {old: new for new, old in enumerate(order)}
        return RegisterLayout(tuple(self.shape[i] for i in order),
                              tuple((place[a], b) for a, b in self.registers),
                              tuple((place[b[0]], b[1]) if b else None for b in self.threads))

    def shrunk(self, shape: tuple[int, ...]) -> RegisterLayout:
        """For a tile whose extents are 1 where it is repeated along this one."""
        gone = {i for i, n in enumerate(shape) if n == 1 and self.shape[i] != 1}
        return RegisterLayout(shape, tuple(b for b in self.registers if b[0] not in gone),
                              tuple(b if b and b[0] not in gone else None for b in self.threads))

    def without(self, bits: Sequence[Bit]) -> RegisterLayout:
        """One register in place of those that differ in these register bits alone."""
        return RegisterLayout(self.shape, tuple(b for b in self.registers if b not in bits),
                              self.threads)

    def spread(self, kept: Sequence[Bit] = ()) -> RegisterLayout:
        """With register bits in place of replicas, but for those that are kept: each of the threads
        that hold the same elements has a part of them."""
        free, threads = self.replicas, list(self.threads)
        moving = [b for b in self.registers if b not in kept][:len(free)]
        for i, bit in zip(free, moving, strict=False):
            threads[i] = bit
        return RegisterLayout(self.shape, tuple(b for b in self.registers if b not in moving),
                              tuple(threads))

    def reshaped(self, shape: tuple[int, ...]) -> RegisterLayout | None:
        """The same elements in row-major order; None unless bits of the one index are bits of the
        other: axes that both end with stay, and of the rest all extents behind the first are powers
        of two."""
        same = 0
        while same < min(len(shape), len(self.shape)) and shape[-1 - same] == self.shape[-1 - same]:
            same += 1
        before, after = self.shape[:len(self.shape) - same], shape[:len(shape) - same]
        if any(n & (n - 1) for n in (*before[1:], *after[1:])):
            return None

        def moved(bit: Bit) -> Bit:
            axis, at = bit
            if axis >= len(before):
                return (axis + len(after) - len(before), at)
            at += bits_of(prod(before[axis + 1:]))
            for axis in reversed(range(len(after))):
                if at < bits_of(after[axis]):
                    return (axis, at)
                at -= bits_of(after[axis])
            raise AssertionError(f"bit {at} of {after}")

        return RegisterLayout(shape, tuple(map(moved, self.registers)),
                              tuple(moved(b) if b else None for b in self.threads))

    # --- text ---------------------------------------------------------------------------------
    @functools.cached_property
    def text(self) -> str:
        sides = (self.registers, self.threads)
        return " | ".join(" ".join(f"{b[0]}.{b[1]}" if b else "-" for b in side) for side in sides)

    @staticmethod
    @functools.cache
    def parse(text: str, shape: tuple[int, ...]) -> RegisterLayout:
        """The layout of a tile type's text."""
        def bits(side: str) -> list[Bit | None]:
            return [None if word == "-" else (int(word.split(".")[0]), int(word.split(".")[1]))
                    for word in side.split()]

        registers, _, threads = text.partition("|")
        return RegisterLayout(shape, tuple(b for b in bits(registers) if b), tuple(bits(threads)))


# --- the layouts that ops ask for ---------------------------------------------------------------
@functools.cache
def blocked(shape: tuple[int, ...], threads: int, vector: int = 1,
            rows: bool = False, down: int = 1, whole: int = 0) -> RegisterLayout:
    """For memory: `vector` neighbours in a thread, neighbouring threads next to each other.

    threads: a power of two. Bits that the threads do not cover are registers.
    rows: a warp stays in a row as long as there are rows for other warps, so that what is reduced
    along rows is exchanged by fewer of them, in the end by none.
    down: neighbours in a thread along the axis before the last.
    whole: where rows are a multiple of a power of two, and that is at least so many, threads stand
    side by side no further, so that none of them stands beyond the end of a row.
    """
    wanted = bits_of(threads)
    order = [(axis, bit) for axis in reversed(range(len(shape))) for bit in range(
        bits_of(shape[axis]))]
    inner = [b for b in order if b[0] == len(shape) - 1][:bits_of(vector)]
    inner += [b for b in order if b[0] == len(shape) - 2][:bits_of(down)]
    rest = [b for b in order if b not in inner]
    if rows:  # the bits of lanes, then those of other rows
        rest = rest[:5] + sorted(rest[5:], key=lambda b: b[0] == len(shape) - 1)
    if 0 < whole <= shape[-1] & -shape[-1]:
        rest.sort(key=lambda b: b[0] == len(shape) - 1 and 1 << b[1] >= shape[-1] & -shape[-1])
    spread: list[Bit | None] = [*rest[:wanted]]
    spread += [None] * (wanted - len(spread))
    return RegisterLayout(shape, tuple(inner + rest[wanted:]), tuple(spread))


@functools.cache
def accumulator(shape: tuple[int, int], warps: tuple[Bit | None, ...]) -> RegisterLayout:
    """Of the tensor cores: m16n8 blocks, of mma.sync and (four warps down the rows) of wgmma.

    Lane l holds rows l / 4 and 8 on, columns 2 (l % 4) and one on (PTX ISA 9.7.14, 9.7.15).
    warps: the index bit of each bit of the warp number. Extents below 16 x 8 are padded.
    """
    lanes: list[Bit] = [(1, 1), (1, 2), (0, 0), (0, 1), (0, 2)]
    used = {*lanes, (1, 0), (0, 3), *warps}
    more = [(axis, bit) for axis, low in ((1, 3), (0, 4)) for bit in range(low, bits_of(
        shape[axis])) if (axis, bit) not in used]
    return RegisterLayout(shape, ((1, 0), (0, 3), *more), (*lanes, *warps))


def warps_over(shape: tuple[int, int], down: int, across: int) -> tuple[Bit | None, ...]:
    """Warp bits that cut an accumulator into down x across parts; replicas beyond its size."""
    def top(axis: int, count: int, least: int) -> list[Bit | None]:
        high = bits_of(shape[axis])
        wanted = bits_of(count)
        bits: list[Bit | None] = [(axis, b) for b in range(max(least, high - wanted), high)]
        return bits + [None] * (wanted - len(bits))

    return (*top(0, down, 4), *top(1, across, 3))


@functools.cache
def dealt(shape: tuple[int, int], threads: int, vectors: tuple[int, int]) -> RegisterLayout:
    """Of sums that threads add up by themselves: parts of warps, and in them of threads, as square
    as they get, for each number that a thread reads is multiplied with all of its other side.

    vectors: neighbouring rows, and columns, of a thread, which an access brings at once; then come
    neighbouring lanes, 4 rows by 8 columns of them or 8 by 4, then the rest of a thread.
    threads: a power of two, of 32 or more, and of no more than there are elements.
    """
    left = [bits_of(n) for n in shape]
    warps = [0, 0]
    for _ in range(bits_of(threads // 32)):
        warps[left[0] - warps[0] < left[1] - warps[1]] += 1
    part = [n - w for n, w in zip(left, warps, strict=True)]
    lanes = [3, 2] if part[0] > part[1] else [2, 3]
    for axis in (0, 1):  # of a narrow part
        over = max(0, lanes[axis] - part[axis])
        lanes[axis] -= over
        lanes[1 - axis] += over
    inner = [min(bits_of(v), p - n) for v, p, n in zip(vectors, part, lanes, strict=True)]
    where = [[(axis, bit) for bit in range(left[axis])] for axis in (0, 1)]
    neighbours = [b for axis in (1, 0) for b in where[axis][:inner[axis]]]
    lane = [b for axis in (1, 0) for b in where[axis][inner[axis]:inner[axis] + lanes[axis]]]
    warp = [b for axis in (1, 0) for b in where[axis][part[axis]:]]
    rest = [b for axis in (1, 0) for b in where[axis][inner[axis] + lanes[axis]:part[axis]]]
    return RegisterLayout(shape, (*neighbours, *rest), (*lane, *warp))


@functools.cache
def in_parts(shape: tuple[int, int, int], warps: int, bits: int) -> RegisterLayout:
    """Of [parts, M, N], sums of as many warps each, which share the rows of a part: m16n8 blocks.

    Rows and columns that lanes have are dealt so that what a quarter or half of a warp reads of the
    operands, 8 bytes of rows and `bits` x 16 of columns, lies in different banks where chunks are
    permuted: rows 0, 2, 4, 6, then 1, 3, 5, 7; of 8-bit columns 0, 4, then 1, 5 and so on.
    """
    parts, M, N = shape
    one, two, three = ((2, 2), (2, 0), (2, 1)) if bits == 8 else ((2, 0), (2, 1), (2, 2))
    beside, number = bits_of(warps // parts), bits_of(parts)
    top = bits_of(M) - beside
    registers = (one, (1, 3), *((2, b) for b in range(3, bits_of(N))),
                 *((1, b) for b in range(4, top)))
    threads = (two, three, (1, 1), (1, 2), (1, 0), *((0, b) for b in range(number)),
               *((1, top + b) for b in range(beside)))
    return RegisterLayout(shape, registers, threads)


@functools.cache
def warpgroups(shape: tuple[int, int], groups: int) -> RegisterLayout:
    """wgmma's accumulator with 64-row blocks dealt to consecutive warpgroups."""
    bits: list[Bit | None] = [(0, 4), (0, 5)]
    bits += [(0, 6 + i) for i in range(bits_of(groups))]
    return accumulator(shape, tuple(bits))


@functools.cache
def warpgroup_columns(shape: tuple[int, int], groups: int) -> RegisterLayout:
    """The same of a first operand that warpgroups read by its columns, which lie in rows of shared
    memory: lanes have rows of the result so that these reads meet no bank twice
    (intrinsics/operand_columns.py)."""
    return _rows_moved(shape, groups, {0: 1, 1: 4, 2: 2, 3: 0, 4: 3})


# Bytes of a panel's row -> bits of a row, of an instruction and of the result. Four lanes read 32
# bytes of a row, and 16 lanes at once: of rows 0, 2, 4, 6 the swizzle of 128 bytes brings these to
# other banks, where two rows are 128 bytes that of rows 0, 1, 4, 5.
CODE_ROWS = {128: (1, 2, 0), 64: (0, 2, 1), 32: (0, 1, 2)}


@functools.cache
def warpgroup_codes(shape: tuple[int, int], groups: int, panel: int) -> RegisterLayout:
    """The same of a first operand that lanes make of packed codes, in rows of shared memory that
    they read without meeting a bank twice (intrinsics/unpacked_codes.py)."""
    return _rows_moved(shape, groups, dict(enumerate(CODE_ROWS[panel])))


def _rows_moved(shape: tuple[int, int], groups: int, place: dict[int, int]) -> RegisterLayout:
    """place: a bit of a row, of an instruction -> of the result."""
    plain = warpgroups(shape, groups)

    def dealt(bit: Bit | None) -> Bit | None:
        return (0, place.get(bit[1], bit[1])) if bit is not None and bit[0] == 0 else bit

    return RegisterLayout(shape, tuple(map(dealt, plain.registers)),  # type: ignore[arg-type]
                          tuple(map(dealt, plain.threads)))


def registers_of_rows(layout: RegisterLayout) -> dict[int, list[int]]:
    """Row -> the positions of its registers."""
    rows: dict[int, list[int]] = defaultdict(list)
    for i, base in enumerate(layout.bases):
        rows[base[0]].append(i)
    return rows


__all__ = ["CODE_ROWS", "Bit", "RegisterLayout", "accumulator", "bits_of", "blocked", "dealt",
           "in_parts", "registers_of_rows", "warpgroup_codes", "warpgroup_columns", "warpgroups",
           "warps_over"]
