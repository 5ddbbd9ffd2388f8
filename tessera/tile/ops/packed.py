"""What targets make of matmuls with packed weights: bytes as they lie, and sums in parts."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.numerics import DType, as_type, decode, f32, pack, row_bytes
from tessera.numerics import unpack as unpack_codes
from tessera.tile.interpreter.memory import Memory, MemoryBox
from tessera.tile.ir.errors import RuleError
from tessera.tile.ir.op_record import declare
from tessera.tile.ir.types import GlobalTensor, TileType
from tessera.tile.ops.matmul import operand_array


def codes_in(byte_count: int, dtype: DType) -> int:
    """The codes of `dtype` in so many bytes of a row."""
    return byte_count * 8 // dtype.bits


def _bytes_rule(types: Any, attrs: dict[str, Any]) -> GlobalTensor:
    (t,) = types
    if not isinstance(t, GlobalTensor) or not t.dtype.packed:
        raise RuleError(f"packed_bytes of {t}")
    return GlobalTensor(as_type("uint8"), (*t.dims[:-1], row_bytes(attrs["columns"], t.dtype)))


@declare(rule=_bytes_rule, attrs=("columns",), run=True, public=False, alias=True)
def packed_bytes(m: Any, op: Any, x: Any, columns: int = 0) -> Any:
    """The bytes of a packed tensor that nothing writes. columns: the extent of its rows."""
    memory, (made,) = x.memory, op.outs
    raw = pack(memory.flat.reshape(-1, memory.shape[-1]), memory.numeric.dtype)
    shape = (*memory.shape[:-1], raw.shape[-1])
    return MemoryBox.whole(Memory(made.value.name, shape, made.type.numeric, raw.reshape(-1)))


def _matmul_codes_rule(types: Any, attrs: dict[str, Any]) -> TileType:
    a, b, sums = types
    depth, parts = codes_in(a.shape[1], attrs["codes"]), sums.shape[0]
    if b.shape[0] != depth or sums.shape[1:] != (a.shape[0], b.shape[1]) or depth % parts:
        raise RuleError(f"matmul_codes of {a} and {b} into {sums}")
    return TileType(f32, sums.shape)


@declare(rule=_matmul_codes_rule, attrs=("codes", "factor"), run=True, effect="read", group=True,
         public=False, layouts="any", multiplies=True)
def matmul_codes(m: Any, op: Any, a: Any, b: Any, sums: Any, codes: Any = None,
                 factor: float = 1.0) -> Any:
    """sums[i] + factor A_i B_i for each part of k, of which A_i are columns and B_i rows.

    a: bytes of the codes of A, a tile or in shared memory   sums: [parts, M, N]
    """
    raw, y = (operand_array(m, op, v) for v in (a, b))
    codes, parts = op.attr["codes"], op.outs[0].type.shape[0]
    x = decode(unpack_codes(raw, codes, codes_in(raw.shape[-1], codes)), codes)
    x = np.stack(np.split(np.asarray(x, np.float32), parts, axis=2), 1)  # [groups, parts, M, k]
    y = np.stack(np.split(np.asarray(y, np.float32), parts, axis=1), 1)
    return sums + np.matmul(x, y) * np.float32(op.attr["factor"])


def _stacked_rule(types: Any, attrs: dict[str, Any]) -> TileType:
    a, b, sums = types
    depth, parts = codes_in(a.shape[1], attrs["codes"]), sums.shape[0] // a.shape[0]
    if b.shape[0] != depth or sums.shape != (parts * a.shape[0], b.shape[1]) or depth % parts:
        raise RuleError(f"matmul_codes_stacked of {a} and {b} into {sums}")
    return TileType(f32, sums.shape)


@declare(rule=_stacked_rule, attrs=("codes", "factor", "laid"), run=True, effect="read", group=True,
         public=False, layouts="any", multiplies=True)
def matmul_codes_stacked(m: Any, op: Any, a: Any, b: Any, sums: Any, codes: Any = None,
                         factor: float = 1.0, laid: bool = False) -> Any:
    """The same with the sums of all parts one below the other: [parts * M, N].  laid: whether codes
    lie in the order of packed_order.py, of which the values know nothing."""
    raw, y = (operand_array(m, op, v) for v in (a, b))
    codes, parts = op.attr["codes"], op.outs[0].type.shape[0] // raw.shape[1]
    x = stacked(raw, codes, parts) * np.float32(op.attr["factor"])
    return sums + product_of_parts(x, np.asarray(y, np.float32), parts)


def stacked(raw: Any, codes: DType, parts: int) -> Any:
    """[groups, M, bytes] -> [groups, parts * M, k]: numbers whose columns are cut into parts."""
    x = decode(unpack_codes(raw, codes, codes_in(raw.shape[-1], codes)), codes)
    return np.concatenate(np.split(np.asarray(x, np.float32), parts, axis=2), axis=1)


def product_of_parts(x: Any, y: Any, parts: int) -> Any:
    """x: [groups, parts * M, k], y: [groups, parts * k, N] -> [groups, parts * M, N]"""
    return np.concatenate([np.matmul(a, b) for a, b in zip(
        np.split(x, parts, axis=1), np.split(y, parts, axis=1), strict=True)], axis=1)


@declare(rule=lambda types, attrs: TileType(types[0].dtype, types[0].shape[1:]), public=False,
         group=True, layouts="any")
def sum_parts(x: Any) -> Any:
    """The sum of matrices, of which each warp has one."""
    return x.sum(1)


__all__ = ["codes_in", "product_of_parts", "stacked"]
