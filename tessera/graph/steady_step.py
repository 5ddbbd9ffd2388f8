"""Steps whose donated arguments are what the step before returned: a training loop.

    params, state = step(params, state, batch)

What follows from hundreds of tensors is the same step after step: they lie where they lay, nobody
else has their memory, results take their places. So a call asks whether these are the tensors that
the step before returned, all of them in their order, which is one comparison of where the objects
lie. Two sets of tensors take turns, one that was used up and one that is there: their memory passes
by one number, see MemoryTurns. What does not match goes the long way, which raises what there is to
raise.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .. import hooks
from ..errors import source_line, user_frame
from ..lazy_dataclass import dataclass
from ..tensor import Tensor
from ..tile.launch.memory_turns import MemoryTurns
from ..tile.launch.used_by import UsedBy
from .donation import DONATABLE, are_apart, unseen, use_up
from .placed_leaves import FEW, picker
from .tree_code import flattener

if TYPE_CHECKING:
    from .prepared_call import LeafPattern
    from .traced_signature import TracedSignature

FUNCTION = 3  # frames from SteadyStep._used_by to the compiled function's
KEPT = 4  # sets of tensors of one function, as of several models that it trains
MOST_UNUSED = 8  # sets on end that never came back: of later ones, each `AGAIN`-th is kept
AGAIN = 16


@dataclass(frozen=True)
class SteadyRun:
    """A program whose results are arguments of its next call. moved: by result, the number of the
    argument whose place it takes.  run: gives the other results, of the other arguments; None where
    it has to go the long way, and nothing has run."""

    moved: Sequence[int | None]
    run: Callable[[Sequence[Tensor]], list[Any] | None]


class StepForm:
    """What is the same of all sets of tensors of a signature: which leaves of the arguments and
    which results are of the set."""

    def __init__(self, pattern: LeafPattern, numbers: Sequence[int], traced: TracedSignature,
                 moved: Sequence[int | None]):
        """numbers: the leaf that each argument of the program is."""
        pairs = sorted((numbers[i], j) for j, i in enumerate(moved) if i is not None)
        self.traced, self.moved, mine = traced, moved, [k for k, _ in pairs]
        self.first = mine[0]
        rest = sorted({*range(len(pattern.kinds))} - {*mine})
        self.pick, self.pick_rest, self.rest = picker(mine), picker(rest), pattern.part(rest)
        self.params = [pattern.is_param(k) for k in mine]
        self.pick_results = picker([j for _, j in pairs])
        others = [j for j, i in enumerate(moved) if i is None]
        place = {j: k for k, j in enumerate([*(j for _, j in pairs), *others])}
        self.order = picker([place[j] for j in range(len(moved))])
        there = {i for i in moved if i is not None}
        left = [i for i in range(len(numbers)) if i not in there]
        more = [left.index(i) for i in traced.donated if i not in there]
        self.more_donated, self.pick_donated = bool(more), picker(more)


class SteadyStep:
    """Two sets of tensors that take turns."""

    def __init__(self, form: StepForm, run: SteadyRun, mine: Sequence[Any], spent: Sequence[Any]):
        """mine: what a call returned.  spent: what it used up, in the same order."""
        self.form, self.run, how = form, run.run, DONATABLE[type(mine[0])]
        assert how.beside is not None
        self.memory, self.beside = how.memory, how.beside
        held = list(map(self.memory.__get__, mine))
        results = [object() if x.origin is None else x.origin.result for x in mine]
        self.turns = MemoryTurns(mine, self.beside(mine), held, results,
                                 self.memory.__get__(spent[0]), self.memory.__set__, how.take)
        self.scattered = True  # the first ones lie where they were made one by one
        self.at: tuple[Any, int] | None = None  # the code and line of the last call
        self.used_by: UsedBy | None = None

    def is_of(self, leaves: Sequence[Any]) -> bool:
        """Whether the first of these leaves is one of its own."""
        origin = getattr(leaves[self.form.first], "origin", None)
        return origin is not None and origin.turns is self.turns

    def _in_a_row(self) -> None:
        """New tensors in place of the first ones, one beside the other in memory: a step that
        waited for its loss finds hundreds of them in no cache."""
        if self.turns.live:
            self.turns.replace_spent(self.beside(self.turns.spent))
            self.scattered = False

    def call(self, leaves: Sequence[Any], name: str) -> Any:
        """The result of the function; None where nothing has run. leaves: of its arguments."""
        if self.scattered:
            self._in_a_row()
        form, turns = self.form, self.turns
        mine, spent = form.pick(leaves), turns.spent
        if not turns.are(mine) or [x.is_param for x in mine] != form.params:
            return None
        rest = form.rest.tensors(form.pick_rest(leaves))
        if rest is None or not unseen(spent, 1) or form.more_donated and not are_apart(rest):
            return None
        for x in rest:
            origin = getattr(x, "origin", None)
            if origin is not None and origin.turns is turns:  # of the set, and given twice
                return None
        made = self.run(rest)
        if made is None:
            return None
        used_by = self._used_by(name)
        if not turns.pass_on(mine, used_by):
            self._hand_over(mine, spent, used_by)
        for y in spent:  # somebody may have set them
            y.scale = y.name = None
            y.is_param = False
        if form.more_donated:
            use_up(form.pick_donated(rest), name)
        return form.traced.result(form.order([*spent, *made]))

    def _hand_over(self, mine: Sequence[Any], spent: Sequence[Any], call: UsedBy) -> None:
        """The memory of each to the one in its place."""
        for x, y in zip(mine, spent, strict=True):
            self.memory.__set__(y, self.memory.__get__(x))
        DONATABLE[type(mine[0])].take(mine, call)

    def _used_by(self, name: str) -> UsedBy:
        """The call under way, which most likely is at the line of the one before."""
        caller = sys._getframe(FUNCTION).f_back
        at = None if caller is None else (caller.f_code, caller.f_lineno)
        if at is None or self.at != at or self.used_by is None:
            frame = user_frame()
            self.at = at if frame is caller else None  # else it is in this package
            self.used_by = UsedBy(None if frame is None else source_line(
                frame.f_code.co_filename, frame.f_lineno), name)
        return self.used_by


class SteadySteps:
    """Those of a signature."""

    def __init__(self, pattern: LeafPattern, traced: TracedSignature):
        self.pattern, self.traced = pattern, traced
        self.steps: deque[SteadyStep] = deque(maxlen=KEPT)  # the one used last is the last
        self.unused = 0
        self.form: StepForm | None = None

    def call(self, leaves: Sequence[Any], name: str) -> Any:
        """The result of the function; None where nothing has run."""
        if hooks.runs:
            return None
        for _ in range(len(self.steps)):
            try:
                step = self.steps.pop()  # no other thread has it
            except IndexError:
                return None
            if step.turns.memories is None:  # they have ended
                continue
            if not step.is_of(leaves):
                self.steps.appendleft(step)
                continue
            made = step.call(leaves, name)
            if made is not None:
                self.steps.append(step)
                self.unused = 0
            return made
        return None

    def keep(self, leaves: Sequence[Any], tensors: Sequence[Tensor], out: Any) -> None:
        """Know the tensors again that a call returned. leaves: of its arguments; tensors: what the
        program was given of them."""
        if not self.traced.donated or len(self.traced.donated) < FEW:
            return
        self.unused += 1
        if self.unused > MOST_UNUSED and self.unused % AGAIN:
            return
        flatten = flattener(self.traced.out_tree)
        made = None if flatten is None else flatten(out)
        if made is None or (run := self.traced.steady(made)) is None:
            return
        if self.form is None or self.form.moved != run.moved:
            number = {id(x): k for k, x in enumerate(leaves)}
            if any(i is not None and id(tensors[i]) not in number for i in run.moved):
                return
            self.form = StepForm(self.pattern, [number.get(id(x), -1) for x in tensors],
                                 self.traced, run.moved)
        mine, spent = list(self.form.pick_results(made)), list(self.form.pick(leaves))
        how = DONATABLE.get(type(mine[0]))
        if how is None or how.memory is None or {*map(type, (*mine, *spent))} != {type(mine[0])}:
            return
        if [x.is_param for x in mine] == self.form.params:
            how.spent.forget()
            self.steps.append(SteadyStep(self.form, run, mine, spent))


__all__ = ["SteadyRun", "SteadySteps"]
