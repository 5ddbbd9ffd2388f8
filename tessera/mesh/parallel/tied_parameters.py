"""Parameters that several stages of a pipeline share: each gets the sum of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, ShapeError, did_you_mean
from tessera.graph import tree
from tessera.tensor import Tensor

from ..ranks.envelope import here_in
from ..world import transport
from .batches import arrays_of, with_arrays
from .stage_ranks import PipelineRanks

Member = tuple[int, str]  # stage, name of the parameter in its tree
Tie = tuple[Member, ...]


def parse_ties(tied: Sequence[Sequence[str]], stages: int) -> tuple[Tie, ...]:
    """`[("0.embed", "3.embed")]` as stages and names. Raises ArgumentError."""
    return tuple(tuple(_member(name, stages) for name in names) for names in tied)


def _member(name: str, stages: int) -> Member:
    stage, _, path = str(name).partition(".")
    if isinstance(name, str) and stage.isdecimal() and int(stage) < stages:
        return int(stage), path
    raise ArgumentError(f"tied={name!r} names no parameter of {stages} stages",
                        hint='groups of names that begin with the stage: [("0.embed", "3.embed")]')


def find_untied(params: Sequence[Any], ties: Sequence[Tie]) -> None:
    """Raise ArgumentError when two stages have the same tensor and `tied` does not say so: each
    would get the gradient of its own use only, and the two would drift apart."""
    seen: dict[int, Member] = {}
    for stage, own in enumerate(params):
        flat, structure = tree.flatten(own)
        for path, leaf in zip(tree.paths(structure), flat, strict=True):
            here = stage, path
            first = seen.setdefault(id(leaf), here)
            if first[0] == stage or not isinstance(leaf, Tensor) or any(
                    first in tie and here in tie for tie in ties):
                continue
            names = f'("{_name(first)}", "{_name(here)}")'
            raise ArgumentError(
                f"stages {first[0]} and {stage} have the same tensor as a parameter",
                hint=f"tied=[{names}] gives both the sum of their gradients; a copy makes them two")


def _name(member: Member) -> str:
    return ".".join(filter(None, (str(member[0]), member[1])))


def sum_tied(ties: Sequence[Tie], grads: list[Any], place: PipelineRanks) -> None:
    """Replace the gradients of tied parameters by their sum, in the order of the stages: the same
    bits everywhere. Ranks that share a parameter exchange what they have of it."""
    for tie in ties:
        ranks = [0 if place.me is None else place.world_rank(stage) for stage, _ in tie]
        me = 0 if place.me is None else transport().rank
        if me not in ranks:
            continue
        mine = {k: _find(grads, m) for k, m in enumerate(tie) if ranks[k] == me}
        terms = _exchange({k: _flat(t) for k, t in mine.items()}, ranks, me, _name(tie[0]))
        if len({t.size for t in terms}) != 1:
            sizes = ", ".join(f"{_name(m)}: {t.size}" for m, t in zip(tie, terms, strict=True))
            raise ShapeError(f"tied parameters have different sizes here: {sizes}")
        total = np.sum(terms, axis=0, dtype=terms[0].dtype)
        for k in mine:
            _replace(grads, tie[k], _unflat(mine[k], total))


def _exchange(mine: dict[int, np.ndarray], ranks: Sequence[int], me: int, name: str
              ) -> list[np.ndarray]:
    """Every member's gradient, from those of this rank."""
    first = next(iter(mine.values()))
    terms = [mine.get(k, np.empty_like(first)) for k in range(len(ranks))]
    for k, owner in enumerate(ranks):
        others = sorted(set(ranks) - {owner})
        label = here_in(f"the gradient of tied {name}", first.dtype.str, first.size)
        if owner == me and others:
            data = np.ascontiguousarray(terms[k]).view(np.uint8)
            transport().exchange(dict.fromkeys(others, data), {}, label)
        elif owner != me:
            transport().exchange({}, {owner: terms[k].view(np.uint8)}, label)
    return terms


def _flat(t: Tensor) -> np.ndarray:
    return np.concatenate([a.reshape(-1) for a in arrays_of(t)])


def _unflat(like: Tensor, flat: np.ndarray) -> Tensor:
    arrays, at = [], 0
    for a in arrays_of(like):
        arrays.append(flat[at:at + a.size].reshape(a.shape))
        at += a.size
    return with_arrays(like, arrays)


def _find(grads: Sequence[Any], member: Member) -> Tensor:
    stage, path = member
    flat, structure = tree.flatten(grads[stage])
    names = tree.paths(structure)
    if path not in names:
        raise ArgumentError(f"stage {stage} has no parameter {path!r} with a gradient",
                            hint=did_you_mean(path, names))
    return flat[names.index(path)]


def _replace(grads: list[Any], member: Member, new: Tensor) -> None:
    stage, path = member
    flat, structure = tree.flatten(grads[stage])
    flat[tree.paths(structure).index(path)] = new
    grads[stage] = tree.unflatten(structure, flat)
