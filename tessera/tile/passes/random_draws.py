"""What a launch draws: random_bits and dropout without a seed, and stores that round at random.

    launch key                  of the run's seed, the kernel and the number of the launch
    random_bits, random_uniform words of the launch key's stream, by index
    stores                      words of fold_in(launch key, ROUNDING), by the tensor's element
    dropout                     words of fold_in(launch key or seed, DROPOUT), by the element

A launch in a captured CUDA graph folds the number of the replay into its key.
"""

from __future__ import annotations

from tessera.tile.ir.ir import Function, Op, SSAValue, definitions, walk
from tessera.tile.ir.op_record import OPS
from tessera.tile.ir.types import GlobalTensor, View

ROUNDING, DROPOUT = 0x52, 0xD5


def draws(function: Function) -> bool:
    """Whether a launch of the function takes a key."""
    types = definitions(function)
    for op in walk(function.body):
        if not isinstance(op, Op):
            continue
        record = OPS[op.name]
        if record.draws is not None and record.draws(op):
            return True
        place = op.args[0] if record.effect in ("write", "atomic") and op.args else None
        kind = types.get(place) if isinstance(place, SSAValue) else None
        if isinstance(kind, GlobalTensor | View) and kind.numeric.policy.rounding == "stochastic":
            return True
    return False


__all__ = ["DROPOUT", "ROUNDING", "draws"]
