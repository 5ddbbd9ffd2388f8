"""The functions a loop expression may call: name, arity, result type, NumPy meaning, and how the
tile language says it.

The compiled forms of the same names are in `maths.py`. `cost` is in units of one f32 addition per
element; it decides what is recomputed rather than kept, and when a second thread pays. Where the
meaning at special values differs from that of the tile op of the name, `tile` is written so that it
agrees: `exp` of a difference has a meaning of its own there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ...errors import ArgumentError
from ...lazy_dataclass import dataclass


@dataclass(frozen=True)
class LoopFunction:
    """One callable name. `result` is 'same' (the promoted argument type), 'float' or 'bool'.

    tile     the expression in the tile language over {0}, {1}, ...; None where kernels have none
    numbers  whether `tile` is for floats alone ("float") or for every type ("any")
    whole    the expressions for signed and unsigned integers where they are others
    """

    name: str
    arity: int
    meaning: Callable[..., np.ndarray]
    result: str = "same"
    cost: int = 1
    tile: str | None = None
    numbers: str = "float"
    whole: tuple[str, str] | None = None


FUNCTIONS: dict[str, LoopFunction] = {}


def function(name: str, arity: int, meaning: Callable, result: str = "same", cost: int = 1, *,
             tile: str | None = "", numbers: str = "float",
             whole: tuple[str, str] | None = None) -> None:
    """Register a name; `tile` is the tile op of the name unless it says otherwise. Raises
    ArgumentError for a second of that name."""
    if name in FUNCTIONS:
        raise ArgumentError(f"loop function {name!r} is declared twice")
    if tile == "":
        tile = f"tile.{name}({', '.join(f'{{{i}}}' for i in range(arity))})"
    FUNCTIONS[name] = LoopFunction(name, arity, meaning, result, cost, tile, numbers, whole)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e)).astype(np.asarray(x).dtype)


def _through_f64(scalar: Callable[[float], float]) -> Callable[[np.ndarray], np.ndarray]:
    """A math-module function of one float, applied to arrays in f64 and rounded once."""
    loop = np.vectorize(scalar, otypes=[np.float64])
    return lambda x: loop(np.asarray(x, np.float64)).astype(np.asarray(x).dtype)


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _rsqrt(x: np.ndarray) -> np.ndarray:
    return 1 / np.sqrt(x)


function("exp", 1, np.exp, "float", 12, tile="tile.exp({0} * 1.0)")
function("exp2", 1, np.exp2, "float", 12)
function("expm1", 1, np.expm1, "float", 14)
function("log", 1, np.log, "float", 14)
function("log2", 1, np.log2, "float", 14)
function("log10", 1, np.log10, "float", 14, tile="tile.log({0}) * 0.4342944819032518")
function("log1p", 1, np.log1p, "float", 18)
function("tanh", 1, np.tanh, "float", 18)
function("sigmoid", 1, _sigmoid, "float", 16)
function("softplus", 1, _softplus, "float", 30,
         tile="tile.maximum({0}, 0.0) + tile.log1p(tile.exp(-tile.abs({0})))")
function("erf", 1, _through_f64(math.erf), "float", 24)
function("erfc", 1, _through_f64(math.erfc), "float", 100)
function("sin", 1, np.sin, "float", 24)
function("cos", 1, np.cos, "float", 24)
function("tan", 1, np.tan, "float", 40)
function("asin", 1, np.arcsin, "float", 100,
         tile="tile.atan2({0}, tile.sqrt((1.0 - {0}) * (1.0 + {0})))")
function("acos", 1, np.arccos, "float", 100,
         tile="tile.atan2(tile.sqrt((1.0 - {0}) * (1.0 + {0})), {0})")
function("atan", 1, np.arctan, "float", 100)
function("atan2", 2, np.arctan2, "float", 100)
# Of arguments whose e**x is infinite in f32, half of it may not be: there as a product of two.
function("sinh", 1, np.sinh, "float", 100,
         tile="tile.where(tile.abs({0}) < 88.0, 0.5 * (tile.expm1({0}) - tile.expm1(-{0})), "
              "0.5 * tile.exp(0.5 * {0}) * tile.exp(0.5 * {0}) "
              "- 0.5 * tile.exp(-0.5 * {0}) * tile.exp(-0.5 * {0}))")
function("cosh", 1, np.cosh, "float", 100,
         tile="tile.where(tile.abs({0}) < 88.0, 0.5 * (tile.exp({0}) + tile.exp(-{0})), "
              "0.5 * tile.exp(0.5 * tile.abs({0})) * tile.exp(0.5 * tile.abs({0})))")
function("asinh", 1, np.arcsinh, "float", 100, tile=None)
function("acosh", 1, np.arccosh, "float", 100, tile=None)
function("atanh", 1, np.arctanh, "float", 100, tile=None)
function("pow", 2, np.power, "same", 40, tile="{0} ** {1}", numbers="any")
function("sqrt", 1, np.sqrt, "float", 6)
function("rsqrt", 1, _rsqrt, "float", 10)
function("abs", 1, np.abs, numbers="any")
function("sign", 1, np.sign, "same", 2,
         tile="tile.where({0} > 0.0, 1.0, tile.where({0} < 0.0, -1.0, {0} + 0.0))",
         whole=("tile.maximum(tile.minimum({0}, 1), -1)", "tile.minimum({0}, 1)"))
function("floor", 1, np.floor, "float")
function("ceil", 1, np.ceil, "float")
function("trunc", 1, np.trunc, "float")
function("rint", 1, np.rint, "float", tile="tile.round({0})")
function("maximum", 2, np.maximum, "same", 2, numbers="any")
function("minimum", 2, np.minimum, "same", 2, numbers="any")
function("copysign", 2, np.copysign, "float", tile=None)
function("floordiv", 2, np.floor_divide, "same", 12, tile="{0} // {1}", numbers="any")
function("mod", 2, np.mod, "same", 12, tile="{0} % {1}", numbers="any")
function("where", 3, np.where, numbers="any")
function("isnan", 1, np.isnan, "bool")
function("isinf", 1, np.isinf, "bool")
function("isfinite", 1, np.isfinite, "bool", tile="{0} - {0} == 0.0")  # some types have no inf
