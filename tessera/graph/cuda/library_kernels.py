"""Kernels around the library's: a product or attention, and the elementwise ops behind it."""

from __future__ import annotations

from dataclasses import replace

from ...kernels.attention import SLACK, attend, attend_saved
from ...kernels.gemm import product
from ..schedule.ir import GroupStep, ScheduledGroup
from ..schedule.loop_axes import Frame
from .group_statements import FrameBlock, KernelValue, store
from .kernel_text import KernelText, KernelWriter, capital
from .loop_kernels import body


def _behind(w: KernelWriter, b: FrameBlock, group: ScheduledGroup, anchor: GroupStep,
            result: str) -> None:
    """The steps after the anchor, on its result, and what is written."""
    w.line(f"{anchor.name} = {result}", anchor)
    b.held[anchor.name] = KernelValue(anchor.name, True, True)
    body(w, b, group, list(group.steps[1:]))
    for o in group.writes:
        store(w, b, o, next((s for s in group.steps if s.name == o.name), anchor))


def _others(w: KernelWriter, b: FrameBlock, group: ScheduledGroup, own: int,
            names: dict[int, str]) -> tuple[list[str], list[tuple[int, ...]]]:
    """Parameters behind the anchor's own operands. names: of extents that stay open."""
    texts, shapes = [], []
    for o in (*group.reads[own:], *group.writes):
        along = b.pattern(o)
        dims = tuple(names.get(i, e) for i, (e, p) in enumerate(
            zip(b.frame.extents, along, strict=True)) if p) or (1,)
        texts.append(f"{capital(o.name)}: {w.annotation(o, dims)}")
        shapes.append(b.dims(o))
    return texts, shapes


def gemm_source(group: ScheduledGroup) -> KernelText:
    """The library's loop over K. The extents of one matrix stay open, so that a kernel serves all
    products of its kind; those of a batch, and extents from which the compiler is to see that rows
    are of 16 bytes, are constants."""
    w, frame = KernelWriter(group), Frame(group.space, group.attr("axes"))
    w.scope |= {"product": product}
    anchor, (A, B) = group.steps[0], group.reads[:2]
    s, layout, batch, open_ = (group.schedule, group.attr("layout"), group.attr("batch"),
                               group.attr("open"))
    if not open_:
        for i, name in enumerate(("z", "m", "n") if batch else ("m", "n")):
            size = {"m": f" * {s.m}", "n": f" * {s.n}"}.get(name, "")
            w.line(f"{name} = tile.group_id({i}){size}")
    m, n = ("tile_m", "tile_n") if open_ else ("m", "n")
    b = FrameBlock(frame, f"{m}:{m}+{s.m}", f"{n}:{n}+{s.n}", ("z",) if batch else (), s.m, s.n,
                   {r.name: r for r in group.reads[2:]})
    sums, depth = w.type(anchor.type), dict(group.attrs).get("depth", 0)
    part = f", (z, {depth})" if depth else ""
    indices = ", ".join(batch or ("None", "None"))
    w_call = f"product(A, B, {m}, {n}, ({indices}), {layout!r}, {sums}, {s.m}, {s.n}, {s.k_}{part})"
    _behind(w, b, group, anchor, w_call)
    dims = [tuple(names if way == "n" else names[::-1]) if open_ else o.shape
            for o, way, names in zip((A, B), layout, ("MK", "KN"), strict=True)]
    texts, shapes = _others(w, b, group, 2, {0: "M", 1: "N"} if open_ else {})
    own = [f"{name}: {w.annotation(o, d)}" for name, o, d in zip("AB", (A, B), dims, strict=True)]
    return w.finish([*own, *texts], "" if open_ else f"(grid={group.grid})",
                    [A.shape, B.shape, *shapes])


def attention_source(group: ScheduledGroup) -> KernelText:
    """The library's loop over keys, for a block of queries of one head."""
    w, frame = KernelWriter(group), Frame(group.space, group.attr("axes"))
    saves = group.attr("saves")
    w.scope |= {"attend_saved": attend_saved} if saves else {"attend": attend}
    anchor, (Q, K, V) = group.steps[0], group.reads[:3]
    s, S, T = group.schedule, Q.shape[1], K.shape[1]
    w.line("head = tile.group_id(1)")
    w.line(f"m = tile.group_id(0) * {s.m}")
    b = FrameBlock(frame, f"m:m+{s.m}", f"0:{V.shape[2]}", ("head",), s.m, V.shape[2],
                   {r.name: r for r in group.reads[3:]})
    given = (f"(Q, K, V, head, {group.attr('group')}, m, {T}, {T - S}, "
             f"{group.attr('scale')!r}, {s.m}, {s.n}, {group.attr('causal')}, {SLACK})")
    if saves:
        sums = group.writes[-1]
        group = replace(group, writes=group.writes[:-1])
        w.line(f"rows, sums = attend_saved{given}", anchor)
        w.line(f"{capital(sums.name)}[head, m:m+{s.m}] = sums", anchor)
    _behind(w, b, group, anchor, "rows" if saves else f"attend{given}")
    own = [f"{name}: {w.annotation(o, o.shape)}" for name, o in zip("QKV", (Q, K, V), strict=True)]
    texts, shapes = _others(w, b, group, 3, {})
    if saves:
        texts.append(f"{capital(sums.name)}: {w.annotation(sums, (Q.shape[0], S))}")
        shapes.append((Q.shape[0], S))
    return w.finish([*own, *texts], f"(grid={group.grid})",
                    [Q.shape, K.shape, V.shape, *shapes])


__all__ = ["attention_source", "gemm_source"]
