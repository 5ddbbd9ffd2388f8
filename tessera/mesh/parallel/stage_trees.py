"""Trees by stage of a pipeline: what belongs to the whole model is known from them.

The gradients that a rank gets are those of its own stages. A norm of them, or whether they are
finite, is asked of the whole model: the ranks of the pipeline's axis put together what they have,
and a parameter that stages share counts once.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from tessera import hooks
from tessera.errors import ArgumentError, warn_user
from tessera.graph import tree
from tessera.graph.operand import convert
from tessera.numerics import as_type
from tessera.tensor import Tensor

from ..collectives.functions import all_reduce
from ..collectives.record import traces_whole_tensors
from ..ranks.transport import Transport
from ..tensor import DistTensor, moved_to_mesh
from ..world import transport
from .stage_ranks import PipelineRanks
from .tied_parameters import Tie

F64 = as_type("f64")


class StageTrees(list):
    """One tree per stage of a pipeline, None for stages of other ranks: a list that knows which
    ranks have the others, and which parameters stages share. `ts.map_tree` keeps it."""

    def __init__(self, trees: Iterable[Any], place: PipelineRanks, ties: tuple[Tie, ...] = ()):
        super().__init__(trees)
        self.place, self.ties = place, ties

    def __reduce__(self) -> Any:
        return list, (list(self),)  # elsewhere there are no such ranks

    def __copy__(self) -> StageTrees:
        return StageTrees(self, self.place, self.ties)

    def __deepcopy__(self, memo: dict) -> StageTrees:
        return StageTrees(copy.deepcopy(list(self), memo), self.place, self.ties)

    def counted(self) -> list[Any]:
        """The trees with what counts here: of a shared parameter, the first stage's alone."""
        later = {member for tie in self.ties for member in tie[1:]}
        made = []
        for stage, own in enumerate(self):
            leaves, structure = tree.flatten(own)
            made.append([x for path, x in zip(tree.paths(structure), leaves, strict=True)
                         if (stage, path) not in later])
        return made


tree.register_tree(StageTrees, lambda x: (list(x), (x.place, x.ties)),
                   lambda data, parts: StageTrees(parts, *data))


def over_stages(trees: Any, each: Callable[[list[Any]], Tensor],
                join: Callable[[Tensor, Tensor], Tensor], op: str) -> Tensor:
    """each(leaves) of a tree. Of StageTrees that of each stage, joined by `join` and over the ranks
    of the pipeline by the reduction `op`, in f64; each([]) stands for a rank without leaves.
    """
    if not isinstance(trees, StageTrees):
        return each(tree.flatten(trees)[0])
    found = [each(leaves) for own, leaves in zip(trees, trees.counted(), strict=True)
             if own is not None]
    place = trees.place
    mine, *more = map(_local_tensor, found or [each([])])  # those of a stage's ranks have the same
    for x in more:
        mine = join(mine, x)
    if place.me is None:
        return mine
    if traces_whole_tensors():
        raise ArgumentError(
            "what all stages of a pipeline know together, in a compiled function of distributed "
            "tensors: its graph runs on the ranks of one stage", hint="ask outside of it: norm = "
            "ts.optim.global_norm(grads), for the function to take as norm=norm")
    wide = moved_to_mesh(convert(mine, F64), place.mesh)
    return convert(all_reduce(wide, place.axis, op=op, mesh=place.mesh), mine.type)


def _local_tensor(x: Tensor) -> Tensor:
    return x.local if isinstance(x, DistTensor) else x


# --- what is one stage's alone --------------------------------------------------------------------
class StageGradientsWarning(UserWarning):
    """Something of a whole model is asked of tensors that lie as the gradients of one stage."""


Extents = tuple[tuple[int, ...], ...]
_alone: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
_extents: weakref.WeakKeyDictionary[Transport, set[Extents]] = weakref.WeakKeyDictionary()


def mark_stages(trees: StageTrees) -> None:
    """Remember these leaves as parts of a model, of several stages, and the extents that those of
    a stage have: what is computed of them is known by that alone."""
    if len(trees) < 2:
        return
    for x in tree.flatten(trees)[0]:
        _alone[id(x)] = x
    known = _extents.setdefault(transport(), set())
    known.update(map(_extents_of, trees))
    if trees.place.me is None:  # all stages are here
        known.discard(_extents_of(trees))


def _extents_of(trees: Any) -> Extents:
    return tuple(sorted(tuple(x.shape) for x in tree.flatten(trees)[0] if isinstance(x, Tensor)))


def _inherit(leaf: Tensor, tracer: Tensor) -> None:
    if _alone.get(id(leaf)) is leaf:
        _alone[id(tracer)] = tracer


hooks.traced_arguments.append(_inherit)


def need_whole(trees: Any, asked: str, hint: str) -> None:
    """Raise ArgumentError for gradients of one stage alone, of which `asked` is not known. Warn of
    what may have been computed of such."""
    if isinstance(trees, StageTrees):
        return
    if any(isinstance(x, Tensor) and _alone.get(id(x)) is x for x in tree.flatten(trees)[0]):
        raise ArgumentError(f"{asked} is that of the whole model, and these are gradients of one "
                            "stage of a pipeline", hint=hint)
    found = _extents_of(trees)
    if found and found in _extents.get(transport(), ()):
        warn_user(f"{asked} is that of these tensors alone, whose extents are those of the "
                  f"gradients of one stage of a pipeline. Where they come from those: {hint}, and "
                  "scale that list by ts.map_tree, which keeps what it knows of the other stages",
                  StageGradientsWarning)
