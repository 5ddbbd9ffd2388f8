"""What registers itself is given back as it was: for tests and pages that add things."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tessera import config
from tessera.graph import functions
from tessera.graph.op import OPS
from tessera.graph.operand import PUBLIC
from tessera.kernels import ROUTINES
from tessera.mesh.collectives.cost import COSTS
from tessera.mesh.collectives.record import COLLECTIVES
from tessera.numerics import dtypes
from tessera.numerics.parse import parse
from tessera.optim import OPTIMIZERS
from tessera.runtime.generations import GENERATIONS
from tessera.tensor import OPERATORS
from tessera.tile.cuda.emit.registry import load_all
from tessera.tile.cuda.intrinsics.elementwise import BODIES
from tessera.tile.frontend.tracer import EXPRESSIONS, STATEMENTS
from tessera.tile.kernel.decorator import LIBRARY
from tessera.tile.ops import OPS as TILE_OPS

REGISTRIES: tuple[dict, ...] = (
    OPS, PUBLIC, OPERATORS, vars(functions), TILE_OPS, BODIES, config.SETTINGS, ROUTINES,
    LIBRARY, COLLECTIVES, COSTS, GENERATIONS, EXPRESSIONS, STATEMENTS, OPTIMIZERS,
    dtypes._REGISTRY, dtypes._ALIASES, dtypes._BY_NUMPY)


@contextmanager
def restored() -> Iterator[None]:
    """A block after which every registry holds what it held before."""
    load_all()  # what registers itself when it is first needed stays
    before, names = [dict(registry) for registry in REGISTRIES], list(functions.__all__)
    try:
        yield
    finally:
        for registry, old in zip(REGISTRIES, before, strict=True):
            registry.clear()
            registry.update(old)
        parse.cache_clear()  # of names of types
        functions.__all__[:] = names
