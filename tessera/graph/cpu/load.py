"""Object code -> a callable address. No Numba here, and on x86-64 no LLVM.

There code is linked by `link_code.py`. Relocations of other machines are LLVM's to know: on these
its ORC linker does it, and `llvmlite.binding` is imported at the first kernel.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from functools import cache
from typing import Any

from .link_code import LinkedCode

# The function Numba compiled: status(result slot, exception slot, layout, call, scratch). It raises
# nothing, so both slots may be one dummy word.
PROTOTYPE = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p,
    ctypes.c_void_p,
)
_lock = threading.Lock()
_jit: Any = None
_loaded: list[Any] = []  # keeps the code of every kernel mapped for the life of the process


def load_object(code: bytes, symbol: str) -> Any:
    """The ctypes function of `symbol` in ELF bytes; calling it releases the GIL."""
    if platform.machine() != "x86_64":
        return PROTOTYPE(_linked_by_llvm(code, symbol))
    placed = LinkedCode(code)
    _loaded.append(placed)
    return PROTOTYPE(placed.address(symbol))


def _linked_by_llvm(code: bytes, symbol: str) -> int:
    import llvmlite.binding as llvm

    global _jit
    with _lock:
        if _jit is None:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            _jit = llvm.create_lljit_compiler()
        library = (
            llvm.JITLibraryBuilder()
            .add_object_img(code)
            .add_current_process()
            .export_symbol(symbol)
            .link(_jit, f"loops{len(_loaded)}")
        )
        _loaded.append(library)
        address: int = library[symbol]
        return address


@cache
def cpu_description() -> str:
    """The first CPU as Linux describes it, but for its clock: object code of one CPU must not run
    on another."""
    with open("/proc/cpuinfo", "rb", buffering=0) as file:  # hundreds of CPUs would take a while
        text = file.read(1 << 14)
    lines = text.split(b"\n\n")[0].decode(errors="replace").splitlines()
    return "\n".join(line for line in lines if line.partition(":")[0].strip() in DESCRIBES)


def cpu_has(feature: str) -> bool:
    """Whether the CPU has a feature, by Linux's name."""
    return any(feature in line.partition(":")[2].split() for line in cpu_description().splitlines())


# Of x86-64 and of 64-bit Arm.
DESCRIBES = {"vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features",
             "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"}
