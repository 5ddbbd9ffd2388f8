"""What the figures of a step look like as text."""

from __future__ import annotations

from typing import Any

from .figures import table
from .kernel_classes import CLASSES
from .step_matmuls import OURS, THEIRS


def step_text(name: str, figures: dict[str, Any]) -> str:
    """Both sides in one table, then GPU time by class of kernel."""
    sides = figures["sides"]
    head = (name, *sides, *(f"ours / {other}" for other in [*sides][1:]))
    rows = [_row(title, key, form, sides) for title, key, form in (
        ("tokens/s", "tokens_per_s", "{:,.0f}"), ("ms a step", "step_ms", "{:.2f}"),
        ("MFU", "mfu", "{:.3f}"), ("peak memory, MiB", "peak_mib", "{:,.0f}"),
        ("first step, s", "first_step_s", "{:.1f}"),
        ("first step from the disk, s", "start_from_disk_s", "{:.1f}"),
        ("first loss", "loss_first", "{:.5f}"), ("last loss", "loss_last", "{:.5f}"))
        if any(key in s for s in sides.values())]
    return "\n\n".join([table(head, rows), *classes_text(sides)]) + "\n"


def _row(title: str, key: str, form: str, sides: dict[str, Any]) -> tuple[str, ...]:
    """One figure of every side, and ours by each of the others'."""
    found = [s.get(key) for s in sides.values()]
    ratios = ["" if v is None or found[0] is None or "loss" in key else f"{found[0] / v:.3f}"
              for v in found[1:]]
    return (title, *("" if v is None else form.format(v) for v in found), *ratios)


def classes_text(sides: dict[str, Any]) -> list[str]:
    """GPU time in ms, and launches, by class of kernel; nothing where no side was profiled."""
    sides = {name: s for name, s in sides.items() if "classes" in s}
    if not sides:
        return []
    rows = []
    for c in CLASSES:
        each = [s["classes"].get(c) for s in sides.values()]
        if any(each):
            rows.append((c, *(f"{e['us'] / 1e3:.2f} ({e['launches']})" if e else "-"
                              for e in each)))
    rows.append(("all", *(f"{s['gpu_us'] / 1e3:.2f} "
                          f"({sum(e['launches'] for e in s['classes'].values())})"
                          for s in sides.values())))
    return [table(("GPU ms (launches)", *sides), rows)]


def spellings_text(name: str, rows: dict[str, Any]) -> str:
    """Milliseconds of each, how much longer than the quickest it takes, its launches."""
    lines = [(spelled, f"{r['step_ms']:.2f}", f"{100 * r['over']:+.1f} %",
              f"{sum(r['launches'].values())}") for spelled, r in rows.items()]
    return table((name, "ms a step", "over the quickest", "launches"), lines)


def products_text(name: str, rows: list[dict[str, Any]]) -> str:
    """Each product of a step under load, what a step loses or gains by it, and their sums."""
    beside, lines = any(THEIRS in r for r in rows), []
    total = dict.fromkeys((OURS, THEIRS), 0.0)
    for r in rows:
        ours, theirs = r[OURS], r.get(THEIRS)
        cells = [r["product"], r["how"], r["count"], f"{ours['us']:.1f}", ours["tflops"],
                 ours.get("watts", "-"), ours.get("mj", "-")]
        total[OURS] += r["count"] * ours["us"] / 1e3
        if theirs:
            total[THEIRS] += r["count"] * theirs["us"] / 1e3
            cells += [f"{theirs['us']:.1f}", theirs.get("watts", "-"), theirs.get("mj", "-"),
                      f"{theirs['us'] / ours['us']:.3f}",
                      f"{r['count'] * (ours['us'] - theirs['us']) / 1e3:+.2f}"]
        lines.append(cells)
    lines.append(["all, ms a step", "", sum(r["count"] for r in rows), f"{total[OURS]:.2f}", "", "",
                  "", *[f"{total[THEIRS]:.2f}", "", "", f"{total[THEIRS] / total[OURS]:.3f}",
                        f"{total[OURS] - total[THEIRS]:+.2f}"] * beside])
    head = [name, "block", "n", "us", "TFLOP/s", "W", "mJ",
            *[THEIRS, "W", "mJ", f"{THEIRS} / ours", "ms a step"] * beside]
    return table(head, lines)


__all__ = ["classes_text", "products_text", "spellings_text", "step_text"]
