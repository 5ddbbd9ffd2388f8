"""Calls of a compiled function that are like one before: recognised without taking trees apart
leaf by leaf.

A step of a model has hundreds of tensors in nested dicts. What is asked of each (its class,
extents, type, whether it is a parameter, where it lies) is compared list by list with what it was;
of what a program returned, as the step before did, its origin alone. Leaves that are neither
tensors on a GPU nor distributed are looked at as in any call. What does not match goes the long
way, which raises what there is to raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import call
from typing import Any, TypeVar

from .. import config, hooks
from ..lazy_dataclass import dataclass
from ..numerics import NumericType
from ..runtime.device import Device
from ..tensor import Tensor
from ..tile.launch.resident import Resident, adopted
from .call_forms import CallForm
from .placed_leaves import FEW, OURS, SpreadLeaves, picker, placed_on, read_storage
from .signature import Static, leaf_tensors
from .steady_step import SteadySteps
from .traced_signature import TracedSignature
from .tree import TreeDef
from .tree_code import flattener
from .weak_numbers import number_type

T = TypeVar("T")
KEPT = 4  # calls of one function that are recognised so


def leaf_key(t: Tensor) -> tuple:
    """What of a tensor belongs to the signature of a call."""
    return tuple(t.shape), t.type, t.layout, number_type(t), t.offloaded


class LeafPattern:
    """Leaves of a call. kinds: their classes.  facts: of those that lie on a GPU or on a mesh, by
    number.  others: of the rest, the parameter and what is the same at each call: a constant of the
    trace, or the key of its tensors."""

    def __init__(self, kinds: Sequence[type], facts: Mapping[int, LeafFact],
                 others: Mapping[int, tuple[str, Any]]):
        self.kinds, self.others, self.by_number = [*kinds], others, facts
        self.there, self.whole = [*facts], not others
        self.facts = LeafFacts([*facts.values()])

    @staticmethod
    def of(leaves: Sequence[Any], names: Sequence[str], statics: dict[int, Static]) -> LeafPattern:
        facts = {i: LeafFact.of(x) for i, x in enumerate(leaves) if _is_quick(x)}
        others = {i: (names[i], statics[i] if i in statics else _key_of(
            x, leaf_tensors(adopted(x, names[i])))) for i, x in enumerate(leaves) if i not in facts}
        return LeafPattern([*map(type, leaves)], facts, others)

    def part(self, numbers: Sequence[int]) -> LeafPattern:
        """Of these leaves alone."""
        return LeafPattern([self.kinds[i] for i in numbers], _renumbered(self.by_number, numbers),
                           _renumbered(self.others, numbers))

    def is_param(self, number: int) -> bool:
        """Of a leaf that lies on a GPU or on a mesh."""
        return self.by_number[number].is_param

    def hold(self, leaves: Sequence[Any]) -> bool:
        """Whether others are so too, but for those that are neither on a GPU nor distributed."""
        return list(map(type, leaves)) == self.kinds and self.facts.hold(
            leaves if self.whole else [leaves[i] for i in self.there])

    def tensors(self, leaves: Sequence[Any]) -> Sequence[Tensor] | None:
        """The tensors of leaves like these; None of others."""
        if not self.hold(leaves):
            return None
        return leaves if self.whole else self.with_others(leaves)

    def with_others(self, leaves: Sequence[Any]) -> list[Tensor] | None:
        """The tensors of leaves that hold; None where the others are not as they were."""
        made = dict[int, list[Tensor]]()
        for i, (name, known) in self.others.items():
            if type(known) is Static:
                if Static(leaves[i]) != known:
                    return None
                made[i] = []
                continue
            made[i] = leaf_tensors(adopted(leaves[i], name))
            if _key_of(leaves[i], made[i]) != known:
                return None
        return [t for i, x in enumerate(leaves) for t in (made[i] if i in made else (x,))]


def _renumbered(of: Mapping[int, T], numbers: Sequence[int]) -> dict[int, T]:
    return {k: of[i] for k, i in enumerate(numbers) if i in of}


class PreparedCall:
    """A call of a form. leaves: of what it gives.  names: their parameters.  statics: those
    that are constants of the trace, by number.  here: of the surroundings."""

    def __init__(self, form: CallForm, structure: TreeDef, leaves: Sequence[Any],
                 names: Sequence[str], statics: dict[int, Static], here: tuple,
                 traced: TracedSignature):
        self.given = form.given
        self.traced, self.here, self.setting = traced, [*here], config.device
        self.flatten = flattener(structure)
        self.pattern = LeafPattern.of(leaves, names, statics)
        self.returned: ReturnedLeaves | None = None
        devices = {fact.device for fact in self.pattern.by_number.values()}
        # of all of them
        self.device = devices.pop() if self.pattern.whole and len(devices) == 1 else None
        self.spread = self.pattern.whole and all(x.layout is not None for x in leaves)
        self.steady = SteadySteps(structure, self.pattern, traced)

    @staticmethod
    def of(form: CallForm, structure: TreeDef, leaves: Sequence[Any], names: Sequence[str],
           statics: dict[int, Static], here: tuple, traced: TracedSignature
           ) -> PreparedCall | None:
        """None where a call cannot be recognised so: what lies on a GPU or is distributed is
        scaled, offloaded or another library's."""
        there = [x for x in leaves if _is_quick(x)]
        if flattener(structure) is None or any(x.scale is not None or (
                x.layout is None and type(x.storage) not in OURS) for x in there):
            return None
        return PreparedCall(form, structure, leaves, names, statics, here, traced)

    def is_here(self) -> bool:
        """Whether the surroundings of a call are like these."""
        return config.device == self.setting and [*map(call, hooks.surroundings)] == self.here

    def leaves(self, args: tuple) -> list[Any] | None:
        """Of the arguments of a call; None where they are not of this structure."""
        assert self.flatten is not None
        return self.flatten(args)

    def tensors(self, leaves: list[Any]) -> Sequence[Tensor] | None:
        """The tensors of a call with these leaves; None where it is not one like this."""
        like = self.returned
        if like is None or not like.are(leaves):
            like = None
            if not self._are_alike(leaves):
                return None
        if self.device is not None:
            return placed_on(leaves, self.device)
        if like is not None and self.spread:
            return SpreadLeaves(leaves, like.pick_rest(leaves))
        return leaves if self.pattern.whole else self.pattern.with_others(leaves)

    def _are_alike(self, leaves: list[Any]) -> bool:
        """Whether leaves are as those were, looking at all that is asked of each."""
        if not self.pattern.hold(leaves):
            return False
        if self.pattern.whole and len(leaves) >= FEW:
            self.returned = ReturnedLeaves.of(leaves)
        return True


