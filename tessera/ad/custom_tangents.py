"""A derivative rule of the user's in forward mode, as a graph: rule(primals, tangents)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..dims import show_shape
from ..errors import GradError, ShapeError
from ..graph import tree
from ..graph.ir import Graph
from ..graph.operand import convert
from ..graph.ops.random import LoopKeys
from ..graph.signature import callable_name
from ..graph.trace import aval_of, current_builder, evaluate
from ..graph.weak_numbers import standing_for
from ..tensor import Tensor, as_tensor
from .custom import Custom, RuleCall, leaves_or_none, refuse_closed, with_rules
from .reverse import materialize
from .subgraphs import Result, is_float, tangent_aval, trace_body, zero_tangent


def trace_tangents(custom: Custom, rule: Callable, of: RuleCall, value: Result, primal: Graph,
                   keys: LoopKeys) -> Graph:
    """Arguments and tangents of the floating ones -> values and tangents of the floating ones.

    keys: of the primal's draws, which the rule repeats.
    """
    packed, n = of.packed, of.rules.n_args

    def body(*tracers: Tensor) -> list[Tensor]:
        it = iter(tracers[n:])
        moving = [standing_for(x, next(it)) if is_float(x) else None for x in packed.tensors]
        primals, tangents = packed.build(tracers[:n]), packed.replaced(moving)
        made = custom.without_rule(
            lambda: rule(tuple(primals.values()), tuple(tangents.values())), of)
        return _value_and_tangent(made, value, primal, callable_name(rule))

    avals = [aval_of(x) for x in packed.tensors]
    moving = [tangent_aval(x) for x in packed.tensors if is_float(x)]
    return trace_body(body, [*avals, *moving], f"{primal.name}_jvp",
                      keys=LoopKeys(current_builder(), like=keys))


def _value_and_tangent(made: Any, value: Result, primal: Graph, rule: str) -> list[Tensor]:
    """[*values, *tangents of the floating ones] of a rule's result, checked."""
    if not (isinstance(made, tuple) and len(made) == 2):
        raise GradError(f"{rule} must return (value, tangent), it returns {type(made).__name__}")
    outs = [as_tensor(y) for y in tree.leaves_like(made[0], value.treedef, f"the value of {rule}")]
    tangents = leaves_or_none(made[1], value.treedef, f"the tangent of {rule}")
    full = []
    for y, t, v in zip(outs, tangents, primal.outputs, strict=True):
        if aval_of(y) != v.aval:
            raise GradError(f"{rule} returns a value {aval_of(y)}, {primal.name} returns {v.aval}")
        if not is_float(v):
            continue
        t = zero_tangent(v.aval) if t is None else as_tensor(t)
        if tuple(t.shape) != tuple(v.aval.shape):
            raise ShapeError(f"{rule} returns a tangent of shape {show_shape(t.shape)}, its value "
                             f"has {show_shape(v.aval.shape)}")
        full.append(convert(t, tangent_aval(v.aval).type))
    return [*outs, *full]


def rule_inputs(xs: Sequence[Tensor], ts: Sequence[Tensor | None], n_args: int) -> list[Tensor]:
    """What the graph of a rule takes: arguments, tangents of the floating ones, captured ones."""
    moving = [materialize(t, x) for t, x in zip(ts[:n_args], xs[:n_args], strict=True)
              if is_float(x)]
    return [*xs[:n_args], *moving, *xs[n_args:]]


def push(ts: tuple, *xs: Tensor, **attrs: Any) -> tuple[tuple, tuple]:
    """(values, tangents) of a call: its arguments, then what it captured; n_closed: how much of
    that the primal captured."""
    primal, n_args = attrs["primal"], attrs["rules"].n_args
    refuse_closed(primal, [t is not None for t in ts[n_args: n_args + attrs["n_closed"]]])
    out = evaluate(with_rules(attrs["rule"], attrs), rule_inputs(xs, ts, n_args))
    n = len(primal.outputs)
    moved = iter(out[n:])
    return tuple(out[:n]), tuple(next(moved) if is_float(v) else None for v in primal.outputs)


__all__ = ["push", "rule_inputs", "trace_tangents"]
