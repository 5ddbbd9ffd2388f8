"""Records of a warp-specialised program: its rings, its knobs, and why a kernel is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, replace
from math import gcd, prod
from typing import Any

from tessera.lazy_dataclass import dataclass
from tessera.numerics import DType
from tessera.runtime.generations import WarpgroupMatmul
from tessera.tile.cuda.ptx.mbarrier import BARRIER_BYTES
from tessera.tile.ir.ir import Function
from tessera.tile.ops.windows import Windows

WARPGROUP = 128  # threads
PANEL_BYTES = 128  # of a row in shared memory: the widest swizzle
NARROW_BYTES = 32, 64  # rows that have a swizzle of their own
DEALERS = 64  # threads of the producer, behind its first warp
AHEAD_WARP = 3  # of the producer
ALIGNMENT_BYTES = 1024  # of a tile in shared memory: the pattern of that swizzle
PANEL_ROWS = 16  # of a warp, in an accumulator
MAIL_SLOTS = 2
MAIL_NUMBERS = 4  # of a slot: whether there is a tile, and where on each axis of the grid
MAIL_BYTES = MAIL_SLOTS * (8 + 8 + 4 * MAIL_NUMBERS) + 8


def copied_windows(attr: Mapping[str, Any], dtype: DType) -> tuple[Windows, int]:
    """Of a view of windows: how copies unfold it, and the bytes of channels that each brings of a
    pixel; 0 where none can."""
    windows = Windows.of(attr).joined(PANEL_BYTES * 8 // dtype.bits)
    together = gcd(windows.channels, attr["columns"]) * dtype.bits // 8
    return windows, next((n for n in (PANEL_BYTES, *sorted(NARROW_BYTES, reverse=True))
                          if together % n == 0), 0)


@dataclass(frozen=True)
class Load:
    """One tile of a slot: panels of `width_bytes` columns, one behind the other, swizzled; or a row
    of numbers as it is. What lies behind the columns in the last panel, matmuls do not read.

    tensor, box: what TMA reads, per axis of the tensor   shape: [rows, columns] as stored, or
    [columns]   offset_bytes: of the tile in the slot   blocks: of a cluster that bring it, some
    rows each   windows: of images that it unfolds, and the bytes of channels that a copy brings of
    a pixel   part: whether its rows are parts of the tensor's, which go on behind them   dealt: the
    codes into whose order its rows are brought, where they lie   codes: whether
    they are packed weights   laid: whether these lie as registers have them
    """

    name: str
    tensor: str
    box: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: DType
    offset_bytes: int = 0
    blocks: int = 1
    windows: tuple[Windows, int] | None = None
    part: bool = False
    dealt: str = ""
    codes: bool = False
    laid: bool = False

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] * self.dtype.bits // 8

    @property
    def width_bytes(self) -> int:
        if self.windows is not None:
            return self.windows[1]
        single = len(self.shape) == 1
        whole = single or self.row_bytes in NARROW_BYTES
        if self.part and not single and self.row_bytes % PANEL_BYTES == NARROW_BYTES[1]:
            return NARROW_BYTES[1]  # nothing is brought in vain
        return self.row_bytes if whole else PANEL_BYTES

    @property
    def panels(self) -> int:
        return -(-self.row_bytes // self.width_bytes)

    @property
    def panel_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.width_bytes

    @property
    def row_axis(self) -> int:
        """That of the tensor, of a tile."""
        return max((i for i, n in enumerate(self.box[:-1]) if n > 1), default=0)

    @property
    def panel_box(self) -> tuple[int, ...]:
        """The box of one copy."""
        rows = tuple(n // self.blocks if i == self.row_axis else n
                     for i, n in enumerate(self.box[:-1]))
        return (*rows, self.width_bytes * 8 // self.dtype.bits)

    @property
    def bytes(self) -> int:
        return self.panels * self.panel_bytes


@dataclass(frozen=True)
class BufferRing:
    """`slots` buffers in shared memory, each with a full and an empty barrier.

    fills: what arrives together in a slot, of each loop that takes its turn with the ring.
    """

    name: str
    slots: int
    fills: tuple[tuple[Load, ...], ...]
    offset_bytes: int = 0  # of slot 0
    barriers_bytes: int = 0  # offset of full[0]; empty[0] follows full[slots - 1]

    @property
    def slot_bytes(self) -> int:
        return max(aligned(loads[-1].offset_bytes + loads[-1].bytes) for loads in self.fills)

    @property
    def loads(self) -> tuple[Load, ...]:
        """Of all fills."""
        return tuple(load for loads in self.fills for load in loads)

    @property
    def dealt(self) -> bool:
        return any(load.dealt for load in self.loads)

    @property
    def barrier_bytes(self) -> int:
        """Of all barriers; those of what is dealt follow the empty ones."""
        return (3 if self.dealt else 2) * BARRIER_BYTES * self.slots

    @property
    def dealt_bytes(self) -> int:
        """Offset of the barriers of what is dealt."""
        return self.barriers_bytes + 2 * BARRIER_BYTES * self.slots

    @property
    def blocks(self) -> int:
        """Those that fill and read a slot together: 1, or all of a cluster."""
        return max(load.blocks for load in self.loads)

    def load(self, name: str) -> Load:
        return next(x for x in self.loads if x.name == name)

    def fill(self, name: str) -> tuple[Load, ...]:
        """The loads that arrive together with the one of this name."""
        return next(loads for loads in self.fills if any(x.name == name for x in loads))


def barriers_end(rings: tuple[BufferRing, ...]) -> int:
    return max(r.barriers_bytes + r.barrier_bytes for r in rings)


def shared_end(rings: tuple[BufferRing, ...], pipeline: PipelineKnobs) -> int:
    """Bytes of rings, barriers and mailbox."""
    return barriers_end(rings) + (MAIL_BYTES if pipeline.tiles == "dynamic" else 0)


def panels_offset(rings: tuple[BufferRing, ...], pipeline: PipelineKnobs) -> int:
    return aligned(shared_end(rings, pipeline))


def panel_bytes(warpgroups: int) -> int:
    """Of one panel of each warp."""
    return WARPGROUP // 32 * warpgroups * PANEL_ROWS * PANEL_BYTES


def turned_panel(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a panel of an accumulator's transpose, of 16 bits: as many columns as a
    warp has rows of the accumulator. Of 64 rows that are no divisor the last panel begins inside of
    the one before. No rows where none fit."""
    most = 64 if shape[0] >= 64 and shape[0] % 8 == 0 else 0
    return next((n for n in (64, 32) if shape[0] % n == 0), most), PANEL_ROWS


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class PipelineKnobs:
    """Knobs of the warp-specialised form; None: derived from the function (defaults.py).

    stages         slots of a ring that is filled in a loop
    overlap        how many of an iteration's last matmuls run beside the first of the next; 0: none
    in_flight      matmuls of a purely accumulating loop that still run when the next is issued
    a_in_registers loop-invariant first operands are read from shared memory once
    split          a loop whose masks act only from some iteration on becomes two, the first without
    pin            registers of the softmax tile that must exist before the wait in the loop
    guard_rescale  accumulator * factor is left out where a warp's factors are all 1
    fast_sums      fp8 matmuls are summed in the tensor cores, with their few bits
    tiles          'static': block b does b, b + blocks, ...; 'dynamic': who is free takes the next
    spare          multiprocessors that it leaves to what runs beside it
    raster         groups of the strip axis that run side by side (tile_order); 0: from the extents
    reversed       grid axis that runs from its end: long tiles first
    warpgroups     consumers
    registers      of a lane of the producer, of a consumer; None: as launched
    dependent      it starts while the kernel before it ends, and waits there for its results
    cluster        blocks that do neighbouring tiles of the strip axis and share what all of them
                   read (clusters.py)
    divided        blocks of a cluster that share each tile's iterations, 2 or 1 (divide.py)
    resident       blocks that share a multiprocessor: the next launch's are there when this ends
    beside         resident blocks that take tiles of one launch side by side
    ahead          iterations whose packed weights come to L2 while the kernel before it ends
    streamed       packed weights, or all that loops bring where there are none, leave L2 first
    turns          warpgroups issue the matmuls of an iteration one after another (turns.py)
    skip           warpgroups leave out tiles and iterations in which none of their rows counts
    """

    stages: int | None = None
    overlap: int | None = None
    in_flight: int | None = None
    a_in_registers: bool | None = None
    split: bool | None = None
    pin: int | None = None
    guard_rescale: bool = True
    fast_sums: bool = False
    tiles: str | None = None
    spare: int | None = None
    raster: int | None = None
    reversed: int | None = None
    warpgroups: int | None = None
    registers: tuple[int, int] | None = None
    dependent: bool | None = None
    cluster: int = 1
    divided: int = 1
    resident: int = 1
    beside: int = 1
    ahead: int = 0
    streamed: bool = False
    turns: bool = False
    skip: bool = False

    @property
    def together(self) -> int:
        """Blocks of a cluster."""
        return self.cluster * self.divided

    def override(self, values: dict[str, Any]) -> PipelineKnobs:
        known = {f.name for f in fields(self)}
        return replace(self, **{k: v for k, v in values.items() if k in known})


