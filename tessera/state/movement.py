"""`with device(gpu), prefetch(cache, into="smem", overlap="compute"):` what is to lie where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .. import config
from ..errors import ArgumentError, UnsupportedTargetError, did_you_mean
from ..graph import tree
from ..numerics.policy import BLOCKS
from ..runtime.device import device as find_device
from ..runtime.device import has_gpu
from ..tensor import Tensor, as_tensor
from .effect import moves
from .kv_cache import KVCache

SPACES = ("smem", "hbm", "device", "host")
OVERLAPS = ("compute", "none")


@contextmanager
def placed(name: str) -> Iterator[None]:
    """`with device("cuda"):` new tensors lie there, and what is computed inside runs there.

    cuda:1, which is gpu[1]: on that GPU; cuda: on the first; UnsupportedTargetError where it is
    missing. gpu: on this process's GPU, and where there is none, on the host. cpu: on the host.
    """
    family, _, number = name.partition(":")
    if family not in ("gpu", "cuda", "cpu") or (number and not number.isdecimal()):
        raise UnsupportedTargetError(f"with device({name!r}): there is no such device",
                                     hint="gpu, gpu[0], cpu")
    if family == "cuda":
        find_device(int(number or 0))  # raises where there is none
    where = "auto" if family == "gpu" and not has_gpu() else "cuda" if family == "gpu" else name
    with config.scope(device=where):
        yield


BLOCKS["device"] = placed


class prefetch:
    """`with prefetch(obj, into="smem", overlap="compute"):` the data that the block reads of `obj`
    is to be fetched ahead.

    obj: a tensor, a KVCache, or a tree of them. into: "smem" for the loads of kernels, or "hbm"
    ("device") and "host". overlap: "compute" while the block computes, "none" before it.
    A hint: a `move` node of the graph says so (`f.effects` has movement), values are the same with
    it and without. Raises ArgumentError for another space.
    """

    def __init__(self, obj: Any, *, into: str = "smem", overlap: str = "compute"):
        for name, value, known in (("into", into, SPACES), ("overlap", overlap, OVERLAPS)):
            if value not in known:
                raise ArgumentError(f"prefetch has no {name}={value!r}",
                                    hint=did_you_mean(str(value), known))
        leaves = [x for x in tree.flatten(obj)[0] if isinstance(x, Tensor | np.ndarray)]
        if not leaves:
            raise ArgumentError(f"prefetch needs tensors or a state object, got "
                                f"{type(obj).__name__}")
        self.tensors = [as_tensor(x) for x in leaves]
        self.into, self.overlap = into, overlap
        self.what = type(obj).__name__ if isinstance(obj, KVCache) else "tensors"

    def __enter__(self) -> prefetch:
        moves("prefetch", self.what, self.tensors, self.into, self.overlap)
        return self

    def __exit__(self, *exc: object) -> None:
        return None
