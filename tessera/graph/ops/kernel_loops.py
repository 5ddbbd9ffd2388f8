"""A kernel's loop in ops of the graph, without writing it out: all iterations side by side.

The iteration is one more axis of the grid, so what does not depend on carried values is told once,
on whole arrays. What is carried is then found from it:

    c' = a_t c + b_t     the sum over t of (prod_(u>t) a_u) b_t; where b_t is a product of matrices
                         it is one product, over t and the contracted axis together
    c' = max(c, b_t)     a running maximum
    c' = b_t             the iteration before
    c' = f(c, ...)       step by step, of what depends on it alone

in the order in which they need each other. A loop whose iterations meet in memory is not told so:
`side_by_side` gives False, and it is written out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import hooks
from ...errors import GradError
from ...numerics import as_type
from ...tensor import Tensor, as_tensor
from ...tile.interpreter.machine import masked
from ...tile.interpreter.memory import MemoryBox
from ...tile.ir.ir import For, Node, Op, SSAValue, operands, outs_of, walk
from ...tile.ir.numpy_values import array_dtype
from ...tile.ir.types import is_lane
from .. import functions as F
from .kernel_affine import AFFINE, Affine, shape_of
from .kernel_blocks import BlockedTile, aligned, is_recorded, map_blocks, multiplied, over, product
from .kernel_loop_accesses import NotSideBySide, memory_roots, reads_and_writes
from .kernel_masks import known_tensor

if TYPE_CHECKING:
    from .kernel_meaning import KernelRecorder

FEWEST = 2  # iterations
MOST_WRITTEN = 512  # ops of what is told step by step; more are a scan of the graph
MOST_STARTS = 1 << 28  # elements that are kept of one carried value


def side_by_side(m: KernelRecorder, node: For) -> bool:
    """Tells a loop in one, where its iterations allow it; else nothing has happened."""
    lo, hi, step = (np.asarray(m.get(x), np.int64) for x in (node.lo, node.hi, node.step))
    far, stride = (hi - lo, step) if step.flat[0] > 0 else (lo - hi, -step)
    trips = np.maximum(0, -(-far // stride))
    if m.mask is not None:
        trips = np.where(m.mask, trips, 0)
    count = int(trips.max(initial=0))
    if count < FEWEST:
        return False
    wide = m.widened(count)
    try:
        loop = KernelLoop(m, wide, node, trips, count)
        loop.begin(lo, step)
        finals = loop.run()
        wide.guards[-1].require_apart()
    except (NotSideBySide, GradError):
        wide.guards[-1].undo()
        return False
    wide.guards[-1].finish(len(m.grid))
    m.steps = wide.steps
    for made, value in zip(node.carried, finals, strict=True):
        m.env[made.value] = value
    return True


@dataclass
class KernelLoop:
    """m: outside of the loop; wide: all iterations, along the last axis of its grid."""

    m: KernelRecorder
    wide: KernelRecorder
    node: For
    trips: np.ndarray
    count: int
    needs: list[set[int]] = field(default_factory=list)  # by node: carried values it depends on
    yields: list[set[int]] = field(default_factory=list)
    done: set[int] = field(default_factory=set)

    @property
    def axis(self) -> int:
        return len(self.m.grid)

    @property
    def part(self) -> int:
        return ~self.axis

    def begin(self, lo: np.ndarray, step: np.ndarray) -> None:
        """The number of each iteration, and who takes part in it."""
        node, at = self.node, np.arange(self.count)[None, :, None]
        var = lo[:, None] + step[:, None] * at
        on = at < self.trips[:, None]
        self.wide.env[node.var.value] = self.rows(var).astype(np.asarray(self.m.get(node.lo)).dtype)
        self.wide.mask = masked(self.wide.mask, self.rows(on))
        self.wide.apart = self.m.apart + (self.trips.shape[1] > 1)
        self.needs, self.yields = dependences(node)

    def rows(self, x: np.ndarray) -> np.ndarray:
        """[1|G, T, ...] as [G * T, ...]"""
        x = np.broadcast_to(x, (self.m.count, *x.shape[1:]))
        return x.reshape(-1, *x.shape[2:])

    def run(self) -> list[Any]:
        """What every carried value is after the loop."""
        solved: set[int] = set()
        finals: dict[int, Any] = {}
        self.advance(solved)
        while len(solved) < len(self.node.carried):
            group = self.next_group(solved)
            finals |= self.solve(group, solved)
            solved |= group
            self.advance(solved)
        return [finals[i] for i in range(len(self.node.carried))]

    def advance(self, solved: set[int]) -> None:
        for i, node in enumerate(self.node.body):
            if i not in self.done and self.needs[i] <= solved:
                self.wide.run((node,))
                self.done.add(i)

    def next_group(self, solved: set[int]) -> set[int]:
        """Carried values that need each other, and otherwise what is solved."""
        found = []
        for i in range(len(self.yields)):
            if i not in solved:
                group, left = {i}, [i]
                while left:
                    new = self.yields[left.pop()] - solved - group
                    group |= new
                    left += new
                found.append(group)
        return min(found, key=len)

    # --- one carried value ------------------------------------------------------------------------
    def solve(self, group: set[int], solved: set[int]) -> dict[int, Any]:
        body = self.slice_of(group)
        started = self.wanted(group, body)
        if not started:  # nobody else asks what they are in an iteration
            self.done |= {k for k, n in enumerate(self.node.body) if any(n is x for x in body)}
        if self.is_known(group, body):
            return self.by_steps(group, body, started)
        if len(group) == 1:
            (i,) = group
            init = self.m.get(self.node.inits[i])
            if i not in self.yields[i]:
                return {i: self.shifted(i, init)}
            for form in (self.sums, self.extremes):
                final = form(i, init, body, started)
                if final is not None:
                    return {i: final}
        return self.by_steps(group, body, started)

    def is_known(self, group: set[int], body: list[Node]) -> bool:
        """Whether they follow from the launch alone."""
        inner = {d.value for n in body for d in outs_of(n)}
        inner |= {self.node.carried[i].value for i in group}
        given = [self.wide.get(a) for n in body for a in reads_of(n) if a not in inner]
        inits = [self.m.get(self.node.inits[i]) for i in group]
        return bool(body) and all(isinstance(x, np.ndarray) for x in (*given, *inits))

    def slice_of(self, group: set[int]) -> list[Node]:
        """What leads from these carried values to their next ones."""
        wanted = {self.node.yields[i] for i in group}
        found: list[Node] = []
        for k in range(len(self.node.body) - 1, -1, -1):
            node = self.node.body[k]
            if self.needs[k] & group and wanted & {d.value for d in outs_of(node)}:
                found.append(node)
                wanted |= set(reads_of(node))
        return found[::-1]

    def wanted(self, group: set[int], body: list[Node]) -> bool:
        """Whether something else in the loop reads them."""
        inner = {id(n) for n in body}
        return any(self.needs[k] & group and id(n) not in inner
                   for k, n in enumerate(self.node.body)) or any(
            ys & group for i, ys in enumerate(self.yields) if i not in group)

    def begin_with(self, i: int, value: Any) -> None:
        """A carried value as each iteration finds it."""
        made = self.node.carried[i]
        value = of_shape(value, shape_of(made.type), len(self.wide.grid))
        self.wide.env[made.value] = self.wide.spread(made.type, value)

    def shifted(self, i: int, init: Any) -> Any:
        """A value of the iteration before."""
        if self.wide.mask is not None:
            raise NotSideBySide
        value = self.wide.get(self.node.yields[i])
        if isinstance(value, np.ndarray) and isinstance(init, np.ndarray):
            rows = [init, *(self.at(value, t) for t in range(self.count - 1))]
            self.begin_with(i, self.stacked(i, rows))
        else:
            self.begin_with(i, self.behind(i, value, init))
        return self.at(value, self.count - 1)

    def behind(self, i: int, value: Any, init: Any) -> Any:
        """init, then the values of all iterations but the last."""
        def shift(axis: int, x: Tensor, first: Tensor) -> Tensor:
            cut = (slice(None),) * axis
            return F.concatenate([first[(*cut, slice(0, 1))], x[(*cut, slice(0, -1))]], axis)

        return self.lines(i, shift, value, self.m.lifted(init, self.count))

    # --- sums -------------------------------------------------------------------------------------
    def sums(self, i: int, init: Any, body: list[Node], started: bool) -> Any:
        kind = self.node.carried[i].type
        if kind.dtype.kind == "float" and kind.dtype.bits < 32:
            return None  # each iteration rounds
        made = self.affine(i, body)
        if made is None:
            return None
        factor, terms = made
        on = self.wide.mask
        if on is not None:
            terms = [self.masked(kind, on, t, 0) for t in terms]
            factor = None if factor is None else self.masked(kind, on, factor, 1)
        if started:
            self.start_sums(i, factor, terms, init)
        if factor is not None:
            weight = self.lines(i, _product_behind, factor)
            terms = [self.wide.applied("mul", kind, t, weight) for t in terms]
            init = None if _is_zero(init) else self.m.applied(
                "mul", kind, init, self.at(self.lines(i, _product_from, factor), 0))
        found = [self.total(kind, t) for t in terms]
        if init is not None and not _is_zero(init):
            found = [init, *found]
        if not found:
            return init if init is not None else self.m.get(self.node.inits[i])
        out = found[0]
        for x in found[1:]:
            out = self.m.applied("add", kind, out, x)
        return of_shape(out, shape_of(kind), len(self.m.grid))

    def affine(self, i: int, body: list[Node]) -> tuple[Any, list[Any]] | None:
        """(factor or None, terms) of the next value as factor * value + terms."""
        values: dict[Any, Affine] = {self.node.carried[i].value: Affine(None, [])}
        for node in body:
            if not isinstance(node, Op) or node.name not in AFFINE:
                return None
            made = AFFINE[node.name](self.wide, node.outs[0].type, [
                values[a] if a in values else self.wide.get(a) for a in node.args], node)
            if made is None:
                return None
            values[node.outs[0].value] = made
        last = values.get(self.node.yields[i])
        return None if last is None else (last.factor, last.terms)

    def start_sums(self, i: int, factor: Any, terms: list[Any], init: Any) -> None:
        kind = self.node.carried[i].type
        if not terms and factor is None:
            self.begin_with(i, self.m.lifted(init, self.count))
            return
        added = terms[0] if terms else np.zeros((1, *np.ones(len(shape_of(kind)) or 1, int)))
        for t in terms[1:]:
            added = self.wide.applied("add", kind, added, t)
        first = self.m.lifted(init, self.count)
        if factor is None:
            value = self.lines(i, lambda axis, b, h: F.cumsum(b, axis=axis) + h, added, first)
        else:
            value = self.lines(
                i, lambda axis, b, a, h: F.linear_recurrence(a, b, axis=axis)
                + F.cumprod(a, axis=axis) * h, added, factor, first)
        self.begin_with(i, self.behind(i, value, init))

    def masked(self, kind: Any, on: np.ndarray, x: Any, otherwise: float) -> Any:
        """x in iterations that take part."""
        other = np.asarray(otherwise, np.float32).reshape((1,) * (1 + (len(shape_of(kind)) or 1)))
        made = self.wide.applied("where", kind, on, x, other)
        if isinstance(made, BlockedTile) and isinstance(x, BlockedTile) and otherwise == 0 and (
                on.shape[1] == 1):
            zero = np.zeros((1,) * (self.axis + 3), np.float32)
            made = replace(made, products=tuple(
                (map_blocks(F.where, (self.wide.over_grid(on), a, zero), a.shape), b)
                for a, b in x.products))
        return made

    def total(self, kind: Any, x: Any) -> Any:
        """The sum over the iterations, without their axis."""
        if not is_recorded(x):
            x = np.asarray(x)
            every = x.reshape(-1, self.count, *x.shape[1:]).sum(1) if len(x) > 1 else x * self.count
            return every.astype(x.dtype)
        if isinstance(x, Tensor):
            one = x.shape[self.axis] == 1
            return F.reshape(x, _without(x.shape, self.axis)) * self.count if one else F.sum(
                x, axis=self.axis)
        if x.products and all(self.part in {*a.parts} & {*b.parts} for a, b in x.products):
            multiply = product(kind.dtype)
            made = [multiplied(multiply, a, b, (self.part,)) for a, b in x.products]
            found = [self.outer(y) for y in made if y is not None]
            out = found[0]
            for y in found[1:]:
                out = self.m.applied("add", kind, out, y)
            return replace(out, shape=shape_of(kind))
        if x.summed is not None and {self.part, x.summed[1]} <= {*x.summed[0].parts}:
            return self.outer(_summed(x, self.part))
        if self.part not in x.parts:
            return self.outer(x.mapped(lambda y: y * self.count))
        return self.outer(over(F.sum, x, (self.part,)))

    def outer(self, x: BlockedTile) -> BlockedTile:
        """What is alike in all iterations, outside of them."""
        form = tuple(tuple(p for p in g if p != self.part) for g in x.form)
        return x.relabelled(form, x.shape, self.m.grid)

    # --- maxima -----------------------------------------------------------------------------------
    def extremes(self, i: int, init: Any, body: list[Node], started: bool) -> Any:
        """A running maximum or minimum."""
        kind, value = self.node.carried[i].type, self.node.carried[i].value
        if len(body) != 1 or not isinstance(body[0], Op) or body[0].name not in RUNNING:
            return None
        op = body[0]
        others = [a for a in op.args if a != value]
        if len(others) != 1 or op.outs[0].value != self.node.yields[i]:
            return None
        run, worst = RUNNING[op.name]
        x = self.wide.get(others[0])
        if self.wide.mask is not None:
            x = self.masked(kind, self.wide.mask, x, worst)
        beside = F.maximum if op.name == "maximum" else F.minimum
        reached = self.lines(i, lambda axis, b, h: beside(run(b, axis=axis), h), x,
                             self.m.lifted(init, self.count))
        if started:
            self.begin_with(i, self.behind(i, reached, init))
        return self.at(reached, self.count - 1)

    # --- step by step -----------------------------------------------------------------------------
    def by_steps(self, group: set[int], body: list[Node], started: bool) -> dict[int, Any]:
        """The part of the body that needs them again and again, with the rest known."""
        m, order = self.m, sorted(group)
        inner = {d.value for n in body for d in outs_of(n)}
        carried = {self.node.carried[i].value for i in group}
        given = {a: self.wide.get(a) for n in body for a in reads_of(n)
                 if a not in inner and a not in carried}
        if any(isinstance(x, MemoryBox) for x in given.values()) or any(
                isinstance(n, Op) and reads_and_writes(n)[1] for n in walk(tuple(body))):
            raise NotSideBySide
        values = [m.get(self.node.inits[i]) for i in order]
        if self.count * len(body) > MOST_WRITTEN and not self.is_known(group, body):
            return self.by_scan(order, values, body, given, started)
        starts: list[list[Any]] = []
        for t in range(self.count):
            starts.append(values)
            for a, x in given.items():
                m.env[a] = self.at(x, t)
            for i, v in zip(order, values, strict=True):
                m.env[self.node.carried[i].value] = m.spread(self.node.carried[i].type, v)
            m.run(tuple(body))
            on = None if self.wide.mask is None else self.at(self.wide.mask, t)
            new = [m.get(self.node.yields[i]) for i in order]
            values = new if on is None or on.all() else [
                m.choose(on, x, m.env[self.node.carried[i].value])
                for i, x in zip(order, new, strict=True)]
        self.wide.steps = max(self.wide.steps, m.steps)
        if started:
            for k, i in enumerate(order):
                self.begin_with(i, self.stacked(i, [row[k] for row in starts]))
        return dict(zip(order, values, strict=True))

    def by_scan(self, order: list[int], values: list[Any], body: list[Node],
                given: dict[SSAValue, Any], started: bool) -> dict[int, Any]:
        """As by_steps, by the graph's scan."""
        m, on = self.m, self.wide.mask
        kinds = [self.node.carried[i].type for i in order]
        if any(k.dtype.kind == "float" and k.dtype.bits <= 8 for k in kinds):
            raise NotSideBySide  # what registers hold is wider than the type
        given = {a: x.whole() if isinstance(x, BlockedTile) else x for a, x in given.items()}
        moving = {a: self.sequence(x) for a, x in given.items()}
        m.env.update({a: self.at(given[a], 0) for a, found in moving.items() if found is None})
        each = {a: found for a, found in moving.items() if found is not None}
        taken = None if on is None else self.sequence(on)
        xs = [x for x, _ in each.values()] + ([] if taken is None else [taken[0]])

        def step(index: Tensor, *given: Tensor) -> list[Tensor]:
            held, rest = list(given[:len(order)]), list(given[len(order):])
            for i, v in zip(order, held, strict=True):
                m.env[self.node.carried[i].value] = v
            for (a, (_, build)), x in zip(each.items(), rest, strict=False):
                m.env[a] = build(x)
            m.run(tuple(body))
            new = [m.get(self.node.yields[i]) for i in order]
            if taken is not None:
                new = [m.choose(rest[-1], x, v) for x, v in zip(new, held, strict=True)]
            found = [self.apart(x, k) for x, k in zip(new, kinds, strict=True)]
            return [*found, *held] if started else found

        first = [self.apart(v, k) for v, k in zip(values, kinds, strict=True)]
        made = hooks.scan.get()(step, first, xs, self.count, m.name)
        for i, rows in zip(order, made[len(order):], strict=False):
            self.begin_with(i, F.moveaxis(rows, 0, self.axis))
        return dict(zip(order, made, strict=False))

    def apart(self, x: Any, kind: Any) -> Tensor:
        """A carried value of all groups, [*grid, *tile]."""
        shape = shape_of(kind) or (self.m.lanes if is_lane(kind) else 1,)
        return F.broadcast_to(_as(self.m.recorded(x, len(shape)), kind), (*self.m.grid, *shape))

    def sequence(self, x: Any) -> tuple[Tensor, Callable] | None:
        """A value of all iterations as a sequence, and what makes one of its elements a value
        again; None where it is the same in all of them."""
        if isinstance(x, BlockedTile):
            if self.part not in x.parts:
                return None
            x = x.whole().isolated(self.part)
            at = x.form.index((self.part,))
            form, shape = (*x.form[:at], *x.form[at + 1:]), x.shape
            return F.moveaxis(x.tensor, at, 0), lambda y: BlockedTile(y, form, shape, self.m.grid)
        if isinstance(x, Tensor):
            return None if x.shape[self.axis] == 1 else (
                F.moveaxis(x, self.axis, 0), lambda y: y)
        if not isinstance(x, np.ndarray) or len(x) == 1:
            return None
        every = x.reshape(*self.m.grid, self.count, *x.shape[1:])
        return as_tensor(np.ascontiguousarray(np.moveaxis(every, self.axis, 0))), lambda y: y

    def stacked(self, i: int, rows: list[Any]) -> Any:
        """A value of each iteration as one of all."""
        m, shape = self.m, shape_of(self.node.carried[i].type)
        if all(isinstance(x, np.ndarray) for x in rows):
            first = (m.count, *(1,) * (rows[0].ndim - 1))  # a number may come to differ by lanes
            full = np.broadcast_shapes(first, *(x.shape for x in rows))
            known = np.stack([np.broadcast_to(x, full) for x in rows], axis=1)
            return known.reshape(-1, *known.shape[2:])
        if any(isinstance(x, BlockedTile) for x in rows) and not any(
                isinstance(x, Tensor) for x in rows):
            blocks = [x.whole() if isinstance(x, BlockedTile) else m.over_grid(np.asarray(x))
                      for x in rows]
            made, form = aligned(blocks, shape)
            full = np.broadcast_shapes(*(x.shape for x in made if isinstance(x, Tensor)))
            each = [F.broadcast_to(_as(x, self.node.carried[i].type), full) for x in made]
            return BlockedTile(F.stack(each), ((self.part,), *form), shape, self.wide.grid)
        tensors = [m.recorded(x, len(shape) or None) for x in rows]
        full = np.broadcast_shapes(*(x.shape for x in tensors))
        return F.stack([F.broadcast_to(x, full) for x in tensors], axis=self.axis)

    # --- values of all iterations -----------------------------------------------------------------
    def at(self, x: Any, t: int) -> Any:
        """A value of one iteration."""
        if isinstance(x, BlockedTile):
            if self.part in x.parts:
                x = x.isolated(self.part)
                at = x.form.index((self.part,))
                cut = (*(slice(None),) * at, slice(t, t + 1))
                form = (*x.form[:at], (), *x.form[at + 1:])
                x = x.through(lambda b: BlockedTile(
                    b.isolated(self.part).tensor[cut], form, b.shape, b.grid))
            return self.outer(x)
        if isinstance(x, Tensor):
            return x[(*(slice(None),) * self.axis, min(t, x.shape[self.axis] - 1))]
        return self.m.narrowed(x, t, self.count)

    def lines(self, i: int, f: Callable, *args: Any) -> Any:
        """A function of tensors along the axis of the iterations: f(axis, *tensors)."""
        kind = self.node.carried[i].type
        shape, wide = shape_of(kind), self.wide
        if any(isinstance(a, BlockedTile) for a in args) and not any(
                isinstance(a, Tensor) for a in args):
            known = [a.whole() if isinstance(a, BlockedTile) else wide.over_grid(np.asarray(a))
                     for a in args]
            made, form = aligned(known, shape, (self.part,))
            if (self.part,) not in form:
                made = [F.expand_dims(x, 0) if isinstance(x, Tensor) else x for x in made]
                form = ((self.part,), *form)
            axis = form.index((self.part,))
            full = list(np.broadcast_shapes(*(x.shape for x in made if isinstance(x, Tensor))))
            full[axis] = self.count
            each = self.filled(kind, made, tuple(full))
            return BlockedTile(f(axis, *each), form, shape, wide.grid)
        tensors = [wide.recorded(a, len(shape) or None) for a in args]
        full = list(np.broadcast_shapes(*(x.shape for x in tensors)))
        full[self.axis] = self.count
        return f(self.axis, *self.filled(kind, tensors, tuple(full)))

    def filled(self, kind: Any, xs: Sequence[Any], shape: tuple[int, ...]) -> list[Tensor]:
        if np.prod(shape, dtype=float) > MOST_STARTS:
            raise NotSideBySide
        return [F.broadcast_to(_as(x, kind), shape) for x in xs]


