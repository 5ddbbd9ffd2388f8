"""Kernels around the library's: a product or attention, and the elementwise ops behind it."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from ....kernels.attention import SLACK, attend, attend_saved
from ....kernels.gemm import of_transposed, product
from ...schedule.ir import GroupStep, ScheduledGroup
from ...schedule.loop_axes import Frame
from .group_statements import FrameBlock, KernelValue, store
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital
from .loop_kernels import body


def _write_epilogue(w: KernelWriter, b: FrameBlock, group: ScheduledGroup, anchor: GroupStep,
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
    """The library's loop over K, or several into the same sums, one after another. The extents of
    one matrix stay open, so that a kernel serves all products of its kind; those of a batch, and
    extents from which the compiler is to see that rows are of 16 bytes, are constants."""
    w, frame = KernelWriter(group), Frame(group.space, group.attr("axes"))
    w.scope |= {"product": product}
    anchor = group.steps[0]
    own = group.reads[:len(anchor.args)]
    s, layout, batch, open_ = (group.schedule, group.attr("layout"), group.attr("batch"),
                               group.attr("open"))
    if not open_:
        for i, name in enumerate(("z", "m", "n") if batch else ("m", "n")):
            size = {"m": f" * {s.m}", "n": f" * {s.n}"}.get(name, "")
            w.line(f"{name} = tile.group_id({i}){size}")
    m, n = ("tile_m", "tile_n") if open_ else ("m", "n")
    b = FrameBlock(frame, f"{m}:{m}+{s.m}", f"{n}:{n}+{s.n}", ("z",) if batch else (), s.m, s.n,
                   {r.name: r for r in group.reads[len(own):]})
    attrs = dict(group.attrs)
    sums, depth, swapped = w.type(anchor.type), attrs.get("depth", 0), attrs.get("swapped", False)
    texts, calls, before = list[str](), list[str](), 0
    for i in range(0, len(own), 2):
        names = [f"{name}{i // 2 or ''}" for name in "ABK"]
        indices = ", ".join(batch[i:i + 2] or ("None", "None"))
        part = f", (z, {depth}, {before})" if depth else ""
        if swapped:
            calls.append(f"product({names[1]}, {names[0]}, {n}, {m}, ({indices}), "
                         f"{of_transposed(layout)!r}, {sums}, {s.n}, {s.m}, {s.k_}{part}).T")
        else:
            calls.append(f"product({names[0]}, {names[1]}, {m}, {n}, ({indices}), "
                         f"{layout[i:i + 2]!r}, {sums}, {s.m}, {s.n}, {s.k_}{part}"
                         f"{', acc=acc' if i else ''})")
        for name, o, way, dims in zip(names[:2], own[i:i + 2], layout[i:i + 2],
                                      (("M", names[2]), (names[2], "N")), strict=True):
            along = dims if way == "n" else dims[::-1]
            texts.append(f"{name}: {w.annotation(o, along if open_ else o.shape)}")
        before += -(-own[i].shape[-1 if layout[i] == "n" else -2] // s.k_) * s.k_
    for text in calls[:-1]:
        w.line(f"acc = {text}", anchor)
    _write_epilogue(w, b, group, anchor, calls[-1])
    others, shapes = _others(w, b, group, len(own), {0: "M", 1: "N"} if open_ else {})
    return w.finish([*texts, *others], "" if open_ else f"(grid={group.grid})",
                    [*(o.shape for o in own), *shapes])


def attention_source(group: ScheduledGroup) -> KernelText:
    """The library's loop over keys, for a block of queries of one head."""
    w, frame = KernelWriter(group), Frame(group.space, group.attr("axes"))
    saves = group.attr("saves")
    w.scope |= {"attend_saved": attend_saved} if saves else {"attend": attend}
    anchor, (Q, K, V) = group.steps[0], group.reads[:3]
    s, S, T, mask = group.schedule, Q.shape[1], K.shape[1], group.attr("mask")
    first = 3 if mask is None else 4
    draws = group.attr("draws")
    spans = group.reads[first:len(anchor.args) - (draws is not None)]
    number = "tile.group_id(1)"
    w.line(f"head = {number}" if mask is None or not mask.together else
           f"head = {number} % {mask.together} * {mask.heads} + {number} // {mask.together}")
    w.line(f"m = tile.group_id(0) * {s.m}")
    b = FrameBlock(frame, f"m:m+{s.m}", f"0:{V.shape[2]}", ("head",), s.m, V.shape[2],
                   {r.name: r for r in group.reads[len(anchor.args):]})
    given = (f"(Q, K, V, head, {group.attr('group')}, m, {T}, {T - S}, "
             f"{group.attr('scale')!r}, {s.m}, {s.n}, {group.attr('causal')}, {SLACK}")
    if group.attr("window") or group.attr("cap"):
        given += f", window={group.attr('window')}, cap={group.attr('cap')!r}"
    if group.attr("score") is not None:
        w.scope[group.attr("score").name] = group.attr("score")
        given += f", score={group.attr('score').name}"
    names = "QKV"
    if mask is not None:
        names += "M" if mask.rows else "L"
        rule = f"mask_{mask.heads}_{mask.per_batch}_{mask.per_head}_{mask.together}"
        w.scope[rule] = mask
        given += f", {names[-1]}={names[-1]}, mask={rule}"
    given += "".join(f", spans=N, heads={Q.shape[0] // x.shape[0]}" for x in spans)
    names += "N" * len(spans)
    if draws is not None:
        rule = f"draws_{hashlib.sha256(repr(draws).encode()).hexdigest()[:12]}"
        w.scope[rule], names = draws, names + "W"
        given += f", W=W, draws={rule}"
    given += ", nan=True)" if group.attr("nan") else ")"
    if saves:
        sums = group.writes[-1]
        group = replace(group, writes=group.writes[:-1])
        w.line(f"rows, sums = attend_saved{given}", anchor)
        w.line(f"{capital(sums.name)}[head, m:m+{s.m}] = sums", anchor)
    _write_epilogue(w, b, group, anchor, "rows" if saves else f"attend{given}")
    operands = group.reads[:len(anchor.args)]
    own = [f"{name}: {w.annotation(o, o.shape)}" for name, o in zip(names, operands, strict=True)]
    texts, shapes = _others(w, b, group, len(anchor.args), {})
    if saves:
        texts.append(f"{capital(sums.name)}: {w.annotation(sums, (Q.shape[0], S))}")
        shapes.append((Q.shape[0], S))
    return w.finish([*own, *texts], f"(grid={group.grid})",
                    [*(x.shape for x in operands), *shapes])


kernel_kind("gemm", "matmul", gemm_source)
kernel_kind("attention", "attention", attention_source)
