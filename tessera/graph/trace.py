"""Tracing: running a Python function on tracers records its ops as a graph.

`apply` is the one door through which every op goes. Without a tracer it runs the op's NumPy
meaning; with one it adds a node to the graph being built.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from .. import hooks
from ..dims import size_of
from ..errors import OutOfMemoryError, SourceLine, TraceError, user_line
from ..open_trace import trace_state
from ..runtime.arrays import HOST
from ..tensor import STATIC_HINT, Tensor, as_tensor, need_device
from .ir import Graph, Node, Value
from .op import Aval, GraphOp, infer


class Tracer(Tensor):
    """A tensor known by shape and type only, while a function is traced."""

    __slots__ = ("builder", "value", "layout")
    traced = True

    def __init__(self, builder: GraphBuilder, value: Value):
        self.builder, self.value, self.layout = builder, value, None
        self._shape, self.type = value.aval.shape, value.aval.type
        self._scale, self._is_param, self._name = None, False, None

    @property
    def aval(self) -> Aval:
        return self.value.aval

    @property
    def array(self) -> np.ndarray:
        self._concrete("its values")

    @property
    def buffer(self) -> np.ndarray:
        self._concrete("its buffer")

    def _concrete(self, what: str) -> NoReturn:
        raise TraceError(
            f"{what}: only shape and type are known while tracing ({self.aval})",
            hint="compute with ts ops here, and look at values outside jit and grad; "
            "ts.debug.print shows a value when the graph runs",
        )

    def numpy(self) -> np.ndarray:
        self._concrete("numpy()")

    def item(self) -> Any:
        self._concrete("item()")

    def tolist(self) -> Any:
        self._concrete("tolist()")

    def copy(self) -> Tracer:
        """The same value, by another handle: values do not change."""
        made = Tracer(self.builder, self.value)
        made.layout, made.scale = self.layout, self.scale
        made.is_param, made.name = self.is_param, self.name
        return made

    def __float__(self) -> float:
        self._concrete("float()")

    def __int__(self) -> int:
        self._concrete("int()")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._concrete("conversion to NumPy")

    def __index__(self) -> int:
        raise TraceError(
            f"a traced {self.aval} is used where Python needs an integer",
            hint=f"{STATIC_HINT}; ts.dynamic_slice and ts.take read at an index that is data",
        )

    def __bool__(self) -> bool:
        raise TraceError(
            f"Python control flow on a traced {self.aval}: its value is not known",
            hint="choose values with ts.where, branches with ts.cond, loops with ts.while_loop",
        )

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TraceError(
            "assignment into a traced tensor",
            hint="build the new value: ts.index_put(x, index, value), or ts.where",
        )

    def __repr__(self) -> str:
        return f"Tracer {self.aval}"


class GraphBuilder:
    """A graph under construction."""

    def __init__(self, name: str):
        self.name, self.closed = name, False
        self.inputs: list[Value] = []
        self.nodes: list[Node] = []
        self.captures: dict[int, tuple[Value, Tensor]] = {}
        self.literals: dict[Any, Value] = {}
        self.makers: dict[Value, Node] = {}
        self.rng: Any = None  # keys of a body that is an attribute of an op; see ops/random.py
        self.streams = 0  # random streams drawn so far
        self.written: list[tuple[Value, Value, str, SourceLine | None]] = []  # old, new, as what
        self.unrounded: dict[Value, Tensor] = {}  # results of public ops before they were rounded
        self.mesh: Any = None  # of distributed tensors: extents are then those of whole tensors
        self.place = HOST  # the number of the GPU on which it will run, where that is known
        self.outer: GraphBuilder | None = None  # that of the enclosing trace
        self.repeats = True  # see trace
        self.checks = False  # see trace
        self.same_params: dict[Value, Value] = {}  # inputs that are a param met before, and which

    def add_input(self, aval: Aval) -> Tracer:
        value = Value(aval)
        self.inputs.append(value)
        return Tracer(self, value)

    def value_of(self, x: Tensor) -> Value:
        """The value of an operand: mine, a literal, or a capture from outside."""
        if isinstance(x, Tracer) and x.builder is self:
            return x.value
        if x.name == LITERAL:
            return self._literal(x)
        if isinstance(x, Tracer) and x.builder.closed:
            raise TraceError(
                f"a traced {x.aval} is used after its trace of {x.builder.name!r} has ended",
                hint="return it from the traced function instead of storing it outside",
            )
        held = self.captures.get(id(x))
        if held is None:
            if x.layout is not None:
                self.mesh = x.layout.mesh
            held = self.captures[id(x)] = (Value(Aval(x.shape, x.type)), x)
        return held[0]

    def _literal(self, x: Tensor) -> Value:
        number = x.array.item() if x.array.dtype.kind in "biuf" else float(x.array)
        key = (repr(number), x.type)
        if key not in self.literals:
            value = Value(Aval((), x.type))
            self.nodes.append(
                Node(hooks.constant.get(), (), {"value": number, "type": x.type}, (value,), None)
            )
            self.literals[key] = value
            self.makers[value] = self.nodes[-1]
        return self.literals[key]

    def emit(self, op: GraphOp, args: Sequence[Tensor], attrs: dict[str, Any]) -> Any:
        inputs = tuple(self.value_of(a) for a in args)
        avals = infer(op, tuple(v.aval for v in inputs), attrs)
        for aval in avals:
            if aval.type.policy.device is not None:
                need_device(aval.type)
        outputs = tuple(Value(a) for a in avals)
        where = trace_state.where or user_line()
        if trace_state.hints and where is not None and not where.hints:
            where = replace(where, hints=trace_state.hints)
        if trace_state.part and where is not None and not where.part:
            where = replace(where, part=trace_state.part, of=trace_state.of)
        self.nodes.append(Node(op, inputs, attrs, outputs, where))
        self.makers.update(dict.fromkeys(outputs, self.nodes[-1]))
        made = tuple(Tracer(self, v) for v in outputs)
        return made if op.multi else made[0]

    def write(self, x: Tracer, new: Tracer, said: str) -> None:
        """x stands for a new value from here on: a kernel has written into it. said: as what."""
        self.written.append((x.value, new.value, said, trace_state.where or user_line()))
        x.value = new.value

    def _require_used(self, outputs: Sequence[Value]) -> None:
        """What is written into an argument leaves the function, or is read: the caller's array is
        not the graph's to change."""
        used = {v for n in self.nodes for v in n.inputs} | set(outputs)
        for old, new, said, where in self.written:
            if old in self.inputs and new not in used:
                shape = ", ".join(map(str, old.aval.shape)) + "," * (len(old.aval.shape) == 1)
                raise TraceError(
                    f"{said}, here {old.aval}, an argument of {self.name}, and nothing "
                    "reads what it wrote: the caller's array keeps its elements", where=where,
                    hint=f"return the tensor from {self.name}; what only the kernel needs, "
                    f'{self.name} makes: ts.zeros(({shape}), "{old.aval.type.dtype}")')

    def finish(self, outputs: Sequence[Tensor]) -> Graph:
        values = tuple(self.value_of(as_tensor(o)) for o in outputs)
        self._require_used(values)
        self.closed = True
        return Graph(
            self.name,
            tuple(self.inputs),
            tuple(self.captures.values()),
            tuple(self.nodes),
            values,
        )


