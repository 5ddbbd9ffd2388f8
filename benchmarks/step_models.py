"""Models as users write them, once for tessera and once for PyTorch: what `model_steps.py` times.

Each function returns a `Model`: parameters, the loss of both, and the data. Losses take the
parameters as a dict, then the data. Weights are f32; what a model computes in bf16 it casts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import tessera as ts

if importlib.util.find_spec("torch"):  # what is compiled for a GPU that is not here needs none
    import torch
    import torch.nn.functional as F

R = np.random.default_rng(0)


@dataclass(frozen=True)
class Model:
    """params: by name; where there are none, the losses are only computed.  tolerance: by which
    the first losses may differ, relatively."""

    params: dict[str, np.ndarray]
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    data: list[np.ndarray]
    tolerance: float = 5e-3


def weights(scale: float = 0.02, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {k: (R.standard_normal(s) * scale).astype("f4") for k, s in shapes.items()}


def numbers(*shape: int) -> np.ndarray:
    return R.standard_normal(shape).astype("f4")


def kernel(*shape: int) -> np.ndarray:
    """Weights of a convolution."""
    return (R.standard_normal(shape) * (2 / np.prod(shape[1:])) ** 0.5).astype("f4")


def narrow(x: Any) -> Any:
    return ts.cast(x, "bf16")


def narrowed(p: Any) -> Any:
    return {k: narrow(v) for k, v in p.items()}


def torch_narrowed(p: Any) -> Any:
    """In bf16, kernels of convolutions channels last."""
    p = {k: v.to(torch.bfloat16) for k, v in p.items()}
    return {k: v.to(memory_format=torch.channels_last) if v.dim() == 4 else v
            for k, v in p.items()}


def gat() -> Model:
    """Graph attention of three layers in f32."""
    N, E, D, C = 20000, 300000, 128, 16
    p = weights(0.1, o=(D, C))
    for i in range(3):
        p |= weights(0.1, **{f"W{i}": (D, D), f"a{i}": (D,), f"b{i}": (D,)})

    def ours(p: Any, x: Any, src: Any, dst: Any, y: Any) -> Any:
        for i in range(3):
            h = x @ p[f"W{i}"]
            s = ts.leaky_relu((h @ p[f"a{i}"])[src] + (h @ p[f"b{i}"])[dst], 0.2)
            m = ts.stop_gradient(ts.segment_max(s, dst, N))
            e = ts.exp(s - m[dst])
            z = ts.segment_sum(e, dst, N)
            x = ts.relu(ts.segment_sum((e / z[dst])[:, None] * h[src], dst, N)) + x
        return ts.cross_entropy(x @ p["o"], y)

    def theirs(p: Any, x: Any, src: Any, dst: Any, y: Any) -> Any:
        for i in range(3):
            h = x @ p[f"W{i}"]
            s = F.leaky_relu((h @ p[f"a{i}"])[src] + (h @ p[f"b{i}"])[dst], 0.2)
            low = torch.full((N,), -float("inf"), device=x.device)
            m = low.scatter_reduce(0, dst, s.detach(), "amax")
            e = torch.exp(s - m[dst])
            z = torch.zeros(N, device=x.device).index_add(0, dst, e)
            rows = (e / z[dst])[:, None] * h[src]
            x = F.relu(torch.zeros(N, D, device=x.device).index_add(0, dst, rows)) + x
        return F.cross_entropy(x @ p["o"], y)

    ends = R.integers(0, N, (2, E))
    return Model(p, ours, theirs, [numbers(N, D), *ends, R.integers(0, C, N)])


def unet() -> Model:
    """A small diffusion U-Net, with attention in the middle."""
    B, C, H = 64, 128, 32

    p = {"i": kernel(C, 4, 3, 3), "r1": kernel(C, C, 3, 3), "r2": kernel(C, C, 3, 3),
         "d": kernel(2 * C, C, 3, 3), "m1": kernel(2 * C, 2 * C, 3, 3),
         "m2": kernel(2 * C, 2 * C, 3, 3), "j": kernel(C, 2 * C, 3, 3), "o": kernel(4, C, 3, 3)}
    p |= weights(0.05, qkv=(2 * C, 6 * C), po=(2 * C, 2 * C), u=(2 * C, C, 2, 2), t=(C, 2 * C))

    def ours(p: Any, x: Any, t: Any, target: Any, f: Any) -> Any:
        p = {k: narrow(v) for k, v in p.items()}

        def conv(x: Any, w: str, **k: Any) -> Any:
            return ts.conv2d(x, p[w], padding=1, **k)

        def act(x: Any) -> Any:
            return ts.silu(ts.group_norm(x, 8))

        a = t[:, None] * 1000.0 * f
        e = narrow(ts.concatenate([ts.sin(a), ts.cos(a)], -1)) @ p["t"]
        h = conv(narrow(x), "i")
        h = h + conv(act(conv(act(h), "r1")), "r2")
        d = conv(h, "d", stride=2) + e[:, :, None, None]
        d = d + conv(act(conv(act(d), "m1")), "m2")
        z = ts.transpose(d, (0, 2, 3, 1)).reshape(B, -1, 2 * C) @ p["qkv"]
        q, k, v = (s.reshape(B, -1, 4, C // 2).transpose(0, 2, 1, 3)
                   for s in ts.split(z, 3, axis=-1))
        z = ts.attention(q, k, v).transpose(0, 2, 1, 3).reshape(B, -1, 2 * C) @ p["po"]
        d = d + ts.transpose(z.reshape(B, H // 2, H // 2, 2 * C), (0, 3, 1, 2))
        u = ts.conv_transpose2d(d, p["u"], stride=2)
        z = conv(act(conv(ts.concatenate([u, h], 1), "j")), "o")
        return ts.mean((ts.cast(z, "f32") - target) ** 2)

    def theirs(p: Any, x: Any, t: Any, target: Any, f: Any) -> Any:
        p = {k: v.to(torch.bfloat16) for k, v in p.items()}
        p = {k: v.to(memory_format=torch.channels_last) if v.dim() == 4 else v
             for k, v in p.items()}

        def conv(x: Any, w: str, **k: Any) -> Any:
            return F.conv2d(x, p[w], padding=1, **k)

        def act(x: Any) -> Any:
            return F.silu(F.group_norm(x, 8))

        a = t[:, None] * 1000.0 * f
        e = torch.cat([a.sin(), a.cos()], -1).to(torch.bfloat16) @ p["t"]
        h = conv(x.to(torch.bfloat16).to(memory_format=torch.channels_last), "i")
        h = h + conv(act(conv(act(h), "r1")), "r2")
        d = conv(h, "d", stride=2) + e[:, :, None, None]
        d = d + conv(act(conv(act(d), "m1")), "m2")
        z = d.permute(0, 2, 3, 1).reshape(B, -1, 2 * C) @ p["qkv"]
        q, k, v = (s.reshape(B, -1, 4, C // 2).transpose(1, 2) for s in z.chunk(3, -1))
        z = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, -1, 2 * C)
        d = d + (z @ p["po"]).reshape(B, H // 2, H // 2, 2 * C).permute(0, 3, 1, 2)
        u = F.conv_transpose2d(d, p["u"], stride=2)
        z = conv(act(conv(torch.cat([u, h], 1), "j")), "o")
        return ((z.float() - target) ** 2).mean()

    f = (1e4 ** (-np.arange(C // 2) / (C // 2))).astype("f4")
    data = [numbers(B, 4, H, H), R.uniform(0, 1, B).astype("f4"), numbers(B, 4, H, H), f]
    return Model(p, ours, theirs, data, 2e-2)


def llama() -> Model:
    """Six layers of 1024 with grouped queries, 4096 tokens."""
    B, S, D, H, KV, L, V, W = 4, 1024, 1024, 16, 4, 6, 8192, 2816
    hd = D // H
    p = weights(E=(V, D))
    for i in range(L):
        p |= weights(**{f"q{i}": (D, D), f"k{i}": (D, KV * hd), f"v{i}": (D, KV * hd),
                        f"o{i}": (D, D), f"g{i}": (D, W), f"u{i}": (D, W), f"d{i}": (W, D)})
        p |= {f"n{i}": np.ones(D, "f4"), f"m{i}": np.ones(D, "f4")}

    def ours(p: Any, ids: Any, co: Any, si: Any) -> Any:
        p = {k: narrow(v) for k, v in p.items()}
        co, si = narrow(co), narrow(si)

        def rope(x: Any) -> Any:
            a, b = x[..., : hd // 2], x[..., hd // 2 :]
            return ts.concatenate([a * co - b * si, a * si + b * co], -1)

        def heads(z: Any, n: int) -> Any:
            return z.reshape(B, S, n, hd).transpose(0, 2, 1, 3)

        x = p["E"][ids[:, :-1]]
        for i in range(L):
            y = ts.rmsnorm(x, p[f"n{i}"])
            q, k, v = (heads(y @ p[f"{c}{i}"], n) for c, n in (("q", H), ("k", KV), ("v", KV)))
            a = ts.attention(rope(q), rope(k), v, causal=True)
            x = x + a.transpose(0, 2, 1, 3).reshape(B, S, D) @ p[f"o{i}"]
            y = ts.rmsnorm(x, p[f"m{i}"])
            x = x + (ts.silu(y @ p[f"g{i}"]) * (y @ p[f"u{i}"])) @ p[f"d{i}"]
        return ts.cross_entropy((x @ p["E"].T).reshape(-1, V), ids[:, 1:].reshape(-1))

    def theirs(p: Any, ids: Any, co: Any, si: Any) -> Any:
        p = {k: v.to(torch.bfloat16) for k, v in p.items()}
        co, si = co.to(torch.bfloat16), si.to(torch.bfloat16)

        def rope(x: Any) -> Any:
            a, b = x[..., : hd // 2], x[..., hd // 2 :]
            return torch.cat([a * co - b * si, a * si + b * co], -1)

        def heads(z: Any, n: int) -> Any:
            return z.reshape(B, S, n, hd).transpose(1, 2)

        x = F.embedding(ids[:, :-1], p["E"])
        for i in range(L):
            y = F.rms_norm(x, (D,), p[f"n{i}"], 1e-6)
            q, k, v = (heads(y @ p[f"{c}{i}"], n) for c, n in (("q", H), ("k", KV), ("v", KV)))
            a = F.scaled_dot_product_attention(
                rope(q), rope(k), v, is_causal=True, enable_gqa=True)
            x = x + a.transpose(1, 2).reshape(B, S, D) @ p[f"o{i}"]
            y = F.rms_norm(x, (D,), p[f"m{i}"], 1e-6)
            x = x + (F.silu(y @ p[f"g{i}"]) * (y @ p[f"u{i}"])) @ p[f"d{i}"]
        return F.cross_entropy((x @ p["E"].T).reshape(-1, V).float(), ids[:, 1:].reshape(-1))

    angles = np.arange(S)[:, None] * 1e4 ** (-np.arange(hd // 2) / (hd // 2))
    data = [R.integers(0, V, (B, S + 1)), np.cos(angles).astype("f4"), np.sin(angles).astype("f4")]
    return Model(p, ours, theirs, data)


def gru() -> Model:
    """A GRU over 128 steps: `ts.scan`, and the GRU of cuDNN."""
    B, T, D = 128, 128, 512
    p = weights(0.04, w=(3 * D, D), u=(3 * D, D), b=(3 * D,), c=(3 * D,))

    def ours(p: Any, x: Any, y: Any) -> Any:
        p = {k: narrow(v) for k, v in p.items()}
        given = narrow(x) @ p["w"].T + p["b"]

        def step(h: Any, g: Any) -> Any:
            u = h @ p["u"].T + p["c"]
            (gr, gz, gn), (ur, uz, un) = ts.split(g, 3, -1), ts.split(u, 3, -1)
            z = ts.sigmoid(gz + uz)
            h = (1 - z) * ts.tanh(gn + ts.sigmoid(gr + ur) * un) + z * h
            return h, h

        _, out = ts.scan(step, ts.zeros((B, D), "bf16"), given)
        return ts.mean((ts.cast(out, "f32") - y) ** 2)

    def theirs(p: Any, x: Any, y: Any) -> Any:
        w = [p[k].to(torch.bfloat16) for k in "wubc"]
        first = torch.zeros(1, B, D, device=x.device, dtype=torch.bfloat16)
        out, _ = torch._VF.gru(
            x.to(torch.bfloat16), first, w, True, 1, 0.0, True, False, False)
        return ((out.float() - y) ** 2).mean()

    return Model(p, ours, theirs, [numbers(T, B, D), numbers(T, B, D)], 2e-2)


def mamba() -> Model:
    """Two layers of Mamba-2 by its chunked algorithm (arXiv:2405.21060, listing 1)."""
    B, S, D, H, P, N, Q = 4, 2048, 1024, 16, 64, 64, 64
    p = {}
    for i in range(2):
        p |= weights(**{f"i{i}": (D, 2 * D + 2 * N + H), f"o{i}": (D, D), f"n{i}": (D,)})

    def ours(p: Any, x: Any, y: Any) -> Any:
        def decay(a: Any) -> Any:
            total = ts.cumsum(a, -1)
            seen = ts.tril(ts.ones((a.shape[-1],) * 2, "bool"))
            return ts.exp(ts.where(seen, total[..., :, None] - total[..., None, :], -ts.inf))

        x = narrow(x)
        for i in range(2):
            z = ts.rmsnorm(x, narrow(p[f"n{i}"] + 1)) @ narrow(p[f"i{i}"])
            gate, u, b, c, dt = ts.split(z, [D, D, N, N, H], axis=-1)
            dt = ts.softplus(ts.cast(dt, "f32"))
            u = u.reshape(B, -1, Q, H, P) * narrow(dt).reshape(B, -1, Q, H, 1)
            a = ts.transpose((-dt).reshape(B, -1, Q, H), (0, 3, 1, 2))
            b, c = b.reshape(B, -1, Q, N), c.reshape(B, -1, Q, N)
            total = ts.cumsum(a, -1)
            inside = ts.einsum("bcln,bcsn,bhcls,bcshp->bclhp", c, b, narrow(decay(a)), u)
            left = narrow(ts.exp(total[..., -1:] - total))
            states = ts.einsum("bcln,bhcl,bclhp->bchpn", b, left, u)
            ends = ts.pad(total[..., -1], [(0, 0), (0, 0), (1, 0)])
            before = narrow(decay(ends))[:, :, :-1, 1:]
            states = ts.einsum("bhzc,bchpn->bzhpn", before, states)
            far = ts.einsum("bcln,bchpn,bhcl->bclhp", c, states, narrow(ts.exp(total)))
            o = (inside + far).reshape(B, S, D) * ts.silu(gate)
            x = x + o @ narrow(p[f"o{i}"])
        return ts.mean((ts.cast(x, "f32") - y) ** 2)

    def theirs(p: Any, x: Any, y: Any) -> Any:
        def decay(a: Any) -> Any:
            total = torch.cumsum(a, -1)
            seen = torch.ones(a.shape[-1], a.shape[-1], device=a.device, dtype=torch.bool).tril()
            apart = total[..., :, None] - total[..., None, :]
            return torch.exp(apart.masked_fill(~seen, -float("inf")))

        half = torch.bfloat16
        x = x.to(half)
        for i in range(2):
            z = F.rms_norm(x, (D,), (p[f"n{i}"] + 1).to(half), 1e-6) @ p[f"i{i}"].to(half)
            gate, u, b, c, dt = z.split([D, D, N, N, H], -1)
            dt = F.softplus(dt.float())
            u = u.reshape(B, -1, Q, H, P) * dt.to(half).reshape(B, -1, Q, H, 1)
            a = (-dt).reshape(B, -1, Q, H).permute(0, 3, 1, 2)
            b, c = b.reshape(B, -1, Q, N), c.reshape(B, -1, Q, N)
            total = torch.cumsum(a, -1)
            inside = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", c, b, decay(a).to(half), u)
            left = torch.exp(total[..., -1:] - total).to(half)
            states = torch.einsum("bcln,bhcl,bclhp->bchpn", b, left, u)
            before = decay(F.pad(total[..., -1], (1, 0))).to(half)[:, :, :-1, 1:]
            states = torch.einsum("bhzc,bchpn->bzhpn", before, states)
            far = torch.einsum("bcln,bchpn,bhcl->bclhp", c, states, torch.exp(total).to(half))
            o = (inside + far).reshape(B, S, D) * F.silu(gate)
            x = x + o @ p[f"o{i}"].to(half)
        return ((x.float() - y) ** 2).mean()

    return Model(p, ours, theirs, [numbers(B, S, D), numbers(B, S, D)])


def vit() -> Model:
    """Six layers of 384 over 196 patches and a class token, 128 images."""
    B, T, D, H, L, C = 128, 196, 384, 6, 6, 1000
    p = weights(e=(768, D), cls=(1, 1, D), pos=(T + 1, D), head=(D, C))
    for i in range(L):
        p |= weights(**{f"qkv{i}": (D, 3 * D), f"o{i}": (D, D), f"u{i}": (D, 4 * D),
                        f"d{i}": (4 * D, D), f"bq{i}": (3 * D,), f"bo{i}": (D,),
                        f"bu{i}": (4 * D,), f"bd{i}": (D,)})
        p |= {f"{n}{i}": np.ones(D, "f4") for n in ("g1", "g2")}
        p |= {f"{n}{i}": np.zeros(D, "f4") for n in ("c1", "c2")}

    def ours(p: Any, x: Any, y: Any) -> Any:
        p = {k: narrow(v) for k, v in p.items()}
        x = narrow(x).reshape(B, 3, 14, 16, 14, 16).transpose(0, 2, 4, 1, 3, 5).reshape(B, T, 768)
        x = ts.concatenate([ts.broadcast_to(p["cls"], (B, 1, D)), x @ p["e"]], 1) + p["pos"]
        for i in range(L):
            h = ts.layernorm(x, p[f"g1{i}"], p[f"c1{i}"]) @ p[f"qkv{i}"] + p[f"bq{i}"]
            q, k, v = (s.reshape(B, T + 1, H, D // H).transpose(0, 2, 1, 3)
                       for s in ts.split(h, 3, -1))
            a = ts.attention(q, k, v).transpose(0, 2, 1, 3).reshape(B, T + 1, D)
            x = x + a @ p[f"o{i}"] + p[f"bo{i}"]
            h = ts.layernorm(x, p[f"g2{i}"], p[f"c2{i}"]) @ p[f"u{i}"] + p[f"bu{i}"]
            x = x + ts.gelu(h) @ p[f"d{i}"] + p[f"bd{i}"]
        return ts.cross_entropy(ts.cast(ts.layernorm(x)[:, 0] @ p["head"], "f32"), y)

    def theirs(p: Any, x: Any, y: Any) -> Any:
        p = {k: v.to(torch.bfloat16) for k, v in p.items()}
        x = x.to(torch.bfloat16).reshape(B, 3, 14, 16, 14, 16)
        x = x.permute(0, 2, 4, 1, 3, 5).reshape(B, T, 768) @ p["e"]
        x = torch.cat([p["cls"].expand(B, 1, D), x], 1) + p["pos"]
        for i in range(L):
            h = F.layer_norm(x, (D,), p[f"g1{i}"], p[f"c1{i}"]) @ p[f"qkv{i}"] + p[f"bq{i}"]
            q, k, v = (s.reshape(B, T + 1, H, D // H).transpose(1, 2) for s in h.chunk(3, -1))
            a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T + 1, D)
            x = x + a @ p[f"o{i}"] + p[f"bo{i}"]
            h = F.layer_norm(x, (D,), p[f"g2{i}"], p[f"c2{i}"]) @ p[f"u{i}"] + p[f"bu{i}"]
            x = x + F.gelu(h, approximate="tanh") @ p[f"d{i}"] + p[f"bd{i}"]
        return F.cross_entropy((F.layer_norm(x, (D,))[:, 0] @ p["head"]).float(), y)

    return Model(p, ours, theirs, [numbers(B, 3, 224, 224), R.integers(0, C, B)])


def dit() -> Model:
    """A diffusion transformer whose norms are scaled and shifted by the time (adaLN-zero)."""
    B, T, D, H, L = 64, 256, 512, 8, 6
    p = weights(e=(16, D), t1=(256, D), t2=(D, D), out=(D, 16), last=(D, 2 * D), pos=(T, D))
    for i in range(L):
        p |= weights(**{f"qkv{i}": (D, 3 * D), f"o{i}": (D, D), f"u{i}": (D, 4 * D),
                        f"d{i}": (4 * D, D), f"ada{i}": (D, 6 * D), f"b{i}": (6 * D,)})

    def ours(p: Any, x: Any, t: Any, f: Any, y: Any) -> Any:
        p = {k: narrow(v) for k, v in p.items()}
        a = t[:, None] * f
        c = ts.silu(narrow(ts.concatenate([ts.cos(a), ts.sin(a)], -1)) @ p["t1"]) @ p["t2"]
        c = ts.silu(c)
        x = narrow(x) @ p["e"] + p["pos"]
        for i in range(L):
            m = (c @ p[f"ada{i}"] + p[f"b{i}"])[:, None]
            s1, b1, g1, s2, b2, g2 = ts.split(m, 6, -1)
            h = (ts.layernorm(x) * (1 + s1) + b1) @ p[f"qkv{i}"]
            q, k, v = (z.reshape(B, T, H, D // H).transpose(0, 2, 1, 3)
                       for z in ts.split(h, 3, -1))
            a = ts.attention(q, k, v).transpose(0, 2, 1, 3).reshape(B, T, D)
            x = x + g1 * (a @ p[f"o{i}"])
            h = ts.gelu((ts.layernorm(x) * (1 + s2) + b2) @ p[f"u{i}"])
            x = x + g2 * (h @ p[f"d{i}"])
        s, b = ts.split((c @ p["last"])[:, None], 2, -1)
        return ts.mse(ts.cast((ts.layernorm(x) * (1 + s) + b) @ p["out"], "f32"), y)

    def theirs(p: Any, x: Any, t: Any, f: Any, y: Any) -> Any:
        p = {k: v.to(torch.bfloat16) for k, v in p.items()}
        a = t[:, None] * f
        c = torch.cat([a.cos(), a.sin()], -1).to(torch.bfloat16)
        c = F.silu(F.silu(c @ p["t1"]) @ p["t2"])
        x = x.to(torch.bfloat16) @ p["e"] + p["pos"]
        for i in range(L):
            m = (c @ p[f"ada{i}"] + p[f"b{i}"])[:, None]
            s1, b1, g1, s2, b2, g2 = m.chunk(6, -1)
            h = (F.layer_norm(x, (D,)) * (1 + s1) + b1) @ p[f"qkv{i}"]
            q, k, v = (z.reshape(B, T, H, D // H).transpose(1, 2) for z in h.chunk(3, -1))
            a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, D)
            x = x + g1 * (a @ p[f"o{i}"])
            h = (F.layer_norm(x, (D,)) * (1 + s2) + b2) @ p[f"u{i}"]
            x = x + g2 * (F.gelu(h, approximate="tanh") @ p[f"d{i}"])
        s, b = (c @ p["last"])[:, None].chunk(2, -1)
        return F.mse_loss(((F.layer_norm(x, (D,)) * (1 + s) + b) @ p["out"]).float(), y)

    f = (1e4 ** (-np.arange(128) / 128)).astype("f4")
    data = [numbers(B, T, 16), R.uniform(0, 1000, B).astype("f4"), f, numbers(B, T, 16)]
    return Model(p, ours, theirs, data)


def moe() -> Model:
    """Eight experts, two for each of 8192 tokens, by places in a buffer of fixed capacity."""
    N, D, E, W, K = 8192, 1024, 8, 2048, 2
    C = N * K // E * 5 // 4
    p = weights(r=(D, E), u=(E, D, W), g=(E, D, W), d=(E, W, D), n=(D,))

    def ours(p: Any, x: Any, y: Any) -> Any:
        h = ts.rmsnorm(narrow(x), narrow(p["n"] + 1))
        odds = ts.softmax(ts.cast(h, "f32") @ p["r"])
        best, chosen = ts.top_k(odds, K)
        best = best / ts.sum(best, -1, keepdims=True)
        hot = ts.one_hot(chosen.reshape(-1), E, "i32")
        place = ts.sum((ts.cumsum(hot, 0) - 1) * hot, -1)
        kept = place < C
        at = ts.where(kept, chosen.reshape(-1) * C + ts.cast(place, "i64"), E * C)
        rows = ts.zeros((E * C + 1, D), "bf16")
        rows = ts.scatter_add(rows, at, ts.repeat(h, K, 0))[:-1].reshape(E, C, D)
        a = ts.silu(rows @ narrow(p["g"])) * (rows @ narrow(p["u"])) @ narrow(p["d"])
        a = ts.concatenate([a.reshape(E * C, D), ts.zeros((1, D), "bf16")])[at]
        a = ts.sum(a.reshape(N, K, D) * narrow(best)[..., None], 1)
        load = ts.mean(odds, 0) * ts.mean(ts.cast(hot, "f32"), 0)
        return ts.mse(ts.cast(x + a, "f32"), y) + 0.01 * E * ts.sum(load)

    def theirs(p: Any, x: Any, y: Any) -> Any:
        half = torch.bfloat16
        h = F.rms_norm(x.to(half), (D,), (p["n"] + 1).to(half), 1e-6)
        odds = torch.softmax(h.float() @ p["r"], -1)
        best, chosen = torch.topk(odds, K)
        best = best / best.sum(-1, keepdim=True)
        hot = F.one_hot(chosen.reshape(-1), E).int()
        place = ((torch.cumsum(hot, 0) - 1) * hot).sum(-1)
        kept = place < C
        at = torch.where(kept, chosen.reshape(-1) * C + place, E * C)
        rows = torch.zeros(E * C + 1, D, device=x.device, dtype=half)
        rows = rows.index_add(0, at, h.repeat_interleave(K, 0))[:-1].reshape(E, C, D)
        a = F.silu(rows @ p["g"].to(half)) * (rows @ p["u"].to(half)) @ p["d"].to(half)
        end = torch.zeros(1, D, device=x.device, dtype=half)
        a = torch.cat([a.reshape(E * C, D), end])[at]
        a = (a.reshape(N, K, D) * best.to(half)[..., None]).sum(1)
        load = odds.mean(0) * hot.float().mean(0)
        return F.mse_loss((x + a).float(), y) + 0.01 * E * load.sum()

    return Model(p, ours, theirs, [numbers(N, D), numbers(N, D)])


def pinn() -> Model:
    """Burgers' equation at 65536 points: a network of four layers and its second derivative."""
    N, D = 65536, 128
    p = weights(0.5, w0=(2, D)) | weights(0.1, w1=(D, D), w2=(D, D), w3=(D, D), w4=(D, 1))
    p |= {f"b{i}": np.zeros(D, "f4") for i in range(4)}

    def ours(p: Any, x: Any, t: Any) -> Any:
        def u(x: Any, t: Any) -> Any:
            h = ts.stack([x, t])
            for i in range(4):
                h = ts.tanh(h @ p[f"w{i}"] + p[f"b{i}"])
            return (h @ p["w4"])[0]

        ux = ts.grad(u, 0)

        def residual(x: Any, t: Any) -> Any:
            return ts.grad(u, 1)(x, t) + u(x, t) * ux(x, t) - 0.003 * ts.grad(ux, 0)(x, t)

        return ts.mean(ts.vmap(residual)(x, t) ** 2)

    def theirs(p: Any, x: Any, t: Any) -> Any:
        def u(x: Any, t: Any) -> Any:
            h = torch.stack([x, t])
            for i in range(4):
                h = torch.tanh(h @ p[f"w{i}"] + p[f"b{i}"])
            return (h @ p["w4"])[0]

        grad = torch.func.grad
        ux = grad(u, 0)

        def residual(x: Any, t: Any) -> Any:
            return grad(u, 1)(x, t) + u(x, t) * ux(x, t) - 0.003 * grad(ux, 0)(x, t)

        return (torch.func.vmap(residual)(x, t) ** 2).mean()

    data = [R.uniform(-1, 1, N).astype("f4"), R.uniform(0, 1, N).astype("f4")]
    return Model(p, ours, theirs, data)


