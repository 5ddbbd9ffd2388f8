"""Emission of the ops of a warp-specialised program: lower/warp_specialised makes it, the
intrinsics of that name run in it.

Ring positions are two variables, `name_slot` and `name_phase`, which a fill or a wait moves on: a
role is one thread of control, so its ops stand in the order in which they act. What a slot holds is
no variable: descriptors are made where matmuls read them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tessera.lazy_dataclass import dataclass
from tessera.runtime.target import Target
from tessera.tile.cuda.emit.emitter import INDENT, ArgumentFacts, Emitted, EmittedLine, Emitter
from tessera.tile.cuda.emit.memory_operands import (
    MemoryOperand,
    place_of,
)
from tessera.tile.cuda.emit.registry import emits
from tessera.tile.cuda.intrinsics import exchanged_sums
from tessera.tile.cuda.lower.warp_specialised import Refusal, lower_warp_specialised
from tessera.tile.cuda.lower.warp_specialised.divide import store_together
from tessera.tile.cuda.lower.warp_specialised.program import (
    DEALERS,
    MAIL_SLOTS,
    WARPGROUP,
    BufferRing,
    Load,
    WarpSpecialisedProgram,
)
from tessera.tile.cuda.lower.warp_specialised.rewrite import is_op
from tessera.tile.cuda.lower.warp_specialised.shorten_names import base_name
from tessera.tile.cuda.ptx.mbarrier import BARRIER_BYTES
from tessera.tile.ir.ir import Function, If, Op, SSAValue, regions, walk

CONSUMERS_BARRIER = 1  # barrier 0 is the block's


@dataclass(frozen=True)
class ExchangedSums:
    """Where sums lie that another block sends: buffers and barriers, as offsets in shared memory,
    and the variables that say whose turn it is, the phase, and whether a warpgroup has sums."""

    buffers: int
    barriers: int
    position: tuple[str, str]
    has: str


def emit_warp_specialised(function: Function, schedule: Any, target: Target, facts: ArgumentFacts
                          ) -> tuple[WarpSpecialisedProgram, Emitted] | Refusal:
    """The program of a function and its source, with fewer stages where the consumers need shared
    memory of their own; or why there is none."""
    reserved, generation = 0, target.generation
    while True:
        program = lower_warp_specialised(function, schedule, facts, generation, reserved)
        if isinstance(program, Refusal):
            return program
        emitted = emit_program(program, target, facts)
        over = emitted.shared_bytes - generation.room_of(program.pipeline.resident)
        if over <= 0:
            return program, emitted
        reserved += over


def emit_program(program: WarpSpecialisedProgram, target: Target, facts: ArgumentFacts) -> Emitted:
    """The source of a program: `finish` of its emitter."""
    emitter = WarpSpecialisedEmitter(program, target, facts)
    emitter.declare()
    emitter.nodes(program.function.body)
    if emitter.waits_apart:
        function = program.function
        return emit_program(replace(program, function=replace(
            function, body=store_together(function.body))), target, facts)
    emitter.prologue()
    made = emitter.finish()
    return replace(made, dependent=made.dependent or emitter.dependent_launch,
                   cluster=program.pipeline.together)


class WarpSpecialisedEmitter(Emitter):
    """An emitter whose lanes are those of the consumers; what is special to roles and rings."""

    def __init__(self, program: WarpSpecialisedProgram, target: Target, facts: ArgumentFacts):
        super().__init__(program.function, WARPGROUP * program.warpgroups, target, facts)
        self.program, self.form = program, program.form
        self.shared_bytes = program.shared_bytes
        self.slots: dict[SSAValue, tuple[BufferRing, Load, str]] = {}  # of slot_tile
        self.waited = {d.value for n in walk(program.function.body)
                       if isinstance(n, Op) and n.name == "ring_wait" for d in n.outs}
        self.fused, self.absorbed = _fused(program.function.body)
        self.positions = {r.name: (self.fresh(f"{r.name}_at"), self.fresh(f"{r.name}_phase"))
                          for r in program.rings}
        self.mail = (self.fresh("mail_at"), self.fresh("mail_phase"))
        self.exchange: ExchangedSums | None = None
        self.ahead: list[EmittedLine] = []  # what stands in front of the first barrier
        self.waits_apart, self.waits = False, 0  # whether some consumers wait for all; of consumers
        for note in program.notes:
            self.note(note)

    # --- threads ------------------------------------------------------------------------------
    @property
    def all_threads(self) -> str:
        return self.once("tid", self.use("thread_number", "use('tid_x')") + "()")

    @property
    def thread(self) -> str:
        """Number among the consumers; in the producer it is not used."""
        return self.once("thread", f"i32({self.all_threads} - {WARPGROUP})")

    @property
    def which(self) -> str:
        """Number of this block in its cluster, known to the assembler to be uniform: where a loop
        begins and ends by it, descriptors are made beside what lanes do."""
        uniform = self.use("uniform", "use(ptx.warp.shfl('idx'))")
        rank = self.use("cluster_rank", "use('cluster_ctarank')")
        return self.once("which", f"{uniform}({rank}(), 0)")

    @property
    def role(self) -> str:
        """Number of the warpgroup, known to the assembler to be uniform; 0 is the producer."""
        uniform = self.use("uniform", "use(ptx.warp.shfl('idx'))")
        return self.once("role", f"{uniform}({self.all_threads} >> 7, 0)")

    @property
    def group(self) -> str:
        """Number of the consumer warpgroup."""
        return self.once("consumer", f"i32({self.role} - 1)")

    def sync(self) -> None:
        barrier = self.use("bar_sync", "use('bar_sync')")
        self.line(f"{barrier}({CONSUMERS_BARRIER}, {self.lanes})")
        self.waits += 1

    def branch(self, node: If) -> None:
        before, made = self.waits, self.made_by.get(node.cond)
        super().branch(node)
        if is_op(made, "is_ahead"):
            self.ahead, self.lines = self.lines, []
        if is_op(made, "has_sums") and not made.attr["all"] and self.waits > before:
            self.waits_apart = True

    def part(self, hint: str, name: str, *args: object) -> str:
        """An intrinsic of intrinsics/warp_specialised, bound in the header."""
        return self.use(hint, f"use(warp_specialised.{name}({', '.join(map(repr, args))}))")

    def helper(self, hint: str, name: str, *args: object) -> str:
        """An intrinsic of intrinsics/ring_helpers."""
        return self.use(hint, f"use(ring_helpers.{name}({', '.join(map(repr, args))}))")

    def deal(self, name: str, *args: object) -> str:
        """An intrinsic of intrinsics/tile_scheduler."""
        return self.use(name, f"use(tile_scheduler.{name}({', '.join(map(repr, args))}))")

    # --- the start of the kernel --------------------------------------------------------------
    def prologue(self) -> None:
        """Barriers of the rings, and positions: a producer finds all slots empty at phase 1."""
        self.top += self.ahead
        prefetch = self.use("prefetch_map", "use('prefetch_map')")
        maps = [self.cached[repr(key)] for key in self.parameters if key[0] == "map"]
        first = [f"if {m} != 0: {prefetch}({m})" for m in maps]  # 0: of a tensor without elements
        arrivals = 4 * self.program.warpgroups
        for r in self.program.rings:
            dealers = (DEALERS,) if r.dealt else ()
            make = self.part(f"{r.name}_init", "ring_init", r.slots, r.barriers_bytes,
                             arrivals * r.blocks, *dealers)
            first.append(f"{make}()")
        positions = list(self.positions.values())
        if self.program.pipeline.tiles == "dynamic":
            make = self.part("mail_init", "ring_init", MAIL_SLOTS, self.program.mailbox_bytes,
                             arrivals)
            first.append(f"{make}()")
            positions.append(self.mail)
        if self.exchange is not None:
            make = self.use("exchange_init", f"use(exchanged_sums.init({self.exchange.barriers}, "
                            f"{self.program.warpgroups}))")
            first.append(f"{make}()")
            positions.append(self.exchange.position)
        first.append(self.use("fence_init", "use('fence_mbarrier_init')") + "()")
        thread, role, together = self.all_threads, self.role, self.program.pipeline.together
        begun = self.use("cluster_wait", "use('cluster_wait')") if together > 1 else ""
        self.write(f"if {thread} == 0:", *(INDENT + text for text in first))
        if together > 1:
            self.write(self.use("cluster_arrive_relaxed", "use('cluster_arrive_relaxed')") + "()")
        if self.program.pipeline.cluster > 1:
            self.write(f"{begun}()")
        else:
            self.write(self.use("sync", "use('sync_threads')") + "()")
        if self.dependent_launch:
            calls = [self.use(name, f"use('{name}')") + "()"
                     for name in ("dependents_wait", "dependents_launch")]
            self.write(*calls)
        if self.program.pipeline.divided > 1:  # who copies needs no other block
            self.write(f"if {role} != 0: {begun}()")
        for at, phase in positions:
            self.write(f"{at}, {phase} = i32(0), i32({role} == 0)")

    @property
    def dependent_launch(self) -> bool:
        """Whether all threads wait for the kernel in front, before any memory that it may write is
        read. A batch has read its table by then."""
        return bool(self.program.pipeline.dependent) and not self.facts.batched

    def write(self, *texts: str) -> None:
        self.top += [EmittedLine(INDENT + text) for text in texts]


def _fused(nodes: Any) -> tuple[dict[SSAValue, int], set[SSAValue]]:
    """Matmuls whose next statement is their own wait: (matmul -> pending, waits' results)."""
    fused: dict[SSAValue, int] = {}
    absorbed: set[SSAValue] = set()
    blocks = [nodes, *(region for n in walk(nodes) for region in regions(n))]
    for block in blocks:
        for node, after in zip(block, block[1:], strict=False):
            if isinstance(node, Op) and node.name == "async_matmul" and isinstance(
                    after, Op) and after.name == "matmul_wait" and (
                    after.args[0] == node.outs[0].value):
                fused[node.outs[0].value] = after.attr["pending"]
                absorbed.add(after.outs[0].value)
    return fused, absorbed


def specialised(e: Emitter) -> WarpSpecialisedEmitter:
    assert isinstance(e, WarpSpecialisedEmitter)
    return e


# --- tiles ------------------------------------------------------------------------------------
@emits("block_number")
def _block_number(e: Emitter, op: Op) -> None:
    e.define(op.outs[0], e.use("block_id", "use('ctaid_x')") + "()")


@emits("block_count")
def _block_count(e: Emitter, op: Op) -> None:
    e.define(op.outs[0], e.use("block_count", "use('nctaid_x')") + "()")


@emits("own_rows")
def _own_rows(e: Emitter, op: Op) -> None:
    h = specialised(e)
    start, stop = map(e.name, op.args)
    e.define(op.outs[0], f"i32({start} + {h.group} * {h.form.rows} < {stop})")


@emits("row_of_warpgroup")
def _row_of_warpgroup(e: Emitter, op: Op) -> None:
    h = specialised(e)
    more = h.form.rows - 1 if op.attr["last"] else 0
    e.define(op.outs[0], f"i32({e.name(op.args[0])} + {h.group} * {h.form.rows} + {more})")


@emits("own_start")
def _own_start(e: Emitter, op: Op) -> None:
    h = specialised(e)
    find = h.deal("own_start", h.form.rows, op.attr["step"], op.attr["columns"])
    e.define(op.outs[0], f"{find}({', '.join(map(e.name, op.args))}, {h.group})")


@emits("next_tile")
def _next_tile(e: Emitter, op: Op) -> None:
    counter = e.param("counter", "tiles", "i64")
    count = e.use("block_count", "use('nctaid_x')")
    take = specialised(e).deal("next_tile")
    e.define(op.outs[0], f"{take}({counter}, {count}(), {e.name(op.args[1])})")


@emits("mail_put")
def _mail_put(e: Emitter, op: Op) -> None:
    h = specialised(e)
    at, phase = h.mail
    put = h.deal("mail_put", MAIL_SLOTS, h.program.mailbox_bytes, len(op.args))
    e.line(f"{put}({at}, {phase}, {', '.join(map(e.name, op.args))})")
    _step(h, MAIL_SLOTS, at, phase)


@emits("mail_get")
def _mail_get(e: Emitter, op: Op) -> None:
    h = specialised(e)
    at, phase = h.mail
    get = h.deal("mail_get", MAIL_SLOTS, h.program.mailbox_bytes, len(op.outs))
    lead = e.once("lead", f"i32(({h.all_threads} & 31) == 0)")
    e.line(f"{', '.join(e.spelled[d.value] for d in op.outs)} = {get}({at}, {phase}, {lead})")
    _step(h, MAIL_SLOTS, at, phase)


@emits("tile_order")
def _tile_order(e: Emitter, op: Op) -> None:
    attr = op.attr
    make = specialised(e).deal("tile_order", attr["order"], attr["outer"], attr["reversed"])
    names = ", ".join(e.spelled[d.value] for d in op.outs)
    whole = f"{names} = {make}({', '.join(map(e.name, op.args))})"
    if len(op.outs) != 2 or attr["reversed"] is not None:
        e.line(whole)
        return
    # Each quotient takes the one before, and a block's first copies wait for all of them.
    tile, _, *extents = map(e.name, op.args)
    strip = attr["order"][attr["outer"]]
    places = ", ".join(tile if axis == strip else "i32(0)" for axis in (0, 1))
    for line in (f"if {extents[1 - strip]} == 1:", f"{INDENT}{names} = {places}", "else:",
                 f"{INDENT}{whole}"):
        e.line(line)


@emits("part_number")
def _part_number(e: Emitter, op: Op) -> None:
    e.define(op.outs[0], specialised(e).which)


@emits("part_count")
def _part_count(e: Emitter, op: Op) -> None:
    e.define(op.outs[0], f"i32({op.attr['parts']})")


@emits("sum_across")
def _sum_across(e: Emitter, op: Op) -> None:
    h = specialised(e)
    (x,), (made,) = op.args, op.outs
    count, threads = e.layout(x).count, WARPGROUP * h.program.warpgroups
    if h.exchange is None:
        at = -(-h.shared_bytes // exchanged_sums.ALIGNMENT) * exchanged_sums.ALIGNMENT
        barriers = at + exchanged_sums.buffer_bytes(count, threads)
        h.exchange = ExchangedSums(at, barriers, (h.fresh("turn"), h.fresh("turn_phase")),
                                   h.fresh("has_sums"))
        h.shared_bytes = barriers + BARRIER_BYTES * h.program.warpgroups
    (turn, phase), has = h.exchange.position, h.exchange.has
    make = h.use("sum_across", f"use(exchanged_sums.add({count}, {threads}, {h.exchange.buffers}, "
                 f"{h.exchange.barriers}))")

    def exchange(result: str, has: str) -> None:
        e.line(f"{has} = i32(({h.group} ^ {turn}) & 1 == {h.which})")
        waited = f"i32({phase} ^ (1 - {has} & 1 - {turn}))"
        e.line(f"{result} = {make}({e.name(x)}, {h.thread}, {h.group}, {h.which}, {has}, {waited})")
        _step(h, exchanged_sums.TURNS, turn, phase)

    if op.attr["all"]:
        first, second = h.fresh("sums"), h.fresh("sums")
        exchange(first, has)
        exchange(second, h.fresh("others"))
        pick = h.use("either", f"use(exchanged_sums.either({count}))")
        e.define(made, f"{pick}({has}, {first}, {second})")
    else:
        exchange(e.spelled[made.value], has)


@emits("has_sums")
def _has_sums(e: Emitter, op: Op) -> None:
    h = specialised(e)
    assert h.exchange is not None
    e.define(op.outs[0], f"i32({h.which} == 0)" if op.attr["all"] else h.exchange.has)


# --- rings ------------------------------------------------------------------------------------
@emits("ring_fill")
def _ring_fill(e: Emitter, op: Op) -> None:
    h = specialised(e)
    ring = h.program.ring(op.attr["ring"])
    at, phase = h.positions[ring.name]
    loads = [ring.load(name) for name in op.attr["loads"]]
    acquire = h.part(f"{ring.name}_acquire", "ring_acquire", ring.slots, ring.barriers_bytes,
                     sum(load.bytes for load in loads))
    e.line(f"{acquire}({at}, {phase})")
    for load, view in zip(loads, op.args, strict=True):
        if load.windows is not None:
            _copy_windows(h, ring, load, place_of(e, view), at)
            continue
        name, rank = f"{base_name(load.name)}_copy", len(load.box)
        how = (rank, ring.offset_bytes + load.offset_bytes, ring.slot_bytes, ring.barriers_bytes,
               load.panels, load.panel_bytes, load.panel_box[-1])
        map_, offsets, joined = map_of(h, ring, load, view)
        args = [at, map_]
        if load.blocks > 1:
            copy = h.part(name, "ring_copy_part", *how, load.blocks, rank - 1 - load.row_axis,
                          load.shape[0])
            args.append(h.which)
        else:
            streamed = h.program.streams(load)
            more = (streamed, True) if joined else (True,) if streamed else ()
            copy = h.part(name, "ring_copy", *how, *more)
        e.line(f"{copy}({', '.join([*args, *offsets])})")
    advance(h, ring)


def map_of(h: WarpSpecialisedEmitter, ring: BufferRing, load: Load, view: Any
           ) -> tuple[str, list[str], bool]:
    """The descriptor for a load's copies, where they begin, innermost first, and whether one brings
    all panels: its box has an axis of these in front. So does what comes with codes that lie as
    registers have them, where rows are of whole panels: the thread that fills issues ten copies for
    512 codes of fp4 and 16 rows of bf16 otherwise, and not all that there is room for: 11.05 us in
    place of 11.2, 32 rows 12.14 for 12.55. Codes in rows lose, 15.2 for 14.4 (8192 x 8192, H200,
    2026-11-27)."""
    place, columns = place_of(h, view), load.panel_box[-1]
    known = min(h.known.divisor(place.offsets[-1]), h.known.extent(place.texts[-1]))
    joined = (any(x.laid for x in ring.loads) and load.panels > 1 and load.blocks == 1
              and len(load.box) == 2 and known % columns == 0)
    box = (load.panels, *load.panel_box) if joined else load.panel_box
    offsets = [f"i32({h.name(x)})" for x in reversed(place.offsets)]
    return h.param("map", place.name, "i64", box=box), offsets, joined


@emits("ring_drain")
def _ring_drain(e: Emitter, op: Op) -> None:
    h = specialised(e)
    ring = h.program.ring(op.attr["ring"])
    at, phase = h.positions[ring.name]
    drain = h.part(f"{ring.name}_drain", "ring_drain", ring.slots, ring.barriers_bytes)
    e.line(f"{drain}({at}, {phase})")


def _copy_windows(h: WarpSpecialisedEmitter, ring: BufferRing, load: Load, place: MemoryOperand,
                  at: str) -> None:
    assert load.windows is not None
    windows, _ = load.windows
    copy = h.part(f"{base_name(load.name)}_copy", "ring_copy_windows",
                  ring.offset_bytes + load.offset_bytes, ring.slot_bytes, ring.barriers_bytes,
                  load.panels, load.panel_bytes, load.panel_box[-1], windows.numbers)
    map_ = h.param("map", place.name, "i64", box=load.panel_box, windows=windows.copied)
    row, column = (f"i32({h.name(x)})" for x in place.offsets)
    h.line(f"{copy}({at}, {map_}, {row}, {column})")


def advance(h: WarpSpecialisedEmitter, ring: BufferRing) -> None:
    at, phase = h.positions[ring.name]
    _step(h, ring.slots, at, phase)


def _step(h: WarpSpecialisedEmitter, slots: int, at: str, phase: str) -> None:
    step = h.part(f"next_of_{slots}", "ring_next", slots)
    h.line(f"{at}, {phase} = {step}({at}, {phase})")


@emits("ring_wait")
def _ring_wait(e: Emitter, op: Op) -> None:
    h = specialised(e)
    ring = h.program.ring(op.attr["ring"])
    at, phase = h.positions[ring.name]
    dealt = (ring.dealt_bytes,) if ring.dealt else ()
    wait = h.part(f"{ring.name}_wait", "ring_wait", ring.barriers_bytes, *dealt)
    e.define(op.outs[0], f"{wait}({at}, {phase})")
    advance(h, ring)


@emits("slot_tile")
def _slot_tile(e: Emitter, op: Op) -> None:
    h = specialised(e)
    ring = h.program.ring(op.attr["ring"])
    h.slots[op.outs[0].value] = (ring, ring.load(op.attr["load"]), e.name(op.args[0]))


@emits("ring_release")
def _ring_release(e: Emitter, op: Op) -> None:
    h = specialised(e)
    ring = h.program.ring(op.attr["ring"])
    maybe = op.args[0] not in h.waited
    if ring.blocks > 1:
        release = h.part(f"{ring.name}_release", "ring_release_all", ring.slots,
                         ring.barriers_bytes, ring.blocks, maybe)
        lane = e.once("lane", f"i32({h.all_threads} & 31)")
        e.line(f"{release}({e.name(op.args[0])}, {lane})")
        return
    release = h.part(f"{ring.name}_release", "ring_release", ring.slots, ring.barriers_bytes,
                     maybe)
    lead = e.once("lead", f"i32(({h.all_threads} & 31) == 0)")
    e.line(f"{release}({e.name(op.args[0])}, {lead})")
