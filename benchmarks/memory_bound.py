"""What moves memory and little else, beside torch.compile on one GPU.

    python benchmarks/memory_bound.py [compile] [gpt2] [orders] [rows [LENGTH,... [CASE,...]]]

rows: softmax, norms and losses of rows of every length, forward and backward; see rows.py.
orders: sorts and the largest elements of such rows.
compile: only that, for rows and orders, so that a later call finds it done.
gpt2: what a GPT-2 step does beside its matmuls, one part at a time. Cross entropy with its
gradient, gelu and its gradient, layer norm's gradient, and the gradient of an embedding whose ids
are uniform, drawn by Zipf's law, or all equal: B 32, T 1024, d 768, 50304 tokens. Ours: the sum of
the launches' times by the profiler; torch's: events around calls. floor: the bytes that must move,
at 4.3 TB/s of an H200. Largest errors are against f64. Needs torch.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import record
import rows
import torch
import torch.nn.functional as F
from gpu_timing import as_torch, in_turn

import tessera as ts

M, V, D = 32768, 50304, 768
COPY = 4.3e6  # bytes in a microsecond, read and written
GIVEN = 2.0**-8  # half of bf16's last place, relative


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, device="cuda")


def ours(fn: Callable, *xs: torch.Tensor) -> tuple[Any, float, dict[str, float]]:
    f, given = ts.jit(fn), [ts.from_dlpack(x) for x in xs]
    out, totals, launches = f(*given), [], {}
    for _ in range(5):
        with ts.debug.profile() as p:
            out = f(*given)
        totals.append(p.launches.us)
        launches = {x["name"]: x["us"] for x in p.launches.figures()["launches"]}
    return out, statistics.median(totals), launches


def theirs(fn: Callable, *xs: torch.Tensor) -> float:
    compiled = torch.compile(fn)
    for _ in range(2):
        compiled(*xs)
    return in_turn({"theirs": lambda: compiled(*xs)}, 10)["theirs"]


def wide(x: Any) -> torch.Tensor:
    return as_torch(x).double()


def excess(got: torch.Tensor, want: torch.Tensor) -> float:
    """In roundings to bf16."""
    return float(((got - want).abs() / (GIVEN * want.abs() + 1e-30)).max())


def cross_entropy() -> Any:
    logits = normal(M, V, scale=2).bfloat16()
    labels = torch.randint(0, V, (M,), device="cuda", dtype=torch.int32)

    def mine(x: Any, labels: Any) -> Any:
        value, pull = ts.vjp(lambda x: ts.cross_entropy(ts.cast(x, "f32"), labels), x)
        return value, pull(ts.ones(()))

    def torchs(x: Any, labels: Any) -> Any:
        x = x.detach().requires_grad_()
        value = F.cross_entropy(x.float(), labels)
        return value, torch.autograd.grad(value, x)

    (_, dx), us, launches = ours(mine, logits, labels)
    some = torch.arange(0, M, 4001, device="cuda")
    x64 = logits[some].double().requires_grad_()
    F.cross_entropy(x64, labels[some].long(), reduction="sum").backward()
    error = excess(wide(dx)[some], x64.grad / M)
    yield "cross entropy", us, theirs(torchs, logits, labels.long()), 4 * M * V, error, launches


def activation() -> Any:
    x, dy = (normal(M, 4 * D, scale=2).bfloat16() for _ in range(2))

    def mine(x: Any, dy: Any) -> Any:
        g = ts.vjp(ts.gelu, x)[1](dy)
        return g, ts.sum(ts.cast(g, "f32"), axis=0)

    def torchs(x: Any, dy: Any) -> Any:
        g = torch.ops.aten.gelu_backward(dy, x, approximate="tanh")
        return g, g.float().sum(0)

    (dx, _), us, launches = ours(mine, x, dy)
    a = x[:4096].double().requires_grad_()
    F.gelu(a, approximate="tanh").backward(dy[:4096].double())
    small = 2.0**-20 * dy[:4096].double().abs()  # where the derivative itself cancels
    error = float(((wide(dx)[:4096] - a.grad).abs() / (GIVEN * a.grad.abs() + small)).max())
    yield ("gelu's gradient and bias's", us, theirs(torchs, x, dy), 6 * M * 4 * D, error, launches)
    y, us, launches = ours(ts.gelu, x)
    error = excess(wide(y)[:4096], F.gelu(x[:4096].double(), approximate="tanh"))
    yield ("gelu", us, theirs(lambda x: F.gelu(x, approximate="tanh"), x), 4 * M * 4 * D, error,
           launches)


def layernorm() -> Any:
    x, r, dy, w, b = normal(M, D), normal(M, D), normal(M, D).bfloat16(), normal(D), normal(D)

    def mine(x: Any, w: Any, b: Any, dy: Any, r: Any) -> Any:
        gx, gw, gb = ts.vjp(ts.layernorm, x, w, b)[1](ts.cast(dy, "f32"))
        h = ts.cast(gx + r, "bf16")
        return gx + r, h, gw, gb, ts.sum(ts.cast(h, "f32"), axis=0)

    def torchs(x: Any, w: Any, b: Any, dy: Any, r: Any) -> Any:
        x, w, b = (v.detach().requires_grad_() for v in (x, w, b))
        gx, gw, gb = torch.autograd.grad(F.layer_norm(x, (D,), w, b), (x, w, b), dy.float())
        h = (gx + r).bfloat16()
        return gx + r, h, gw, gb, h.float().sum(0)

    given = (x, w, b, dy, r)
    out, us, launches = ours(mine, *given)
    a = [v.double().requires_grad_() for v in (x, w, b)]
    F.layer_norm(a[0], (D,), a[1], a[2]).backward(dy.double())
    error = max(float((wide(y) - z.grad).abs().max() / z.grad.abs().max())
                for y, z in zip((out[2], out[3]), a[1:], strict=True))
    yield "layer norm's gradient", us, theirs(torchs, *given), 16 * M * D, error, launches


def embedding() -> Any:
    rng, g = np.random.default_rng(0), normal(M, D)
    drawn = {"uniform": rng.integers(0, V, M), "Zipf": np.minimum(rng.zipf(1.2, M) - 1, V - 1),
             "equal": np.full(M, 7)}
    for name, ids in drawn.items():
        i = torch.tensor(ids.astype(np.int32), device="cuda")
        out, us, launches = ours(lambda g, i: ts.segment_sum(g, i, V), g, i)
        want = torch.zeros(V, D, device="cuda", dtype=torch.float64)
        want.index_add_(0, i.long(), g.double())
        error = float((wide(out) - want).abs().max() / want.abs().max())

        def torchs(g: Any, i: Any) -> Any:
            return torch.ops.aten.embedding_dense_backward(g, i, V, -1, False)

        yield (f"embedding's gradient, ids {name}", us, theirs(torchs, g, i.long()),
               4 * (M + V) * D, error, launches)


def gpt2() -> Iterator[tuple[str, dict[str, Any]]]:
    for part in (cross_entropy, activation, layernorm, embedding):
        for name, us, torchs, moved, error, launches in part():
            yield name, {"us": round(us, 1), "torch us": round(torchs, 1),
                         "floor us": round(moved / COPY, 1), "error": float(f"{error:.2g}"),
                         "launches": launches}
        torch.cuda.empty_cache()


def main() -> None:
    torch.manual_seed(0)
    asked = sys.argv[1:] or ["gpt2", "rows"]
    alone = "compile" in asked
    parts: dict[str, Any] = {"memory_bound": gpt2()} if "gpt2" in asked and not alone else {}
    if "rows" in asked:
        parts["rows"] = rows.measured(asked[asked.index("rows") + 1:], alone)
    if "orders" in asked:
        parts["orders"] = rows.measured(rows.orders(), alone)
    for file, part in parts.items():
        figures: dict[str, Any] = {"device": torch.cuda.get_device_name()}
        for name, found in part:
            figures[name] = found
            print(name, found, flush=True)
        if not alone:
            record.write(file, figures, shown=False)


if __name__ == "__main__":
    main()
