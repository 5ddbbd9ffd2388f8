"""Programs of rows and elements as users write them, in turn with torch.compile.

    python benchmarks/user_programs.py [words of names]

Each is a few ops of the graph and the same in PyTorch: norms, pools, scans, gathers, positions,
moves and losses, of sizes that models have, odd ones too. Printed are torch.compile's time by ours,
microseconds of both, bytes of arguments and results a second, and both errors relative to PyTorch
in f64. Calls are timed as they are made, one behind the other, so a slow host shows. Writes
benchmarks/results/user_programs.json if all are measured. Needs torch and a GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import types
from collections.abc import Callable
from typing import Any

import gpu_timing
import record
import side_processes
import torch
import torch.nn.functional as F
from gpu_timing import AHEAD_CYCLES, as_torch, in_turn
from torch import autograd
from torch._higher_order_ops.associative_scan import associative_scan

import tessera as ts

CASES: dict[str, tuple[list[Any], Callable[..., Any], Callable[..., Any], bool]] = {}
CALLS, PROCESSES = 10, 14
f, b = "f32", "bf16"


def case(
    name: str,
    inputs: list[Any],
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    checked: bool = True,
) -> None:
    """inputs: (shape, type) of each, ("i", n) or ("u8", n) for integers below n.  checked: against
    f64."""
    CASES[name] = inputs, ours, theirs, checked


def pulled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The cotangents of operands; the last argument is the result's."""
    return lambda *xs: ts.vjp(fn, *xs[:-1])[1](xs[-1])