def kalman() -> Model:
    """The likelihood of 8192 series under a Kalman filter of four states, in f64."""
    B, T, S, M = 8192, 24, 4, 2
    p = {"A": np.eye(S) * 0.9 + 0.02 * R.standard_normal((S, S)), "q": np.zeros(S),
         "C": R.standard_normal((M, S)), "r": np.zeros(M)}

    def ours(p: Any, y: Any) -> Any:
        Q, V = ts.diag(ts.exp(p["q"])), ts.diag(ts.exp(p["r"]))

        def step(c: Any, y: Any) -> Any:
            m, P = c
            m, P = m @ p["A"].T, p["A"] @ P @ p["A"].T + Q
            cov = p["C"] @ P @ p["C"].T + V
            gain = ts.transpose(ts.solve(cov, p["C"] @ P), (0, 2, 1))
            e = y - m @ p["C"].T
            seen = ts.solve(cov, e[..., None])[..., 0]
            value = ts.sum(e * seen, -1) + ts.slogdet(cov)[1]
            return (m + (gain @ e[..., None])[..., 0], P - gain @ p["C"] @ P), value

        first = ts.zeros((B, S), "f64"), ts.broadcast_to(ts.eye(S, dtype="f64"), (B, S, S))
        return ts.mean(ts.scan(step, first, y)[1])

    def theirs(p: Any, y: Any) -> Any:
        Q, V = torch.diag(p["q"].exp()), torch.diag(p["r"].exp())
        m = torch.zeros(B, S, device=y.device, dtype=y.dtype)
        P = torch.eye(S, device=y.device, dtype=y.dtype).expand(B, S, S)
        total = []
        for k in range(T):
            m, P = m @ p["A"].T, p["A"] @ P @ p["A"].T + Q
            cov = p["C"] @ P @ p["C"].T + V
            gain = torch.linalg.solve(cov, p["C"] @ P).transpose(1, 2)
            e = y[k] - m @ p["C"].T
            seen = torch.linalg.solve(cov, e[..., None])[..., 0]
            total.append((e * seen).sum(-1) + torch.linalg.slogdet(cov)[1])
            m, P = m + (gain @ e[..., None])[..., 0], P - gain @ p["C"] @ P
        return torch.stack(total).mean()

    return Model(p, ours, theirs, [R.standard_normal((T, B, M))])


