"""How often a captured launch has run: a number in device memory that its graph counts up itself.

Whoever replays a graph (torch, CuPy, the driver) does not tell us, so a launch that must differ
from replay to replay reads the number, and a kernel of one thread behind it in the graph adds one.
"""

from __future__ import annotations

import functools

import numpy as np

from .buffer import DeviceBuffer
from .device import device
from .module import LoadedKernel

# Translated by the driver for its device; PTX ISA 6.4 and sm_75 are the oldest that are supported.
ADD_ONE = """\
.version 6.4
.target sm_75
.address_size 64
.visible .entry tessera_add_one(.param .u64 at)
{
    .reg .b64 %address, %number;
    ld.param.u64 %address, [at];
    ld.global.u64 %number, [%address];
    add.u64 %number, %number, 1;
    st.global.u64 [%address], %number;
    ret;
}
"""
_kept: list[DeviceBuffer] = []  # a graph may be replayed for the life of the process


class Replays:
    """The number of replays of one captured launch: 0 in the first, then one more in each."""

    def __init__(self, index: int):
        self._index, self._memory = index, DeviceBuffer(8, device(index))
        self._memory.write(np.zeros(1, np.int64))
        _add_one(index).on(index)  # loaded outside of the capture
        _kept.append(self._memory)

    @property
    def pointer(self) -> int:
        return self._memory.pointer

    def advance(self, stream: int) -> None:
        """Behind the launch in its graph."""
        _add_one(self._index).launch((1,), (self.pointer,), stream=stream, device=self._index)


@functools.cache
def _add_one(index: int) -> LoadedKernel:
    return LoadedKernel(ADD_ONE.encode() + b"\0", "tessera_add_one", ("i64",),
                        target=device(index).target, threads=1)


__all__ = ["Replays"]
