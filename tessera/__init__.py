"""Tessera: tile kernels, a differentiable tensor graph, numerics in the types, and a mesh."""

from __future__ import annotations

import builtins as _builtins
import sys as _sys
from math import inf as inf
from math import pi as pi
from types import ModuleType as _ModuleType
from typing import Any as _Any

from .import_time import telling_what_to_install as _telling_what_to_install
from .import_time import uncollected as _uncollected

with _uncollected(), _telling_what_to_install():
    from . import array as array
    from . import checkpoints as checkpoints
    from . import config as config
    from . import data as data
    from . import debug as debug
    from . import dist as dist
    from . import graph as graph
    from . import mesh as mesh
    from . import numerics as numerics
    from . import onnx as onnx
    from . import optim as optim
    from . import shape as shape
    from . import state as state
    from . import stdlib as stdlib
from .ad import *  # noqa: F403
from .bundles import LoadedFunction as LoadedFunction
from .bundles import export as export
from .bundles import load as load
from .call_errors import refuse_wrong_calls as _refuse_wrong_calls
from .complex_pair import Complex as Complex
from .debug import arch_report as arch_report
from .debug import inspect_ir as inspect_ir
from .debug import verify as verify
from .dims import Dim as Dim
from .dims import sym as sym
from .dist import ShardSpec as ShardSpec
from .dist import all_gather as all_gather
from .dist import all_reduce as all_reduce
from .dist import all_to_all as all_to_all
from .dist import alpa_shard as alpa_shard
from .dist import current_mesh as current_mesh
from .dist import reduce_scatter as reduce_scatter
from .dynamic_scale import DynamicLossScale as DynamicLossScale
from .effects import effects as effects
from .effects import pure as pure
from .errors import *  # noqa: F403
from .errors import UnknownNameError as _UnknownNameError
from .foreign import DIST as _DIST
from .foreign import FUNCTIONS as _FOREIGN
from .fp8_scaling import CurrentScaling as CurrentScaling
from .fp8_scaling import DelayedScaling as DelayedScaling
from .graph import assignment as _assignment  # noqa: F401  it fills a hook
from .graph import functions as _functions
from .graph import random as random
from .graph import sparse as sparse
from .graph.devices import to as to
from .graph.jit import jit as jit
from .graph.regions import Region as Region
from .graph.regions import read as read
from .graph.regions import reduce_max as reduce_max
from .graph.regions import reduce_min as reduce_min
from .graph.regions import reduce_sum as reduce_sum
from .graph.regions import write as write
from .graph.tree import map_tree as map_tree
from .graph.tree import register_tree as register_tree
from .mesh import domain as domain
from .mesh.logical_names import on as on
from .mesh.parallel.index_launch import index_launch as index_launch
from .mesh.parallel.pipeline import pipeline as pipeline
from .mesh.parallel.pmap import pmap as pmap
from .numerics.public import *  # noqa: F403
from .optimizer_state import OptimizerState as OptimizerState
from .optimizer_state import checkpointable as checkpointable
from .optimizer_state import fp32_master as fp32_master
from .optimizer_state import paged as paged
from .state import KVCache as KVCache
from .state import KVCacheManager as KVCacheManager
from .state import kv_cache as kv_cache
from .state import offload as offload
from .state import plan as plan
from .state import prefetch as prefetch
from .state import rolling_window as rolling_window
from .tensor import Tensor as Tensor
from .tensor import param as param
from .tensor import tensor as tensor
from .tile.interpreter.arguments import Tile as Tile
from .tile.ir.schedule import Schedule as Schedule
from .tile.ir.schedule import block as block
from .tile.kernel.decorator import kernel as kernel
from .tile.kernel.determinism import determinism as determinism
from .tile.launch.resident import as_bytes as as_bytes
from .tile.launch.resident import from_bytes as from_bytes
from .tile.launch.resident import from_dlpack as from_dlpack
from .tile.passes.registered import register_pass as register_pass
from .tile.passes.registered import unregister_pass as unregister_pass

allreduce = all_reduce
from .graph.functions import *  # noqa: E402, F403  after all that declare some
from .tile import MODULE as tile  # noqa: E402  after the ops, one of which is called tile

# The modules that programs use.
_MODULES = {
    "array": array, "checkpoints": checkpoints, "config": config, "data": data, "debug": debug,
    "dist": dist, "domain": domain, "mesh": mesh, "numerics": numerics, "onnx": onnx,
    "optim": optim, "random": random, "shape": shape, "sparse": sparse, "state": state,
    "verify": verify}
for _name, _module in {"ts": _sys.modules[__name__],
                       **{f"ts.{n}": m for n, m in _MODULES.items()}}.items():
    _refuse_wrong_calls(_module, _name)

tile.repeat, KTile = _functions.tile, Tensor
dropout_in_kernel = tile.dropout_in_kernel
INF = inf
__version__ = "0.1.0"
_OFFERED = [n for n, x in globals().items() if n[0] != "_" and n != "annotations"
            and (n in {*_MODULES, "graph", "stdlib", "tile"} or not isinstance(x, _ModuleType))]
# What a star-import binds: no name of a Python builtin (ts.max stays ts.max).
__all__ = [n for n in _OFFERED if not hasattr(_builtins, n)]


def __getattr__(name: str) -> _Any:
    """A format that was declared later; else an error that says which name is near."""
    if name.startswith("__"):
        raise AttributeError(name)
    if (format_ := numerics.dtypes.named_dtype(name)) is not None:
        return format_
    known = lambda: sorted(__all__)  # noqa: E731
    raise _UnknownNameError(f"tessera has no name {name!r}", name, known, {**_DIST, **_FOREIGN})


def __dir__() -> list[str]:
    return sorted([*_OFFERED, "__version__"])

