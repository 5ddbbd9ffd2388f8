"""ts.register_op: a function of the user's as an op with its own name in graphs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..errors import ArgumentError, user_line
from ..graph.expand import inline
from ..graph.op import OPS, GraphOp
from ..graph.signature import callable_name
from ..tensor import Tensor
from .api import jvp
from .custom import Custom, batch_graphs
from .custom_jvp import CUSTOM_JVP, custom_jvp
from .custom_vjp import CUSTOM_RULES, CUSTOM_VJP, custom_vjp
from .transform import call_slots, need_function, signature_of


class RegisteredOp:
    """A function that is one op of the graphs that call it. See `register_op`."""

    def __init__(self, fn: Callable, name: str):
        need_function(fn, "register_op")
        if name in OPS or name in NAMES:
            raise ArgumentError(f"an op named {name!r} is registered already", where=user_line(),
                                hint="choose another name")
        NAMES.add(name)
        self.fn, self.name = functools.wraps(fn)(lambda *args, **kwargs: fn(*args, **kwargs)), name
        self.fn.__name__ = self.fn.__qualname__ = name  # as messages and graphs call it
        self.__name__, self.__doc__, self.__module__ = name, fn.__doc__, fn.__module__
        self.__wrapped__, self.__signature__ = fn, signature_of(fn)
        self.reverse: tuple[Callable, ...] = ()
        self.forward: tuple[Callable, ...] = ()
        self._local = threading.local()
        self._op: GraphOp | None = None

    def defvjp(self, fwd: Callable, bwd: Callable) -> None:
        """Its derivative in reverse mode, as of ts.custom_vjp. Raises ArgumentError after a first
        call in a graph."""
        self._require_new()
        need_function(fwd, "defvjp")
        need_function(bwd, "defvjp")
        self.reverse = (fwd, bwd)

    def defjvp(self, rule: Callable) -> Callable:
        """In forward mode, as of ts.custom_jvp; alone it serves both."""
        self._require_new()
        need_function(rule, "defjvp")
        self.forward = (rule,)
        return rule

    def _require_new(self) -> None:
        if self._op is not None:
            raise ArgumentError(f"{self.name} is in graphs already: its rules are fixed",
                                where=user_line(), hint="give the rules before the first call")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rules = (*self.reverse, *self.forward) or (self._tangents,)
        made: Custom = (custom_vjp if self.reverse else custom_jvp)(self.fn)
        made.follow(self._local, *rules)
        made.op = self.op
        return made(*args, **kwargs)

    @property
    def op(self) -> GraphOp:
        """Its record, made at the first call in a graph."""
        if self._op is None:
            base = CUSTOM_JVP if not self.reverse else CUSTOM_RULES if self.forward else CUSTOM_VJP

            def batch(*args: Any, **attrs: Any) -> Any:
                assert self._op is not None
                return batch_graphs(self._op, base.graph_attrs)(*args, **attrs)

            self._op = replace(base, name=self.name, batch=batch, samples=(),
                               expand=lambda *xs, primal, **attrs: inline(primal, xs),
                               doc=(self.__doc__ or "").strip().split("\n")[0])
        return self._op

    def _tangents(self, primals: tuple, tangents: tuple) -> tuple:
        """Without a rule: the derivative of what it is made of."""
        slots = dict(zip(self.__signature__.parameters, primals, strict=False))
        names = [n for n, t in zip(slots, tangents, strict=True) if t is not None]

        def of(*moving: Tensor) -> Any:
            args, kwargs = call_slots(self.__signature__, {**slots, **dict(zip(names, moving,
                                                                               strict=True))})
            return self.fn(*args, **kwargs)

        held = dict(zip(slots, tangents, strict=True))
        return jvp(of, tuple(slots[n] for n in names), tuple(held[n] for n in names))

    def __repr__(self) -> str:
        return f"<op {self.name}>"


NAMES: set[str] = set()  # of registered ops; their records are made at a first call


def register_op(name: Any = None, fn: Callable | None = None) -> Any:
    """Makes a function an op of its own: one node, by this name, in every graph that calls it.

        @ts.register_op
        def gelu_tanh(x):
            y = ts.zeros_like(x)
            my_kernel(x, y)          # kernels, library routines and ops
            return y

        gelu_tanh.defvjp(fwd, bwd)

    Its derivative is that of the rules given by defvjp and defjvp, as of ts.custom_vjp and
    ts.custom_jvp; without any, that of what the function is made of. Outside of a trace the
    function runs as it is. `@ts.register_op("name")` names it otherwise than the function.
    Raises ArgumentError for a name that is taken.
    """
    if callable(name):
        return RegisteredOp(name, callable_name(name))
    if name is not None and not (isinstance(name, str) and name.isidentifier()):
        raise ArgumentError(f"an op's name is an identifier, got {name!r}", where=user_line())
    if fn is None:
        return lambda f: register_op(name or callable_name(f), f)
    return RegisteredOp(fn, name or callable_name(fn))


__all__ = ["RegisteredOp", "register_op"]
