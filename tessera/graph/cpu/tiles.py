"""Register tiles of convolutions: sums of products that stay in vector registers, as LLVM code.

    tile_V_O_P(x, offsets, w, y, K, pitch)
        y[o, p] = sum_k w[o, k] x[offsets[k] + p]
    dots_V_O_K(x, offsets, g, pitch, sums, row, steps)
        sums[o, k] += sum_p g[o, p] x[offsets[k] + p]

V: f32 lanes of a vector. Of a tile O rows by P vectors of positions are summed at once, of dots O
rows by K offsets. Addresses and offsets are bytes; a load may begin anywhere.
Imports numba: only the compiler imports this module.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .instructions import F32, F64, I32, I64, instruction

WORD = types.int64


def _at(b: ir.IRBuilder, base: ir.Value, byte: ir.Value | int, kind: ir.Type) -> ir.Value:
    step = I64(byte) if isinstance(byte, int) else byte
    return b.inttoptr(b.add(base, step), kind.as_pointer())


def _load(b: ir.IRBuilder, base: ir.Value, byte: ir.Value | int, kind: ir.Type) -> ir.Value:
    raw = b.load(_at(b, base, byte, kind))
    raw.align = 8 if kind in (I64, F64) else 4
    return raw


def _spread(b: ir.IRBuilder, x: ir.Value, lanes: int) -> ir.Value:
    vector = ir.VectorType(F32, lanes)
    first = b.insert_element(ir.Constant(vector, ir.Undefined), x, I32(0))
    return b.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def _zeros(b: ir.IRBuilder, count: int, lanes: int) -> list[ir.Value]:
    """Accumulators: registers, once LLVM has seen that nothing else reads them."""
    vector = ir.VectorType(F32, lanes)
    made = [cgutils.alloca_once(b, vector) for _ in range(count)]
    for place in made:
        b.store(ir.Constant(vector, [0.0] * lanes), place)
    return made


def _add_product(b: ir.IRBuilder, total: ir.Value, x: ir.Value, y: ir.Value) -> None:
    fma = _declared(b, f"llvm.fma.v{x.type.count}f32", x.type, x.type, x.type, x.type)
    b.store(b.call(fma, [x, y, b.load(total)]), total)


def _declared(b: ir.IRBuilder, name: str, result: ir.Type, *given: ir.Type) -> Any:
    return b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(result, given), name)


def _tile(name: str, lanes: int, rows: int, vectors: int) -> object:
    kind, width = ir.VectorType(F32, lanes), 4 * lanes

    @instruction(name, types.void, *[WORD] * 6)
    def tile(b: ir.IRBuilder, x: ir.Value, offsets: ir.Value, w: ir.Value, y: ir.Value,
             depth: ir.Value, pitch: ir.Value) -> None:
        totals = _zeros(b, rows * vectors, lanes)
        lines = [b.add(w, b.mul(depth, I64(4 * o))) for o in range(rows)]
        with cgutils.for_range(b, depth) as loop:
            here = b.add(x, _load(b, offsets, b.mul(loop.index, I64(8)), I64))
            at = b.mul(loop.index, I64(4))
            xs = [_load(b, here, v * width, kind) for v in range(vectors)]
            for o in range(rows):
                factor = _spread(b, _load(b, lines[o], at, F32), lanes)
                for v in range(vectors):
                    _add_product(b, totals[o * vectors + v], xs[v], factor)
        for o in range(rows):
            row = b.add(y, b.mul(pitch, I64(o)))
            for v in range(vectors):
                b.store(b.load(totals[o * vectors + v]), _at(b, row, v * width, kind)).align = 4

    return tile


def _dots(name: str, lanes: int, rows: int, columns: int) -> object:
    kind, width = ir.VectorType(F32, lanes), 4 * lanes

    @instruction(name, types.void, *[WORD] * 7)
    def dots(b: ir.IRBuilder, x: ir.Value, offsets: ir.Value, g: ir.Value, pitch: ir.Value,
             sums: ir.Value, row: ir.Value, steps: ir.Value) -> None:
        totals = _zeros(b, rows * columns, lanes)
        lines = [b.add(x, _load(b, offsets, 8 * k, I64)) for k in range(columns)]
        given = [b.add(g, b.mul(pitch, I64(o))) for o in range(rows)]
        with cgutils.for_range(b, steps) as loop:
            at = b.mul(loop.index, I64(width))
            gs = [_load(b, line, at, kind) for line in given]
            for k, line in enumerate(lines):
                factor = _load(b, line, at, kind)
                for o in range(rows):
                    _add_product(b, totals[o * columns + k], gs[o], factor)
        for o in range(rows):
            for k in range(columns):
                place = _at(b, b.add(sums, b.mul(row, I64(o))), 8 * k, F64)
                lane = _sum_of_lanes(b, b.load(totals[o * columns + k]), lanes)
                b.store(b.fadd(b.load(place), b.fpext(lane, F64)), place)

    return dots


def _sum_of_lanes(b: ir.IRBuilder, x: ir.Value, lanes: int) -> ir.Value:
    total = _declared(b, f"llvm.vector.reduce.fadd.v{lanes}f32", F32, F32, x.type)
    return b.call(total, [F32(-0.0), x], fastmath=("reassoc",))


@cache
def tile_instruction(name: str) -> object | None:
    """The instruction of a name like `tile_16_8_3` or `dots_16_4_6`."""
    match = re.fullmatch(r"(tile|dots)_(\d+)_(\d+)_(\d+)", name)
    if match is None:
        return None
    return (_tile if match[1] == "tile" else _dots)(name, *map(int, match.groups()[1:]))
