"""Tokens per second of examples/train.py's step beside the same model in eager PyTorch.

    python benchmarks/train_speed.py --torch-python ~/torch/bin/python
    python benchmarks/train_speed.py                     # ours alone

Both run in processes of their own with two threads, in turn (ours, torch, ours, torch, ...), so
that another program on the machine slows both. PyTorch's side is benchmarks/torch_baseline.py:
same model, batch and optimizer; ours clips the gradient's norm on top. The figure is the median
step of the best round of each; `ratio` is ours over torch's. Written to benchmarks/results.
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
from pathlib import Path
from typing import Any

from record import write

HERE = Path(__file__).resolve().parent


def measure(mlp: str, B: int, T: int, warmup: int, steps: int) -> dict[str, Any]:
    """Times `steps` whole training steps (data, forward, backward, AdamW) after `warmup` ones."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    import numpy as np
    import train

    import tessera as ts

    c = train.Config(d=256, layers=4, heads=4, mlp=mlp, T=T, B=B)
    run, model, rng = train.new_run(c), train.Model(c), np.random.default_rng(0)
    times_ms = []
    loss = 0.0
    for _ in range(warmup + steps):
        start = time.perf_counter()
        tokens = rng.integers(0, 256, (B, T + 1))
        run.params, run.state, value, _ = model.step(
            run.params, run.state, tokens[:, :-1], tokens[:, 1:], 3e-4)
        loss = float(value)
        times_ms.append((time.perf_counter() - start) * 1e3)
    median_ms = statistics.median(times_ms[warmup:])
    return {
        "tokens_per_s": round(B * T / median_ms * 1e3, 1),
        "step_ms": round(median_ms, 2),
        "first_step_ms": round(times_ms[0], 1),
        "loss": round(loss, 4),
        "parameters": sum(p.size for p in ts.optim.named_params(run.params).values()),
        "versions": {"tessera": ts.__version__, "numpy": np.__version__,
                     "python": platform.python_version()},
    }


def run_child(command: list[str], threads: int) -> dict[str, Any]:
    """The JSON that a child process prints last. Its error goes to our stderr and ends us."""
    limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS",
                            "TESSERA_NUM_THREADS"), str(threads))
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, env=os.environ | limits | {"PYTHONPATH": path},
                          stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} ended with code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(args: argparse.Namespace) -> dict[str, Any]:
    sizes = ["--mlp", args.mlp, "--batch", str(args.batch), "--length", str(args.length),
             "--warmup", str(args.warmup), "--steps", str(args.steps)]
    commands = {"tessera": [sys.executable, str(Path(__file__).resolve()), "--child", *sizes]}
    if args.torch_python:
        commands["torch"] = [args.torch_python, str(HERE / "torch_baseline.py"), *sizes,
                             "--threads", str(args.threads)]
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for _ in range(args.rounds):
        for name, command in commands.items():
            rounds[name].append(run_child(command, args.threads))
    best: dict[str, Any] = {
        name: max(found, key=lambda r: r["tokens_per_s"]) for name, found in rounds.items()
    }
    rates = {name: [r["tokens_per_s"] for r in found] for name, found in rounds.items()}
    if "torch" in best:
        best["ratio"] = round(best["tessera"]["tokens_per_s"] / best["torch"]["tokens_per_s"], 3)
    setting = {"d": 256, "layers": 4, "heads": 4, "mlp": args.mlp, "B": args.batch,
               "T": args.length, "dtype": "f32", "threads": args.threads}
    return best | {"rounds": rates, "setting": setting}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch-python", help="an interpreter that has PyTorch")
    parser.add_argument("--mlp", choices=("gelu", "swiglu"), default="gelu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.mlp, args.batch, args.length, args.warmup, args.steps)))
    else:
        write("train_speed", compare(args))


if __name__ == "__main__":
    main()
