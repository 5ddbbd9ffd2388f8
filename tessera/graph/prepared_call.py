"""Calls of a compiled function that are like one before: recognised without taking trees apart
leaf by leaf.

A step of a model has hundreds of tensors in nested dicts. What is asked of each (its class,
extents, type, whether it is a parameter, where it lies) is compared list by list with what it was;
of what a program returned, as the step before did, its origin alone. Leaves that are neither
tensors on a GPU nor distributed are looked at as in any call. What does not match goes the long
way, which raises what there is to raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import config, hooks
from ..tensor import Tensor
from ..tile.launch.resident import Resident, adopted
from .placed_leaves import FEW, OURS, PlacedLeaves, SpreadLeaves, picker
from .signature import Static, leaf_tensors
from .traced_signature import TracedSignature
from .tree import TreeDef
from .tree_code import flattener
from .weak_numbers import number_type

KEPT = 4  # calls of one function that are recognised so


def leaf_key(t: Tensor) -> tuple:
    """What of a tensor belongs to the signature of a call."""
    return tuple(t.shape), t.type, t.layout, number_type(t), t.offloaded


class PreparedCall:
    """A call by position. leaves: the arguments' leaves.  names: their parameters.  statics: those
    that are constants of the trace, by number.  here: of the surroundings."""

    def __init__(self, structure: TreeDef, leaves: Sequence[Any], names: Sequence[str],
                 statics: dict[int, Static], here: tuple, traced: TracedSignature):
        self.traced, self.statics, self.here, self.setting = traced, statics, here, config.device
        self.flatten = flattener(structure)
        self.kinds = list(map(type, leaves))
        self.there = [i for i, x in enumerate(leaves) if _is_quick(x)]
        self.whole = len(self.there) == len(leaves)
        self.others = [(i, names[i]) for i in range(len(leaves)) if i not in {*self.there}]
        mine = [leaves[i] for i in self.there]
        self.facts = LeafFacts(mine)
        self.returned: ReturnedLeaves | None = None
        devices = {x.storage.device if x.layout is None else None for x in mine}
        self.device = devices.pop() if self.whole and len(devices) == 1 else None  # of all of them
        self.spread = self.whole and all(x.layout is not None for x in leaves)
        self.keys = {i: _key_of(leaves[i], leaf_tensors(adopted(leaves[i], name)))
                     for i, name in self.others if i not in statics}

    @staticmethod
    def of(structure: TreeDef, leaves: Sequence[Any], names: Sequence[str],
           statics: dict[int, Static], here: tuple, traced: TracedSignature) -> PreparedCall | None:
        """None where a call cannot be recognised so: what lies on a GPU or is distributed is
        scaled, offloaded or another library's."""
        there = [x for x in leaves if _is_quick(x)]
        if flattener(structure) is None or any(x.scale is not None or (
                x.layout is None and type(x.storage) not in OURS) for x in there):
            return None
        return PreparedCall(structure, leaves, names, statics, here, traced)

    def tensors(self, args: tuple) -> list[Tensor] | None:
        """The tensors of a call like this one; None where it is not."""
        assert self.flatten is not None
        leaves = self.flatten(args)
        if leaves is None:
            return None
        like = self.returned
        if like is None or not like.are(leaves):
            like = None
            if not self._are_alike(leaves):
                return None
        if config.device != self.setting or tuple(look() for look in hooks.surroundings) != \
                self.here:
            return None
        if self.device is not None:
            return PlacedLeaves(leaves, [x._storage for x in leaves], self.device, like)
        if like is not None and self.spread:
            return SpreadLeaves(leaves, like.pick_rest(leaves), like)
        return leaves if self.whole else self._with_others(leaves)

    def _are_alike(self, leaves: list[Any]) -> bool:
        """Whether leaves are as those were, looking at all that is asked of each."""
        if list(map(type, leaves)) != self.kinds:
            return False
        mine = leaves if self.whole else [leaves[i] for i in self.there]
        if not self.facts.hold(mine):
            return False
        if self.whole and len(leaves) >= FEW:
            self.returned = ReturnedLeaves.of(leaves)
        return True

    def _with_others(self, leaves: list[Any]) -> list[Tensor] | None:
        made = dict[int, list[Tensor]]()
        for i, name in self.others:
            if i in self.statics:
                if Static(leaves[i]) != self.statics[i]:
                    return None
                made[i] = []
                continue
            made[i] = leaf_tensors(adopted(leaves[i], name))
            if _key_of(leaves[i], made[i]) != self.keys[i]:
                return None
        return [t for i, x in enumerate(leaves) for t in (made[i] if i in made else (x,))]


class LeafFacts:
    """What is asked of tensors that lie on a GPU or on a mesh, and their memory."""

    def __init__(self, mine: Sequence[Any]):
        self.kinds = list(map(type, mine))
        self.shapes, self.types = [x._shape for x in mine], [x.type for x in mine]
        self.params, self.scales = [x.is_param for x in mine], [None] * len(mine)
        self.spread = [i for i, x in enumerate(mine) if x.layout is not None]
        self.layouts = [mine[i].layout for i in self.spread]
        self.on_gpu = [i for i, x in enumerate(mine) if x.layout is None]
        self.devices = [mine[i].storage.device for i in self.on_gpu]

    def hold(self, mine: Sequence[Any]) -> bool:
        """Whether others of these classes are so too."""
        if ([x._shape for x in mine] != self.shapes or [x.type for x in mine] != self.types
                or [x.is_param for x in mine] != self.params
                or [x.scale for x in mine] != self.scales
                or [mine[i].layout for i in self.spread] != self.layouts):
            return False
        memories = [mine[i]._storage for i in self.on_gpu]
        return OURS.issuperset(map(type, memories)) and [
            m.device for m in memories] == self.devices


class ReturnedLeaves:
    """Leaves that programs returned, as a step has those of the step before: which result each is
    says all that it was, but whether it is a parameter. The others, a batch, are asked."""

    def __init__(self, leaves: Sequence[Any], at: Sequence[int]):
        self.pick = picker(at)
        mine = self.pick(leaves)
        self.origins, self.params = [x.origin for x in mine], [x.is_param for x in mine]
        rest = {*range(len(leaves))} - {*at}
        self.pick_rest = picker(sorted(rest))
        self.rest = LeafFacts(self.pick_rest(leaves))

    @staticmethod
    def of(leaves: Sequence[Any]) -> ReturnedLeaves | None:
        """None where few are."""
        at = [i for i, x in enumerate(leaves) if x.origin is not None]
        return ReturnedLeaves(leaves, at) if len(at) >= FEW else None

    def are(self, leaves: Sequence[Any]) -> bool:
        """Whether leaves are these results of these programs, and the others as they were."""
        mine, rest = self.pick(leaves), self.pick_rest(leaves)
        try:
            if [x.origin for x in mine] != self.origins:
                return False
        except AttributeError:  # a number, say
            return False
        return ([x.is_param for x in mine] == self.params
                and list(map(type, rest)) == self.rest.kinds and self.rest.hold(rest))


def _is_quick(leaf: Any) -> bool:
    """Whether a leaf is compared by lists: it lies on a GPU, or on a mesh."""
    return type(leaf) is Resident or isinstance(leaf, Tensor) and leaf.layout is not None


def _key_of(leaf: Any, tensors: Sequence[Tensor]) -> tuple:
    return (*((leaf_key(t), t.place) for t in tensors),
            leaf.is_param if isinstance(leaf, Tensor) else None)


__all__ = ["KEPT", "PreparedCall", "leaf_key"]
