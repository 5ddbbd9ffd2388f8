"""Functions of sources of loops: of machine code from the disk cache, or compiled now."""

from __future__ import annotations

from typing import Any

from ...launched import launched_here


def obtain(source: str) -> Any:
    """Machine code of a source: from the disk cache, else compiled and stored there."""
    from . import disk
    from .load import load_object

    name = disk.entry_name(source)

    def compiled() -> tuple[str, bytes]:
        if launched_here() > 1:
            from .compile_apart import compile_apart as compile_source
        else:
            from .compile import compile_source
        return compile_source(source, f"loops_{name[:12]}")

    symbol, code = disk.obtain(name, compiled)
    return load_object(code, symbol)


__all__ = ["obtain"]
