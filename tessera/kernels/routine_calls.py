"""Calls of a routine like one before: what it did is done again, without asking what to do.

A routine decides from shapes, types and options alone, so its function is run once more with
arrays that only write down what is asked of them. For gemm on torch tensors, in two parts, it reads

    def call(a0, a1, a2):
        v3 = make3()
        v4 = make4()
        run5(a0, a1, v4, k5_3, ...)
        v6 = reshaped(v4, k6)
        v7 = reshaped(v3, k7)
        run8(v6, v7, count=k8_count)
        return v3

and a call is found by the classes of its arguments, and the facts of each array that decide about
a launch. Numbers among the arguments are seldom the same: such calls are not written down.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..numerics import DType, NumericType, as_type
from ..runtime.arrays import HOST, Array, face_of, place_of, read_array
from ..tensor import Tensor
from ..tile.launch.first_call import form_of
from ..tile.launch.results import array_maker
from .routine_arrays import RoutineArray, distributed, reshaped, viewed
from .routine_launcher import RoutineLauncher

KEPT = 1024  # calls of one routine; more are shapes that do not come again
OPTIONS = (bool, str, type(None))

SOURCE = """\
def key({arguments}):
    return ({facts})
"""


class RoutineCalls:
    """Those of one routine that may be repeated."""

    def __init__(self) -> None:
        self._keys: dict[tuple, Callable[..., tuple]] = {}
        self._calls: dict[tuple, Callable[..., Any]] = {}

    def find(self, args: tuple, kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        """What does a call, of all its arguments in a row, where there was one like it."""
        form = form_of(args, kwargs)
        key = self._keys.get(form)
        found = None if key is None else self._calls.get((form, key(*args, *kwargs.values())))
        return found

    def add(self, routine: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Writes a call down that has just been made, if it may be repeated."""
        objects = (*args, *kwargs.values())
        if not all(isinstance(x, OPTIONS) or _repeats(x) for x in objects):
            return
        form = form_of(args, kwargs)
        if form not in self._keys:
            self._keys[form] = _key_of(objects)
        if len(self._calls) >= KEPT:
            self._calls.clear()
        writer = CallWriter(routine, objects)
        held = writer.arguments
        given = dict(zip(kwargs, held[len(args):], strict=True))
        result = routine.fn(writer, *held[:len(args)], **given)
        self._calls[form, self._keys[form](*objects)] = writer.call(result)


def _repeats(x: Any) -> bool:
    """Whether it is an array on a GPU that can be known again by its facts."""
    face = face_of(type(x))
    return face is not None and bool(face.facts) and place_of(x) not in (None, HOST) \
        and not distributed(x)


def _key_of(objects: tuple) -> Callable[..., tuple]:
    facts = ""
    for i, x in enumerate(objects):
        if isinstance(x, OPTIONS):
            facts += f"a{i}, "
            continue
        face = face_of(type(x))
        assert face is not None
        own = (*face.facts, *(("{}.type", "{}.layout is None") if isinstance(x, Tensor) else ()))
        facts += "".join(f"{fact.format(f'a{i}')}, " for fact in own)
    scope: dict[str, Any] = {}
    arguments = ", ".join(f"a{i}" for i in range(len(objects)))
    exec(SOURCE.format(arguments=arguments, facts=facts), scope)
    return scope["key"]


class RecordedArray(RoutineArray):
    """An argument or what becomes of it. name: in the call's text; array: an argument as it lies,
    which says where results lie and of what library they are."""

    def __init__(self, writer: CallWriter, name: str, shape: tuple[int, ...], numeric: NumericType,
                 array: Array):
        self.writer, self.name, self.array = writer, name, array
        self.shape, self.type, self.place = shape, numeric, array.device

    def empty(self, shape: tuple[int, ...], numeric: NumericType) -> RecordedArray:
        make = array_maker(self.array.library, shape, numeric, self.place)
        name = self.writer.line("v{i} = make{i}()", make=make)
        return RecordedArray(self.writer, name, shape, numeric, self.array)

    def reshape(self, shape: tuple[int, ...]) -> RecordedArray:
        name = self.writer.line("v{i} = reshaped(" + self.name + ", shape{i})", shape=shape)
        return RecordedArray(self.writer, name, shape, self.type, self.array)

    def viewed(self, dtype: DType) -> RecordedArray:
        name = self.writer.line("v{i} = viewed(" + self.name + ", dtype{i})", dtype=dtype)
        return RecordedArray(self.writer, name, self.shape, as_type(dtype), self.array)


class CallWriter(RoutineLauncher):
    """Writes down what a routine's function launches."""

    def __init__(self, routine: Any, objects: tuple):
        super().__init__(routine)
        self.scope: dict[str, Any] = {"reshaped": reshaped, "viewed": viewed}
        self.lines: list[str] = []
        self.count = len(objects)
        self.arguments = [x if isinstance(x, OPTIONS) else self._argument(f"a{i}", x)
                          for i, x in enumerate(objects)]

    def _argument(self, name: str, x: Any) -> RecordedArray:
        array = read_array(x, name)
        numeric = x.type if isinstance(x, Tensor) else as_type(array.dtype)
        return RecordedArray(self, name, tuple(x.shape), numeric, array)

    def line(self, text: str, **values: Any) -> str:
        """Adds a statement; {i} is its number, which the names of its values end in."""
        i = self.count + len(self.lines)
        self.scope |= {f"{name}{i}": value for name, value in values.items()}
        self.lines.append(text.format(i=i))
        return f"v{i}"

    def run(self, name: str, *args: Any, warps: int | None = None,
            knobs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        i, kernel, lanes = self.count + len(self.lines), self.kernel(name, knobs), \
            self.lanes(warps)
        launch = kernel if lanes is None else partial(kernel.launch, **self.options | {
            "lanes": lanes})
        texts = [self._value(x, f"k{i}_{n}") for n, x in enumerate(args)]
        texts += [f"{n}={self._value(x, f'k{i}_{n}')}" for n, x in kwargs.items()]
        self.line("run{i}(" + ", ".join(texts) + ")", run=launch)

    def note(self, *why: str) -> None:
        super().note(*why)
        self.line("routine{i}.notes = why{i}", routine=self.routine, why=why)

    def _value(self, x: Any, name: str) -> str:
        if isinstance(x, RecordedArray):
            return x.name
        self.scope[name] = x
        return name

    def call(self, result: Any) -> Callable[..., Any]:
        """The function of what was written down."""
        text = ", ".join(x.name for x in result) if isinstance(result, tuple) else result.name
        body = "".join(f"    {line}\n" for line in [*self.lines, f"return {text}"])
        exec(f"def call({', '.join(f'a{i}' for i in range(self.count))}):\n{body}", self.scope)
        return self.scope["call"]


__all__ = ["RoutineCalls"]
