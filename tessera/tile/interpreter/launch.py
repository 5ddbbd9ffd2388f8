"""Runs a specialisation on the interpreter: grid, batches of groups, results."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from math import prod
from typing import Any

import numpy as np

from tessera import config, hooks
from tessera.dims import Dim
from tessera.errors import ArgumentError, SourceLine, user_line
from tessera.lazy_dataclass import dataclass
from tessera.numerics import i64
from tessera.numerics.random_state import next_launch
from tessera.runtime.blas_threads import single_thread
from tessera.runtime.generations import GENERATIONS
from tessera.tensor import Tensor as Array
from tessera.tile.interpreter import aliasing
from tessera.tile.interpreter.arguments import Bound, allocate
from tessera.tile.interpreter.machine import Machine, SanitizerReport
from tessera.tile.interpreter.memory import Changes, Memory, MemoryBox
from tessera.tile.interpreter.progress import GroupThread, Standstill, endless, take_turns, waits
from tessera.tile.interpreter.sanitizer import Sanitizer
from tessera.tile.ir.ir import Function, Op, While, definitions, walk
from tessera.tile.ir.numpy_values import constant
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.schedule import Schedule
from tessera.tile.ir.types import Buffer, GlobalTensor, Scalar, TileType
from tessera.tile.passes.cluster_groups import cluster_of
from tessera.tile.passes.contracted_extents import matmuls_of_other_extents
from tessera.tile.passes.part_blocks import beyond_parts, parts_of, refusal
from tessera.tile.passes.random_draws import draws
from tessera.tile.passes.store_extents import (
    stores_by_groups,
    stores_by_other_extents,
    stores_with_gaps,
)
from tessera.tile.passes.thread_guards import Guards, LaneGuard, strides
from tessera.tile.passes.written_arguments import require_writable, written_parameters

_BUDGET = 1 << 21  # elements of the largest value that a batch of groups may hold
MAX_LANES = max(g.group_threads for g in GENERATIONS.values())  # of a CUDA block
MOST_GROUPS = 2**31  # of a grid of CUDA's
MOST_LANES = 2**31  # of a launch whose lanes are numbered


@dataclass(frozen=True)
class Config:
    """k[groups, lanes]: None leaves the choice to the kernel.

    written: plain numbers, k[4, 2]. They are the grid of a kernel that uses as many axes, else
    groups and lanes: Python cannot tell k[4, 2] from k[(4, 2)].
    """

    groups: tuple[int, ...] | None = None
    lanes: int | None = None
    written: tuple[int, ...] | None = None

    def of(self, function: Function) -> Config:
        """What it means for a kernel. Raises ArgumentError for too many numbers."""
        if self.written is None:
            return self
        count, axes = len(self.written), axes_of(function)
        if count == axes or (count == 2 and axes > 2):
            return Config(self.written)
        if count == 2:
            return Config(self.written[:1], self.written[1])
        name, said = function.name, ", ".join(map(str, self.written))
        own = ", ".join(map(str, self.written[:axes]))
        raise ArgumentError(
            f"{name} uses {axes} {'axis' if axes == 1 else 'axes'} of the grid, the launch "
            f"[{said}] has {count}", where=user_line(), hint=f"{name}[groups, lanes](...)"
            if axes < 2 else f"{name}[({own}), {self.written[axes]}](...)")


@dataclass(frozen=True)
class Specialisation:
    """What a call runs: the Tile IR for its arguments with a schedule, in a grid of groups."""

    schedule: Schedule
    function: Function
    lanes: int
    grid: tuple[int, ...]


def grid_of(function: Function, bound: Bound, config_: Config, lanes: int) -> tuple[int, ...]:
    """Extents of the launch grid (Q41 to Q43)."""
    config_ = config_.of(function)
    grid = _grid_of(function, bound, config_, lanes)
    said = config_.lanes or function.lanes or function.launch == "one" and config_.groups
    if not said:
        _require_lanes(function, bound, lanes, None if config_.groups else prod(grid))
    _require_once(function, bound, lanes, prod(grid))
    if parts := parts_of(function):
        number = _guards(function, bound, "linear_id").number
        for beyond in beyond_parts(function, parts, bound.sizes, number,
                                   lambda text: extent(text, bound)):
            raise refusal(beyond)
    if prod(grid) >= MOST_GROUPS:
        raise ArgumentError(f"{function.name} is launched in {prod(grid)} groups, a launch has at "
                            f"most {MOST_GROUPS - 1}", where=user_line())
    if prod(grid) * lanes > MOST_LANES:
        _require_no_numbers(function, prod(grid), lanes)
    return grid


def _require_no_numbers(function: Function, groups: int, lanes: int) -> None:
    """Numbers of lanes are int32: with more of them nobody asks."""
    for n in walk(function.body):
        if isinstance(n, Op) and n.name == "linear_id":
            raise ArgumentError(
                f"{function.name}: ts.tile.linear_id() counts to {MOST_LANES - 1}, the launch has "
                f"{groups} groups of {lanes} lanes", where=n.where or user_line(),
                hint="give each lane several elements: for i in ts.tile.range(0, N, 1024), or a "
                     "tensor of two axes")


def _grid_of(function: Function, bound: Bound, config_: Config, lanes: int) -> tuple[int, ...]:
    given = config_.groups
    if function.launch == "given":
        if given is None:
            names = [f"groups_{i}" for i in range(axes_of(function))] if axes_of(
                function) > 1 else ["groups"]
            raise ArgumentError(f"{function.name} uses ts.tile.group_id(axis): it needs a grid",
                                hint=f"{function.name}[{', '.join(names)}](...), or "
                                "@ts.kernel(grid=...)", where=user_line())
        _require_axes(function, given)
        return given
    if function.launch == "one":
        if given is not None and prod(given) != 1:
            if function.result[0] == "scalar":
                raise ArgumentError(f"{function.name} returns a number: it runs as one group, not "
                                    f"{prod(given)}", where=user_line())
            return given
        return (1,)
    if function.launch == "elements":
        return given or (-(-_elements(function, bound, lanes) // lanes),)
    counts = [-(-(extent(a.dim, bound) - extent(a.lo, bound)) // a.block) for a in function.grid]
    counts = [max(0, n) for n in counts]
    if given is None or prod(given) == prod(counts):
        return tuple(counts)
    return _strided(function, counts, prod(given))


def _guards(function: Function, bound: Bound, base: str, lanes: int | None = None) -> Guards:
    """The guards on an id. lanes: of a group, of a launch that is to be chosen."""
    known = {p.value: bound.sizes[p.value.name] for p in function.params
             if p.role == "dim" and p.value.name in bound.sizes}
    for p in function.params:
        if p.role == "argument" and isinstance(p.type, Scalar) and p.type.dtype.kind in (
                "int", "uint"):
            known[p.value] = int(np.asarray(bound.values[p.value.name]).item())
    return Guards(function, known, lambda text: extent(text, bound), base, lanes)


def _elements(function: Function, bound: Bound, lanes: int) -> int:
    """Lanes of a launch whose lanes are numbered: for the largest extent, and for every guard. A
    kernel that numbers its groups alone has as many as what begins at their numbers asks for."""
    groups = [a.lanes * lanes for a in _guards(function, bound, "group_id", lanes)]
    if groups and not any(isinstance(n, Op) and OPS[n.name].family == "ids" and (
            OPS[n.name].by_thread) for n in walk(function.body)):
        return max(groups)
    asked = [a.lanes for a in _guards(function, bound, "linear_id", lanes)]
    return max([*bound.texts.values(), *asked, *groups], default=1)


def scalars_in_grid(function: Function, bound: Bound) -> frozenset[str]:
    """Number parameters on which the grid of a launch that is not given depends."""
    if function.launch != "elements":
        return frozenset()
    found: set[str] = set()
    for base in ("linear_id", "group_id"):
        guards = _guards(function, bound, base, MAX_LANES)
        _ = [*guards]
        found |= guards.scalars
    return frozenset(found)


def _require_lanes(function: Function, bound: Bound, lanes: int, groups: int | None) -> None:
    """The lanes reach as far as the guards on their numbers go, or a loop goes on from them.

    groups: how many there are, where the call does not say it; None: it does.
    """
    there = {"local_id": lanes}
    if groups is not None and function.launch in ("one", "axes"):
        there["linear_id"] = groups * lanes
    for base, count in there.items():
        for asked in () if strides(function, base) else _guards(function, bound, base):
            if asked.lanes > count:
                raise _too_few_lanes(function, lanes, groups, base, asked)
    strip = _guards(function, bound, "group_id").strip()
    if strip is not None and strip.lanes > lanes:
        raise ArgumentError(
            f"{function.name} numbers {strip.lanes} elements for each group and is launched in "
            f"groups of {lanes} lanes: the rest would not be done",
            where=strip.where or user_line(), hint=f"say how many lanes, {function.name}[groups, "
            f"{strip.lanes}](...), or number them by ts.tile.linear_id()")


def _require_once(function: Function, bound: Bound, lanes: int, groups: int) -> None:
    """What the lanes add to memory is not added again by the next group."""
    again = _guards(function, bound, "group_id").added_again(lanes) if groups > 1 else None
    if again is not None:
        raise ArgumentError(
            f"{function.name} numbers {again.lanes} elements for each group and is launched in "
            f"groups of {lanes} lanes: this would be added twice, also by the next group",
            where=again.where or user_line(), hint=f"say how many lanes, {function.name}[groups, "
            f"{again.lanes}](...), or number them by ts.tile.linear_id()")


def _too_few_lanes(function: Function, lanes: int, groups: int | None, base: str, asked: LaneGuard
                   ) -> ArgumentError:
    name, hints = function.name, []
    how = f"in groups of {lanes} lanes"
    if function.launch == "one":
        how = f"as one group of {lanes} lanes"
    elif base == "linear_id":
        along = " and ".join(a.dim for a in function.grid)
        how = f"as {groups} groups of {lanes} lanes, one for each block along {along}"
    elif function.launch != "axes" and asked.lanes <= MAX_LANES:
        hints.append(f"say how many lanes, {name}[groups, {asked.lanes}](...)")
    if function.launch == "one" and function.result[0] != "scalar":
        hints.append("number the lanes of the whole launch, ts.tile.linear_id()")
    first, step = "local_id()", "ts.tile.group_size()"
    if base == "linear_id" and function.launch == "axes":
        first, step = "linear_id()", "ts.tile.num_groups() * ts.tile.group_size()"
    hints.append(f"let each go on: for i in range(ts.tile.{first}, N, {step})")
    return ArgumentError(
        f"{name} is launched {how}, and this asks for {asked.lanes}: the rest would not be done",
        where=asked.where or user_line(), hint=", or ".join(hints))


def _require_axes(function: Function, grid: tuple[int, ...]) -> None:
    """The grid has every axis that the kernel asks for."""
    axes, have = axes_of(function), len(grid)
    if axes > have:
        numbers = ", ".join([*map(str, grid), *(f"groups_{i}" for i in range(have, axes))])
        raise ArgumentError(f"{function.name} uses axis {axes - 1} of the grid, the launch has "
                            f"{have} {'axis' if have == 1 else 'axes'}", where=user_line(),
                            hint=f"{function.name}[{numbers}](...), or with a number of lanes "
                            f"{function.name}[({numbers}), lanes](...)")


def axes_of(function: Function) -> int:
    """How many axes of the grid a kernel speaks of, by ts.tile.group_id(axis)."""
    asked = [n.attr["axis"] for n in walk(function.body) if isinstance(n, Op)
             and OPS[n.name].family == "ids" and n.attr.get("axis") is not None]
    return max(asked, default=-1) + 1 if function.launch == "given" else 0


def _strided(function: Function, counts: list[int], groups: int) -> tuple[int, ...]:
    """Another number of groups: only for a range that goes on by the number of groups."""
    strided = [i for i, a in enumerate(function.grid) if a.stride]
    rest = prod(n for i, n in enumerate(counts) if i not in strided)
    if len(strided) != 1 or not rest or groups % rest or not groups:
        raise ArgumentError(f"{function.name} has a grid of {counts} = {prod(counts)} groups, not "
                            f"{groups}", hint="leave out the number of groups", where=user_line())
    counts[strided[0]] = groups // rest
    return tuple(counts)


def extent(text: str, bound: Bound) -> int:
    """The value of an extent's text."""
    if text in bound.texts:
        return bound.texts[text]
    value = Dim.of(int(text) if text.lstrip("-").isdigit() else text)
    size = value.bind(bound.sizes) if isinstance(value, Dim) else value
    if isinstance(size, Dim):
        raise ArgumentError(f"the extent {text} has no value: nothing binds "
                            f"{', '.join(sorted(size.names))}", where=user_line())
    return size


