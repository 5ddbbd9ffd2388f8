"""Graph ops as expressions of the tile language: {0}, {1} are operands, other names attributes;
{index} is where an element stands in the whole, {runs} whether fours of them begin at multiples of
four.

An op whose meaning at special values differs from the tile op of its name is written so that it
agrees: `exp` of a difference and division by a row statistic have meanings of their own there.
"""

from __future__ import annotations

from typing import Any

from ...errors import UnsupportedTargetError
from ..ir import Node

FLOATS: dict[str, str] = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}",
    "neg": "-{0}", "pow": "{0} ** {1}", "maximum": "tile.maximum({0}, {1})",
    "minimum": "tile.minimum({0}, {1})", "floor_divide": "{0} // {1}", "remainder": "{0} % {1}",
    "exp": "tile.exp({0} * 1.0)", "expm1": "tile.expm1({0})", "log": "tile.log({0})",
    "log2": "tile.log2({0})", "exp2": "tile.exp2({0})",
    "log10": "tile.log({0}) * 0.4342944819032518",
    "log1p": "tile.log1p({0})", "sqrt": "tile.sqrt({0})", "rsqrt": "tile.rsqrt({0})",
    "abs": "tile.abs({0})", "sin": "tile.sin({0})", "cos": "tile.cos({0})", "tan": "tile.tan({0})",
    "atan": "tile.atan({0})", "atan2": "tile.atan2({0}, {1})", "tanh": "tile.tanh({0})",
    "sigmoid": "tile.sigmoid({0})", "erf": "tile.erf({0})", "relu": "tile.maximum({0}, 0.0)",
    "floor": "tile.floor({0})", "ceil": "tile.ceil({0})", "round": "tile.round({0})",
    "trunc": "tile.trunc({0})", "pow_constant": "{0} ** {exponent}",
    "sign": "tile.where({0} > 0.0, 1.0, tile.where({0} < 0.0, -1.0, {0}))",
    "asin": "tile.atan2({0}, tile.sqrt((1.0 - {0}) * (1.0 + {0})))",
    "acos": "tile.atan2(tile.sqrt((1.0 - {0}) * (1.0 + {0})), {0})",
    "sinh": "0.5 * (tile.expm1({0}) - tile.expm1(-{0}))",
    "cosh": "0.5 * (tile.exp({0}) + tile.exp(-{0}))",
    "gelu": "{0} * tile.sigmoid(1.59576912 * ({0} * (1.0 + 0.044715 * ({0} * {0}))))",
    "silu": "{0} * tile.sigmoid({0})",
    "softplus": "tile.maximum({0}, 0.0) + tile.log1p(tile.exp(-tile.abs({0})))",
    "isnan": "tile.isnan({0})", "isinf": "tile.isinf({0})",
    "isfinite": "tile.abs({0}) < inf",
}
INTEGERS: dict[str, str] = {  # and bools, on which &, |, ^ and ~ are logical
    **{n: FLOATS[n] for n in ("add", "sub", "mul", "neg", "maximum", "minimum", "floor_divide",
                              "remainder", "abs")},
    "bitwise_and": "{0} & {1}", "bitwise_or": "{0} | {1}", "bitwise_xor": "{0} ^ {1}",
    "bitwise_not": "~{0}", "relu": "tile.maximum({0}, 0)",
}
ANY: dict[str, str] = {
    "less": "{0} < {1}", "less_equal": "{0} <= {1}", "greater": "{0} > {1}",
    "greater_equal": "{0} >= {1}", "equal": "{0} == {1}", "not_equal": "{0} != {1}",
    "where": "tile.where({0}, {1}, {2})",
    "random_bits": "tile.random_bits({index}, seed=({0}, {1}), runs={runs})",
}
# An index from the front; see `within`.
CHECK_INDEX = "tile.where({0} < 0, {0} + {extent}, {0})"
REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "reduce_prod": "prod"}
# How partial results of a reduction are joined, and the one that changes nothing.
COMBINE = {"sum": ("{0} + {1}", "0.0"), "max": ("tile.maximum({0}, {1})", "-inf"),
           "min": ("tile.minimum({0}, {1})", "inf"), "prod": ("{0} * {1}", "1.0")}
STORED = frozenset({
    "f64", "f32", "bf16", "f16", "fp8_e4m3", "fp8_e5m2", "int64", "int32", "int16", "int8",
    "uint64", "uint32", "uint16", "uint8", "bool_"})


def template(node: Node) -> str | None:
    """The expression of an elementwise op; None when it has none."""
    name = node.op.name
    if name == "cast":
        return _cast(node)
    if name == "check_index":
        return CHECK_INDEX
    operand = node.inputs[-1].aval.dtype if node.inputs else None
    kind = FLOATS if operand is not None and operand.kind == "float" else INTEGERS
    return ANY.get(name) or kind.get(name)


def _cast(node: Node) -> str | None:
    source, to = node.attrs["source"], node.attrs["to"]
    if {source.dtype.name, to.dtype.name} - STORED or to.policy.rounding == "stochastic":
        return None
    return "{0} != 0" if to.dtype.kind == "bool" else "tile.cast({0}, {to})"


def within(at: str, extent: int, wrap: bool = True) -> str:
    """The assertion that indices lie inside an extent. wrap: negative ones count from its end."""
    low = -extent if wrap else 0
    return (f'assert ({at} >= {low}) & ({at} < {extent}), "an index is outside of '
            f'{low}..{extent - 1}"')


def no_kernel(node: Node, why: str = "") -> UnsupportedTargetError:
    """The error for an op that has no lowering."""
    from .numbering import line_of

    types = ", ".join(str(v.aval) for v in node.inputs)
    return UnsupportedTargetError(
        f"{node.op.name}({types}) has no kernel for GPUs" + (f": {why}" if why else ""),
        where=line_of(node.where),
        hint='run the function with target="cpu", or write this part as a @ts.kernel')


def literal(value: Any, kind: str) -> str:
    """A number as the kernel's text has it."""
    if kind == "float":
        return repr(float(value))  # inf and nan are names that kernels know
    return repr(bool(value)) if kind == "bool" else repr(int(value))


__all__ = ["COMBINE", "REDUCTIONS", "STORED", "literal", "no_kernel", "template",
           "within"]
