"""`ts.inspect_ir(level, fn)`: the text of a compiled function at each level."""

from __future__ import annotations

import inspect
from typing import Any

from .. import hooks
from ..ad import grad
from ..errors import ArgumentError
from ..graph.inspected_function import InspectedFunction
from ..graph.signature import callable_name
from ..graph.traced_signature import TracedSignature
from ..tensor import TensorType

_latest: list[Any] = []  # what was compiled last; empty before anything was


def inspect_ir(level: str, fn: Any = None, **options: Any) -> str:
    """The text of one level of `fn`; of the function compiled last when fn is None.

    level: graph | schedule | tile | target | ptx | sass, as far as the function has it
    backward=True: of the gradient of a compiled function. Raises ArgumentError, code E_LEVEL.
    """
    if fn is None:
        if not _latest:
            raise ArgumentError("nothing has been compiled yet",
                                hint='call a @ts.jit function first, or ts.inspect_ir("graph", f)')
        (fn,) = _latest
    if isinstance(fn, str):
        raise ArgumentError("inspect_ir takes the level first, got the function",
                            hint=f'ts.inspect_ir("{fn}", f)')
    if not hasattr(fn, "inspect_ir"):
        name = callable_name(fn)
        call = name if name.isidentifier() else "fn"
        raise ArgumentError(f"{name} is not compiled",
                            hint=f"{call} = ts.jit({call}); {call}(x, ...); "
                                 f'then ts.inspect_ir("{level}", {call})')
    return fn.inspect_ir(level, **options)


def _gradient(fn: InspectedFunction, traced: TracedSignature) -> TracedSignature:
    """The gradient of fn at the signature of `traced`: of its params, else its first argument."""
    names = [n for n, x in traced.types.items() if isinstance(x, TensorType)]
    params = [n for n in names if n in traced.params]
    derived = grad(fn.fn, wrt=tuple(params or names[:1]))
    bound = inspect.BoundArguments(inspect.signature(fn.fn), traced.types)
    return derived.compiled.traced(*bound.args, **bound.kwargs)


def _compiled(fn: Any) -> None:
    """A function or a kernel was compiled: ts.inspect_ir(level) without a function means it."""
    _latest[:] = [fn]


hooks.gradient.fill(_gradient)
hooks.compiled.append(_compiled)
__all__ = ["inspect_ir"]
