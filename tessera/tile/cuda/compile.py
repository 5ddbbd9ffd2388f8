"""A function of Tile IR -> a kernel for a GPU. Needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tessera.errors import UnsupportedTargetError
from tessera.lazy_dataclass import dataclass
from tessera.runtime.target import Target, parse_target
from tessera.tile.cuda.build import Built, CompileJob, MachineCode, build, job_of
from tessera.tile.cuda.emit.attention_backward import THREADS, emit_backward
from tessera.tile.cuda.emit.emitter import ArgumentFacts, Emitted, Emitter, Parameter
from tessera.tile.cuda.emit.warp_specialised import emit_warp_specialised
from tessera.tile.cuda.intrinsics.matmul import STEP_BYTES
from tessera.tile.cuda.intrinsics.swizzle import stage_bytes
from tessera.tile.cuda.lower.assign_layouts import Hint, assign_layouts
from tessera.tile.cuda.lower.dependent_launch import use_dependent_launch
from tessera.tile.cuda.lower.find_positions import find_positions
from tessera.tile.cuda.lower.gather_windows import gather_windows
from tessera.tile.cuda.lower.hoist_loads import hoist_loads
from tessera.tile.cuda.lower.insert_barriers import order
from tessera.tile.cuda.lower.multiply_codes import (
    laid_parameter,
    multiply_codes,
    stack_codes,
)
from tessera.tile.cuda.lower.pick_elements import pick_elements
from tessera.tile.cuda.lower.prefetch import prefetch_boxes
from tessera.tile.cuda.lower.sink_reductions import sink_reductions
from tessera.tile.cuda.lower.stage_loads import Room, ring_stages, stage_matmul_loads
from tessera.tile.cuda.lower.warp_specialised import Refusal, WarpSpecialisedProgram
from tessera.tile.ir.ir import Function, Op, Param, SSAValue, outs_of, walk
from tessera.tile.ir.schedule import Schedule
from tessera.tile.ir.types import Buffer, TileType
from tessera.tile.passes.integer_facts import Knowledge
from tessera.tile.passes.operation_counts import tile_bytes

# Groups of fewer lanes share a multiprocessor, so that one multiplies while another waits.
FULL_LANES = 256
MOST_REGISTER_FILES = 16  # of the registers of a multiprocessor that one tile may take


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel for one set of types, facts, lanes and target.

    function: Tile IR after lowering.  parameters: what a launch passes, in order.
    grid: 'groups', one block per group, 'clusters', one cluster of blocks per group, or
        'persistent', as many blocks as the device holds;
        'persistent-24', but for 24 multiprocessors; 'persistent-0--2', two on each;
        'persistent-0-1', in clusters whose blocks are neighbours on axis 1 of the grid;
        'persistent-0-each', in clusters that do a group each.
    notes: what the compiler decided and why.
    """

    built: Built
    function: Function
    emitted: Emitted
    lanes: int
    threads: int
    grid: str = "groups"

    @property
    def source(self) -> str:
        return self.emitted.source

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.emitted.parameters

    @property
    def notes(self) -> tuple[str, ...]:
        spilled = self.built.resources.spill_store_bytes
        if not spilled:
            return self.emitted.notes
        return (*self.emitted.notes, f"{spilled} bytes of registers a thread are kept in memory: "
                "take more warps or smaller tiles")


def compile_function(function: Function, lanes: int, *, schedule: Schedule | None = None,
                     target: Target | str | None = None, facts: ArgumentFacts | None = None,
                     checked: bool = False, code: MachineCode | None = None) -> CompiledKernel:
    """Lowers, emits and builds.

    target: by default that of this machine's first GPU. checked: element accesses are tested and
    a failure is reported through the error flags. code: what was made of this function before, so
    that it is only lowered and emitted.
    Raises UnsupportedTargetError where the target lacks an instruction, CompileError where a
    compiler below refuses.
    """
    at = _target(target)
    made = emit_kernel(function, lanes, at, facts or ArgumentFacts(), checked, schedule)
    return build_kernel(made, lanes, at, code)


def build_kernel(made: EmittedKernel, lanes: int, target: Target,
                 code: MachineCode | None = None) -> CompiledKernel:
    """An emitted kernel built. code: what was made of it before, or elsewhere."""
    emitted = made.emitted
    built = build(emitted.source, emitted.name, tuple(p.abi for p in emitted.parameters), target,
                  threads=made.threads, min_blocks=made.resident, shared_bytes=emitted.shared_bytes,
                  lines=emitted.lines, cluster=(emitted.cluster,), dependent=emitted.dependent,
                  code=code)
    return CompiledKernel(built, made.function, emitted, lanes, made.threads, made.grid)


