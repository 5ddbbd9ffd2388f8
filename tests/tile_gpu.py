"""A kernel under the interpreter and on the GPU, on the same arguments: results must agree.

Needs no dispatch: the function is compiled and launched directly, so a test can choose lanes,
target and facts. Low-precision results are compared as numbers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from math import prod

import numpy as np

from tessera.numerics import decode, pack, row_bytes, unpack
from tessera.runtime.buffer import DeviceBuffer
from tessera.runtime.device import device
from tessera.runtime.target import parse_target
from tessera.tensor import Tensor as Array
from tessera.tile.interpreter.arguments import allocate
from tessera.tile.interpreter.launch import Config, extent, grid_of, lanes_of
from tessera.tile.interpreter.launch import run as interpret
from tessera.tile.interpreter.memory import Memory
from tessera.tile.ir.types import GlobalTensor

LAUNCH_KEY = 0x243F6A88, 0x85A308D3  # by which all launches here draw


@dataclass
class Ran:
    """What a run left: the call's result and the arrays after it, decoded."""

    result: object
    arrays: dict[str, np.ndarray]


def prepare(kernel, args, kwargs, groups=None, lanes=None):
    """(bound, function, config, lanes, grid)"""
    bound = kernel.bind(args, kwargs)
    schedule = kernel.choose(bound)
    function = kernel.specialise(bound, schedule, kernel.grid is not None)
    groups = groups if groups is None or isinstance(groups, tuple) else (groups,)
    if kernel.grid is not None and groups is None:
        groups = kernel.grid_for(bound, schedule)
    chosen = Config(groups, lanes)
    lanes = lanes_of(function, chosen, schedule.lanes)
    return bound, function, chosen, lanes, grid_of(function, bound, chosen, lanes), schedule


def facts_of(function, bound):
    """What the launch path will know: extents by 16, aligned tensors (fresh buffers are)."""
    from tessera.tile.cuda.compile import ArgumentFacts

    tensors = [p.value.name for p in function.params if isinstance(p.type, GlobalTensor)]
    return ArgumentFacts(frozenset(n for n, v in bound.texts.items() if v % 16 == 0),
                         frozenset(tensors))


def compiled(kernel, *args, groups=None, lanes=None, target=None, **kwargs):
    """The kernel for these arguments; no GPU is needed when a target is named."""
    from tessera.tile.cuda.compile import compile_function

    bound, function, _, lanes, _, schedule = prepare(kernel, args, kwargs, groups, lanes)
    return compile_function(function, lanes, schedule=schedule, target=target,
                            facts=facts_of(function, bound))


def on_gpu(kernel, *args, groups=None, lanes=None, target=None, facts=None, checked=False,
           **kwargs) -> Ran:
    """Runs on the GPU with copies of the arguments."""
    from tessera.tile.cuda.compile import compile_function

    bound, function, _, lanes, grid, schedule = prepare(kernel, args, kwargs, groups, lanes)
    made = compile_function(function, lanes, schedule=schedule, target=target,
                            facts=facts or facts_of(function, bound), checked=checked)
    memories, buffers = {}, {}
    for p in function.params:
        if isinstance(p.type, GlobalTensor):
            name = p.value.name
            if p.role == "output":
                shape = tuple(extent(str(d), bound) for d in p.type.dims)
                flat = allocate(shape, p.type.numeric, True).reshape(-1)
                memories[name] = Memory(name, shape, p.type.numeric, flat)
            else:
                memories[name] = bound.values[name]
            buffers[name] = _upload(memories[name])
    if prod(grid):
        values = [_value(p, bound, buffers, memories, grid, kernel) for p in made.parameters]
        blocks = prod(grid)
        if made.grid.startswith("persistent"):
            beside = [*made.grid.split("-"), "", "", ""][3]  # "persistent-0--2": two on each
            blocks = min(blocks, _processors() * int(beside or 1))
        made.built.kernel.launch((blocks,), values)
    device().synchronize()
    arrays = {n: _download(memories[n], b) for n, b in buffers.items() if n in memories}
    made = function.result[0] in ("tensor", "scalar")
    result = tuple(arrays[n] for n in function.result[1:]) if made else None
    return Ran(result, arrays)


def _processors() -> int:
    from tessera.runtime.device import device

    return device().multiprocessors


def _upload(memory: Memory) -> DeviceBuffer:
    host = memory.flat
    if memory.numeric.dtype.packed:
        rows = memory.flat.reshape(-1, memory.shape[-1])
        host = pack(rows, memory.numeric.dtype)
    raw = np.ascontiguousarray(host).view(np.uint8).reshape(-1)
    buffer = DeviceBuffer(max(16, raw.nbytes), device())
    if raw.nbytes:
        buffer.write(raw)
    return buffer


