"""The GPU that launches are planned for: how many multiprocessors share the work, what they
multiply, what was measured on it.

    card_of(x)                  of the GPU on which an array lies
    card_for(unit)              where a graph is compiled: this machine's GPU, or one like it
    multiprocessors_of(chip)    of the card that a graph is compiled for

Grids and parts of sums that are so many for each multiprocessor ask here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from ..launched import launched_size
from ..lazy_dataclass import dataclass
from ..runtime.arrays import HOST, place_of
from ..runtime.clusters import clusters_at_once
from ..runtime.device import device, device_count, has_gpu
from ..runtime.generations import Generation, WarpgroupMatmul
from ..runtime.target import Target, parse_target
from ..tile.tuning.gpus import DEFAULT, GPUS, Gpu, gpu, gpu_of
from .routine_arrays import RoutineArray
from .tuned_tables import TunedTables, tables_of


@dataclass(frozen=True)
class Card:
    """What products ask of a GPU.

    formats: of operands that its warpgroups multiply; along_k: those of them that may lie along K
    alone; by_columns: those of which a first operand may lie otherwise.  copies: whether operands
    lie in its memory, so that they may be copied where TMA cannot read their rows, or wgmma their
    order.  tuned: what was measured on such a card.  clusters: pairs of a cluster's groups and how
    many run at one time, where that is known.
    """

    multiprocessors: int = DEFAULT.multiprocessors
    memory_gbps: float = DEFAULT.memory_gbps
    formats: frozenset[str] = frozenset()
    along_k: frozenset[str] = frozenset()
    by_columns: frozenset[str] = frozenset()
    copies: bool = False
    tuned: TunedTables | None = None
    clusters: tuple[tuple[int, int], ...] = ()


PLAIN_CARD = Card()  # the one that is tuned for, of which no format is known


# --- of arrays ------------------------------------------------------------------------------------
def card_of(x: Any) -> Card:
    """Of the GPU on which an array lies; for others, the one that is tuned for."""
    where = x.place if isinstance(x, RoutineArray) else place_of(x)
    return usual_card() if where is None or where == HOST else card_at(where)


@functools.cache
def usual_card() -> Card:
    """Of the GPUs that are tuned for."""
    return _card_of(DEFAULT, False)


def card_at(index: int) -> Card:
    """Of a GPU of this machine, with the tables that there are of it."""
    on = device(index)
    return _card(index, tables_of(on.name, on.multiprocessors))


@functools.cache
def _card(index: int, tuned: TunedTables | None) -> Card:
    return replace(_card_of(gpu_of(device(index)), True), tuned=tuned)


def _card_of(gpu: Gpu, copies: bool) -> Card:
    unit = gpu.generation.warpgroup_matmul
    formats = {} if unit is None else unit.operands
    return Card(gpu.multiprocessors, gpu.memory_gbps, frozenset(formats), frozenset(
        n for n, operand in formats.items() if not operand.any_major), frozenset(
        n for n, operand in formats.items() if operand.by_columns), copies)


# --- of graphs ------------------------------------------------------------------------------------
_planned: ContextVar[Card | None] = ContextVar("planned", default=None)


@contextmanager
def planning_for(card: Card) -> Iterator[None]:
    """Graphs are compiled for this card meanwhile, whichever GPU is here."""
    before = _planned.set(card)
    try:
        yield
    finally:
        _planned.reset(before)


def known_cards(target: Target) -> list[Card]:
    """Of GPUs of a target: those whose figures are known, with the tables that there are of them,
    and those of this machine. Products may be planned otherwise for each."""
    known = [g for g in GPUS.values() if g.target == str(target)] or [gpu(str(target))]
    cards = [replace(_card_of(g, True), tuned=tables_of(f"NVIDIA {g.name}", g.multiprocessors))
             for g in known]
    count = device_count() if has_gpu() else 0
    return list(dict.fromkeys([*cards, *(card_at(i) for i in range(count)
                                         if device(i).target == target)]))


def card_for(unit: WarpgroupMatmul | None) -> Card:
    """Of this machine's GPU where it multiplies so, else of those that are tuned for."""
    if (planned := _planned.get()) is not None:
        return planned
    return card_at(0) if _is_mine(unit) else usual_card()


def multiprocessors_of(chip: Generation) -> int:
    """Of the card that is planned for, of this machine's GPU where it is of that generation, or of
    the GPU that stands for it."""
    if (planned := _planned.get()) is not None:
        return planned.multiprocessors
    if has_gpu() and device().target.cc == parse_target(chip.target).cc:
        return device().multiprocessors
    return gpu(chip.target).multiprocessors


def clusters_for(unit: WarpgroupMatmul | None, groups: int) -> int | None:
    """Clusters of so many groups, with a multiprocessor each, that run at one time on the card;
    None where it is not asked: chips differ. Ranks, whose cards may too, are to have the same sums
    in the same order, so they do not ask."""
    if (planned := _planned.get()) is not None:
        return dict(planned.clusters).get(groups)
    if launched_size() > 1 or not _is_mine(unit):
        return None
    return clusters_at_once(device(), groups)


def _is_mine(unit: WarpgroupMatmul | None) -> bool:
    return has_gpu() and device().target.generation.warpgroup_matmul is unit


__all__ = ["PLAIN_CARD", "Card", "card_at", "card_for", "card_of", "clusters_for", "known_cards",
           "multiprocessors_of", "planning_for", "usual_card"]
