"""Ours beside PyTorch in numbers: losses, the first step's gradients, and what the first step made
of the weights. PyTorch in f32 is the reference, PyTorch with matmuls in bf16 says what is usual.

Gradients are read from AdamW's first moments, which are (1 - b1) g after one step: they are those
of the very program that trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ..graph import tree
from ..lazy_dataclass import dataclass
from .figures import distance, slope, table
from .models.record import StepModel, batch, weights
from .models.step import OPTIMIZER
from .our_step import OurStep


@dataclass(frozen=True)
class TrainingTrace:
    """Losses of steps; gradients and changes of the weights of the first, by parameter."""

    losses: list[float]
    grads: dict[str, np.ndarray]
    changes: dict[str, np.ndarray]


def traced(side: Any, start: dict[str, np.ndarray], steps: int) -> TrainingTrace:
    losses = [side.read(side.step())]
    grads = {path: m / np.float32(1 - OPTIMIZER.b1) for path, m in side.moments().items()}
    changes = {path: w - start[path] for path, w in side.weights().items()}
    losses += losses_of(side, steps - 1)
    return TrainingTrace(losses, grads, changes)


def losses_of(side: Any, steps: int) -> list[float]:
    return [side.read(side.step()) for _ in range(steps)]


def differences(model: StepModel, steps: int, torch_step: Any, where: str = "cuda",
                orders: int = 1) -> dict[str, Any]:
    """The figures. torch_step: the class of torch_side.py.

    orders: runs of each side in 16 bits. Those after the first have the rows of the batch in
    another order, which is the same step but for the order of sums: how far such runs lie apart is
    what rounding alone does."""
    start = weights(model)
    leaves, structure = tree.flatten(start)
    before = dict(zip(tree.paths(structure), leaves, strict=True))
    given: tuple[np.ndarray, ...] = batch(model)
    sides: dict[str, Callable[[], Any]] = {
        "torch f32": lambda: torch_step(model, start, given, False, "float32", where),
        "torch bf16": lambda: torch_step(model, start, given, False, "bfloat16", where),
        "ours": lambda: OurStep(model, start, given, where)}
    if model.fp8:
        sides["ours bf16"] = lambda: OurStep(model.plain, start, given, where)
    found = {}
    for name, make in sides.items():
        found[name] = traced(make(), before, steps)
        if where == "cuda":
            torch_step.free()
    made = compared(found)
    for number in range(2, orders + 1):
        order = np.random.default_rng(number).permutation(model.B)
        given = tuple(t[order] for t in batch(model))
        for name in ("torch bf16", "ours"):  # which read what is given when they are made
            made["losses"][f"{name}, order {number}"] = losses_of(sides[name](), steps)
            if where == "cuda":
                torch_step.free()
    return made


def compared(found: dict[str, TrainingTrace], reference: str = "torch f32") -> dict[str, Any]:
    want = found[reference]
    others = [name for name in found if name != reference]

    def row(path: str) -> dict[str, Any]:
        made: dict[str, Any] = {"parameter": path,
                                "gradient_norm": float(np.linalg.norm(want.grads[path]))}
        for name in others:
            made[name] = {
                "gradient": distance(found[name].grads[path], want.grads[path]),
                "gradient_slope": slope(found[name].grads[path], want.grads[path]),
                "update": distance(found[name].changes[path], want.changes[path]),
                "update_slope": slope(found[name].changes[path], want.changes[path])}
        return made

    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(row, want.grads))
    return {"losses": {name: t.losses for name, t in found.items()}, "first_step": rows}


# --- text -------------------------------------------------------------------------------------
def losses_text(figures: dict[str, Any]) -> str:
    """Losses side by side, and how far each is from the reference."""
    losses = figures["losses"]
    reference = losses["torch f32"]
    others = [n for n in losses if n != "torch f32" and ", order" not in n]
    rows = [(i, f"{want:.5f}", *(f"{losses[n][i]:.5f}" for n in others),
             *(f"{losses[n][i] - want:+.1e}" for n in others))
            for i, want in enumerate(reference)]
    return table(("step", "torch f32", *others, *(f"{n} - f32" for n in others)), rows)


def offsets_text(figures: dict[str, Any]) -> str:
    """How far the losses of each run are from the reference, over all steps."""
    losses = figures["losses"]
    want = np.array(losses["torch f32"])
    rows = []
    for name, run in losses.items():
        if name != "torch f32":
            off = np.array(run) - want
            rows.append((name, f"{off.mean():+.1e}", f"{np.sqrt((off * off).mean()):.1e}",
                         f"{np.abs(off).max():.1e}"))
    return table(("losses - f32", "mean", "rms", "largest"), rows)


def first_step_text(figures: dict[str, Any], everything: bool = False) -> str:
    """Gradients and updates by parameter: those outside of the layers, and of the first and the
    last layer, unless all are asked for; then the worst of all."""
    rows = figures["first_step"]
    shown = rows if everything else [r for r in rows if _is_boundary_layer(r["parameter"], rows)]
    head = ("parameter", "|g|", "ours", "slope", "bf16", "slope", "update ours", "slope", "bf16",
            "slope")
    lines = [_line(r) for r in shown]
    for key in ("gradient", "update"):
        for side in ("ours", "torch bf16"):
            known = [r for r in rows if not math.isnan(r[side][key])]
            worst = max(known, key=lambda r: r[side][key], default=None)
            if worst is not None:
                middle = float(np.median([r[side][key] for r in known]))
                lines.append((f"{key} of {side}: median {middle:.4f}, worst "
                              f"{worst[side][key]:.4f} of {worst['parameter']}",
                              *("" for _ in head[1:])))
    return table(head, lines[:len(shown)]) + "\n" + "\n".join(x[0] for x in lines[len(shown):])


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    cells = [row["parameter"], f"{row['gradient_norm']:.2e}"]
    for key in ("gradient", "update"):
        for side in ("ours", "torch bf16"):
            cells += [f"{row[side][key]:.4f}", f"{row[side][key + '_slope']:.4f}"]
    return tuple(cells)


def _is_boundary_layer(path: str, rows: list[dict]) -> bool:
    """Outside of the layers, or in the first or last of them."""
    number = _layer(path)
    return number is None or number in (0, max(_layer(r["parameter"]) or 0 for r in rows))


def _layer(path: str) -> int | None:
    return next((int(p) for p in path.split(".") if p.isdecimal()), None)


__all__ = ["TrainingTrace", "compared", "differences", "first_step_text", "losses_text",
           "offsets_text"]