@dataclass(frozen=True)
class EmittedKernel:
    """The form that a function takes on a target: its Tile IR after lowering, and its source.

    threads: of a block.  grid: as in CompiledKernel.  refusal: why it is not warp-specialised.
    resident: blocks for which a multiprocessor has to have registers.
    """

    function: Function
    emitted: Emitted
    threads: int
    grid: str
    refusal: Refusal | None = None
    resident: int = 1

    def job(self, target: Target) -> CompileJob:
        """What is left to do, for any process."""
        emitted = self.emitted
        return job_of(emitted.source, emitted.name, tuple(p.abi for p in emitted.parameters),
                      target, threads=self.threads, min_blocks=self.resident, lines=emitted.lines,
                      shared_bytes=emitted.shared_bytes)


def emit_kernel(function: Function, lanes: int, target: Target, facts: ArgumentFacts,
                checked: bool = False, schedule: Schedule | None = None) -> EmittedKernel:
    """Warpgroups that specialise where the target has that form and the function fits it; else
    groups of `lanes` threads, whose matmuls are by mma.sync or by threads. A note says why. The
    library's gradient of attention in turn has a form of its own."""
    require_registers(function, target)
    function = pick_elements(function)
    pairs = None if checked else emit_backward(function, target, facts)
    if pairs is not None:
        return EmittedKernel(function, pairs, THREADS, "clusters")
    if (laid := laid_parameter(function)) is not None:
        codes = stack_codes(function, target.generation, facts.divisible, bool(facts.shared))
        if (rows := laid_parameter(codes)) is not None:
            raise _of_other_order(rows, "it is read as rows")
        made: Any = Refusal("accesses are checked") if checked else \
            emit_warp_specialised(codes, schedule, target, facts)
        if isinstance(made, Refusal):
            raise _of_other_order(laid, made.reason)
    elif checked:
        made = Refusal("accesses are checked")
    elif with_codes(function, lanes, facts, target) is not function:
        made = Refusal("packed weights are multiplied as they lie, by mma.sync")
        codes = stack_codes(function, target.generation, facts.divisible, bool(facts.shared))
        if codes is not function:
            made = emit_warp_specialised(codes, schedule, target, facts)
    else:
        made = emit_warp_specialised(function, schedule, target, facts)
    if not isinstance(made, Refusal):
        program, emitted = made
        return EmittedKernel(program.function, emitted, program.threads, _persistent(program),
                             resident=program.pipeline.resident)
    lowered, emitted = emit(function, lanes, target, facts, checked, schedule)
    emitted = replace(emitted, notes=(*emitted.notes, f"not warp-specialised: {made.reason}"))
    resident = dict(schedule.extra).get("RESIDENT", 1) if schedule is not None else 1
    return EmittedKernel(lowered, emitted, lanes, "groups", made, resident)


def _of_other_order(weights: Param, reason: str) -> UnsupportedTargetError:
    kind = weights.type.numeric  # type: ignore[union-attr]
    return UnsupportedTargetError(
        f"{weights.value.name} is {kind}: its codes lie as products of up to 64 rows of "
        f"{kind.policy.packed_for} read them, and this kernel is none: {reason}",
        hint=f"give it rows: ts.cast({weights.value.name}, '{kind.dtype}')")


def _persistent(program: WarpSpecialisedProgram) -> str:
    """As CompiledKernel.grid says it."""
    spare = program.pipeline.spare
    if program.pipeline.divided > 1:
        return f"persistent-{spare or 0}-each"
    if program.pipeline.cluster > 1:
        return f"persistent-{spare or 0}-{program.strip}"
    if program.pipeline.beside > 1:
        return f"persistent-{spare or 0}--{program.pipeline.beside}"
    return f"persistent-{spare}" if spare else "persistent"


def _target(target: Target | str | None) -> Target:
    if target is None:
        from tessera.runtime.device import device
        from tessera.runtime.target import target_of_device

        return target_of_device(device().cc)
    return parse_target(target)


