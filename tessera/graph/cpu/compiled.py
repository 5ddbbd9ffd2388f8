"""The steps of a compiled graph: loops, library calls and views over one list of arrays.

Fused, planned and laid out once; a call walks the steps.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from ... import config, hooks
from ...errors import OutOfMemoryError
from ...runtime.blas_threads import single_thread
from ..interpret import call_node, located
from ..ir import Graph, Node, Value, elements
from ..schedule.describe import describe
from ..schedule.fuse import fuse
from ..schedule.groups import FusionGroup, call_group
from ..schedule.memory_plan import (
    MemoryPlan,
    by_last_use,
    fold_constants,
    numbers,
    place_in,
    plan_memory,
)
from . import blas
from .kernel import compile_loops
from .lower import LoweredLoop, lower
from .target import CPU
from .widen_matmuls import widen_matmuls

Step = Callable[[list], None]
NO_LIMIT = contextlib.nullcontext()
POISON = 0xFF
ONE_CALL = 64  # elements: NumPy takes as long for fewer, so that few in a body count as these
SHORT = 8  # elements of a run that is not worth NumPy's inner loop


class CompiledGraph:
    """Steps over an environment: a list with one array per value."""

    def __init__(self, graph: Graph, repeats: int = 1, donated: Sequence[int] = ()):
        """donated: inputs whose memory results may take; `overwritten` are those that lose it."""
        self.known, graph = fold_constants(widen_matmuls(graph))
        self.graph = graph
        self.units = _keep_small_apart(fuse(self.graph, CPU), repeats)
        self.plan: MemoryPlan = plan_memory(
            self.graph, self.units, self.known, CPU,
            donated=[self.graph.inputs[i] for i in donated])
        self.overwritten = frozenset(
            i for i in donated if self.graph.inputs[i] in self.plan.overwritten)
        self.slot: dict[Value, int] = {}
        for v in (*graph.given, *self.known):
            self._slot(v)
        self.n_inputs = len(graph.inputs)
        self.captures = [(self._slot(v), t) for v, t in graph.captures]
        self.numbers = numbers(self.known)
        self.steps: list[Step] = []
        self.multiplies = False  # whether BLAS, that has large products, must keep to one thread
        self.poison = config.poison
        self.spans: list[tuple[int, int]] = []  # of each unit, the first step and that behind it
        ends = by_last_use(self.plan)
        for i, unit in enumerate(self.units):
            first = len(self.steps)
            self._add(unit)
            self.spans.append((first, len(self.steps)))
            self._drop_after(ends.get(i, ()))
            if self.poison:
                self.steps.append(self._poison(self.plan.released.get(i, ())))
        self.fresh = [
            (self._slot(v), v.aval.shape, v.aval.dtype.numpy)
            for v, place in self.plan.places.items()
            if place.kind == "fresh"
        ]
        self.outputs = [(self._slot(v), shared)
                        for v, shared in zip(graph.outputs, self.plan.copied, strict=True)]
        self.plan.shadows.clear()
        self._free: list[list] = []

    def describe(self) -> str:
        """The Schedule IR: groups in order, and the memory they share."""
        return describe(self.units, self.plan)

    # --- the steps ----------------------------------------------------------------------------
    def _slot(self, v: Value) -> int:
        return self.slot.setdefault(v, len(self.slot))

    def _pick(self, values: Sequence[Value]) -> Callable[[list], tuple]:
        """A function from the environment to the arrays of these values, as a tuple."""
        at = [self._slot(v) for v in values]
        if len(at) == 1:
            only = at[0]
            return lambda env: (env[only],)
        return itemgetter(*at) if at else lambda env: ()

    def _add(self, unit: FusionGroup) -> None:
        node = unit.call
        if node is None:
            self.steps.append(self._loop(unit))
        elif CPU.memory(unit).kind == "view":
            if self.plan.places[node.outputs[0]].kind != "view":
                self.steps.append(self._copy(node))
            elif not self._is_static(node.outputs[0]) or node.op.host:
                self.steps.append(self._view(node))
        elif node.op.out:
            if self.plan.places[node.outputs[0]].kind == "view":
                self.steps.append(self._take_over(node))
            self.steps.append(self._into(node))
        else:
            self.steps.append(self._library(node))

    def _is_static(self, v: Value) -> bool:
        """Whether the value's array is the same at every call of a workspace."""
        return self.plan.places[self.plan.places[v].root].kind in ("arena", "known")

    def _loop(self, group: FusionGroup) -> Step:
        low = self._lower(group)
        shadows = self.plan.shadows
        launch = compile_loops(low.program).bind(
            group.space,
            [_strides(shadows[v], group.space, word) for v, word in low.inputs],
            [*(_out_strides(shadows[v], m) for v, m in zip(low.outputs, low.modes, strict=True)),
             *(() for _ in low.counters)],
        )
        if any(word is not None for _, word in low.inputs):
            reads = [(self._slot(v), word) for v, word in low.inputs]

            def words(env: list) -> list:
                return [env[s] if w is None else env[s][w:w + 1] for s, w in reads]

            return self._launch(low, launch, words, self._pick(low.outputs))
        return self._launch(low, launch, self._pick([v for v, _ in low.inputs]),
                            self._pick(low.outputs))

    def _lower(self, group: FusionGroup) -> LoweredLoop:
        return lower(group.space, group.nodes, group.outputs, self.numbers)

    def _launch(self, low: LoweredLoop, launch: Callable, ins: Callable, outs: Callable) -> Step:
        def step(env: list) -> None:
            launch(ins(env), outs(env))

        return step

    def _take_over(self, node: Node) -> Step:
        """The memory of an operand that nothing reads any more is the result's."""
        source = self._slot(node.inputs[node.op.lies(node.attrs).operand])
        target = self._slot(node.outputs[0])

        def step(env: list) -> None:
            env[target] = env[source]

        return step

    def _poison(self, ranges: Sequence[tuple[int, int]]) -> Step:
        """What nothing should read any more is filled with NaN, integers with -1."""
        def step(env: list) -> None:
            for offset, size in ranges:
                env[-1][offset:offset + size] = POISON  # the arena stands behind the values

        return step

    def _view(self, node: Node) -> Step:
        ref, attrs = node.op.ref, node.attrs
        source, target = self._slot(node.inputs[0]), self._slot(node.outputs[0])

        def step(env: list) -> None:
            env[target] = ref(env[source], **attrs)

        return step

    def _copy(self, node: Node) -> Step:
        """A view whose strides NumPy cannot express: elements copied in row-major order."""
        source, target = self._slot(node.inputs[0]), self._slot(node.outputs[0])
        shape = self.plan.shadows[node.inputs[0]].shape
        if node.op.name != "reshape":
            ref, attrs = node.op.ref, node.attrs
            return lambda env: np.copyto(env[target], ref(env[source], **attrs))
        return lambda env: copy_elements(env[target].reshape(shape), env[source])

    def _into(self, node: Node) -> Step:
        if node.op.name == "matmul" and self._plain_product(node):
            return self._product(node)
        ref, attrs, ins = node.op.ref, node.attrs, self._pick(node.inputs)
        target = self._slot(node.outputs[0])

        def step(env: list) -> None:
            out = env[target]
            with located(node):
                made = ref(*ins(env), out=out, **attrs)
            if made is not out:
                out[...] = made

        return step

    def _plain_product(self, node: Node) -> bool:
        """Whether a matmul is one of floats in their own type: BLAS, over our threads."""
        dtype, accum = node.outputs[0].aval.dtype, node.attrs["accum"]
        return dtype is accum and dtype.numpy.kind == "f"

    def _product(self, node: Node) -> Step:
        a, b = (self.plan.shadows[v] for v in node.inputs)
        target = self._slot(node.outputs[0])
        x, y = (self._slot(v) for v in node.inputs)
        compute = blas.product(a, b, self.plan.shadows[node.outputs[0]])
        self.multiplies |= blas.is_threaded(a, self.plan.shadows[node.outputs[0]])
        return lambda env: compute(env[x], env[y], env[target])

    def _library(self, node: Node) -> Step:
        ins = self._pick(node.inputs)
        targets = [self._slot(v) for v in node.outputs]

        def step(env: list) -> None:
            for t, a in zip(targets, call_node(node, ins(env)), strict=True):
                env[t] = a if a.flags.c_contiguous else a.copy()

        return step

    def _drop_after(self, last_used: Sequence[Value]) -> None:
        dead = [self._slot(v) for v in last_used if self.plan.places[v].kind == "dynamic"]
        if dead:
            def step(env: list) -> None:
                for s in dead:
                    env[s] = None

            self.steps.append(step)

    # --- running ------------------------------------------------------------------------------
    def _workspace(self) -> list:
        """An environment whose arena values and constants are in place."""
        plan = self.plan
        raw = np.full(plan.arena_bytes + 64, POISON, np.uint8) if self.poison else np.empty(
            plan.arena_bytes + 64, np.uint8)
        arena = raw[-raw.ctypes.data % 64:]
        env: list[Any] = [None] * len(self.slot)
        arrays: dict[Value, np.ndarray] = dict(self.known)
        for unit in self.units:
            for v in unit.outputs:
                place = plan.places[v]
                if place.kind == "arena":
                    arrays[v] = _at(arena, place.offset, v)
                elif place.kind == "view" and self._is_static(v):
                    (node,), memory = unit.nodes, CPU.memory(unit)
                    source = arrays[node.inputs[memory.operand]]
                    arrays[v] = place_in(node, source) if memory.kind == "view" else source
        for v, a in arrays.items():
            if v in self.slot:  # a view of a view may have no reader of its own
                env[self.slot[v]] = a
        return [*env, arena] if self.poison else env

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        try:
            template = self._free.pop()
        except IndexError:
            template = self._workspace()
        try:
            return self._run(template, arrays)
        except MemoryError as err:
            raise OutOfMemoryError(
                f"{self.graph.name} needs more memory than there is",
                hint="smaller extents, ts.checkpoint around parts of the model, or a type of "
                f"fewer bits; its intermediate results take {self.plan.arena_bytes} bytes",
            ) from err
        finally:
            self._free.append(template)

    def _run(self, template: list, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        env = template.copy()
        env[: self.n_inputs] = [a if a.flags.c_contiguous else a.copy() for a in arrays]
        for s, t in self.captures:
            a = t.array
            env[s] = a if a.flags.c_contiguous else a.copy()
        for s, shape, dtype in self.fresh:
            env[s] = np.empty(shape, dtype) if not self.poison else poisoned(shape, dtype)
        with np.errstate(all="ignore"), single_thread if self.multiplies else NO_LIMIT:
            if hooks.timed_groups:
                self._run_timed(env)
            else:
                for step in self.steps:
                    step(env)
        return [env[s].copy() if shared else env[s] for s, shared in self.outputs]


    def _run_timed(self, env: list) -> None:
        """The steps; each unit's are shown with their times, those between units are not."""
        done = 0
        for unit, (first, last) in zip(self.units, self.spans, strict=True):
            for step in self.steps[done:first]:
                step(env)
            begin = time.perf_counter_ns()
            for step in self.steps[first:last]:
                step(env)
            end, done = time.perf_counter_ns(), last
            for see in hooks.timed_groups if first < last else ():
                see(self, unit, begin, end)
        for step in self.steps[done:]:
            step(env)


def copy_elements(target: np.ndarray, source: np.ndarray) -> None:
    """NumPy copies runs along the last axis of a target in row-major order: where these are short,
    as of windows that are put together again, runs along the axis before it are copied."""
    short = target.ndim > 1 and target.shape[-1] < SHORT <= target.shape[-2]
    if short and source.strides[-1] != source.itemsize:
        for i in range(target.shape[-1]):
            np.copyto(target[..., i], source[..., i])
    else:
        np.copyto(target, source)


def poisoned(shape: Any, dtype: np.dtype) -> np.ndarray:
    """Memory whose bytes are all ones: NaN, or -1."""
    return np.full(math.prod(shape) * dtype.itemsize, POISON, np.uint8).view(dtype).reshape(shape)


def _at(arena: np.ndarray, offset: int, v: Value) -> np.ndarray:
    dtype = v.aval.dtype.numpy
    n = elements(v) * dtype.itemsize
    return arena[offset:offset + n].view(dtype).reshape(v.aval.shape)


def _strides(shadow: np.ndarray, space: tuple[int, ...], word: int | None) -> tuple[int, ...]:
    """Element strides of an array broadcast to the iteration space."""
    if word is not None:
        return (0,) * len(space)
    lead = len(space) - shadow.ndim
    own = tuple(
        0 if n == 1 else s // shadow.itemsize
        for n, s in zip(shadow.shape, shadow.strides, strict=True)
    )
    return (0,) * lead + own


def _out_strides(shadow: np.ndarray, mode: str) -> tuple[int, ...]:
    strides = tuple(s // shadow.itemsize for s in shadow.strides)
    return strides[-1:] if mode == "column_sum" else strides


def _keep_small_apart(groups: Sequence[FusionGroup], repeats: int) -> list[FusionGroup]:
    """Loops too small to be worth compiling run node by node. repeats: how often in a call."""
    least = config.loop_min_elements
    out: list[FusionGroup] = []
    for group in groups:
        if group.call is None and repeats * max(math.prod(group.space), ONE_CALL) < least:
            out.extend(map(call_group, group.nodes))
        else:
            out.append(group)
    return out
