"""The graph: op records, tracing, Graph IR, passes and executors."""

from __future__ import annotations

import importlib
import pkgutil

from . import numpy_calls, ops
from .operators import install

for _module in pkgutil.iter_modules(ops.__path__):  # each registers its ops and functions
    importlib.import_module(f"{ops.__name__}.{_module.name}")

from .ops import random, sparse  # noqa: E402
from .regions.dependences import deps  # noqa: E402

install()

__all__ = ["deps", "numpy_calls", "ops", "random", "sparse"]