def lanes_of(function: Function, config_: Config, default: int) -> int:
    """Lanes of a group; a kernel that returns a number fixes it by its shared array (Q43)."""
    config_ = config_.of(function)
    lanes = config_.lanes or default
    if function.result[0] == "scalar":
        shapes = [t.shape for t in definitions(function).values()
                  if isinstance(t, Buffer) and t.space == "shared" and len(t.shape) == 1]
        need = shapes[0][0] if shapes else lanes
        if config_.lanes is not None and config_.lanes != need:
            raise ArgumentError(f"{function.name} needs groups of {need} lanes, the extent of its "
                                f"shared array, not {config_.lanes}", where=user_line())
        lanes = need
    if not 1 <= lanes <= MAX_LANES:
        raise ArgumentError(f"{lanes} lanes in a group: 1 to {MAX_LANES} are possible",
                            where=user_line())
    return lanes


def run(function: Function, bound: Bound, config_: Config, default_lanes: int, name: str, *,
        sanitizer: Sanitizer | None = None, report: SanitizerReport | None = None,
        most: int | None = None, key: tuple[int, int] | None = None) -> tuple[Any, SanitizerReport]:
    """run_grid with the lanes and the grid of a launch."""
    lanes = lanes_of(function, config_, default_lanes)
    grid = grid_of(function, bound, config_, lanes)
    return run_grid(function, bound, lanes, grid, name, sanitizer, report, most, key)


