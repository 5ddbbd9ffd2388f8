"""A GPU made of host memory: launches run the interpreter on what the launch parameters say.

`Machine code` of the fake compiler is the Tile IR. A launch takes pointers, extents, numbers and
the grid from the parameters alone, so a result is right only when every one of them arrives where
it belongs. Arrays of torch and CuPy are stand-ins with the attributes that are read of real ones.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from contextlib import nullcontext
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.linalg

from fake_driver import Driver
from fake_driver import driver as driver
from tessera import config
from tessera.dims import Dim
from tessera.graph import assignment
from tessera.graph.cpu import disk as cpu_disk
from tessera.graph.jit import JitFunction
from tessera.numerics import decode, row_bytes, unpack
from tessera.optim import clipping
from tessera.runtime import arrays
from tessera.runtime.cache import DiskCache
from tessera.runtime.flags import ReportSite
from tessera.runtime.module import LoadedKernel as Code
from tessera.runtime.ptxas import Resources
from tessera.runtime.sentinel_words import SITE_WORDS
from tessera.tile.cuda import compile_processes
from tessera.tile.cuda.emit.emitter import Parameter, kind_of
from tessera.tile.interpreter.machine import Machine
from tessera.tile.interpreter.memory import Memory, MemoryBox
from tessera.tile.ir.ir import Function, Op, walk
from tessera.tile.ir.numpy_values import constant
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import GlobalTensor
from tessera.tile.launch import machine_code
from tessera.tile.passes.written_arguments import written_parameters


class Compiler:
    """Stands for tile.cuda.compile: keeps the requests, and runs what it compiled.

    extra: parameters behind those of the function, for kinds that only some kernels have.
    """

    def __init__(self, driver: Driver):
        self.driver, self.requests = driver, []  # type: ignore[var-annotated]
        self.extra: tuple[Parameter, ...] = ()
        self.sites: tuple = ()
        self.grid, self.cluster = "groups", (1,)
        self.seen: dict[str, Any] = {}  # values of the extra parameters of the last launch
        self.after: Any = None  # called with the values by name, when the kernel has run
        self._programs: dict[str, tuple[Function, tuple[Parameter, ...], int]] = {}
        self._sites: dict[str, tuple] = {}
        self.batched: dict[str, bool] = {}
        self.launched: list[str] = []  # names, in order
        self._numbers = itertools.count()
        driver.run = self.run

    def compile(self, function: Function, request: machine_code.CompileRequest,
                image: machine_code.Image | None = None) -> Any:
        self.requests.append(request)
        name = f"{function.name}_{next(self._numbers)}"
        counts = bool(request.watched or request.held)
        sites = sites_of(function, request) if counts else self.sites
        words = [Parameter("sentinels", "sentinels", "i64")] if counts else []
        parameters = (*parameters_of(function), *words, *self.extra)
        columns = parameters if request.batched else ()
        if request.batched:
            parameters = TABLE
        code = Code(b"cubin", name, [p.abi for p in parameters], target=request.target,
                    threads=request.lanes, cluster=self.cluster)
        self.driver.formats[name.encode()] = "".join(
            {"i32": "i", "i64": "q", "f32": "f", "f64": "d"}[p.abi] for p in parameters)
        self._programs[name] = (function, columns or parameters, request.lanes)
        self.batched[name] = bool(columns)
        self._sites[name] = sites
        built = SimpleNamespace(kernel=code, resources=Resources(32, 0, 0, 0, 0, 1), ptx="the ptx",
                                file="source.py", warnings=("a warning",), sass=lambda: "the sass")
        return SimpleNamespace(built=built, parameters=parameters, grid=self.grid,
                               function=function,
                               emitted=SimpleNamespace(sites=sites, columns=columns),
                               notes=("a note",), source=f"source for {request.target}",
                               lanes=request.lanes)

    def run(self, launch: SimpleNamespace) -> None:
        function, parameters, lanes = self._programs[launch.f.decode()]
        assert launch.threads == lanes
        self.launched.append(function.name)
        if not self.batched[launch.f.decode()]:
            return self._call(launch, dict(zip(parameters, launch.values, strict=True)),
                              launch.grid[0])
        calls, table, count = launch.values
        words = memory(table, (1 + len(parameters), count), np.int64)
        of_blocks = memory(calls, (launch.grid[0],), np.int32)
        for i in range(count):
            blocks = np.flatnonzero(of_blocks == i)
            assert blocks[0] == words[0, i] and (np.diff(blocks) == 1).all()
            self._call(launch, dict(zip(parameters, words[1:, i].tolist(), strict=True)),
                       len(blocks))

    def _call(self, launch: SimpleNamespace, given: dict[Parameter, Any], blocks: int) -> None:
        function, _, lanes = self._programs[launch.f.decode()]
        values = {(p.kind, p.name): v for p, v in given.items()}
        self.seen = {p.name: values[p.kind, p.name] for p in self.extra}
        axes = [v for (kind, _), v in sorted(values.items()) if kind == "axis"]
        assert prod(axes) == blocks or self.grid != "groups", "the grid does not fit"
        env = environment(function, values)
        groups = np.arange(prod(axes), dtype=np.int64)
        with np.errstate(all="ignore"):
            machine = Machine(groups, lanes, tuple(axes), env, key=(0, 0))
            machine.run(function.body)
        if ("sentinels", "sentinels") in values:
            count(machine, function, self._sites[launch.f.decode()],
                  values["sentinels", "sentinels"])
        if self.after is not None:
            self.after(values)


TABLE = (Parameter("calls", "calls", "i64"), Parameter("table", "table", "i64"),
         Parameter("call_count", "call_count", "i32"))  # what a batch is launched with


def sites_of(function: Function, request: Any) -> tuple[ReportSite, ...]:
    """A place for each watched tensor that is stored to, at the first line that does so, and one
    for each held line."""
    written = written_parameters(function)
    names = {p.value.name for p in function.params} & request.watched & written
    dtypes = {p.value.name: p.type.dtype.name for p in function.params}
    lines = [n.where for n in walk(function.body)
             if isinstance(n, Op) and OPS[n.name].effect == "write"]
    held = {n.where.line: n.where for n in walk(function.body)
            if n.where is not None and n.where.line in dict(request.held)}
    return (*(ReportSite(lines[0], n, "numerics", ("store", dtypes[n], "inf"))
              for n in sorted(names)),
            *(ReportSite(where, "", "numerics", ("held", "f32", "")) for where in held.values()))


def count(machine: Machine, function: Function, sites: tuple[ReportSite, ...],
          pointer: int) -> None:
    """What sentinels would have counted: here, of all that lies in the written tensors, and of
    whole values."""
    held = {box.memory.name: box.memory for box in machine.env.values()
            if isinstance(box, MemoryBox)}
    made = {n.where.line: machine.env[n.outs[0].value] for n in walk(function.body)
            if isinstance(n, Op) and n.outs and n.where is not None
            and n.outs[0].value in machine.env}  # no way may have led there
    words = memory(pointer, (len(sites), SITE_WORDS), np.uint64)
    for site, row in zip(sites, words, strict=True):
        if site.formats[0] == "held":
            values = np.asarray(made[site.where.line], np.float32).reshape(-1)
        else:
            found = held[site.message]
            values = decode(found.flat, found.numeric.dtype).astype(np.float32)
        row[0] += np.uint64(np.isnan(values).sum())
        row[1] += np.uint64(np.isinf(values).sum())
        if not np.isfinite(values).all():
            at = int(np.argmax(~np.isfinite(values)))
            row[3] = min(int(row[3]), at << 32 | int(values[at:at + 1].view(np.uint32)[0]))


def parameters_of(function: Function) -> tuple[Parameter, ...]:
    """Numbers first and tensors last, unlike the signature; then the grid."""
    numbers, tensors = [], []
    for p in function.params:
        if isinstance(p.type, GlobalTensor):
            tensors.append(Parameter("tensor", p.value.name, "i64"))
        else:
            kind = "dim" if p.role == "dim" else "scalar"
            numbers.append(Parameter(kind, p.value.name, kind_of(p.type.dtype)))
    count = max(1, len(function.grid)) if function.launch == "axes" else 1
    if function.launch == "given":
        asked = [n.attr.get("axis") or 0 for n in walk(function.body)
                 if isinstance(n, Op) and n.name in ("group_id", "num_groups")]
        count = max([1, *asked]) + 1
    axes = [Parameter("axis", f"groups_{a}", "i32", a) for a in range(count)]
    return (*numbers[::-1], *tensors[::-1], *axes)


def environment(function: Function, values: dict[tuple[str, str], Any]) -> dict[Any, Any]:
    """What the interpreter begins with, from launch parameters."""
    sizes = {name: v for (kind, name), v in values.items() if kind == "dim"}
    sizes |= {n: v for n, v in function.constants if isinstance(v, int)}
    env: dict[Any, Any] = {}
    for p in function.params:
        name = p.value.name
        if not isinstance(p.type, GlobalTensor):
            kind = "dim" if p.role == "dim" else "scalar"
            env[p.value] = constant(_unsigned(values[kind, name], p.type.dtype), p.type.dtype)
            continue
        shape = tuple(d.bind(sizes) if isinstance(d, Dim) else d for d in p.type.dims)
        flat = elements(values["tensor", name], shape, p.type.numeric.dtype)
        env[p.value] = MemoryBox.whole(Memory(name, shape, p.type.numeric, flat))
    return env


def elements(pointer: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A tensor's memory; of packed ones a copy, which kernels here only read."""
    if not dtype.packed:
        return memory(pointer, (prod(shape),), dtype.numpy)
    raw = memory(pointer, (prod(shape[:-1]), row_bytes(shape[-1], dtype)), np.uint8)
    return unpack(raw, dtype, shape[-1]).reshape(-1)


