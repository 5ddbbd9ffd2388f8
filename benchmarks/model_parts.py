"""What models do beside their matmuls, as users write it, in turn with torch.compile.

    python benchmarks/model_parts.py [words of names]

More programs like those of `user_programs.py`, which measures them: positions, quantisers, routers,
samplers, losses, segments, images and updates of optimizers. Both compilers run in several
processes, which then measure one after another. Writes benchmarks/results/model_parts.json if all
are measured. Needs torch and a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from user_programs import CASES, case, main, pulled, pulled_by_torch, wide

import tessera as ts

CASES.clear()
f, b = "f32", "bf16"
one = lambda x: torch.ones((), device=x.device, dtype=wide(x).dtype)  # noqa: E731


def slope(fn: Any) -> Any:
    """Of a loss, by its first argument."""
    return lambda x, *more: pulled_by_torch(lambda x, *_: fn(x, *more))(x, one(x))


# --- positions ----------------------------------------------------------------------------------
def interleaved(x: Any, c: Any, s: Any, stack: Any, cast: Any) -> Any:
    p, q = cast(x[..., ::2]), cast(x[..., 1::2])
    return stack(p * c - q * s, p * s + q * c)


case(
    "rope, neighbours",
    [((8, 16, 2048, 128), b), ((2048, 64), f), ((2048, 64), f)],
    lambda x, c, s: interleaved(
        x, c, s, lambda a, b: ts.cast(ts.reshape(ts.stack([a, b], axis=-1), x.shape), "bf16"),
        lambda v: ts.cast(v, "f32")),
    lambda x, c, s: interleaved(
        x, c, s, lambda a, b: torch.stack((a, b), -1).flatten(-2).to(x.dtype), wide),
)


def by_halves(x: Any, c: Any, s: Any, join: Any) -> Any:
    h = x.shape[-1] // 2
    return x * c + join((-x[..., h:], x[..., :h])) * s


case(
    "rope of q and k, tables",
    [((4, 2048, 32, 128), b), ((4, 2048, 8, 128), b), ((2048, 1, 128), b), ((2048, 1, 128), b)],
    lambda q, k, c, s: tuple(by_halves(v, c, s, lambda p: ts.concatenate(p, axis=-1))
                             for v in (q, k)),
    lambda q, k, c, s: tuple(by_halves(v, c, s, lambda p: torch.cat(p, -1)) for v in (q, k)),
)
case(
    "norm of q and rope",
    [((4, 2048, 32, 128), b), ((128,), b), ((2048, 1, 128), b), ((2048, 1, 128), b)],
    lambda q, w, c, s: by_halves(ts.rmsnorm(q, w), c, s, lambda p: ts.concatenate(p, axis=-1)),
    lambda q, w, c, s: by_halves(F.rms_norm(q, (128,), w, 1e-6), c, s, lambda p: torch.cat(p, -1)),
)
case(
    "rope of q and k, gradient",
    [((4, 2048, 32, 128), b), ((2048, 1, 128), b), ((2048, 1, 128), b), ((4, 2048, 32, 128), b)],
    lambda q, c, s, d: ts.vjp(lambda q: by_halves(q, c, s, lambda p: ts.concatenate(p, axis=-1)),
                              q)[1](d),
    lambda q, c, s, d: pulled_by_torch(lambda q: by_halves(q, c, s, lambda p: torch.cat(p, -1)))(
        q, d),
)
case(
    "relative position bias and softmax",
    [((64, 16, 196, 196), b), ((729, 16), b), ((38416,), ("i", 729))],
    lambda x, t, k: ts.softmax(x + ts.transpose(ts.reshape(t[k], (196, 196, 16)), (2, 0, 1))),
    lambda x, t, k: torch.softmax(x + t[k.long()].reshape(196, 196, 16).permute(2, 0, 1), -1),
)
case(
    "alibi, causal softmax",
    [((8, 16, 1024, 1024), b), ((16,), f)],
    lambda x, a: (lambda i: ts.softmax(ts.where(
        i[None, :] <= i[:, None],
        ts.cast(x, "f32") + a[:, None, None] * ts.cast(i[None, :] - i[:, None], "f32"), -ts.inf)))(
        ts.arange(1024)),
    lambda x, a: (lambda i: torch.softmax(
        (wide(x) + a[:, None, None] * (i[None, :] - i[:, None])).masked_fill(
            i[None, :] > i[:, None], -float("inf")), -1))(torch.arange(1024, device=x.device)),
)

# --- norms --------------------------------------------------------------------------------------
case(
    "residual, rms norm, int8",
    [((16384, 4096), b), ((16384, 4096), b), ((4096,), b)],
    lambda x, r, w: (lambda h: (lambda y: (lambda s: (h, ts.cast(ts.round(y / s), "i8"), s))(
        ts.max(ts.abs(y), axis=-1, keepdims=True) / 127))(ts.cast(ts.rmsnorm(h, w), "f32")))(x + r),
    lambda x, r, w: (lambda h: (lambda y: (lambda s: (h, (y / s).round().to(torch.int8), s))(
        y.abs().amax(-1, keepdim=True) / 127))(wide(F.rms_norm(h, (4096,), w, 1e-6))))(x + r),
    False,
)
case(
    "quantise blocks of 128 to int8",
    [((8192, 7168), b)],
    lambda x: (lambda y: (lambda s: (
        ts.reshape(ts.cast(ts.round(y / s), "i8"), x.shape), ts.squeeze(s, -1)))(
        ts.maximum(ts.max(ts.abs(y), axis=-1, keepdims=True) / 127, 1e-4)))(
        ts.reshape(ts.cast(x, "f32"), (8192, 56, 128))),
    lambda x: (lambda y: (lambda s: (
        (y / s).round().to(torch.int8).reshape(x.shape), s.squeeze(-1)))(
        (y.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-4)))(wide(x).reshape(8192, 56, 128)),
    False,
)
case(
    "dequantise groups of 128",
    [((8192, 8192), ("u8", 16)), ((8192, 64), b), ((8192, 64), b)],
    lambda q, s, z: ts.reshape(
        (ts.cast(ts.reshape(q, (8192, 64, 128)), "bf16") - z[..., None]) * s[..., None],
        (8192, 8192)),
    lambda q, s, z: ((q.reshape(8192, 64, 128).to(s.dtype) - z[..., None]) * s[..., None]).reshape(
        8192, 8192),
)
case(
    "group norm, silu",
    [((16, 320, 64, 64), b), ((320,), b), ((320,), b)],
    lambda x, w, c: ts.silu(ts.group_norm(x, 32, w, c)),
    lambda x, w, c: F.silu(F.group_norm(x, 32, w, c)),
)
case(
    "group norm, silu, gradient",
    [((16, 320, 64, 64), b), ((320,), b), ((320,), b), ((16, 320, 64, 64), b)],
    pulled(lambda x, w, c: ts.silu(ts.group_norm(x, 32, w, c))),
    pulled_by_torch(lambda x, w, c: F.silu(F.group_norm(x, 32, w, c))),
)
case(
    "adaLN",
    [((64, 256, 1152), b), ((64, 1152), b), ((64, 1152), b)],
    lambda x, s, t: ts.layernorm(x) * (1 + s[:, None]) + t[:, None],
    lambda x, s, t: F.layer_norm(x, (1152,)) * (1 + s[:, None]) + t[:, None],
)
case(
    "adaLN, gated residual, gradient",
    [((64, 256, 1152), b), ((64, 1152), b), ((64, 1152), b), ((64, 1152), b), ((64, 256, 1152), b)],
    pulled(lambda x, s, t, g: x + g[:, None] * (ts.layernorm(x) * (1 + s[:, None]) + t[:, None])),
    pulled_by_torch(lambda x, s, t, g: x + g[:, None] * (
        F.layer_norm(x, (1152,)) * (1 + s[:, None]) + t[:, None])),
)
case(
    "global response norm",
    [((32, 28, 28, 768), b), ((768,), b), ((768,), b)],
    lambda x, w, c: (lambda g: x * (g / (ts.mean(g, axis=-1, keepdims=True) + 1e-6)) * w + c + x)(
        ts.sqrt(ts.sum(ts.square(x), axis=(1, 2), keepdims=True))),
    lambda x, w, c: (lambda g: x * (g / (g.mean(-1, keepdim=True) + 1e-6)) * w + c + x)(
        x.square().sum((1, 2), keepdim=True).sqrt()),
)
case(
    "token shift of five",
    [((8, 2048, 2048), b), ((5, 2048), b)],
    lambda x, m: (lambda d: tuple(x + d * m[i] for i in range(5)))(
        ts.concatenate([ts.zeros_like(x[:, :1]), x[:, :-1]], axis=1) - x),
    lambda x, m: (lambda d: tuple(x + d * m[i] for i in range(5)))(F.pad(x, (0, 0, 1, -1)) - x),
)
case(
    "causal depthwise conv of four, silu",
    [((8, 2048, 4096), b), ((4, 4096), b)],
    lambda x, w: ts.silu(sum(ts.pad(x, ((0, 0), (3 - i, 0), (0, 0)))[:, :2048] * w[i]
                             for i in range(4))),
    lambda x, w: F.silu(sum(F.pad(x, (0, 0, 3 - i, 0))[:, :2048] * w[i] for i in range(4))),
)
case(
    "clamped swiglu of neighbours",
    [((16384, 5760), b)],
    lambda x: (lambda g, u: g * ts.sigmoid(1.702 * g) * (u + 1))(
        ts.minimum(x[:, ::2], 7.0), ts.clip(x[:, 1::2], -7.0, 7.0)),
    lambda x: (lambda g, u: g * torch.sigmoid(1.702 * g) * (u + 1))(
        x[:, ::2].clamp(max=7.0), x[:, 1::2].clamp(-7.0, 7.0)),
)

# --- samplers and routers -----------------------------------------------------------------------
case(
    "top-p mask",
    [((256, 32000), f)],
    lambda x: (lambda s: ts.where(ts.cumsum(s[0], axis=-1) - s[0] > 0.9, 0.0, s[0]))(
        (lambda p: (ts.flip(ts.sort(p, axis=-1), -1),))(ts.softmax(x))),
    lambda x: (lambda s: torch.where(s.cumsum(-1) - s > 0.9, 0.0, s))(
        torch.softmax(x, -1).sort(-1, descending=True)[0]),
)
case(
    "top 50, softmax, draw by given noise",
    [((256, 32000), b), ((256, 50), f)],
    lambda x, u: (lambda t: ts.take_along_axis(
        t[1], ts.argmax(ts.log_softmax(ts.cast(t[0], "f32")) + u, axis=-1)[:, None], axis=-1))(
        ts.top_k(x, 50)),
    lambda x, u: (lambda t: t[1].gather(
        -1, (torch.log_softmax(wide(t[0]), -1) + u).argmax(-1, keepdim=True)))(x.topk(50)),
    False,
)
case(
    "beam step",
    [((16, 8, 32000), b), ((16, 8), f)],
    lambda x, s: (lambda t: (t[0], t[1] // 32000, t[1] % 32000))(ts.top_k(ts.reshape(
        ts.log_softmax(ts.cast(x, "f32")) + s[:, :, None], (16, 256000)), 8)),
    lambda x, s: (lambda t: (t[0], t[1] // 32000, t[1] % 32000))(
        (torch.log_softmax(wide(x), -1) + s[:, :, None]).reshape(16, 256000).topk(8)),
    False,
)
case(
    "repetition penalty",
    [((64, 128256), f), ((64, 1024), ("i", 128256))],
    lambda x, k: (lambda v: ts.put_along_axis(x, k, ts.where(v < 0, v * 1.2, v / 1.2), -1))(
        ts.take_along_axis(x, k, -1)),
    lambda x, k: (lambda v: x.scatter(1, k.long(), torch.where(v < 0, v * 1.2, v / 1.2)))(
        x.gather(1, k.long())),
    False,
)
case(
    "router, top 8 of 128, loads",
    [((65536, 128), b)],
    lambda x: (lambda p: (lambda t: (
        t[0] / ts.sum(t[0], axis=-1, keepdims=True), t[1],
        128 * ts.sum(ts.mean(p, axis=0) * ts.cast(ts.bincount(t[1], length=128), "f32"))
        / 524288))(ts.top_k(p, 8)))(ts.softmax(ts.cast(x, "f32"))),
    lambda x: (lambda p: (lambda t: (
        t[0] / t[0].sum(-1, keepdim=True), t[1],
        128 * (p.mean(0) * F.one_hot(t[1], 128).sum((0, 1)).to(p.dtype)).sum() / 524288))(
        p.topk(8)))(torch.softmax(wide(x), -1)),
    False,
)
case(
    "tokens sorted by expert",
    [((16384, 2048), b), ((32768,), ("i", 64))],
    lambda x, e: (lambda o: (x[o // 2], o))(ts.argsort(e)),
    lambda x, e: (lambda o: (x[o // 2], o))(e.argsort(stable=True)),
    False,
)
case(
    "experts weighed together",
    [((32768, 2048), b), ((32768,), ("i", 32768)), ((16384, 2), f)],
    lambda y, o, w: ts.cast(ts.sum(ts.reshape(ts.cast(y[o], "f32"), (16384, 2, 2048))
                                   * w[:, :, None], axis=1), "bf16"),
    lambda y, o, w: (wide(y[o.long()]).reshape(16384, 2, 2048) * w[:, :, None]).sum(1).to(y.dtype),
)
case(
    "positions of a packed mask",
    [((4096, 8192), "bool")],
    lambda m: (lambda k: ts.where(m, ts.cumsum(k, axis=-1) - 1, 0))(ts.cast(m, "i32")),
    lambda m: (m.int().cumsum(-1, dtype=torch.int32) - 1).masked_fill(~m, 0),
)

# --- losses -------------------------------------------------------------------------------------
def focal(x: Any, t: Any, bce: Any, sigmoid: Any) -> Any:
    p = sigmoid(x)
    away = p * (1 - t) + (1 - p) * t
    return ((0.25 * t + 0.75 * (1 - t)) * away * away * bce(x, t)).sum()


case(
    "focal loss, gradient",
    [((262144, 80), f), ((262144, 80), f)],
    lambda x, t: ts.grad(lambda x: ts.sum((lambda p, t: (0.25 * t + 0.75 * (1 - t)) * ts.square(
        p * (1 - t) + (1 - p) * t) * (ts.softplus(x) - x * t))(ts.sigmoid(x), t)))(x),
    slope(lambda x, t: focal(x, t, lambda x, t: F.softplus(x) - x * t, torch.sigmoid)),
)
case(
    "label smoothing and z loss, gradient",
    [((4096, 32000), b), ((4096,), ("i", 32000))],
    lambda x, k: ts.grad(lambda x: (lambda w: ts.cross_entropy(w, k, label_smoothing=0.1)
                         + 1e-4 * ts.mean(ts.square(ts.logsumexp(w, axis=-1))))(
        ts.cast(x, "f32")))(x),
    slope(lambda x, k: F.cross_entropy(wide(x), k.long(), label_smoothing=0.1)
          + 1e-4 * torch.logsumexp(wide(x), -1).square().mean()),
)
case(
    "distillation, gradient",
    [((4096, 32000), b), ((4096, 32000), b)],
    lambda x, t: ts.grad(lambda x: (lambda p, q: ts.sum(ts.exp(q) * (q - p)) / 4096)(
        ts.log_softmax(ts.cast(x, "f32") / 2), ts.log_softmax(ts.cast(t, "f32") / 2)))(x),
    slope(lambda x, t: F.kl_div(torch.log_softmax(wide(x) / 2, -1),
                                torch.log_softmax(wide(t) / 2, -1), reduction="batchmean",
                                log_target=True)),
)
case(
    "log probabilities of tokens",
    [((8, 1024, 32000), b), ((8, 1024), ("i", 32000)), ((8, 1024), f)],
    lambda x, k, m: ts.sum(ts.squeeze(ts.take_along_axis(
        ts.log_softmax(ts.cast(x, "f32")), k[:, :, None], -1), -1) * m, axis=-1),
    lambda x, k, m: (torch.log_softmax(wide(x), -1).gather(
        -1, k.long()[:, :, None]).squeeze(-1) * m).sum(-1),
)
case(
    "contrastive loss both ways, gradient",
    [((8192, 8192), b)],
    lambda x: ts.grad(lambda x: (lambda w, k: (ts.cross_entropy(w, k)
                      + ts.cross_entropy(w.T, k)) / 2)(ts.cast(x, "f32"), ts.arange(8192)))(x),
    slope(lambda x: (lambda w, k: (F.cross_entropy(w, k) + F.cross_entropy(w.T, k)) / 2)(
        wide(x), torch.arange(8192, device=x.device))),
)
case(
    "cross entropy of pixels, gradient",
    [((16, 21, 512, 512), b), ((16, 512, 512), ("i", 21))],
    lambda x, k: ts.grad(lambda x: -ts.mean(ts.take_along_axis(
        ts.log_softmax(ts.cast(x, "f32"), axis=1), k[:, None], 1)))(x),
    slope(lambda x, k: F.cross_entropy(wide(x), k.long())),
)
case(
    "dice loss, gradient",
    [((16, 21, 512, 512), b), ((16, 512, 512), ("i", 21))],
    lambda x, k: ts.grad(lambda x: (lambda p, t: 1 - ts.mean(
        2 * ts.sum(p * t, axis=(2, 3)) / (ts.sum(p + t, axis=(2, 3)) + 1)))(
        ts.softmax(ts.cast(x, "f32"), axis=1), ts.cast(ts.arange(21)[None, :, None, None]
                                                       == k[:, None], "f32")))(x),
    slope(lambda x, k: (lambda p, t: 1 - (
        2 * (p * t).sum((2, 3)) / ((p + t).sum((2, 3)) + 1)).mean())(
        torch.softmax(wide(x), 1), (torch.arange(21, device=x.device)[None, :, None, None]
                                    == k[:, None]).to(wide(x).dtype))),
)
case(
    "total variation, gradient",
    [((32, 3, 512, 512), f)],
    lambda x: ts.grad(lambda x: ts.mean(ts.sqrt(ts.square(x[..., 1:] - x[..., :-1]) + 1e-6))
                      + ts.mean(ts.abs(x[..., 1:, :] - x[..., :-1, :])))(x),
    slope(lambda x: ((x[..., 1:] - x[..., :-1]).square() + 1e-6).sqrt().mean()
          + (x[..., 1:, :] - x[..., :-1, :]).abs().mean()),
)
case(
    "chamfer distance",
    [((8, 4096, 3), f), ((8, 4096, 3), f)],
    lambda p, q: (lambda d: ts.mean(ts.min(d, axis=2)) + ts.mean(ts.min(d, axis=1)))(
        ts.sum(ts.square(p[:, :, None] - q[:, None]), axis=-1)),
    lambda p, q: (lambda d: d.amin(2).mean() + d.amin(1).mean())(
        (p[:, :, None] - q[:, None]).square().sum(-1)),
)

# --- segments, counts and picks -----------------------------------------------------------------
case(
    "embedding bag, mean of 32",
    [((500000, 128), b), ((32768, 32), ("i", 500000))],
    lambda t, k: ts.mean(t[k], axis=1),
    lambda t, k: t[k.long()].mean(1),
)
case(
    "embedding bag, gradient",
    [((200000, 128), f), ((16384, 32), ("i", 200000)), ((16384, 128), f)],
    lambda t, k, d: ts.vjp(lambda t: ts.mean(t[k], axis=1), t)[1](d),
    lambda t, k, d: pulled_by_torch(lambda t: F.embedding(k.long(), t).mean(1))(t, d),
)


def torch_segment_softmax(x: Any, k: Any) -> Any:
    at = k.long()[:, None].expand(-1, 8)
    m = torch.full((100000, 8), -float("inf"), device=x.device, dtype=x.dtype).scatter_reduce(
        0, at, x, "amax")
    e = (x - m[k.long()]).exp()
    return e / torch.zeros_like(m).index_add(0, k.long(), e)[k.long()]


def segment_softmax(x: Any, k: Any) -> Any:
    e = ts.exp(x - ts.segment_max(x, k, 100000)[k])
    return e / ts.segment_sum(e, k, 100000)[k]


case("softmax of segments", [((2000000, 8), f), ((2000000,), ("i", 100000))], segment_softmax,
     torch_segment_softmax)
case(
    "messages of a graph, mean",
    [((100000, 128), f), ((1000000,), ("i", 100000)), ((1000000,), ("i", 100000))],
    lambda x, i, j: ts.segment_mean(x[i], j, 100000),
    lambda x, i, j: (lambda s, n: s / n.clamp(min=1)[:, None])(
        torch.zeros_like(x).index_add(0, j.long(), x[i.long()]),
        torch.zeros_like(x[:, 0]).index_add(0, j.long(), torch.ones_like(j, dtype=x.dtype))),
)
case("histogram of 256", [((1 << 26,), f)], lambda x: ts.histogram(x, 256, (-4.0, 4.0))[0],
     lambda x: torch.histc(x, 256, -4.0, 4.0), False)
case("counts of 1000", [((1 << 25,), ("i", 1000))], lambda x: ts.bincount(x, length=1000),
     lambda x: torch.zeros(1000, dtype=torch.int64, device=x.device).scatter_add_(
         0, x.long(), torch.ones_like(x, dtype=torch.int64)))
case("median of 1001", [((65536, 1001), f)], lambda x: ts.median(x, axis=-1),
     lambda x: x.median(-1)[0])
case("quantile of 4096", [((8192, 4096), f)], lambda x: ts.quantile(x, 0.9, axis=-1),
     lambda x: x.quantile(0.9, -1))


def torch_boxes(p: Any, q: Any) -> Any:
    low = torch.maximum(p[:, None, :2], q[None, :, :2])
    high = torch.minimum(p[:, None, 2:], q[None, :, 2:])
    both = (high - low).clamp(min=0).prod(-1)
    area = lambda v: (v[:, 2] - v[:, 0]) * (v[:, 3] - v[:, 1])  # noqa: E731
    return both / (area(p)[:, None] + area(q)[None] - both)


def boxes(p: Any, q: Any) -> Any:
    low = ts.maximum(p[:, None, :2], q[None, :, :2])
    high = ts.minimum(p[:, None, 2:], q[None, :, 2:])
    both = ts.prod(ts.maximum(high - low, 0.0), axis=-1)
    area = lambda v: (v[:, 2] - v[:, 0]) * (v[:, 3] - v[:, 1])  # noqa: E731
    return both / (area(p)[:, None] + area(q)[None] - both)


case("overlaps of boxes", [((8192, 4), f), ((4096, 4), f)], boxes, torch_boxes, False)
case(
    "decay of overlapping boxes",
    [((4096, 4), f)],
    lambda p: (lambda o: (lambda m: ts.min(ts.exp(-2 * (o * o - (m * m)[:, None])), axis=0))(
        ts.max(o, axis=0)))(ts.triu(boxes(p, p), 1)),
    lambda p: (lambda o: (lambda m: torch.exp(-2 * (o * o - (m * m)[:, None])).amin(0))(
        o.amax(0)))(torch.triu(torch_boxes(p, p), 1)),
    False,
)
case(
    "keys and values into a cache",
    [((32, 4096, 8, 128), b), ((32, 64), ("i", 4096)), ((32, 64, 8, 128), b)],
    lambda c, k, v: ts.index_put(c, (ts.arange(32)[:, None], k), v),
    lambda c, k, v: c.index_put((torch.arange(32, device=c.device)[:, None], k.long()), v),
    False,
)

# --- images -------------------------------------------------------------------------------------
case(
    "space to depth",
    [((16, 64, 256, 256), b)],
    lambda x: ts.reshape(ts.transpose(ts.reshape(x, (16, 64, 128, 2, 128, 2)), (0, 1, 3, 5, 2, 4)),
                         (16, 256, 128, 128)),
    lambda x: F.pixel_unshuffle(x, 2),
)
case(
    "patches",
    [((128, 3, 224, 224), b)],
    lambda x: ts.reshape(ts.transpose(ts.reshape(x, (128, 3, 14, 16, 14, 16)), (0, 2, 4, 1, 3, 5)),
                         (128, 196, 768)),
    lambda x: x.reshape(128, 3, 14, 16, 14, 16).permute(0, 2, 4, 1, 3, 5).reshape(128, 196, 768),
)
case(
    "shifted windows",
    [((64, 56, 56, 192), b)],
    lambda x: ts.reshape(ts.transpose(ts.reshape(ts.roll(x, (-3, -3), axis=(1, 2)),
                                                 (64, 8, 7, 8, 7, 192)), (0, 1, 3, 2, 4, 5)),
                         (4096, 49, 192)),
    lambda x: x.roll((-3, -3), (1, 2)).reshape(64, 8, 7, 8, 7, 192).permute(
        0, 1, 3, 2, 4, 5).reshape(4096, 49, 192),
)
case(
    "normalised channels first",
    [((64, 512, 512, 3), ("u8", 256)), ((3,), f), ((3,), f)],
    lambda x, m, s: ts.transpose((ts.cast(x, "f32") / 255 - m) / s, (0, 3, 1, 2)),
    lambda x, m, s: ((x.to(wide(m).dtype) / 255 - m) / s).permute(0, 3, 1, 2).contiguous(),
)
case(
    "squeeze and excite",
    [((64, 256, 56, 56), b), ((64, 256), b), ((64, 256, 56, 56), b)],
    lambda x, g, r: ts.relu(x * ts.sigmoid(g)[:, :, None, None] + r),
    lambda x, g, r: F.relu(x * torch.sigmoid(g)[:, :, None, None] + r),
)
case(
    "sobel",
    [((32, 3, 512, 512), f)],
    lambda x: (lambda p: (lambda u, v: ts.sqrt(u * u + v * v + 1e-6))(
        p[..., :-2, 2:] + 2 * p[..., 1:-1, 2:] + p[..., 2:, 2:]
        - p[..., :-2, :-2] - 2 * p[..., 1:-1, :-2] - p[..., 2:, :-2],
        p[..., 2:, :-2] + 2 * p[..., 2:, 1:-1] + p[..., 2:, 2:]
        - p[..., :-2, :-2] - 2 * p[..., :-2, 1:-1] - p[..., :-2, 2:]))(
        ts.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))),
    lambda x: (lambda p: (lambda u, v: (u * u + v * v + 1e-6).sqrt())(
        p[..., :-2, 2:] + 2 * p[..., 1:-1, 2:] + p[..., 2:, 2:]
        - p[..., :-2, :-2] - 2 * p[..., 1:-1, :-2] - p[..., 2:, :-2],
        p[..., 2:, :-2] + 2 * p[..., 2:, 1:-1] + p[..., 2:, 2:]
        - p[..., :-2, :-2] - 2 * p[..., :-2, 1:-1] - p[..., :-2, 2:]))(F.pad(x, (1, 1, 1, 1))),
)
case(
    "depthwise 7 x 7",
    [((32, 96, 56, 56), b), ((96, 1, 7, 7), b)],
    lambda x, w: ts.conv2d(x, w, padding=3, groups=96),
    lambda x, w: F.conv2d(x, w, padding=3, groups=96),
    False,
)
case(
    "bilinear, twice as large",
    [((32, 64, 64, 64), b)],
    lambda x: ts.interpolate(x, scale_factor=2, mode="bilinear"),
    lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
)
case(
    "mixed with others",
    [((256, 3, 224, 224), b), ((256,), ("i", 256)), ((256, 1, 1, 1), b)],
    lambda x, k, w: w * x + (1 - w) * x[k],
    lambda x, k, w: w * x + (1 - w) * x[k.long()],
)

# --- updates ------------------------------------------------------------------------------------
SHAPES = [(4096, 1024), (1024,), (1024, 1024), (1024, 4096), (4096,), (2048, 1024)] * 6
case("averages of weights", [(s, f) for s in SHAPES * 2],
     lambda *p: [ts.lerp(x, y, 0.001) for x, y in zip(p[:36], p[36:], strict=True)],
     lambda *p: [torch.lerp(x, y, 0.001) for x, y in zip(p[:36], p[36:], strict=True)])
case(
    "clipped by their norm",
    [(s, f) for s in SHAPES],
    lambda *g: (lambda n: [x * ts.minimum(1.0 / (n + 1e-6), 1.0) for x in g])(
        ts.sqrt(sum(ts.sum(ts.square(x)) for x in g))),
    lambda *g: (lambda n: [x * (1.0 / (n + 1e-6)).clamp(max=1.0) for x in g])(
        torch.stack([x.square().sum() for x in g]).sum().sqrt()),
)


def adamw(p: Any, g: Any, m: Any, v: Any, decay: float, sqrt: Any) -> Any:
    m = 0.9 * m + 0.1 * g
    v = 0.95 * v + 0.05 * g * g
    return p * (1 - 1e-3 * decay) - 1e-3 * (m / 0.19) / (sqrt(v / 0.0975) + 1e-8), m, v


case(
    "adamw, decay of matrices",
    [(s, f) for s in SHAPES[:12] * 3],
    lambda *x: [adamw(p, g, m, g * g, 0.1 if len(p.shape) > 1 else 0.0, ts.sqrt)
                for p, g, m in zip(x[:12], x[12:24], x[24:], strict=True)],
    lambda *x: [adamw(p, g, m, g * g, 0.1 if p.dim() > 1 else 0.0, torch.sqrt)
                for p, g, m in zip(x[:12], x[12:24], x[24:], strict=True)],
)


if __name__ == "__main__":
    main(__file__, "model_parts", __doc__)
