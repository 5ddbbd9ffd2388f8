"""Training steps of models on the CPU beside eager PyTorch: milliseconds, and ours over theirs.

    python benchmarks/cpu_models.py                  # all of MODELS
    python benchmarks/cpu_models.py unet --ours      # without PyTorch

The models of tests/models, at extents of work: gradient descent in one compiled function, and the
same in PyTorch. Both take all cores, in turn, one step of each; medians. Each begins after a pause:
OpenMP's threads look for more work for some milliseconds, on the cores that the other side is to
have. PyTorch is no dependency of Tessera: run this with an interpreter that has both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import record

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests")]  # the models are there

from models import mixture  # noqa: E402
from models.training import (  # noqa: E402
    _torch_gradients,
    leaves,
    model,
    replaced,
    step_of,
    tensors,
)

TOKENS, EXPERTS = 2048, 8
# What it is; arguments of parameters(), then of batch().
MODELS: dict[str, tuple[str, dict[str, int], dict[str, int]]] = {
    "unet": ("U-Net, 16 to 32 channels, 4 images of 64 x 64",
             {"width": 16}, {"B": 4, "size": 64}),
    "graphs": ("graph network of 64, 4000 nodes, 40000 edges",
               {"d": 32, "h": 64}, {"nodes": 4000, "edges": 40000, "d": 32}),
    "gru": ("GRU of 128 by scan, 32 sequences of 64",
            {"d": 64, "h": 128, "classes": 10}, {"T": 64, "B": 32, "d": 64, "classes": 10}),
    "mixture": ("8 experts of 512, 2048 tokens of 128, 2 experts each",
                {"d": 128, "experts": EXPERTS, "width": 512}, {"tokens": TOKENS, "d": 128}),
}
RATE = 1e-3
PAUSE = 0.02  # seconds


def routed(torch: Any, p: Any, x: Any, y: Any) -> Any:
    """The mixture as it is written for speed: each expert computes the tokens it is sent."""
    gates = torch.softmax(x @ p["router"], -1)
    best, ids = torch.topk(gates, mixture.K)
    best = best / best.sum(-1, keepdim=True)
    E, room = gates.shape[1], mixture.ROOM
    chosen = torch.nn.functional.one_hot(ids.flatten(), E).float()
    slot = ((chosen.cumsum(0) - 1) * chosen).sum(1).long()
    fits = slot < room
    place = torch.where(fits, ids.flatten() * room + slot, E * room)
    sent = x.new_zeros(E * room + 1, x.shape[1]).index_add(
        0, place, x.repeat_interleave(mixture.K, 0))[:-1].reshape(E, room, -1)
    h = torch.nn.functional.gelu(sent @ p["up"], approximate="tanh")
    out = (h @ p["down"]).reshape(E * room, -1)
    back = torch.where(fits[:, None], out[torch.where(fits, place, 0)], 0.0)
    made = (back.reshape(len(x), mixture.K, -1) * best[:, :, None]).sum(1) + p["bias"]
    balance = E * (chosen.mean(0) * gates.mean(0)).sum()
    return ((made - y) ** 2).mean() + 0.01 * balance


def ours(name: str, params: Any, batch: Any) -> Callable[[], float]:
    """A function that takes a step and returns its loss."""
    step, state = step_of(model(name)), [tensors(params)]
    given = tensors(batch)

    def run() -> float:
        value, state[0] = step(state[0], given)
        return float(value.item())

    return run


def theirs(name: str, params: Any, batch: Any) -> Callable[[], float]:
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    m = model(name)
    given = replaced(batch, (torch.tensor(x) for x in leaves(batch)))
    state = [[torch.tensor(x, requires_grad=True) for x in leaves(params)]]

    def run() -> float:
        flat = state[0]
        value, grads = _torch_gradients(torch, m, replaced(params, iter(flat)), flat, given)
        state[0] = [(x - m.RATE * g).detach().requires_grad_()
                    for x, g in zip(flat, grads, strict=True)]
        return float(value.item())

    return run


def measured(name: str, steps: int, alone: bool) -> dict[str, Any]:
    (_, *sizes), rng = MODELS[name], np.random.default_rng(0)
    m = model(name)
    m.RATE = RATE
    params, batch = m.parameters(rng, **sizes[0]), m.batch(rng, **sizes[1])
    sides = {"ours": ours(name, params, batch)}
    if not alone:
        sides["torch"] = theirs(name, params, batch)
    times: dict[str, list[float]] = {side: [] for side in sides}
    losses: dict[str, float] = {}
    for i in range(steps + 3):
        for side, run in sides.items():
            time.sleep(PAUSE)
            begin = time.perf_counter()
            losses[side] = run()
            if i >= 3:
                times[side].append(1e3 * (time.perf_counter() - begin))
    found: dict[str, Any] = {side: round(statistics.median(t), 2) for side, t in times.items()}
    if not alone:
        found["ratio"] = round(found["torch"] / found["ours"], 2)
    return {**found, "losses": losses}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL")
    flags.add_argument("--steps", type=int, default=20)
    flags.add_argument("--ours", action="store_true")
    a = flags.parse_args()
    mixture.ROOM = mixture.K * TOKENS // EXPERTS * 5 // 4
    mixture.torch_loss = routed
    figures: dict[str, Any] = {}
    for name in a.models:
        figures[name] = {"what": MODELS[name][0], **measured(name, a.steps, a.ours)}
        print(name, figures[name], flush=True)
    if not a.ours:
        from importlib.metadata import version

        record.write("cpu_models", {"torch": version("torch"), "models": figures}, shown=False)


if __name__ == "__main__":
    main()
