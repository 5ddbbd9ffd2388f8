"""A training step of GPT-2 on a GPU, written in ops of ts: milliseconds, tokens per second, memory.

    python benchmarks/gpt2_step.py                    # 124M: 12 layers, d 768, B 32, T 1024, bf16
    python benchmarks/gpt2_step.py --layers 2 --B 4
    python benchmarks/gpt2_step.py --profile          # and one more step, launch by launch

Weights and moments are f32, matmuls bf16 with f32 sums. A step ends when its loss is on the host;
host_ms is what its call takes until it returns.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import record

import tessera as ts
from tessera.runtime.device import device

BF16 = "bf16 @accum(f32)"


def linear(x: Any, p: dict, name: str) -> Any:
    return ts.cast(x, BF16) @ ts.cast(p[name], BF16) + ts.cast(p[name + "_b"], BF16)


def layer(x: Any, p: dict, heads: int) -> Any:
    B, T, d = x.shape
    h = linear(ts.layernorm(x, p["g1"], p["b1"]), p, "qkv")
    q, k, v = (ts.transpose(ts.reshape(t, (B, T, heads, d // heads)), (0, 2, 1, 3))
               for t in ts.split(h, 3, axis=-1))
    y = ts.transpose(ts.attention(q, k, v, causal=True), (0, 2, 1, 3))
    x = x + ts.cast(linear(ts.reshape(y, (B, T, d)), p, "out"), "f32")
    h = ts.gelu(linear(ts.layernorm(x, p["g2"], p["b2"]), p, "up"))
    return x + ts.cast(linear(h, p, "down"), "f32")


def loss(params: dict, tokens: Any, targets: Any, heads: int) -> Any:
    x = ts.embedding(params["table"], tokens) + params["positions"]
    for p in params["layers"]:
        x = layer(x, p, heads)
    x = ts.layernorm(x, params["g"], params["b"])
    logits = ts.cast(x, BF16) @ ts.transpose(ts.cast(params["table"], BF16))
    return ts.cross_entropy(ts.cast(logits, "f32"), targets)


def parameters(vocabulary: int, T: int, d: int, layers: int, rng: np.random.Generator) -> dict:
    def weight(*shape: int) -> Any:
        return ts.param(ts.tensor((0.02 * rng.standard_normal(shape)).astype(np.float32)))

    def one(*names: str) -> dict:
        return {n: ts.param(ts.ones((d,)) if n[0] == "g" else ts.zeros((d,))) for n in names}

    sizes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    blocks = [{**one("g1", "b1", "g2", "b2"),
               **{n: weight(*s) for n, s in sizes.items()},
               **{n + "_b": ts.param(ts.zeros((s[1],))) for n, s in sizes.items()}}
              for _ in range(layers)]
    return {"table": weight(vocabulary, d), "positions": weight(T, d), "layers": blocks,
            **one("g", "b")}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    for name, value in (("layers", 12), ("d", 768), ("heads", 12), ("B", 32), ("T", 1024),
                        ("vocabulary", 50304), ("steps", 10)):
        flags.add_argument(f"--{name}", type=int, default=value)
    flags.add_argument("--profile", action="store_true")
    a = flags.parse_args()
    rng = np.random.default_rng(0)
    params = parameters(a.vocabulary, a.T, a.d, a.layers, rng)
    optimizer = ts.optim.AdamW()
    tokens = rng.integers(0, a.vocabulary, (a.B, a.T + 1)).astype(np.int32)

    @ts.jit
    def step(params: dict, state: Any, x: Any, y: Any) -> Any:
        value, grads = ts.value_and_grad(lambda p: loss(p, x, y, a.heads))(params)
        params, state = optimizer.update(params, grads, state, 3e-4)
        return value, params, state

    state = optimizer.init(params)
    x, y = ts.tensor(tokens[:, :-1].copy()), ts.tensor(tokens[:, 1:].copy())
    params, state, x, y = (ts.to(t, "cuda") for t in (params, state, x, y))
    begin = time.perf_counter()
    value, params, state = step(params, state, x, y)
    first = float(value.item())
    cold = time.perf_counter() - begin
    times, host = [], []
    for _ in range(a.steps):
        begin = time.perf_counter()
        value, params, state = step(params, state, x, y)
        host.append(time.perf_counter() - begin)
        last = float(value.item())
        times.append(time.perf_counter() - begin)
    ms = 1e3 * float(np.median(times))
    if a.profile:
        with ts.debug.profile() as p:
            value, params, state = step(params, state, x, y)
        print(p.launches.table())
        record.write("gpt2_profile", {"device": device().name, "model": vars(a), "ms": ms,
                                      **p.launches.figures()}, shown=False)
    schedule = step.inspect_ir("schedule")
    record.write("gpt2_step", {
        "device": device().name,
        "model": vars(a), "ms": ms, "host_ms": 1e3 * float(np.median(host)),
        "tokens_per_second": 1e3 * a.B * a.T / ms,
        "first_call_s": cold, "loss_first": first, "loss_last": last,
        "launches": int(schedule.partition("launches: ")[2].partition(":")[0])})


if __name__ == "__main__":
    main()