@dataclass(frozen=True)
class LeafFact:
    """What is asked of a tensor that lies on a GPU or on a mesh. device: of its memory there."""

    shape: tuple[int, ...]
    type: NumericType
    is_param: bool
    layout: Any
    device: Device | None

    @staticmethod
    def of(x: Any) -> LeafFact:
        return LeafFact(x._shape, x.type, x.is_param, x.layout,
                        x.storage.device if x.layout is None else None)


class LeafFacts:
    """Those of many, list by list; those of few, as a batch, one by one."""

    def __init__(self, facts: Sequence[LeafFact]):
        self.few = [*facts] if len(facts) < FEW else []
        self.shapes, self.types = [x.shape for x in facts], [x.type for x in facts]
        self.params, self.scales = [x.is_param for x in facts], [None] * len(facts)
        self.spread = [i for i, x in enumerate(facts) if x.layout is not None]
        self.layouts = [facts[i].layout for i in self.spread]
        self.on_gpu = [i for i, x in enumerate(facts) if x.layout is None]
        self.devices = [facts[i].device for i in self.on_gpu]
        # Whether others of these classes are so too.
        self.hold: Callable[[Sequence[Any]], bool] = \
            self._few_hold if self.few else self._many_hold

    def _many_hold(self, mine: Sequence[Any]) -> bool:
        if ([x._shape for x in mine] != self.shapes or [x.type for x in mine] != self.types
                or [x._is_param for x in mine] != self.params
                or [x._scale for x in mine] != self.scales
                or [mine[i].layout for i in self.spread] != self.layouts):
            return False
        memories = read_storage([mine[i] for i in self.on_gpu])
        return OURS.issuperset(map(type, memories)) and [
            m.device for m in memories] == self.devices

    def _few_hold(self, mine: Sequence[Any]) -> bool:
        for x, was in zip(mine, self.few, strict=True):
            numeric, layout = x.type, x.layout
            if (x._shape != was.shape or (numeric is not was.type and numeric != was.type)
                    or x._is_param != was.is_param or x._scale is not None
                    or (layout is not was.layout and layout != was.layout)):
                return False
            if layout is None:
                memory = x.held_now()
                if type(memory) not in OURS or memory.device != was.device:
                    return False
        return True


class ReturnedLeaves:
    """Leaves that programs returned, as a step has those of the step before: which result each is
    says all that it was, but whether it is a parameter. The others, a batch, are asked."""

    def __init__(self, leaves: Sequence[Any], at: Sequence[int]):
        self.pick = picker(at)
        mine = self.pick(leaves)
        self.origins, self.params = [x.origin.result for x in mine], [x.is_param for x in mine]
        rest = {*range(len(leaves))} - {*at}
        self.pick_rest = picker(sorted(rest))
        others = self.pick_rest(leaves)
        self.kinds, self.rest = [*map(type, others)], LeafFacts([*map(LeafFact.of, others)])

    @staticmethod
    def of(leaves: Sequence[Any]) -> ReturnedLeaves | None:
        """None where few are."""
        at = [i for i, x in enumerate(leaves) if x.origin is not None]
        return ReturnedLeaves(leaves, at) if len(at) >= FEW else None

    def are(self, leaves: Sequence[Any]) -> bool:
        """Whether leaves are these results of these programs, and the others as they were."""
        mine, rest = self.pick(leaves), self.pick_rest(leaves)
        try:
            if [x.origin.result for x in mine] != self.origins:
                return False
        except AttributeError:  # a number, say, or no result any more
            return False
        return ([x._is_param for x in mine] == self.params
                and list(map(type, rest)) == self.kinds and self.rest.hold(rest))


def _is_quick(leaf: Any) -> bool:
    """Whether a leaf is compared by lists: it lies on a GPU, or on a mesh."""
    return type(leaf) is Resident or isinstance(leaf, Tensor) and leaf.layout is not None


def _key_of(leaf: Any, tensors: Sequence[Tensor]) -> tuple:
    return (*((leaf_key(t), t.place) for t in tensors),
            leaf.is_param if isinstance(leaf, Tensor) else None)


__all__ = ["KEPT", "LeafPattern", "PreparedCall", "leaf_key"]
