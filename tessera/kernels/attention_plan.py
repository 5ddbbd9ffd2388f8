"""The block of queries and keys that attention takes: the model's, or what was measured instead."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import ArgumentError
from ..lazy_dataclass import dataclass
from ..numerics import DType
from .tuned_tables import TunedTables

# Keys by rows: what was tried.
TRIED = {64: range(64, 161, 32), 128: range(64, 177, 16), 192: range(64, 129, 16)}
# Registers of a thread that hold scores, weights and sums: of two warpgroups, and of three.
ROOM = {64: 200, 128: 200, 192: 130}


@dataclass(frozen=True)
class AttentionBlock:
    """rows: queries.  why: in words."""

    rows: int
    keys: int
    why: str = "what registers and shared memory hold of such heads"

    @property
    def choice(self) -> str:
        """As tables spell it."""
        return f"{self.rows}x{self.keys}"

    @property
    def note(self) -> str:
        return f"blocks of {self.rows} queries and {self.keys} keys: {self.why}"


def attention_text(dtype: DType, heads: int, S: int, D: int, causal: bool) -> str:
    """As tables of tuned choices name attention of as many keys as queries."""
    return f"{dtype.name} {'causal' if causal else 'full'} {heads}x{S}x{D}"


def tuned_attention(model: AttentionBlock, problem: str, tables: TunedTables | None
                    ) -> AttentionBlock:
    """What was measured to be quicker than the model's block, else that."""
    found = None if tables is None else tables.find("flash_attention_2", problem, model.choice)
    if found is None:
        return model
    rows, times, keys = found.choice.partition("x")
    if not (rows.isdigit() and times and keys.isdigit()):
        raise ArgumentError(f"{found.choice!r} is no block of attention", hint="such as '128x128'")
    return AttentionBlock(int(rows), int(keys), found.why)


def blocks_to_measure(model: AttentionBlock, D: int, shared_bytes: int) -> list[AttentionBlock]:
    """The model's block, and others that fit: scores, weights of 16 bits and sums in registers;
    queries, and two stages of keys and values, in shared memory."""
    return [model, *(b for b in _fitting(D, shared_bytes) if b != model)]


def _fitting(D: int, shared_bytes: int) -> Iterator[AttentionBlock]:
    for rows, several in TRIED.items():
        for keys in several:
            registers, stored = D // 2 + 3 * keys // 4, 2 * D * (rows + 4 * keys)
            if registers <= ROOM[rows] and stored <= shared_bytes:
                yield AttentionBlock(rows, keys)


__all__ = ["AttentionBlock", "attention_text", "blocks_to_measure", "tuned_attention"]
