"""An optimizer whose state lies in pages, of which all but some bytes are in host memory.

    optimizer = ts.optim.paged(ts.optim.AdamW(), resident_bytes=1 << 30)
    state = optimizer.init(params)                                  the rest is on the host
    params, state = optimizer.update(params, grads, state, lr)      and comes page by page

A page is one tensor of the state. Each is brought ahead of the update that reads it, and leaves
behind it, beside the updates of others. What is computed is the same.
"""

from __future__ import annotations

from typing import Any

from ..errors import ArgumentError
from ..graph import tree
from ..graph.jit import jit
from ..graph.ops.place import PLACE
from ..graph.trace import apply, current_builder
from ..lazy_dataclass import dataclass
from ..mesh.parallel.matching_layouts import is_distributed
from ..tensor import Tensor
from ..tile.launch.resident import begin_upload, offload
from .record import OptimizerRecord
from .trainable import named_params

LEAST_BYTES = 1 << 16  # of a page on the host: shorter ones are not worth a copy, and stay


@dataclass(frozen=True)
class Paged:
    """An optimizer with its state in pages. Make one with `ts.optim.paged`."""

    optimizer: Any
    resident_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("init", "update"):
            if isinstance(self.optimizer, type) or not callable(
                    getattr(self.optimizer, name, None)):
                raise ArgumentError(f"paged wraps an optimizer, got {self.optimizer!r}",
                                    hint="ts.optim.paged(ts.optim.AdamW())")
        limit = self.resident_bytes
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise ArgumentError(f"resident_bytes is a number of bytes, got {limit!r}",
                                hint="resident_bytes=1 << 30 keeps 1 GiB of the state on the GPU")

    def init(self, params: Any) -> Any:
        """The state before the first step: of an optimizer of ts.optim made parameter by parameter,
        so that it is never all on the device."""
        _need_one_device(params)
        if current_builder() is not None or not isinstance(self.optimizer, OptimizerRecord):
            return self.placed(self.optimizer.init(params))
        state: dict[str, Any] = {}
        for path, p in named_params(params).items():
            for name, made in self.optimizer.init({path: p}).items():
                for x in filter(_is_page, made.values() if isinstance(made, dict) else ()):
                    offload(x)
                state[name] = state[name] | made if isinstance(state.get(name), dict) else made
        return self.placed(state)

    def update(self, params: Any, grads: Any, state: Any, lr: Any) -> tuple[Any, Any]:
        """(params, state) after one step. Outside of `ts.jit` it is a compiled function itself."""
        _need_one_device(params)
        if current_builder() is None:
            made: tuple[Any, Any] = _update(params, grads, state, lr, paged=self)
            return made
        new, made = self.optimizer.update(params, grads, state, lr)
        return new, self.placed(made)

    def placed(self, state: Any) -> Any:
        """A state with its pages where they belong: the first ones stay, as far as there is room.
        """
        leaves, structure = tree.flatten(state)
        room = self.resident_bytes - sum(x.nbytes for x in leaves if not _is_page(x))
        placed = []
        for x in leaves:
            if _is_page(x) and (room := room - x.nbytes) < 0:
                if current_builder() is None:
                    offload(x)
                else:
                    x = apply(PLACE, x, to="host")
            elif current_builder() is None and isinstance(x, Tensor):
                begin_upload(x)
            placed.append(x)
        return tree.unflatten(structure, placed)


def paged(optimizer: Any, resident_bytes: int = 0) -> Paged:
    """An optimizer whose state lies in host memory, but for the first `resident_bytes` of it.

    optimizer: `ts.optim.AdamW()`, or anything with init(params) and update(params, grads, state,
    lr) of tensors on one GPU
    What lies on the host is page-locked. A step brings each tensor of the state ahead of the update
    that reads it, and sends it back behind it: twice the state's bytes on the way, beside the work,
    and a few tensors of it on the GPU beside `resident_bytes` meanwhile.
    Tensors of less than 64 KiB stay on the GPU. On a host all of it lies there anyway.
    Raises ArgumentError for parameters on a mesh: `ts.dist.zero` splits their states.
    """
    return Paged(optimizer, resident_bytes)


@jit(static=("paged",), name="paged_update")
def _update(params: Any, grads: Any, state: Any, lr: Any, *, paged: Paged) -> tuple[Any, Any]:
    return paged.update(params, grads, state, lr)


def _is_page(x: Any) -> bool:
    return isinstance(x, Tensor) and x.nbytes >= LEAST_BYTES


def _need_one_device(params: Any) -> None:
    if any(isinstance(p, Tensor) and is_distributed(p) for p in tree.flatten(params)[0]):
        raise ArgumentError("paged: the parameters lie on a mesh", hint="ts.dist.zero("
                            "ts.optim.AdamW(), stage) splits the state over its ranks")


__all__ = ["Paged", "paged"]
