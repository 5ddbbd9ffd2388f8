"""Scores that are linear: x s + y i + z j + c of a score s, its query i and key j, where x, y, z
and c depend on sequence and head alone. What differs from query to query only is the same for all
keys that a softmax goes over, so kernels add one number a key."""

from __future__ import annotations

from ...ir import Node, Value

Terms = dict[str, str]  # texts of the factors of "s", "i", "j", and what is left, "1"
ORDER = ("s", "i", "j", "1")


def linear_terms(node: Node, terms: list[Terms], numbers: list[str | None]) -> Terms | None:
    """Those of an elementwise op of what has terms; None if it is not linear. numbers: the texts of
    operands that depend on sequence and head alone, else None."""
    name = node.op.name
    if name == "cast" and str(node.attrs["to"]) == "f32":
        return terms[0]
    if name == "neg":
        return _scaled(terms[0], "(-1.0)")
    if name == "add":
        return _sum(*terms)
    if name == "sub":
        return _sum(terms[0], _scaled(terms[1], "(-1.0)"))
    if name == "mul" and node.outputs[0].aval.dtype.kind == "float":
        for x, number in zip(terms, reversed(numbers), strict=True):
            if number is not None:
                return _scaled(x, number)
    if name == "div" and node.outputs[0].aval.dtype.kind == "float" and numbers[1] is not None:
        return _scaled(terms[0], f"(1.0 / {numbers[1]})")
    return None


def identity_terms(s: Value, i: Value, j: Value) -> dict[Value, Terms]:
    return {x: {name: "1.0"} for name, x in (("s", s), ("i", i), ("j", j))}


def _scaled(x: Terms, number: str) -> Terms:
    return {k: number if v == "1.0" else f"({v} * {number})" for k, v in x.items()}


def _sum(x: Terms, y: Terms) -> Terms:
    return {k: f"({x[k]} + {y[k]})" if k in x and k in y else x.get(k) or y[k] for k in {**x, **y}}


def result_text(x: Terms) -> str:
    return ", ".join(x.get(k, "0.0") for k in ORDER)


__all__ = ["Terms", "linear_terms", "identity_terms", "result_text"]
