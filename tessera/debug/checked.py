"""A call of a kernel under the sanitizer, on copies of its arguments."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from .. import config
from ..errors import ArgumentError, user_line
from ..graph.signature import callable_name
from ..lazy_dataclass import dataclass
from ..numerics.random_state import rehearsal
from ..runtime.arrays import HOST, place_of
from ..runtime.dlpack import imported
from ..tensor import Tensor
from ..tile.interpreter.arguments import Bound
from ..tile.interpreter.launch import Config, Specialisation, run_grid
from ..tile.interpreter.machine import SanitizerReport
from ..tile.interpreter.sanitizer import Sanitizer
from ..tile.ir.errors import KernelError
from ..tile.ir.ir import Function
from ..tile.kernel.kernel import Kernel


@dataclass(frozen=True)
class Checked:
    """A call that ran under the sanitizer. errors: in the order in which they were met; one that
    is no race, such as an index outside, ended the run."""

    name: str
    function: Function
    groups: int
    lanes: int
    report: SanitizerReport
    errors: tuple[KernelError, ...]


class Counting(Sanitizer):
    """Only numbers the lines: for counting patterns, without a record of each address."""

    def read(self, a: Any) -> None:
        pass

    def wrote(self, a: Any, atomic: bool = False, values: Any = None) -> None:
        pass

    def in_flight(self, a: Any, source: Any) -> None:
        pass

    def has_read(self, source: Any) -> None:
        pass

    def landed(self, a: Any) -> None:
        pass


def copied(kernel: Kernel, args: tuple, kwargs: dict[str, Any]) -> Bound:
    """The arguments of a call as copies in host memory: a run does not change the caller's. Those
    that share memory do so as copies, too."""
    copy = _Copies()
    return kernel.bind(tuple(map(copy, args)), {k: copy(v) for k, v in kwargs.items()})


def launch_of(kernel: Kernel, bound: Bound, groups: Any = None, lanes: int | None = None
              ) -> Specialisation:
    """What a call would run."""
    groups = groups if groups is None or isinstance(groups, tuple) else (groups,)
    return kernel.specialised(bound, Config(groups, lanes))


def checked_run(kernel: Kernel, bound: Bound, sanitizer: Sanitizer, *, groups: Any = None,
                lanes: int | None = None, most: int | None = None) -> Checked:
    """Interprets a call. most: only so many groups."""
    work = launch_of(kernel, bound, groups, lanes)
    report = SanitizerReport(checked=True)
    stopped: tuple[KernelError, ...] = ()
    with config.scope(debug=True, numerics="off"), rehearsal():
        try:
            run_grid(work.function, bound, work.lanes, work.grid, kernel.__name__, sanitizer,
                     report, most)
        except KernelError as error:
            stopped = (error,)
    return Checked(kernel.__name__, work.function, prod(work.grid), work.lanes, report,
                   (*sanitizer.found.values(), *stopped))


def need_kernel(kernel: Any) -> None:
    if not isinstance(kernel, Kernel):
        raise ArgumentError(f"{callable_name(kernel)} is no kernel: {type(kernel).__name__}",
                            hint="give a function made by @ts.kernel, and then its arguments",
                            where=user_line())


class _Copies:
    """Copies of arguments that a run may write: in host memory, one for each memory."""

    def __init__(self) -> None:
        self.bases: dict[int, np.ndarray] = {}  # bytes, by the base that was copied
        self.tensors: dict[int, Tensor] = {}
        self.kept: list[Any] = []  # whose ids these are

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.kept.append(value)
            if id(value) not in self.tensors:
                array = value.array.copy() if value.dtype.packed else self.view(value.array)
                self.tensors[id(value)] = Tensor(array, value.type, scale=value.scale)
            return self.tensors[id(value)]
        place = place_of(value)
        if place is None:
            return value
        if place != HOST:
            raise ArgumentError(f"a {type(value).__module__} array on cuda:{place}: the "
                                "interpreter reads host memory", where=user_line(),
                                hint="x.get() of CuPy, x.cpu() of torch")
        return self.view(value if isinstance(value, np.ndarray) else imported(value))

    def view(self, x: np.ndarray) -> np.ndarray:
        """The same view of a copy of its base."""
        base = x
        while isinstance(base.base, np.ndarray):
            base = base.base
        if not base.flags.c_contiguous or x.size == 0:
            return np.array(x)
        if id(base) not in self.bases:
            self.kept.append(base)
            self.bases[id(base)] = np.frombuffer(base.tobytes(), np.uint8).copy()
        offset = x.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        return np.ndarray(x.shape, x.dtype, self.bases[id(base)], offset, x.strides)


__all__ = ["Checked", "Counting", "checked_run", "copied", "need_kernel"]
