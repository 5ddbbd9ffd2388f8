"""The standard library's kernels, one file per family. `tessera.stdlib` is its public face.

Every module of this folder is loaded, and its routines register themselves.
"""

from __future__ import annotations

import importlib
import pkgutil

from .routine import ROUTINES, Routine

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["ROUTINES", "Routine"]