def ode() -> Model:
    """The Lorenz equations, 32 steps of Runge and Kutta for 2^20 starts in f32."""
    N, T, H = 1 << 20, 32, 0.01

    def slope(x: Any, y: Any, z: Any) -> Any:
        return 10.0 * (y - x), x * (28.0 - z) - y, x * y - 8.0 / 3.0 * z

    def moved(s: Any, k: Any, h: float) -> Any:
        return tuple(a + h * b for a, b in zip(s, k, strict=True))

    def step(s: Any) -> Any:
        a = slope(*s)
        b = slope(*moved(s, a, H / 2))
        c = slope(*moved(s, b, H / 2))
        d = slope(*moved(s, c, H))
        return tuple(x + H / 6 * (i + 2 * j + 2 * k + m)
                     for x, i, j, k, m in zip(s, a, b, c, d, strict=True))

    def ours(p: Any, x: Any, y: Any, z: Any) -> Any:
        x, y, z = ts.fori_loop(0, T, lambda _, s: step(s), (x, y, z))
        return ts.mean(x + y + z), x, y, z

    def theirs(p: Any, x: Any, y: Any, z: Any) -> Any:
        s = x, y, z
        for _ in range(T):
            s = step(s)
        return (s[0] + s[1] + s[2]).mean(), *s

    return Model({}, ours, theirs, [numbers(N) for _ in range(3)])


