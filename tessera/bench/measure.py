"""The measurement of one model, in a process of its own: both sides in turn, then their profiles.

A process is started with empty folders for what is compiled; another one with the same folders,
now filled, measures what a start takes that finds everything on the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from ..errors import UnsupportedTargetError
from ..runtime.device import device
from ..tile.tuning.gpus import gpu_of
from .figures import rate, spread
from .models.gpt2 import GPT2, SPELLINGS
from .models.record import StepModel, batch, weights
from .our_step import OurStep

OURS, COMPILED, EAGER = "tessera", "torch.compile", "torch eager"
PLAIN = "tessera bf16"  # beside fp8
WARM_UP = 2  # steps that are not timed, behind the first
SPELLING_STEPS = 4  # times as many of a spelling: its clock is that of steps in a row


def need_torch() -> None:
    """Raises UnsupportedTargetError where PyTorch is not installed."""
    if find_spec("torch") is None:
        raise UnsupportedTargetError(
            "the step is measured beside PyTorch, which is not installed here",
            hint="pip install torch, or --ours for our side alone")


def torch_side() -> Any:
    """The module that stands on PyTorch. Raises UnsupportedTargetError where that is missing."""
    need_torch()
    from . import torch_side as made

    return made


def torch_matmuls() -> Any:
    """The module with cuBLAS's products. Raises UnsupportedTargetError as torch_side does."""
    need_torch()
    from . import torch_matmuls as made

    return made


def make_side(name: str, model: StepModel, weights: Any, batch: tuple) -> Any:
    if name in (OURS, PLAIN):
        return OurStep(model if name == OURS else model.plain, weights, batch)
    return torch_side().TorchStep(model, weights, batch, compiled=name == COMPILED)


def first_step(side: Any) -> tuple[float, float]:
    """(seconds until the first loss is on the host, that loss)"""
    begin = time.perf_counter()
    value = side.read(side.step())
    return time.perf_counter() - begin, value


def time_steps(side: Any, steps: int) -> tuple[float, float]:
    """(milliseconds of a step, the last loss): the last one is waited for, the host runs ahead."""
    begin = time.perf_counter()
    for _ in range(steps):
        value = side.step()
    loss = side.read(value)
    return 1e3 * (time.perf_counter() - begin) / steps, loss


def measure(model: StepModel, names: list[str], steps: int, rounds: int, profiled: bool,
            told: Callable[[str], None]) -> dict[str, Any]:
    """Figures by side. Each round times `steps` steps of every side, one after another."""
    start, xy = weights(model), batch(model)
    made: dict[str, Any] = {}
    out: dict[str, Any] = {}
    for name in names:
        made[name] = make_side(name, model, start, xy)
        cold, loss = first_step(made[name])
        told(f"{model.name}: {name}: first step {cold:.1f} s")
        made[name].reset_peak()
        time_steps(made[name], WARM_UP)  # and its memory, before the next side has any
        out[name] = {"first_step_s": round(cold, 2), "loss_first": loss,
                     "peak_mib": round(made[name].peak_bytes() / 2**20)}
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, side in made.items():
            ms, out[name]["loss_last"] = time_steps(side, steps)
            times[name].append(ms)
    peak = gpu_of(device()).matmuls("f16")
    for name in made:
        out[name] |= rate(model.flops, model.tokens, times[name], peak)
        told(f"{model.name}: {name}: {out[name]['step_ms']:.2f} ms a step")
    out[OURS]["launches"] = made[OURS].launches()
    if profiled:
        for name, side in made.items():
            out[name] |= side.classes().figures()
    return {"model": model.figures(), "steps": steps, "rounds": rounds, "gpu": device().name,
            "sides": out}


def measure_start(model: StepModel, name: str) -> float:
    """Seconds of the first step of one side."""
    return first_step(make_side(name, model, weights(model), batch(model)))[0]


def measure_spellings(model: StepModel, steps: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step of each spelling of GPT-2, in turn, there and back: what runs behind
    others finds the GPU at a lower clock."""
    xy = batch(model)
    made = {}
    for name, how in SPELLINGS.items():
        spelled = model.sized(spelling=how)  # type: ignore[arg-type]
        made[name] = OurStep(spelled, weights(spelled), xy)
        first_step(made[name])
        time_steps(made[name], WARM_UP)
    times: dict[str, list[float]] = {name: [] for name in made}
    for i in range(2 * rounds):
        for name in reversed(made) if i % 2 else made:
            times[name].append(time_steps(made[name], SPELLING_STEPS * steps)[0])
    rows = {name: rate(model.flops, model.tokens, ms, gpu_of(device()).matmuls("f16"))
            for name, ms in times.items()}
    over = spread({name: r["step_ms"] for name, r in rows.items()})
    return {name: {**r, "over": over[name], "launches": made[name].launches()}
            for name, r in rows.items()}


def is_gpt2(model: StepModel) -> bool:
    return model.family is GPT2


__all__ = ["COMPILED", "EAGER", "OURS", "PLAIN", "is_gpt2", "measure", "measure_spellings",
           "measure_start", "need_torch", "torch_matmuls", "torch_side"]
