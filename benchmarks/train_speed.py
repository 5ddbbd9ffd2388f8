"""Tokens per second of examples/train.py's step on the CPU beside the same model in eager PyTorch.

    python benchmarks/train_speed.py
    python benchmarks/train_speed.py --ours              # without PyTorch

Both run in processes of their own with two threads, in turn (ours, torch, ours, torch, ...), so
that another program on the machine slows both. PyTorch's side is that of `python -m tessera bench
step train.py`, which measures the step on a GPU: same model, batch and optimizer. The figure is the
median step of the best round of each; `ratio` is ours over torch's. Written to benchmarks/results,
or to $OUT when that is set. PyTorch is no dependency of Tessera: run this with an interpreter that
has both.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import record

import tessera as ts
from tessera.bench.catalogue import MODELS
from tessera.bench.models.record import StepModel, weights

HERE = Path(__file__).resolve().parent
Advance = Callable[[np.ndarray, np.ndarray], float]  # takes a step and returns its loss


def ours(m: StepModel) -> tuple[Advance, str]:
    sys.path.insert(0, str(HERE.parent / "examples"))
    import train

    c = train.Config(d=m.d, layers=m.layers, heads=m.heads, T=m.T, B=m.B)
    run, model = train.new_run(c), train.Model(c)
    return lambda x, y: model.advance(run, (x, y), 3e-4)[0], ts.__version__


def theirs(m: StepModel, threads: int) -> tuple[Advance, str]:
    import torch

    from tessera.bench.torch_side import TorchStep

    torch.set_num_threads(threads)
    side = TorchStep(m, weights(m), (np.zeros(0, np.int32),) * 2, compiled=False, half="float32",
                     device="cpu")

    def advance(x: np.ndarray, y: np.ndarray) -> float:
        side.x, side.y = torch.from_numpy(x), torch.from_numpy(y)
        return side.read(side.step())

    return advance, torch.__version__


def measure(side: str, m: StepModel, args: argparse.Namespace) -> dict[str, Any]:
    """Times `steps` whole training steps (data, forward, backward, AdamW) after `warmup` ones."""
    advance, version = ours(m) if side == "tessera" else theirs(m, args.threads)
    rng, times_ms, loss = np.random.default_rng(0), list[float](), 0.0
    for _ in range(args.warmup + args.steps):
        start = time.perf_counter()
        tokens = rng.integers(0, m.vocabulary, (m.B, m.T + 1))
        loss = advance(tokens[:, :-1], tokens[:, 1:])
        times_ms.append((time.perf_counter() - start) * 1e3)
    median_ms = statistics.median(times_ms[args.warmup:])
    return {"tokens_per_s": round(m.tokens / median_ms * 1e3, 1), "step_ms": round(median_ms, 2),
            "first_step_ms": round(times_ms[0], 1), "loss": round(loss, 4),
            "versions": {side: version, "python": platform.python_version()}}


def run_child(side: str, threads: int) -> dict[str, Any]:
    """The JSON that a child process prints last. Its error goes to our stderr and ends us."""
    limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS",
                            "TESSERA_NUM_THREADS"), str(threads))
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--child", side]
    done = subprocess.run(command, env=os.environ | limits, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} ended with code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, usual in (("batch", 8), ("length", 256), ("width", 256), ("layers", 4),
                        ("threads", 2), ("warmup", 3), ("steps", 15), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--ours", action="store_true", help="without PyTorch")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    m = MODELS["train.py"].sized(B=args.batch, T=args.length, d=args.width, layers=args.layers,
                                 heads=max(4, args.width // 128))
    if args.child:
        print(json.dumps(measure(args.child, m, args)))
        return
    rounds: dict[str, list[dict[str, Any]]] = {"tessera": []} | ({} if args.ours else {"torch": []})
    for _ in range(args.rounds):
        for side, found in rounds.items():
            found.append(run_child(side, args.threads))
    best: dict[str, Any] = {side: max(found, key=lambda r: r["tokens_per_s"])
                            for side, found in rounds.items()}
    if not args.ours:
        best["ratio"] = round(best["tessera"]["tokens_per_s"] / best["torch"]["tokens_per_s"], 3)
    rates = {side: [r["tokens_per_s"] for r in found] for side, found in rounds.items()}
    record.write("train_speed", {**best, "rounds": rates,
                                 "setting": m.figures() | {"threads": args.threads}})


if __name__ == "__main__":
    main()
