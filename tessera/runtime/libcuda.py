"""The CUDA driver library through ctypes: the functions and constants that the runtime uses.

    library = open_library()
    status, pointer = library.cuMemAlloc(4096)      # a status, then what is given back
    status = library.launch(config, function, addresses, None)  # pointers, passed on as they are

ctypes and not cuda-bindings: that takes 15 to 30 ms to import, which is most of what the first
kernel of a process from the disk cache takes, and 1.2 us more for a launch (NVIDIA H200,
2026-11-21, benchmarks/launch_overhead.py and kernels.py).

Signatures and numbers: CUDA driver API 13.0, cuda.h. CUDA 12 has the same.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..errors import ArgumentError
from ..lazy_dataclass import dataclass

NAME = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"

# --- numbers: of CUresult, and members of enumerations by their names without CU_ ---------------
SUCCESS, OUT_OF_MEMORY, NOT_READY = 0, 2, 600
NOT_INITIALIZED, INVALID_CONTEXT, INVALID_HANDLE, CONTEXT_IS_DESTROYED = 3, 201, 400, 709

DEVICE_ATTRIBUTES = {
    "MULTIPROCESSOR_COUNT": 16, "L2_CACHE_SIZE": 38, "COMPUTE_CAPABILITY_MAJOR": 75,
    "COMPUTE_CAPABILITY_MINOR": 76, "MAX_REGISTERS_PER_MULTIPROCESSOR": 82,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 97}
FUNC_NUM_REGS, FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES = 4, 8
FUNC_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
POINTER_DEVICE_ORDINAL = 9
STREAM_NON_BLOCKING = 1
USUAL_PRIORITY, FIRST_PRIORITY = 0, -5  # of streams; the driver takes the nearest that it has
EVENT_DISABLE_TIMING = 2
MEMPOOL_RELEASE_THRESHOLD, MEMPOOL_RESERVED_MEM_CURRENT = 4, 5
MEMPOOL_USED_MEM_CURRENT, MEMPOOL_USED_MEM_HIGH = 7, 8
CAPTURE_STATUS_NONE, CAPTURE_MODE_THREAD_LOCAL, CAPTURE_MODE_RELAXED = 0, 1, 2
KERNEL_NODE, COPY_NODE, WAIT_NODE, RECORD_NODE, CONDITIONAL_NODE = 0, 1, 6, 7, 13  # of a graph
WHILE_CONDITION = 1  # of a conditional node: its graph runs again and again
SET_CAPTURE_DEPENDENCIES = 1
MEMHOSTALLOC_PORTABLE, MEMHOSTALLOC_DEVICEMAP = 1, 2
LAUNCH_CLUSTER_DIMENSION, LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6
TENSOR_MAP_TYPES = {name: i for i, name in enumerate((
    "UINT8", "UINT16", "UINT32", "INT32", "UINT64", "INT64", "FLOAT16", "FLOAT32", "FLOAT64",
    "BFLOAT16", "FLOAT32_FTZ", "TFLOAT32"))}
TENSOR_MAP_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # by bytes
TENSOR_MAP_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute; the value is a union of 64 bytes, of which three ints are used."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class GraphParams(ctypes.Structure):
    """CUDA_GRAPH_INSTANTIATE_PARAMS."""

    _fields_ = (("flags", ctypes.c_ulonglong), ("upload_stream", ctypes.c_void_p),
                ("failed_node", ctypes.c_void_p), ("result", ctypes.c_int))


class ConditionalNode(ctypes.Structure):
    """CUgraphNodeParams of a conditional node. bodies: the graphs that the driver gives it."""

    _fields_ = (("kind", ctypes.c_int), ("reserved", ctypes.c_int * 3),
                ("handle", ctypes.c_uint64), ("condition", ctypes.c_int), ("size", ctypes.c_uint),
                ("bodies", ctypes.POINTER(ctypes.c_void_p)), ("context", ctypes.c_void_p),
                ("rest", ctypes.c_longlong * 26))

    @staticmethod
    def of_while(handle: int, context: int) -> ConditionalNode:
        return ConditionalNode(kind=CONDITIONAL_NODE, handle=handle, condition=WHILE_CONDITION,
                               size=1, context=context)


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint),
                ("threads_x", ctypes.c_uint), ("threads_y", ctypes.c_uint),
                ("threads_z", ctypes.c_uint), ("shared_bytes", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p),
                ("attribute_count", ctypes.c_uint))


# --- functions -----------------------------------------------------------------------------------
_TYPES: dict[str, Any] = {
    "int": ctypes.c_int, "uint": ctypes.c_uint, "byte": ctypes.c_ubyte, "size": ctypes.c_size_t,
    "float": ctypes.c_float, "ptr": ctypes.c_void_p, "text": ctypes.c_char_p}


@dataclass(frozen=True)
class DriverFunction:
    """One function of the library. symbol: with the version of its interface.

    signature: the parameters in the order of cuda.h, by type; `*` before one that is given back
    and not passed, `&` before one that is both.
    """

    symbol: str
    signature: str = ""

    def __post_init__(self) -> None:
        if self.name in FUNCTIONS:
            raise ArgumentError(f"the driver's function {self.name} is declared twice")
        FUNCTIONS[self.name] = self

    @property
    def name(self) -> str:
        return self.symbol.partition("_v")[0]

    def of(self, library: Any) -> Callable[..., tuple]:
        """(*given) -> (status, *given back)."""
        words = self.signature.split()
        types = [_TYPES[w.lstrip("*&")] for w in words]
        out = [(i, types[i], w[0] == "&") for i, w in enumerate(words) if w[0] in "*&"]
        symbol = library[self.symbol]
        symbol.argtypes = [ctypes.POINTER(t) if w[0] in "*&" else t
                           for w, t in zip(words, types, strict=True)]

        scope = {"symbol": symbol, "byref": ctypes.byref, "refused": self._refused}
        scope |= {f"t{i}": kind for i, kind, _ in out}
        exec(_text_of_call([(w[0] != "*", w[0] in "*&") for w in words]), scope)  # noqa: S102
        return scope["call"]

    def _refused(self, *given: Any) -> NoReturn:
        raise TypeError(f"{self.name} takes ({self.signature}), is given {given}")


def _text_of_call(parameters: Sequence[tuple[bool, bool]]) -> str:
    """What calls a function of the library, written for its parameters: some are called for every
    launch, and walking through the parameters takes longer than most of them.

    parameters: (whether it is passed, whether it is given back).
    """
    lines, passed, given, back = list[str](), "", "", ""
    for i, (takes, gives) in enumerate(parameters):
        given += f"a{i}, " if takes else ""
        if gives:
            lines.append(f"c{i} = t{i}({f'a{i}' if takes else ''})")
        passed += f"byref(c{i}), " if gives else f"a{i}, "
        back += f", c{i}.value or 0" if gives else ""
    count = sum(takes for takes, _ in parameters)
    body = "".join(f"    {line}\n" for line in lines)
    unpack = f"    ({given}) = given\n" if count else ""
    return (f"def call(*given):\n    if len(given) != {count}:\n        refused(*given)\n{unpack}"
            f"{body}    return (symbol({passed}){back},)\n")


FUNCTIONS: dict[str, DriverFunction] = {}
DriverFunction("cuInit", "uint")
DriverFunction("cuDriverGetVersion", "*int")
DriverFunction("cuGetErrorName", "int *text")
DriverFunction("cuGetErrorString", "int *text")
DriverFunction("cuDeviceGetCount", "*int")
DriverFunction("cuDeviceGet", "*int int")
DriverFunction("cuDeviceGetName", "text int int")
DriverFunction("cuDeviceTotalMem_v2", "*size int")
DriverFunction("cuDeviceGetAttribute", "*int int int")
DriverFunction("cuDeviceGetUuid_v2", "text int")
DriverFunction("cuDevicePrimaryCtxRetain", "*ptr int")
DriverFunction("cuCtxGetCurrent", "*ptr")
DriverFunction("cuCtxSetCurrent", "ptr")
DriverFunction("cuCtxSynchronize")
DriverFunction("cuThreadExchangeStreamCaptureMode", "&int")
DriverFunction("cuModuleLoadData", "*ptr text")
DriverFunction("cuModuleGetFunction", "*ptr ptr text")
DriverFunction("cuFuncGetAttribute", "*int int ptr")
DriverFunction("cuFuncSetAttribute", "ptr int int")
DriverFunction("cuOccupancyMaxActiveBlocksPerMultiprocessor", "*int ptr int size")
DriverFunction("cuOccupancyMaxActiveClusters", "*int ptr ptr")
DriverFunction("cuMemGetInfo_v2", "*size *size")
DriverFunction("cuMemAlloc_v2", "*ptr size")
DriverFunction("cuMemFree_v2", "ptr")
DriverFunction("cuMemAllocAsync", "*ptr size ptr")
DriverFunction("cuMemFreeAsync", "ptr ptr")
DriverFunction("cuDeviceGetDefaultMemPool", "*ptr int")
DriverFunction("cuMemPoolSetAttribute", "ptr int ptr")
DriverFunction("cuMemPoolGetAttribute", "ptr int ptr")
DriverFunction("cuMemPoolTrimTo", "ptr size")
DriverFunction("cuMemHostAlloc", "*ptr size uint")
DriverFunction("cuMemHostGetDevicePointer_v2", "*ptr ptr uint")
DriverFunction("cuMemFreeHost", "ptr")
DriverFunction("cuMemcpyHtoDAsync_v2", "ptr ptr size ptr")
DriverFunction("cuMemcpyDtoHAsync_v2", "ptr ptr size ptr")
DriverFunction("cuMemcpyDtoDAsync_v2", "ptr ptr size ptr")
DriverFunction("cuMemcpyPeer", "ptr ptr ptr ptr size")
DriverFunction("cuMemsetD8Async", "ptr byte size ptr")
DriverFunction("cuPointerGetAttribute", "*int int ptr")
DriverFunction("cuStreamCreateWithPriority", "*ptr uint int")
DriverFunction("cuStreamDestroy_v2", "ptr")
DriverFunction("cuStreamSynchronize", "ptr")
DriverFunction("cuStreamWaitEvent", "ptr ptr uint")
DriverFunction("cuStreamIsCapturing", "ptr *int")
DriverFunction("cuStreamBeginCapture_v2", "ptr int")
DriverFunction("cuStreamEndCapture", "ptr *ptr")
DriverFunction("cuStreamGetCaptureInfo_v2", "ptr *int *size *ptr *ptr *size")
DriverFunction("cuStreamBeginCaptureToGraph", "ptr ptr ptr ptr size int")
DriverFunction("cuStreamUpdateCaptureDependencies", "ptr ptr size uint")
DriverFunction("cuGraphConditionalHandleCreate", "*size ptr ptr uint uint")
DriverFunction("cuGraphAddNode", "*ptr ptr ptr size ptr")
DriverFunction("cuGraphInstantiateWithParams", "*ptr ptr ptr")
DriverFunction("cuGraphGetNodes", "ptr ptr &size")
DriverFunction("cuGraphNodeGetType", "ptr *int")
DriverFunction("cuGraphGetEdges_v2", "ptr ptr ptr ptr &size")
DriverFunction("cuGraphAddDependencies_v2", "ptr ptr ptr ptr size")
DriverFunction("cuGraphDestroyNode", "ptr")
DriverFunction("cuGraphEventRecordNodeGetEvent", "ptr *ptr")
DriverFunction("cuGraphEventWaitNodeGetEvent", "ptr *ptr")
DriverFunction("cuGraphKernelNodeGetParams_v2", "ptr ptr")
DriverFunction("cuGraphExecKernelNodeSetParams_v2", "ptr ptr ptr")
DriverFunction("cuGraphMemcpyNodeGetParams", "ptr ptr")
DriverFunction("cuGraphExecMemcpyNodeSetParams", "ptr ptr ptr ptr")
DriverFunction("cuGraphLaunch", "ptr ptr")
DriverFunction("cuGraphDestroy", "ptr")
DriverFunction("cuGraphExecDestroy", "ptr")
DriverFunction("cuEventCreate", "*ptr uint")
DriverFunction("cuEventDestroy_v2", "ptr")
DriverFunction("cuEventRecord", "ptr ptr")
DriverFunction("cuEventSynchronize", "ptr")
DriverFunction("cuEventQuery", "ptr")
DriverFunction("cuEventElapsedTime", "*float ptr ptr")
DriverFunction("cuTensorMapEncodeTiled", "ptr int uint ptr ptr ptr ptr ptr int int int int")
DriverFunction("cuTensorMapEncodeIm2col",
               "ptr int uint ptr ptr ptr ptr ptr uint uint ptr int int int int")


class Library:
    """The functions as attributes, each bound at its first use."""

    def __init__(self, library: Any):
        self._library = library
        # cuLaunchKernelEx(CUlaunchConfig*, CUfunction, void** parameters, void** extra): without
        # argtypes, since c_void_p objects made once are passed on as they are.
        self.launch: Callable[..., int] = library["cuLaunchKernelEx"]

    def __getattr__(self, name: str) -> Callable[..., tuple]:
        if name not in FUNCTIONS:
            raise AttributeError(f"the driver's function {name} is not declared here")
        made = FUNCTIONS[name].of(self._library)
        setattr(self, name, made)
        return made


def open_library() -> Library:
    """Raises OSError where there is no driver, AttributeError for one before CUDA 12."""
    return Library(ctypes.CDLL(NAME))


__all__ = ["FUNCTIONS", "DriverFunction", "LaunchAttribute", "LaunchConfig", "Library",
           "open_library"]
