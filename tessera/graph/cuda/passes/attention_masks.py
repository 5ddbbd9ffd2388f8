"""Masks in memory as attention's fastest kernels read them: floats that are added to scores.

One that is the same for all queries is a line of f32 for the keys; TMA brings it with their blocks.
Another is a matrix of 16 or 32 bits, of which TMA brings tiles: bools become bf16, and numbers that
were widened are read as they were. The kernel of the cotangents of keys has keys down the rows, and
reads a transposed copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from ....kernels.attention_backward import attention_mask, by_warpgroups
from ....kernels.attention_scores import MaskRule, MaskShare, ScoreRule
from ....numerics import as_type
from ....runtime.generations import Generation
from ....tensor import Tensor
from ... import functions as F
from ...ir import Node, Value
from ...op import Aval
from ...operand import convert, literal
from ...ops.broadcasting import unbroadcast
from ...schedule.library_call import library_call
from ..choose_schedule import blocks

F32, BF16, F16 = (as_type(name) for name in ("f32", "bf16", "f16"))
WIDEST = 128  # of a head
FEWEST = 64  # queries that take a block of a warpgroup
GROUPS = 200  # of threads, from which on sums of a mask's cotangent need no more parts


def mask_rule(shape: tuple[int, ...], heads: int, floats: bool = True, sequences: int = 1
              ) -> MaskRule:
    """Where the mask of a head lies when one axis of all masks stands for those of sequences and
    heads. shape: [..., S or 1, T or 1], as many axes as the queries have.  heads: of a sequence"""
    lead, (rows, columns) = shape[:-2], shape[-2:]
    per_batch = lead[-1] if len(lead) > 1 and lead[0] > 1 else 0
    shared = rows > 1 and sequences > 1 and not per_batch and lead[-1] > 1
    return MaskRule(floats, heads, per_batch, int(lead[-1] > 1), rows > 1, columns > 1,
                    sequences if shared else 0)


def takes_mask(mask: Any, q: Any, v: Any, chip: Generation) -> bool:
    """Whether the fastest kernels read this mask; all are types of operands."""
    (S, D), (T, E) = q.shape[-2:], v.shape[-2:]
    return mask.shape[-1] == T != 1 and takes_draws(q, v, chip) and (
        mask.shape[-2] == 1 or takes_matrix(S, T, max(D, E)))


def takes_draws(q: Any, v: Any, chip: Generation) -> bool:
    """Whether they have room for something beside each score, such as whether it is dropped."""
    D, E = q.shape[-1], v.shape[-1]
    return max(D, E) <= WIDEST and q.shape[-2] >= FEWEST and all(
        by_warpgroups(q.dtype, n, chip) for n in (D, E))


def mask_kind(mask: MaskRule | None, draws: ScoreRule | None, queries: int) -> str:
    """What blocks are chosen by. queries: in all"""
    if draws is not None and draws.dropout is not None:
        return "draws" if draws.dropout.block < queries else "one draw"
    return "" if mask is None else "tile" if mask.rows else "line"


def takes_matrix(S: int, T: int, width: int) -> bool:
    """Whether they read a matrix of so many queries and keys, of heads this wide: its rows are
    multiples of 16 bytes, and those of its transpose."""
    return width <= WIDEST and S >= FEWEST and S % 8 == T % 8 == 0


def mask_value(mask: Value, made: Mapping[Value, Node]) -> tuple[Value, list[Node]]:
    """The mask as the kernels read it, and the nodes that make it so."""
    aval = mask.aval
    line = aval.shape[-2] == 1
    narrow = None if line else BF16 if aval.dtype.kind != "float" else _narrow(mask, made)
    numeric = narrow or F32
    if aval.dtype is numeric.dtype:
        return mask, []
    to = Value(Aval(aval.shape, numeric))
    return to, [Node(ADDED_MASK, (mask,), {"to": numeric}, (to,))]


def _narrow(mask: Value, made: Mapping[Value, Node]) -> Any:
    """The type of 16 bits that all numbers of a mask of f32 are of; None where it is not known."""
    node = made.get(mask)
    while node is not None and node.op.name in ("reshape", "broadcast_to", "transpose"):
        node = made.get(node.inputs[0])
    if node is None or node.op.name != "cast":
        return None
    source = node.inputs[0].aval.type
    return source if source in (BF16, F16) else None


def _added(mask: Tensor, *, to: Any) -> Tensor:
    if mask.dtype.kind == "float":
        return convert(mask, to)
    zero = F.zeros((), F32)
    return convert(F.where(mask, zero, literal(-math.inf, zero)), to)


ADDED_MASK = library_call("added_mask", expand=_added)


# --- operands of the gradient's kernels -------------------------------------------------------
def mask_operands(mask: Tensor | None, heads: int, sequences: int
                  ) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the kernels of the cotangents of queries and of keys are given."""
    if mask is None:
        return {}, {}
    rule = mask_rule(tuple(mask.shape), heads, True, sequences)
    if not rule.rows:
        line = {"L": F.reshape(mask, (-1, mask.shape[-1])), "mask": rule}
        return line, line
    M = F.reshape(mask, (-1, *mask.shape[-2:]))
    return {"M": M, "mask": rule}, {"M": F.swapaxes(M, -1, -2), "mask": rule}


def mask_cotangent(common: tuple[Tensor, ...], mask: Tensor, q: Tensor, scale: float,
                   rule: dict[str, Any], numeric: Any) -> Tensor:
    """That of scores, summed over the heads that have one number of the mask. common: the first
    operands of all kernels of the gradient"""
    S, T = q.shape[-2], mask.shape[-1]
    M = F.broadcast_to(mask, (*mask.shape[:-2], S, T))
    where = mask_rule(tuple(M.shape), q.shape[-3])

    def made(dM: Tensor, share: MaskShare) -> None:
        attention_mask(*common, F.reshape(M, (-1, S, T)), dM, scale, mask=where, share=share,
                       **rule)

    groups = blocks(S, 128) * blocks(T, 64)
    return summed_cotangent(made, mask, (q.shape, T), where, groups, numeric)


def summed_cotangent(made: Callable[[Tensor, MaskShare], None], mask: Tensor,
                     extents: tuple[tuple[int, ...], int], where: MaskRule, groups: int,
                     numeric: Any) -> Tensor:
    """What kernels make of the scores that share a mask: their sums in parts, of as few as keep a
    GPU busy, and the sum of these. extents: of the queries, and the keys, of which a mask may have
    one number for all. groups: of threads that one mask takes. A bias of 8 heads of
    512 x 512 for 32 sequences was 268 MB that were written and read again."""
    (*heads, S, _), T = extents
    lead = tuple(mask.shape[:-2])
    masks, count = prod(lead), prod(heads) // prod(lead)
    parts = next(n for n in range(1, count + 1) if count % n == 0 and (
        masks * groups * n >= GROUPS or n == count))
    whole = parts == 1 and tuple(mask.shape[-2:]) == (S, T)
    dM = F.zeros((masks * parts, S, T), numeric if whole else F32)
    made(dM, MaskShare(count, parts, 1 if where.per_head else min(where.heads, count)))
    if parts > 1:
        dM = F.sum(F.reshape(dM, (masks, parts, S * T)), axis=1)
    out = F.reshape(dM, (*lead, S, T))
    return out if whole else convert(unbroadcast(out, tuple(mask.shape)), numeric)


__all__ = ["ADDED_MASK", "mask_cotangent", "mask_kind", "mask_operands", "mask_rule", "mask_value",
           "summed_cotangent", "takes_draws", "takes_mask", "takes_matrix"]