def lower(function: Function, lanes: int, facts: ArgumentFacts, target: Target,
          stages: int | None = None, vector: int | None = None, resident: int = 1) -> Function:
    """The passes, in order. stages: of rings, None for as many as there is room for. vector: of
    accesses to global memory, None for as wide as they get. resident: groups that must find room on
    a multiprocessor."""
    threads = 1 << (lanes.bit_length() - 1)
    chip = target.generation
    room = Room(chip.group_shared_bytes, stages, max(1, FULL_LANES // threads),
                lanes % 32 == 0 and chip.warp_matmul.step_bytes == STEP_BYTES, resident)
    function = sink_reductions(find_positions(pick_elements(function), threads), threads)
    function = gather_windows(with_codes(function, lanes, facts, target))
    function = stage_matmul_loads(function, chip, room, bool(facts.shared), facts.divisible)
    function = hoist_loads(prefetch_boxes(function), threads)
    function = use_dependent_launch(function, chip, facts.batched)
    known = Knowledge(function, facts.divisible, facts.eights)
    function = assign_layouts(function, Hint(threads, chip, chained(function), vector, known,
                                             lanes % 32 == 0 or lanes == threads))
    return order(function, bool(facts.shared), threads != lanes)


def with_codes(function: Function, lanes: int, facts: ArgumentFacts, target: Target) -> Function:
    """Matmuls with packed weights in a form of their own, where there are some."""
    return multiply_codes(function, lanes // 32 if lanes % 32 == 0 else 0, target.generation,
                          facts.divisible, bool(facts.shared))


def chained(function: Function) -> bool:
    """Whether a matmul's result flows into the left operand of another."""
    reached: set[SSAValue] = set()
    for node in walk(function.body):
        if not isinstance(node, Op):
            continue
        if node.name == "matmul" and node.args[0] in reached:
            return True
        if node.name == "matmul" or any(a in reached for a in node.args):
            reached |= {d.value for d in node.outs}
    return False


def emit(function: Function, lanes: int, target: Target, facts: ArgumentFacts,
         checked: bool = False, schedule: Schedule | None = None) -> tuple[Function, Emitted]:
    """Tile IR after lowering, and its source.

    Rings take the shared memory that there is; where other ops turn out to need some of it, they
    get a stage less.
    """
    asked = schedule.stages_ if schedule is not None else None
    vector = schedule.vector_ if schedule is not None and schedule.source != "auto" else None
    told = dict(schedule.extra) if schedule is not None else {}
    stages, most = asked, target.generation.group_shared_bytes
    while True:
        lowered = lower(function, lanes, facts, target, stages, vector, told.get("RESIDENT", 1))
        emitter = Emitter(lowered, lanes, target, facts, checked, vector)
        emitter.grid = told.get("GRID", ())
        emitter.last_first, emitter.streams = bool(told.get("LAST_FIRST")), \
            bool(told.get("STREAMED"))
        emitter.declare()
        emitter.nodes(lowered.body)
        emitted, used = emitter.finish(), ring_stages(lowered)
        if emitted.shared_bytes <= most:
            return lowered, emitted
        if asked is not None or used < 2 or stages is not None and used > stages:  # the user's own
            raise too_much_shared(lowered, emitted.shared_bytes, target, most)
        stages = used - 1


def require_registers(function: Function, target: Target) -> None:
    """Raises for a tile of more than so many times the registers of a multiprocessor: ptxas takes
    25 s for one of 4 MiB, with 8 KB of each thread kept in memory, and does not end for 64 MiB."""
    most = MOST_REGISTER_FILES * 4 * target.generation.registers
    for node in walk(function.body):
        for d in outs_of(node):
            if isinstance(d.type, TileType) and tile_bytes(d.type) > most:
                raise UnsupportedTargetError(
                    f"{function.name}: {d.type} takes {tile_bytes(d.type)} bytes of registers, a "
                    f"multiprocessor has {4 * target.generation.registers} on {target}",
                    where=node.where, hint="use a smaller tile; go over a large array in blocks, "
                    "by tile_m or for m in range(0, M, 64)")


def too_much_shared(function: Function, shared_bytes: int, target: Target,
                    most: int) -> UnsupportedTargetError:
    """For a group that needs more shared memory than the target gives one."""
    made = [(d.type, d.value.name, node.where) for node in walk(function.body)
            if isinstance(node, Op) for d in node.outs
            if isinstance(d.type, Buffer) and d.type.space == "shared"]
    made.sort(key=lambda m: -stage_bytes(m[0]) * m[0].stages)
    parts = [f"{name} {'x'.join(map(str, t.shape))} {t.dtype}" + f" x {t.stages}" * (t.stages > 1)
             for t, name, _ in made[:3]]
    where = next((w for *_, w in made if w is not None), None) or next(
        (n.where for n in walk(function.body) if n.where is not None), None)
    held = f": {', '.join(parts)}" if parts else ""
    return UnsupportedTargetError(
        f"{function.name} needs {shared_bytes} bytes of shared memory, a group has {most} on "
        f"{target}{held}", where=where, hint="use smaller tiles or buffers, or fewer stages")
