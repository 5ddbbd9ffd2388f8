"""Arrays that routines take and fill: of any library, wherever they lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from ..numerics import DType, NumericType, as_type
from ..runtime.arrays import HOST, Array, dense_strides, place_of, read_array, reader
from ..runtime.device import device
from ..runtime.generations import Generation
from ..tensor import Tensor
from ..tile.launch.results import maker


class RoutineArray(ABC):
    """What stands for an array while a routine's launches become nodes of a graph."""

    shape: tuple[int, ...]
    type: NumericType
    place = HOST  # the number of the GPU, where that is known

    @abstractmethod
    def empty(self, shape: tuple[int, ...], numeric: NumericType) -> RoutineArray:
        """One that a kernel will fill."""

    @abstractmethod
    def reshape(self, shape: tuple[int, ...]) -> RoutineArray:
        """The same elements: what is written into one is in the other."""

    def viewed(self, dtype: DType) -> RoutineArray:
        """Its bytes as another type of that size; where it stands for memory of a GPU."""
        raise AssertionError("an array that lies on no GPU is read as its own type")


def distributed(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is not None


def type_of(x: Any, name: str) -> NumericType:
    """The numeric type of an array of any library."""
    return x.type if isinstance(x, Tensor | RoutineArray) else as_type(read_array(x, name).dtype)


def generation_of(x: Any) -> Generation | None:
    """What the GPU has on which an array lies; None on a host, and where that is not known."""
    where = x.place if isinstance(x, RoutineArray) else place_of(x)
    return None if where is None or where == HOST else device(where).target.generation


def empty_like(x: Any, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Any:
    """An array that a kernel will fill: of x's library, place, and unless given extents and type.
    """
    numeric = type_of(x, "x") if dtype is None else as_type(dtype)
    shape = tuple(x.shape) if shape is None else shape
    if isinstance(x, RoutineArray):
        return x.empty(shape, numeric)
    where = place_of(x)
    if where is not None and where != HOST:
        return maker(read_array(x, "x").library, shape, numeric, where)(None).array
    made = np.zeros(shape, numeric.dtype.numpy)
    return Tensor(made, numeric) if isinstance(x, Tensor) or numeric.dtype.packed else made


def reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    """An array of any library in another shape, on the same memory."""
    if tuple(x.shape) == shape:
        return x
    if type(x) is Tensor:
        return Tensor(x.array.reshape(shape), x.type)
    if not isinstance(x, Tensor) and hasattr(type(x), "reshape"):
        return x.reshape(shape)
    array = read_array(x, "x")
    return ForeignArray(array.pointer, shape, array.dtype, array.device, x, array.library)


def viewed(x: Any, dtype: DType) -> Any:
    """The bytes of an array on a GPU as another type of that size."""
    if isinstance(x, RoutineArray):
        return x.viewed(dtype)
    array = read_array(x, "x")
    return ForeignArray(array.pointer, array.shape, dtype, array.device, x, array.library)


class ForeignArray:
    """Device memory of somebody else as an array that kernels take. library: on whose stream work
    with it belongs."""

    __slots__ = ("pointer", "shape", "dtype", "index", "owner", "library")

    def __init__(self, pointer: int, shape: tuple[int, ...], dtype: DType, index: int, owner: Any,
                 library: str = "view"):
        self.pointer, self.shape, self.dtype = pointer, shape, dtype
        self.index, self.owner, self.library = index, owner, library


@reader(ForeignArray, place=lambda x: x.index, pointer="{}.pointer",
        facts=("{}.shape", "{}.dtype", "{}.index", "{}.library"))
def read_view(x: Any, name: str) -> Array:
    return Array(x.pointer, x.shape, dense_strides(x.shape), x.dtype, x.index, x.library, x)


__all__ = ["ForeignArray", "RoutineArray", "distributed", "empty_like", "generation_of", "reshaped",
           "type_of", "viewed"]
