"""Types of Tile IR values, and their text.

    int32   lane f32                 a scalar: uniform over the group, or one per lane
    tensor<M x K x bf16 @accum(f32)> a tensor in global memory; extents are names, products or ints
    shared<2 of 64x32 x bf16 @xor @align(16)>   a buffer of the group, here with two stages
    register<4 x f32>                a small array private to each lane
    view<64x32 x bf16 @global>       a box of a tensor or buffer: no data, a place
    tile<64x64 x f32>                a value spread over the lanes of the group
"""

from __future__ import annotations

import re
from math import prod

from tessera.dims import Dim
from tessera.lazy_dataclass import dataclass
from tessera.numerics import DType, NumericType, as_type, find_dtype, parse
from tessera.tile.ir.errors import TileIRError

REGISTER_ALIGNMENT = 4  # bytes, of an array in registers: its text does not say it


@dataclass(frozen=True)
class Scalar:
    """A number: the same in all lanes of the group (uniform), or one per lane."""

    dtype: DType
    uniform: bool = True

    def __str__(self) -> str:
        return str(self.dtype) if self.uniform else f"lane {self.dtype}"


@dataclass(frozen=True)
class GlobalTensor:
    """A tensor in global memory. numeric: storage and policy."""

    numeric: NumericType
    dims: tuple[int | Dim, ...]
    space = "global"

    @property
    def dtype(self) -> DType:
        return self.numeric.dtype

    def __str__(self) -> str:
        return "tensor<" + " x ".join([*map(str, self.dims), str(self.numeric)]) + ">"


PEER = "shared_of_group"  # of another group of the cluster


@dataclass(frozen=True)
class Buffer:
    """Memory of the group (shared) or of each lane (register), with static extents.

    stages: copies behind one another, chosen by `stage(buffer, i)`; 1 for a plain buffer.
    swizzle: None | 'xor' (layout.py)   alignment: bytes
    """

    dtype: DType
    shape: tuple[int, ...]
    space: str = "shared"
    stages: int = 1
    swizzle: str | None = None
    alignment: int = 16

    @property
    def numeric(self) -> NumericType:
        return as_type(self.dtype)

    @property
    def bytes(self) -> int:
        return self.stages * -(-prod(self.shape) * self.dtype.bits // 8)

    def __str__(self) -> str:
        head = f"{self.stages} of " if self.stages > 1 else ""
        tail = f" @{self.swizzle}" if self.swizzle else ""
        told = self.space == "shared" or self.alignment != REGISTER_ALIGNMENT
        tail += f" @align({self.alignment})" if told else ""
        return f"{self.space}<{head}{_extents(self.shape)} x {self.dtype}{tail}>"


@dataclass(frozen=True)
class View:
    """A box with static extents inside a tensor or buffer."""

    numeric: NumericType
    shape: tuple[int, ...]
    space: str = "global"

    @property
    def dtype(self) -> DType:
        return self.numeric.dtype

    def __str__(self) -> str:
        return f"view<{_extents(self.shape)} x {self.numeric} in {self.space}>"


@dataclass(frozen=True)
class TileType:
    """A value of static shape held by the whole group. layout: None until a pass chose one."""

    dtype: DType
    shape: tuple[int, ...]
    layout: str | None = None

    def __str__(self) -> str:
        tail = f" in {self.layout}" if self.layout else ""
        return f"tile<{_extents(self.shape)} x {self.dtype}{tail}>"


@dataclass(frozen=True)
class Vector:
    """`width` neighbouring elements of a row in each lane, moved by one access."""

    dtype: DType
    width: int

    def __str__(self) -> str:
        return f"vector<{self.width} x {self.dtype}>"


Type = Scalar | GlobalTensor | Buffer | View | TileType | Vector


def _extents(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def is_lane(type: Type) -> bool:
    """Whether the lanes of a group may hold different values."""
    return isinstance(type, Scalar) and not type.uniform


def space_of(type: Type) -> str:
    """Where a value of this type lives: 'global' | 'shared' | 'register'."""
    return "register" if isinstance(type, Scalar | TileType | Vector) else type.space


_BOX = re.compile(r"(view|tile|shared|register)<(?:(\d+) of )?([\dx]+) x (.+)>$")


def parse_type(text: str) -> Type:
    """The type a text stands for; raises TileIRError."""
    text = text.strip()
    if text.startswith("tensor<") and text.endswith(">"):
        *dims, numeric = text[7:-1].split(" x ")
        return GlobalTensor(parse(numeric), tuple(Dim.of(_number(d)) for d in dims))
    if text.startswith("vector<"):
        width, _, dtype = text[7:-1].partition(" x ")
        return Vector(find_dtype(dtype), int(width))
    if box := _BOX.match(text):
        return _parse_box(*box.groups())
    words = text.split()
    if len(words) == 2 and words[0] == "lane":
        return Scalar(find_dtype(words[1]), uniform=False)
    if len(words) == 1:
        return Scalar(find_dtype(words[0]))
    raise TileIRError(f"{text!r} is not a type of Tile IR")


def _number(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text


def _parse_box(kind: str, stages: str | None, extents: str, rest: str) -> Type:
    shape = tuple(int(n) for n in extents.split("x"))
    if kind in ("view", "tile"):
        head, _, tail = rest.partition(" in ")
        if kind == "view":
            return View(parse(head), shape, tail)
        return TileType(find_dtype(head), shape, tail or None)
    dtype, *marks = rest.split(" @")
    align = [int(m[6:-1]) for m in marks if m.startswith("align(")]
    swizzle = [m for m in marks if not m.startswith("align(")]
    return Buffer(find_dtype(dtype), shape, kind, int(stages or 1),
                  swizzle[0] if swizzle else None,
                  align[0] if align else 16 if kind == "shared" else REGISTER_ALIGNMENT)
