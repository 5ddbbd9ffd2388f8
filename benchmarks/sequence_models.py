"""Models of text, sound and clicks for `model_steps.py`."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
from step_models import Model, R, kernel, narrow, narrowed, numbers, torch_narrowed, weights

import tessera as ts

if importlib.util.find_spec("torch"):
    import torch
    import torch.nn.functional as F


def bert() -> Model:
    """BERT's encoder with padding, masked words."""
    B, S, D, H, L, V = 32, 512, 768, 12, 6, 30522
    p = weights(e=(V, D), pos=(S, D), mlm=(D, D), mb=(V,))
    for i in range(L):
        p |= weights(
            **{
                f"q{i}": (D, D),
                f"k{i}": (D, D),
                f"v{i}": (D, D),
                f"o{i}": (D, D),
                f"u{i}": (D, 4 * D),
                f"d{i}": (4 * D, D),
                f"bq{i}": (D,),
                f"bk{i}": (D,),
                f"bv{i}": (D,),
                f"bo{i}": (D,),
                f"bu{i}": (4 * D,),
                f"bd{i}": (D,),
            }
        )
        p |= {f"g{j}{i}": np.ones(D, "f4") for j in "12"} | {
            f"h{j}{i}": np.zeros(D, "f4") for j in "12"
        }
    n = R.integers(S // 2, S + 1, B)
    keep = np.arange(S)[None] < n[:, None]
    ids = R.integers(0, V, (B, S))
    y = np.where(R.random((B, S)) < 0.15, ids, -100)
    y[~keep] = -100

    def ours(p: Any, ids: Any, keep: Any, y: Any) -> Any:
        p = narrowed(p)
        x = p["e"][ids] + p["pos"]
        m = keep[:, None, None, :]
        for i in range(L):
            q, k, v = (
                (x @ p[f"{c}{i}"] + p[f"b{c}{i}"]).reshape(B, S, H, D // H).transpose(0, 2, 1, 3)
                for c in "qkv"
            )
            a = ts.attention(q, k, v, mask=m).transpose(0, 2, 1, 3).reshape(B, S, D)
            x = ts.layernorm(x + a @ p[f"o{i}"] + p[f"bo{i}"], p[f"g1{i}"], p[f"h1{i}"])
            h = ts.gelu(x @ p[f"u{i}"] + p[f"bu{i}"]) @ p[f"d{i}"] + p[f"bd{i}"]
            x = ts.layernorm(x + h, p[f"g2{i}"], p[f"h2{i}"])
        z = ts.gelu(x @ p["mlm"]) @ p["e"].T + p["mb"]
        return ts.cross_entropy(ts.cast(z, "f32"), y, ignore_index=-100)

    def theirs(p: Any, ids: Any, keep: Any, y: Any) -> Any:
        p = torch_narrowed(p)
        x = p["e"][ids] + p["pos"]
        m = keep[:, None, None, :]
        for i in range(L):
            q, k, v = (
                (x @ p[f"{c}{i}"] + p[f"b{c}{i}"]).reshape(B, S, H, D // H).transpose(1, 2)
                for c in "qkv"
            )
            a = (
                F.scaled_dot_product_attention(q, k, v, attn_mask=m)
                .transpose(1, 2)
                .reshape(B, S, D)
            )
            x = F.layer_norm(x + a @ p[f"o{i}"] + p[f"bo{i}"], (D,), p[f"g1{i}"], p[f"h1{i}"])
            h = F.gelu(x @ p[f"u{i}"] + p[f"bu{i}"], approximate="tanh") @ p[f"d{i}"] + p[f"bd{i}"]
            x = F.layer_norm(x + h, (D,), p[f"g2{i}"], p[f"h2{i}"])
        z = F.gelu(x @ p["mlm"], approximate="tanh") @ p["e"].T + p["mb"]
        return F.cross_entropy(z.float().reshape(-1, V), y.reshape(-1), ignore_index=-100)

    return Model(p, ours, theirs, [ids, keep, y], 1e-2)


def t5() -> Model:
    """Encoder and decoder with learned relative positions."""
    B, S, T, D, H, L, V = 32, 512, 128, 512, 8, 4, 32128
    p = weights(e=(V, D), rb=(32, H), rd=(32, H))
    for i in range(L):
        for s in ("E", "D"):
            p |= weights(
                **{
                    f"{s}qkv{i}": (D, 3 * D),
                    f"{s}o{i}": (D, D),
                    f"{s}u{i}": (D, 4 * D),
                    f"{s}g{i}": (D, 4 * D),
                    f"{s}d{i}": (4 * D, D),
                }
            )
            p |= {f"{s}n{j}{i}": np.ones(D, "f4") for j in range(3)}
        p |= weights(**{f"cq{i}": (D, D), f"ckv{i}": (D, 2 * D), f"co{i}": (D, D)})

    def bucket(n: Any, both: Any) -> Any:
        r = np.arange(n)[None] - np.arange(n)[:, None]
        nb = 32
        out = 0
        if both:
            nb = 16
            out = (r > 0) * nb
            r = np.abs(r)
        else:
            r = np.maximum(-r, 0)
        big = nb // 2 + (
            np.log(np.maximum(r, 1) / (nb // 2)) / np.log(128 / (nb // 2)) * (nb - nb // 2)
        ).astype(int)
        return (out + np.where(r < nb // 2, r, np.minimum(big, nb - 1))).astype("i8")

    be, bd = bucket(S, True), bucket(T, False)

    def ours(p: Any, x: Any, t: Any, y: Any, be: Any, bd: Any) -> Any:
        p = narrowed(p)

        def heads(z: Any, n: Any) -> Any:
            return [
                a.reshape(B, -1, H, D // H).transpose(0, 2, 1, 3)
                for a in (ts.split(z, n, -1) if n > 1 else [z])
            ]

        def att(q: Any, k: Any, v: Any, **a: Any) -> Any:
            return ts.attention(q, k, v, **a).transpose(0, 2, 1, 3).reshape(B, -1, D)

        bias, cb = p["rb"][be].transpose(2, 0, 1), p["rd"][bd].transpose(2, 0, 1)
        x = p["e"][x]

        def ff(x: Any, s: Any, i: Any, j: Any) -> Any:
            h = ts.rmsnorm(x, p[f"{s}n{j}{i}"])
            return x + (ts.gelu(h @ p[f"{s}g{i}"]) * (h @ p[f"{s}u{i}"])) @ p[f"{s}d{i}"]

        for i in range(L):
            q, k, v = heads(ts.rmsnorm(x, p[f"En0{i}"]) @ p[f"Eqkv{i}"], 3)
            x = ff(x + att(q, k, v, mask=bias) @ p[f"Eo{i}"], "E", i, 1)
        t = p["e"][t]
        for i in range(L):
            q, k, v = heads(ts.rmsnorm(t, p[f"Dn0{i}"]) @ p[f"Dqkv{i}"], 3)
            t = t + att(q, k, v, mask=cb, causal=True) @ p[f"Do{i}"]
            q, (k, v) = (
                heads(ts.rmsnorm(t, p[f"Dn1{i}"]) @ p[f"cq{i}"], 1)[0],
                heads(x @ p[f"ckv{i}"], 2),
            )
            t = ff(t + att(q, k, v) @ p[f"co{i}"], "D", i, 2)
        return ts.cross_entropy(ts.cast(t @ p["e"].T, "f32"), y)

    def theirs(p: Any, x: Any, t: Any, y: Any, be: Any, bd: Any) -> Any:
        p = torch_narrowed(p)

        def heads(z: Any, n: Any) -> Any:
            return [a.reshape(B, -1, H, D // H).transpose(1, 2) for a in z.chunk(n, -1)]

        def att(q: Any, k: Any, v: Any, **a: Any) -> Any:
            return F.scaled_dot_product_attention(q, k, v, **a).transpose(1, 2).reshape(B, -1, D)

        bias, cb = p["rb"][be].permute(2, 0, 1), p["rd"][bd].permute(2, 0, 1)
        cb = cb.masked_fill(
            torch.ones(T, T, dtype=torch.bool, device=cb.device).triu(1), -float("inf")
        )
        x = p["e"][x]

        def ff(x: Any, s: Any, i: Any, j: Any) -> Any:
            h = F.rms_norm(x, (D,), p[f"{s}n{j}{i}"], 1e-6)
            return (
                x
                + (F.gelu(h @ p[f"{s}g{i}"], approximate="tanh") * (h @ p[f"{s}u{i}"]))
                @ p[f"{s}d{i}"]
            )

        for i in range(L):
            q, k, v = heads(F.rms_norm(x, (D,), p[f"En0{i}"], 1e-6) @ p[f"Eqkv{i}"], 3)
            x = ff(
                x + att(q, k, v, attn_mask=bias[None].expand(B, H, S, S)) @ p[f"Eo{i}"], "E", i, 1
            )
        t = p["e"][t]
        for i in range(L):
            q, k, v = heads(F.rms_norm(t, (D,), p[f"Dn0{i}"], 1e-6) @ p[f"Dqkv{i}"], 3)
            t = t + att(q, k, v, attn_mask=cb[None].expand(B, H, T, T)) @ p[f"Do{i}"]
            q, (k, v) = (
                heads(F.rms_norm(t, (D,), p[f"Dn1{i}"], 1e-6) @ p[f"cq{i}"], 1)[0],
                heads(x @ p[f"ckv{i}"], 2),
            )
            t = ff(t + att(q, k, v) @ p[f"co{i}"], "D", i, 2)
        return F.cross_entropy((t @ p["e"].T).float().reshape(-1, V), y.reshape(-1))

    return Model(
        p,
        ours,
        theirs,
        [R.integers(0, V, (B, S)), R.integers(0, V, (B, T)), R.integers(0, V, (B, T)), be, bd],
        1e-2,
    )


def lstm() -> Model:
    """A language model of two LSTM layers: ts.scan, and the LSTM of cuDNN."""
    B, T, D, V = 64, 128, 650, 10000
    p = weights(
        0.04,
        e=(V, D),
        w0=(4 * D, D),
        u0=(4 * D, D),
        b0=(4 * D,),
        c0=(4 * D,),
        w1=(4 * D, D),
        u1=(4 * D, D),
        b1=(4 * D,),
        c1=(4 * D,),
        o=(D, V),
    )

    def ours(p: Any, ids: Any, y: Any) -> Any:
        p = narrowed(p)
        x = p["e"][ids]
        for i in range(2):

            def step(s: Any, g: Any, i: Any = i) -> Any:
                h, c = s
                a, f, n, o = ts.split(g + h @ p[f"u{i}"].T + p[f"c{i}"], 4, -1)
                c = ts.sigmoid(f) * c + ts.sigmoid(a) * ts.tanh(n)
                h = ts.sigmoid(o) * ts.tanh(c)
                return (h, c), h

            zero = ts.zeros((B, D), "bf16")
            _, x = ts.scan(step, (zero, zero), x @ p[f"w{i}"].T + p[f"b{i}"])
        return ts.cross_entropy(ts.cast(x @ p["o"], "f32"), y)

    def theirs(p: Any, ids: Any, y: Any) -> Any:
        p = torch_narrowed(p)
        x = p["e"][ids]
        zero = torch.zeros(2, B, D, device=x.device, dtype=x.dtype)
        w = [p[f"{k}{i}"] for i in range(2) for k in "wubc"]
        x = torch._VF.lstm(x, (zero, zero), w, True, 2, 0.0, True, False, False)[0]
        return F.cross_entropy((x @ p["o"]).float().reshape(-1, V), y.reshape(-1))

    return Model(p, ours, theirs, [R.integers(0, V, (T, B)), R.integers(0, V, (T, B))], 2e-2)


def wavenet() -> Model:
    """Dilated causal convolutions with gates."""
    B, T, C, S, L = 8, 8192, 128, 128, 10
    p = {"i": kernel(C, 1, 2), "e": kernel(256, S, 1)}
    for n in range(L):
        p |= {f"w{n}": kernel(2 * C, C, 2), f"r{n}": kernel(C, C, 1), f"s{n}": kernel(S, C, 1)}

    def ours(p: Any, x: Any, y: Any) -> Any:
        p = narrowed(p)
        x = ts.conv1d(ts.pad(narrow(x), ((0, 0), (0, 0), (1, 0))), p["i"])
        out = 0
        for n in range(L):
            d = 1 << n
            a, g = ts.split(
                ts.conv1d(ts.pad(x, ((0, 0), (0, 0), (d, 0))), p[f"w{n}"], dilation=d), 2, 1
            )
            h = ts.tanh(a) * ts.sigmoid(g)
            out = out + ts.conv1d(h, p[f"s{n}"])
            x = x + ts.conv1d(h, p[f"r{n}"])
        z = ts.conv1d(ts.relu(out), p["e"])
        return ts.cross_entropy(ts.cast(z, "f32").transpose(0, 2, 1), y)

    def theirs(p: Any, x: Any, y: Any) -> Any:
        p = {k: v.to(torch.bfloat16) for k, v in p.items()}
        x = F.conv1d(F.pad(x.to(torch.bfloat16), (1, 0)), p["i"])
        out = 0
        for n in range(L):
            d = 1 << n
            a, g = F.conv1d(F.pad(x, (d, 0)), p[f"w{n}"], dilation=d).chunk(2, 1)
            h = torch.tanh(a) * torch.sigmoid(g)
            out = out + F.conv1d(h, p[f"s{n}"])
            x = x + F.conv1d(h, p[f"r{n}"])
        z = F.conv1d(F.relu(out), p["e"])
        return F.cross_entropy(z.float(), y)

    return Model(p, ours, theirs, [numbers(B, 1, T), R.integers(0, 256, (B, T))], 2e-2)


def dlrm() -> Model:
    """26 tables, several rows of each summed, and their products by pairs."""
    B, N, D, V, K = 8192, 26, 64, 20000, 4
    p = weights(
        0.05,
        b1=(13, 512),
        b2=(512, 256),
        b3=(256, D),
        t=(N, V, D),
        t1=(D + (N + 1) * N // 2, 512),
        t2=(512, 256),
        t3=(256, 1),
    )
    i, j = np.tril_indices(N + 1, -1)

    def ours(p: Any, x: Any, ids: Any, y: Any, i: Any, j: Any) -> Any:
        h = x
        for k in ("b1", "b2", "b3"):
            h = ts.relu(h @ p[k])
        e = ts.sum(ts.stack([p["t"][n][ids[:, n]] for n in range(N)], 1), 2)
        z = ts.concatenate([h[:, None], e], 1)
        s = (z @ z.mT)[:, i, j]
        z = ts.concatenate([h, s], 1)
        z = (ts.relu(ts.relu(z @ p["t1"]) @ p["t2"]) @ p["t3"])[:, 0]
        return ts.mean(ts.softplus(z) - z * y)

    def theirs(p: Any, x: Any, ids: Any, y: Any, i: Any, j: Any) -> Any:
        h = x
        for k in ("b1", "b2", "b3"):
            h = F.relu(h @ p[k])
        e = torch.stack([p["t"][n][ids[:, n]] for n in range(N)], 1).sum(2)
        z = torch.cat([h[:, None], e], 1)
        s = (z @ z.mT)[:, i, j]
        z = torch.cat([h, s], 1)
        z = (F.relu(F.relu(z @ p["t1"]) @ p["t2"]) @ p["t3"])[:, 0]
        return (F.softplus(z) - z * y).mean()

    return Model(
        p,
        ours,
        theirs,
        [numbers(B, 13), R.integers(0, V, (B, N, K)), R.integers(0, 2, B).astype("f4"), i, j],
        5e-3,
    )


MODELS = {m.__name__: m for m in (bert, t5, lstm, wavenet, dlrm)}
