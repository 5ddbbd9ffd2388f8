"""Numbers and text among the tensors of a checkpoint: how the manifest has them.

    {"type": "float", "value": 0.1}

Types are int, float, bool and str; nan, inf and -inf, for which JSON has no numbers, are text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from ..tensor import Tensor

Plain = bool | int | float | str
TYPES: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
KINDS: dict[type, tuple[str, ...]] = {bool: ("bool",), int: ("int", "uint"), float: ("float",)}
NOT_FINITE = ("nan", "inf", "-inf")
MOST_BITS = 1024  # of an integer


def is_plain(x: Any) -> bool:
    """Whether a checkpoint holds this beside tensors. Classes derived from these are not what they
    would come back as."""
    return type(x) in TYPES.values()


def encode_value(path: str, x: Plain) -> dict[str, Any]:
    """As the manifest has it. Raises CheckpointError for an integer of over 1024 bits."""
    if type(x) is int and x.bit_length() > MOST_BITS:
        raise CheckpointError(f"{path or 'the value'} is an integer of {x.bit_length()} bits: a "
                              f"checkpoint holds those of up to {MOST_BITS}",
                              hint="as text, str(x), or in meta")
    finite = type(x) is not float or math.isfinite(x)
    return {"type": type(x).__name__, "value": x if finite else str(x)}


def read(kind: str, value: Any) -> Plain | None:
    """What an entry stands for; None for one that `written` does not give."""
    if kind == "float" and type(value) is str and value in NOT_FINITE:
        return float(value)
    ok = kind in TYPES and type(value) is TYPES[kind]
    if ok and kind == "float":
        ok = math.isfinite(value)
    elif ok and kind == "int":
        ok = value.bit_length() <= MOST_BITS
    return value if ok else None


def text_of(x: Plain) -> str:
    """For messages: int 3, str 'gelu'."""
    shown = repr(x)
    return f"{type(x).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"


def misfit(path: str, values: Mapping[str, Plain], leaf: Any) -> str | None:
    """What is wrong with asking for `leaf` where a value was saved."""
    found = values[path]
    if type(leaf) is type(found):
        return None
    asked = f"{leaf.type}{list(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
    return f"{path} is {text_of(found)}, asked for {asked}"


def holds_number(shape: tuple[int, ...], kind: str, leaf: Any) -> bool:
    """Whether a tensor was saved where a number like `leaf` was before: compiled functions give
    numbers back as tensors without axes."""
    return shape == () and type(leaf) in KINDS and kind in KINDS[type(leaf)]
