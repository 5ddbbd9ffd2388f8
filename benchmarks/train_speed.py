"""Tokens per second of examples/train.py's step beside the same model in eager PyTorch.

    python benchmarks/train_speed.py --torch-python ~/torch/bin/python
    python benchmarks/train_speed.py                     # ours alone
    python benchmarks/train_speed.py --torch-python python --target cuda --dtype bf16 --width 1024

Both run in processes of their own with two threads, in turn (ours, torch, ours, torch, ...), so
that another program on the machine slows both. PyTorch's side is benchmarks/torch_baseline.py:
same model, batch and optimizer; ours clips the gradient's norm on top. The figure is the median
step of the best round of each; `ratio` is ours over torch's. The loss of each step is read, so a
GPU is waited for. Written to benchmarks/results: train_speed.json, of a GPU train_speed_cuda.json
(below $OUT when OUT is set).
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

from record import context, write

HERE = Path(__file__).resolve().parent


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Times `steps` whole training steps (data, forward, backward, AdamW) after `warmup` ones."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    import numpy as np
    import train

    import tessera as ts

    B, T, warmup, steps = args.batch, args.length, args.warmup, args.steps
    c = train.Config(d=args.width, layers=args.layers, heads=max(4, args.width // 128),
                     mlp=args.mlp, T=T, B=B, dtype=args.dtype, target=args.target)
    run, model, rng = train.new_run(c), train.Model(c), np.random.default_rng(0)
    times_ms = []
    loss = 0.0
    for _ in range(warmup + steps):
        start = time.perf_counter()
        tokens = rng.integers(0, 256, (B, T + 1))
        loss, _ = model.advance(run, (tokens[:, :-1], tokens[:, 1:]), 3e-4)
        times_ms.append((time.perf_counter() - start) * 1e3)
    median_ms = statistics.median(times_ms[warmup:])
    return {
        "tokens_per_s": round(B * T / median_ms * 1e3, 1),
        "step_ms": round(median_ms, 2),
        "first_step_ms": round(times_ms[0], 1),
        "loss": round(loss, 4),
        "parameters": sum(p.size for p in ts.optim.named_params(run.params[0]).values()),
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
             "--warmup", str(args.warmup), "--steps", str(args.steps), "--width", str(args.width),
             "--layers", str(args.layers), "--dtype", args.dtype, "--target", args.target]
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
    setting = {"d": args.width, "layers": args.layers, "heads": max(4, args.width // 128),
               "mlp": args.mlp, "B": args.batch, "T": args.length, "dtype": args.dtype,
               "threads": args.threads}
    if args.target == "cuda":
        from tessera.runtime.device import device

        setting["device"] = device().name
    return best | {"rounds": rates, "setting": setting}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch-python", help="an interpreter that has PyTorch")
    parser.add_argument("--mlp", choices=("gelu", "swiglu"), default="gelu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args)))
        return
    name, figures = "train_speed", compare(args)
    if args.target == "cuda":
        name, figures = "train_speed_cuda", {**figures, "device": figures["setting"]["device"]}
    if folder := os.environ.get("OUT"):
        text = json.dumps({**context(), **figures}, indent=2)
        (Path(folder) / f"{name}.json").write_text(text + "\n")
        print(text)
    else:
        write(name, figures)


if __name__ == "__main__":
    main()
