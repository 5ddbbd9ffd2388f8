"""A user's function of a score as functions of the tile language, for the kernels of attention."""

from __future__ import annotations

import math
from functools import lru_cache

from ...kernels.attention_scores import ScoreCode
from ...numerics import as_type
from ..expand import expand_by
from ..ir import Graph, Node, Value
from ..ops.score_function import PLACES, ScoreFunction
from ..simplify import canonicalize, merge_common, remove_dead
from .spell import no_kernel, template


@lru_cache(maxsize=256)
def score_code(score: ScoreFunction, heads: int) -> ScoreCode:
    """heads: of queries in a sequence."""
    made = [_function(name, graph) for name, graph in (("value", score.value),
                                                       ("both", score.both))]
    return ScoreCode("\n\n".join(made), heads)


def _function(name: str, graph: Graph) -> str:
    """Division by a number is a product, and tanh is of two steps: a score needs no last bit."""
    graph = expand_by(graph, lambda n: n.op.expand if not _constant(n) and template(n) is None
                      else None)
    graph = remove_dead(merge_common(canonicalize(graph)))
    names = dict(zip(graph.inputs, ("s", *PLACES), strict=True))
    numbers = {n.outputs[0]: n for n in graph.nodes if _constant(n)}
    lines = [f"def {name}(s, {', '.join(PLACES)}):"]
    for node in graph.nodes:
        (made,) = node.outputs
        if node in numbers.values():
            names[made] = _number(node)
            continue
        names[made] = f"v{len(lines)}"
        lines.append(f"    {names[made]} = {_expression(node, names, numbers)}")
    return "\n".join([*lines, f"    return {', '.join(names[v] for v in graph.outputs)}"])


def _constant(node: Node) -> bool:
    return node.op.name in ("constant", "full")


def _number(node: Node) -> str:
    value, kind = node.attrs["value"], as_type(node.attrs["type"]).dtype.kind
    if kind == "float" and not math.isfinite(value):
        return f"float('{float(value)!r}')"
    number = {"float": float, "bool": bool}.get(kind, int)(value)
    return f"({number!r})" if number < 0 else repr(number)


def _expression(node: Node, names: dict[Value, str], numbers: dict[Value, Node]) -> str:
    divisor = numbers.get(node.inputs[-1])
    if node.op.name == "div" and divisor is not None and float(divisor.attrs["value"]):
        return f"{names[node.inputs[0]]} * {1 / float(divisor.attrs['value'])!r}"
    text = "tanh({0})" if node.op.name == "tanh" else template(node)
    if text is None:
        raise no_kernel(node, "a score function is part of attention's kernel there")
    kinds = {k: repr(str(v)) for k, v in node.attrs.items() if k == "to"}
    return text.format(*(names[v] for v in node.inputs), **kinds)


__all__ = ["score_code"]
