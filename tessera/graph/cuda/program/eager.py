"""What is computed at once of tensors on a GPU: each call of a function of ops is a small program.

It is traced and compiled once for its types and attributes, as a call of `ts.jit` is; floats that a
call gives are data. Results lie on the GPU. Nothing is copied to the host: what has no kernel is an
error that says x.cpu().
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import field, replace
from typing import Any

import numpy as np

from .... import config, hooks
from ....errors import ArgumentError, TraceError, UnsupportedTargetError, user_line
from ....lazy_dataclass import dataclass
from ....numerics import NumericType, f64
from ....open_trace import trace_state
from ....runtime.arrays import HOST
from ....runtime.buffer import Borrowed
from ....tensor import Tensor, as_tensor
from ....tile.launch.placement import chosen_gpu, gpu_number
from ....tile.launch.resident import Resident, adopted, on_gpu, resident_at
from ....tile.launch.shared_views import SharedView, is_exported, whole_of
from ....wide_arrays import ANY_UNSTATED as UNSTATED
from ... import tree
from ...devices import place_typed, target_of
from ...eager_forms import CALLS
from ...host_programs import LONG_WAY
from ...ir import Graph, Node
from ...op import GraphOp
from ...ops.random import EAGER_STREAM, RNG_KEY
from ...ops.shape import BROADCAST_TO, RESHAPE, TRANSPOSE
from ...placed_leaves import OURS
from ...signature import Static, join_scales, leaf_tensors, split_result
from ...trace import apply, aval_of, evaluate, trace
from ...tree_code import unflattener
from ...weak_numbers import leaf_of, number_of, number_type
from .device import DeviceExecutable
from .quick_calls import QuickCalls

MOST = 1024  # programs that are kept: those used last
VIEWS = {RESHAPE, TRANSPOSE, BROADCAST_TO}
MOST_VIEWS = 8  # of views, before the elements are copied


@dataclass(eq=False)
class EagerProgram:
    """A call compiled. rebuild: how its results are put together, see split_result."""

    graph: Graph
    index: int
    out_tree: tree.TreeDef
    rebuild: list[Any]
    _quick: QuickCalls | None = field(default=None, init=False)

    @functools.cached_property
    def view(self) -> bool | None:
        """Of what gives all elements of its operand in other extents, whether they keep their
        order; None of others. A slice is none: where it begins is an attribute, and what reads it
        would be compiled for each place."""
        g, ops = self.graph, {n.op for n in self.graph.nodes}
        if len(g.inputs) != 1 or g.captures or g.effects or not 0 < len(g.nodes) <= MOST_VIEWS or \
                not self._bare:
            return None
        if not ops <= VIEWS:
            return None
        return all(o.memory.flat for o in ops)  # type: ignore[union-attr]

    @functools.cached_property
    def draws(self) -> bool:
        return "random" in self.graph.effects

    @functools.cached_property
    def drawing(self) -> EagerProgram | None:
        """The program that draws its one key itself, of the stream from which the host takes keys
        outside of compiled functions; None of one that takes several, each of which is a step."""
        g = self.graph
        if sum(n.op is RNG_KEY for n in g.nodes) != 1:
            return None
        nodes = tuple(replace(n, attrs={"stream": EAGER_STREAM}) if n.op is RNG_KEY else n
                      for n in g.nodes)
        return EagerProgram(replace(g, nodes=nodes), self.index, self.out_tree, self.rebuild)

    @functools.cached_property
    def keyed(self) -> tuple[EagerProgram, int]:
        """The program that takes its keys behind its operands, and how many."""
        g = self.graph
        keys = tuple(n.outputs[0] for n in g.nodes if n.op is RNG_KEY)
        nodes = tuple(n for n in g.nodes if n.op is not RNG_KEY)
        graph = Graph(g.name, (*g.inputs, *keys), g.captures, nodes, g.outputs)
        return EagerProgram(graph, self.index, self.out_tree, self.rebuild), len(keys)

    @functools.cached_property
    def executable(self) -> DeviceExecutable:
        try:
            return DeviceExecutable(self.graph, self.index)
        except UnsupportedTargetError as err:
            raise UnsupportedTargetError(err.message, where=err.where,
                                         hint="x.cpu() computes it on the host") from err

    def run(self, operands: Sequence[Any]) -> Any:
        """operands: tensors, and floats."""
        if self.view is not None and config.numerics == "off" and (
                shared := self._shared(operands[0])) is not None:
            return shared
        given = self._there(operands)
        quick = self._quick
        made: Sequence[Tensor] | None = None
        if quick is not None and quick.hold():
            made = quick.run(given)
        if made is None:
            made = self._at_length(given)
        return made[0] if self._bare else self._results(made)

    def _at_length(self, operands: Sequence[Tensor]) -> Sequence[Tensor]:
        if config.numerics != "off":
            return self._watched(operands)
        made = self.executable.tensors(operands)
        self._quick = QuickCalls.of(self.executable)
        return made

    @functools.cached_property
    def _bare(self) -> bool:
        """Whether it gives one tensor, as it is."""
        return self.rebuild == ["tensor"] and self.out_tree.kind is None and \
            not self._typed_places

    def _there(self, operands: Sequence[Any]) -> Sequence[Tensor]:
        """Numbers on the GPU too."""
        if NUMBERS.isdisjoint(map(type, operands)):
            return operands
        return [x if type(x) is Resident else _programs.number(x, self.index) for x in operands]

    def _results(self, made: Sequence[Tensor]) -> Any:
        if self._typed_places:
            made = list(map(place_typed, made))
        return self._put_together(join_scales(made, self.rebuild))

    def _shared(self, x: Any) -> Resident | None:
        """The view of an operand, which shares its memory; None where others may write there."""
        held: Any = x._storage if type(x) is Resident else None
        memory: Any = held.memory if type(held) is SharedView else held
        if type(memory) not in OURS or x.type.dtype.packed or is_exported(whole_of(memory)):
            return None
        shape, numeric = self._result
        made = resident_at(shape, numeric, memory)
        lies, chain = (shape, None) if self.view else (x._shape, self)
        made._storage = SharedView(lies, x.type, memory, chain, made)
        return made

    def viewed(self, extents: Any, numeric: NumericType, at_length: Callable) -> Callable:
        """The same of the memory of an operand of such extents and type, in memory of ours."""
        shape, own = self._result
        lies, chain = (shape, None) if self.view else (extents, self)

        def run(memory: Any) -> Any:
            if is_exported(whole_of(memory)):
                return at_length(memory)
            made = resident_at(shape, own, memory)
            made._storage = SharedView(lies, numeric, memory, chain, made)
            return made

        return at_length if numeric.dtype.packed else run

    @functools.cached_property
    def _result(self) -> tuple[Any, NumericType]:
        out = self.graph.outputs[0].aval
        return out.shape, out.type

    def copy_of(self, base: Resident) -> Resident:
        """What it gives, in memory of its own. A trace that is open asks for it, and is none of its
        business."""
        builder, trace_state.builder = trace_state.builder, None
        try:
            return self._results(self.executable.tensors([base]))
        finally:
            trace_state.builder = builder

    @functools.cached_property
    def _typed_places(self) -> bool:
        """Whether types of results say where these lie."""
        return any(v.aval.type.policy.device is not None for v in self.graph.outputs)

    @functools.cached_property
    def _put_together(self) -> Callable[[Sequence[Any]], Any]:
        return unflattener(self.out_tree)

    def _watched(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """With sentinels on. The program may be an earlier call's: the line is this one's."""
        here, g = user_line(), self.graph
        nodes = tuple(Node(n.op, n.inputs, n.attrs, n.outputs, here) for n in g.nodes)
        graph = replace(g, nodes=nodes)
        with ExitStack() as stack:
            shown = [stack.enter_context(observe(graph)) for observe in hooks.runs]
            made = self.executable.tensors(operands, graph)
            for show in shown:
                show(made)
        return made


class _State(threading.local):
    on_host = False  # a function that makes a tensor from nothing runs, and its result is placed


class EagerPrograms(OrderedDict[Any, EagerProgram | None]):
    """Programs by all that decides about one, those used longest ago first."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[Any, Tensor] = {}

    def number(self, x: float | Tensor, index: int) -> Tensor:
        """A float, or a tensor on the host without axes, as data on the GPU: copied there once for
        many calls. Others as they are."""
        if type(x) is float:
            key: Any = x or repr(x), index  # 0.0 == -0.0
        elif type(x) is Tensor and not x._shape and x._scale is None:
            key = x.array.tobytes(), x.type, x._name, index
        else:
            return x  # type: ignore[return-value]
        made = self._numbers.get(key)
        if made is None:
            if len(self._numbers) >= MOST:
                self._numbers.clear()
            made = self._numbers[key] = on_gpu(leaf_of(x), index)
        return made


