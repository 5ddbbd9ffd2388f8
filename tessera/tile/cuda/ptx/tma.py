"""TMA: bulk copies between global and shared memory, of tiles by descriptor or of plain ranges.

Coordinates are in elements, innermost first. Loads complete on an mbarrier, which must expect their
bytes; what lies outside the tensor reads as zero. Stores complete in groups of the issuing thread,
and what lies outside is not written. Shared addresses are aligned to 128 bytes (1024 for the
128-byte swizzle). One thread issues.
"""

from __future__ import annotations

from ..instruction import Instruction, family, one_of

RANKS = (1, 2, 3, 4, 5)


def _coordinates(rank: int) -> tuple[str, str]:
    """Operands and text of the coordinates: ("c0:i32, c1:i32", "$c0, $c1")."""
    one_of("rank", rank, RANKS)
    return ", ".join(f"c{i}:i32" for i in range(rank)), ", ".join(f"$c{i}" for i in range(rank))


@family(*({"rank": r} for r in RANKS), {"rank": 2, "hint": True}, {"rank": 3, "hint": True},
        {"rank": 2, "multicast": True}, {"rank": 3, "multicast": True},
        {"rank": 3, "multicast": True, "hint": True})
def load(rank: int, *, multicast: bool = False, hint: bool = False) -> Instruction:
    """(shared address, descriptor, coordinates..., barrier [, block mask] [, L2 policy]).

    multicast: the tile lands at the same offset in every block whose bit of the 16-bit mask is set,
    and each one's barrier at that offset counts the bytes. Only architecture-specific targets have
    it at full speed, as ptxas says.
    """
    operands, text = _coordinates(rank)
    mask = ".multicast::cluster" * multicast + ".L2::cache_hint" * hint
    opcode = (f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"
              f"{mask}")
    more = ", blocks" * multicast + ", $policy" * hint
    setup = ".reg .b16 blocks;\ncvt.u16.u32 blocks, $mask;\n" * multicast
    return Instruction(
        f"tma_load_{rank}d{'_multicast' * multicast}{'_hint' * hint}",
        f"to:i32, map:i64, {operands}, barrier:i32" + ", mask:i32" * multicast
        + ", policy:i64" * hint,
        f"{setup}{opcode} [$to], [$map, {{{text}}}], [$barrier]{more};",
        isa="9.7.9 cp.async.bulk.tensor", cc="90a" if multicast else "90")


@family({})
def load_windows() -> Instruction:
    """(shared address, descriptor, channel, w, h, image, barrier, offsets w and h): the rows of
    unfolded images from the window that begins at (w, h) on, at one pixel of each window."""
    return Instruction(
        "tma_load_windows",
        "to:i32, map:i64, c:i32, w:i32, h:i32, n:i32, barrier:i32, dw:i32, dh:i32",
        ".reg .b16 right, down;\ncvt.u16.u32 right, $dw;\ncvt.u16.u32 down, $dh;\n"
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        "[$to], [$map, {$c, $w, $h, $n}], [$barrier], {right, down};",
        isa="9.7.9 cp.async.bulk.tensor", cc="90")


@family(*({"rank": r} for r in RANKS), {"rank": 2, "hint": True})
def store(rank: int, *, hint: bool = False) -> Instruction:
    """(descriptor, coordinates..., shared address [, L2 policy]); then commit."""
    operands, text = _coordinates(rank)
    return Instruction(
        f"tma_store_{rank}d{'_hint' * hint}",
        f"map:i64, {operands}, at:i32" + ", policy:i64" * hint,
        f"cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group{'.L2::cache_hint' * hint} "
        f"[$map, {{{text}}}], [$at]{', $policy' * hint};",
        isa="9.7.9 cp.async.bulk.tensor", cc="90")


@family(*({"rank": r} for r in (1, 2, 3)), {"rank": 2, "op": "max"})
def reduce(rank: int, op: str = "add") -> Instruction:
    """As store, combined with what is there, element by element and atomically."""
    operands, text = _coordinates(rank)
    one_of("op", op, ("add", "min", "max", "inc", "dec", "and", "or", "xor"))
    return Instruction(
        f"tma_reduce_{op}_{rank}d", f"map:i64, {operands}, at:i32",
        f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{op}.tile.bulk_group "
        f"[$map, {{{text}}}], [$at];", isa="9.7.9 cp.reduce.async.bulk.tensor", cc="90")


@family(*({"rank": r} for r in (1, 2, 3)))
def prefetch(rank: int) -> Instruction:
    """Bring a tile into L2: (descriptor, coordinates...)."""
    operands, text = _coordinates(rank)
    return Instruction(
        f"tma_prefetch_{rank}d", f"map:i64, {operands}",
        f"cp.async.bulk.prefetch.tensor.{rank}d.L2.global [$map, {{{text}}}];",
        isa="9.7.9 cp.async.bulk.prefetch.tensor", cc="90")


@family({}, {"hint": True})
def bulk_load(*, hint: bool = False) -> Instruction:
    """(shared address, global address, bytes, barrier [, L2 policy]): 16-byte units, contiguous."""
    return Instruction(
        f"bulk_load{'_hint' * hint}",
        "to:i32, at:i64, bytes:i32, barrier:i32" + ", policy:i64" * hint,
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        f"{'.L2::cache_hint' * hint} [$to], [$at], $bytes, [$barrier]{', $policy' * hint};",
        isa="9.7.9 cp.async.bulk", cc="90")


Instruction("bulk_prefetch", "at:i64, bytes:i32", "cp.async.bulk.prefetch.L2.global [$at], $bytes;",
            isa="9.7.9 cp.async.bulk.prefetch", cc="90")
Instruction("bulk_store", "to:i64, at:i32, bytes:i32",
            "cp.async.bulk.global.shared::cta.bulk_group [$to], [$at], $bytes;",
            isa="9.7.9 cp.async.bulk", cc="90")
Instruction("bulk_send", "to:i32, at:i32, bytes:i32, barrier:i32",
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
            "[$to], [$at], $bytes, [$barrier];", isa="9.7.9 cp.async.bulk", cc="90")
Instruction("bulk_send_if", "to:i32, at:i32, bytes:i32, barrier:i32, p:pred",
            "@$p cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
            "[$to], [$at], $bytes, [$barrier];", isa="9.7.9 cp.async.bulk", cc="90")
Instruction("bulk_commit", "", "cp.async.bulk.commit_group;",
            isa="9.7.9 cp.async.bulk.commit_group", cc="90")
Instruction("prefetch_map", "map:i64", "prefetch.tensormap [$map];", isa="9.7.9 prefetch", cc="90")


@family({"pending": 0}, {"pending": 0, "read": True}, {"pending": 1, "read": True})
def bulk_wait(pending: int, *, read: bool = False) -> Instruction:
    """Until at most `pending` groups are in flight. read: their shared memory may be reused."""
    return Instruction(f"bulk_wait{'_read' * read}_{pending}", "",
                       f"cp.async.bulk.wait_group{'.read' * read} {pending};",
                       isa="9.7.9 cp.async.bulk.wait_group", cc="90")