LITERAL = "literal"  # name of tensors that stand for Python numbers


def current_builder() -> GraphBuilder | None:
    return trace_state.builder


def current_line() -> SourceLine | None:
    """The user's line of the node that is being evaluated again, if any."""
    return trace_state.where


def apply(op: GraphOp, /, *args: Tensor, **attrs: Any) -> Any:
    """op(*args): a node while a function is traced, else its NumPy meaning, now.

    Also of tensors that the function captures: they may be written into between two calls, so what
    is computed from them is computed at each.
    """
    builder = trace_state.builder
    return run_eager(op, args, attrs) if builder is None else builder.emit(op, args, attrs)


NUMPY_MOST_BYTES = 1 << 63  # from there on it has a ValueError instead of a MemoryError
HOST_ALONE = {Tensor}  # classes of operands that lie on the host


def run_eager(op: GraphOp, args: Sequence[Tensor], attrs: dict[str, Any]) -> Any:
    if {*map(type, args)} != HOST_ALONE:
        for a in args:
            if isinstance(a, Tracer):
                raise TraceError(
                    f"a traced {a.aval} is used outside its trace",
                    hint="return it from the traced function instead of storing it outside",
                )
        if any(a.layout is not None for a in args):
            return hooks.distributed.get().run_op(op, args, attrs)
        if any(a.place != HOST for a in args):
            return hooks.on_gpu.get().run_op(op, args, attrs)
    avals = infer(op, tuple([Aval(a._shape, a.type) for a in args]), attrs)
    if hooks.sending and "collective" in op.effects:
        for show in hooks.sending:
            show(op, trace_state.where or user_line(), args, [a.array for a in args])
    begin = time.perf_counter_ns() if hooks.timed_ops else 0
    try:
        with np.errstate(all="ignore"):
            arrays = op.ref(*[a.array for a in args], **attrs)
    except (MemoryError, ValueError) as err:
        if isinstance(err, ValueError) and sum(map(_size_bytes, avals)) < NUMPY_MOST_BYTES:
            raise
        raise OutOfMemoryError(
            f"{op.name}: no memory for its result {', '.join(map(str, avals))}, "
            f"{sum(map(_size_bytes, avals)) / 2**30:.3g} GiB",
            hint="a smaller batch, a narrower type, or the result in parts",
        ) from err
    made = tuple([
        Tensor(np.asarray(x), aval.type)
        for x, aval in zip(arrays if op.multi else (arrays,), avals, strict=True)
    ])
    for see in hooks.timed_ops:
        see(op, tuple(args), attrs, made, begin, time.perf_counter_ns())
    if any([a.type.policy.device is not None for a in avals]):
        made = tuple(map(hooks.place_new.get(), made))
    for observe in hooks.eager_ops:
        observe(op, tuple(args), attrs, made)
    return made if op.multi else made[0]