def _as(x: Any, kind: Any) -> Tensor:
    numeric = as_type(kind.dtype)
    x = x if isinstance(x, Tensor) else known_tensor(np.asarray(x, array_dtype(kind.dtype)))
    return x if x.type == numeric else F.cast(x, numeric)


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1:])


def of_shape(x: Any, shape: tuple[int, ...], n: int) -> Any:
    """A sum of terms as a tile of a shape: what is added may be a column, or a number. n: axes of
    the grid."""
    if not shape:
        return x
    if isinstance(x, BlockedTile):
        form = tuple(tuple(p for p in group if x.extent(p) > 1) for group in x.form)
        return x if x.shape == shape else x.relabelled(form, shape, x.grid)
    lead = n if isinstance(x, Tensor) else 1
    if tuple(x.shape[lead:]) == shape:
        return x
    if x.ndim == lead + 1 and len(shape) > 1:  # a number
        x = x.reshape(*x.shape[:lead], *(1,) * len(shape))
    spread = F.broadcast_to if isinstance(x, Tensor) else np.broadcast_to
    return spread(x, (*x.shape[:lead], *shape))


def _is_zero(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic) and not np.any(x)


def _summed(x: BlockedTile, part: int) -> BlockedTile:
    """A sum along an axis of the tile, and along a part of the grid."""
    assert x.summed is not None
    whole, axis = x.summed
    y = over(F.sum, whole, (part, axis))
    names = {k: k - 1 for k in range(axis + 1, len(whole.shape))}
    return y.renamed(names, (*whole.shape[:axis], *whole.shape[axis + 1:]))


