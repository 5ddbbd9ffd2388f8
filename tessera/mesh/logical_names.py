"""`mesh.shard(W, {"d_model"})` and `@ts.on(mesh)`: what is said of a mesh by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tessera import hooks
from tessera.errors import ArgumentError
from tessera.tensor import TensorType

from .device_mesh import Mesh, mesh
from .spec import ShardSpec, find_dim
from .tensor import distribute


def shard_named(where: Mesh, x: Any, which: Any, dims: Sequence[str] | None) -> Any:
    """What `mesh.shard` does."""
    chosen = (which,) if isinstance(which, str | int) else which
    axes = chosen if isinstance(chosen, Mapping) else dict.fromkeys(chosen, where.axes[-1])
    spec = ShardSpec(tuple(axes), tuple(axes.values())) if axes else ShardSpec(replicate=True)
    if not isinstance(x, TensorType):
        return distribute(x, spec, mesh=where, dims=dims)
    names = [str(d) for d in x.shape]
    spec.resolve(where, x.ndim, names)  # raises for what is not there
    numbers = tuple(find_dim(d, x.ndim, names) for d in spec.partition)
    return ShardSpec(numbers, spec.mesh_axes, spec.replicate)


hooks.shard_named.fill(shard_named)


def on(where: Mesh | Sequence[str], **options: Any) -> Callable[[Callable], Callable]:
    """A decorator: inside the function the mesh is this one, as in `with mesh:`.

    where: a mesh, or devices and the options of `ts.mesh`: @ts.on(devices, layout={"seq": "shard"})
    """
    chosen = where if isinstance(where, Mesh) else mesh(where, **options)
    if isinstance(where, Mesh) and options:
        raise ArgumentError(f"on({where}) takes no options, got {', '.join(options)}",
                            hint="give them to ts.mesh(...)")

    def decorate(fn: Callable) -> Callable:
        if not callable(fn):
            raise ArgumentError(f"@ts.on(mesh) decorates a function, got {fn!r}")

        @functools.wraps(fn)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with chosen:
                return fn(*args, **kwargs)

        return inside

    return decorate
