"""Which rank this process is, as its launcher or a simulation says: known before ranks meet."""

from __future__ import annotations

from contextvars import ContextVar

from tessera.launched import launched_rank, launched_size, launcher

from .transport import Transport

simulated_rank: ContextVar[Transport | None] = ContextVar("simulated rank", default=None)


def rank_of_program() -> int:
    """This rank's number, without meeting the others for it."""
    here = simulated_rank.get()
    return launched_rank() if here is None else here.rank


__all__ = ["launched_rank", "launched_size", "launcher", "rank_of_program", "simulated_rank"]
