"""Type rules that several ops share, and the promotion of numeric types in kernels.

Arithmetic on floats of at most 32 bits is done in f32, with an f64 operand in f64; on integers of
fewer than 32 bits in int32; two integers give the wider, and int64 where signs differ. Beside
unsigned numbers of 32 or 64 bits those of fewer, and bools, are unsigned: uint32 ^ uint8 is uint32.
Else a bool counts as int32. Bits of uint64 and of signed integers have no type that holds both. A
literal takes the type of the other operand: a float literal beside an integer is f32. A shift has
the type of what is shifted, whatever the type of the number of bits. """

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from tessera.numerics import DType, bool_, f32, f64, i32, i64
from tessera.tile.ir.errors import RuleError
from tessera.tile.ir.types import Scalar, TileType, Type


def compute_dtype(dtype: DType) -> DType:
    """What arithmetic on one value of `dtype` is done in."""
    if dtype.kind == "float":
        return dtype.compute
    return i32 if dtype.kind == "bool" or dtype.bits < 32 else dtype


def promote(dtypes: Sequence[DType]) -> DType:
    """The type that arithmetic on these operands is done in."""
    kinds = [compute_dtype(d) for d in dtypes]
    if any(d.kind == "float" for d in kinds):
        return f64 if f64 in kinds else f32
    if all(d.kind in ("uint", "bool") for d in dtypes):
        kinds = [d for d in kinds if d.kind == "uint"] or kinds
    if len({d.kind for d in kinds}) == 1:
        return max(kinds, key=lambda d: d.bits)
    return i64  # an int and a uint


def require_numbers(types: Sequence[Type], what: str) -> None:
    for t in types:
        if not isinstance(t, Scalar | TileType):
            raise RuleError(f"{what} needs values, got {t}",
                            "a view or buffer is a place: load it first, ts.tile.load(...)")


def broadcast_type(types: Sequence[Type], dtype: DType, what: str) -> Type:
    """Scalars, or tiles of one rank whose extents are equal or 1."""
    require_numbers(types, what)
    tiles = [t for t in types if isinstance(t, TileType)]
    if not tiles:
        return Scalar(dtype, all(t.uniform for t in types))  # type: ignore[union-attr]
    if any(isinstance(t, Scalar) and not t.uniform for t in types):
        raise RuleError(f"{what} of a tile and a number that differs between lanes",
                        "a tile belongs to the whole group: use a uniform number, or elements")
    rank = len(tiles[0].shape)
    shape = [1] * rank
    for t in tiles:
        if len(t.shape) != rank:
            raise RuleError(f"{what} of {' and '.join(map(str, tiles))}: ranks differ",
                            "give the one with fewer axes the others: t[:, None], t[None, :]")
        for i, n in enumerate(t.shape):
            if n != 1 and shape[i] not in (1, n):
                raise RuleError(f"{what} of {' and '.join(map(str, tiles))}: axis {i} does not "
                                f"fit, {shape[i]} and {n}", misfit(*(t.shape for t in tiles)))
            shape[i] = max(shape[i], n) if n != 1 else shape[i]
    return TileType(dtype, tuple(shape))


def dtype_of(t: Type) -> DType:
    return t.dtype


def elementwise(types: Sequence[Type], attrs: dict[str, Any]) -> Type:
    """All operands of one dtype; the result has it too."""
    require_numbers(types, "arithmetic")
    dtypes = {dtype_of(t) for t in types}
    if len(dtypes) != 1:
        raise RuleError(f"operands of different types: {', '.join(map(str, types))}")
    return broadcast_type(types, dtype_of(types[0]), "an operation")


def comparison(types: Sequence[Type], attrs: dict[str, Any]) -> Type:
    elementwise(types, attrs)
    return broadcast_type(types, bool_, "a comparison")


def logical(types: Sequence[Type], attrs: dict[str, Any]) -> Type:
    require_numbers(types, "and, or, not")
    for t in types:
        if dtype_of(t) is not bool_:
            raise RuleError(f"and, or, not work on bools, got {t}", "compare it: x != 0")
    return broadcast_type(types, bool_, "a logical operation")


def integers(types: Sequence[Type], attrs: dict[str, Any]) -> Type:
    out = elementwise(types, attrs)
    if dtype_of(out).kind == "float":
        raise RuleError(f"{', '.join(map(str, types))}: bits of a float; integers only",
                        "cast it: int(x), or ts.tile.cast(x, ts.i32); comparisons stand in "
                        "brackets: (x > 0) & (x < 1)")
    return out


def shifted(types: Sequence[Type], attrs: dict[str, Any]) -> Type:
    """integers; a rule of its own, since the operands' types are not promoted together."""
    return integers(types, attrs)


def floats(types: Sequence[Type], attrs: dict[str, Any]) -> Type:
    out = elementwise(types, attrs)
    if dtype_of(out).kind != "float":
        raise RuleError(f"needs a float, got {out}")
    return out


def misfit(*shapes: tuple[int, ...]) -> str:
    """What to do about tiles whose extents differ."""
    columns = [s for s in shapes if len(s) == 2 and s[1] == 1]
    if len(shapes) == 2 and len(columns) == 1 and any(s[-1] == columns[0][0] for s in shapes):
        return "a tile of rank 1 is a column: write w[None, :] for a row"
    if len(shapes) == 2 and shapes[0] == shapes[1][::-1]:
        return "is a .T missing?"
    if len(shapes) == 2 and prod(shapes[0]) == prod(shapes[1]):
        return f"reshape one: ts.tile.reshape(t, {shapes[0]})"
    return "extents along an axis are equal or 1: load parts of one shape"


def require_tile(t: Type, rank: int | None, what: str) -> TileType:
    if not isinstance(t, TileType):
        hint = "load it first: ts.tile.load(x)" if not isinstance(t, Scalar) else None
        raise RuleError(f"{what} needs a tile, got {t}", hint)
    if rank is not None and len(t.shape) != rank:
        raise RuleError(f"{what} needs a tile of rank {rank}, got {t}")
    return t
