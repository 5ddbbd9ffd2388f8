"""Steps that a vendor's library does, through CuPy: transforms, factorizations, solvers.

Which library it is stands in the op's record, and in the schedule. Its function is written once for
any module with NumPy's names: the interpreter's run of a program takes NumPy itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ....errors import NumericsError, UnsupportedTargetError
from ....lazy_dataclass import dataclass
from ...ir import Node
from ...op import VendorLibrary
from ...schedule.groups import FusionGroup
from ...schedule.ir import GroupOperand, ScheduledGroup
from ...schedule.loop_axes import extents_of
from ..kernels.spell import no_kernel

TYPES = frozenset({"f32", "f64"})  # that the libraries have


@dataclass(frozen=True, eq=False)
class LibraryCallee:
    """What a step calls, and with which attributes."""

    node: Node

    def __str__(self) -> str:
        return f"{self.record.name} through CuPy"

    @property
    def record(self) -> VendorLibrary:
        assert self.node.op.library is not None
        return self.node.op.library

    def __call__(self, module: Any, *arrays: Any) -> tuple[Any, ...]:
        """module: NumPy or CuPy, whose arrays these are. Raises NumericsError."""
        try:
            made = self.record.run(module, *arrays, **self.node.attrs)
        except np.linalg.LinAlgError as error:
            raise self.failure(error) from error
        return tuple(made) if self.node.op.multi else (made,)


    def failure(self, error: Exception) -> NumericsError:
        """What the op raises on the CPU; the library does not tell which matrix it was."""
        made = self.record.failure
        found = made() if made else NumericsError(f"{self.node.op.name}: {error}")
        found.where = self.node.where
        return found


def library_group(node: Node) -> FusionGroup:
    """The group of such a node. Raises UnsupportedTargetError for types that the library lacks."""
    for v in (*node.inputs, *node.outputs):
        if v.aval.dtype.kind == "float" and v.aval.dtype.name not in TYPES:
            raise no_kernel(node, f"{node.op.library.name} has no {v.aval.dtype}"  # type: ignore[union-attr]
                            ": cast to f32")
    return FusionGroup("library", extents_of(node.outputs[0]), [node], list(node.inputs),
                       list(node.outputs), writes_all=True)


@dataclass(frozen=True, eq=False)
class LibraryStep:
    """The step of a group of kind "library"."""

    group: ScheduledGroup

    @property
    def callee(self) -> LibraryCallee:
        return self.group.attr("calls")

    def run(self, read: Callable[[str], np.ndarray]) -> None:
        """On host memory. read: the memory of a buffer."""
        with np.errstate(all="ignore"):
            made = self.callee(np, *(_run_of(read, o) for o in self.group.reads))
        for o, y in zip(self.group.writes, made, strict=True):
            _run_of(read, o)[...] = y

    def launch(self, pointer: Callable[[str], int], index: int, stream: int) -> None:
        """On a GPU, on the memory that the plan gave. Waits where the library reports by number."""
        cupy = need_cupy(self.callee)
        on = cupy.cuda.ExternalStream(stream, index) if stream else cupy.cuda.Stream.null
        errors = importlib.import_module("cupyx").errstate(linalg="raise")
        with cupy.cuda.Device(index), on, errors:
            made = self.callee(cupy, *(_array(cupy, o, pointer, index) for o in self.group.reads))
            for o, y in zip(self.group.writes, made, strict=True):
                _array(cupy, o, pointer, index)[...] = y


def _run_of(read: Callable[[str], np.ndarray], o: GroupOperand) -> np.ndarray:
    """The elements of an operand in its buffer."""
    size = int(np.prod(o.shape, dtype=np.int64))
    return read(o.name).reshape(-1)[o.offset:o.offset + size].reshape(o.shape)


def _array(cupy: Any, o: GroupOperand, pointer: Callable[[str], int], index: int) -> Any:
    """A buffer as an array of CuPy's."""
    dtype = o.type.dtype.numpy
    nbytes = int(np.prod(o.shape, dtype=np.int64)) * dtype.itemsize
    begin = pointer(o.name) + o.offset * dtype.itemsize
    memory = cupy.cuda.UnownedMemory(begin, nbytes, None, index)
    return cupy.ndarray(o.shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def need_cupy(callee: LibraryCallee) -> Any:
    """CuPy. Raises UnsupportedTargetError without."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise UnsupportedTargetError(
            f"{callee.node.op.name} runs in {callee.record.name}, which is called through CuPy, "
            "and CuPy is not installed", where=callee.node.where,
            hint='pip install cupy-cuda13x, or run the function with target="cpu"') from error


__all__ = ["LibraryCallee", "LibraryStep", "library_group", "need_cupy"]
