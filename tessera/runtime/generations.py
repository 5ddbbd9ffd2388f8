"""What each generation of GPUs has: a record for each target. Nothing else knows these numbers.

    parse_target("sm_90a").generation.group_shared_bytes   232448
    parse_target("sm_80").generation.warpgroup_matmul      None

A record says a chip's limits, how it multiplies matrices and what feeds that, and the figures that
were found best on it. Lowering, emission, the cost model and occupancy take the record. Which PTX
instruction exists on which target stands with the instruction (tile/cuda/ptx).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

from ..lazy_dataclass import dataclass

_KIB = 1024


@dataclass(frozen=True)
class WarpMatmul:
    """mma.sync: matmuls of a warp, operands in its registers.

    formats: names of operands in the instruction.  step_bytes: of the contracted axis in one.
    short_sums: formats whose sums have few bits in the tensor cores. After longest_sum terms they
    begin anew, and the parts are added outside.
    """

    formats: tuple[str, ...]
    step_bytes: int = 32
    short_sums: tuple[str, ...] = ()
    longest_sum: int = 0


@dataclass(frozen=True)
class MatmulOperand:
    """A format of wgmma's operands.

    name: in the instruction.  any_major: whether the axis that is not contracted may be contiguous.
    packs: whether a computed first operand stays in registers, rounded to it.
    by_columns: whether a first operand that lies across the contracted axis is read from shared
    memory into registers.
    short_sums: whether sums have few bits in the tensor cores, so that blocks of them are added
    outside.
    """

    name: str
    any_major: bool = False
    packs: bool = False
    by_columns: bool = False
    short_sums: bool = False


@dataclass(frozen=True)
class TensorCopies:
    """TMA: boxes of a tensor, copied to shared memory (CUDA driver API, cuTensorMapEncodeTiled).

    most_box: elements along an axis.  alignment_bytes: what addresses and pitches are multiples of.
    Of windows that copies unfold (cuTensorMapEncodeIm2col), in pixels: most_corner, of the box in
    which they begin from the image's corners; most_offset, inside of a window; most_stride.
    """

    most_box: int = 256
    alignment_bytes: int = 16
    most_corner: int = 127
    most_offset: int = 255
    most_stride: int = 8


@dataclass(frozen=True)
class PipelineDefaults:
    """What a warp-specialised kernel gets where its schedule leaves a knob open; measured.

    stages: of a ring in a loop with one matmul, with several.  ring_bytes: of the former at most,
        in more slots where they are small; results leave through what is left.
    other_registers: of a consumer's thread besides tiles: addresses, statistics, temporaries; and
        the fewest with which tiles that leave no more are tried.
    pinned_sixteenths: of the tile that becomes an operand, how much is pinned in front of the wait;
        and where tiles take different numbers of iterations.
    shared_l2_bytes: of the tensors that concurrent tiles share.
    strip: heads side by side where tiles take different numbers of iterations, and at most where
        they take as many.
    strip_rows: of a matmul, side by side.
    """

    stages: tuple[int, int]
    ring_bytes: int
    other_registers: tuple[int, int]
    pinned_sixteenths: tuple[int, int]
    shared_l2_bytes: int
    strip: int
    strip_rows: int


@dataclass(frozen=True)
class WarpgroupMatmul:
    """wgmma: asynchronous matmuls of a warpgroup, operands in shared memory where TMA puts them.

    operands: by the format of a tensor.  rows, most_columns, column_step: of one instruction's
    result.  step_bytes: of the contracted axis.
    registers: by the number of consumer warpgroups, those of a thread of the producer and of a
        consumer (setmaxnreg); None: as launched.  most_registers: the same where tiles need all
        that a consumer's thread can have.
    """

    operands: Mapping[str, MatmulOperand] = field(hash=False)
    rows: int
    most_columns: int
    column_step: int
    step_bytes: int
    registers: Mapping[int, tuple[int, int] | None] = field(hash=False)
    most_registers: Mapping[int, tuple[int, int]] = field(hash=False)
    copies: TensorCopies
    defaults: PipelineDefaults


@dataclass(frozen=True)
class Generation:
    """What a target's chips have.

    Of one multiprocessor: groups, warps, shared_bytes of all its groups, registers of 32 bits.
    Of one group: group_threads, group_shared_bytes. Of one thread: thread_registers.
    register_unit, shared_unit: in which they are given out, to a warp and to a group.
    reserved_bytes: of each group's shared memory, for the system.
    warp_matmul, warpgroup_matmul: how matrices are multiplied; threads do what neither does.
    async_copies: copies from global to shared memory without registers (cp.async).
    ring_stages: of a ring that they fill, at most: more hide no more latency.
    converts: narrow formats that instructions convert.
    dependent_launches: whether a kernel may begin before the one in front of it ends.
    cluster_groups: groups of a cluster that any such chip runs at one time.
    most_cluster_groups: that a chip with all its multiprocessors does, if they are small.
    bf16_pairs: whether one instruction adds or multiplies two bf16 and rounds them.
    vector_sums: whether one atomic instruction adds four f32, or two bf16, to neighbours in memory.
    """

    target: str
    name: str
    groups: int
    warps: int
    shared_bytes: int
    group_shared_bytes: int
    warp_matmul: WarpMatmul
    warpgroup_matmul: WarpgroupMatmul | None = None
    async_copies: bool = True
    ring_stages: int = 4
    converts: tuple[str, ...] = ()
    dependent_launches: bool = False
    bf16_pairs: bool = False
    vector_sums: bool = False
    cluster_groups: int = 1
    most_cluster_groups: int = 1
    registers: int = 65536
    register_unit: int = 256
    thread_registers: int = 255
    group_threads: int = 1024
    shared_unit: int = 128
    reserved_bytes: int = 1024

    @property
    def lanes(self) -> int:
        """Threads of a multiprocessor, at most."""
        return 32 * self.warps

    def room_of(self, groups: int) -> int:
        """Bytes of shared memory that each of so many groups on a multiprocessor may have."""
        return min(self.group_shared_bytes, self.shared_bytes // groups - self.reserved_bytes)


GENERATIONS: dict[str, Generation] = {}


def register(generation: Generation) -> Generation:
    """Declare a generation. Raises ValueError for a second one of a target."""
    if generation.target in GENERATIONS:
        raise ValueError(f"the generation {generation.target!r} is declared twice")
    GENERATIONS[generation.target] = generation
    return generation


# Limits: CUDA C++ Programming Guide 13.0, table 27, "Technical Specifications per Compute
# Capability". Formats of mma.sync: PTX ISA 9.0, section 9.7.14.
_AMPERE = WarpMatmul(("f16", "bf16", "tf32", "s8", "u8"))
_ADA = WarpMatmul((*_AMPERE.formats, "e4m3", "e5m2"), short_sums=("e4m3", "e5m2"),
                  longest_sum=128)
_FP8 = ("fp8_e4m3", "fp8_e5m2")

register(Generation(
    "sm_75", "Turing", 16, 32, 64 * _KIB, 64 * _KIB, WarpMatmul(("f16",), step_bytes=16),
    async_copies=False, ring_stages=2, shared_unit=256, reserved_bytes=0))
_SM80 = register(Generation("sm_80", "Ampere", 32, 64, 164 * _KIB, 163 * _KIB, _AMPERE))
_SM86 = register(replace(_SM80, target="sm_86", groups=16, warps=48, shared_bytes=100 * _KIB,
                         group_shared_bytes=99 * _KIB))
register(replace(_SM86, target="sm_87", shared_bytes=164 * _KIB, group_shared_bytes=163 * _KIB))
_SM89 = register(replace(_SM86, target="sm_89", name="Ada", groups=24, warp_matmul=_ADA,
                         converts=_FP8))
_SM90 = register(replace(_SM80, target="sm_90", name="Hopper", shared_bytes=228 * _KIB,
                         group_shared_bytes=227 * _KIB, warp_matmul=_ADA, converts=_FP8,
                         dependent_launches=True, bf16_pairs=True, vector_sums=True,
                         cluster_groups=8, most_cluster_groups=16))
register(replace(_SM90, target="sm_90a", warpgroup_matmul=WarpgroupMatmul(
    operands={
        "bf16": MatmulOperand("bf16", any_major=True, packs=True),
        "f16": MatmulOperand("f16", any_major=True, packs=True),
        "tf32": MatmulOperand("tf32", by_columns=True),
        # About 14 bits below the largest summand (DeepSeek-AI 2024, arXiv:2412.19437, 3.3.2).
        "fp8_e4m3": MatmulOperand("e4m3", short_sums=True),
        "fp8_e5m2": MatmulOperand("e5m2", short_sums=True),
        "int8": MatmulOperand("s8"), "uint8": MatmulOperand("u8")},
    # PTX ISA 9.0, section 9.7.15 wgmma.
    rows=64, most_columns=256, column_step=8, step_bytes=32,
    # 65536 in all, in steps of 8 (PTX ISA 9.7.19 setmaxnreg). One consumer has 255 without asking.
    registers={1: None, 2: (40, 232), 3: (32, 160)},
    most_registers={1: (255, 255), 2: (24, 240), 3: (32, 160)},
    copies=TensorCopies(),
    defaults=PipelineDefaults(
        stages=(4, 2), ring_bytes=192 << 10, other_registers=(32, 28),
        # Three sixteenths where tiles are of different length: 1 % more of causal attention (H200,
        # 2026-11-21, benchmarks/kernels.py attention).
        pinned_sixteenths=(4, 3),
        shared_l2_bytes=24 << 20,  # half of an H200's cache
        # A number that does not divide the heads leaves a short last strip, whose long tiles all
        # end late: 4 and 8 gave causal attention 5 % over the strips of 12, 6 and 3 heads that
        # fill L2, at 4096, 8192 and 16384 keys (H200, 2026-11-21, benchmarks/kernels.py
        # attention). Without a mask the strips that fill L2 cost 19, 15 and 1 % at 512, 1024 and
        # 4096 keys (H100, 2026-11-25).
        strip=4, strip_rows=2048))))
# Tensor cores of Blackwell are used by mma.sync so far (docs/internals/adding.md, "A generation").
_SM100 = register(replace(_SM90, target="sm_100", name="Blackwell"))
register(replace(_SM100, target="sm_100a"))
_SM120 = register(replace(_SM90, target="sm_120", name="Blackwell", groups=24, warps=48,
                          shared_bytes=100 * _KIB, group_shared_bytes=99 * _KIB,
                          most_cluster_groups=8))
register(replace(_SM120, target="sm_120a"))

__all__ = ["GENERATIONS", "Generation", "MatmulOperand", "PipelineDefaults", "TensorCopies",
           "WarpMatmul", "WarpgroupMatmul", "register"]
