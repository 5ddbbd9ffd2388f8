"""A plan as a table in text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import short_path
from ..graph.schedule.work import amount
from .flops import work_us

if TYPE_CHECKING:
    from .planner import Planned, PlannedCollectives

MOST, LONGEST = 14, 5  # collectives and other units shown, those that take longest first
MUCH = 0.8  # of the time now: an order that takes less is worth a word


def duration(us: float) -> str:
    """Microseconds as '12.3 us', '4.56 ms' or '7.89 s'."""
    if us < 0.0995:
        return f"{us * 1e3:.3g} ns" if us > 5e-4 else "0 us"
    if us < 999.5:
        return f"{us:.3g} us"
    return f"{us / 1e3:.3g} ms" if us < 999.5e3 else f"{us / 1e6:.3g} s"


def table(plan: Planned) -> str:
    """Facts, memory, exchanges, the step, and what the figures assume."""
    lines = [f"plan of {plan.title}",
             f"  on {plan.mesh}, fabric {plan.fabric.name}: {plan.device.name}, "
             f"{amount(plan.device.memory_bytes, 'B')} a rank"]
    lines += [f"  {name}: {text}" for name, text in (*axes_of(plan), *plan.facts)]
    lines += ["", *_memory(plan), "", *_exchanges(plan), "", *_step(plan), *_longest(plan), "",
              "assumed"]
    return "\n".join([*lines, *(f"  {note}" for note in plan.notes)])


def axes_of(plan: Planned) -> list[tuple[str, str]]:
    """Per axis of more than one rank: how many domains of the fabric its groups lie in; and the
    order of axes in which exchanges would take much less time."""
    found = []
    for axis in plan.mesh.axes:
        ranks, domains, _ = plan.fabric.spread(plan.mesh, axis)
        if ranks == 1:
            continue
        where = f"inside a domain of {plan.fabric.domain}" if domains == 1 else (
            f"over {domains} domains of {plan.fabric.domain}")
        found.append((f"axis {axis}", f"{ranks} ranks {where}"))
    better = better_order(plan)
    if better is not None:
        axes, us = better
        now = sum(e.total_us for e in plan.exchanges if not e.hidden)
        found.append(("faster", f"the axes as {', '.join(axes)}: exchanges {duration(us)} instead "
                      f"of {duration(now)}"))
    return found


def _memory(plan: Planned) -> list[str]:
    rows = [(role, amount(n, "B"), f"{n / plan.device.memory_bytes:.1%}")
            for role, n in plan.memory.items()]
    held, limit = plan.memory_bytes, plan.device.memory_bytes
    verdict = "fits" if plan.fits else f"does not fit: {amount(held - limit, 'B')} too much"
    rows.append(("in all", amount(held, "B"), f"{held / limit:.1%}  {verdict}"))
    return ["memory of a rank", *columns(rows, "<>>")]


def better_order(plan: Planned) -> tuple[tuple[str, ...], float] | None:
    """The order of axes with one of them last in which exchanges that are not hidden take least
    time, and that in microseconds; None when it is not much less than now."""
    mesh, shown = plan.mesh, [e for e in plan.exchanges if not e.hidden]
    now = sum(e.total_us for e in shown)
    found = []
    for last in mesh.axes[:-1]:
        axes = (*(a for a in mesh.axes if a != last), last)
        other = replace(mesh, axes=axes, shape=tuple(mesh.size(a) for a in axes))
        us = sum(e.count * plan.fabric.time(e.op, e.bytes, other, e.axes).us for e in shown)
        found.append((us, axes))
    best = min(found, default=(now, mesh.axes))
    return (best[1], best[0]) if best[0] < MUCH * now else None


def _exchanges(plan: Planned) -> list[str]:
    if not plan.exchanges:
        return ["exchanges: none"]
    longest = sorted(plan.exchanges, key=lambda e: -e.total_us)
    head = ("collective", "axes", "times", "bytes", "each", "in all", "why")
    rows = [head, *(_row(e) for e in longest[:MOST])]
    lines = ["exchanges", *columns(rows, "<<>>>><")]
    if len(longest) > MOST:
        rest = sum(e.total_us for e in longest[MOST:])
        lines.append(f"  and {len(longest) - MOST} more, {duration(rest)}")
    return lines


def _row(e: PlannedCollectives) -> tuple[str, ...]:
    where = f" ({short_path(e.where.file)}:{e.where.line})" if e.where is not None else ""
    beside = "; beside arithmetic" if e.hidden else ""
    return (e.op, "*".join(e.axes), f"{e.count:g}", amount(e.bytes, "B"), duration(e.us),
            duration(e.total_us), f"{e.why}{where}{beside}")


def _step(plan: Planned) -> list[str]:
    rows = [(p.name, duration(p.us), f"{p.us / plan.step_us:.1%}" if plan.step_us else "", p.what)
            for p in plan.parts]
    mfu = f"MFU {plan.mfu:.1%}" if plan.ideal_us else ""
    return ["step", *columns([*rows, ("in all", duration(plan.step_us), "", mfu)], "<>><")]


def _longest(plan: Planned) -> list[str]:
    """The calls and loops that take longest, those of one line of the program together."""
    found: dict[tuple, list[float]] = {}
    for work in plan.works:
        sums = found.setdefault((work.name, work.where), [0.0, 0.0, 0.0])
        moved = work.times * work.bytes
        for i, more in enumerate((work_us(work, plan.device), work.flops, moved)):
            sums[i] += more
    if not found:
        return []
    longest = sorted(found.items(), key=lambda item: -item[1][0])[:LONGEST]
    rows = [(name, duration(us), amount(flops, "FLOP"), amount(moved, "B"),
             f"{short_path(where.file)}:{where.line}" if where is not None else "")
            for (name, where), (us, flops, moved) in longest]
    return ["", "longest", *columns([("unit", "time", "operations", "moved", "line"), *rows],
                                    "<>>><")]


def columns(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Rows as indented lines, each column as wide as its widest cell; sides: < or > of each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(f"{cell:{side}{width}}" for cell, side, width
                             in zip(row, sides, widths, strict=True)).rstrip() for row in rows]
