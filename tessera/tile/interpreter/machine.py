"""Runs Tile IR on NumPy: the meaning of the language.

A batch of groups runs in lockstep. A scalar is an array [1|G, 1|L], a tile [1|G, *shape], a view or
buffer a MemoryBox. Where control differs between lanes or groups, a mask [G, 1|L] says who takes
part (None: all); values of the others are kept. Ops that touch memory, order or ids have a `run` in
their record and get this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tessera.errors import NumericsError, SourceLine
from tessera.numerics import fold_in
from tessera.tile.interpreter.access_costs import Pattern
from tessera.tile.interpreter.async_copies import Copies
from tessera.tile.interpreter.blame import Blame
from tessera.tile.interpreter.memory import Changes, Memory, MemoryBox
from tessera.tile.interpreter.progress import GroupThread, Watch
from tessera.tile.interpreter.sanitizer import GROUP, AccessBatch, Sanitizer
from tessera.tile.interpreter.wrapping import tell_wrapped, wraps
from tessera.tile.ir.errors import DivergenceError, KernelError
from tessera.tile.ir.ir import Const, For, If, Node, Op, Operand, SSAValue, While
from tessera.tile.ir.numpy_values import array_dtype, constant
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import Scalar, TileType, is_lane
from tessera.tile.passes.random_draws import ROUNDING

Mask = np.ndarray | None


class SanitizerReport:
    """What a run under the sanitizer found besides errors. checked: whether there was one."""

    def __init__(self, checked: bool = False) -> None:
        self.checked = checked
        self.patterns: dict[Any, Pattern] = {}
        self.nan_sources: list[tuple[str, SourceLine | None]] = []
        self.wrapped: set[tuple[str, SourceLine | None]] = set()  # integers that were told
        self.printed: list[str] = []


class Machine:
    """One batch of groups. groups: their linear numbers; axes: extents of the launch grid."""

    def __init__(self, groups: np.ndarray, lanes: int, axes: tuple[int, ...],
                 env: dict[SSAValue, Any], *, sanitizer: Sanitizer | None = None,
                 report: SanitizerReport | None = None, key: Any = 0, raise_nan: bool = False,
                 blame: Blame | None = None, changes: Changes | None = None,
                 turns: GroupThread | None = None, may_wait: bool = False):
        """changes: where writes that change something are counted, None: nobody asks. turns: where
        groups take turns. may_wait: a loop reads what other groups may write."""
        self.groups, self.lanes, self.axes = groups[:, None], lanes, axes  # [G, 1]
        self.env = dict(env)
        self.mask: Mask = None
        self.apart = 0  # conditions around this node that differ between lanes by their type
        self.sanitizer, self.report = sanitizer, report or SanitizerReport()
        self.launch_key, self.key = key, fold_in(key, ROUNDING)  # key: by which stores round
        self.raise_nan, self.blame = raise_nan, blame
        self.changes, self.looped = changes or Changes(), changes is not None
        self.turns, self.may_wait = turns, may_wait
        self.where: SourceLine | None = None  # the line that runs
        self.loops = 0  # around it
        self.epoch = np.zeros(len(groups), np.int32)
        self.sent = np.zeros(len(groups), np.int64)  # words from groups of its cluster
        self.copies = Copies(self)

    # --- values -------------------------------------------------------------------------------
    def get(self, x: Operand) -> Any:
        return constant(x.value, x.dtype) if isinstance(x, Const) else self.env[x]

    @property
    def count(self) -> int:
        return len(self.groups)

    def lane_ids(self) -> np.ndarray:
        return np.arange(self.lanes, dtype=np.int32)[None, :]

    # --- nodes --------------------------------------------------------------------------------
    def run(self, nodes: Sequence[Node]) -> None:
        if self.turns is not None:
            self.turns.check()
        for node in nodes:
            self.where = node.where or self.where
            if isinstance(node, Op):
                self.op(node)
            elif isinstance(node, If):
                self.if_(node)
            elif isinstance(node, For):
                self.for_(node)
            else:
                self.while_(node)

    def op(self, op: Op) -> None:
        record = OPS[op.name]
        args = [self.get(a) for a in op.args]
        if record.group:
            self.require_whole_groups(op)
        if record.run is not None:
            result = record.run(self, op, *args)
        else:
            result = self.pure(record.numpy, op, args)
        if not op.outs:
            if self.blame is not None:
                self.blame.op(self, op, args)
            return
        for made, value in zip(op.outs, result if len(op.outs) > 1 else (result,), strict=True):
            self.env[made.value] = self.spread(made.type, value)
        if self.sanitizer is not None and record.run is None:
            self.watch_nan(op, args)
            self.watch_integers(op, args)
        if self.blame is not None:
            self.blame.op(self, op, args)

    def spread(self, type: Any, value: Any) -> Any:
        """A lane scalar has a value for each lane, also where all are equal: whether something
        happens once per group or by each lane is decided by types, not by chance."""
        if is_lane(type) and value.shape[1] != self.lanes:
            return np.broadcast_to(value, (value.shape[0], self.lanes))
        return value

    def pure(self, meaning: Callable | None, op: Op, args: list[Any]) -> Any:
        """The NumPy meaning, in the type that the rule gave."""
        assert meaning is not None
        first = op.outs[0].type
        if isinstance(first, TileType):
            args = [self.widen(a, len(first.shape)) for a in args]
        result = meaning(*args, **op.attr)
        many = result if len(op.outs) > 1 else (result,)
        held = [np.asarray(r).astype(array_dtype(d.type.dtype), copy=False)
                for r, d in zip(many, op.outs, strict=True)]
        return held if len(op.outs) > 1 else held[0]

    @staticmethod
    def widen(x: Any, rank: int) -> Any:
        """A uniform scalar [1|G, 1] beside tiles of a rank; tiles stay as they are."""
        if not isinstance(x, np.ndarray) or x.ndim == rank + 1 or x.shape[1:] != (1,):
            return x
        return x.reshape(x.shape[:1] + (1,) * rank)

    def if_(self, node: If) -> None:
        cond = self.get(node.cond)
        outer, apart = self.mask, self.apart
        self.apart += cond.shape[1] > 1
        results: list[list[Any] | None] = []
        for on, body, values in ((cond, node.then, node.thens), (~cond, node.orelse, node.elses)):
            self.mask = masked(outer, on)
            results.append(self.side(on, body, values) if self.anyone() else None)
        self.mask, self.apart = outer, apart
        then, orelse = results
        for i, made in enumerate(node.outs):
            if then is None or orelse is None:
                one = then if then is not None else orelse
                value = one[i] if one is not None else self.nothing(made.type)
            else:
                value = self.choose(cond, then[i], orelse[i])
            self.env[made.value] = self.spread(made.type, value)
            if self.blame is not None:
                self.blame.passes(made.value, (node.thens[i], node.elses[i]))

    def side(self, on: Any, body: Sequence[Node], values: Sequence[Operand]) -> list[Any]:
        """What one side of a branch gives, which is taken where `on` holds."""
        self.run(body)
        return [self.get(v) for v in values]

    def choose(self, cond: Any, x: Any, y: Any) -> Any:
        return choose(cond, x, y)

    @staticmethod
    def nothing(type: Any) -> np.ndarray:
        """A value for lanes that do not exist here: the enclosing mask is empty."""
        shape = (1, *type.shape) if isinstance(type, TileType) else (1, 1)
        return np.zeros(shape, array_dtype(type.dtype))

    def anyone(self) -> bool:
        return self.mask is None or bool(self.mask.any())

    def for_(self, node: For) -> None:
        assert isinstance(node.var.type, Scalar)
        held = array_dtype(node.var.type.dtype)
        at, hi, step = (self.get(x).astype(held) for x in (node.lo, node.hi, node.step))
        outer, apart = self.mask, self.apart
        self.apart += max(x.shape[1] for x in (at, hi, step)) > 1
        self.bind(node.carried, [self.get(i) for i in node.inits], node.inits)
        while True:
            on = at < hi if step.flat[0] > 0 else at > hi
            self.mask = masked(outer, on)
            if not self.anyone():
                break
            self.env[node.var.value] = at
            self.loops += 1
            self.run(node.body)
            self.loops -= 1
            self.end_iteration(node.carried, node.yields, on)
            at = at + step
        self.mask, self.apart = outer, apart

    def while_(self, node: While) -> None:
        outer, apart = self.mask, self.apart
        self.bind(node.carried, [self.get(i) for i in node.inits], node.inits)
        on = np.ones((1, 1), bool)
        watch = Watch(self, node)
        while True:
            watch.begin()
            self.loops += 1
            self.run(node.test)
            self.loops -= 1
            on = on & self.get(node.cond)
            self.apart = apart + (on.shape[1] > 1)
            self.mask = masked(outer, on)
            if not self.anyone():
                break
            self.loops += 1
            self.run(node.body)
            self.loops -= 1
            self.end_iteration(node.carried, node.yields, on)
            watch.end()
        self.mask, self.apart = outer, apart

    def bind(self, carried: Sequence[Any], values: list[Any], sources: Sequence[Operand]) -> None:
        for made, value in zip(carried, values, strict=True):
            self.env[made.value] = self.spread(made.type, value)
        if self.blame is not None:
            for made, source in zip(carried, sources, strict=True):
                self.blame.passes(made.value, (source,))

    def end_iteration(self, carried: Sequence[Any], yields: Sequence[Operand],
                      on: np.ndarray) -> None:
        """End of an iteration: those who took part get the new values."""
        new = [self.get(y) for y in yields]
        if on.all():
            self.bind(carried, new, yields)
            return
        self.bind(carried, [self.choose(on, value, self.env[made.value])
                            for made, value in zip(carried, new, strict=True)], yields)

    # --- who takes part -----------------------------------------------------------------------
    def require_whole_groups(self, op: Op) -> None:
        mask = self.mask
        if mask is None or mask.shape[1] == 1:
            return
        some = mask.any(axis=1) & ~mask.all(axis=1)
        if some.any():
            g = int(np.argmax(some))
            raise DivergenceError(
                f"{op.name} needs all lanes of the group, but of group {int(self.groups[g, 0])} "
                f"only {int(mask[g].sum())} of {self.lanes} arrive", where=op.where,
                hint="move it out of the branch or loop that depends on the lane")

    def active(self, shape: tuple[int, ...]) -> np.ndarray:
        """The mask as [G, L] of an access of that shape ([1|G, 1|L])."""
        lanes = max(shape[1], 1 if self.mask is None else self.mask.shape[1],
                    self.lanes if self.apart else 1)
        full = np.ones((1, 1), bool) if self.mask is None else self.mask
        return np.broadcast_to(full, (self.count, lanes))

    def active_groups(self) -> np.ndarray:
        """[G] whether the group takes part in a whole-group op."""
        if self.mask is None:
            return np.ones(self.count, bool)
        return np.broadcast_to(self.mask.any(axis=1), (self.count,))

    # --- checks -------------------------------------------------------------------------------
    def access(self, memory: Memory, address: np.ndarray, group: np.ndarray, lane: np.ndarray,
               where: SourceLine | None) -> AccessBatch | None:
        """The record of a flat access for the sanitizer; None when it is off. group: rows."""
        if self.sanitizer is None:
            return None
        return AccessBatch(memory, address, self.groups[group, 0].astype(np.int32), lane,
                           self.epoch[group], self.sanitizer.site(where, self.loops > 0), where)

    def tile_access(self, place: MemoryBox, address: np.ndarray, on: np.ndarray, lane: int,
                    where: SourceLine | None) -> AccessBatch | None:
        if self.sanitizer is None:
            return None
        row = np.broadcast_to(np.arange(self.count).reshape((-1,) + (1,) * (address.ndim - 1)),
                              address.shape)[on]
        lanes = np.full(row.shape, lane, np.int32)
        return self.access(place.memory, address[on], row, lanes, where)

    def watch_nan(self, op: Op, args: list[Any]) -> None:
        """Notes the op that made a NaN out of numbers."""
        for made in op.outs:
            value = self.env[made.value]
            if value.dtype.kind != "f" or not np.isnan(value).any():
                continue
            if any(isinstance(a, np.ndarray) and a.dtype.kind == "f" and np.isnan(a).any()
                   for a in args):
                continue
            if self.mask is not None and not (np.isnan(value) & self.wide_mask(value)).any():
                continue
            self.report.nan_sources.append((op.name, op.where))
            if self.raise_nan:
                raise NumericsError(f"{op.name} makes NaN out of numbers", where=op.where,
                                    hint="look at its operands: inf - inf, 0 / 0, sqrt(-1)")

    def watch_integers(self, op: Op, args: list[Any]) -> None:
        """Tells of a sum or product of integers that wraps."""
        if len(op.outs) != 1 or (op.name, op.where) in self.report.wrapped:
            return
        kind, value = op.outs[0].type, self.env[op.outs[0].value]
        if isinstance(kind, TileType):
            args = [self.widen(a, len(kind.shape)) for a in args]
        wrong = wraps(op, args, value)
        if wrong is None:
            return
        if self.mask is not None:
            wrong = wrong & self.wide_mask(value)
        if wrong.any():
            self.report.wrapped.add((op.name, op.where))
            tell_wrapped(op, args, wrong, value)

    def wide_mask(self, value: np.ndarray) -> np.ndarray:
        assert self.mask is not None
        if value.ndim == 2 and self.mask.shape[1] == value.shape[1]:
            return self.mask
        return self.mask.any(axis=1).reshape((-1,) + (1,) * (value.ndim - 1))


def masked(mask: Mask, on: np.ndarray) -> Mask:
    """The mask of those of `mask` for whom `on` holds."""
    out = on if mask is None else mask & on
    return None if out.all() else out


def choose(cond: np.ndarray, x: Any, y: Any) -> Any:
    """x where cond [1|G, 1|L] holds, else y; for scalars and tiles."""
    if x is y:
        return x
    if isinstance(x, MemoryBox):
        raise KernelError("a view or buffer differs between groups after a branch",
                          hint="index a list of buffers by a stage number instead")
    rank = x.ndim
    if rank != 2 or (cond.shape[1] == 1):
        cond = cond.reshape(cond.shape[:1] + (1,) * (rank - 1))
    return np.where(cond, x, y)


__all__ = ["GROUP", "Machine", "SanitizerReport", "masked", "choose"]
