"""Whether a kernel has an infinity written down: what it stores of that kind is then meant."""

from __future__ import annotations

import math
from typing import Any

from tessera.tile.ir.ir import Const, Function, Op, walk


def writes_infinity(function: Function) -> bool:
    """Whether an operand or an attribute of one of its ops is an infinite number."""
    return any(_infinite(x) for node in walk(function.body) if isinstance(node, Op)
               for x in (*(a.value for a in node.args if isinstance(a, Const)),
                         *node.attr.values()))


def _infinite(x: Any) -> bool:
    return isinstance(x, float) and math.isinf(x)


__all__ = ["writes_infinity"]
