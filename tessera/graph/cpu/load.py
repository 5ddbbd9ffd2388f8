"""Object code -> a callable address, through llvmlite's ORC linker. No numba here.

`llvmlite.binding` is imported at the first kernel; a kernel from the disk cache needs nothing else.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

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
        return PROTOTYPE(library[symbol])


def cpu_description() -> str:
    """CPU name and features: object code of one CPU must not run on another."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    return llvm.get_host_cpu_name() + " " + features.flatten()
