"""NCCL through ctypes: the functions and numbers that collectives between GPUs use.

    library = open_library()                    # None where there is none
    check(library.ncclAllReduce(source, target, count, kind, op, comm, stream), "all_reduce")

ctypes for the reasons of libcuda.py: an array's address, a count and a stream are all that a call
takes, and CuPy's module is not needed for them. The library of the wheels that torch and CuPy bring
is taken first, so that a process has one NCCL.

Signatures and numbers: nccl.h of NCCL 2.18, the first with ncclCommSplit; later ones have the same.
Windows, memory that all ranks reach, are those of 2.27; gathers by copy engines those of 2.28.
"""

from __future__ import annotations

import ctypes
import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import DeviceError

NAME = "libnccl.so.2"
SUCCESS, IN_PROGRESS, ID_BYTES, NO_COLOR = 0, 7, 128, -1
TYPES = {"int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "f16": 6,
         "f32": 7, "f64": 8, "bf16": 9}
OPS = {"sum": 0, "max": 2, "min": 3}
LEAST_VERSION, WINDOWS_VERSION, ENGINES_VERSION = 21800, 22700, 22800
SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC: an array lies at one offset on all ranks
_CONFIG_MAGIC, _UNDEFINED = 0xcafebeef, -(1 << 31)


class UniqueId(ctypes.Structure):
    """ncclUniqueId, which is passed by value."""

    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class CommunicatorConfig(ctypes.Structure):
    """ncclConfig_t: what a communicator has of its own. Later versions take a shorter one."""

    _fields_ = (("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint),
                ("blocking", ctypes.c_int), ("cga_size", ctypes.c_int),
                ("least_blocks", ctypes.c_int), ("most_blocks", ctypes.c_int),
                ("net_name", ctypes.c_char_p), ("split_share", ctypes.c_int))

    @staticmethod
    def of_blocks(count: int) -> CommunicatorConfig:
        """That of a communicator whose kernels have so many blocks."""
        return CommunicatorConfig(
            ctypes.sizeof(CommunicatorConfig), _CONFIG_MAGIC, LEAST_VERSION, _UNDEFINED, _UNDEFINED,
            count, count, None, _UNDEFINED)


class EnginesConfig(ctypes.Structure):
    """ncclConfig_t of NCCL 2.27, whose policy says that collectives take no multiprocessor where
    they need none: NCCL_CTA_POLICY_ZERO."""

    _fields_ = (*CommunicatorConfig._fields_, ("traffic_class", ctypes.c_int),
                ("name", ctypes.c_char_p), ("collnet", ctypes.c_int), ("policy", ctypes.c_int),
                ("shrink_share", ctypes.c_int), ("nvls_blocks", ctypes.c_int))

    @staticmethod
    def made() -> EnginesConfig:
        return EnginesConfig(
            ctypes.sizeof(EnginesConfig), _CONFIG_MAGIC, WINDOWS_VERSION, *[_UNDEFINED] * 4, None,
            _UNDEFINED, _UNDEFINED, None, _UNDEFINED, 2, _UNDEFINED, _UNDEFINED)


_P, _I, _S = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (_P,),
    "ncclGetUniqueId": (_P,),
    "ncclCommInitRank": (_P, _I, UniqueId, _I),
    "ncclCommSplit": (_P, _I, _I, _P, _P),
    "ncclCommGetAsyncError": (_P, _P),
    "ncclCommAbort": (_P,),
    "ncclAllReduce": (_P, _P, _S, _I, _I, _P, _P),
    "ncclReduceScatter": (_P, _P, _S, _I, _I, _P, _P),
    "ncclAllGather": (_P, _P, _S, _I, _P, _P),
    "ncclSend": (_P, _S, _I, _I, _P, _P),
    "ncclRecv": (_P, _S, _I, _I, _P, _P),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
}
_WINDOW_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclMemAlloc": (_P, _S),
    "ncclMemFree": (_P,),
    "ncclCommWindowRegister": (_P, _P, _S, _P, _I),
    "ncclCommWindowDeregister": (_P, _P),
}


class Nccl:
    """The functions as attributes: each gives a status. has_windows: whether it has those of
    windows.  has_engines: whether it gathers by copy engines there."""

    def __init__(self, library: Any):
        self._text = library.ncclGetErrorString
        self._text.argtypes, self._text.restype = (_I,), ctypes.c_char_p
        self._declare(library, _SIGNATURES)
        self.has_windows = self.version >= WINDOWS_VERSION
        self.has_engines = self.version >= ENGINES_VERSION
        if self.has_windows:
            self._declare(library, _WINDOW_SIGNATURES)

    def _declare(self, library: Any, signatures: dict[str, tuple[Any, ...]]) -> None:
        for name, types in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, _I
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:  # for readers of types: __init__ sets them all
        raise AttributeError(f"NCCL's function {name} is not declared here")

    @property
    def version(self) -> int:
        found = ctypes.c_int()
        check(self.ncclGetVersion(ctypes.byref(found)), "ask for NCCL's version", self)
        return found.value

    def text(self, status: int) -> str:
        return self._text(status).decode()


def check(status: int, what: str, library: Nccl | None = None) -> None:
    """Raise DeviceError for a status that is neither success nor "under way"."""
    if status not in (SUCCESS, IN_PROGRESS):
        library = library or open_library()
        words = library.text(status) if library is not None else f"status {status}"
        raise DeviceError(f"{what}: NCCL says: {words}",
                          hint="NCCL_DEBUG=WARN in the environment makes NCCL say more")


@functools.cache
def open_library() -> Nccl | None:
    """NCCL, None where it is missing or older than 2.18."""
    for name in (*_wheels(), NAME):
        try:
            found = Nccl(ctypes.CDLL(name))
        except (OSError, AttributeError):
            continue
        if found.version >= LEAST_VERSION:
            return found
    return None


def _wheels() -> list[str]:
    """Where the packages nvidia-nccl-cu12 and -cu13 have put it."""
    try:
        spec = find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    places = [] if spec is None else spec.submodule_search_locations or []
    return [str(p) for folder in places if (p := Path(folder, "lib", NAME)).is_file()]


__all__ = ["ID_BYTES", "NO_COLOR", "OPS", "SUCCESS", "TYPES", "Nccl", "UniqueId", "check",
           "open_library"]
