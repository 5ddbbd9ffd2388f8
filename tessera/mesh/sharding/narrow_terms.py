"""Terms of a sum over ranks in the type that the program gives the matmul they come from.

    cast(all_reduce(x @ w), bf16)   ->   all_reduce(cast(x @ w, bf16))

A matmul in bf16 is summed in f32 and rounded to bf16. Split over what it sums, it is that on each
rank: the rank's term is rounded, the terms are added in the accumulate type, in one pass, and the
total is rounded once more. So ranks send two bytes an element and not four. A term loses up to 2^-9
of itself: the sum of terms of one size errs as one rounding does; where they cancel, by 2^-9 of
what cancels. Formats with a smaller range than the accumulate type, such as f16, in which a term of
a small sum has fewer digits than the sum, are rounded behind it; so is what is no matmul, such as a
sum of rows. Who wants terms in f32 multiplies with a result in f32, and rounds that.

A narrow term passes through no further arithmetic, in which it would be rounded again.

NCCL adds bf16 in f32 in windows alone (ranks/own_arithmetic.py). Elsewhere GPUs widen the rounded
terms and send f32, as before; the arithmetic is the same. The total is rounded where it is first
read: a rounding behind the message would wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tessera.graph import functions as F
from tessera.graph.ir import Node, Value
from tessera.numerics import DType, NumericType, as_type
from tessera.tensor import Tensor

from ..ranks.own_arithmetic import adds_as_told, summed


def is_narrow(numeric: NumericType) -> bool:
    """Whether sums of such elements are made in a wider float, and rounded."""
    return numeric.dtype.kind == "float" and numeric.accum is not numeric.dtype


def rounds_terms(node: Node) -> bool:
    """Whether it rounds sums to a type in which their terms may be sent."""
    if node.op.name != "cast":
        return False
    source, to = node.attrs["source"], node.attrs["to"]
    return to.accum is source.dtype and is_narrow(to) and summed(to) and (
        to.dtype.exp == source.dtype.exp)


def sent_dtype(value: Value, node: Node, readers: Mapping[Value, Sequence[Node]]) -> DType:
    """That of the terms of a result of `node`, if they wait for their sum."""
    found = value
    while node.op.matmul and len(own := readers.get(found, ())) == 1:
        if rounds_terms(own[0]):
            return own[0].outputs[0].aval.dtype
        if not own[0].op.view:
            break
        found = own[0].outputs[0]
    return value.aval.dtype


def term_dtype(value: Value, ranks: int) -> DType:
    """That in which terms of a sum are sent where GPUs have no windows."""
    return wide_terms(value.aval.type, "sum", ranks).dtype


def wide_terms(numeric: NumericType, op: str, ranks: int) -> NumericType:
    """That of the terms of a reduction which NCCL adds outside of windows as the policy says; the
    type itself where it has none that is wider."""
    wide = as_type(numeric.accum)
    own = not is_narrow(numeric) or adds_as_told(op, numeric, numeric, ranks)
    return numeric if own or not adds_as_told(op, wide, wide, ranks) else wide


def as_sent(x: Tensor, numeric: NumericType) -> Tensor:
    return x if x.type == numeric else F.cast(x, numeric)


__all__ = ["as_sent", "is_narrow", "rounds_terms", "sent_dtype", "term_dtype", "wide_terms"]
