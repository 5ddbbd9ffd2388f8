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
from dataclasses import replace
from typing import Any

import numpy as np

from .... import config, hooks
from ....errors import ArgumentError, TraceError, UnsupportedTargetError, user_line
from ....lazy_dataclass import dataclass
from ....runtime.arrays import HOST
from ....tensor import Tensor, as_tensor
from ....tile.launch.placement import chosen_gpu, gpu_number
from ....tile.launch.resident import Resident, adopted, on_gpu
from ... import tree
from ...devices import place_typed, target_of
from ...ir import Graph, Node
from ...op import GraphOp
from ...ops.random import RNG_KEY
from ...placed_leaves import HERE
from ...signature import Static, join_scales, leaf_tensors, split_result
from ...trace import apply, aval_of, trace
from ...tree_code import unflattener
from ...weak_numbers import leaf_of, number_of, number_type
from .device import DeviceExecutable

MOST = 1024  # programs that are kept: those used last


@dataclass
class EagerProgram:
    """A call compiled. rebuild: how its results are put together, see split_result."""

    graph: Graph
    index: int
    out_tree: tree.TreeDef
    rebuild: list[Any]

    @property
    def draws(self) -> bool:
        return "random" in self.graph.effects

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

    def run(self, operands: Sequence[Tensor]) -> Any:
        if config.numerics == "off":
            made = self.executable.tensors(operands)
        else:
            made = self._watched(operands)
        if self._typed_places:
            made = list(map(place_typed, made))
        return self._put_together(join_scales(made, self.rebuild))

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
    """Programs by all that decides about one, those used longest ago first. quick: of calls by
    position with tensors of one GPU, by what is seen at a glance; with the types, whose ids the
    keys have."""

    def __init__(self) -> None:
        super().__init__()
        self.quick: dict[tuple, tuple[EagerProgram, list[Any]]] = {}


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
    glance = None if kwargs else _glance(fn, args)
    if glance is not None and (known := _programs.quick.get(glance)) is not None:
        return known[0].run([a if type(a) is Resident else leaf_of(a) for a in args
                             if type(a) is Resident or type(a) is float])
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
    if program.draws:  # by a key of the program's stream, as on the host
        if "key" not in inspect.signature(fn).parameters:  # a cast or a sum whose type draws
            keyed, count = program.keyed
            return keyed.run([*operands, *(on_gpu(hooks.next_key.get()(), index)
                                           for _ in range(count))])
        key = on_gpu(hooks.next_key.get()(), index)
        return call(name, fn, args, {**kwargs, "key": key})
    floats = sum(type(a) is float for a in args)
    if glance is not None and len(operands) == floats + sum(type(a) is Resident for a in args):
        _remember(glance, program, args)
    return program.run(operands)


_GLANCED = (int, bool, str, type(None))


def _glance(fn: Callable, args: tuple) -> tuple | None:
    """What is seen at a glance of a call whose arguments are tensors on a GPU, floats, which are
    data, and attributes; None of any other."""
    key: list[Any] = [fn, config.device, config.determinism]
    for a in args:
        kind = type(a)
        if kind is Resident:
            memory = a.held_now()
            if a._scale is not None or type(memory) not in HERE or (
                    a._name is not None and number_type(a) is not None):
                return None
            key += (a._shape, id(a.type), memory.device.index)
        elif kind is float:
            key.append(float)
        elif kind in _GLANCED:
            key += (kind, a)
        else:
            return None
    return tuple(key)


def _remember(glance: tuple, program: EagerProgram, args: tuple) -> None:
    quick = _programs.quick
    if len(quick) >= MOST:
        quick.clear()
    quick[glance] = program, [a.type for a in args if type(a) is Resident]


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
            operands = [t for x, d in zip(self.leaves, data, strict=True) if d
                        for t in leaf_tensors(x)]
            key = self._key(data, operands)
            with _lock:
                known, program = key in _programs, _programs.get(key)
                if known:
                    _programs.move_to_end(key)
            if not known:
                program = self._compiled(data, operands, last=not floats)
                _keep(key, program)
            if program is not None:
                return program, operands
        raise AssertionError("the last form raises what is wrong")

    def _key(self, data: list[bool], operands: list[Tensor]) -> Any:
        statics = tuple(_frozen(x) for x, d in zip(self.leaves, data, strict=True) if not d)
        types = tuple((tuple(x.shape), x.type, number_type(x)) for x in operands)
        return (self.identity, self.treedef, tuple(data), statics, types, self.index,
                config.determinism)

    def _compiled(self, data: list[bool], operands: list[Tensor], last: bool
                  ) -> EagerProgram | None:
        """None where a value is needed of a float, which is no data then."""
        box: dict[str, Any] = {}

        def body(*tracers: Tensor) -> list[Tensor]:
            it = zip(tracers, operands, strict=True)
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
