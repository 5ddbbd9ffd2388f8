"""Launching a kernel on arrays: pointers taken, devices and streams found, host arrays staged.

    launch(kernel, (blocks,), [x, y, n], written=(1,))

Arrays on a GPU are used where they lie. NumPy arrays (and a Tensor's buffer) are copied to the GPU
and, when written, back, which waits for the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError
from .arrays import HOST, Array, current_stream, face_of, overlap, read_array
from .buffer import Buffer, stream_pointer
from .device import check, device, driver
from .module import Grid, Kernel
from .timing import is_capturing

_SCALARS = (int, float, bool, np.generic)


def launch(kernel: Kernel, grid: Grid, args: Sequence[Any], *, names: Sequence[str] = (),
           written: Sequence[int] = (), stream: Any = None, on: int | None = None) -> None:
    """Run a kernel whose pointer parameters are given as arrays and the others as numbers.

    args: in the order of the kernel's parameters. names: for messages. written: positions of the
    arrays that the kernel writes. stream: by default the one on which the arrays' library works.
    """
    values: list[Any] = []
    arrays: list[tuple[int, Array]] = []
    places: list[tuple[int, int, str]] = []  # argument, device, library
    for i, value in enumerate(args):
        if isinstance(value, _SCALARS):
            values.append(value)
            continue
        face = face_of(type(value))
        if face is not None and face.address is not None and (at := face.place(value)) != HOST:
            values.append(face.address(value))
            places.append((i, at, face.library))
            continue
        array = read_array(value, names[i] if names else str(i))
        arrays.append((i, array))
        places.append((i, array.device, array.library))
        values.append(array.pointer)
    index, library = _place(places, names, on)
    queue = stream_pointer(stream) if stream is not None else current_stream(library, index)
    host = [(i, array) for i, array in arrays if array.device == HOST]
    for i in written:
        _check_written(dict(arrays).get(i), names[i] if names else str(i))
    if not host:
        kernel.launch(grid, values, stream=queue, device=index)
        return
    staged = Staging(host, index, queue, set(written))
    for i, pointer in staged.pointers():
        values[i] = pointer
    kernel.launch(grid, values, stream=queue, device=index)
    staged.copy_back()


def _check_written(array: Array | None, name: str) -> None:
    if array is not None and not array.writable:
        raise ArgumentError(f"argument {name} is read-only ({array.library}), the kernel writes it",
                            hint="pass an array that may be written")


def _place(places: list[tuple[int, int, str]], names: Sequence[str],
           on: int | None) -> tuple[int, str]:
    """Device and library of the launch: those of the arrays on a GPU, which must agree."""
    index, library = on, ""
    for i, at, of in places:
        if at == HOST:
            continue
        if index is None:
            index = at
        if at != index:
            raise ArgumentError(
                f"argument {names[i] if names else i} lies on cuda:{at}, the kernel runs on "
                f"cuda:{index}", hint="move it there first")
        library = library or of
    return index or 0, library


class Staging:
    """Copies of host arrays on a device for the time of one launch."""

    def __init__(self, host: list[tuple[int, Array]], index: int, stream: int, written: set[int]):
        self._stream, self._written, self._index = stream, written, index
        if is_capturing(stream):
            raise ArgumentError("a launch on host arrays cannot be captured in a graph",
                                hint="pass arrays that lie on the GPU")
        made: dict[tuple[int, int], Buffer] = {}  # an array that is given twice has one copy
        self._copies = []
        for i, array in host:
            place = (array.pointer, _nbytes(array))
            if place not in made:
                made[place] = Buffer(place[1], device(index))
                made[place].write(np.ascontiguousarray(_host_view(array)))
            self._copies.append((i, _host_view(array), made[place]))
        if written and overlap(list(made)):
            raise ArgumentError("two host arrays share a part of their memory, and one is written: "
                                "their copies on the GPU would not", hint="pass copies, or arrays "
                                "that lie on the GPU")

    def pointers(self) -> list[tuple[int, int]]:
        return [(i, buffer.pointer) for i, _, buffer in self._copies]

    def copy_back(self) -> None:
        """Wait for the launch, then fill the host arrays it wrote."""
        check(driver().cuStreamSynchronize(self._stream), "wait for the kernel")
        for i, view, buffer in self._copies:
            if i in self._written:
                dense = view if view.flags.c_contiguous else np.empty(view.shape, view.dtype)
                buffer.read(dense)
                if dense is not view:
                    view[...] = dense


def _host_view(array: Array) -> np.ndarray:
    if isinstance(array.owner, np.ndarray):
        return array.owner
    if array.library == "tessera":
        return array.owner.buffer
    raise ArgumentError(
        f"a {array.library} array lies in host memory",
        hint="move it to the GPU, or pass a NumPy array, which is copied there and back")


def _nbytes(array: Array) -> int:
    return _host_view(array).nbytes


