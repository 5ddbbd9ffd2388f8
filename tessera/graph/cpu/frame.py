"""The instructions of the loops' frame: chunks, lines of rows, addresses, from the layout table.

Imports numba: only the compiler imports this module. Built as LLVM code, not as Numba functions: a
process that compiles one kernel should not have to compile a frame first.

Words of the table (`layout.py`): chunks, chunk_rows, rows, width, count, line_rows, rank,
keep_bytes; `rank` extents of the leading axes beyond the line, innermost first; then for each
stream its column stride (elements), row stride (bytes) and the `rank` leading strides (bytes).
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .emit import HEADER
from .instructions import I64, instruction
from .instructions import _element as element

HEADER_WORDS = len(HEADER)
word_type = types.int64


def read(b: ir.IRBuilder, layout: ir.Value, index: ir.Value | int) -> ir.Value:
    """Word `index` of the table."""
    return b.load(element(b, layout, I64(index) if isinstance(index, int) else index, 64))


def field(b: ir.IRBuilder, layout: ir.Value, name: str) -> ir.Value:
    return read(b, layout, HEADER.index(name))


def least(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.icmp_signed("<", x, y), x, y)


def entry(b: ir.IRBuilder, layout: ir.Value, stream: ir.Value) -> ir.Value:
    """Index of a stream's first word."""
    rank = field(b, layout, "rank")
    return b.add(b.add(rank, I64(HEADER_WORDS)), b.mul(stream, b.add(rank, I64(2))))


@instruction("chunk_count", word_type, word_type)
def chunk_count(b: ir.IRBuilder, layout: ir.Value) -> ir.Value:
    return field(b, layout, "chunks")


@instruction("row_width", word_type, word_type)
def row_width(b: ir.IRBuilder, layout: ir.Value) -> ir.Value:
    """Columns of every row but, in a flat space, the last."""
    return field(b, layout, "width")


@instruction("columns_of", word_type, word_type, word_type)
def columns_of(b: ir.IRBuilder, layout: ir.Value, row: ir.Value) -> ir.Value:
    """Columns of one row."""
    width = field(b, layout, "width")
    return least(b, width, b.sub(field(b, layout, "count"), b.mul(row, width)))


@instruction("first_row", word_type, word_type, word_type)
def first_row(b: ir.IRBuilder, layout: ir.Value, chunk: ir.Value) -> ir.Value:
    return b.mul(chunk, field(b, layout, "chunk_rows"))


@instruction("last_row", word_type, word_type, word_type)
def last_row(b: ir.IRBuilder, layout: ir.Value, chunk: ir.Value) -> ir.Value:
    """One past the last row of a chunk."""
    end = b.mul(b.add(chunk, I64(1)), field(b, layout, "chunk_rows"))
    return least(b, end, field(b, layout, "rows"))


@instruction("line_end", word_type, word_type, word_type, word_type)
def line_end(b: ir.IRBuilder, layout: ir.Value, row: ir.Value, last: ir.Value) -> ir.Value:
    """One past the last row that lies on the line of `row` and before `last`."""
    extent = field(b, layout, "line_rows")
    line = b.sdiv(row, extent)
    return least(b, b.mul(b.add(line, I64(1)), extent), last)


@instruction("row_offset", word_type, word_type, word_type, word_type)
def row_offset(b: ir.IRBuilder, layout: ir.Value, stream: ir.Value, row: ir.Value) -> ir.Value:
    """Bytes (or index steps) from a stream's start to its row `row`."""
    at = entry(b, layout, stream)
    extent = field(b, layout, "line_rows")
    line = b.sdiv(row, extent)
    offset = cgutils.alloca_once_value(b, b.mul(
        b.sub(row, b.mul(line, extent)), read(b, layout, b.add(at, I64(1)))
    ))
    rest = cgutils.alloca_once_value(b, line)
    with cgutils.for_range(b, field(b, layout, "rank")) as loop:
        extent = read(b, layout, b.add(loop.index, I64(HEADER_WORDS)))
        before = b.load(rest)
        after = b.sdiv(before, extent)
        index = b.sub(before, b.mul(after, extent))
        stride = read(b, layout, b.add(b.add(at, I64(2)), loop.index))
        b.store(b.add(b.load(offset), b.mul(index, stride)), offset)
        b.store(after, rest)
    return b.load(offset)


@instruction("row_stride", word_type, word_type, word_type)
def row_stride(b: ir.IRBuilder, layout: ir.Value, stream: ir.Value) -> ir.Value:
    """Bytes from a row to the next of its line."""
    return read(b, layout, b.add(entry(b, layout, stream), I64(1)))


@instruction("column_stride", word_type, word_type, word_type)
def column_stride(b: ir.IRBuilder, layout: ir.Value, stream: ir.Value) -> ir.Value:
    """Elements from a column to the next."""
    return read(b, layout, entry(b, layout, stream))


@instruction("keep", word_type, word_type, word_type, word_type)
def keep(b: ir.IRBuilder, layout: ir.Value, scratch: ir.Value, slot: ir.Value) -> ir.Value:
    """Address of row buffer `slot`."""
    return b.add(scratch, b.mul(slot, field(b, layout, "keep_bytes")))


@instruction("partial_sums", *[word_type] * 6)
def partial_sums(
    b: ir.IRBuilder, layout: ir.Value, call: ir.Value, chunk: ir.Value, position: ir.Value,
    count: ir.Value,
) -> ir.Value:
    """Address of array `position` of the `count` in which a chunk keeps its column sums."""
    row = b.add(b.mul(chunk, count), position)
    return b.add(read(b, call, 3), b.mul(b.mul(row, field(b, layout, "width")), I64(8)))