def clip() -> Model:
    """A contrastive loss of 8192 pairs: similarities of all with all, softmax both ways."""
    N, W, D = 8192, 1024, 512
    p = weights(a=(W, D), b=(W, D)) | {"s": np.float32([2.6])}

    def ours(p: Any, x: Any, y: Any) -> Any:
        def unit(z: Any) -> Any:
            z = ts.cast(z, "f32")
            return narrow(z * ts.rsqrt(ts.sum(z * z, -1, keepdims=True) + 1e-6))

        a, b = unit(narrow(x) @ narrow(p["a"])), unit(narrow(y) @ narrow(p["b"]))
        z = ts.cast(a @ b.T, "f32") * ts.exp(p["s"])
        ids = ts.arange(N)
        return (ts.cross_entropy(z, ids) + ts.cross_entropy(z.T, ids)) / 2

    def theirs(p: Any, x: Any, y: Any) -> Any:
        half = torch.bfloat16

        def unit(z: Any) -> Any:
            z = z.float()
            return (z * torch.rsqrt((z * z).sum(-1, keepdim=True) + 1e-6)).to(half)

        a, b = unit(x.to(half) @ p["a"].to(half)), unit(y.to(half) @ p["b"].to(half))
        z = (a @ b.T).float() * p["s"].exp()
        ids = torch.arange(N, device=x.device)
        return (F.cross_entropy(z, ids) + F.cross_entropy(z.T, ids)) / 2

    return Model(p, ours, theirs, [numbers(N, W), numbers(N, W)])


MODELS: dict[str, Callable[[], Model]] = {m.__name__: m for m in (
    gat, unet, llama, gru, mamba, vit, dit, moe, pinn, kalman, ode, clip)}
