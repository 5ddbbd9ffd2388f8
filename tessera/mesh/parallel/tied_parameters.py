"""Parameters that several stages of a pipeline share: each gets the sum of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.errors import ArgumentError, ShapeError, did_you_mean
from tessera.graph import tree
from tessera.graph.jit import JitFunction
from tessera.runtime.buffer import DEFAULT
from tessera.runtime.device import device
from tessera.tensor import Tensor
from tessera.tile.launch.resident import Resident, on_gpu

from ..ranks.envelope import here_in
from ..ranks.group import Group, make_group
from ..ranks.ledger import agree, call
from ..world import transport
from .batches import parts_of, trained_places, with_parts
from .stage_ranks import PipelineRanks

if TYPE_CHECKING:
    from ..ranks.communicator import Communicator

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


def sum_tied(ties: Sequence[Tie], grads: list[Any], params: Sequence[Any], place: PipelineRanks,
             sums: JitFunction) -> None:
    """Replace the gradients of tied parameters by their sum, in the order of the stages: the same
    bits everywhere. Ranks that share a parameter exchange what they have of it, by NCCL where
    their GPUs can. One that is not trained has none."""
    by = _way_of_gpus(place) if ties else None
    for tie in ties:
        ranks = [0 if place.me is None else place.world_rank(stage) for stage, _ in tie]
        me = 0 if place.me is None else transport().rank
        if me not in ranks or not any(_is_trained(params, m) for k, m in enumerate(tie)
                                      if ranks[k] == me):
            continue
        mine = {k: _find(grads, m) for k, m in enumerate(tie) if ranks[k] == me}
        if by is not None:
            made = dict.fromkeys(mine, _sum_on_gpu(by, mine, ranks, tie, sums))
        else:
            terms = _exchange({k: _flat(t) for k, t in mine.items()}, ranks, me, _name(tie[0]))
            _need_one_size(tie, [t.size for t in terms])
            total = np.sum(terms, axis=0, dtype=terms[0].dtype)
            made = {k: _unflat(t, total) for k, t in mine.items()}
        for k, grad in made.items():
            _replace(grads, tie[k], grad)


def _need_one_size(tie: Tie, sizes: Sequence[int]) -> None:
    if len(set(sizes)) != 1:
        shown = ", ".join(f"{_name(m)}: {n}" for m, n in zip(tie, sizes, strict=True))
        raise ShapeError(f"tied parameters have different sizes here: {shown}")


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
    return np.concatenate([p.array.reshape(-1) for p in parts_of(t)])


def _unflat(like: Tensor, flat: np.ndarray) -> Tensor:
    parts, at = [], 0
    for p in parts_of(like):
        made = Tensor(flat[at:at + p.size].reshape(p.shape), p.type)
        parts.append(on_gpu(made, p.place) if isinstance(p, Resident) else made)
        at += p.size
    return with_parts(like, parts)


# --- on GPUs -------------------------------------------------------------------------------------
def _way_of_gpus(place: PipelineRanks) -> Communicator | None:
    """The communicator of the ranks of a pipeline, where it has one."""
    if place.me is None or place.gpu is None:
        return None
    from ..ranks.communicator import communicator

    return communicator(make_group(place.mesh, (place.axis,)), place.gpu)


def _sum_on_gpu(by: Communicator, mine: dict[int, Tensor], ranks: Sequence[int], tie: Tie,
                sums: JitFunction) -> Tensor:
    """The sum of all members' gradients; those of other ranks come by NCCL, one after another."""
    like = next(iter(mine.values()))
    parts = parts_of(like)
    _need_one_size(tie, [t.size for t in mine.values()])
    _agree_once(by, tuple(sorted(set(ranks))), _name(tie[0]), like)
    me, terms = by.group.transport.rank, list[list[Resident]]()
    for k, owner in enumerate(ranks):
        if owner == me:
            terms.append([on_gpu(p, by.index) for p in parts_of(mine[k])])
        else:
            terms.append([Resident(p.shape, p.type, by.index) for p in parts])
        with device(by.index).current():
            for p in terms[-1]:
                place = p.memory.pointer, p.memory.nbytes
                if p.size and owner == me:
                    by.swap({by.group.ranks.index(r): place for r in set(ranks) - {me}}, {},
                            DEFAULT)
                elif p.size:
                    by.swap({}, {by.group.ranks.index(owner): place}, DEFAULT)
    return with_parts(like, sums(terms))


_agreed: set[Any] = set()


def _agree_once(by: Communicator, ranks: tuple[int, ...], name: str, like: Tensor) -> None:
    """What NCCL carries has no header, so the ranks of a tie compare what they have, once."""
    here = by.group.transport
    key = here, ranks, name, like.shape, like.type, tuple(p.shape for p in parts_of(like))
    if key not in _agreed and len(ranks) > 1:
        group = Group(here, ranks, by.group.axis)
        agree(group, call(group, f"the gradient of tied {name}", parts_of(like)[0].shape,
                          like.type, {}))
        _agreed.add(key)


def _is_trained(params: Sequence[Any], member: Member) -> bool:
    """Whether a parameter has a gradient; of a name that the stage does not have, too, so that it
    is asked for."""
    stage, path = member
    leaves, structure = tree.flatten(params[stage])
    names = tree.paths(structure)
    return path not in names or names.index(path) in trained_places(leaves)


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
