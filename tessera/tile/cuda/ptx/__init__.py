"""The PTX instructions, one file per family. Every module of this folder is loaded, and registers
its records."""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
