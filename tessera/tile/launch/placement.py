"""Where a call's arrays lie decides where the kernel runs.

    arrays on one GPU                 there
    arrays in host memory, or none    under the interpreter; with device="cuda" they are copied to
                                      the first GPU and, when written, back
    anything mixed                    an error that says where each lies

The setting `device` and `k.launch(target=...)` take 'auto', 'cpu', 'cuda' and 'cuda:1', the setting
also 'gpu'. Graph functions and ops follow the same rule, see graph/devices.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tessera import config
from tessera.errors import ArgumentError, user_line
from tessera.numerics import NumericType, as_type, packed_for
from tessera.runtime.arrays import HOST, Array, place_of, read_array
from tessera.runtime.device import device, has_gpu
from tessera.tensor import Tensor
from tessera.tile.interpreter.arguments import Placement

TARGETS = ("auto", "cpu", "cuda", "cuda:N")


def gpu_number(target: str) -> int:
    """The GPU that 'cuda' or 'cuda:1' names. Raises ArgumentError, UnsupportedTargetError where it
    is missing."""
    return device(int(target.partition(":")[2] or 0)).index


def chosen_gpu() -> int | None:
    """The GPU that the setting `device` chooses, None for the host."""
    wanted = config.device
    if wanted in ("auto", "cpu") or (wanted == "gpu" and not has_gpu()):
        return None
    return gpu_number(wanted)


# A kernel writes into its arguments, and of a copy on the GPU alone nobody would see it.
HOST_BESIDE_GPU = "; the device that is set gets copies of host arrays only where all of a " \
                  "kernel's arrays lie on the host: ts.to(x, 'cuda') makes one, once"


def place_call(kernel: str, arguments: Mapping[str, Any], target: str | None = None) -> Placement:
    """Where a call with these arguments runs. Raises ArgumentError for arrays in several places."""
    wanted = config.device if target is None else _target(target)
    if wanted == "gpu":
        wanted = "cuda" if has_gpu() else "auto"
    places = {name: where for name, value in arguments.items()
              if not _is_number(value) and (where := place_of(value)) is not None}
    found = set(places.values())
    if len(found) > 1:
        raise ArgumentError(
            f"{kernel}: {listing(places)}: a kernel runs where all its arrays are",
            where=user_line(),
            hint="move them to one place: x.cuda() and cupy.asarray(x) go to the GPU, x.cpu() and "
                 "x.get() to the host"
                 + HOST_BESIDE_GPU * (HOST in found and wanted.startswith("cuda")))
    where = found.pop() if found else HOST
    if where != HOST and wanted == "cpu":
        raise ArgumentError(
            f"{kernel} is to run on the CPU, but {listing(places)}",
            hint="pass host arrays (x.cpu(), x.get()), or leave device='auto'", where=user_line())
    if wanted.startswith("cuda:") and where not in (HOST, gpu_number(wanted)):
        raise ArgumentError(f"{kernel} is to run on {wanted}, but {listing(places)}",
                            hint=f'x.to("{wanted}") moves an array, or leave the target out',
                            where=user_line())
    if where == HOST and wanted.startswith("cuda"):
        return Placement(gpu_number(wanted), staged=True)
    return Placement(where)


def _is_number(value: Any) -> bool:
    """NumPy's arrays without axes are numbers, wherever the others lie."""
    return isinstance(value, np.ndarray) and value.ndim == 0


def _target(target: str) -> str:
    if target not in TARGETS[:3] and not (
            target.startswith("cuda:") and target[5:].isdecimal()):
        raise ArgumentError(f"target={target!r} of a launch", where=user_line(),
                            hint=f"one of {', '.join(TARGETS)}")
    return target


def listing(places: Mapping[str, int]) -> str:
    """`x and z lie on cuda:0, y lies in host memory`."""
    parts = []
    for where in dict.fromkeys(places.values()):
        names = [name for name, at in places.items() if at == where]
        text = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        at = "in host memory" if where == HOST else f"on cuda:{where}"
        parts.append(f"{text} {'lies' if len(names) == 1 else 'lie'} {at}")
    return ", ".join(parts)


def reader_for(place: Placement) -> Callable[[Any, str], tuple[Array, NumericType]] | None:
    """How arguments.bind reads arrays there; None: as host memory."""
    return None if place.on_host or place.staged else read_on_device


def numeric_of(array: Array) -> NumericType:
    """The type of an array: of one of ours with the order in which its codes lie."""
    numeric = as_type(array.dtype)
    order = array.owner.type.policy.packed_for if isinstance(array.owner, Tensor) else None
    return numeric if order is None else numeric @ packed_for(order)


def read_on_device(value: Any, what: str) -> tuple[Array, NumericType]:
    """An array on a GPU as a kernel takes it: contiguous, at whole elements."""
    array = read_array(value, what.rpartition(" ")[2])
    if not array.contiguous:
        copy = {"torch": "x.contiguous()", "cupy": "cupy.ascontiguousarray(x)"}
        raise ArgumentError(
            f"{what} has shape {array.shape} and strides {array.strides}: kernels on a GPU take "
            "contiguous arrays", where=user_line(),
            hint=f"pass a copy: {copy.get(array.library, 'a contiguous one')}; or a kernel on the "
                 "whole array, with the slice taken inside")
    size = array.dtype.numpy.itemsize
    if array.pointer % size:
        raise ArgumentError(
            f"{what} begins at {array.pointer:#x}, which is not aligned to its elements of {size} "
            "bytes", hint="pass a copy, not a view of other bytes", where=user_line())
    return array, numeric_of(array)
