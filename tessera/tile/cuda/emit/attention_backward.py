"""Emission of attention's gradient (kernels/attention_fused_backward.py) by pairs of blocks.

The two blocks of a cluster have 128 keys of a group each. Of a warp-specialised block, consumer
warpgroups have 64 keys each. They make transposed scores, whose weights and cotangents are first
operands from registers for dV and dK; cotangents go to shared memory too, and to that of the other
block, so that each makes half of the columns of dQ, of all 256 keys: so half as much is added to
memory, which is what sums in memory cost. Warpgroups take turns at that.
Of the producer's warps one brings tiles, one reads ahead whose turn it is, and one tells the next
group, so that consumers wait neither for memory nor for what they add to arrive there.
The first block takes the group's number and sends it to both.

What is here is one kernel written out, since the passes of the warp-specialised form make no such
exchange and no matmul of two computed operands. It computes what the kernel's Tile IR says; sums of
f32 are in another order.
"""

from __future__ import annotations

from typing import Any

from tessera.lazy_dataclass import dataclass
from tessera.runtime.generations import Generation
from tessera.runtime.target import Target
from tessera.tile.cuda.emit.attention_backward_source import source
from tessera.tile.cuda.emit.emitter import ArgumentFacts, Emitted, Parameter
from tessera.tile.cuda.intrinsics.shared_memory import descriptor_bits
from tessera.tile.ir.ir import Function
from tessera.tile.ir.modes import FUSED_BACKWARD
from tessera.tile.ir.types import GlobalTensor

NAME = "attention_fused_backward"  # in the source
QUERIES, KEYS, WIDTH = 64, 128, 128  # of a block of queries, of a block of the launch, of a head
Q_STAGES, G_STAGES = 3, 2
Q_PANEL, K_PANEL = 128 * QUERIES, 128 * KEYS  # bytes of 64 columns
TILE, ROW = 2 * Q_PANEL, 4 * QUERIES
THREADS = 384
TILES = ("Q", "K", "V", "G")
ROWS = ("lse", "delta", "sums", "turns", "dQ", "dK", "dV")


@dataclass(frozen=True)
class SharedMemoryLayout:
    """Where tiles and barriers lie in shared memory, and the bytes of all."""

    places: dict[str, int]
    bytes: int

    @classmethod
    def made(cls) -> SharedMemoryLayout:
        sizes = {"K_AT": 2 * K_PANEL, "V_AT": 2 * K_PANEL, "FAR_AT": K_PANEL,
                 "Q_AT": Q_STAGES * TILE, "G_AT": G_STAGES * TILE, "S_AT": 2 * K_PANEL,
                 "S_FAR_AT": 2 * K_PANEL, "LSE_AT": Q_STAGES * ROW, "DELTA_AT": G_STAGES * ROW}
        barriers = {"K_FULL": 1, "V_FULL": 1, "Q_FULL": Q_STAGES, "Q_EMPTY": Q_STAGES,
                    "G_FULL": G_STAGES, "G_EMPTY": G_STAGES, "S_FULL": 2, "S_EMPTY": 2, "TURN": 2,
                    "ADDED": 2, "TOLD": 2, "NUMBER_FULL": 1, "NUMBER_AT": 1}
        places, at = {}, 0
        for name, size in (*sizes.items(), *((n, 8 * count) for n, count in barriers.items())):
            places[name] = at
            at += size
        return cls(places, at)


def emit_backward(function: Function, target: Target, facts: ArgumentFacts) -> Emitted | None:
    """The source of the library's kernel where it is that one, which its modes say, and fits; else
    None."""
    known: dict[str, Any] = dict(function.constants)
    if FUSED_BACKWARD not in function.modes or not _fits(function, known, target, facts):
        return None
    memory, dtype = SharedMemoryLayout.made(), _types(function)["Q"]
    if memory.bytes > target.generation.group_shared_bytes:
        return None
    parameters = (
        *(Parameter("map", name, "i64", box=(1, QUERIES if name in "QG" else KEYS, 64))
          for name in TILES),
        *(Parameter("tensor", name, "i64") for name in ROWS), Parameter("scalar", "scale", "f32"))
    text = source(_constants(known, dtype) | memory.places)
    note = (f"by pairs of blocks of {KEYS} keys that exchange dS, sums of dQ in turn, "
            f"{known['heads']} heads side by side")
    return Emitted(NAME, text, parameters, memory.bytes, {}, (note,), matmul_forms=("wgmma",),
                   cluster=2)


def _constants(known: dict[str, Any], dtype: str) -> dict[str, object]:
    def along(panel: int) -> tuple[int, ...]:
        return tuple(i // 4 * (panel >> 4) + i % 4 * 2 for i in range(WIDTH // 16))

    blocks = known["S"] // QUERIES
    return {"DTYPE": dtype, "HEADS": known["heads"], "SLOTS": known["slots"],
            "PAIRS": known["T"] // (2 * KEYS), "BLOCKS": blocks,
            "TICKETS": 8 * known["slots"] * blocks,  # where groups are counted as they begin
            "QUERIES": QUERIES, "KEYS": KEYS, "Q_STAGES": Q_STAGES, "G_STAGES": G_STAGES,
            "Q_PANEL": Q_PANEL, "K_PANEL": K_PANEL, "TILE": TILE, "ROW": ROW,
            "SUMS": 4 * QUERIES * WIDTH, "LOG2E": 1.4426950408889634,
            "COLUMNS_K": along(K_PANEL), "COLUMNS_Q": along(Q_PANEL),
            "ROWS": tuple(128 * i for i in range(KEYS // 16)),
            "ALONG": _signed(descriptor_bits(16, 1024)),
            "ACROSS": _signed(descriptor_bits(Q_PANEL, 1024))}


def _signed(bits: int) -> int:
    return bits - ((bits >> 63) << 64)


def _types(function: Function) -> dict[str, str]:
    return {p.value.name: p.type.dtype.name for p in function.params
            if isinstance(p.type, GlobalTensor)}


def _fits(function: Function, known: dict[str, Any], target: Target, facts: ArgumentFacts) -> bool:
    """Whether the source is written for these parameters, extents, types and places. A graph adds
    parameters for numbers that are data, and axes under vmap."""
    types = _types(function)
    ranks = {p.value.name: len(p.type.dims) for p in function.params
             if isinstance(p.type, GlobalTensor)}
    if not {"S", "T", "D"} <= set(known) or set(types) != {*TILES, *ROWS} or ranks["Q"] != 3:
        return False
    S, T, D, BM, BN = (int(known[x]) for x in ("S", "T", "D", "BM", "BN"))
    whole = not (S % QUERIES or T % (2 * KEYS)) and S >= 2 * QUERIES and T >= 4 * KEYS
    whole = whole and 0 < known["heads"] <= known["slots"]
    return (has_pairs(target.generation) and (BM, BN, D) == (2 * KEYS, QUERIES, WIDTH) and whole
            and len({types[x] for x in (*TILES, "dQ", "dK", "dV")}) == 1
            and types["Q"] in ("bf16", "f16") and set(types) <= facts.aligned
            and not (facts.shared or facts.batched or facts.watched or facts.held))


def has_pairs(chip: Generation) -> bool:
    """Whether a chip has warpgroups that multiply, copies of tiles, and clusters."""
    return chip.warpgroup_matmul is not None


__all__ = ["THREADS", "emit_backward", "has_pairs"]
