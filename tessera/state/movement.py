"""`with device(gpu), prefetch(cache, into="smem", overlap="compute"):` what is to lie where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .. import config
from ..errors import ArgumentError, UnsupportedTargetError, did_you_mean
from ..graph import tree
from ..graph.ops.place import PLACE
from ..graph.trace import apply, current_builder
from ..mesh.tensor import DistTensor
from ..numerics.policy import BLOCKS
from ..runtime.device import device as find_device
from ..runtime.device import has_gpu
from ..tensor import Tensor, as_tensor
from ..tile.launch import resident
from .effect import record_movement
from .kv_cache import KVCache
from .movement_plan import note

SPACES = ("smem", "hbm", "device", "host")
OVERLAPS = ("compute", "none")


@contextmanager
def device_scope(name: str) -> Iterator[None]:
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


BLOCKS["device"] = device_scope


def offload(obj: Any) -> Any:
    """The tensors of a tree, their bytes in page-locked host memory until they are used.

    Of a GPU's tensors: a copy starts behind what was launched before, on a stream of its own beside
    the kernels that follow, and the device's memory is free when it is done. The tensors themselves
    move, and stay tensors of their GPU: what uses one brings it back, ts.prefetch does so ahead.
    A compiled function that takes offloaded tensors brings each ahead of its first reader, and
    keeps none of them; in one, the result lies on the host. Tensors on the host stay as they are.
    Of a distributed tensor the parts move that lie here, until a function uses them.
    Returns obj. Raises ArgumentError where there are no tensors.
    """
    if isinstance(obj, KVCache):
        return obj.offload()
    if current_builder() is not None:
        record_movement("offload", "tensors", [as_tensor(x) for _, x in _tensors(obj, "offload")],
                        "host", "compute")
        return tree.map_tree(lambda x: apply(PLACE, x, to="host") if isinstance(x, Tensor) else x,
                             obj)
    for name, x in _tensors(obj, "offload"):
        note("offload", name, x, "host", "compute")
        resident.offload(x)
    return obj


def _tensors(obj: Any, verb: str) -> list[tuple[str, Tensor]]:
    """The tensors of a tree, by their paths; of distributed ones the parts that lie here."""
    leaves, treedef = tree.flatten(obj)
    if isinstance(obj, KVCache):  # how many entries it has is no matter of where they lie
        return [("KVCache.K", obj._storage.K), ("KVCache.V", obj._storage.V)]
    found = [(path, as_tensor(x)) for path, x in zip(tree.paths(treedef), leaves, strict=True)
             if isinstance(x, Tensor | np.ndarray)]
    if not found:
        raise ArgumentError(f"{verb} needs tensors or a state object, got {type(obj).__name__}")
    return [each for path, x in found for each in _local_parts(x.name or path, x)]


def _local_parts(name: str, x: Tensor) -> list[tuple[str, Tensor]]:
    """A tensor, or the parts of a distributed one that lie here."""
    if isinstance(x, DistTensor) and current_builder() is None:
        return [(f"{name} of rank {r}", part) for r, part in x.read_parts.items()]
    return [(name, x)]


class prefetch:
    """`with prefetch(obj, into="smem", overlap="compute"):` the data that the block reads of `obj`
    is fetched ahead.

    obj: a tensor, a KVCache, or a tree of them. into: "smem" for the loads of kernels, "device"
    ("hbm") for what `ts.offload` has moved to the host, which begins to come back now, also without
    `with`; "host" is ts.offload. overlap: "compute" while kernels compute, and what reads the data
    waits for it; "none" before what is launched next.
    In a compiled function, and for "smem", it is a hint: a `move` node of the graph says so
    (`f.effects` has movement). Values are the same with it and without; ts.plan() lists all of
    them. Raises ArgumentError for another space.
    """

    def __init__(self, obj: Any, *, into: str = "smem", overlap: str = "compute"):
        for name, value, known in (("into", into, SPACES), ("overlap", overlap, OVERLAPS)):
            if value not in known:
                raise ArgumentError(f"prefetch has no {name}={value!r}",
                                    hint=did_you_mean(str(value), known))
        self.what = type(obj).__name__ if isinstance(obj, KVCache) else "tensors"
        self.named = _tensors(obj, "prefetch")
        self.into, self.overlap = into, overlap
        if current_builder() is None:
            self._start(obj)

    @property
    def tensors(self) -> list[Tensor]:
        return [x for _, x in self.named]

    def _start(self, obj: Any) -> None:
        for name, x in self.named:
            into = {"device": x.device, "hbm": x.device}.get(self.into, self.into)
            note("prefetch", name, x, "host" if into == "cpu" else into, self.overlap)
            if self.into == "host":
                resident.offload(x)
            elif self.into != "smem":
                resident.begin_upload(x, wait=self.overlap == "none")

    def __enter__(self) -> prefetch:
        record_movement("prefetch", self.what, self.tensors, self.into, self.overlap)
        return self

    def __exit__(self, *exc: object) -> None:
        return None