_state = _State()
_programs = EagerPrograms()
_lock = threading.Lock()


def call(name: str, fn: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """fn(*args, **kwargs) on the GPU where its operands lie, or that the setting chooses. What is
    made from no array is made on the host, and placed.

    Raises ArgumentError for operands in several places, UnsupportedTargetError for an op without a
    kernel.
    """
    if _state.on_host:
        return fn(*args, **kwargs)
    leaves, treedef = tree.flatten((args, kwargs))
    leaves = [adopted(x, name) for x in leaves]
    paths = zip(_paths(fn, args, kwargs, treedef), leaves, strict=True)
    arrays = [(path, as_tensor(x)) for path, x in paths if isinstance(x, Tensor | np.ndarray)]
    if all(x.place == HOST and not x.ndim for _, x in arrays):
        return _made(fn, args, kwargs)
    target = target_of("a call", arrays)
    if target == "cpu":
        return fn(*args, **kwargs)
    index = gpu_number(target)
    if kwargs.get("generator") is not None:
        key = on_gpu(kwargs["generator"].next_key(), index)
        return call(name, fn, args, {**kwargs, "generator": None, "key": key})
    program, operands = _Call(name, fn, leaves, treedef, index).find()
    made = _run(program, operands)
    if (calls := CALLS.get(fn)) is not None:
        calls.keep(args, kwargs, len(operands),
                   lambda given: _at_once(program, operands, given))
    return made


def _at_once(program: EagerProgram, like: Sequence[Tensor], given: Sequence[Any]
             ) -> Callable | None:
    """The program as a function of what was given: the memory of operands, and floats and arrays on
    the host among them. like: the operands."""
    if any(type(x) is np.ndarray and x.ndim for x in given) or any(
            type(g) is not float and number_type(x) is not None
            for x, g in zip(like, given, strict=True)):
        return None
    types = [(x._shape, x.type) for x in like]
    numbers = [i for i, x in enumerate(given) if type(x) in (float, np.ndarray)]
    runs = program.drawing if program.draws else program
    wide = any(v.aval.dtype is f64 for v in program.graph.outputs) or any(
        x.dtype is f64 for x, g in zip(like, given, strict=True) if type(g) is not float)

    def operand(given: Any, shape: Any, numeric: Any) -> Any:
        if type(given) is float:
            return given
        if type(given) is np.ndarray:
            return Tensor(given, numeric)
        return resident_at(shape, numeric, given)

    def at_length(*given: Any) -> Any:
        if wide and UNSTATED:
            return LONG_WAY
        return _run(program, [operand(x, *t) for x, t in zip(given, types, strict=True)])

    if runs is None or Borrowed in map(type, given):
        return at_length
    if program.view is not None:
        return program.viewed(*types[0], at_length) if not wide else at_length

    def run(*given: Any) -> Any:
        if wide and UNSTATED:
            return LONG_WAY
        quick = runs._quick
        if quick is None or not quick.hold():
            return at_length(*given)
        memories: Sequence[Any] = given
        if numbers:
            memories = there = [*given]
            for i in numbers:
                there[i] = _programs.number(operand(given[i], *types[i]), runs.index)._storage
        made = quick.on(memories)
        if made is None:
            return at_length(*given)
        return made[0] if runs._bare else runs._results(made)

    return run


def _run(program: EagerProgram, operands: Sequence[Any]) -> Any:
    if not program.draws:
        return program.run(operands)
    if program.drawing is not None:
        return program.drawing.run(operands)
    keyed, count = program.keyed  # as the host takes them, each a step
    return keyed.run([*operands, *(on_gpu(hooks.next_key.get()(), program.index)
                                   for _ in range(count))])


NUMBERS = frozenset({float, Tensor})  # classes of operands that lie on the host


def _made(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The result of a function without arrays, computed on the host, where the setting wants it."""
    place = chosen_gpu()
    _state.on_host = True
    try:
        out = fn(*args, **kwargs)
    finally:
        _state.on_host = False
    if place is None:
        return out
    return tree.map_tree(lambda x: on_gpu(x, place) if type(x) is Tensor else x, out)


def _paths(fn: Callable, args: tuple, kwargs: dict[str, Any], treedef: tree.TreeDef) -> list[str]:
    """The name of each leaf, by the parameters of the function."""
    try:
        names = list(inspect.signature(fn).bind(*args, **kwargs).arguments)
    except TypeError:
        names = []
    found = []
    for path in tree.paths(treedef):
        part, _, rest = path.partition(".")
        first, dot, more = rest.partition(".")
        if part == "0" and int(first) < len(names):
            first = names[int(first)]
        found.append(first + dot + more)
    return found


class _Call:
    """One call: which of its leaves are data, and the program for the others.

    identity: what tells fn from others, where that is not the function itself.
    """

    def __init__(self, name: str, fn: Callable, leaves: list[Any], treedef: tree.TreeDef,
                 index: int, identity: Any = None):
        self.name, self.fn, self.leaves, self.treedef, self.index = name, fn, leaves, treedef, index
        self.identity = fn if identity is None else identity

    def find(self) -> tuple[EagerProgram, list[Tensor]]:
        forms = (True, False) if any(type(x) is float for x in self.leaves) else (False,)
        for floats in forms:
            data = [isinstance(x, Tensor | np.ndarray) or (floats and type(x) is float)
                    for x in self.leaves]
            given = [t for x, d in zip(self.leaves, data, strict=True) if d
                     for t in leaf_tensors(x)]
            operands, chains = [*map(_base, given)], [*map(_chain, given)]
            key = self._key(data, operands, chains)
            with _lock:
                known, program = key in _programs, _programs.get(key)
                if known:
                    _programs.move_to_end(key)
            if not known:
                program = self._compiled(data, operands, chains, last=not floats)
                _keep(key, program)
            if program is not None:
                return program, operands
        raise AssertionError("the last form raises what is wrong")

    def _key(self, data: list[bool], operands: list[Tensor], chains: list[Any]) -> Any:
        statics = tuple(_frozen(x) for x, d in zip(self.leaves, data, strict=True) if not d)
        types = tuple((tuple(x.shape), x.type, number_type(x)) for x in operands)
        return (self.identity, self.treedef, tuple(data), statics, types, tuple(chains),
                self.index, config.determinism)

    def _compiled(self, data: list[bool], operands: list[Tensor], chains: list[Any], last: bool
                  ) -> EagerProgram | None:
        """None where a value is needed of a float, which is no data then."""
        box: dict[str, Any] = {}

        def body(*tracers: Tensor) -> list[Tensor]:
            viewed = [t if c is None else evaluate(c.graph, [t])[0]
                      for t, c in zip(tracers, chains, strict=True)]
            it = zip(viewed, operands, strict=True)
            values = []
            for x, d in zip(self.leaves, data, strict=True):
                if not d:
                    values.append(x)
                    continue
                t, own = next(it)
                numeric = number_type(own)
                t = t if numeric is None else number_of(t, numeric)
                if own.scale is not None:
                    t.scale = next(it)[0]
                values.append(t)
            args, kwargs = tree.unflatten(self.treedef, values)
            flat, box["tree"] = tree.flatten(self.fn(*args, **kwargs))
            made, box["rebuild"] = split_result(flat)
            return made

        try:
            graph = trace(body, [aval_of(x) for x in operands], self.name,
                          place=self.index)
            return EagerProgram(graph, self.index, box["tree"], box["rebuild"])
        except TraceError as err:
            if not last:
                return None
            raise UnsupportedTargetError(
                f"the values of its operands decide what is computed: {err.message}",
                where=err.where, hint="x.cpu() computes it on the host") from err


def _chain(x: Any) -> Any:
    """The program of a view that has no elements of its own; None of other tensors."""
    held = x._storage if type(x) is Resident else None
    return held.chain if type(held) is SharedView else None


def _base(x: Any) -> Tensor:
    return x if _chain(x) is None else x._storage.base


def _keep(key: Any, program: Any) -> None:
    with _lock:
        _programs[key] = program
        if len(_programs) > MOST:
            _programs.popitem(last=False)


def _frozen(value: Any) -> Any:
    """An attribute as part of a key: numbers with their type, since 1, 1.0 and True are equal."""
    if isinstance(value, slice):
        return "slice", _frozen(value.start), _frozen(value.stop), _frozen(value.step)
    try:
        return Static(value) if hash(value) is not None else None
    except TypeError:
        raise ArgumentError(f"{value!r} of type {type(value).__name__} is neither data nor "
                            "hashable", hint="pass tensors, numbers, strings or types") from None


def run_op(op: GraphOp, args: Sequence[Tensor], attrs: dict[str, Any]) -> Any:
    """One op outside of a function of ops; operands on the host are what such a one has made."""
    def one(*operands: Tensor) -> Any:
        return apply(op, *operands, **attrs)

    target = target_of(op.name, [(f"operand {i}", a) for i, a in enumerate(args)
                                 if a.place != HOST])
    leaves, treedef = tree.flatten((args, {}))
    identity = (op, *((k, _frozen(v)) for k, v in sorted(attrs.items())))
    program, operands = _Call(op.name, one, leaves, treedef, gpu_number(target), identity).find()
    return program.run(operands)


__all__ = ["call", "run_op"]