def run_grid(function: Function, bound: Bound, lanes: int, grid: tuple[int, ...], name: str,
             sanitizer: Sanitizer | None = None, report: SanitizerReport | None = None,
             most: int | None = None, key: tuple[int, int] | None = None
             ) -> tuple[Any, SanitizerReport]:
    """Executes all groups; returns the call's result and the sanitizer's report.

    sanitizer: by default one that raises, when config.debug. report: where it is put, also when
    the run ends in an error. most: only so many groups. key: by which it draws, else that of the
    kernel's next launch.
    """
    env, outputs = _environment(function, bound)
    if sanitizer is None and config.debug:
        sanitizer = Sanitizer()
    written = written_parameters(function)
    require_writable(name, written, _originals(bound))
    if bound.storage:
        aliasing.require_views(name, bound, written)
    if sanitizer is not None:
        aliasing.mark(bound)
        _tell_other_extents(function, bound, grid)
        _tell_shared(bound, written)
    report = report or SanitizerReport(checked=sanitizer is not None)
    order = _order(function, grid, sanitizer is not None, most)
    if key is None:
        key = next_launch(bound.kernel or name) if draws(function) else (0, 0)
    with np.errstate(all="ignore"), single_thread, ExitStack() as watched:
        for watch in hooks.kernel_runs:
            watched.enter_context(watch(name))
        blame = None
        for sentinel in hooks.kernel_sentinels:
            blame = watched.enter_context(sentinel(
                function, bound, outputs,
                lambda other: run_grid(function, other, lanes, grid, name, key=key)[0]))
        run_groups(function, order, env, functools.partial(
            Machine, lanes=lanes, axes=grid, sanitizer=sanitizer, report=report, key=key,
            raise_nan=config.numerics == "raise", blame=blame), lanes, name, sanitizer)
    bound.write_back()
    return _result(function, bound, outputs), report


