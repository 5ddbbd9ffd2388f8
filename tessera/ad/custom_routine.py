"""Routines of the kernel library in graphs: their launches become nodes, with the derivative of the
same in ops."""

from __future__ import annotations

import threading
from typing import Any

from ..graph import functions as F
from ..graph.ops.kernel import is_tensor, record
from ..kernels.routine import Routine, RoutineArray, RoutineLauncher
from ..numerics import NumericType
from ..open_trace import trace_state
from ..runtime.arrays import HOST
from ..tensor import Tensor, as_tensor
from ..tile.interpreter.launch import Config
from ..tile.kernel.launch_config import groups_of, lanes_given
from .api import jvp, vjp
from .custom_kernel import become
from .custom_vjp import custom_vjp
from .transform import call_slots


class GraphArray(RoutineArray):
    """A value of a graph. `of`: the array of which it is a reshape; empty: nothing was written
    into it yet, so that the first launch that writes it writes all of it."""

    def __init__(self, value: Tensor | None, shape: tuple[int, ...], numeric: NumericType,
                 of: GraphArray | None = None, empty: bool = False):
        self._value, self.of, self.written = value, of, False
        self.shape, self.type, self._empty = shape, numeric, empty

    @property
    def is_empty(self) -> bool:
        return self._empty if self.of is None else self.of.is_empty

    @property
    def place(self) -> int:  # type: ignore[override]
        """Where the graph will run: what a routine chooses, it chooses for that GPU."""
        builder = trace_state.builder
        return HOST if builder is None else builder.place

    @property
    def value(self) -> Tensor:
        if self.of is not None:
            return F.reshape(self.of.value, self.shape)
        assert self._value is not None
        return self._value

    def write(self, value: Tensor) -> None:
        """It holds other elements from here on."""
        if self.of is not None:
            self.of.write(F.reshape(value, self.of.shape))
        else:
            self._value, self.written, self._empty = value, True, False

    def empty(self, shape: tuple[int, ...], numeric: NumericType) -> GraphArray:
        return GraphArray(F.zeros(shape, numeric), shape, numeric, empty=True)

    def reshape(self, shape: tuple[int, ...]) -> GraphArray:
        return GraphArray(None, shape, self.type, self)


class GraphLauncher(RoutineLauncher):
    """Launches become nodes."""

    def run(self, name: str, *args: Any, warps: int | None = None,
            knobs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        kernel = self.kernel(name, knobs)
        given = kernel.signature.bind(*args, **kwargs)
        explicit = frozenset(given.arguments)
        given.apply_defaults()
        held = {n: x.value if isinstance(x, GraphArray) else x for n, x in given.arguments.items()}
        config = Config(groups_of(self.options["groups"]), lanes_given(self.lanes(warps)))
        fresh = frozenset(n for n, x in given.arguments.items()
                          if isinstance(x, GraphArray) and x.is_empty)
        made = record(kernel, config, held, explicit, fresh)
        for written, value in made.written.items():
            given.arguments[written].write(value)
        return made.new


class RoutineFunction:
    """A routine as a function of values: it gives what the routine returns, then what it writes."""

    def __init__(self, routine: Routine, options: dict[str, Any]):
        self.routine, self.options = routine, options
        self.__name__ = self.__qualname__ = routine.__name__
        self.__doc__, self.__module__ = routine.__doc__, routine.__module__
        self.__signature__ = routine.shown_signature
        self.returned: Any = None  # what the last call returned: arrays, alone or in a tuple
        self.given: dict[str, GraphArray] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.__signature__.bind(*args, **kwargs)
        for name, x in bound.arguments.items():
            if is_tensor(x):
                t = as_tensor(x)
                bound.arguments[name] = GraphArray(t, tuple(t.shape), t.type)
        self.given = {n: x for n, x in bound.arguments.items() if isinstance(x, GraphArray)}
        launcher = GraphLauncher(self.routine, **self.options)
        self.returned = self.routine.fn(launcher, *bound.args, **bound.kwargs)
        return tuple(a.value for a in self.arrays)

    @property
    def written(self) -> dict[str, GraphArray]:
        return {n: a for n, a in self.given.items() if a.written}

    @property
    def arrays(self) -> tuple[GraphArray, ...]:
        """What the last call returned, then what it wrote."""
        many = self.returned if isinstance(self.returned, tuple) else (self.returned,)
        return (*many, *self.written.values())


_tracing = threading.local()  # whether a rule below is being traced: its routine runs without


def call_routine(routine: Routine, options: dict[str, Any], args: tuple, kwargs: dict[str, Any]
                 ) -> Any:
    """What the routine returns; what it writes stands for the new values from here on."""
    function = RoutineFunction(routine, options)
    inside = getattr(_tracing, "inside", False)
    if routine.record.ops is None or inside or trace_state.builder is None:
        values = function(*args, **kwargs)
    else:
        values = _with_rules(routine, function)(*args, **kwargs)
    count = len(values) - len(function.written)
    by_name = function.__signature__.bind(*args, **kwargs).arguments
    for name, value in zip(function.written, values[count:], strict=True):
        become(by_name[name], value, f"{routine.__name__} writes into {name}")
    mine = {a: n for n, a in function.given.items()}  # it may return what it was given
    many = function.returned if isinstance(function.returned, tuple) else (function.returned,)
    given = tuple(by_name[mine[a]] if a in mine else v
                  for a, v in zip(many, values[:count], strict=True))
    return given if isinstance(function.returned, tuple) else given[0]


def _with_rules(routine: Routine, function: RoutineFunction) -> custom_vjp:
    """The function with the derivatives of the same in ops, in both modes."""
    ops, signature = routine.record.ops, function.__signature__
    assert ops is not None

    def fwd(*args: Any, **kwargs: Any) -> Any:
        return made(*args, **kwargs), signature.bind(*args, **kwargs).arguments

    def same(saved: dict[str, Any], tensors: tuple) -> Any:
        """The routine in ops, of its tensors."""
        moving = iter(tensors)
        slots = {n: next(moving) if isinstance(x, Tensor) else x for n, x in saved.items()}
        args, kwargs = call_slots(signature, slots)
        return ops(F, *args, **kwargs)

    def bwd(saved: dict[str, Any], g: tuple) -> tuple:
        tensors = tuple(x for x in saved.values() if isinstance(x, Tensor))
        back = vjp(lambda *xs: same(saved, xs), *tensors)[1]
        found = back(tuple(g) if isinstance(function.returned, tuple) else g[0])
        return found if isinstance(found, tuple) else (found,)

    def rule(primals: tuple, tangents: tuple) -> tuple:
        slots = dict(zip(signature.parameters, primals, strict=False))
        args, kwargs = call_slots(signature, slots)
        pairs = [(x, t) for x, t in zip(primals, tangents, strict=True) if isinstance(x, Tensor)]
        moved = [F.zeros(x.shape, x.type) if t is None else t for x, t in pairs]
        tangent = jvp(lambda *xs: same(slots, xs), tuple(x for x, _ in pairs), tuple(moved))[1]
        value = made(*args, **kwargs)
        return value, tangent if isinstance(function.returned, tuple) else (tangent,)

    made = custom_vjp(function)  # in its rules it is a node that has them again
    made.follow(_tracing, fwd, bwd, rule)
    return made


__all__ = ["GraphArray", "call_routine"]