def _unsigned(value: Any, dtype: Any) -> Any:
    return value + (1 << dtype.bits) if dtype.kind == "uint" and value < 0 else value


def memory(pointer: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Host memory at an address as an array."""
    nbytes = prod(shape) * np.dtype(dtype).itemsize
    raw = (ctypes.c_char * nbytes).from_address(pointer) if nbytes else b""
    return np.frombuffer(raw, dtype).reshape(shape)


@pytest.fixture
def gpu(driver, monkeypatch, tmp_path):
    """The fake compiler; kernels are cached in an empty folder."""
    compile_processes.close()  # those that an earlier test began have the compiler
    made = Compiler(driver)
    monkeypatch.setattr(machine_code, "compile_request", made.compile)
    monkeypatch.setattr(machine_code, "fingerprint", lambda: "of the fake compiler")
    monkeypatch.setattr(machine_code, "GIVEN", {})  # real code, of files that a test has loaded
    monkeypatch.setattr(arrays, "_by_class", {})
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    monkeypatch.setitem(sys.modules, "cupyx", fake_cupyx())
    monkeypatch.setitem(sys.modules, "cupyx.scipy.linalg", fake_cupy_linalg())
    monkeypatch.setattr(arrays, "_TORCH_TYPES", {})
    # What the package compiles for itself has launches of the driver that was.
    monkeypatch.setattr(clipping, "_compiled", JitFunction(clipping._sum_of_squares))
    assigned = assignment._assigned  # what was prepared for another driver is none of this one's
    monkeypatch.setattr(assignment, "_assigned", JitFunction(
        assigned.fn, donate=tuple(assigned.donate), static=tuple(assigned.static),
        name=assigned.name))
    monkeypatch.setattr(cpu_disk, "LOOPS", cpu_loops_where_they_are())
    with config.scope(cache_dir=tmp_path, compile_processes=1):
        yield made


def cpu_loops_where_they_are() -> DiskCache:
    """The host's compiled loops are real: they stay in the cache of the settings of now."""
    path = cpu_disk.LOOPS.path

    class Kept(DiskCache):
        path = property(lambda self: path)

    return Kept(cpu_disk.LOOPS.name)


class Copies:
    """Counts bytes between host and device."""

    def __init__(self, driver: Any, monkeypatch: Any):
        self.to_device = self.to_host = 0
        for name, counter in (("cuMemcpyHtoDAsync", "to_device"), ("cuMemcpyDtoHAsync", "to_host")):
            monkeypatch.setattr(driver, name, self._counted(getattr(driver, name), counter))

    def _counted(self, call: Any, counter: str) -> Any:
        def counted(target: int, source: int, nbytes: int, stream: int) -> tuple:
            setattr(self, counter, getattr(self, counter) + nbytes)
            return call(target, source, nbytes, stream)

        return counted


# --- arrays of other libraries -------------------------------------------------------------------
class TorchType:
    """A torch.dtype."""

    def __init__(self, name: str, numpy: Any):
        self.name, self.numpy = name, np.dtype(numpy)

    def __str__(self) -> str:
        return f"torch.{self.name}"


class Torch:
    """A torch.Tensor on cuda:0 (device=-1: in host memory)."""

    def __init__(self, x: Any, device: int = 0):
        self.x, self.device = np.asarray(x), device
        self.streams: list[int] = []

    shape = property(lambda self: self.x.shape)
    dtype = property(lambda self: TORCH_TYPES[self.x.dtype.name])

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("its memory is the device's")

    def data_ptr(self) -> int:
        return self.x.ctypes.data

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.x.itemsize for s in self.x.strides)

    def is_contiguous(self) -> bool:
        return self.x.flags.c_contiguous

    def get_device(self) -> int:
        return self.device

    def record_stream(self, stream: int) -> None:
        self.streams.append(stream)


