"""A call of a function of ops on the host as a program: the NumPy meanings of its ops in a row,
with no promotion, no shape rule and no tensor between them.

It is made of the trace of the call, and is kept where the call has run just these ops when it was
not traced, and where it gives the same bits. So a function that looks at values has none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any

import numpy as np

from .. import errors, hooks, wide_arrays
from ..errors import TesseraError
from ..numerics import NumericType, f64
from ..open_trace import trace_state, values_read
from ..tensor import Tensor
from . import tree
from .ir import Graph, Node, Value
from .op import GraphOp
from .trace import aval_of, trace
from .tree_code import expression
from .weak_numbers import is_internal

Operation = tuple[GraphOp, dict[str, Any]]


class Outcome:
    """Of a call that has not run."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name


LONG_WAY = Outcome("LONG_WAY")  # it goes the way of a call that is not known


def host_program(name: str, fn: Callable, args: tuple, kwargs: dict[str, Any]
                 ) -> Callable | None:
    """A function of the arrays of the tensors of a call, in the order in which they are given. None
    of a call that has no program."""
    operands: list[Tensor] = []
    _each_tensor((args, kwargs), operands.append)
    if not all(map(_is_plain, operands)):
        return None
    box: list[Any] = []

    def body(*tracers: Tensor) -> list[Tensor]:
        it = iter(tracers)
        given = _each_tensor((args, kwargs), lambda x: next(it))
        flat, structure = tree.flatten(fn(*given[0], **given[1]))
        box.append(structure)
        return flat

    warned = errors.warnings_given()
    try:
        graph = trace(body, [aval_of(x) for x in operands], name, checks=True)
        if not _is_pure(graph):
            return None
        want, ran = _observed(fn, args, kwargs)
    except TesseraError:  # values are needed, or the next call raises it again
        return None
    flat, structure = tree.flatten(want)
    if ran is None or warned != errors.warnings_given() or structure != box[0] or not (
            _same(graph, ran) and all(map(_is_result, flat))):
        return None
    return _checked(graph, structure, operands, flat)


def _each_tensor(value: Any, of: Callable[[Tensor], Any]) -> Any:
    if value.__class__ is Tensor:
        return of(value)
    if value.__class__ in (tuple, list):
        return value.__class__([_each_tensor(x, of) for x in value])
    if value.__class__ is dict:
        return {k: _each_tensor(x, of) for k, x in value.items()}
    return value


def _is_plain(x: Tensor) -> bool:
    """Whether its elements are all that it is."""
    return x._scale is None and _is_stored(x.type) and (
        x._name is None or not is_internal(x._name))


def _is_stored(numeric: NumericType) -> bool:
    policy = numeric.policy
    return not numeric.dtype.packed and policy.device is None and not policy.scaled and \
        policy.per_channel is None and policy.custom is None


def _is_result(x: Any) -> bool:
    return type(x) is Tensor and _is_plain(x) and x._name is None and not x._is_param


def _observed(fn: Callable, args: tuple, kwargs: dict[str, Any]
              ) -> tuple[Any, list[Operation] | None]:
    """The result of a call, and the ops that it ran: with an observer all go the long way. None in
    their place where the values of a tensor were looked at."""
    ran: list[Operation] = []
    here = threading.get_ident()

    def see(op: GraphOp, given: tuple, attrs: dict, made: tuple) -> None:
        if threading.get_ident() == here:
            ran.append((op, attrs))

    hooks.eager_ops.insert(0, see)  # others may leave as they are called
    try:
        with values_read() as read:
            made = fn(*args, **kwargs)
        return made, None if read else ran
    finally:
        hooks.eager_ops.remove(see)


def _same(graph: Graph, ran: Sequence[Operation]) -> bool:
    traced = [(n.op, n.attrs) for n in graph.nodes if n.op is not hooks.constant.get()]
    return len(traced) == len(ran) and all(
        a is b and _equal(x, y) for (a, x), (b, y) in zip(traced, ran, strict=True))


def _equal(x: Any, y: Any) -> bool:
    try:
        return repr(x) == repr(y) and bool(x == y)
    except (TypeError, ValueError):  # arrays
        return False


def _is_pure(graph: Graph) -> bool:
    """Whether what it gives follows from its operands, and all of it is what ops give."""
    values = [v for n in graph.nodes for v in n.outputs]
    return not graph.effects and bool(graph.nodes) and all(
        _is_stored(v.aval.type) and all(type(n) is int for n in v.aval.shape) for v in values
    ) and not any(n.op.graph_attrs or n.op.exchange for n in graph.nodes) and \
        {*graph.outputs} <= {*values}


