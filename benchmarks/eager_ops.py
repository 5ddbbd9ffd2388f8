"""Ops outside of `ts.jit`, beside eager PyTorch's: what each takes the host, and until the GPU has
done it.

    python benchmarks/eager_ops.py                # on a GPU, with torch
    python benchmarks/eager_ops.py --cpu          # on the host, with torch where there is one
    python benchmarks/eager_ops.py --simulate     # host time alone, on GPUs that do nothing

host: microseconds of a call, the least mean of rounds of calls, the GPU idle when a round begins.
done: of a call in a long row of them, behind which the GPU is waited for. The rows of both
libraries take turns. Writes benchmarks/results/eager_ops.json (eager_ops_cpu.json), in $OUT when
that is set. On the host torch has one thread.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import record

import tessera as ts
from tessera.runtime.device import device

Call = Callable[[], Any]
CALLS, ROUNDS = 100, 7


def operands(rng: np.random.Generator, tensor: Callable, large: int) -> dict[str, Any]:
    """Small ones, whose kernels take no time to speak of, and a matrix of so many rows."""
    def drawn(*shape: int, dtype: str = "f32") -> Any:
        return tensor(rng.standard_normal(shape).astype(np.float32), dtype)

    return {"x": drawn(64, 64), "w": drawn(64, 64), "b": drawn(64), "v": drawn(16, 64, 64),
            "h": drawn(64, 64, dtype="bf16"), "u": drawn(64, 64, dtype="bf16"),
            **{n: drawn(2, 4, 64, 64, dtype="bf16") for n in ("q", "k", "s")},
            "at": tensor(np.arange(8), "int64"), "labels": tensor(np.arange(64), "int64"),
            "W": drawn(large, large, dtype="bf16"), "X": drawn(16, large, dtype="bf16")}


def ours(o: dict[str, Any]) -> dict[str, Call]:
    x, w, b, v, h, u = (o[n] for n in "xwbvhu")
    q, k, s = (o[n] for n in "qks")

    def add_in_place() -> Any:
        y = x
        y += w
        return y

    def write_row() -> None:
        o["z"][3] = b

    o["z"] = x.copy()
    return {
        "x + w": lambda: x + w, "x * 2.0": lambda: x * 2.0, "2.0 - x": lambda: 2.0 - x,
        "x + b": lambda: x + b, "x > 0": lambda: x > 0, "gelu": lambda: ts.gelu(x),
        "where": lambda: ts.where(x > 0.0, x, w), "cast": lambda: x.astype("bf16"),
        "x @ w": lambda: h @ u, "x @ w.mT": lambda: h @ u.mT,
        "16 rows @ w.mT of 8192 x 8192": lambda: o["X"] @ o["W"].mT,
        "transpose": lambda: ts.transpose(v, (0, 2, 1)), "reshape": lambda: x.reshape(32, 128),
        "x[3]": lambda: x[3], "x[2:10]": lambda: x[2:10], "x[:, 3:9]": lambda: x[:, 3:9],
        "x[::2]": lambda: x[::2], "x[None]": lambda: x[None], "x[at]": lambda: x[o["at"]],
        "sum": lambda: ts.sum(x), "sum of rows": lambda: ts.sum(x, axis=-1),
        "softmax": lambda: ts.softmax(x, axis=-1), "rmsnorm": lambda: ts.rmsnorm(x, b),
        "cross entropy": lambda: ts.cross_entropy(x, o["labels"]),
        "attention": lambda: ts.attention(q, k, s, causal=True),
        "concatenate": lambda: ts.concatenate([x, w], axis=0), "stack": lambda: ts.stack([x, w]),
        "dropout": lambda: ts.dropout(x, 0.1), "x += w": add_in_place, "z[3] = b": write_row,
        "item": lambda: float(o["total"]), "copy": lambda: x.copy()}


def theirs(o: dict[str, Any]) -> dict[str, Call]:
    import torch
    f = torch.nn.functional
    x, w, b, v, h, u = (o[n] for n in "xwbvhu")
    q, k, s = (o[n] for n in "qks")

    def add_in_place() -> Any:
        x.add_(w)

    def write_row() -> None:
        o["z"][3] = b

    o["z"] = x.clone()
    return {
        "x + w": lambda: x + w, "x * 2.0": lambda: x * 2.0, "2.0 - x": lambda: 2.0 - x,
        "x + b": lambda: x + b, "x > 0": lambda: x > 0, "gelu": lambda: f.gelu(x),
        "where": lambda: torch.where(x > 0.0, x, w), "cast": lambda: x.to(torch.bfloat16),
        "x @ w": lambda: h @ u, "x @ w.mT": lambda: h @ u.mT,
        "16 rows @ w.mT of 8192 x 8192": lambda: o["X"] @ o["W"].mT,
        "transpose": lambda: v.transpose(1, 2).contiguous(), "reshape": lambda: x.reshape(32, 128),
        "x[3]": lambda: x[3], "x[2:10]": lambda: x[2:10], "x[:, 3:9]": lambda: x[:, 3:9],
        "x[::2]": lambda: x[::2], "x[None]": lambda: x[None], "x[at]": lambda: x[o["at"]],
        "sum": lambda: x.sum(), "sum of rows": lambda: x.sum(-1),
        "softmax": lambda: f.softmax(x, -1), "rmsnorm": lambda: f.rms_norm(x, (64,), b),
        "cross entropy": lambda: f.cross_entropy(x, o["labels"]),
        "attention": lambda: f.scaled_dot_product_attention(q, k, s, is_causal=True),
        "concatenate": lambda: torch.cat([x, w]), "stack": lambda: torch.stack([x, w]),
        "dropout": lambda: f.dropout(x, 0.1), "x += w": add_in_place, "z[3] = b": write_row,
        "item": lambda: float(o["total"]), "copy": lambda: x.clone()}


# --- programs -----------------------------------------------------------------------------------
SIZES = [256, 512, 1024, 512, 16]  # rows, widths of the MLP


def mlp_ours(rng: np.random.Generator) -> dict[str, Call]:
    rows, *widths = SIZES
    there = lambda a, d="f32": ts.tensor(a, d).to("cuda")  # noqa: E731
    params = [{"w": ts.param(there(rng.standard_normal((n, m)).astype(np.float32) * n**-0.5)),
               "b": ts.param(there(np.zeros(m, np.float32)))}
              for n, m in zip(widths, widths[1:], strict=False)]
    x = there(rng.standard_normal((rows, widths[0])).astype(np.float32))
    labels = there(rng.integers(0, widths[-1], rows), "int64")

    def loss(params: Any, x: Any, labels: Any) -> Any:
        for i, p in enumerate(params):
            x = x @ p["w"] + p["b"]
            x = ts.gelu(x) if i < len(params) - 1 else x
        return ts.cross_entropy(x, labels)

    gradient, optimizer = ts.value_and_grad(loss), ts.optim.SGD()
    state = [params, optimizer.init(params)]

    def step() -> Any:
        value, grads = gradient(state[0], x, labels)
        state[:] = optimizer.update(state[0], grads, state[1], 1e-2)
        return value

    def plain() -> Any:
        value, grads = gradient(params, x, labels)
        return value, [{n: p[n] - 1e-2 * g[n] for n in p}
                       for p, g in zip(params, grads, strict=True)]

    return {"MLP forward": lambda: loss(params, x, labels), "MLP step": step,
            "MLP gradient, p - lr g": plain}


def mlp_theirs(rng: np.random.Generator) -> dict[str, Call]:
    import torch
    rows, *widths = SIZES
    layers: list[Any] = []
    for n, m in zip(widths, widths[1:], strict=False):
        layers += [torch.nn.Linear(n, m), torch.nn.GELU()]
    model = torch.nn.Sequential(*layers[:-1]).cuda()
    x = torch.randn(rows, widths[0], device="cuda")
    labels = torch.randint(0, widths[-1], (rows,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def loss() -> Any:
        return torch.nn.functional.cross_entropy(model(x), labels)

    def step() -> Any:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        return value

    def plain() -> Any:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value, [p.detach() - 1e-2 * p.grad for p in model.parameters()]

    def forward() -> Any:
        with torch.no_grad():
            return loss()

    return {"MLP forward": forward, "MLP step": step, "MLP gradient, p - lr g": plain}


EXTENTS = [2, 256, 8, 64]  # B, T, H, D


def block_ours(rng: np.random.Generator) -> dict[str, Call]:
    B, T, H, D = EXTENTS
    C = H * D

    def drawn(*shape: int) -> Any:
        return ts.tensor(rng.standard_normal(shape).astype(np.float32) * 0.02, "bf16").to("cuda")

    p = {n: drawn(*s) for n, s in {"qkv": (3 * C, C), "out": (C, C), "up": (4 * C, C),
                                   "down": (C, 4 * C), "g1": (C,), "b1": (C,), "g2": (C,),
                                   "b2": (C,)}.items()}
    x = drawn(B, T, C)

    def block() -> Any:
        h = ts.layernorm(x, p["g1"], p["b1"]) @ p["qkv"].mT
        q, k, v = (a.reshape(B, T, H, D).transpose((0, 2, 1, 3)) for a in ts.split(h, 3, axis=-1))
        a = ts.attention(q, k, v, causal=True).transpose((0, 2, 1, 3)).reshape(B, T, C)
        y = x + a @ p["out"].mT
        h = ts.gelu(ts.layernorm(y, p["g2"], p["b2"]) @ p["up"].mT)
        return y + h @ p["down"].mT

    return {"GPT block": block}


def block_theirs(rng: np.random.Generator) -> dict[str, Call]:
    import torch
    B, T, H, D = EXTENTS
    f, C = torch.nn.functional, H * D

    def drawn(*shape: int) -> Any:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02

    p = {n: drawn(*s) for n, s in {"qkv": (3 * C, C), "out": (C, C), "up": (4 * C, C),
                                   "down": (C, 4 * C), "g1": (C,), "b1": (C,), "g2": (C,),
                                   "b2": (C,)}.items()}
    x = drawn(B, T, C)

    def block() -> Any:
        h = f.layer_norm(x, (C,), p["g1"], p["b1"]) @ p["qkv"].mT
        q, k, v = (a.reshape(B, T, H, D).transpose(1, 2) for a in h.split(C, -1))
        a = f.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        y = x + a.reshape(B, T, C) @ p["out"].mT
        h = f.gelu(f.layer_norm(y, (C,), p["g2"], p["b2"]) @ p["up"].mT)
        return y + h @ p["down"].mT

    return {"GPT block": block}


# --- measuring ----------------------------------------------------------------------------------
def first_calls(calls: dict[str, Call]) -> dict[str, float]:
    """Seconds until each has its first result."""
    found = {}
    for name, run in calls.items():
        begin = time.perf_counter()
        run()
        wait()
        found[name] = time.perf_counter() - begin
    return found


def wait() -> None:
    if not ON_HOST:
        device().synchronize()


ON_HOST: list[bool] = []  # not empty: nothing runs on a GPU


def microseconds(run: Call, calls: int) -> tuple[float, float]:
    """Of a call: on the host, and until all of them are done."""
    wait()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    host = time.perf_counter() - begin
    wait()
    return 1e6 * host / calls, 1e6 * (time.perf_counter() - begin) / calls


def measured(sides: dict[str, dict[str, Call]]) -> dict[str, dict[str, list[float]]]:
    """By row and side: host, done, and the seconds of the first call."""
    found: dict[str, dict[str, list[float]]] = {}
    for side, calls in sides.items():
        for name, first in first_calls(calls).items():
            found.setdefault(name, {})[side] = [1e9, 1e9, round(first, 3)]
    for name, row in found.items():
        for _ in range(ROUNDS):
            for side, best in row.items():
                run = sides[side][name]
                for _ in range(3):
                    run()
                host, done = microseconds(run, CALLS)
                best[:2] = min(best[0], round(host, 1)), min(best[1], round(done, 1))
        print(f"{name:30}" + "".join(f"  {side} {b[0]:8.1f} {b[1]:8.1f} ({b[2]:.2f} s)"
                                     for side, b in row.items()), flush=True)
    return found


def compared(simulated: bool, only: list[str] | None) -> dict[str, dict[str, list[float]]]:
    """What is measured, of both sides."""
    rng, large = np.random.default_rng(0), 256 if simulated else 8192
    mine = operands(rng, lambda x, d: ts.tensor(x, d).to("cuda"), large)
    mine["total"] = ts.sum(mine["x"])
    if simulated:  # whose memory takes longer to make than a GPU's
        SIZES[:], EXTENTS[:] = (16, 64, 64, 64, 16), (2, 16, 2, 32)
    sides = {"tessera": ours(mine) | mlp_ours(rng) | block_ours(rng)}
    if not simulated:
        import torch
        kinds = {"f32": torch.float32, "bf16": torch.bfloat16, "int64": torch.int64}
        other = operands(rng, lambda x, d: torch.as_tensor(x).to("cuda", kinds[d]), large)
        other["total"] = other["x"].sum()
        sides["torch"] = theirs(other) | mlp_theirs(rng) | block_theirs(rng)
    return measured({side: {n: c for n, c in calls.items() if only is None or n in only}
                     for side, calls in sides.items()})


def compared_on_host(only: list[str] | None) -> dict[str, dict[str, list[float]]]:
    """The rows of single ops."""
    ON_HOST.append(True)
    rng = np.random.default_rng(0)
    mine = operands(rng, ts.tensor, 64)
    mine["total"] = ts.sum(mine["x"])
    sides = {"tessera": ours(mine)}
    if importlib.util.find_spec("torch") is not None:
        import torch
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        kinds = {"f32": torch.float32, "bf16": torch.bfloat16, "int64": torch.int64}
        other = operands(rng, lambda x, d: torch.as_tensor(x).to(kinds[d]), 64)
        other["total"] = other["x"].sum()
        sides["torch"] = theirs(other)
    return measured({side: {n: c for n, c in calls.items() if only is None or n in only}
                     for side, calls in sides.items()})


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__,
                                    formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--simulate", action="store_true", help="GPUs that do nothing; no torch")
    flags.add_argument("--cpu", action="store_true", help="on the host")
    flags.add_argument("--only", nargs="+", help="these rows")
    a = flags.parse_args()
    if a.cpu:
        rows = compared_on_host(a.only)
        record.write("eager_ops_cpu", {"cpus": os.cpu_count(), "host_us, done_us, first_s": rows},
                     shown=False, indent=1)
        return
    if a.simulate:
        from simulated_gpus import simulated_gpus  # it stands on the tests
    with simulated_gpus() if a.simulate else nullcontext() as driver:
        if driver is not None:
            driver.launch = lambda *call: 0  # not even looked at
        rows = compared(a.simulate, a.only)
    if not a.simulate:
        record.write("eager_ops", {"device": device().name, "host_us, done_us, first_s": rows},
                     shown=False, indent=1)


if __name__ == "__main__":
    main()