Torch.__module__, Torch.__qualname__ = "torch", "Tensor"
TORCH_TYPES = {np.dtype(n).name: TorchType(n, n) for n in (
    "float32", "float64", "float16", "int32", "int64", "int8", "uint8", "uint32")}


class Cupy:
    """A cupy.ndarray on cuda:0."""

    def __init__(self, x: Any, device: int = 0):
        self.x = np.asarray(x)
        self.device = SimpleNamespace(id=device)
        self.data = SimpleNamespace(ptr=self.x.ctypes.data, device_id=device)

    shape = property(lambda self: self.x.shape)
    strides = property(lambda self: self.x.strides)
    dtype = property(lambda self: self.x.dtype)
    itemsize = property(lambda self: self.x.itemsize)
    __dlpack__ = Torch.__dlpack__


Cupy.__module__, Cupy.__qualname__ = "cupy", "ndarray"


class Foreign:
    """An array of a library that we have never heard of."""

    def __init__(self, x: Any):
        self.x = np.asarray(x)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.x.shape, "typestr": self.x.dtype.str, "version": 3,
                "data": (self.x.ctypes.data, False), "strides": None}


class _Within:
    def __init__(self, *_: Any):
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


def fake_torch() -> ModuleType:
    made: Any = ModuleType("torch")
    made.streams = {0: 70, 1: 71}
    made._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: made.streams[device])
    made.device = lambda kind, index: index
    made.empty = lambda shape, dtype, device: Torch(poisoned(shape, dtype.numpy), device)
    made.cuda = SimpleNamespace(ExternalStream=lambda pointer, device: pointer)
    for t in TORCH_TYPES.values():
        setattr(made, t.name, t)
    return made