def _tell_other_extents(function: Function, bound: Bound, grid: tuple[int, ...]) -> None:
    """Stores by blocks of another extent, where the two differ, and by too few groups."""
    for s in stores_by_other_extents(function):
        have, reached = extent(s.dim, bound), extent(s.of, bound)
        if have == reached:
            continue
        what = (f"the last {have - reached} are left as they were" if have > reached else
                f"the last {reached - have} of those have no place and are dropped")
        _tell(s.where, f"{s.tensor} has {have} elements along axis {s.axis}, {s.dim}, and is "
              f"stored by blocks of {s.of} = {reached}: {what}. Let both have one name, {s.of}, or "
              f"go along {s.dim}, unless a part is meant")
    for g in stores_by_groups(function):
        have, groups = extent(g.dim, bound), prod(grid) if g.of is None else grid[g.of]
        if groups and groups * g.size < have:
            along = "" if g.of is None else f" along axis {g.of}"
            _tell(g.where, f"{g.tensor} has {have} elements along axis {g.axis}, {g.dim}, and the "
                  f"{groups} groups{along} of the launch store {g.size} each: the last "
                  f"{have - groups * g.size} are left as they were. {-(-have // g.size)} groups "
                  "reach the end, unless a part is meant")
    for gap in stores_with_gaps(function):
        _tell(gap.where, f"{gap.tensor} is stored {gap.size} elements at a time along axis "
              f"{gap.axis}, and the next ones begin {gap.step} further: {gap.step - gap.size} in "
              "between are left as they were, unless that is meant")
    for x, y, where in matmuls_of_other_extents(function):
        K, L = extent(x.dim, bound), extent(y.dim, bound)
        if K != L:
            _tell(where, f"the matmul sums along {x.dim} = {K} of {x.tensor} and {y.dim} = {L} of "
                  f"{y.tensor}: what {x.tensor if K > L else y.tensor} has beyond {min(K, L)} is "
                  "left out. Let both extents have one name, unless a part is meant")


