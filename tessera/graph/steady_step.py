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
from ..tile.launch.memory_turns import MemoryTurns, addresses
from ..tile.launch.object_words import are_readable
from ..tile.launch.used_by import UsedBy
from .copied_trees import CopiedTrees, TreeCopies
from .donation import DONATABLE, are_apart, use_up
from .placed_leaves import FEW, picker
from .tree import TreeDef
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

    def __init__(self, pattern: LeafPattern, trees: CopiedTrees, numbers: Sequence[int],
                 traced: TracedSignature, moved: Sequence[int | None]):
        """trees: how arguments are taken apart.  numbers: the leaf that each argument of the
        program is."""
        self.traced, self.moved, self.trees = traced, moved, trees
        places = {j: numbers[i] for j, i in enumerate(moved) if i is not None}
        result = {k: j for j, k in places.items()}
        self.count = len(trees.order)
        self.pick, self.pick_results = picker(trees.order), picker([result[k] for k in trees.order])
        self.params = [pattern.is_param(k) for k in trees.order]
        self.rest = pattern.part(sorted({*range(len(pattern.kinds))} - {*trees.order}))
        self.put = trees.puts_together(traced.out_tree, places)
        others = [j for j, i in enumerate(moved) if i is None]
        self.new_params = [k for k, j in enumerate(others) if traced.rebuild[j] == "param"]
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
        self.turns = MemoryTurns(mine, self.beside(mine, form.params), held, results,
                                 self.memory.__get__(spent[0]), self.memory.__set__, how.take,
                                 form.trees.copied)
        self.turns.spent_in = form.trees.of_tensors(self.turns.spent)
        self.scattered = True  # the first ones lie where they were made one by one
        self.at: tuple[Any, int] | None = None  # the code and line of the last call
        self.used_by: UsedBy | None = None

    def _in_a_row(self) -> None:
        """New tensors in place of the first ones, one beside the other in memory: a step that
        waited for its loss finds hundreds of them in no cache."""
        if self.turns.live:
            self._anew()
            self.scattered = False

    def _anew(self) -> None:
        """New tensors in place of those that were used up."""
        if len(spent := self.turns.spent):  # else another thread has ended them
            made = self.beside(spent, self.form.params)
            self.turns.replace_spent(made, self.form.trees.of_tensors(made))

    def call(self, taken: TreeCopies, mine: Any, name: str) -> Any:
        """The result of the function; None where nothing has run. taken: its arguments.  mine: of
        these the tensors of the set."""
        if self.scattered:
            self._in_a_row()
        form, turns = self.form, self.turns
        rest = form.rest.tensors(taken.rest)
        if rest is None or (form.more_donated and not are_apart(rest)):
            return None
        if not turns.unseen():  # somebody keeps an old step's
            self._anew()
        spent, copies = turns.spent, turns.spent_in
        if turns.memories is None:  # they have ended meanwhile
            return None
        for x in rest:
            origin = getattr(x, "origin", None)
            if origin is not None and origin.turns is turns:  # of the set, and given twice
                return None
        made = self.run(rest)
        if made is None:
            return None
        used_by = self._used_by(name)
        if not turns.pass_on(mine, TreeCopies(taken.dicts, taken.lists, [], []), used_by):
            self._hand_over(mine, spent, used_by)
        for k in form.new_params:
            made[k].is_param = True
        if form.more_donated:
            use_up(form.pick_donated(rest), name)
        return form.put(copies, spent, made)

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

    def __init__(self, structure: TreeDef, pattern: LeafPattern, traced: TracedSignature):
        """structure: of the arguments."""
        self.structure, self.pattern, self.traced = structure, pattern, traced
        self.steps: deque[SteadyStep] = deque(maxlen=KEPT)  # the one used last is the last
        self.unused = 0
        self.form: StepForm | None = None

    def call(self, args: tuple[Any, ...], name: str) -> Any:
        """The result of the function, where the arguments are of a set; None where not, and nothing
        has run."""
        form = taken = None
        for _ in range(0 if hooks.runs else len(self.steps)):
            try:
                step = self.steps.pop()  # no other thread has it
            except IndexError:
                return None
            if step.turns.memories is None:  # they have ended
                continue
            if step.form is not form:
                form, taken = step.form, step.form.trees.take(args)
                if taken is not None:
                    mine = addresses(taken.tensors(), form.count)
                    at = mine.tobytes()
            if taken is not None and step.turns.are(at):
                made = step.call(taken, mine, name)
                if made is not None:
                    self.steps.append(step)
                    self.unused = 0
                return made
            self.steps.appendleft(step)
        return None

    def keep(self, leaves: Sequence[Any], tensors: Sequence[Tensor], out: Any) -> None:
        """Know the tensors again that a call returned. leaves: of its arguments; tensors: what the
        program was given of them."""
        if not are_readable() or len(self.traced.donated) < FEW:
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
            numbers = [number.get(id(x), -1) for x in tensors]
            places = {numbers[i] for i in run.moved if i is not None}
            trees = None if -1 in places else CopiedTrees.of(self.structure, places)
            if trees is None:
                return
            self.form = StepForm(self.pattern, trees, numbers, self.traced, run.moved)
        mine, spent = list(self.form.pick_results(made)), list(self.form.pick(leaves))
        how = DONATABLE.get(type(mine[0]))
        if how is None or how.memory is None or {*map(type, (*mine, *spent))} != {type(mine[0])}:
            return
        if [x.is_param for x in mine] == self.form.params:
            how.spent.forget()
            self.steps.append(SteadyStep(self.form, run, mine, spent))


__all__ = ["SteadyRun", "SteadySteps"]
