"""What functions with a derivative of the user's share."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ArgumentError, GradError
from ..graph import functions as F
from ..graph import tree
from ..graph.expand import inline
from ..graph.interpret import own_memory
from ..graph.ir import Graph, Node
from ..graph.op import Arg, Aval, GraphOp, Sample
from ..graph.ops.random import LoopKeys
from ..graph.signature import callable_name
from ..graph.text_values import RECORDS
from ..graph.trace import apply, aval_of, current_builder, current_line
from ..lazy_dataclass import dataclass
from ..numerics import as_type
from ..tensor import Tensor
from .batching import batch_graph, stretch
from .subgraphs import Packed, Result, check_inputs, close_together, run_graph, trace_body
from .transform import bind_slots, call_slots, need_function, signature_of


@dataclass(frozen=True, eq=False)
class Rules:
    """The rules of one call, by which calls of the same function in them are known.

    op: what such a call is when the rules are differentiated in their turn.
    """

    name: str
    op: GraphOp
    n_args: int

    def __repr__(self) -> str:
        return self.name


RECORDS["Rules"] = Rules  # ops have them as attributes


@dataclass(frozen=True)
class RuleCall:
    """The call whose rules are being traced. draws: whether the function draws random numbers: in a
    rule it draws those of the call, by its place there."""

    fn: Callable
    packed: Packed
    rules: Rules
    draws: bool

    def again(self, fn: Callable, packed: Packed) -> bool:
        """Whether a call in a rule has the arguments of this one, but for the tensors' elements."""
        mine = self.packed
        if self.draws or fn != self.fn:
            return False
        if packed.treedef != mine.treedef or packed.places != mine.places:
            return False
        tensors = {*mine.places}
        return all(t.scale is None and aval_of(t) == aval_of(own)
                   for t, own in zip(packed.tensors, mine.tensors, strict=True)) and all(
            type(x) is type(own) and x == own for i, (x, own) in enumerate(
                zip(packed.flat, mine.flat, strict=True)) if i not in tensors)


class Custom(ABC):
    """A function with a derivative of its own. In its rules it runs without them: a call there is a
    node, which has the rules when what they compute is differentiated."""

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
            return self._call_in_rule(args, kwargs)
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

    def without_rule(self, call: Callable, of: RuleCall | None = None) -> Any:
        """call(), in which the function runs without its rules. of: whose rule `call` is."""
        before = self._plain(), getattr(self._local, "of", None)
        self._local.inside, self._local.of = True, of
        try:
            return call()
        finally:
            self._local.inside, self._local.of = before

    def _rule_call(self, packed: Packed, op: GraphOp, keys: LoopKeys) -> RuleCall:
        """Of a call whose function was traced with `keys`."""
        rules = Rules(callable_name(self.fn), op, len(packed.tensors))
        return RuleCall(self.fn, packed, rules, keys.count > 0)

    def _call_in_rule(self, args: tuple, kwargs: dict) -> Any:
        of: RuleCall | None = self._local.of
        builder = current_builder()
        if of is None or builder is None:
            return self.fn(*args, **kwargs)
        name = callable_name(self.fn)
        packed = Packed(bind_slots(self.__signature__, args, kwargs, name), numbers="constants")
        if not of.again(self.fn, packed):
            return self.fn(*args, **kwargs)
        values: list[Result] = []
        primal = trace_body(self._primal(packed, values), [aval_of(x) for x in packed.tensors],
                            name, keys=builder.rng)
        (primal,), captured = close_together(primal)
        out = apply(CUSTOM_FUNCTION, *packed.tensors, *captured, primal=primal, rules=of.rules)
        return values[0].build(out)

    def _arguments(self, args: tuple, kwargs: dict) -> Packed:
        """Arguments by name; Python numbers and other objects stay constants."""
        slots = bind_slots(self.__signature__, args, kwargs, callable_name(self.fn))
        packed = Packed(slots, numbers="constants")
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


def with_rules(graph: Graph, attrs: Mapping[str, Any]) -> Graph:
    """The graph of a rule, in which calls of its function have the rules `attrs` that it is of."""
    rules: Rules = attrs["rules"]
    captured = graph.inputs[len(graph.inputs) - len(attrs["primal"].inputs) + rules.n_args:]

    def tied(node: Node) -> Node:
        if node.op is not CUSTOM_FUNCTION or node.attrs["rules"] is not rules:
            return node
        inputs = (*node.inputs[:rules.n_args], *captured)
        return Node(rules.op, inputs, dict(attrs), node.outputs, node.where)

    return replace(graph, nodes=tuple(map(tied, graph.nodes)))


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


def _samples() -> tuple[Sample, ...]:
    x = Aval((3,), as_type("f32"))
    primal = trace_body(lambda x: [F.sin(x)], [x], "f")
    return (Sample((Arg((3,)),), {"primal": primal, "rules": None}),)


CUSTOM_FUNCTION = GraphOp(
    "custom_function",
    shape=lambda *xs, primal, rules: check_inputs(primal, xs),
    ref=lambda *arrays, primal, rules: own_memory(run_graph(primal, arrays), arrays),
    expand=lambda *xs, primal, rules: inline(primal, xs),
    batch=lambda *a, **k: batch_graphs(CUSTOM_FUNCTION, ("primal",))(*a, **k),
    multi=True,
    graph_attrs=("primal",),
    samples=_samples(),
    doc="a function with rules of the user's, called in one of them",
)