def fake_cupy() -> ModuleType:
    made: Any = ModuleType("cupy")
    made.cuda = SimpleNamespace(get_current_stream=lambda device: SimpleNamespace(ptr=80 + device),
                                Device=_Within, ExternalStream=_Within,
                                Stream=SimpleNamespace(null=_Within(0)),
                                UnownedMemory=lambda pointer, nbytes, owner, device: pointer,
                                MemoryPointer=lambda pointer, offset: pointer + offset)
    made.empty = lambda shape, dtype: Cupy(poisoned(shape, dtype))
    made.ndarray = lambda shape, dtype, pointer: memory(pointer, shape, dtype)
    for name in set(np.__all__) - set(vars(made)):
        setattr(made, name, getattr(np, name))
    return made


def fake_cupyx() -> ModuleType:
    made: Any = ModuleType("cupyx")
    made.errstate = lambda linalg: nullcontext()
    return made


def fake_cupy_linalg() -> ModuleType:
    """cupyx.scipy.linalg, of one matrix where CuPy's takes no more."""
    def lu(a: Any, check_finite: bool) -> Any:
        assert a.ndim == 2
        return scipy.linalg.lu(a, check_finite=check_finite)

    made: Any = ModuleType("cupyx.scipy.linalg")
    made.lu, made.solve_triangular = lu, scipy.linalg.solve_triangular
    return made


def poisoned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Memory as an allocator gives it: what was there before."""
    out = aligned(shape, dtype)
    out[...] = np.nan if out.dtype.kind == "f" else -77
    return out


def aligned(shape: Any, dtype: Any, offset: int = 0) -> np.ndarray:
    """Zeros that begin `offset` elements behind a multiple of 256 bytes."""
    dtype = np.dtype(dtype)
    nbytes = int(prod(shape)) * dtype.itemsize
    raw = np.zeros(nbytes + 512, np.uint8)
    start = -raw.ctypes.data % 256 + offset * dtype.itemsize
    return raw[start:start + nbytes].view(dtype).reshape(shape)


def filled(x: np.ndarray, offset: int = 0) -> np.ndarray:
    """A copy that begins there."""
    out = aligned(x.shape, x.dtype, offset)
    out[...] = x
    return out


__all__ = ["Compiler", "Copies", "Cupy", "Foreign", "Parameter", "Torch", "aligned", "driver",
           "filled", "gpu"]
