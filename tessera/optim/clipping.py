"""The norm of all gradients, and a limit to it."""

from __future__ import annotations

import functools
import operator
from typing import Any

from ..errors import ArgumentError
from ..graph import functions as F
from ..graph import tree
from ..graph.jit import JitFunction
from ..graph.operand import compute_type, convert
from ..graph.ops.reduce import root_at_zero
from ..graph.trace import in_part
from ..mesh.parallel.stage_trees import StageTrees, need_whole, over_stages
from ..tensor import Tensor, as_tensor

TOGETHER = 8  # sums of squares that are added one after another


def global_norm(grads: Any) -> Tensor:
    """sqrt(sum of all squares) over the floating leaves of a tree, in f32, of f64 in f64. Its
    derivative where all are 0 is 0.

    Of what the step of a pipeline gives it is the norm of the whole model: every rank must ask for
    it. A parameter that stages share counts once.
    """
    if not isinstance(grads, StageTrees) and not _floats(tree.flatten(grads)[0]):
        raise ArgumentError("the norm of a tree without tensors")
    with in_part("optimizer"):
        of_stage = _compiled if isinstance(grads, StageTrees) else _sum_of_squares
        return root_at_zero(over_stages(grads, of_stage, operator.add, "sum"))


def _sum_of_squares(leaves: list[Any]) -> Tensor:
    sums = [F.sum(F.square(convert(g, compute_type(g.type)))) for g in _floats(leaves)]
    while len(sums) > 1:  # a tree: those of a level do not wait for each other
        sums = [functools.reduce(operator.add, sums[i:i + TOGETHER])
                for i in range(0, len(sums), TOGETHER)]
    return sums[0] if sums else F.zeros(())


_compiled = JitFunction(_sum_of_squares)  # the gradients of a pipeline are made outside of ts.jit


def clip_by_global_norm(grads: Any, limit: float, norm: Any = None) -> tuple[Any, Tensor]:
    """(grads, norm): all leaves times limit / norm when the norm before is above the limit.

    norm: that of a larger tree of which these are a part; default the norm of grads. Of what the
    step of a pipeline gives that is the norm of the whole model, which every rank must ask for.

    A norm that is NaN or infinite stays visible: it is returned, and the gradients become NaN.
    Pascanu et al. 2013, arXiv:1211.5063. Raises ArgumentError unless limit > 0, and for gradients
    of one stage of a pipeline without norm.
    """
    if not limit > 0:
        raise ArgumentError(f"clip_by_global_norm: the limit must be positive, got {limit}")
    if norm is None:
        need_whole(grads, "the norm by which clip_by_global_norm clips",
                   "clip what the step returned, the list of all stages' gradients; or give "
                   "norm=ts.optim.global_norm(grads) of that list")
        norm = global_norm(grads)
    norm = as_tensor(norm)
    with in_part("optimizer"):
        scale = limit / F.maximum(norm, limit) + 0.0 * norm  # NaN of a norm that is not finite
        return tree.map_tree(lambda g: g * scale if _is_float(g) else g, grads), norm


def _floats(leaves: list[Any]) -> list[Tensor]:
    return [g for g in map(as_tensor, leaves) if _is_float(g)]


def _is_float(x: Any) -> bool:
    return as_tensor(x).dtype.kind == "float"
