"""Models of other kinds of training for `model_steps.py`: policies, codes, adapters, teachers."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
from step_models import Model, R, narrow, numbers, weights

import tessera as ts

if importlib.util.find_spec("torch"):
    import torch
    import torch.nn.functional as F


def ppo(B: int = 512, T: int = 128, D: int = 64, W: int = 256, A: int = 8) -> Model:
    """Proximal policy optimization: advantages by a scan back in time (GAE), a clipped ratio."""
    p = weights(0.1, w1=(D, W), w2=(W, W), pi=(W, A), v=(W, 1), log_std=(A,))

    def ours(p: Any, x: Any, act: Any, old: Any, reward: Any, done: Any, before: Any) -> Any:
        h = ts.tanh(ts.tanh(x @ p["w1"]) @ p["w2"])
        mean, value = h @ p["pi"], (h @ p["v"])[..., 0]
        z = (act - mean) * ts.exp(-p["log_std"])
        logp = ts.sum(-0.5 * z * z - p["log_std"] - 0.5 * np.log(2 * np.pi), -1)

        def back(carry: Any, now: Any) -> Any:
            adv, after = carry
            r, d, v = now
            delta = r + 0.99 * after * (1 - d) - v
            adv = delta + 0.99 * 0.95 * (1 - d) * adv
            return (adv, v), adv

        zero = before[0] * 0
        _, adv = ts.scan(back, (zero, zero), (reward, done, before), reverse=True)
        target = adv + before
        adv = (adv - ts.mean(adv)) / (ts.sqrt(ts.mean((adv - ts.mean(adv)) ** 2)) + 1e-8)
        ratio = ts.exp(logp - old)
        gain = ts.minimum(ratio * adv, ts.clip(ratio, 0.8, 1.2) * adv)
        entropy = ts.sum(p["log_std"])
        return -ts.mean(gain) + 0.5 * ts.mean((value - target) ** 2) - 0.01 * entropy

    def theirs(p: Any, x: Any, act: Any, old: Any, reward: Any, done: Any, before: Any) -> Any:
        h = torch.tanh(torch.tanh(x @ p["w1"]) @ p["w2"])
        mean, value = h @ p["pi"], (h @ p["v"])[..., 0]
        z = (act - mean) * torch.exp(-p["log_std"])
        logp = (-0.5 * z * z - p["log_std"] - 0.5 * float(np.log(2 * np.pi))).sum(-1)
        adv = after = torch.zeros_like(before[0])
        found = []
        for t in range(reward.shape[0] - 1, -1, -1):
            delta = reward[t] + 0.99 * after * (1 - done[t]) - before[t]
            adv = delta + 0.99 * 0.95 * (1 - done[t]) * adv
            after = before[t]
            found.append(adv)
        adv = torch.stack(found[::-1])
        target = adv + before
        adv = (adv - adv.mean()) / (((adv - adv.mean()) ** 2).mean().sqrt() + 1e-8)
        ratio = torch.exp(logp - old)
        gain = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
        return -gain.mean() + 0.5 * ((value - target) ** 2).mean() - 0.01 * p["log_std"].sum()

    data = [numbers(T, B, D), numbers(T, B, A), numbers(T, B) - A, numbers(T, B),
            (R.random((T, B)) < 0.02).astype("f4"), numbers(T, B)]
    return Model(p, ours, theirs, data)


def vae(B: int = 8192, D: int = 784, W: int = 512, Z: int = 20) -> Model:
    """A variational autoencoder of pixels: noise is given, so that both draw the same."""
    p = weights(0.03, e1=(D, W), em=(W, Z), ev=(W, Z), d1=(Z, W), d2=(W, D), b=(W,), c=(D,))

    def ours(p: Any, x: Any, noise: Any) -> Any:
        h = ts.relu(narrow(x) @ narrow(p["e1"]) + narrow(p["b"]))
        mean, log_var = (ts.cast(h @ narrow(p[k]), p[k].type) for k in ("em", "ev"))
        z = mean + ts.exp(0.5 * log_var) * noise
        h = ts.relu(narrow(z) @ narrow(p["d1"]))
        y = ts.cast(h @ narrow(p["d2"]) + narrow(p["c"]), x.type)
        rest = ts.sum(ts.softplus(y) - x * y, -1)
        kl = -0.5 * ts.sum(1 + log_var - mean * mean - ts.exp(log_var), -1)
        return ts.mean(rest + kl)

    def theirs(p: Any, x: Any, noise: Any) -> Any:
        h = torch.relu(their_narrow(x) @ their_narrow(p["e1"]) + their_narrow(p["b"]))
        mean, log_var = ((h @ their_narrow(p[k])).to(x.dtype) for k in ("em", "ev"))
        z = mean + torch.exp(0.5 * log_var) * noise
        h = torch.relu(their_narrow(z) @ their_narrow(p["d1"]))
        y = (h @ their_narrow(p["d2"]) + their_narrow(p["c"])).to(x.dtype)
        rest = (F.softplus(y) - x * y).sum(-1)
        kl = -0.5 * (1 + log_var - mean * mean - log_var.exp()).sum(-1)
        return (rest + kl).mean()

    return Model(p, ours, theirs, [R.random((B, D)).astype("f4"), numbers(B, Z)], 1e-2)


def their_narrow(x: Any) -> Any:
    return x.to(torch.bfloat16)


def lora(B: int = 4, S: int = 1024, D: int = 1024, L: int = 4, rank: int = 8) -> Model:
    """Adapters of low rank beside weights that stay as they are, which come with the data."""
    p, frozen = {}, []
    for i in range(L):
        p |= weights(**{f"A{i}": (D, rank), f"a{i}": (D, rank)}) | {
            f"B{i}": np.zeros((rank, 4 * D), "f4"), f"b{i}": np.zeros((rank, D), "f4")}
        frozen += weights(u=(D, 4 * D)).values()
        frozen += weights(d=(4 * D, D)).values()

    def ours(p: Any, x: Any, y: Any, *frozen: Any) -> Any:
        h = narrow(x)
        for i in range(L):
            u, d = (narrow(w) for w in frozen[2 * i:2 * i + 2])
            n = ts.rmsnorm(h, ts.ones(D, h.type))
            k = n @ u + (n @ narrow(p[f"A{i}"])) @ narrow(p[f"B{i}"]) * 2.0
            k = ts.gelu(k)
            h = h + k @ d + (n @ narrow(p[f"a{i}"])) @ narrow(p[f"b{i}"]) * 2.0
        return ts.mean((ts.cast(h, y.type) - y) ** 2)

    def theirs(p: Any, x: Any, y: Any, *frozen: Any) -> Any:
        h = their_narrow(x)
        for i in range(L):
            u, d = (their_narrow(w) for w in frozen[2 * i:2 * i + 2])
            n = F.rms_norm(h, (D,), None, 1e-6)
            k = n @ u + (n @ their_narrow(p[f"A{i}"])) @ their_narrow(p[f"B{i}"]) * 2.0
            k = F.gelu(k, approximate="tanh")
            h = h + k @ d + (n @ their_narrow(p[f"a{i}"])) @ their_narrow(p[f"b{i}"]) * 2.0
        return ((h.to(y.dtype) - y) ** 2).mean()

    return Model(p, ours, theirs, [numbers(B, S, D), numbers(B, S, D), *frozen], 1e-2)


def distill(B: int = 4096, D: int = 512, W: int = 1024, C: int = 1000) -> Model:
    """A student of a wider teacher: labels, and the teacher's odds at a temperature."""
    p = weights(0.05, w1=(D, W // 2), w2=(W // 2, C))
    teacher = weights(0.05, a=(D, W), b=(W, C))

    def ours(p: Any, x: Any, y: Any, a: Any, b: Any) -> Any:
        t = ts.relu(narrow(x) @ narrow(a)) @ narrow(b)
        s = ts.relu(narrow(x) @ narrow(p["w1"])) @ narrow(p["w2"])
        t, s = (ts.cast(v, x.type) for v in (ts.stop_gradient(t), s))
        t, u = ts.log_softmax(t / 3.0, -1), ts.log_softmax(s / 3.0, -1)
        kl = ts.mean(ts.sum(ts.exp(t) * (t - u), -1)) * 9.0
        return 0.7 * kl + 0.3 * ts.cross_entropy(s, y)

    def theirs(p: Any, x: Any, y: Any, a: Any, b: Any) -> Any:
        with torch.no_grad():
            t = torch.relu(their_narrow(x) @ their_narrow(a)) @ their_narrow(b)
        s = torch.relu(their_narrow(x) @ their_narrow(p["w1"])) @ their_narrow(p["w2"])
        t, s = t.to(x.dtype), s.to(x.dtype)
        t, u = F.log_softmax(t / 3.0, -1), F.log_softmax(s / 3.0, -1)
        kl = (t.exp() * (t - u)).sum(-1).mean() * 9.0
        return 0.7 * kl + 0.3 * F.cross_entropy(s, y)

    return Model(p, ours, theirs, [numbers(B, D), R.integers(0, C, B), *teacher.values()], 1e-2)


def qat(B: int = 8192, D: int = 1024, L: int = 4, C: int = 100) -> Model:
    """An MLP whose weights and activations are rounded to 8 bits, with gradients straight
    through."""
    p = weights(0.03, head=(D, C)) | {f"s{i}": np.float32([4.0]) for i in range(L)}
    for i in range(L):
        p |= weights(0.03, **{f"w{i}": (D, D), f"b{i}": (D,)})

    def ours(p: Any, x: Any, y: Any) -> Any:
        def rounded(v: Any, scale: Any) -> Any:
            q = ts.clip(ts.round(v / scale), -127, 127) * scale
            return v + ts.stop_gradient(q - v)

        for i in range(L):
            w = p[f"w{i}"]
            w = rounded(w, ts.stop_gradient(ts.max(ts.abs(w), 0, keepdims=True)) / 127)
            bound = ts.abs(p[f"s{i}"])
            x = ts.clip(x, -bound, bound)
            x = rounded(x, ts.stop_gradient(bound) / 127)
            x = ts.relu(ts.cast(narrow(x) @ narrow(w), x.type) + p[f"b{i}"])
        return ts.cross_entropy(x @ p["head"], y)

    def theirs(p: Any, x: Any, y: Any) -> Any:
        def rounded(v: Any, scale: Any) -> Any:
            q = torch.clamp(torch.round(v / scale), -127, 127) * scale
            return v + (q - v).detach()

        for i in range(L):
            w = p[f"w{i}"]
            w = rounded(w, w.abs().amax(0, keepdim=True).detach() / 127)
            bound = p[f"s{i}"].abs()
            x = torch.minimum(torch.maximum(x, -bound), bound)
            x = rounded(x, bound.detach() / 127)
            x = torch.relu((their_narrow(x) @ their_narrow(w)).to(x.dtype) + p[f"b{i}"])
        return F.cross_entropy(x @ p["head"], y)

    return Model(p, ours, theirs, [numbers(B, D), R.integers(0, C, B)], 1e-2)


def perceiver(B: int = 32, T: int = 2048, D: int = 64, N: int = 128, W: int = 512, L: int = 4,
              H: int = 8, C: int = 100) -> Model:
    """Learned latents that read a long input, and then each other."""
    p = weights(z=(N, W), i=(D, W), head=(W, C))
    for i in range(L):
        p |= weights(**{f"{n}{i}": (W, W) for n in ("cq", "ck", "cv", "co", "so")},
                     **{f"qkv{i}": (W, 3 * W), f"u{i}": (W, 2 * W), f"d{i}": (2 * W, W)})

    def ours(p: Any, x: Any, y: Any) -> Any:
        def heads(v: Any) -> Any:
            return v.reshape(B, -1, H, W // H).transpose(0, 2, 1, 3)

        def joined(v: Any) -> Any:
            return v.transpose(0, 2, 1, 3).reshape(B, -1, W)

        q = {k: narrow(v) for k, v in p.items()}
        x = ts.layernorm(narrow(x) @ q["i"])
        z = ts.broadcast_to(q["z"][None], (B, N, W))
        for i in range(L):
            a = ts.attention(heads(ts.layernorm(z) @ q[f"cq{i}"]), heads(x @ q[f"ck{i}"]),
                             heads(x @ q[f"cv{i}"]))
            z = z + joined(a) @ q[f"co{i}"]
            s = ts.split(ts.layernorm(z) @ q[f"qkv{i}"], 3, -1)
            z = z + joined(ts.attention(*map(heads, s))) @ q[f"so{i}"]
            z = z + ts.gelu(ts.layernorm(z) @ q[f"u{i}"]) @ q[f"d{i}"]
        out = ts.mean(z, 1) @ q["head"]
        return ts.cross_entropy(ts.cast(out, p["z"].type), y)

    def theirs(p: Any, x: Any, y: Any) -> Any:
        def heads(v: Any) -> Any:
            return v.reshape(B, -1, H, W // H).transpose(1, 2)

        def joined(v: Any) -> Any:
            return v.transpose(1, 2).reshape(B, -1, W)

        def norm(v: Any) -> Any:
            return F.layer_norm(v, (v.shape[-1],))

        def attend(*s: Any) -> Any:
            return F.scaled_dot_product_attention(*map(heads, s))

        q = {k: their_narrow(v) for k, v in p.items()}
        x = norm(their_narrow(x) @ q["i"])
        z = q["z"][None].expand(B, N, W)
        for i in range(L):
            a = attend(norm(z) @ q[f"cq{i}"], x @ q[f"ck{i}"], x @ q[f"cv{i}"])
            z = z + joined(a) @ q[f"co{i}"]
            z = z + joined(attend(*(norm(z) @ q[f"qkv{i}"]).chunk(3, -1))) @ q[f"so{i}"]
            z = z + F.gelu(norm(z) @ q[f"u{i}"], approximate="tanh") @ q[f"d{i}"]
        out = z.mean(1) @ q["head"]
        return F.cross_entropy(out.to(p["z"].dtype), y)

    return Model(p, ours, theirs, [numbers(B, T, D), R.integers(0, C, B)], 1e-2)


def retention(B: int = 8, T: int = 2048, D: int = 512, H: int = 8, Q: int = 128) -> Model:
    """Linear attention with a decay for each head, in chunks whose states a scan carries."""
    p = {}
    for i in range(2):
        p |= weights(**{f"qkv{i}": (D, 3 * D), f"g{i}": (D, D), f"o{i}": (D, D)})
    hd, n = D // H, T // Q
    rate = np.log(1 - 2.0 ** (-5 - np.arange(H)))

    def ours(p: Any, x: Any, y: Any, inside: Any, first: Any, last: Any, whole: Any) -> Any:
        h = narrow(x)
        inside, first, last, whole = (narrow(v) for v in (inside, first, last, whole))

        def chunks(v: Any) -> Any:
            return v.reshape(B, n, Q, H, hd).transpose(1, 0, 3, 2, 4)

        def step(s: Any, qkv: Any) -> Any:
            q, k, v = qkv
            near = ((q @ k.mT) * inside) @ v
            far = (q @ s) * first
            return s * whole + (k * last).mT @ v, near + far

        for i in range(2):
            q, k, v = map(chunks, ts.split(h @ narrow(p[f"qkv{i}"]), 3, -1))
            zero = ts.zeros((B, H, hd, hd), h.type)
            _, o = ts.scan(step, zero, (q, k * hd ** -0.5, v))
            o = ts.layernorm(o.transpose(1, 0, 3, 2, 4)).reshape(B, T, D)
            h = h + (ts.silu(h @ narrow(p[f"g{i}"])) * o) @ narrow(p[f"o{i}"])
        return ts.mean((ts.cast(h, y.type) - y) ** 2)

    def theirs(p: Any, x: Any, y: Any, inside: Any, first: Any, last: Any, whole: Any) -> Any:
        h = their_narrow(x)
        inside, first, last, whole = map(their_narrow, (inside, first, last, whole))

        def chunks(v: Any) -> Any:
            return v.reshape(B, n, Q, H, hd).permute(1, 0, 3, 2, 4)

        for i in range(2):
            q, k, v = map(chunks, (h @ their_narrow(p[f"qkv{i}"])).chunk(3, -1))
            k = k * hd ** -0.5
            s, found = torch.zeros(B, H, hd, hd, device=h.device, dtype=h.dtype), []
            for t in range(n):
                near = ((q[t] @ k[t].mT) * inside) @ v[t]
                found.append(near + (q[t] @ s) * first)
                s = s * whole + (k[t] * last).mT @ v[t]
            o = F.layer_norm(torch.stack(found).permute(1, 0, 3, 2, 4), (hd,)).reshape(B, T, D)
            h = h + (F.silu(h @ their_narrow(p[f"g{i}"])) * o) @ their_narrow(p[f"o{i}"])
        return ((h.to(y.dtype) - y) ** 2).mean()

    at = np.arange(Q)
    apart = at[:, None] - at
    inside = np.where(apart >= 0, np.exp(rate[:, None, None] * np.maximum(apart, 0)), 0)
    first = np.exp(rate[:, None] * (at + 1))[..., None]
    last = np.exp(rate[:, None] * (Q - 1 - at))[..., None]
    whole = np.exp(rate * Q)[:, None, None]
    held = [v.astype("f4") for v in (inside, first, last, whole)]
    return Model(p, ours, theirs, [numbers(B, T, D), numbers(B, T, D), *held], 2e-2)


MODELS = {m.__name__: m for m in (ppo, vae, lora, distill, qat, perceiver, retention)}
