"""One function object, from research to production: on the host, on a GPU, on ranks, as a file.

    python tests/mesh/one_function.py                    # on the host and as a file
    TESSERA_DEVICE=cuda mpirun -n 2 python tests/mesh/one_function.py    # on GPUs, each its own

Every path calls `predict`, the same object; each result is compared with NumPy in f64.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tessera as ts

BATCH, WIDTH, CLASSES = 16, 64, 24


@ts.jit
def predict(params, x):
    """Of rows of x the probabilities of classes: a layer, a norm and a head."""
    h = ts.gelu(x @ params["w"] + params["b"])
    h = (h - ts.mean(h, axis=-1, keepdims=True)) * ts.rsqrt(
        ts.var(h, axis=-1, keepdims=True) + 1e-5)
    return ts.softmax(h @ params["head"])


def arguments() -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(9)
    shapes = {"w": (WIDTH, WIDTH), "b": (WIDTH,), "head": (WIDTH, CLASSES)}
    params = {n: (rng.standard_normal(s) / 8).astype(np.float32) for n, s in shapes.items()}
    return params, rng.standard_normal((BATCH, WIDTH)).astype(np.float32)


def wanted() -> np.ndarray:
    """In f64, with gelu by its tanh."""
    params, x = arguments()
    p = {n: a.astype(np.float64) for n, a in params.items()}
    h = x.astype(np.float64) @ p["w"] + p["b"]
    h = h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3))) / 2
    h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-5)
    e = np.exp(h @ p["head"])
    return e / e.sum(-1, keepdims=True)


# --- the paths: each gives the result as an array, and where it lay -------------------------------
def on_numpy() -> tuple[np.ndarray, str]:
    y = predict(*arguments())
    return y.numpy(), y.device


def on_gpu() -> tuple[np.ndarray, str]:
    y = predict(*ts.to(arguments(), "cuda"))
    return y.numpy(), y.device


def on_ranks() -> tuple[np.ndarray, str]:
    """Rows on the ranks, each on its own device; parameters on all."""
    params, x = arguments()
    ranks = ts.dist.world_size()
    kind = "cuda" if ts.config.device.startswith("cuda") else "cpu"
    mesh = ts.dist.mesh([f"{kind}:{r}" for r in range(ranks)], axes="dp")
    rows, same = ts.ShardSpec(("row",), ("dp",)), ts.ShardSpec(replicate=True)
    y = predict({n: ts.dist.distribute(a, same, mesh=mesh) for n, a in params.items()},
                ts.dist.distribute(x, rows, mesh=mesh))
    return y.numpy(), f"{ranks} x {kind}"


def as_file(device: str = "cpu") -> tuple[np.ndarray, str]:
    """Written, read, called where the arguments lie."""
    given = arguments()
    with tempfile.TemporaryDirectory() as folder:
        loaded = ts.load(ts.export(predict, Path(folder) / "predict.tsf", *given))
    params, x = ts.to(({n: ts.tensor(a) for n, a in given[0].items()}, ts.tensor(given[1])), device)
    y = loaded(params, x)
    return y.numpy(), y.device


PATHS: dict[str, Callable[..., Any]] = {
    "numpy": on_numpy, "gpu": on_gpu, "ranks": on_ranks, "file": as_file}


def run(path: str, *args: str) -> str:
    """Compares one path with f64 and says where its result lay. Raises AssertionError."""
    made, where = PATHS[path](*args)
    np.testing.assert_allclose(made, wanted(), rtol=1e-4, atol=1e-6)
    return f"{path} on {where}: equal to NumPy"


if __name__ == "__main__":
    flags = sys.argv[1:]
    said = run("ranks") if ts.dist.world_size() > 1 else f"{run('numpy')}\n{run('file')}"
    print(said)
    if len(flags) > 1:  # as tests/mesh/launch.py calls it
        (Path(flags[1]) / str(ts.dist.rank())).write_text(said)