def _product_from(axis: int, x: Tensor) -> Tensor:
    """Of each element and those behind it."""
    return F.flip(F.cumprod(F.flip(x, axis), axis=axis), axis)


def _product_behind(axis: int, x: Tensor) -> Tensor:
    """Of those behind each element."""
    cut = (slice(None),) * axis
    one = F.full((*x.shape[:axis], 1, *x.shape[axis + 1:]), 1.0, x.type)
    return F.concatenate([_product_from(axis, x[(*cut, slice(1, None))]), one], axis)


# --- what needs what ------------------------------------------------------------------------------
RUNNING: dict[str, tuple[Callable, float]] = {"maximum": (F.cummax, -np.inf),
                                              "minimum": (F.cummin, np.inf)}


def reads_of(node: Node) -> list[SSAValue]:
    """Values from outside of a node that it or its regions read."""
    inner = {d.value for n in walk((node,)) for d in outs_of(n)}
    inner |= {n.var.value for n in walk((node,)) if isinstance(n, For)}
    return [x for n in walk((node,)) for x in operands(n)
            if isinstance(x, SSAValue) and x not in inner]


def dependences(loop: For) -> tuple[list[set[int]], list[set[int]]]:
    """Which carried values each node of the body needs, through memory too, and which each carried
    value needs for its next one."""
    of: dict[Any, set[int]] = {d.value: {i} for i, d in enumerate(loop.carried)}
    roots = memory_roots(loop.body)
    accesses = [[reads_and_writes(n) for n in walk((node,)) if isinstance(n, Op)]
                for node in loop.body]
    written = {roots.get(x, x) for one in accesses for _, ws in one for x in ws}
    needs = []
    for node, one in zip(loop.body, accesses, strict=True):
        memory = {roots.get(x, x) for pair in one for xs in pair for x in xs} & written
        need = set().union(*(of.get(x, set()) for x in (*reads_of(node), *memory)))
        for x in (*(d.value for d in outs_of(node)), *memory):
            of[x] = of.get(x, set()) | need
        needs.append(need)
    return needs, [of.get(y, set()) for y in loop.yields]


__all__ = ["side_by_side"]