def _checked(graph: Graph, structure: tree.TreeDef, operands: Sequence[Tensor],
             want: Sequence[Tensor]) -> Callable | None:
    constants: dict[Value, np.ndarray] = {v: x.array for v, x in graph.captures}
    for n in graph.nodes:
        if n.op is hooks.constant.get():
            constants[n.outputs[0]] = np.asarray(n.op.ref(**n.attrs))
    body, run = _written(graph, structure, constants)
    arrays = [x._buffer for x in operands]
    with np.errstate(all="ignore"):
        made = body(*arrays)
    for a, x, v in zip(made, want, graph.outputs, strict=True):
        alike = a.dtype == x._buffer.dtype and a.shape == x._shape and v.aval.type is x.type and \
            a.strides == x._buffer.strides and a.tobytes() == x._buffer.tobytes()
        shared = [np.may_share_memory(a, b) == np.may_share_memory(x._buffer, b) for b in arrays]
        if not alike or not all(shared) or any(
                np.may_share_memory(a, c) for c in constants.values()):
            return None
    return run


_RUN = """\
def written(scope):
    {names} = scope

    def body({given}):
{lines}
        return ({results},)

    def run({given}):
{refuse}
        quiet = state.quiet or made_quiet()
        try:
            {made} = quiet({call})
        except Exception:
            return LONG_WAY
{tensors}
        return {value}
    return body, run
"""


def _written(graph: Graph, structure: tree.TreeDef, constants: dict[Value, np.ndarray]
             ) -> tuple[Callable, Callable]:
    scope: dict[str, Any] = {"Tensor": Tensor, "new": Tensor.__new__, "asarray": np.asarray,
                             "UNSTATED": wide_arrays.ANY_UNSTATED, "LONG_WAY": LONG_WAY,
                             "state": trace_state, "made_quiet": make_quiet}
    names = {v: f"b{i}" for i, v in enumerate(graph.inputs)}
    given = ", ".join(names.values())
    for i, (v, array) in enumerate(constants.items()):
        names[v] = f"c{i}"
        scope[f"c{i}"] = array
    nodes = [n for n in graph.nodes if n.op is not hooks.constant.get()]
    lines: list[str] = []
    for i, n in enumerate(nodes):
        scope[f"f{i}"] = n.op.ref
        called = [names[v] for v in n.inputs]
        for word, value in n.attrs.items():
            scope[f"v{i}_{word}"] = value
            called.append(f"{word}=v{i}_{word}")
        made = []
        for v in n.outputs:
            names[v] = f"t{len(names)}"
            made.append(names[v])
        text = f"f{i}({', '.join(called)})"
        lines.append(f"{', '.join(made)}{',' * n.op.multi} = {text}")
        if not _gives_arrays(n):
            lines += [f"{t} = asarray({t})" for t in made]
    alone = len(nodes) == 1 and not nodes[0].attrs and not constants and _gives_arrays(nodes[0]) \
        and not nodes[0].op.multi
    wide = any(v.aval.dtype is f64 for v in (*graph.inputs, *(o for n in nodes for o in n.outputs)))
    tensors = []
    for j, v in enumerate(graph.outputs):
        scope[f"s{j}"], scope[f"kind{j}"] = v.aval.shape, v.aval.type
        tensors += [f"y{j} = new(Tensor)", f"y{j}._buffer = r{j}", f"y{j}._shape = s{j}",
                    f"y{j}.type = kind{j}", f"y{j}._scale = y{j}._name = None",
                    f"y{j}._is_param = False"]
    results = ", ".join(f"r{j}" for j in range(len(graph.outputs)))
    count = iter(range(len(graph.outputs)))
    value = expression(structure, scope, lambda s: f"y{next(count)}" if s.kind is None else None)
    indent = " " * 8
    text = _RUN.format(
        names=", ".join(scope), given=given, lines="\n".join(indent + x for x in lines),
        results=", ".join(names[v] for v in graph.outputs),
        refuse=f"{indent}if UNSTATED:\n{indent}    return LONG_WAY" if wide else "",
        made=results if alone else results + ",",
        call=f"f0, {', '.join(names[v] for v in nodes[0].inputs)}" if alone else f"body, {given}",
        tensors="\n".join(indent + x for x in tensors), value=value)
    made_functions: dict[str, Any] = {}
    exec(compile(text, "<a program of the host>", "exec"), made_functions)
    return made_functions["written"](tuple(scope.values()))


def _gives_arrays(n: Node) -> bool:
    """Whether the meaning of a node gives an array, and no scalar of NumPy's."""
    return isinstance(n.op.ref, np.ufunc) and n.outputs[0].aval.ndim > 0


def make_quiet() -> Callable:
    """What calls a function of arrays in this thread where NumPy does not speak of what overflows:
    np.errstate for each call takes 0.7 us, this 0.03 (x86, Python 3.11, 2026-11-28)."""
    context = copy_context()
    context.run(np.seterr, all="ignore")
    trace_state.quiet = context.run
    return context.run


__all__ = ["LONG_WAY", "Outcome", "host_program"]
