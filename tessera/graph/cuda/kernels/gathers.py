"""Kernels of take and segment_sum: slices picked by integers, and sums of slices by integers.

A tensor is seen as [A, V, C] around the axis of V that integers point along, [V, C] where A is 1,
and the integers as [T]. As on the CPU negative ones count from the end; one outside fails an
assertion of the kernel.
"""

from __future__ import annotations

from math import inf, prod
from typing import Any

from ....numerics import DType, as_type
from ...op import GraphOp
from ...schedule.ir import ScheduledGroup
from .group_statements import CHAIN
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital
from .spell import COMBINE, literal, stored_as


def around(shape: tuple[int, ...], axis: int, count: int = 1) -> tuple[int, int, int]:
    """[A, V, C]: the extents before, of and behind `count` axes, each multiplied."""
    return prod(shape[:axis]), prod(shape[axis:axis + count]), prod(shape[axis + count:])


def adds_slices(op: GraphOp) -> bool:
    """Whether slices are added where integers say, as in ts.segment_sum."""
    return op.indexed is not None and not op.indexed.reads and not op.indexed.along


def gather_source(group: ScheduledGroup) -> KernelText:
    """y[a, i, c] = x[a, ids[i], c]: blocks of slices, or of elements where a slice is one."""
    w, s = KernelWriter(group), group.schedule
    (step,), (x, ids), (y,) = group.steps, group.reads, group.writes
    (A, V, C), (T,), BM, BN = x.shape, ids.shape, s.m or 1, s.n
    X, Y, slices = capital(x.name), capital(y.name), C > 1
    lead = _lead(w, A) if slices else ""
    w.line(f"m = tile.group_id({int(bool(lead))}) * {BM}")
    w.line(f"n = tile.group_id({1 + bool(lead)}) * {BN}")
    along = f"m:m+{BM}" if slices else f"n:n+{BN}"
    w.line(f"at = tile.load({capital(ids.name)}[{along}])", step)
    w.check_index("at", V, step)
    w.line(f"at = tile.where(at < 0, at + {V}, at)", step)
    if slices:
        w.line(f"{Y}[{lead}m:m+{BM}, n:n+{BN}] = tile.gather({X}[{lead}:, n:n+{BN}], at)", step)
        return w.finish_operands(_squeezed([(A, V, C), (T,), (A, T, C)], not lead))
    w.line(f"{Y}[m:m+{BM}, n:n+{BN}] = tile.gather({X}[m:m+{BM}, :], at, axis=1)", step)
    return w.finish_operands([(A, V), (T,), (A, T)])


def segments_source(group: ScheduledGroup) -> KernelText:
    """y[a, s, c] = sum of u[a, i, c] over the i with ids[i] = s, in the order of i, each sum
    rounded to the type of y: the bits that the CPU gives, and the same at each run. Or the largest
    or smallest of them.

    A group looks through all ids, a block at a time: it writes where those of its segment stand
    into shared memory, then adds their slices. Behind the last stands T: what is read there is what
    the total began with, and changes nothing.
    """
    w, s = KernelWriter(group), group.schedule
    (step,), (u, ids), (y,) = group.steps, group.reads, group.writes
    (A, T, C), V, ahead, BN, chunk = u.shape, y.shape[1], s.m or 1, s.n, s.k_
    kind, count = w.type(y.type), w.type(as_type("int32"))
    lead = _lead(w, A)
    w.line(f"s = tile.group_id({int(bool(lead))})")
    w.line(f"n = tile.group_id({1 + bool(lead)}) * {BN}")
    w.line(f"found = tile.alloc_shared(({chunk + ahead},), {count})", step)
    way = group.attr("way")
    none = literal(nothing(y.type.dtype, way), y.type.dtype.kind)
    w.line(f"{step.name} = tile.full((1, {BN}), {none}, {kind})", step)
    many = way == "sum" and y.type.dtype.name == "f32" and T > CHAIN
    if many:
        w.line(f"{step.name}_w = tile.full((1, {BN}), 0.0, {w.type(as_type('f64'))})", step)
        w.line("seen = 0", step)
    with w.block(f"for i in range(0, {T}, {chunk}):"):
        w.line(f"at = tile.load({capital(ids.name)}[i:i+{chunk}])", step)
        with w.block("if s == 0:"):
            w.check_index("at", V, step)
        w.line(f"place = tile.arange(0, {chunk}) + i", step)
        edge = f" & (place < {T})" if T % chunk else ""
        w.line(f"hit = tile.cast(((at == s) | (at == s - {V})){edge}, {count})", step)
        w.line("count = tile.reduce_sum(hit)", step)
        with w.block("if count > 0:"):
            w.line("rank = tile.where(hit > 0, tile.cumsum(hit) - 1, -1)", step)
            w.line("tile.scatter(found, rank, place)", step)
            w.line(f"tile.scatter(found, tile.arange(0, {ahead}) + count, {T})", step)
            w.line("tile.barrier()", step)
            with w.block(f"for j in range(0, count, {ahead}):"):
                _add_slices(w, group, lead, ahead, kind, many, none)
            if many:
                w.line("seen = seen + count", step)
            w.line("tile.barrier()", step)
    made = step.name
    if many:  # one after another: too many for f32
        made = f"tile.where(seen > {CHAIN}, tile.cast({step.name}_w, {kind}), {step.name})"
    w.line(f"{capital(y.name)}[{lead}s:s+1, n:n+{BN}] = {made}", step)
    return w.finish_operands(_squeezed([(A, T, C), (T,), (A, V, C)], not lead))


def _add_slices(w: KernelWriter, group: ScheduledGroup, lead: str, ahead: int, kind: str,
                many: bool, none: str) -> None:
    """The slices at found[j], found[j + 1] ...: all are read, then added one after another."""
    fill = "" if group.attr("way") == "sum" else f", fill={none}"
    combine = COMBINE[group.attr("way")][0]
    (step,), U, BN = group.steps, capital(group.reads[0].name), group.schedule.n
    for r in range(ahead):
        w.line(f"p{r} = found[j + {r}]", step)
    for r in range(ahead):
        w.line(f"r{r} = tile.load({U}[{lead}p{r}:p{r}+1, n:n+{BN}]{fill})", step)
    narrow = step.type.dtype.compute is not step.type.dtype or step.type.dtype.bits < 32
    for r in range(ahead):
        total = combine.format(step.name, f"r{r}")
        w.line(f"{step.name} = " + (
            stored_as(total, step.type.dtype, kind) if narrow else total), step)
        if many:
            w.line(f"{step.name}_w = {step.name}_w + tile.cast(r{r}, f64)", step)


def nothing(dtype: DType, way: str) -> Any:
    """What a segment without elements has."""
    if way == "sum":
        return 0
    if dtype.kind == "float":
        return -inf if way == "max" else inf
    return int(dtype.min if way == "max" else dtype.max)


def _lead(w: KernelWriter, A: int) -> str:
    """The first subscript: none where nothing stands before the axis."""
    if A == 1:
        return ""
    w.line("a = tile.group_id(0)")
    return "a, "


def _squeezed(shapes: list[tuple[int, ...]], flat: bool) -> list[tuple[int, ...]]:
    """flat: without the first axis, which is one."""
    return [d[1:] if flat and len(d) > 1 else d for d in shapes]


kernel_kind("gather", "index", gather_source)
kernel_kind("segments", "index", segments_source)

__all__ = ["adds_slices", "around", "nothing"]
