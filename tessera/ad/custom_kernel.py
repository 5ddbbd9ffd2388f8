"""Kernels under jit, grad and the other transforms: a call becomes a node, with the rule it has.

    k.defvjp(fwd, bwd)      k.defjvp(rule)       the rules of ts.custom_vjp and ts.custom_jvp
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import hooks
from ..graph.ops.kernel import KernelResults, record
from ..graph.trace import Tracer, current_builder
from ..open_trace import trace_state
from ..runtime.arrays import HOST
from ..tensor import Tensor
from .custom_jvp import custom_jvp
from .custom_vjp import custom_vjp
from .transform import need_function

if TYPE_CHECKING:
    from ..tile.interpreter.launch import Config
    from ..tile.kernel.kernel import Kernel


class KernelFunction:
    """One call of a kernel as a function of values: it gives what the kernel returns and writes,
    and changes nothing. Its derivative rules call it so."""

    def __init__(self, kernel: Kernel, config: Config, explicit: frozenset[str]):
        self.kernel, self.config, self.explicit = kernel, config, explicit
        self.__name__ = self.__qualname__ = kernel.__name__
        self.__doc__, self.__module__ = kernel.__doc__, kernel.__module__
        self.__signature__ = kernel.signature
        self.results: KernelResults | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelFunction) and (
            self.kernel, self.config, self.explicit) == (other.kernel, other.config, other.explicit)

    def __hash__(self) -> int:
        return hash((self.kernel, self.explicit))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.kernel.signature.bind(*args, **kwargs).arguments
        self.results = record(self.kernel, self.config, given, self.explicit)
        return self.results.value


class KernelRule:
    """A kernel's derivative: reverse, the two functions of `defvjp`, and forward, that of `defjvp`.

    local: whether a rule of this kernel is being traced, and of which call.
    """

    def __init__(self, reverse: tuple[Callable, ...] = (), forward: tuple[Callable, ...] = ()):
        self.reverse, self.forward, self.local = reverse, forward, threading.local()

    def record(self, kernel: Kernel, config: Config, arguments: dict[str, Any],
               explicit: frozenset[str]) -> KernelResults:
        function = KernelFunction(kernel, config, explicit)
        custom = (custom_vjp if self.reverse else custom_jvp)(function)
        custom.follow(self.local, *self.reverse, *self.forward)
        value = custom(**arguments)
        assert function.results is not None
        return function.results.with_value(value)


def call(kernel: Kernel, config: Config, arguments: dict[str, Any], explicit: frozenset[str]
         ) -> Any:
    """What the kernel returns; each tensor that it writes stands for the new value from here on."""
    rule: KernelRule | None = kernel.rule
    if rule is None or trace_state.builder is None:
        made = record(kernel, config, arguments, explicit)
    else:
        made = rule.record(kernel, config, arguments, explicit)
    for name, value in made.written.items():
        become(arguments[name], value, f"kernel {kernel.__name__} writes into {name}")
    given = tuple(arguments[n] for n in made.same) or made.new
    return given[0] if len(given) == 1 else given or None


def become(x: Any, value: Tensor, said: str) -> None:
    """x is `value` from here on: another value of the graph, or other elements on the mesh.
    said: what happened, for an error."""
    if isinstance(x, Tracer) and isinstance(value, Tracer):
        builder = current_builder()
        assert builder is not None
        builder.write(x, value, said)
        return
    if getattr(x, "layout", None) is None:  # an array that lies whole in this process
        x[...] = value.numpy()
        return
    moved = hooks.shard.get()(value, x.layout)
    for rank, part in x.held.items():
        if part.place == HOST:
            part.buffer[...] = moved.held[rank].buffer
        else:
            part[...] = moved.held[rank]


def vjp_rule(kernel: Kernel, fwd: Callable, bwd: Callable) -> KernelRule:
    """The rule of a kernel after `defvjp`. Raises ArgumentError for what is no function."""
    need_function(fwd, "defvjp")
    need_function(bwd, "defvjp")
    return KernelRule((fwd, bwd), () if kernel.rule is None else kernel.rule.forward)


def jvp_rule(kernel: Kernel, rule: Callable) -> KernelRule:
    """The rule of a kernel after `defjvp`."""
    need_function(rule, "defjvp")
    return KernelRule(() if kernel.rule is None else kernel.rule.reverse, (rule,))


__all__ = ["KernelRule", "become", "call", "jvp_rule", "vjp_rule"]