def _size_bytes(aval: Aval) -> int:
    return int(size_of(aval.shape)) * aval.dtype.bits // 8


def trace(fn: Callable, avals: Sequence[Aval], name: str, rng: Any = None, mesh: Any = None,
          repeats: bool = True, place: int | None = None, checks: bool = False) -> Graph:
    """The graph of fn: a function of len(avals) tensors that returns a flat list of tensors.

    mesh: that of distributed tensors among the arguments, else that of the enclosing trace
    place: the number of the GPU on which it will run, else that of the enclosing trace
    repeats: whether one run of fn stands for several: other calls, iterations, rows of a batch
    checks: whether ops that only raise for some values are recorded, which calls outside of traces
    have and compiled functions leave out"""
    builder = GraphBuilder(name)
    builder.rng, builder.repeats, builder.checks = rng, repeats, checks
    outer, trace_state.builder = trace_state.builder, builder
    builder.outer = outer
    builder.mesh = mesh if mesh is not None or outer is None else outer.mesh
    builder.place = place if place is not None else HOST if outer is None else outer.place
    where, trace_state.where = trace_state.where, None
    try:
        return builder.finish(fn(*[builder.add_input(a) for a in avals]))
    finally:
        builder.closed = True
        trace_state.builder, trace_state.where = outer, where


def place_among(tensors: Sequence[Tensor]) -> int | None:
    """The number of the GPU on which the first of them lies that is on one."""
    return next((x.place for x in tensors if x.place != HOST), None)


def evaluate(
    graph: Graph, args: Sequence[Tensor], visit: Callable[[Node, list], Any] | None = None
) -> list[Tensor]:
    """Run a graph's nodes through `apply` on these arguments: inlining it when traced."""
    env: dict[Value, Tensor] = dict(zip(graph.inputs, args, strict=True))
    env.update((v, t) for v, t in graph.captures)
    run_nodes(graph, env, visit or replay)
    return [env[v] for v in graph.outputs]


def replay(node: Node, inputs: list) -> Any:
    """A node in a copy of its graph: a random stream gets a number of its own there, so that a
    function used twice draws twice."""
    if node.op.name == "rng_key":
        return hooks.next_key.get()()
    return apply(node.op, *inputs, **node.attrs)


def run_nodes(
    graph: Graph, env: dict[Value, Tensor], visit: Callable[[Node, list], Any] | None = None
) -> None:
    """Evaluate every node into env, keeping the user's line of each."""
    for node in graph.nodes:
        inputs = [env[v] for v in node.inputs]
        with at_line(node.where):
            out = visit(node, inputs) if visit else apply(node.op, *inputs, **node.attrs)
        outs = out if node.op.multi else (out,)
        env.update(zip(node.outputs, outs, strict=True))
    for leave in hooks.exits:
        leave([env[v] for v in graph.outputs])


class hinted:
    """While active, the lines of recorded nodes carry a hint, which follows them into derivatives
    and through every pass."""

    def __init__(self, *hints: str):
        self.hints = hints

    def __enter__(self) -> None:
        self.before = trace_state.hints
        trace_state.hints = tuple(dict.fromkeys((*self.before, *self.hints)))

    def __exit__(self, *exc: object) -> None:
        trace_state.hints = self.before


def current_hints() -> tuple[str, ...]:
    """The hints of the open blocks: what a trace depends on beside its arguments."""
    return trace_state.hints


class in_part:
    """While active, the lines of recorded nodes say of which part of a step they are, where they do
    not yet: "backward", "optimizer". of: the op whose gradient that is."""

    def __init__(self, part: str, of: str = ""):
        self.said = part, of

    def __enter__(self) -> None:
        self.before = trace_state.part, trace_state.of
        part, of = self.before
        trace_state.part, trace_state.of = part or self.said[0], of or self.said[1]

    def __exit__(self, *exc: object) -> None:
        trace_state.part, trace_state.of = self.before


class at_line:
    """While active, nodes are recorded as written on this line of the user's program."""

    def __init__(self, where: SourceLine | None):
        self.where = where

    def __enter__(self) -> None:
        self.before = trace_state.where
        if self.where is not None:
            trace_state.where = self.where

    def __exit__(self, *exc: object) -> None:
        trace_state.where = self.before


def aval_of(x: Tensor) -> Aval:
    return Aval(x.shape, x.type)
