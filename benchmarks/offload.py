"""Memory for time on a GPU: the gradient of a deep network, plain, recomputing, and offloading.

    python benchmarks/offload.py [--layers 12] [--tokens 8192] [--width 4096]

The network is x + gelu(x W1) W2, bf16, hidden layer of four widths; the gradient is that of the
mean square by x. One row for each of `nothing` (everything is kept), `remat` (ts.remat: inputs of
layers are kept) and `offload` (ts.remat(offload=True): they lie on the host):

    device_mib   what the first run takes of the GPU's free memory, arguments and results included
    ms           kernels and copies of a run, the least of ROUNDS; the copies of arguments apart
    hidden       part of the time of the copies, alone, that the run with them does not take more
                 than the run that recomputes only

Gradients are compared bit for bit. Needs a GPU. Writes benchmarks/results/offload.json, or
$OUT/offload.json when OUT is set.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import record

import tessera as ts
from tessera.graph.cuda.program.device import DeviceExecutable
from tessera.graph.cuda.program.workspace import Workspace
from tessera.runtime.device import device

ROUNDS = 5
WRAPS: dict[str, Callable] = {"nothing": lambda f: f, "remat": ts.remat,
                              "offload": ts.remat(offload=True)}


def layer(x: ts.Tensor, w1: ts.Tensor, w2: ts.Tensor) -> ts.Tensor:
    return x + ts.gelu(x @ w1) @ w2


def gradient(wrap: Callable, layers: int) -> Callable:
    """By x alone: the weights' gradients would be most of the memory."""
    def loss(x: ts.Tensor, ws: list) -> ts.Tensor:
        for w1, w2 in ws[:layers]:
            x = wrap(layer)(x, w1, w2)
        return ts.mean(ts.square(ts.cast(x, "f32")))

    return ts.grad(loss)


def draw(layers: int, tokens: int, width: int) -> tuple[ts.Tensor, list]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> ts.Tensor:
        return ts.tensor(rng.standard_normal(shape, np.float32) / np.sqrt(shape[0]), "bf16")

    pair = normal(width, 4 * width), normal(4 * width, width)
    return ts.tensor(rng.standard_normal((tokens, width), np.float32), "bf16"), [pair] * layers


def least_ms(run: Callable[[], None]) -> float:
    times = []
    for _ in range(ROUNDS):
        device().synchronize()
        start = time.perf_counter()
        run()
        device().synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def steps_of(space: Workspace) -> Callable[[], None]:
    def run() -> None:
        with space.device.current():
            for step in space.steps:
                step()

    return run


def copies_of(space: Workspace) -> Callable[[], None]:
    """The copies of a run without its kernels."""
    copies = [s for s in space.steps if getattr(getattr(s, "func", None), "__name__", "") in (
        "to_host", "to_device")]

    def run() -> None:
        with space.device.current():
            for copy in copies:
                copy()

    return run


def measure(wrap: Callable, x: ts.Tensor, ws: list) -> tuple[dict[str, Any], list[np.ndarray]]:
    graph = gradient(wrap, len(ws)).graph(x, ws)
    arrays = [x.array, *(w.array for pair in ws for w in pair)]
    executable = DeviceExecutable(graph)
    executable.run(arrays)  # loads the kernels
    executable = None  # type: ignore[assignment]
    gc.collect()
    before = device().free_bytes()
    executable = DeviceExecutable(graph)
    got = executable.run(arrays)
    used, plan = before - device().free_bytes(), executable.program.plan
    space = executable._workspace
    assert space is not None
    row = {"device_mib": used >> 20, "temporaries_mib": plan.temporary_bytes >> 20,
           "host_mib": plan.host_bytes >> 20, "ms": round(least_ms(steps_of(space)), 2)}
    if plan.transfers:
        row["copies_alone_ms"] = round(least_ms(copies_of(space)), 2)
        row["copied_mib"] = sum(t.nbytes for t in plan.transfers) >> 20
    return row, got


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 12), ("tokens", 8192), ("width", 4096)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    x, ws = draw(args.layers, args.tokens, args.width)
    rows, results = {}, {}
    for name, wrap in WRAPS.items():
        rows[name], results[name] = measure(wrap, x, ws)
        gc.collect()
    same = all(np.array_equal(a.view(np.uint8), b.view(np.uint8))
               for name in rows for a, b in zip(results[name], results["nothing"], strict=True))
    alone = rows["offload"]["copies_alone_ms"]
    longer = rows["offload"]["ms"] - rows["remat"]["ms"]
    figures = {"device": device().name, "layers": args.layers, "tokens": args.tokens,
               "width": args.width, "same_bits": same, "rows": rows,
               "hidden": round(1 - longer / alone, 3)}
    record.write("offload", figures)


if __name__ == "__main__":
    main()
