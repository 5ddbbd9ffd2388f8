"""custom_vjp: a function whose reverse-mode derivative the user writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..dims import show_shape
from ..errors import GradError
from ..graph import functions as F
from ..graph import tree
from ..graph.expand import inline
from ..graph.interpret import own_memory
from ..graph.ir import Graph
from ..graph.op import Arg, Aval, GraphOp, NoRule, Sample
from ..graph.operand import convert
from ..graph.ops.random import LoopKeys
from ..graph.signature import callable_name, is_data
from ..graph.trace import apply, aval_of, current_builder, evaluate
from ..numerics import as_type
from ..tensor import Tensor, as_tensor
from .custom import (
    CUSTOM_FUNCTION,
    Custom,
    RuleCall,
    Rules,
    batch_graphs,
    leaves_or_none,
    refuse_closed,
    with_rules,
)
from .custom_tangents import push, trace_tangents
from .reverse import backward, forward, materialize
from .subgraphs import (
    Packed,
    Result,
    check_inputs,
    close_together,
    is_float,
    run_graph,
    tangent_aval,
    trace_body,
    zero_tangent,
)
from .transform import call_slots, need_function


class custom_vjp(Custom):
    """A function whose reverse-mode derivative is written by the user.

        @ts.custom_vjp
        def f(x): ...
        f.defvjp(fwd, bwd)

    fwd(*args) -> (value, saved), any nested value as `saved`; it may call f, which then runs
    without the rule. bwd(saved, g) -> one cotangent per argument: a tuple with None where there is
    none, or the bare cotangent of the only tensor argument. Arguments may be nested; Python
    numbers, strings and other objects are constants. Forward mode raises GradError, unless
    f.defjvp(rule) gives a rule for it too.

    A second derivative differentiates what fwd and bwd compute. Calls of f in them, with arguments
    of the same shapes and types, have the rule then; forward mode over it transposes bwd.
    """

    kind = "custom_vjp"
    hint = "{0}.defvjp(fwd, bwd): fwd(*args) -> (value, saved), bwd(saved, g) -> cotangents"
    fwd: Callable
    bwd: Callable
    rule: Callable | None = None

    def defvjp(self, fwd: Callable, bwd: Callable) -> None:
        """Set the two rules."""
        need_function(fwd, "defvjp")
        need_function(bwd, "defvjp")
        self.fwd, self.bwd, self.ready = fwd, bwd, True

    def defjvp(self, rule: Callable) -> Callable:
        """Set a rule for forward mode, as of ts.custom_jvp; returns it."""
        need_function(rule, "defjvp")
        self.rule = rule
        return rule

    def define(self, *rules: Callable) -> None:
        self.defvjp(*rules[:2])
        for rule in rules[2:]:
            self.defjvp(rule)

    def _record(self, args: tuple, kwargs: dict) -> Any:
        packed = self._arguments(args, kwargs)
        avals, name = [aval_of(x) for x in packed.tensors], callable_name(self.fn)
        values: list[Result] = []
        keys = LoopKeys(current_builder())
        primal = trace_body(self._primal(packed, values), avals, name, keys=keys)
        one = self.op or (CUSTOM_VJP if self.rule is None else CUSTOM_RULES)
        of = self._rule_call(packed, CUSTOM_VJP_AGAIN if self.rule is None else one, keys)
        saved: list[Packed] = []
        fwd = trace_body(self._forward_rule(of, values[0], saved), avals, f"{name}_fwd",
                         keys=LoopKeys(current_builder(), like=keys))
        self._check_forward(primal, fwd)
        n = len(primal.outputs)
        back = [*(v.aval for v in fwd.outputs[n:]), *(tangent_aval(v.aval) for v in primal.outputs)]
        places: list[int] = []
        bwd = trace_body(self._backward_rule(of, values[0], saved[0], places), back,
                         f"{name}_bwd")
        attrs: dict[str, Any] = {"places": tuple(places), "n_closed": len(primal.captures),
                                 "rules": of.rules}
        graphs = {"primal": primal, "fwd": fwd, "bwd": bwd}
        if self.rule is not None:
            graphs["rule"] = trace_tangents(self, self.rule, of, values[0], primal, keys)
        closed, captured = close_together(*graphs.values())
        attrs |= zip(graphs, closed, strict=True)
        out = apply(one, *packed.tensors, *captured, **attrs)
        return values[0].build(out)

    def _forward_rule(self, of: RuleCall, value: Result, box: list[Packed]) -> Callable:
        def fwd(*tracers: Tensor) -> list[Tensor]:
            args, kwargs = call_slots(self.__signature__, of.packed.build(tracers))
            made = self.without_rule(lambda: self.fwd(*args, **kwargs), of)
            if not (isinstance(made, tuple) and len(made) == 2):
                raise GradError(f"{callable_name(self.fwd)} must return (value, saved), it returns "
                                f"{type(made).__name__}")
            if made[0] is None and value.treedef.kind is None:
                raise GradError(f"{callable_name(self.fwd)} gives None as the value, and "
                                "its function makes a tensor",
                                hint="a kernel that only writes returns None: return what it "
                                "wrote, (y, saved)")
            leaves = tree.leaves_like(made[0], value.treedef,
                                      f"the value of {callable_name(self.fwd)}")
            box.append(Packed(made[1], numbers="constants"))
            return [*map(as_tensor, leaves), *box[0].tensors]

        return fwd

    def _check_forward(self, primal: Graph, fwd: Graph) -> None:
        for i, (a, b) in enumerate(zip(primal.outputs, fwd.outputs, strict=False)):
            if a.aval != b.aval:
                raise GradError(f"{callable_name(self.fwd)} returns {b.aval} as value {i}, "
                                f"{callable_name(self.fn)} returns {a.aval}")

    def _backward_rule(self, of: RuleCall, value: Result, saved: Packed, places: list[int]
                       ) -> Callable:
        def bwd(*tracers: Tensor) -> list[Tensor]:
            k = len(saved.tensors)
            kept = saved.build(tracers[:k])
            g = tree.unflatten(value.treedef, tracers[k:])
            found = _cotangents(self.without_rule(lambda: self.bwd(kept, g), of), of.packed,
                                callable_name(self.bwd))
            places[:] = list(found)
            return list(found.values())

        return bwd


def _cotangents(made: Any, packed: Packed, rule: str) -> dict[int, Tensor]:
    """Cotangents by position among the tensors. Raises GradError naming the argument."""
    slots = tree.unflatten(packed.treedef, packed.flat)
    names = list(slots)
    holding = [n for n in names if any(map(is_data_leaf, tree.flatten(slots[n])[0]))]
    given = made if isinstance(made, tuple) else (made,)
    if len(given) not in (len(names), len(holding)):
        raise GradError(f"{rule} returns {len(given)} cotangents for {len(names)} arguments: "
                        f"{', '.join(names)}",
                        hint="one per argument in order, None where there is none")
    owners = names if len(given) == len(names) else holding
    found: dict[int, Tensor] = {}
    at = 0
    by_name = dict(zip(owners, given, strict=True))
    for name in names:
        own = Packed(slots[name], numbers="constants")
        for label, like, ct in _per_leaf(name, own, by_name.get(name), rule):
            if ct is not None and is_float(like):
                found[at] = _checked(ct, like, label, rule)
            at += 1
    return found


def is_data_leaf(x: Any) -> bool:
    return is_data(x) and not isinstance(x, bool | int | float)


def _per_leaf(name: str, own: Packed, ct: Any, rule: str) -> list[tuple[str, Tensor, Any]]:
    """(label, tensor, cotangent or None) per tensor of one argument."""
    labels = own.names(name)
    if ct is None:
        return [(label, x, None) for label, x in zip(labels, own.tensors, strict=True)]
    if not own.tensors:
        raise GradError(f"{rule} returns a cotangent for {name}, which holds no tensor",
                        hint="None stands for no cotangent")
    leaves = leaves_or_none(ct, own.treedef, f"{rule}: the cotangent of {name}")
    return [(label, x, leaves[i])
            for label, x, i in zip(labels, own.tensors, own.places, strict=True)]


def _checked(ct: Any, like: Tensor, label: str, rule: str) -> Tensor:
    g = as_tensor(ct)
    if tuple(g.shape) != tuple(like.shape):
        raise GradError(f"{rule}: the cotangent of {label} has shape {show_shape(g.shape)}, "
                        f"{label} has {show_shape(like.shape)}")
    if not is_float(g):
        raise GradError(f"{rule}: the cotangent of {label} is {g.type}, not a floating type")
    return convert(g, tangent_aval(like).type)


def _vjp_residual(*xs: Tensor, **attrs: Any) -> tuple[tuple, tuple]:
    out = evaluate(with_rules(attrs["fwd"], attrs), xs)
    n = len(attrs["primal"].outputs)
    return tuple(out[:n]), tuple(out[n:])


def _vjp_vjp(gs: tuple, ys: tuple, *xs: Tensor, saved: tuple, wanted: tuple, **attrs: Any) -> tuple:
    first = attrs["rules"].n_args
    refuse_closed(attrs["primal"], wanted[first: first + attrs["n_closed"]])
    cts = [materialize(g, y) for g, y in zip(gs, ys, strict=True)]
    found = evaluate(with_rules(attrs["bwd"], attrs), [*saved, *cts, *xs[first:]])
    grads: list[Tensor | None] = [None] * len(xs)
    for i, g in zip(attrs["places"], found, strict=True):
        grads[i] = g
    return tuple(grads)


def _vjp_transposed(ts: tuple, ys: tuple, *xs: Tensor, **attrs: Any) -> tuple:
    """bwd is linear in the cotangents, so the forward derivative is its transpose."""
    primal, first = attrs["primal"], attrs["rules"].n_args
    refuse_closed(primal, [t is not None for t in ts[first: first + attrs["n_closed"]]])
    saved = _vjp_residual(*xs, **attrs)[1]
    rule = with_rules(attrs["bwd"], attrs)
    tape = forward(rule, [*saved, *(zero_tangent(v.aval) for v in primal.outputs), *xs[first:]])
    back = backward(tape, [materialize(ts[i], xs[i]) for i in attrs["places"]],
                    rule.inputs[len(saved): len(saved) + len(primal.outputs)])
    return tuple(t if is_float(v) else None for t, v in zip(back, primal.outputs, strict=True))


def _vjp_samples(diff: bool = False) -> tuple[Sample, ...]:
    f32 = as_type("f32")
    x = Aval((3,), f32)
    primal = trace_body(lambda x: [F.sin(x)], [x], "f")
    fwd = trace_body(lambda x: [F.sin(x), x], [x], "f_fwd")
    bwd = trace_body(lambda x, g: [g * F.cos(x)], [x, x], "f_bwd")
    attrs = {"primal": primal, "fwd": fwd, "bwd": bwd, "places": (0,), "n_closed": 0,
             "rules": Rules("f", CUSTOM_FUNCTION, 1)}
    return (Sample((Arg((3,), "normal", diff),), attrs),)


CUSTOM_VJP = GraphOp(
    "custom_vjp_call",
    shape=lambda *xs, primal, **attrs: check_inputs(primal, xs),
    ref=lambda *arrays, primal, **attrs: own_memory(run_graph(primal, arrays), arrays),
    expand=lambda *xs, primal, **attrs: inline(primal, xs),
    vjp=_vjp_vjp,
    no_jvp=NoRule(
        "the rule of {primal.name} is one for reverse mode",
        "use reverse mode (ts.grad, ts.vjp, ts.gradcheck with modes=('reverse',)), or write the "
        "rule as ts.custom_jvp, which serves both",
    ),
    batch=lambda *a, **k: batch_graphs(CUSTOM_VJP, ("primal", "fwd", "bwd"))(*a, **k),
    residual=_vjp_residual,
    multi=True,
    graph_attrs=("primal", "fwd", "bwd"),
    samples=_vjp_samples(),
    doc="a function with a reverse-mode rule of the user's",
)


CUSTOM_VJP_AGAIN = GraphOp(
    "custom_vjp_again",
    shape=CUSTOM_VJP.shape,
    ref=CUSTOM_VJP.ref,
    expand=CUSTOM_VJP.expand,
    vjp=_vjp_vjp,
    jvp=_vjp_transposed,
    batch=lambda *a, **k: batch_graphs(CUSTOM_VJP_AGAIN, ("primal", "fwd", "bwd"))(*a, **k),
    residual=_vjp_residual,
    multi=True,
    graph_attrs=("primal", "fwd", "bwd"),
    samples=_vjp_samples(diff=True),
    doc="a function with a reverse-mode rule of the user's, called in that rule",
)


def _rules_samples() -> tuple[Sample, ...]:
    (one,) = _vjp_samples()
    x = Aval((3,), as_type("f32"))
    rule = trace_body(lambda x, t: [F.sin(x), t * F.cos(x)], [x, x], "f_jvp")
    return (Sample((Arg((3,)),), {**one.attrs, "rule": rule}),)


CUSTOM_RULES = GraphOp(
    "custom_rules_call",
    shape=CUSTOM_VJP.shape,
    ref=CUSTOM_VJP.ref,
    expand=CUSTOM_VJP.expand,
    vjp=_vjp_vjp,
    jvp=lambda ts, y, *xs, **attrs: push(ts, *xs, **attrs)[1],
    push=push,
    batch=lambda *a, **k: batch_graphs(CUSTOM_RULES, ("primal", "fwd", "bwd", "rule"))(*a, **k),
    residual=_vjp_residual,
    multi=True,
    graph_attrs=("primal", "fwd", "bwd", "rule"),
    samples=_rules_samples(),
    doc="a function with rules of the user's for both modes",
)
