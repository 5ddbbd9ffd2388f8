"""`ts.array`: distributed tensors made from a domain, what there is, and who has which part.

    D = ts.domain.Rect((4096, 1024))
    X = ts.array.from_domain(D, dtype="bf16", distribution=ts.dist.Block(mesh_axes=("dp", "tp")))
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from .errors import UnknownNameError
from .mesh.device_mesh import Mesh
from .mesh.domain import Rect
from .mesh.tensor import DistTensor, tensor


def from_domain(domain: Rect | Sequence[int], dtype: Any = "f32", distribution: Any = None,
                mesh: Mesh | None = None, init: Any = None, *, seed: int | None = None
                ) -> DistTensor:
    """A distributed tensor with one element per index of a domain.

    domain: a Rect, or its extents   distribution: Block, Cyclic, Replicated or ShardSpec; default
    replicated   mesh: default the one whose `with` block is open   init, seed: as `ts.dist.tensor`;
    a function init(i, j) gets the indices of the domain, which begin at its `lo`
    Raises ArgumentError, AxisError for a distribution that does not fit.
    """
    rect = domain if isinstance(domain, Rect) else Rect(domain)
    if callable(init):
        init = _shifted(init, rect.lo)
    return tensor(rect.shape, distribution, mesh, dtype, init, seed=seed)


def _shifted(init: Any, lo: Sequence[int]) -> Any:
    """A function of indices from 0, of one of indices from lo."""
    def moved(*index: np.ndarray) -> Any:
        return init(*(i + a for i, a in zip(index, lo, strict=True)))

    return moved


class _ArrayModule(ModuleType):
    """The module. Called, it says what other libraries' `array` is here."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnknownNameError("tessera has no name 'array' to call: ts.array is the module of "
                               "from_domain", hint="ts.tensor(data)")


sys.modules[__name__].__class__ = _ArrayModule
__all__ = ["from_domain"]
