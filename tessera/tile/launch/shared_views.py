"""Views of tensors on a GPU that cost no launch: what such a tensor has in place of memory.

    y = x.reshape(32, 128)   # reads x's memory, until somebody may write there
    z = w.mT                 # w's memory and the views to take of it: x @ z is a matmul that reads
                             # w as it lies, one that wants z's elements has them copied

A view keeps the elements that its base had when it was made. Who may write into memory asks for it
by `Resident.memory`, which gives each view of it elements of its own first; a program that writes
over a donated argument asks whether anybody else has its memory, as a view does.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from tessera.runtime.buffer import BufferPart

if TYPE_CHECKING:
    from tessera.runtime.buffer import DeviceBuffer

    from .resident import Resident

_views: dict[int, list[weakref.ref[Resident]]] = {}  # by the id of the memory, which they keep
_exported: weakref.WeakSet[DeviceBuffer] = weakref.WeakSet()  # others may write there at any time
_any_exported: set[Any] = _exported.data  # type: ignore[attr-defined]  # whose bool() is quicker


MOST = 256  # memories of which is known whether they have views, before it is asked of each
FEW = 64  # views of a memory, before it is asked which are still there
ONE = 3  # who has memory that only a view has: itself, a name, and the argument of getrefcount


class ViewProgram(Protocol):
    """What gives views of a tensor."""

    def copy_of(self, base: Resident, /) -> Resident:
        """Their elements, in memory of their own."""


class SharedView:
    """shape, type, memory: of what is shared, in rows.  chain: the program of the views that are to
    be taken of it; None where the elements of the tensor lie as they do there."""

    __slots__ = ("shape", "type", "memory", "chain", "of")
    tensor_at: Callable[[tuple[int, ...], Any, Any], Resident]  # of resident.py, which stands on us

    def __init__(self, shape: tuple[int, ...], numeric: Any, memory: DeviceBuffer,
                 chain: ViewProgram | None, of: Resident):
        """of: the tensor that has it in place of its memory."""
        self.shape, self.type, self.memory, self.chain = shape, numeric, memory, chain
        self.of = ref = weakref.ref(of)
        number = id(whole_of(memory))
        tensors = _views.get(number)
        if tensors is None:
            if len(_views) >= MOST:  # memory that went is the id of some other, without a view
                for n in [n for n, tensors in tuple(_views.items()) if not any(
                        x() is not None for x in tensors)]:
                    _views.pop(n, None)
            tensors = _views.setdefault(number, [])
        tensors.append(ref)
        if (count := len(tensors)) >= FEW and not count & (count - 1):
            tensors[:] = [x for x in tensors if x() is not None]

    @property
    def base(self) -> Resident:
        """A tensor of its own on the memory that is shared."""
        return SharedView.tensor_at(self.shape, self.type, self.memory)

    @property
    def device(self) -> Any:
        return self.memory.device

    def read(self) -> DeviceBuffer:
        """Where the elements lie, for those who only read."""
        return self.memory if self.chain is None else self.own()

    def own(self) -> DeviceBuffer:
        """Memory that nobody else has, which is the tensor's from here on."""
        made = self.memory
        if self.chain is not None:
            made = self.chain.copy_of(self.base)._storage
        elif type(made) is BufferPart or sys.getrefcount(made) > ONE:
            made = self.base.copy()._storage
        if (x := self.of()) is not None and x._storage is self:
            x._storage = made
        return made


def whole_of(memory: DeviceBuffer) -> DeviceBuffer:
    """The memory of which it is a part, or itself."""
    return memory.whole if isinstance(memory, BufferPart) else memory


def is_shared(memory: DeviceBuffer) -> bool:
    return bool(_views) and id(memory) in _views


def end_views(memory: DeviceBuffer) -> None:
    """Somebody may write there: its views have elements of their own from here on."""
    for ref in [*_views.get(id(memory), ())]:
        view = None if (x := ref()) is None else x._storage
        if type(view) is SharedView and whole_of(view.memory) is memory:
            view.own()


def export(memory: DeviceBuffer) -> None:
    """Another library is told the memory, and may write there at any time: no view shares it."""
    _exported.add(memory)


def is_exported(memory: DeviceBuffer) -> bool:
    return bool(_any_exported) and memory in _exported


__all__ = ["SharedView", "end_views", "export", "is_exported", "is_shared",
           "whole_of"]
