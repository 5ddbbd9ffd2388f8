"""What functions with a derivative of the user's share."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ArgumentError, GradError
from ..graph import tree
from ..graph.ir import Graph
from ..graph.op import Aval, GraphOp
from ..graph.signature import callable_name
from ..graph.trace import apply, current_builder, current_line
from ..tensor import Tensor
from .batching import batch_graph, stretch
from .subgraphs import Packed, Result, close_together, trace_body
from .transform import bind_slots, call_slots, need_function, signature_of


class Custom(ABC):
    """A function with a derivative of its own. While its rules are traced it runs without them."""

    kind = ""
    hint = ""  # how to give the rule; {0} is the function's name
    ready = False  # whether it has been given
    op: GraphOp | None = None  # the op that calls become; None: the one of its kind

    def __init__(self, fn: Callable):
        need_function(fn, self.kind)
        functools.update_wrapper(self, fn, updated=())
        self.fn = fn
        self.__signature__ = signature_of(fn)
        self._local = threading.local()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._plain():
            return self.fn(*args, **kwargs)
        if not self.ready:
            name = callable_name(self.fn)
            raise GradError(f"{self.kind} {name} has no rule yet", hint=self.hint.format(name))
        if current_builder() is None:
            return self.fn(*args, **kwargs)
        return self._record(args, kwargs)

    def follow(self, local: threading.local, *rules: Callable) -> None:
        """Take these rules, and whether they are being traced from others of the same owner."""
        self._local = local
        self.define(*rules)

    @abstractmethod
    def define(self, *rules: Callable) -> None:
        """Set the rules."""

    @abstractmethod
    def _record(self, args: tuple, kwargs: dict) -> Any:
        """The call as one op that holds the function and its rules."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"<{self.kind} {callable_name(self.fn)}>"

    def _plain(self) -> bool:
        return getattr(self._local, "inside", False)

    def without_rule(self, call: Callable, *args: Any) -> Any:
        before, self._local.inside = self._plain(), True
        try:
            return call(*args)
        finally:
            self._local.inside = before

    def _arguments(self, args: tuple, kwargs: dict) -> Packed:
        """Arguments by name; Python numbers and other objects stay constants."""
        slots = bind_slots(self.__signature__, args, kwargs, callable_name(self.fn))
        packed = Packed(slots, numbers=False)
        packed.need_unscaled(f"{self.kind} {callable_name(self.fn)}: argument")
        return packed

    def _primal(self, packed: Packed, box: list[Result]) -> Callable:
        def primal(*tracers: Tensor) -> list[Tensor]:
            slots = packed.build(tracers[: len(packed.tensors)])
            args, kwargs = call_slots(self.__signature__, slots)
            box.append(_tensors_only(self.without_rule(lambda: self.fn(*args, **kwargs)),
                                     callable_name(self.fn)))
            return box[0].tensors

        return primal


def _tensors_only(value: Any, name: str) -> Result:
    result = Result(value)
    if not result.plain:
        raise ArgumentError(f"{name} has a custom derivative and must return tensors, "
                            f"it returns {result.treedef} with other objects in it")
    return result


def leaves_or_none(ct: Any, treedef: tree.TreeDef, what: str) -> list[Any]:
    """Leaves of a cotangent that may hold None in the place of any part."""
    if ct is None:
        return [None] * len(tree.paths(treedef))
    if treedef.kind is dict and isinstance(ct, dict) and set(ct) == set(treedef.data):
        parts = [ct[k] for k in treedef.data]
    elif treedef.kind in (tuple, list) and isinstance(ct, tuple | list) \
            and len(ct) == len(treedef.children):
        parts = list(ct)
    else:
        return tree.leaves_like(ct, treedef, what)
    return [x for p, c in zip(parts, treedef.children, strict=True)
            for x in leaves_or_none(p, c, what)]


def refuse_closed(primal: Graph, wanted: Sequence[bool]) -> None:
    """A value that the function closes over has no cotangent in the user's rule."""
    if any(wanted):
        raise GradError(
            f"{primal.name} has a custom derivative and closes over a value that is differentiated",
            hint="pass it as an argument, or through ts.stop_gradient when no gradient is meant",
            where=current_line())


def _batched(graph: Graph, size: Any, avals: Sequence[Aval]) -> Graph:
    """The graph over a batch: every input and output has the batch axis."""
    def run(*args: Tensor) -> list[Tensor]:
        outs, marks = batch_graph(graph, size, args, [True] * len(args))
        return [stretch(y, size, b) for y, b in zip(outs, marks, strict=True)]

    return trace_body(run, [Aval((size, *a.shape), a.type) for a in avals], graph.name)


def batch_graphs(op: GraphOp, names: tuple[str, ...]) -> Callable:
    """vmap of an op that holds user rules: all inputs are stretched, all its graphs batched."""
    def rule(size: Any, batched: tuple, *xs: Tensor, **attrs: Any) -> tuple:
        full = [stretch(x, size, b) for x, b in zip(xs, batched, strict=True)]
        held = [_batched(attrs[n], size, [v.aval for v in attrs[n].inputs]) for n in names]
        closed, captured = close_together(*held)
        return apply(op, *full, *captured, **{**attrs, **dict(zip(names, closed, strict=True))}), \
            True

    return rule
