"""A user's function of a score as functions of the tile language, for the kernels of attention."""

from __future__ import annotations

import math
from functools import lru_cache

from ....kernels.attention_scores import ScoreCode
from ....lazy_dataclass import dataclass
from ....numerics import as_type
from ...expand import expand_by
from ...ir import Graph, Node, Value, producers_of
from ...ops.score_function import PLACES, ScoreFunction
from ...simplify import canonicalize, merge_common, remove_dead
from ..kernels.spell import no_kernel, template
from .linear_score import identity_terms, linear_terms, result_text

FLOATS = ("fi", "fj")  # places of queries and keys as floats
EXACT = frozenset({"{0} + {1}", "{0} - {1}", "tile.abs({0})"})  # in f32, of integers up to 2^24


@lru_cache(maxsize=256)
def score_code(score: ScoreFunction, heads: int) -> ScoreCode:
    """heads: of queries in a sequence."""
    made = [_function(name, graph) for name, graph in (("value", score.value),
                                                       ("both", score.both))]
    terms = _terms(score.value)
    made += [] if terms is None else [terms]
    return ScoreCode("\n\n".join(made), heads, terms is not None)


def _function(name: str, graph: Graph) -> str:
    """Division by a number is a product, and tanh is of two steps: a score needs no last bit."""
    graph = _opened(graph)
    w = _Writer(dict(zip(graph.inputs, ("s", *PLACES), strict=True)),
                dict(zip(graph.inputs[3:], FLOATS, strict=True)), producers_of(graph))
    lines = [f"def {name}(s, {', '.join((*PLACES, *FLOATS))}):"]
    for node in graph.nodes:
        (made,) = node.outputs
        if _constant(node):
            w.names[made] = _number(node)
            continue
        text = w.expression(node)
        w.names[made] = f"v{len(lines)}"
        lines.append(f"    {w.names[made]} = {text}")
    return "\n".join([*lines, f"    return {', '.join(w.names[v] for v in graph.outputs)}"])


def _opened(graph: Graph) -> Graph:
    """Of ops that have an expression."""
    graph = expand_by(graph, lambda n: n.op.expand if not _constant(n) and template(n) is None
                      else None)
    return remove_dead(merge_common(canonicalize(graph)))


def _terms(graph: Graph) -> str | None:
    """`terms` of a linear score, of the sequence and the head; None for another."""
    graph = _opened(graph)
    s, b, h, i, j = graph.inputs
    w = _Writer({b: "b", h: "h"}, {}, producers_of(graph))
    lines, terms = ["def terms(b, h):"], identity_terms(s, i, j)
    for node in graph.nodes:
        (made,) = node.outputs
        if _constant(node):
            w.names[made] = _number(node)
        elif all(v in w.names for v in node.inputs):
            text = w.expression(node)
            w.names[made] = f"v{len(lines)}"
            lines.append(f"    {w.names[made]} = {text}")
        else:
            found = linear_terms(node, [terms.get(v) or {"1": w.as_float(v)} for v in node.inputs],
                                 [w.names.get(v) for v in node.inputs])
            if found is None:
                return None
            terms[made] = found
    (y,) = graph.outputs
    return "\n".join([*lines, f"    return {result_text(terms[y])}"]) if y in terms else None


def _constant(node: Node) -> bool:
    return not node.inputs and "value" in node.attrs


def _number(node: Node, kind: str | None = None) -> str:
    value, kind = node.attrs["value"], kind or as_type(node.attrs["type"]).dtype.kind
    if kind == "float" and not math.isfinite(value):
        return f"float('{float(value)!r}')"
    number = {"float": float, "bool": bool}.get(kind, int)(value)
    return f"({number!r})" if number < 0 else repr(number)


@dataclass
class _Writer:
    """names: of values that are written.  floats: of those that are there as floats too.  made: by
    which node"""

    names: dict[Value, str]
    floats: dict[Value, str]
    made: dict[Value, Node]

    def expression(self, node: Node) -> str:
        divisor = self.made.get(node.inputs[-1]) if node.inputs else None
        if node.op.name == "div" and divisor is not None and _constant(divisor) and float(
                divisor.attrs["value"]):
            return f"{self.names[node.inputs[0]]} * {1 / float(divisor.attrs['value'])!r}"
        if node.op.name == "cast" and str(node.attrs["to"]) == "f32" and (
                node.attrs["source"].dtype.kind == "int"):
            return self.as_float(node.inputs[0])
        text = "tanh({0})" if node.op.name == "tanh" else template(node)
        if text is None:
            raise no_kernel(node, "a score function is part of attention's kernel there")
        kinds = {k: repr(str(v)) for k, v in node.attrs.items() if k == "to"}
        return text.format(*(self.names[v] for v in node.inputs), **kinds)

    def as_float(self, x: Value) -> str:
        """An integer as f32: distances are those of floats."""
        node = self.made.get(x)
        if x in self.floats:
            return self.floats[x]
        if x.aval.dtype.kind == "float":
            return self.names[x]
        if node is not None and _constant(node):
            return _number(node, "float")
        text = None if node is None else template(node)
        if node is not None and text in EXACT:
            return f"({text.format(*map(self.as_float, node.inputs))})"
        return f"tile.cast({self.names[x]}, 'f32')"


__all__ = ["score_code"]