def pulled_by_torch(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(*xs: torch.Tensor) -> Any:
        given = [x.detach().requires_grad_() if x.is_floating_point() else x for x in xs[:-1]]
        return autograd.grad(fn(*given), [x for x in given if x.requires_grad], xs[-1])

    return run


def wide(x: torch.Tensor) -> torch.Tensor:
    """f32, or f64 where that is what is computed in."""
    return x if x.dtype == torch.float64 else x.float()


case(
    "bias gelu dropout",
    [((16384, 4096), b), ((4096,), b)],
    lambda x, w: ts.dropout(ts.gelu(x + w), 0.1),
    lambda x, w: F.dropout(F.gelu(x + w, approximate="tanh"), 0.1, True),
    False,
)
case(
    "residual layer norm, f32 stream",
    [((16384, 2048), f), ((16384, 2048), b), ((2048,), f), ((2048,), f)],
    lambda x, r, w, c: (lambda h: (h, ts.cast(ts.layernorm(h, w, c), "bf16")))(
        x + ts.cast(r, "f32")
    ),
    lambda x, r, w, c: (
        lambda h: (
            h,
            F.layer_norm(h, (2048,), w, c).to(
                torch.bfloat16 if h.dtype == torch.float32 else h.dtype
            ),
        )
    )(x + r.to(x.dtype)),
)
case(
    "residual rms norm, bf16",
    [((32768, 1024), b), ((32768, 1024), b), ((1024,), b)],
    lambda x, r, w: (lambda h: (h, ts.rmsnorm(h, w)))(x + r),
    lambda x, r, w: (lambda h: (h, F.rms_norm(h, (1024,), w, 1e-6)))(x + r),
)
case(
    "softmax, mask, temperature",
    [((8, 16, 512, 512), b), ((8, 1, 512, 512), "bool")],
    lambda x, m: ts.softmax(ts.where(m, x / 0.7, -ts.inf)),
    lambda x, m: torch.softmax((x / 0.7).masked_fill(~m, -float("inf")), -1),
)
case(
    "softmax, mask, gradient",
    [((8, 16, 512, 512), b), ((8, 1, 512, 512), "bool"), ((8, 16, 512, 512), b)],
    lambda x, m, d: ts.vjp(lambda x: ts.softmax(ts.where(m, x / 0.7, -ts.inf)), x)[1](d),
    lambda x, m, d: pulled_by_torch(
        lambda x: torch.softmax((x / 0.7).masked_fill(~m, -float("inf")), -1)
    )(x, d),
)
case(
    "log softmax + nll, gradient",
    [((8192, 8192), b), ((8192,), ("i", 8192))],
    lambda x, labels: ts.grad(lambda x: ts.nll_loss(ts.log_softmax(ts.cast(x, "f32")), labels))(x),
    lambda x, labels: pulled_by_torch(
        lambda x: F.nll_loss(F.log_softmax(wide(x), -1), labels.long()))(
        x, torch.ones((), device=x.device, dtype=wide(x).dtype)
    ),
)
case(
    "label smoothing",
    [((8192, 8192), b), ((8192,), ("i", 8192))],
    lambda x, labels: ts.cross_entropy(ts.cast(x, "f32"), labels, label_smoothing=0.1),
    lambda x, labels: F.cross_entropy(wide(x), labels.long(), label_smoothing=0.1),
)
case(
    "group norm",
    [((64, 256, 56, 56), b), ((256,), b), ((256,), b)],
    lambda x, w, c: ts.group_norm(x, 32, w, c),
    lambda x, w, c: F.group_norm(x, 32, w, c),
)
case(
    "group norm, gradient",
    [((64, 256, 56, 56), b), ((256,), b), ((256,), b), ((64, 256, 56, 56), b)],
    pulled(lambda x, w, c: ts.group_norm(x, 32, w, c)),
    pulled_by_torch(lambda x, w, c: F.group_norm(x, 32, w, c)),
)
case(
    "batch norm, first",
    [((64, 256, 56, 56), b), ((256,), f), ((256,), f)],
    lambda x, w, c: ts.batch_norm(x, w, c),
    lambda x, w, c: F.batch_norm(x, None, None, w, c, True),
)
case(
    "batch norm, last",
    [((64, 56, 56, 256), b), ((256,), f), ((256,), f)],
    lambda x, w, c: ts.batch_norm(x, w, c, axis=3),
    lambda x, w, c: F.batch_norm(x.permute(0, 3, 1, 2), None, None, w, c, True).permute(0, 2, 3, 1),
)
case(
    "batch norm relu, first, gradient",
    [((64, 128, 56, 56), b), ((128,), f), ((128,), f), ((64, 128, 56, 56), b)],
    pulled(lambda x, w, c: ts.relu(ts.batch_norm(x, w, c))),
    pulled_by_torch(lambda x, w, c: F.relu(F.batch_norm(x, None, None, w, c, True))),
)
case(
    "batch norm relu, last, gradient",
    [((64, 56, 56, 128), b), ((128,), f), ((128,), f), ((64, 56, 56, 128), b)],
    pulled(lambda x, w, c: ts.relu(ts.batch_norm(x, w, c, axis=3))),
    pulled_by_torch(
        lambda x, w, c: F.relu(
            F.batch_norm(x.permute(0, 3, 1, 2), None, None, w, c, True).permute(0, 2, 3, 1)
        )
    ),
)


def rotated(x: torch.Tensor) -> torch.Tensor:
    S, D = x.shape[-2:]
    wd = wide(x).dtype
    inv = 10000.0 ** (-2 * torch.arange(D // 2, device=x.device, dtype=wd) / D)
    a = torch.arange(S, device=x.device, dtype=wd)[:, None] * inv
    c, s = a.cos(), a.sin()
    p, q = x.to(wd).chunk(2, -1)
    return torch.cat((p * c - q * s, q * c + p * s), -1).to(x.dtype)


case("rope", [((8, 16, 2048, 128), b)], ts.rotary_embedding, rotated)
case(
    "rope of [B S H D]",
    [((8, 2048, 16, 128), b)],
    lambda x: ts.rotary_embedding(ts.transpose(x, (0, 2, 1, 3))),
    lambda x: rotated(x.transpose(1, 2)).contiguous(),
)
case("cumsum, axis 0", [((16384, 4096), f)], lambda x: ts.cumsum(x, axis=0), lambda x: x.cumsum(0))
case(
    "cumsum, axis -1", [((16384, 4096), f)], lambda x: ts.cumsum(x, axis=-1), lambda x: x.cumsum(-1)
)
case("argmax, axis 0", [((16384, 4096), f)], lambda x: ts.argmax(x, axis=0), lambda x: x.argmax(0))
case(
    "argmax, axis -1", [((16384, 4096), b)], lambda x: ts.argmax(x, axis=-1), lambda x: x.argmax(-1)
)
case(
    "variance, middle axis",
    [((64, 1024, 1024), b)],
    lambda x: ts.var(x, axis=1),
    lambda x: x.var(1, correction=0),
)
case(
    "softmax, middle axis",
    [((64, 512, 2048), b)],
    lambda x: ts.softmax(x, axis=1),
    lambda x: torch.softmax(x, 1),
)
case(
    "standardise columns",
    [((65536, 512), f)],
    lambda x: (x - ts.mean(x, axis=0)) / (ts.std(x, axis=0) + 1e-5),
    lambda x: (x - x.mean(0)) / (x.std(0, correction=0) + 1e-5),
)
case(
    "one hot",
    [((65536,), ("i", 1024))],
    lambda x: ts.one_hot(x, 1024),
    lambda x: F.one_hot(x.long(), 1024).float(),
)
case(
    "embedding, gradient",
    [((50304, 768), b), ((32768,), ("i", 50304)), ((32768, 768), b)],
    lambda t, k, d: ts.vjp(lambda t: ts.embedding(t, k), t)[1](d),
    lambda t, k, d: pulled_by_torch(lambda t: F.embedding(k.long(), t))(t, d),
)
case(
    "heads, transposed",
    [((8, 2048, 16, 128), b)],
    lambda x: ts.transpose(x, (0, 2, 1, 3)),
    lambda x: x.permute(0, 2, 1, 3).contiguous(),
)
case(
    "transpose 2 0 1",
    [((64, 1024, 1024), b)],
    lambda x: ts.transpose(x, (2, 0, 1)),
    lambda x: x.permute(2, 0, 1).contiguous(),
)
case(
    "transpose NCHW to NHWC",
    [((64, 256, 56, 56), b)],
    lambda x: ts.transpose(x, (0, 2, 3, 1)),
    lambda x: x.permute(0, 2, 3, 1).contiguous(),
)
case(
    "swiglu",
    [((16384, 8192), b)],
    lambda x: ts.silu(x[:, :4096]) * x[:, 4096:],
    lambda x: F.silu(x[:, :4096]) * x[:, 4096:],
)
case(
    "swiglu, gradient",
    [((16384, 4096), b), ((16384, 2048), b)],
    pulled(lambda x: ts.silu(x[:, :2048]) * x[:, 2048:]),
    pulled_by_torch(lambda x: F.silu(x[:, :2048]) * x[:, 2048:]),
)
case(
    "quantise rows to int8",
    [((16384, 4096), b)],
    lambda x: (lambda s: (ts.cast(ts.round(ts.cast(x, "f32") / s), "i8"), s))(
        ts.max(ts.abs(ts.cast(x, "f32")), axis=-1, keepdims=True) / 127
    ),
    lambda x: (
        lambda w: (lambda s: ((w / s).round().to(torch.int8), s))(
            w.abs().amax(-1, keepdim=True) / 127
        )
    )(wide(x)),
    False,
)
case(
    "L2 normalise, cosine",
    [((65536, 512), f), ((65536, 512), f)],
    lambda x, y: ts.sum(
        x / ts.norm(x, axis=-1, keepdims=True) * y / ts.norm(y, axis=-1, keepdims=True), axis=-1
    ),
    lambda x, y: (F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).sum(-1),
)
case(
    "huber, gradient",
    [((16384, 4096), f), ((16384, 4096), f)],
    lambda x, y: ts.grad(lambda x: ts.huber_loss(x, y))(x),
    lambda x, y: pulled_by_torch(lambda x: F.huber_loss(x, y))(
        x, torch.ones((), device=x.device, dtype=x.dtype)
    ),
    False,
)
case(
    "logsumexp, axis 0",
    [((16384, 4096), b)],
    lambda x: ts.logsumexp(x, axis=0),
    lambda x: torch.logsumexp(x, 0),
)
case(
    "roll and difference",
    [((16384, 4096), f)],
    lambda x: x - ts.roll(x, 1, axis=-1),
    lambda x: x - x.roll(1, -1),
)
case("top 50 of logits", [((64, 50304), b)], lambda x: ts.top_k(x, 50), lambda x: x.topk(50))
case(
    "pairwise distance",
    [((4096, 64), f), ((2048, 64), f)],
    lambda x, y: ts.sum(ts.abs(x[:, None, :] - y[None, :, :]), axis=-1),
    lambda x, y: (x[:, None, :] - y[None, :, :]).abs().sum(-1),
)
case(
    "layer norm of 768, f32, gradient",
    [((32768, 768), f), ((768,), f), ((768,), f), ((32768, 768), f)],
    pulled(ts.layernorm),
    pulled_by_torch(lambda x, w, c: F.layer_norm(x, (768,), w, c)),
)
case(
    "layer norm of 640",
    [((65536, 640), b), ((640,), b), ((640,), b)],
    ts.layernorm,
    lambda x, w, c: F.layer_norm(x, (640,), w, c),
)
case("softmax of 1000", [((65536, 1000), b)], ts.softmax, lambda x: torch.softmax(x, -1))
case("softmax of 257", [((262144, 257), b)], ts.softmax, lambda x: torch.softmax(x, -1))
case(
    "sum of axes 0 and 2",
    [((64, 256, 3136), b)],
    lambda x: ts.sum(ts.cast(x, "f32"), axis=(0, 2)),
    lambda x: x.sum((0, 2), dtype=wide(x).dtype),
)
case(
    "average pool 2d",
    [((64, 128, 112, 112), b)],
    lambda x: ts.avg_pool2d(x, 2),
    lambda x: F.avg_pool2d(x, 2),
)
case(
    "max pool 3 stride 2",
    [((64, 64, 112, 112), b)],
    lambda x: ts.max_pool2d(x, 3, stride=2, padding=1),
    lambda x: F.max_pool2d(x, 3, 2, 1),
)

case(
    "cummax, axis 0",
    [((16384, 4096), "bf16")],
    lambda x: ts.cummax(x, axis=0),
    lambda x: torch.cummax(x, 0)[0],
    False,
)
case(
    "cumsum, axis 1 of 3",
    [((64, 2048, 512), "bf16")],
    lambda x: ts.cumsum(x, axis=1),
    lambda x: x.cumsum(1),
)
case(
    "cumsum, many lines",
    [((64, 256, 8192), "f32")],
    lambda x: ts.cumsum(x, axis=1),
    lambda x: x.cumsum(1),
)
case(
    "recurrence",
    [((8, 2048, 4096), "f32"), ((8, 2048, 4096), "f32")],
    lambda a, b: ts.linear_recurrence(a * 0.1, b, axis=1),
    lambda a, b: associative_scan(
        lambda p, q: (p[0] * q[0], p[1] * q[0] + q[1]), (a * 0.1, b), dim=1
    )[1],
    False,
)
case(
    "logcumsumexp, axis 0",
    [((16384, 4096), "f32")],
    lambda x: ts.logcumsumexp(x, axis=0),
    lambda x: x.logcumsumexp(0),
)
case("softmax of 1001", [((65536, 1001), "bf16")], ts.softmax, lambda x: torch.softmax(x, -1))
case(
    "average pool, gradient",
    [((64, 128, 112, 112), "bf16"), ((64, 128, 56, 56), "bf16")],
    lambda x, d: ts.cast(ts.vjp(lambda x: ts.avg_pool2d(x, 2), x)[1](d), "bf16"),
    pulled_by_torch(lambda x: F.avg_pool2d(x, 2)),
)
case(
    "max pool 2, gradient",
    [((64, 64, 112, 112), "bf16"), ((64, 64, 56, 56), "bf16")],
    lambda x, d: ts.cast(ts.vjp(lambda x: ts.max_pool2d(x, 2), x)[1](d), "bf16"),
    pulled_by_torch(lambda x: F.max_pool2d(x, 2)),
    False,
)
case(
    "max pool 3 stride 2, gradient",
    [((64, 64, 112, 112), "bf16"), ((64, 64, 56, 56), "bf16")],
    lambda x, d: ts.cast(ts.vjp(lambda x: ts.max_pool2d(x, 3, 2, 1), x)[1](d), "bf16"),
    pulled_by_torch(lambda x: F.max_pool2d(x, 3, 2, 1)),
    False,
)
case(
    "pixel shuffle",
    [((16, 256, 128, 128), "bf16")],
    lambda x: ts.reshape(
        ts.transpose(ts.reshape(x, (16, 64, 2, 2, 128, 128)), (0, 1, 4, 2, 5, 3)),
        (16, 64, 256, 256),
    ),
    lambda x: F.pixel_shuffle(x, 2),
)
case(
    "layer norm of 513",
    [((131072, 513), "bf16"), ((513,), "bf16"), ((513,), "bf16")],
    ts.layernorm,
    lambda x, w, c: F.layer_norm(x, (513,), w, c),
)
case(
    "layer norm of 513, gradient",
    [((131072, 513), "bf16"), ((513,), "bf16"), ((513,), "bf16"), ((131072, 513), "bf16")],
    pulled(ts.layernorm),
    pulled_by_torch(lambda x, w, c: F.layer_norm(x, (513,), w, c)),
)
case(
    "loss of 50257, gradient",
    [((4096, 50257), "bf16"), ((4096,), ("i", 50257))],
    lambda x, k: ts.grad(lambda x: ts.cross_entropy(ts.cast(x, "f32"), k))(x),
    lambda x, k: pulled_by_torch(lambda x: F.cross_entropy(wide(x), k.long()))(
        x, torch.ones((), device=x.device, dtype=wide(x).dtype)
    ),
    False,
)
case("softmax of 4097", [((16384, 4097), "bf16")], ts.softmax, lambda x: torch.softmax(x, -1))
case(
    "add odd", [((16383, 4097), "bf16"), ((4097,), "bf16")], lambda x, w: x + w, lambda x, w: x + w
)
case(
    "norm of rows by hand",
    [((65536, 512), f)],
    lambda x: (x - ts.mean(x, axis=-1)[:, None]) / ts.sqrt(ts.var(x, axis=-1)[:, None] + 1e-5),
    lambda x: (x - x.mean(-1)[:, None]) / (x.var(-1, correction=0)[:, None] + 1e-5).sqrt(),
)
case(
    "instance norm by hand",
    [((64, 128, 56, 56), b)],
    lambda x: (x - ts.mean(x, axis=(2, 3), keepdims=True))
    / ts.sqrt(ts.var(x, axis=(2, 3), keepdims=True) + 1e-5),
    lambda x: (x - x.mean((2, 3), keepdim=True))
    / (x.var((2, 3), correction=0, keepdim=True) + 1e-5).sqrt(),
)
case(
    "global average pool",
    [((64, 512, 28, 28), b)],
    lambda x: ts.mean(x, axis=(2, 3)),
    lambda x: x.mean((2, 3)),
)
case("largest, axis 0", [((524288, 64), b)], lambda x: ts.max(x, axis=0), lambda x: x.amax(0))
case(
    "min max of columns",
    [((65536, 512), f)],
    lambda x: (x - ts.min(x, axis=0)) / (ts.max(x, axis=0) - ts.min(x, axis=0)),
    lambda x: (x - x.amin(0)) / (x.amax(0) - x.amin(0)),
)
case(
    "softmax, axis 0",
    [((16384, 4096), b)],
    lambda x: ts.softmax(x, axis=0),
    lambda x: torch.softmax(x, 0),
)
case(
    "masked mean of tokens",
    [((128, 512, 768), b), ((128, 512), "bool")],
    lambda x, m: (lambda w: ts.sum(x * w[:, :, None], axis=1) / ts.sum(w, axis=1)[:, None])(
        ts.cast(m, "f32")
    ),
    lambda x, m: (lambda w: (x * w[:, :, None]).sum(1) / w.sum(1)[:, None])(m.to(wide(x).dtype)),
)
case(
    "entropy of softmax",
    [((8192, 8192), b)],
    lambda x: -ts.sum(ts.softmax(x) * ts.log_softmax(x), axis=-1),
    lambda x: -(torch.softmax(x, -1) * torch.log_softmax(x, -1)).sum(-1),
    False,
)


def drawn(shape: tuple[int, ...], kind: Any, rng: torch.Generator) -> torch.Tensor:
    if kind == "bool":
        return torch.rand(shape, device="cuda", generator=rng) < 0.7
    if isinstance(kind, tuple):
        dtype = torch.uint8 if kind[0] == "u8" else torch.int32
        return torch.randint(0, kind[1], shape, device="cuda", dtype=dtype, generator=rng)
    x = torch.randn(shape, device="cuda", generator=rng)
    return x.bfloat16() if kind == "bf16" else x


def flat(v: Any) -> list[torch.Tensor]:
    if isinstance(v, (tuple, list)):
        return [w for u in v for w in flat(u)]
    return [as_torch(v)]


def distance(made: Any, exact: list[torch.Tensor]) -> float:
    return max(gpu_timing.distance(v, w) for v, w in zip(flat(made), exact, strict=True))


@functools.cache
def runs(name: str) -> tuple[list[torch.Tensor], Callable[[], Any], Callable[[], Any]]:
    """A program's inputs, and a call of either side."""
    inputs, ours, theirs, _ = CASES[name]
    rng = torch.Generator("cuda").manual_seed(1)
    xs = [drawn(shape, kind, rng) for shape, kind in inputs]
    given, run = [ts.from_dlpack(x) for x in xs], ts.jit(ours)
    # A function of its own, which the compiler has met with no other sizes.
    own = types.FunctionType(
        theirs.__code__.replace(),
        theirs.__globals__,
        "case",
        theirs.__defaults__,
        theirs.__closure__,
    )
    compiled = torch.compile(own, dynamic=False)
    return xs, lambda: run(*given), lambda: compiled(*xs)


def measure(name: str) -> dict[str, float]:
    _, _, theirs, checked = CASES[name]
    xs, run, compiled = runs(name)
    made, want, errors = run(), compiled(), {}
    if checked:
        exact = flat(theirs(*(x.double() if x.is_floating_point() else x for x in xs)))
        errors = {"error": distance(made, exact), "torch_error": distance(want, exact)}
        del exact
    moved = sum(v.numel() * v.element_size() for v in [*xs, *flat(made)])
    del made, want
    us = in_turn({"ours": run, "theirs": compiled}, CALLS, ahead_cycles=AHEAD_CYCLES)
    return {
        "ours_us": round(us["ours"], 1),
        "torch_us": round(us["theirs"], 1),
        "ratio": round(us["theirs"] / us["ours"], 3),
        "gb_s": round(moved / 1e3 / us["ours"]),
        **{side: float(f"{e:.2g}") for side, e in errors.items()},
    }


def prepared(name: str) -> tuple[str]:
    for run in runs(name)[1:]:
        run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return (name,)


def main(script: str, file: str, description: str | None) -> None:
    """Measures the cases of a script whose name is given, or those of some words."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("words", nargs="*")
    side_processes.flag(parser)
    given = parser.parse_args()
    if given.work is not None:
        return side_processes.work(given.work, prepared, measure)
    names = [[n] for n in CASES if not given.words or any(w in n for w in given.words)]
    programs = {}
    for (name,), found in side_processes.results(script, names, PROCESSES):
        programs[name] = found
        print(f"{found['ratio']:6.3f}  {name}  {json.dumps(found)}", flush=True)
    ratios = [found["ratio"] for found in programs.values()]
    if not given.words:
        record.write(file, {"device": torch.cuda.get_device_name(), "programs": programs,
                            "geometric_mean": round(statistics.geometric_mean(ratios), 3),
                            "least": min(ratios)}, shown=False)
    return None


if __name__ == "__main__":
    main(__file__, "user_programs", __doc__)