@dataclass(frozen=True)
class WarpSpecialisedProgram:
    """A kernel as one producer and several consumer warpgroups.

    function: `if is_producer() { fills rings } else { computes }`, each with the loop over tiles.
    rank: axes of the launch grid that it counts   rows: of the matmuls' tiles
    form: how its matmuls are multiplied   panel_buffers: of each consumer warp, for results that
    leave by TMA   strip: the axis of the grid on which blocks of a cluster are neighbours
    """

    function: Function
    rings: tuple[BufferRing, ...]
    pipeline: PipelineKnobs
    rank: int
    rows: int
    form: WarpgroupMatmul
    notes: tuple[str, ...] = field(default=())
    panel_buffers: int = 0
    strip: int = 0

    def streams(self, load: Load) -> bool:
        """Whether what it brings leaves L2 first."""
        if any(x.codes for r in self.rings for x in r.loads):
            once = load.codes and len(load.box) == 2
        else:
            once = any(load in r.loads and r.slots > 1 for r in self.rings)
        return self.pipeline.streamed and once

    @property
    def warpgroups(self) -> int:
        assert self.pipeline.warpgroups is not None
        return self.pipeline.warpgroups

    @property
    def threads(self) -> int:
        return WARPGROUP * (self.warpgroups + 1)

    @property
    def mailbox_bytes(self) -> int:
        """Offset of the mailbox: MAIL_SLOTS times full, empty and coordinates."""
        return barriers_end(self.rings)

    @property
    def panels_bytes(self) -> int:
        """Offset of the panels of results."""
        return panels_offset(self.rings, self.pipeline)

    @property
    def shared_bytes(self) -> int:
        """Rings, barriers, mailbox, and panels of results."""
        if self.panel_buffers:
            return self.panels_bytes + self.panel_buffers * panel_bytes(self.warpgroups)
        return shared_end(self.rings, self.pipeline)

    def ring(self, name: str) -> BufferRing:
        return next(r for r in self.rings if r.name == name)


@dataclass(frozen=True)
class Refusal:
    """Why a function does not take this form. extents: those that the reason speaks of, by name."""

    reason: str
    extents: tuple[str, ...] = ()


class Refused(Exception):
    """Raised inside the passes; `lower_warp_specialised` returns its Refusal."""

    def __init__(self, reason: str, *extents: str):
        super().__init__(reason)
        self.refusal = Refusal(reason, extents)
