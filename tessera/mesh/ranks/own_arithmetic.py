"""Where NCCL's own reductions compute what the policy of a type says.

They add in the type of the elements, in an order that NCCL chooses, and round at each addition; of
a NaN and a number, max and min may take the number. So they are taken for sums in the accumulate
type, where only the order of the additions is another, and for whatever has no order and no
rounding: integers, and two terms, whose sum is rounded once whoever adds them. An f32 holds every
sum of two f16 or bf16 that their own rounding can tell from its neighbours.

Its kernels for windows add bf16 in f32 and round once (NCCL 2.27 and later, `ncclSymkAccumType`).
Each communicator is asked whether they do (ranks/window_sums.py).
"""

from __future__ import annotations

from tessera.numerics import NumericType

SUMMED = frozenset({"f64", "f32", "bf16", "f16", "int64", "int32"})


def summed(numeric: NumericType) -> bool:
    """Whether GPUs add elements of a type, and round sums to it, as its policy says."""
    policy = numeric.policy
    return numeric.dtype.name in SUMMED and policy.rounding == "nearest_even" and not (
        policy.saturate or policy.scaled or policy.per_channel is not None or policy.custom)


def adds_as_told(op: str, numeric: NumericType, to: NumericType, members: int,
                 in_windows: bool = False) -> bool:
    """Whether NCCL's reduction of elements of `numeric` over so many ranks, as elements of `to`, is
    what the policies say. in_windows: it is one of what lies there, and is known to add in f32"""
    if to.dtype is not numeric.dtype or not (summed(numeric) and summed(to)):
        return False
    if op in ("max", "min"):
        return numeric.dtype.kind != "float"
    return op == "sum" and (members <= 2 or numeric.accum is numeric.dtype or (
        in_windows and numeric.dtype.name == "bf16" and numeric.accum.name == "f32"))


__all__ = ["SUMMED", "adds_as_told", "summed"]
