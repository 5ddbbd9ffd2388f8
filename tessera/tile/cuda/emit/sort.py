"""Sorting rows: a bitonic network over the bits of the position (Batcher 1968).

Keys are integers in whose order the numbers stand: NaN last, and first in descending order, where
keys are inverted. For argsort the position is part of the key, so equal elements keep their order.

Rows that fit into the registers of their threads stay there. Keys are compared in a thread and
between lanes; where warps differ, what has to be compared is brought into registers through shared
memory, some bits of the position at a time. Longer rows are sorted in shared memory, where a merge
begins by comparing mirrored positions (all lower bits flipped), as Knuth does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

from tessera.lazy_dataclass import dataclass
from tessera.tile.cuda.emit.emitter import Emitter
from tessera.tile.cuda.emit.layout_conversion import convert_layout, indices, pool
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.instruction import kind_bytes
from tessera.tile.cuda.intrinsics.formats import kind_of
from tessera.tile.cuda.intrinsics.reduce import padded
from tessera.tile.cuda.intrinsics.sort import (
    Network,
    SharedKeys,
    in_order,
    kinds_of,
    padded_to_power_of_two,
    with_registers,
)
from tessera.tile.ir.ir import Op
from tessera.tile.ir.register_layout import RegisterLayout

REGISTERS = 64  # most of them, of 32 bits, that the keys of a thread may take


@emits("sort", "argsort")
def _sort(e: Emitter, op: Op) -> None:
    (x,), (made,) = op.args, op.outs
    layout, dtype = e.layout(x), e.dtype(x)
    tag = ("u" if dtype.kind == "uint" else "") + kind_of(dtype)
    how = f"{op.name!r}, {tag!r}, {bool(op.attr['descending'])}"
    kinds = kinds_of(op.name, tag)
    words = sum(2 if k == "i64" else 1 for k in kinds)
    rows = in_order(layout)
    network = Network.of(rows, e.warp_bits)
    if padded_to_power_of_two(layout).count * words <= REGISTERS and e.warp_bits and network.fits:
        make = e.use("sort_keys", f"use(sort.keys({how}, {layout.text!r}, {layout.shape}))")
        names = tuple(e.fresh("key") for _ in kinds)
        e.line(f"{', '.join(names)} = {make}({e.name(x)}, {e.index(layout, len(rows.shape) - 1)})")
        begin, bitonic = padded_to_power_of_two(layout), bool(op.attr.get("bitonic"))
        moved = bitonic or network.parts or not _same_threads(begin, rows)
        room = _room(e, kinds, rows) if moved else ""
        keys = _Keys(e, op.name, tag, names, rows, network, room)
        (keys.merge if bitonic else keys.sort)(begin)
        done = RegisterLayout(layout.shape, rows.registers, rows.threads)
        get = e.use("sorted_values", f"use(sort.values({how}, {done.text!r}, {done.shape}))")
        text = e.fresh("sorted")
        e.line(f"{text} = {get}({', '.join(names)})")
        e.define(made, convert_layout(e, text, done, layout, made.type.dtype))
        return
    e.define(made, _in_memory(e, op.name, how, e.name(x), layout, tag))


def _same_threads(x: RegisterLayout, y: RegisterLayout) -> bool:
    """Whether each thread has elements of the same rows in both layouts."""
    return [b and b[0] for b in x.threads] == [b and b[0] for b in y.threads]


def _room(e: Emitter, kinds: tuple[str, ...], layout: RegisterLayout) -> str:
    """The address of shared memory for keys, which nobody reads any more."""
    at, used = pool(e, sum(SharedKeys(layout, kind_bytes(k)).bytes for k in kinds))
    if used:
        e.sync()
    return at


@dataclass(frozen=True)
class _Keys:
    """Keys in registers, and the network that they go through: loops over what long and short runs
    have in common, since code for each step takes the compilers ten times as long."""

    e: Emitter
    op: str
    tag: str
    names: tuple[str, ...]
    rows: RegisterLayout
    network: Network
    memory: str

    def sort(self, layout: RegisterLayout) -> None:
        """Runs twice as long in each stage. Within a warp a merge begins by comparing mirrored
        positions; of runs that warps merge, every other falls."""
        e, n = self.e, self.network
        if not _same_threads(layout, self.rows):
            self.move(layout, self.rows)
        threads, lanes = n.all - n.registers, n.lanes - n.registers
        changes, stage = e.fresh("changes"), e.fresh("stage")
        if n.lanes < n.all:
            e.line(f"{changes} = i32({self.part} >> {lanes} << {lanes})")
            e.line(f"{changes} = i32({changes} << 1 ^ {changes})")
            self.call("turned_keys", "turned", self.rows, args=(changes, f"i32({lanes})"))
        self.call("sort_runs", "runs", self.rows, n.registers)
        if not threads:
            return
        e.line(f"{stage} = i32(0)")
        if lanes:
            with self.loop(f"{stage} < {lanes}"):
                self.call("sort_across", "across", self.rows, n.first_thread_bit, 1,
                          args=(self.part, stage))
                self.between_lanes(f"i32({stage} - 1)")
                e.line(f"{stage} = i32({stage} + 1)")
        if n.lanes == n.all:
            return
        with self.loop(f"{stage} < {threads}"):
            e.line(f"{stage} = i32({stage} + 1)")
            self.call("turned_keys", "turned", self.rows, args=(changes, stage))
            self.merge(self.rows, stage)

    def merge(self, layout: RegisterLayout, stage: str = "") -> None:
        """A merge of keys that lie in a layout, of whole rows or of the runs of a stage."""
        n, low = self.network, self.network.all
        for low, end in n.parts:
            there = with_registers(self.rows, min(low, n.all - n.registers))
            self.move(layout, there)
            layout, always = there, max(low, min(end, n.lanes + 1)) if stage else end
            for bit in reversed(range(always, end)):
                with self.e.block(f"if {stage} > {bit - n.registers}"):
                    self.call("merge_registers", "merge", there, bit, bit + 1)
            self.call("merge_registers", "merge", there, low, always)
        self.move(layout, self.rows)
        self.between_lanes(f"i32({low - n.registers - 1})")

    def between_lanes(self, first: str) -> None:
        """The steps by bits of a thread's part, from `first` on down, then those of registers."""
        e, n, bit = self.e, self.network, self.e.fresh("bit")
        if n.all > n.registers:
            e.line(f"{bit} = {first}")
            with self.loop(f"{bit} >= 0"):
                self.call("sort_across", "across", self.rows, n.first_thread_bit, 0,
                          args=(self.part, bit))
                e.line(f"{bit} = i32({bit} - 1)")
        self.call("merge_registers", "merge", self.rows, 0, n.registers)

    @property
    def part(self) -> str:
        """Of a thread's number, the part along the rows."""
        n = self.network
        mask = (1 << n.all - n.registers) - 1
        return self.e.once("part", f"i32({self.e.thread} >> {n.first_thread_bit} & {mask})")

    def call(self, label: str, function: str, layout: RegisterLayout, *how: int,
             args: tuple[str, ...] = ()) -> None:
        head = ", ".join([f"{self.op!r}, {self.tag!r}, {layout.text!r}, {layout.shape}",
                          *map(str, how)])
        if function == "merge" and how[0] == how[1]:
            return
        made = self.e.use(label, f"use(sort.{function}({head}))")
        self.e.line(f"{', '.join(self.names)} = {made}({', '.join([*self.names, *args])})")

    def move(self, before: RegisterLayout, after: RegisterLayout) -> None:
        """Through shared memory. A thread that has read a word there is who writes it next."""
        e, at = self.e, self.memory
        if before == after:
            return
        for name, kind in zip(self.names, kinds_of(self.op, self.tag), strict=True):
            size = kind_bytes(kind)
            there = [e.once("at", f"i32({at} + {SharedKeys(x, size).thread_part(e.thread)})")
                     for x in (before, after)]
            put, get = (e.use(f"{act}_keys", f"use(sort.{act}({x.text!r}, {x.shape}, {kind!r}))")
                        for act, x in (("put", before), ("get", after)))
            e.line(f"{put}({name}, {there[0]})")
            e.sync()
            e.line(f"{name} = {get}({there[1]})")
            at = f"i32({at} + {SharedKeys(before, size).bytes})"

    @contextmanager
    def loop(self, condition: str) -> Iterator[None]:
        self.e.loops += 1
        with self.e.block(f"while {condition}"):
            yield
        self.e.loops -= 1


def _in_memory(e: Emitter, name: str, how: str, text: str, layout: RegisterLayout,
               tag: str) -> str:
    """Rows in shared memory, padded to powers of two: each step is a loop over all pairs."""
    kinds = kinds_of(name, tag)
    rows, width = prod(layout.shape[:-1]), padded(layout.shape)[-1]
    sizes = [kind_bytes(k) for k in kinds]
    at, used = pool(e, rows * width * sum(sizes))
    if used:
        e.sync()
    shape = (rows, width)
    clear = e.use("pad_rows", f"use(sort.pad({how}, {shape}))")
    store = e.use("put_rows", f"use(sort.put_rows({how}, {layout.text!r}, {layout.shape}))")
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
    load = e.use("get_rows", f"use(sort.get_rows({how}, {layout.text!r}, {layout.shape}))")
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
