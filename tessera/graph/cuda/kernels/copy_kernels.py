"""Kernels that move elements: one or two axes are those of tiles, the others are the grid's."""

from __future__ import annotations

from ...schedule.ir import ScheduledGroup
from ...schedule.region_copies import RegionCopy
from .kernel_kinds import kernel_kind
from .kernel_text import KernelText, KernelWriter, capital


def move_source(group: ScheduledGroup) -> KernelText:
    """A part that reaches over its end into the next is overwritten by it: parts go in order."""
    w = KernelWriter(group)
    move = RegionCopy(group.attr("region"), group.attr("offset"), group.attr("from"))
    (step,), (x,), (y,) = group.steps, group.reads, group.writes
    tiles, s = group.attr("tile"), group.schedule
    sizes = dict(zip(reversed(tiles), (s.n, s.m), strict=False))
    for i, o in enumerate(range(len(move.region))):
        times = f" * {sizes[o]}" if o in sizes else ""
        w.line(f"i{o} = tile.group_id({i}){times}")
    source = [_from(move, a, sizes) for a in range(len(move.axes))]
    target = [_span(_sum(f"i{o}", at), sizes.get(o)) for o, at in enumerate(move.offset)]
    Y = f"{capital(y.name)}[{', '.join(target) or '0'}]"
    X = f"{capital(x.name)}[{', '.join(source) or '0'}]"
    w.line(f"{Y} = {_value(move, tiles, sizes, X)}", step)
    return w.finish_operands([o.shape or (1,) for o in (x, y)])


def _sum(text: str, number: int) -> str:
    return f"{text} + {number}" if number else text


def _span(text: str, size: int | None) -> str:
    return text if size is None else f"{text}:{text}+{size}"


def _from(move: RegionCopy, axis: int, sizes: dict[int, int]) -> str:
    o, start, step = move.axes[axis]
    if o < 0:
        return str(start)
    if step == 1:
        return _span(_sum(f"i{o}", start), sizes.get(o))
    return f"{start} - i{o}" if step == -1 else f"{start} + {step} * i{o}"


def _value(move: RegionCopy, tiles: tuple[int, ...], sizes: dict[int, int], place: str) -> str:
    """The tile as the result has it: axes turned, and repeated where the source has none."""
    held = [o for o, _, _ in move.axes if o in tiles]
    if not held:
        return place
    text = f"tile.load({place})"
    if len(tiles) < 2:
        return text
    if len(held) == 2:
        return text if held == list(tiles) else f"{text}.T"
    turned = f"{text}[None, :]" if held[0] == tiles[1] else text
    return f"tile.broadcast({turned}, ({sizes[tiles[0]]}, {sizes[tiles[1]]}))"


kernel_kind("move", "move", move_source)
