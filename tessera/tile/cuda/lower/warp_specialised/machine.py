"""Runs a warp-specialised program on the interpreter: the producer, then the consumers.

Rings keep what the producer would have brought, and where it would be waiting. A consumer that
waits for what cannot arrive, a slot that goes back while a matmul reads it, a result that is read
while its matmul runs, registers that a loop makes anew while a matmul reads them, and a matmul of
registers that do not lie as it takes them are errors.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import numpy as np

from tessera.errors import SourceLine
from tessera.tile.cuda.lower.warp_specialised.layouts import PLACED, fragments, in_fragments
from tessera.tile.cuda.lower.warp_specialised.ops import NO_SLOT
from tessera.tile.cuda.lower.warp_specialised.program import WarpSpecialisedProgram
from tessera.tile.cuda.lower.warp_specialised.rewrite import READ_IN_PIECES
from tessera.tile.interpreter.machine import Machine
from tessera.tile.interpreter.memory import MemoryBox
from tessera.tile.ir.errors import KernelError
from tessera.tile.ir.ir import Op, SSAValue, definitions
from tessera.tile.ir.types import TileType


class PipelineError(KernelError):
    """A program that would hang or read what is not there. Of the compiler, not of the user."""

    default_code = "E_PIPELINE"


class Rings:
    """The state of all rings of one block."""

    def __init__(self, program: WarpSpecialisedProgram):
        self.slots = {r.name: r.slots for r in program.rings}
        self.fills: list[tuple[str, dict[str, np.ndarray]]] = []  # in the producer's order
        self.reached = 0  # fills that the producer has begun
        self.filled: dict[str, deque] = defaultdict(deque)  # begun, not yet waited for
        self.waited: dict[str, int] = defaultdict(int)  # waits so far
        self.held: dict[str, dict[int, dict[str, np.ndarray]]] = defaultdict(dict)
        self.source: dict[int, tuple[np.ndarray, str, int]] = {}  # array -> its slot
        # Of matmuls: results, the slots that they read, their operands.
        self.running: list[tuple[np.ndarray, list[tuple[str, int]], tuple[Any, ...]]] = []

    # --- the producer -------------------------------------------------------------------------
    def fill(self, ring: str, views: dict[str, MemoryBox], machine: Any) -> None:
        tiles = {}
        for name, place in views.items():
            address, inside = place.addresses(machine.groups)
            values = place.memory.read(address)
            tiles[name] = np.where(inside, values, values.dtype.type(0))
        self.fills.append((ring, tiles))

    def advance(self) -> None:
        """The producer goes on until its next slot is not free."""
        while self.reached < len(self.fills):
            ring, tiles = self.fills[self.reached]
            if len(self.filled[ring]) + len(self.held[ring]) == self.slots[ring]:
                return
            self.filled[ring].append(tiles)
            self.reached += 1

    # --- the consumers ------------------------------------------------------------------------
    def wait(self, ring: str, where: SourceLine | None) -> int:
        self.advance()
        if not self.filled[ring]:
            raise PipelineError(f"deadlock: the consumer waits for ring {ring}, and the producer "
                                f"for a free slot; held: {self.holding()}", where=where)
        slot = self.waited[ring] % self.slots[ring]
        self.waited[ring] += 1
        self.held[ring][slot] = self.filled[ring].popleft()
        return slot

    def holding(self) -> dict[str, list[int]]:
        return {name: sorted(slots) for name, slots in self.held.items() if slots}

    def tile(self, ring: str, slot: int, load: str) -> np.ndarray:
        if slot not in self.held[ring]:
            raise PipelineError(f"slot {slot} of ring {ring} is read and not held")
        array = self.held[ring][slot][load]
        self.source[id(array)] = (array, ring, slot)
        return array

    def release(self, ring: str, slot: int, where: SourceLine | None) -> None:
        if slot == NO_SLOT:
            return
        if any((ring, slot) in slots for _, slots, _ in self.running):
            raise PipelineError(f"slot {slot} of ring {ring} is released while a matmul reads it",
                                where=where)
        if slot not in self.held[ring]:
            raise PipelineError(f"slot {slot} of ring {ring} is released and not held", where=where)
        del self.held[ring][slot]

    # --- matmuls -----------------------------------------------------------------------------
    def issue(self, made: np.ndarray, operands: tuple, accumulator: Any,
              where: SourceLine | None) -> None:
        for x in operands:
            self.require_ready(x, "the operand of a matmul", where)
        slots = [self.source[id(x)][1:] for x in operands if id(x) in self.source]
        self.running.append((made, slots, operands))

    def settle(self, pending: int) -> None:
        self.running = self.running[len(self.running) - pending:] if pending else []

    def require_ready(self, x: Any, what: str, where: SourceLine | None) -> None:
        if any(made is x for made, _, _ in self.running):
            raise PipelineError(f"{what} is read before its matmul is complete", where=where)

    def require_unread(self, x: Any, op: Op) -> None:
        """x: what an operand's registers hold from the iteration before. The assembler gives it
        the same ones, and does not see over a loop's end that a matmul still reads them."""
        if any(x is operand for _, _, operands in self.running for operand in operands):
            raise PipelineError(f"{op.name} writes registers that a running matmul reads",
                                where=op.where)


class PipelineMachine(Machine):
    """One persistent block. role: 'producer' | 'consumer'.  part, parts: its number among blocks
    that do a tile together, and theirs; what the others have summed does not come."""

    part, parts = 0, 1

    def __init__(self, program: WarpSpecialisedProgram, block: int, blocks: int,
                 axes: tuple[int, ...],
                 env: dict[SSAValue, Any]):
        super().__init__(np.array([0], np.int64), 1, axes, env)
        self.block, self.blocks, self.role = block, blocks, "producer"
        self.rings = Rings(program)
        self.types, self.warpgroups = definitions(program.function), program.warpgroups
        self.mail: deque[np.ndarray] = deque()

    def op(self, op: Op) -> None:
        if op.name in PLACED:
            self.require_fragments(op)
        if op.name in ("pack_operand", *READ_IN_PIECES):
            self.rings.require_unread(self.env.get(op.outs[0].value), op)
        if op.name not in ("async_matmul", "matmul_wait"):
            for x in op.args:
                self.rings.require_ready(self.get(x), f"an operand of {op.name}", op.where)
        super().op(op)

    def require_fragments(self, op: Op) -> None:
        """Instructions of matmuls say in which thread's register an element lies."""
        for x in in_fragments(op):
            t = self.types.get(x) if isinstance(x, SSAValue) else None
            if isinstance(t, TileType) and t.layout != (
                    wanted := fragments(op, t.shape, self.warpgroups).text):
                raise PipelineError(f"{op.name} takes {t.dtype}{list(t.shape)} as {wanted}, and it "
                                    f"lies as {t.layout}", where=op.where)


def run_program(program: WarpSpecialisedProgram, axes: tuple[int, ...], env: dict[SSAValue, Any],
                blocks: int = 2) -> None:
    """All tiles of a grid, by `blocks` persistent blocks one after the other."""
    for block in range(blocks):
        machine = PipelineMachine(program, block, blocks, axes, env)
        for role in ("producer", "consumer"):
            machine.role = role
            machine.run(program.function.body)
        rings = machine.rings
        rings.advance()
        if rings.reached < len(rings.fills) or any(rings.filled.values()) or rings.holding() \
                or machine.mail:
            raise PipelineError(f"a block ends with {len(rings.fills)} fills of which "
                                f"{sum(rings.waited.values())} were read, and holds "
                                f"{rings.holding()}")