def _download(memory: Memory, buffer: DeviceBuffer) -> np.ndarray:
    dtype = memory.numeric.dtype
    if dtype.packed:
        n = memory.shape[-1]
        raw = np.empty((prod(memory.shape[:-1]), row_bytes(n, dtype)), np.uint8)
        buffer.read(raw)
        flat = unpack(raw, dtype, n).reshape(-1)
    else:
        flat = np.empty(memory.flat.shape, memory.flat.dtype)
        if flat.nbytes:
            raw = np.empty(flat.nbytes, np.uint8)
            buffer.read(raw)
            flat = raw.view(flat.dtype)
    return decode(flat, dtype).reshape(memory.shape)


def _value(p, bound, buffers, memories, grid, kernel):
    if p.kind == "tensor":
        return buffers[p.name].pointer
    if p.kind == "dim":
        return extent(p.name, bound)
    if p.kind == "axis":
        return grid[p.axis]
    if p.kind == "groups":
        return prod(grid)
    if p.kind == "seed":
        return int(np.uint32(LAUNCH_KEY[p.axis]).view(np.int32))
    if p.kind == "replays":
        return 0
    if p.kind == "map":
        from tessera.runtime.tensormap import tensor_map

        memory = memories[p.name]
        return tensor_map_of(tensor_map, memory, buffers[p.name], p.box)
    if p.kind == "counter":
        buffers[p.name] = DeviceBuffer(16, device())
        buffers[p.name].write(np.zeros(16, np.uint8))
        return buffers[p.name].pointer
    if p.kind in ("claim", "report"):
        from tessera.runtime.flags import error_flags

        return getattr(error_flags(), p.kind)
    if p.kind in ("count", "lines"):
        from tessera.runtime.flags import printed_lines

        return getattr(printed_lines(), p.kind)
    if p.kind == "kernel":
        return 1
    return np.asarray(bound.values[p.name]).reshape(-1)[0].item()


def tensor_map_of(encode, memory, buffer, box):
    """The descriptor's address of a whole tensor for a box."""
    from tessera.runtime.arrays import Array as Device
    from tessera.runtime.arrays import dense_strides

    array = Device(buffer.pointer, memory.shape, dense_strides(memory.shape),
                   memory.numeric.dtype, 0, "test", buffer)
    row_bytes_ = box[-1] * memory.numeric.dtype.numpy.itemsize
    swizzle = row_bytes_ if row_bytes_ in (32, 64, 128) else 0  # rows of numbers lie as they are
    return encode(array, memory.name, box=box, swizzle_bytes=swizzle)


def compare(kernel, *args, groups=None, lanes=None, rtol=1e-5, atol=1e-5, target=None,
            facts=None, **kwargs) -> Ran:
    """Asserts that interpreter and GPU leave the same results and arrays; returns the GPU's."""
    bound, function, chosen, count, _, _ = prepare(kernel, copy.deepcopy(args), kwargs, groups,
                                                   lanes)
    result, _ = interpret(function, bound, chosen, count, kernel.__name__, key=LAUNCH_KEY)
    got = on_gpu(kernel, *args, groups=groups, lanes=lanes, target=target, facts=facts, **kwargs)
    for name, memory in bound.values.items():
        if isinstance(memory, Memory):
            wanted = decode(memory.flat, memory.numeric.dtype).reshape(memory.shape)
            same(got.arrays[name], wanted, rtol, atol, f"argument {name}")
    if function.result[0] in ("tensor", "scalar"):
        every = result if isinstance(result, tuple) else (result,)
        for name, one, made in zip(function.result[1:], every, got.result, strict=True):
            wanted = np.asarray(one.numpy() if isinstance(one, Array) else one)
            same(np.asarray(made).reshape(wanted.shape), wanted.astype(made.dtype), rtol, atol,
                 name)
    return got


def same(got: np.ndarray, wanted: np.ndarray, rtol: float, atol: float, what: str) -> None:
    """Equal for integers; within the tolerance, NaN where NaN, for floats."""
    assert got.shape == wanted.shape, f"{what}: {got.shape} and {wanted.shape}"
    if wanted.dtype.kind != "f":
        wrong = got != wanted
    else:
        with np.errstate(all="ignore"):
            close = (np.abs(got - wanted) <= atol + rtol * np.abs(wanted)) & np.isfinite(wanted)
        wrong = ~(close | (got == wanted) | (np.isnan(got) & np.isnan(wanted)))
    if wrong.any():
        at = np.unravel_index(int(np.argmax(wrong)), wrong.shape) if wrong.ndim else ()
        raise AssertionError(f"{what}: {int(wrong.sum())} of {wrong.size} differ, first at {at}: "
                             f"GPU {got[at]}, interpreter {wanted[at]}")


__all__ = ["Ran", "compare", "compiled", "facts_of", "on_gpu", "parse_target", "prepare"]
