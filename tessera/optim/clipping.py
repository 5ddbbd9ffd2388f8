"""The norm of all gradients, and a limit to it."""

from __future__ import annotations

import functools
import operator
from typing import Any

from ..errors import ArgumentError
from ..graph import functions as F
from ..graph import tree
from ..graph.operand import compute_type, convert
from ..graph.ops.reduce import root_at_zero
from ..graph.trace import in_part
from ..tensor import Tensor, as_tensor

TOGETHER = 8  # sums of squares that are added one after another


def global_norm(grads: Any) -> Tensor:
    """sqrt(sum of all squares) over the floating leaves of a tree, in f32, of f64 in f64. Its
    derivative where all are 0 is 0."""
    leaves = [g for g in map(as_tensor, tree.flatten(grads)[0]) if _is_float(g)]
    if not leaves:
        raise ArgumentError("the norm of a tree without tensors")
    with in_part("optimizer"):
        sums = [F.sum(F.square(convert(g, compute_type(g.type)))) for g in leaves]
        while len(sums) > 1:  # a tree: those of a level do not wait for each other
            sums = [functools.reduce(operator.add, sums[i:i + TOGETHER])
                    for i in range(0, len(sums), TOGETHER)]
        return root_at_zero(sums[0])


def clip_by_global_norm(grads: Any, limit: float, norm: Any = None) -> tuple[Any, Tensor]:
    """(grads, norm): all leaves times limit / norm when the norm before is above the limit.

    norm: that of a larger tree of which these are a part, as a rank of a pipeline has those of its
    own stages; default the norm of grads.

    A norm that is NaN or infinite stays visible: it is returned, and the gradients become NaN.
    Pascanu et al. 2013, arXiv:1211.5063. Raises ArgumentError unless limit > 0.
    """
    if not limit > 0:
        raise ArgumentError(f"clip_by_global_norm: the limit must be positive, got {limit}")
    norm = global_norm(grads) if norm is None else as_tensor(norm)
    with in_part("optimizer"):
        scale = limit / F.maximum(norm, limit) + 0.0 * norm  # NaN of a norm that is not finite
        return tree.map_tree(lambda g: g * scale if _is_float(g) else g, grads), norm


def _is_float(x: Any) -> bool:
    return as_tensor(x).dtype.kind == "float"
