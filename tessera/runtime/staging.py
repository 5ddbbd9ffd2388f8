"""Host arrays on a device for the time of one launch: copied there, and back where written."""

from __future__ import annotations

import numpy as np

from ..errors import ArgumentError
from .arrays import Array, overlap
from .buffer import DeviceBuffer
from .device import check, device, driver
from .timing import is_capturing


class Staging:
    """Copies of host arrays on a device for the time of one launch."""

    def __init__(self, host: list[tuple[int, Array]], index: int, stream: int, written: set[int]):
        self._stream, self._written, self._index = stream, written, index
        if is_capturing(stream):
            raise ArgumentError("a launch on host arrays cannot be captured in a graph",
                                hint="pass arrays that lie on the GPU")
        made: dict[tuple[int, int], DeviceBuffer] = {}  # an array that is given twice has one copy
        self._copies = []
        for i, array in host:
            place = (array.pointer, _nbytes(array))
            if place not in made:
                made[place] = DeviceBuffer(place[1], device(index))
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


