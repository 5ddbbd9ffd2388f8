"""Compiles emitted source to object code with Numba. Imports numba: loaded at the first compile.

The object code, not Numba's in-memory function, is what is returned, so that a fresh
kernel and one from the disk cache take the same path.
"""

from __future__ import annotations

import linecache
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from numba import types
from numba.core import compiler
from numba.core.registry import cpu_target

from . import frame  # noqa: F401  registers the instructions of the loops' frame
from .instructions import INSTRUCTIONS, memory_access, rounding
from .maths import MATHS
from .pipeline import LoopCompiler
from .tiles import tile_instruction

SIGNATURE = (types.int64, types.int64, types.int64)  # layout, call, scratch
NAMES = {
    "f32": types.float32, "f64": types.float64, "i32": types.int32, "i64": types.int64,
    "u32": types.uint32, "inf": float("inf"), "nan": float("nan"), "range": range,
}
_lock = threading.Lock()


def compile_source(source: str, name: str) -> tuple[str, bytes]:
    """Symbol and ELF bytes of the function `loops` that `source` defines."""
    function = _define(source, name)
    with _lock:
        typing, target = cpu_target.typing_context, cpu_target.target_context
        typing.refresh()
        target.refresh()
        library = target.codegen().create_library(name)
        library.enable_object_caching()
        with _asked_once(typing):
            result = compiler.compile_extra(
                typing, target, function, SIGNATURE, types.none, _flags(), {}, library=library,
                pipeline_class=LoopCompiler,
            )
        return result.fndesc.llvm_func_name, bytes(library._get_compiled_object())


_known: dict[tuple[int, tuple], tuple[Any, Any]] = {}


@contextmanager
def _asked_once(typing: Any) -> Iterator[None]:
    """Numba tries every definition of a function at each of its calls, a quarter of the time of a
    compilation. What it has found for some types it finds for them again, in later loops too."""
    ask = typing.resolve_function_type

    def resolve(function: Any, args: tuple, kws: Any) -> Any:
        key = id(function), args
        if kws or key not in _known:
            found = ask(function, args, kws)
            if kws or found is None:
                return found
            _known[key] = function, found  # the function lives as long as its number is in use
        return _known[key][1]

    typing.resolve_function_type = resolve
    try:
        yield
    finally:
        del typing.resolve_function_type


def _flags() -> compiler.Flags:
    flags = compiler.Flags()
    flags.nrt = False
    flags.enable_pyobject = False
    flags.enable_looplift = False
    flags.boundscheck = False
    flags.error_model = "numpy"
    flags.no_cpython_wrapper = True
    flags.no_cfunc_wrapper = True
    return flags


def _define(source: str, name: str) -> FunctionType:
    """The Python function, its names resolved to instructions; shown by tracebacks as `name`."""
    file = f"<tessera {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    code = compile(source, file, "exec")
    (body,) = (c for c in code.co_consts if isinstance(c, CodeType))
    scope: dict[str, Any] = {n: resolve(n) for n in body.co_names}
    exec(code, scope)  # our own emitter's text
    return scope["loops"]


def resolve(name: str) -> object:
    """What a global name of emitted source means."""
    for table in (NAMES, MATHS, INSTRUCTIONS):
        if name in table:
            return table[name]
    found = memory_access(name) or rounding(name) or tile_instruction(name)
    if found is None:
        raise NameError(f"emitted source uses {name!r}, which no loop instruction defines")
    return found