def _tell_shared(bound: Bound, written: frozenset[str]) -> None:
    """Arguments that are written in the same memory."""
    for a, b in aliasing.same_cells(bound, written):
        _tell(user_line(), f"the arguments {a} and {b} share memory, and the kernel writes both: "
              "what is written last stays")


def _tell(where: SourceLine | None, message: str) -> None:
    at = where or SourceLine("", 0)
    warnings.warn_explicit(message, RuntimeWarning, at.file, at.line)


def _order(function: Function, grid: tuple[int, ...], shuffled: bool, most: int | None
           ) -> np.ndarray:
    """The numbers of the groups, those of a cluster one behind the other."""
    together = cluster_of(function)
    if prod(grid) % together:
        raise ArgumentError(f"{function.name} has clusters of {together} groups, not a grid of "
                            f"{prod(grid)}", hint="a multiple of that", where=user_line())
    order = np.arange(prod(grid), dtype=np.int64).reshape(-1, together)
    if shuffled:
        order = np.random.default_rng(int(config.seed)).permutation(order)
    return order[:None if most is None else -(-most // together)].ravel()


def _originals(bound: Bound) -> Iterator[tuple[str, bool, str]]:
    """(name, whether it may be written, library) of the caller's arrays."""
    for name, memory in bound.values.items():
        if isinstance(memory, Memory):
            target = bound.storage[name][0] if name in bound.storage else memory.flat
            array = target.buffer if isinstance(target, Array) else target
            library = type(bound.given[name]).__module__.partition(".")[0]
            yield name, array.flags.writeable, library


def run_groups(function: Function, order: np.ndarray, env: dict[Any, Any],
               machine: Callable[..., Machine], lanes: int, name: str,
               sanitizer: Sanitizer | None = None) -> None:
    """All groups, in batches that run in lockstep; each on its own where they wait for each other.

    Raises KernelError for a loop in which nothing can change, KeyboardInterrupt with the line.
    """
    looped = any(isinstance(n, While) for n in walk(function.body))
    changes = Changes() if looped else None
    may_wait = looped and len(order) > 1 and waits(function)
    memories = [p.memory for p in env.values() if isinstance(p, MemoryBox)]
    for memory in memories:
        memory.changes = changes
    before = [(m, m.flat.copy(), m.written) for m in memories] if may_wait else []
    running: list[Machine] = []
    if sanitizer is not None:
        sanitizer.begin(function, int(order.max(initial=-1)) + 1)

    def batch(part: np.ndarray, turns: GroupThread | None = None) -> None:
        running[:] = [machine(part, env=env, changes=changes, turns=turns, may_wait=may_wait)]
        running[0].run(function.body)

    def lockstep() -> bool:
        """Whether all is done; False where groups wait for each other."""
        try:
            for part in _batches(order, function, lanes):
                batch(part)
        except Standstill as still:
            if not may_wait:
                raise endless(still.where) from None
            return False
        return True

    try:
        if not lockstep():
            for memory, flat, written in before:
                memory.flat[...], memory.written, memory.shadow = flat, written, None
                if memory.alias is not None:
                    memory.alias.shared.shadow = None
            if sanitizer is not None:
                sanitizer.begin(function, int(order.max(initial=-1)) + 1)
            assert changes is not None
            take_turns(order, changes, lambda turn: batch(np.array([turn.number]), turn))
    except KeyboardInterrupt:
        where = running[0].where if running else None
        raise KeyboardInterrupt(f"{name} was interrupted" + (f" at {where}" if where else "")
                                ) from None


def _batches(order: np.ndarray, function: Function, lanes: int) -> list[np.ndarray]:
    """As many groups at once as keep the largest value small."""
    sizes = [lanes]
    for t in definitions(function).values():
        if isinstance(t, TileType):
            sizes.append(prod(t.shape))
        elif isinstance(t, Buffer):
            copies = lanes if t.space == "register" else 1
            sizes.append(copies * t.stages * prod(t.shape))
    together = cluster_of(function)
    many = max(1, _BUDGET // max(sizes) // together) * together
    return [order[i:i + many] for i in range(0, len(order), many)]


def _environment(function: Function, bound: Bound) -> tuple[dict[Any, Any], dict[str, Memory]]:
    env: dict[Any, Any] = {}
    outputs: dict[str, Memory] = {}
    for p in function.params:
        name = p.value.name
        if p.role == "dim":
            assert isinstance(p.type, Scalar)
            env[p.value] = constant(bound.sizes[name], p.type.dtype if p.type else i64)
        elif p.role == "output":
            assert isinstance(p.type, GlobalTensor)
            shape = tuple(extent(str(d), bound) for d in p.type.dims)
            array = allocate(shape, p.type.numeric, bool(config.debug))
            outputs[name] = Memory(name, shape, p.type.numeric, array.reshape(-1))
            env[p.value] = MemoryBox.whole(outputs[name])
        else:
            value = bound.values[name]
            env[p.value] = MemoryBox.whole(value) if isinstance(value, Memory) else value
    return env, outputs


def _result(function: Function, bound: Bound, outputs: dict[str, Memory]) -> Any:
    kind, *names = function.result
    if kind == "none":
        return None
    if kind == "param":
        found = tuple(bound.given[n] for n in names)
    elif kind == "scalar":
        found = tuple(outputs[n].read(np.array([0]))[0].item() for n in names)
    else:
        tensors = any(isinstance(v, Array) for v in bound.given.values())
        found = tuple(_tensor(outputs[n], tensors) for n in names)
    return found[0] if len(found) == 1 else found


def _tensor(memory: Memory, as_tensor: bool) -> Any:
    """A new tensor that the kernel returns, as our own or as an array of NumPy."""
    array = memory.flat.reshape(memory.shape)
    return Array(array, memory.numeric) if as_tensor or memory.numeric.dtype.packed else array
