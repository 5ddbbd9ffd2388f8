"""Where tensors lie: moved when it is said, and asked before something is computed of them.

    x.to("cuda"), x.cuda(), x.cpu(), x.device        one tensor
    ts.to(params, "cuda")                            a tree of them
    with ts.device("cuda"): ...                      new ones lie there, and what is computed

What is computed of tensors runs where they lie. Arrays without axes count as numbers: they may lie
anywhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from .. import config, hooks
from ..dims import show_shape
from ..errors import ArgumentError, TraceError, UnsupportedTargetError, user_line
from ..numerics import as_type
from ..numerics.policy import DeviceFamily, without_host
from ..open_trace import trace_state
from ..runtime.arrays import HOST, is_array
from ..runtime.device import device_count, has_gpu
from ..tensor import OPERATORS, PLAIN, Tensor, as_tensor, need_device
from ..tile.launch.placement import chosen_gpu, gpu_number, listing
from ..tile.launch.resident import adopted, offload, on_gpu, on_host
from . import tree
from .trace import Tracer, place_among


def find_place(device: Any) -> int:
    """A GPU's number, or HOST, of "cpu", "cuda", "cuda:1", "gpu", or ts.gpu[1].

    Raises ArgumentError for another word or GPU, UnsupportedTargetError without a GPU.
    """
    word = device.name if isinstance(device, DeviceFamily) else device
    name = word if isinstance(word, str) else ""
    family, colon, number = name.partition(":")
    if name == "cpu":
        return HOST
    if name == "gpu":
        return 0 if has_gpu() else HOST
    if family != "cuda" or (colon and not number.isdecimal()):
        hint = '"cpu", "cuda", "cuda:1" or "gpu"'
        raise ArgumentError(f"there is no device {str(device)!r}", where=user_line(),
                            hint=hint + "; x.astype(dtype) converts to another type")
    try:
        return gpu_number(name)
    except UnsupportedTargetError as err:
        raise UnsupportedTargetError(
            f"{name} cannot be used: {err.message}", where=user_line(),
            hint='to("gpu") leaves tensors on the host where there is no GPU; python -m tessera '
                 "doctor says what is missing") from err


def need_target(target: str) -> str:
    """`target` when graphs can run on it. Raises UnsupportedTargetError naming those that exist."""
    if target == "cpu":
        return target
    family, colon, number = target.partition(":")
    if family != "cuda" or (colon and not number.isdecimal()):
        raise UnsupportedTargetError(
            f"target {target!r} is not supported; targets that can run here: "
            f"cpu{', cuda' * has_gpu()}",
            hint="tessera runs on the CPU and on NVIDIA GPUs: target='cpu' or target='cuda'")
    if not has_gpu():
        raise UnsupportedTargetError(f"target {target!r} cannot run here; targets that can: cpu",
                                     hint="python -m tessera doctor says what it needs")
    gpu_number(target)
    return target


def to(x: Any, device: Any) -> Any:
    """A tensor, or a tree of tensors, on another device: "cpu", "cuda", "cuda:1", or "gpu", which
    is the host where there is no GPU.

    Elements are copied, with the scale of a scaled type; what lies there already is the tensor
    itself. Arrays of NumPy and of other libraries become tensors; numbers, None and what else a
    tree holds stay as they are. Raises ArgumentError for an unknown device or a distributed tensor,
    UnsupportedTargetError without a GPU, TraceError for traced tensors.
    """
    place = find_place(device)
    return tree.map_tree(lambda leaf: _move_leaf(leaf, place), x)


def _move_leaf(leaf: Any, place: int) -> Any:
    if not is_array(leaf):
        return leaf
    with config.scope(device="auto"):
        x = as_tensor(adopted(leaf, "x"))
    if isinstance(x, Tracer):
        raise TraceError("a traced tensor is moved to another device",
                         hint="a compiled function runs where its arguments lie: move those",
                         where=user_line())
    if type(x) not in PLAIN and x.device:  # which a donated tensor refuses, with its reason
        raise ArgumentError(f"a {type(x).__name__} is not moved by to()", where=user_line(),
                            hint="its mesh says where the parts of a distributed tensor lie")
    return on_host(x) if place == HOST else on_gpu(x, place)


def cuda(x: Tensor, index: int = 0) -> Tensor:
    """x on a GPU."""
    return to(x, f"cuda:{index}")


def cpu(x: Tensor) -> Tensor:
    """x in host memory."""
    return to(x, "cpu")


OPERATORS.update(to=to, cuda=cuda, cpu=cpu)


# --- new tensors ------------------------------------------------------------------------------
def place_new(x: Tensor) -> Tensor:
    """A tensor that was just made, where the setting `device` says; while a function is traced,
    where it is."""
    if trace_state.builder is not None:
        return x
    if x.type.policy.device is not None:
        return place_typed(x)
    if config.device in ("auto", "cpu"):
        return x
    place = chosen_gpu()
    return x if place is None or type(x) not in PLAIN else on_gpu(x, place)


def place_typed(x: Tensor) -> Tensor:
    """A tensor where its type says, `f32 @device(gpu)` or `f32 @host`. The latter does not stay in
    the type: what is computed of it lies on the device again."""
    wanted = x.type.policy.device
    if wanted == "host":
        if type(x) is Tensor and (place := chosen_gpu()) is not None:
            x = on_gpu(x, place)
        offload(x)
        x.type = without_host(x.type)
        return x
    if wanted is None or type(x) not in PLAIN or (wanted == "cpu" and x.place == HOST) or (
            wanted != "cpu" and not can_place(wanted)):  # another runtime's
        return x
    return to(x, wanted)


def place_of_call(target: str, tensors: Sequence[Tensor]) -> int | None:
    """The number of the GPU on which a call runs; None on a host, and inside of another trace."""
    return place_among(tensors) if target == "cpu" else gpu_number(target)


def place_arguments(bound: dict[str, Any], devices: dict[str, str], function: str
                    ) -> dict[str, Any]:
    """Arguments by name, those that an annotation places on a device there. What is traced is
    placed by its own trace."""
    moved = {}
    for name, device in devices.items():
        if name in bound and not any(isinstance(x, Tracer) for x in tree.flatten(bound[name])[0]):
            need_device(as_type(f'f32 @device("{device}")'), f"{function}: argument {name}")
            moved[name] = to(bound[name], device)
    return {**bound, **moved} if moved else bound


def can_place(name: str) -> bool:
    """Whether a type may name this device here."""
    family, _, number = name.partition(":")
    if name in ("gpu", "host"):
        return True
    return family == "cuda" and has_gpu() and (not number or (
        number.isdecimal() and int(number) < device_count()))


hooks.place_new.fill(place_new)
hooks.can_place.fill(can_place)


class PlacementWarning(UserWarning):
    """A tensor lies elsewhere than where it is read, and is copied."""


TOLD_BYTES = 1 << 20


def tell_copied(function: str, x: Tensor, index: int) -> None:
    """Say that a large tensor which a function captures is copied to a GPU."""
    if x.nbytes < TOLD_BYTES:
        return
    where = user_line()
    name = f"{x.type}{show_shape(x.shape)}" + (f" {x.name!r}" if x.name else "")
    warnings.warn_explicit(
        f"{function} captures {name}, {x.nbytes / 2**20:.1f} MiB in host memory: it is copied to "
        f'cuda:{index} now, and again after each write into it; x.to("cuda") before, or an '
        "argument, is no copy", PlacementWarning,
        *((where.file, where.line) if where is not None else ("", 0)))


# --- what is computed -------------------------------------------------------------------------
def target_of(what: str, operands: Iterable[tuple[str, Any]], target: str | None = None) -> str:
    """Where operands, by name, are computed with: "cpu", or "cuda:0" of a GPU.

    target: "cpu", "cuda" or "cuda:1" where that was said; the setting `device` says it otherwise.
    With a GPU as target, operands on the host are copied there.
    Raises ArgumentError, with the name and place of each, where they lie apart.
    """
    places = {name: x.place for name, x in operands if x.place != HOST or x.ndim}
    found = set(places.values())
    said = target if target is not None else _setting()
    on = found - {HOST}
    if said is None:
        if len(found) > 1:
            raise _mixed_devices_error(what, places)
        return f"cuda:{on.pop()}" if on else "cpu"
    if said == "cpu":
        if on:
            raise ArgumentError(
                f"{what} is to run on the CPU, but {listing(places)}", where=user_line(),
                hint="x.cpu() moves a tensor to the host; or leave target='cpu' or the setting "
                     "device='cpu' out")
        return "cpu"
    wanted = on.pop() if said == "cuda" and len(on) == 1 else gpu_number(said)
    if on - {wanted}:
        if said == "cuda":
            raise _mixed_devices_error(what, places)
        raise ArgumentError(f"{what} is to run on cuda:{wanted}, but {listing(places)}",
                            hint=f'x.to("cuda:{wanted}") moves a tensor there', where=user_line())
    return f"cuda:{wanted}"


def _setting() -> str | None:
    """What the setting `device` says of where to compute: "cuda" of it, as of a target, is the GPU
    where operands lie."""
    if config.device in ("auto", "cpu"):
        return None if config.device == "auto" else "cpu"
    place = chosen_gpu()
    if place is None:
        return None
    return f"cuda:{place}" if ":" in config.device else "cuda"


def _mixed_devices_error(what: str, places: dict[str, int]) -> ArgumentError:
    return ArgumentError(
        f"{what}: {listing(places)}: tensors of one call lie in one place", where=user_line(),
        hint='x.to("cuda") moves a tensor to the GPU, x.cpu() to the host; ts.to(tree, "cuda") '
             "all of a tree")


__all__ = ["cpu", "cuda", "find_place", "need_target", "place_new", "place_typed", "target_of",
           "to"]
