"""Models of images for `model_steps.py`: convolutions, windows and rays."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
from step_models import Model, R, kernel, narrow, narrowed, numbers, torch_narrowed, weights

import tessera as ts

if importlib.util.find_spec("torch"):
    import torch
    import torch.nn.functional as F


def resnet() -> Model:
    """ResNet-50 of 224 x 224, batch statistics."""
    B, HW, blocks = 64, 224, (3, 4, 6, 3)
    p = {"stem": kernel(64, 3, 7, 7)}
    bn = {"stem": 64}
    plan = []
    c = 64
    for s, n in enumerate(blocks):
        w = 64 << s
        for b in range(n):
            st = 2 if s and not b else 1
            k = f"s{s}b{b}"
            p |= {
                k + "a": kernel(w, c, 1, 1),
                k + "b": kernel(w, w, 3, 3),
                k + "c": kernel(4 * w, w, 1, 1),
            }
            bn |= {k + "a": w, k + "b": w, k + "c": 4 * w}
            if not b:
                p[k + "d"] = kernel(4 * w, c, 1, 1)
                bn[k + "d"] = 4 * w
            plan.append((k, st, not b))
            c = 4 * w
    for k, n in bn.items():
        p["g" + k] = np.ones(n, "f4")
        p["h" + k] = np.zeros(n, "f4")
    p |= weights(0.01, fc=(c, 1000), fb=(1000,))

    def ours(p: Any, x: Any, y: Any) -> Any:
        q = {k: v if k[0] in "gh" else narrow(v) for k, v in p.items()}

        def cb(x: Any, k: Any, act: Any = True, **a: Any) -> Any:
            x = ts.batch_norm(ts.conv2d(x, q[k], **a), q["g" + k], q["h" + k])
            return ts.relu(x) if act else x

        x = ts.max_pool2d(cb(narrow(x), "stem", stride=2, padding=3), 3, 2, 1)
        for k, st, d in plan:
            r = cb(x, k + "d", False, stride=st) if d else x
            h = cb(cb(x, k + "a"), k + "b", stride=st, padding=1)
            x = ts.relu(cb(h, k + "c", False) + r)
        x = ts.mean(x, (2, 3)) @ q["fc"] + q["fb"]
        return ts.cross_entropy(ts.cast(x, "f32"), y)

    def theirs(p: Any, x: Any, y: Any) -> Any:
        q = {k: v if k[0] in "gh" else v.to(torch.bfloat16) for k, v in p.items()}
        q = {
            k: v.to(memory_format=torch.channels_last) if v.dim() == 4 else v for k, v in q.items()
        }

        def cb(x: Any, k: Any, act: Any = True, **a: Any) -> Any:
            x = F.batch_norm(F.conv2d(x, q[k], **a), None, None, q["g" + k], q["h" + k], True)
            return F.relu(x) if act else x

        x = x.to(torch.bfloat16).to(memory_format=torch.channels_last)
        x = F.max_pool2d(cb(x, "stem", stride=2, padding=3), 3, 2, 1)
        for k, st, d in plan:
            r = cb(x, k + "d", False, stride=st) if d else x
            h = cb(cb(x, k + "a"), k + "b", stride=st, padding=1)
            x = F.relu(cb(h, k + "c", False) + r)
        x = x.mean((2, 3)) @ q["fc"] + q["fb"]
        return F.cross_entropy(x.float(), y)

    return Model(p, ours, theirs, [numbers(B, 3, HW, HW), R.integers(0, 1000, B)], 2e-2)


def convnext() -> Model:
    """ConvNeXt-T's first stages: depthwise 7 x 7, layer norm over channels, two matmuls."""
    B, HW = 64, 224
    dims, n = (96, 192, 384), (2, 2, 2)
    p = {"stem": kernel(96, 3, 4, 4)}
    for s, d in enumerate(dims):
        if s:
            p[f"down{s}"] = kernel(d, dims[s - 1], 2, 2)
        for b in range(n[s]):
            k = f"{s}{b}"
            p |= {
                "dw" + k: kernel(d, 1, 7, 7),
                "g" + k: np.ones(d, "f4"),
                "h" + k: np.zeros(d, "f4"),
                "l" + k: np.full(d, 0.1, "f4"),
            }
            p |= weights(
                0.02,
                **{"u" + k: (d, 4 * d), "v" + k: (4 * d, d), "bu" + k: (4 * d,), "bv" + k: (d,)},
            )
    p |= weights(fc=(384, 1000))

    def ours(p: Any, x: Any, y: Any) -> Any:
        p = narrowed(p)
        x = ts.conv2d(narrow(x), p["stem"], stride=4)
        for s, d in enumerate(dims):
            if s:
                x = ts.conv2d(x, p[f"down{s}"], stride=2)
            for b in range(n[s]):
                k = f"{s}{b}"
                h = ts.conv2d(x, p["dw" + k], padding=3, groups=d).transpose(0, 2, 3, 1)
                h = ts.layernorm(h, p["g" + k], p["h" + k]) @ p["u" + k] + p["bu" + k]
                h = (ts.gelu(h) @ p["v" + k] + p["bv" + k]) * p["l" + k]
                x = x + h.transpose(0, 3, 1, 2)
        return ts.cross_entropy(ts.cast(ts.mean(x, (2, 3)) @ p["fc"], "f32"), y)

    def theirs(p: Any, x: Any, y: Any) -> Any:
        p = torch_narrowed(p)
        x = F.conv2d(
            x.to(torch.bfloat16).to(memory_format=torch.channels_last), p["stem"], stride=4
        )
        for s, d in enumerate(dims):
            if s:
                x = F.conv2d(x, p[f"down{s}"], stride=2)
            for b in range(n[s]):
                k = f"{s}{b}"
                h = F.conv2d(x, p["dw" + k], padding=3, groups=d).permute(0, 2, 3, 1)
                h = F.layer_norm(h, (d,), p["g" + k], p["h" + k]) @ p["u" + k] + p["bu" + k]
                h = (F.gelu(h, approximate="tanh") @ p["v" + k] + p["bv" + k]) * p["l" + k]
                x = x + h.permute(0, 3, 1, 2)
        return F.cross_entropy((x.mean((2, 3)) @ p["fc"]).float(), y)

    return Model(p, ours, theirs, [numbers(B, 3, HW, HW), R.integers(0, 1000, B)], 2e-2)


def mbconv() -> Model:
    """EfficientNet's inverted bottlenecks: expansion, depthwise, squeeze and excitation."""
    B, HW, C, E, L = 64, 56, 48, 6, 4
    p = {"i": kernel(C, 3, 3, 3)}
    M = C * E
    for i in range(L):
        p |= {
            f"a{i}": kernel(M, C, 1, 1),
            f"w{i}": kernel(M, 1, 5, 5),
            f"s{i}": kernel(C // 4, M, 1, 1),
            f"t{i}": kernel(M, C // 4, 1, 1),
            f"b{i}": kernel(C, M, 1, 1),
        }
        for k, n in (("g1", M), ("g2", M), ("g3", C)):
            p |= {f"{k}{i}": np.ones(n, "f4"), f"h{k[1]}{i}": np.zeros(n, "f4")}
    p |= weights(fc=(C, 1000))

    def ours(p: Any, x: Any, y: Any) -> Any:
        q = {k: v if k[0] in "gh" else narrow(v) for k, v in p.items()}
        x = ts.conv2d(narrow(x), q["i"], padding=1)
        for i in range(L):
            h = ts.silu(ts.batch_norm(ts.conv2d(x, q[f"a{i}"]), q[f"g1{i}"], q[f"h1{i}"]))
            h = ts.silu(
                ts.batch_norm(
                    ts.conv2d(h, q[f"w{i}"], padding=2, groups=M), q[f"g2{i}"], q[f"h2{i}"]
                )
            )
            s = ts.mean(h, (2, 3), keepdims=True)
            h = h * ts.sigmoid(ts.conv2d(ts.silu(ts.conv2d(s, q[f"s{i}"])), q[f"t{i}"]))
            x = x + ts.batch_norm(ts.conv2d(h, q[f"b{i}"]), q[f"g3{i}"], q[f"h3{i}"])
        return ts.cross_entropy(ts.cast(ts.mean(x, (2, 3)) @ q["fc"], "f32"), y)

    def theirs(p: Any, x: Any, y: Any) -> Any:
        q = {k: v if k[0] in "gh" else v.to(torch.bfloat16) for k, v in p.items()}
        q = {
            k: v.to(memory_format=torch.channels_last) if v.dim() == 4 else v for k, v in q.items()
        }
        x = F.conv2d(x.to(torch.bfloat16).to(memory_format=torch.channels_last), q["i"], padding=1)

        def bn(x: Any, g: Any, h: Any) -> Any:
            return F.batch_norm(x, None, None, g, h, True)

        for i in range(L):
            h = F.silu(bn(F.conv2d(x, q[f"a{i}"]), q[f"g1{i}"], q[f"h1{i}"]))
            h = F.silu(bn(F.conv2d(h, q[f"w{i}"], padding=2, groups=M), q[f"g2{i}"], q[f"h2{i}"]))
            s = h.mean((2, 3), keepdim=True)
            h = h * torch.sigmoid(F.conv2d(F.silu(F.conv2d(s, q[f"s{i}"])), q[f"t{i}"]))
            x = x + bn(F.conv2d(h, q[f"b{i}"]), q[f"g3{i}"], q[f"h3{i}"])
        return F.cross_entropy((x.mean((2, 3)) @ q["fc"]).float(), y)

    return Model(p, ours, theirs, [numbers(B, 3, HW, HW), R.integers(0, 1000, B)], 2e-2)


def swin() -> Model:
    """Windows of 7 x 7, every second block shifted, learned positions."""
    B, HW, D, H, L, W = 64, 56, 96, 3, 4, 7
    N = W * W
    hd = D // H
    p = weights(e=(48, D), fc=(D, 1000))
    for i in range(L):
        p |= weights(
            **{
                f"qkv{i}": (D, 3 * D),
                f"o{i}": (D, D),
                f"u{i}": (D, 4 * D),
                f"d{i}": (4 * D, D),
                f"rb{i}": ((2 * W - 1) ** 2, H),
            }
        )
        p |= {f"g{j}{i}": np.ones(D, "f4") for j in "12"} | {
            f"h{j}{i}": np.zeros(D, "f4") for j in "12"
        }
    c = np.stack(np.meshgrid(np.arange(W), np.arange(W), indexing="ij")).reshape(2, -1)
    r = c[:, :, None] - c[:, None] + W - 1
    rel = (r[0] * (2 * W - 1) + r[1]).astype("i8")
    z = np.zeros((HW, HW), int)
    for a, s in enumerate((slice(0, -W), slice(-W, -(W // 2)), slice(-(W // 2), None))):
        for b, t in enumerate((slice(0, -W), slice(-W, -(W // 2)), slice(-(W // 2), None))):
            z[s, t] = 3 * a + b
    z = z.reshape(HW // W, W, HW // W, W).transpose(0, 2, 1, 3).reshape(-1, N)
    shut = np.where(z[:, :, None] == z[:, None], 0, -100).astype("f4")
    n = HW // W

    def ours(p: Any, x: Any, y: Any, rel: Any, shut: Any) -> Any:
        p = narrowed(p)
        x = narrow(x) @ p["e"]
        for i in range(L):
            h = ts.layernorm(x, p[f"g1{i}"], p[f"h1{i}"])
            if i % 2:
                h = ts.roll(h, (-(W // 2), -(W // 2)), (1, 2))
            h = (
                h.reshape(B, n, W, n, W, D).transpose(0, 1, 3, 2, 4, 5).reshape(-1, N, D)
                @ p[f"qkv{i}"]
            )
            q, k, v = (a.reshape(-1, N, H, hd).transpose(0, 2, 1, 3) for a in ts.split(h, 3, -1))
            bias = p[f"rb{i}"][rel].transpose(2, 0, 1)
            if i % 2:
                bias = narrow(shut)[:, None] + bias
                bias = ts.broadcast_to(bias[None], (B, n * n, H, N, N)).reshape(-1, H, N, N)
            a = ts.attention(q, k, v, mask=bias).transpose(0, 2, 1, 3).reshape(B, n, n, W, W, D)
            a = a.transpose(0, 1, 3, 2, 4, 5).reshape(B, HW, HW, D) @ p[f"o{i}"]
            if i % 2:
                a = ts.roll(a, (W // 2, W // 2), (1, 2))
            x = x + a
            x = x + ts.gelu(ts.layernorm(x, p[f"g2{i}"], p[f"h2{i}"]) @ p[f"u{i}"]) @ p[f"d{i}"]
        return ts.cross_entropy(ts.cast(ts.mean(x, (1, 2)) @ p["fc"], "f32"), y)

    def theirs(p: Any, x: Any, y: Any, rel: Any, shut: Any) -> Any:
        p = torch_narrowed(p)
        x = x.to(torch.bfloat16) @ p["e"]
        for i in range(L):
            h = F.layer_norm(x, (D,), p[f"g1{i}"], p[f"h1{i}"])
            if i % 2:
                h = torch.roll(h, (-(W // 2), -(W // 2)), (1, 2))
            h = (
                h.reshape(B, n, W, n, W, D).permute(0, 1, 3, 2, 4, 5).reshape(-1, N, D)
                @ p[f"qkv{i}"]
            )
            q, k, v = (a.reshape(-1, N, H, hd).transpose(1, 2) for a in h.chunk(3, -1))
            bias = p[f"rb{i}"][rel].permute(2, 0, 1)
            if i % 2:
                bias = (
                    (shut.to(torch.bfloat16)[:, None] + bias)[None]
                    .expand(B, n * n, H, N, N)
                    .reshape(-1, H, N, N)
                )
            else:
                bias = bias[None].expand(B * n * n, H, N, N)
            a = (
                F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
                .transpose(1, 2)
                .reshape(B, n, n, W, W, D)
            )
            a = a.permute(0, 1, 3, 2, 4, 5).reshape(B, HW, HW, D) @ p[f"o{i}"]
            if i % 2:
                a = torch.roll(a, (W // 2, W // 2), (1, 2))
            x = x + a
            x = (
                x
                + F.gelu(
                    F.layer_norm(x, (D,), p[f"g2{i}"], p[f"h2{i}"]) @ p[f"u{i}"], approximate="tanh"
                )
                @ p[f"d{i}"]
            )
        return F.cross_entropy((x.mean((1, 2)) @ p["fc"]).float(), y)

    return Model(p, ours, theirs, [numbers(B, HW, HW, 48), R.integers(0, 1000, B), rel, shut], 1e-2)


def nerf() -> Model:
    """A network of eight layers at 64 points of 2048 rays, and what they add up to."""
    N, P, D = 2048, 64, 256
    p = weights(
        0.1, w0=(60, D), w4=(D + 60, D), s=(D, 1), f=(D, D), c=(D + 24, D // 2), o=(D // 2, 3)
    )
    for i in (1, 2, 3, 5, 6, 7):
        p |= weights(0.06, **{f"w{i}": (D, D)})
    p |= {f"b{i}": np.zeros(D, "f4") for i in range(8)}

    def ours(p: Any, o: Any, d: Any, t: Any, y: Any) -> Any:
        p = narrowed(p)

        def enc(x: Any, n: Any) -> Any:
            a = (x[..., None, :] * (2.0 ** ts.arange(n, dtype="f32"))[:, None]).reshape(
                *x.shape[:-1], -1
            )
            return narrow(ts.concatenate([ts.sin(a), ts.cos(a)], -1))

        x = o[:, None] + d[:, None] * t[..., None]
        e = enc(x, 10)
        h = e
        for i in range(8):
            if i == 4:
                h = ts.concatenate([h, e], -1)
            h = ts.relu(h @ p[f"w{i}"] + p[f"b{i}"])
        s = ts.relu(ts.cast(h @ p["s"], "f32")[..., 0])
        v = ts.broadcast_to(enc(d, 4)[:, None], (N, P, 24))
        c = ts.sigmoid(
            ts.cast(ts.relu(ts.concatenate([h @ p["f"], v], -1) @ p["c"]) @ p["o"], "f32")
        )
        step = ts.concatenate([t[:, 1:] - t[:, :-1], ts.full((N, 1), 1e2, "f32")], 1)
        a = 1 - ts.exp(-s * step)
        w = a * ts.concatenate([ts.ones((N, 1)), ts.cumprod(1 - a + 1e-10, 1)[:, :-1]], 1)
        return ts.mse(ts.sum(w[..., None] * c, 1), y)

    def theirs(p: Any, o: Any, d: Any, t: Any, y: Any) -> Any:
        p = torch_narrowed(p)

        def enc(x: Any, n: Any) -> Any:
            a = (
                x[..., None, :]
                * (2.0 ** torch.arange(n, device=x.device, dtype=torch.float32))[:, None]
            ).reshape(*x.shape[:-1], -1)
            return torch.cat([a.sin(), a.cos()], -1).to(torch.bfloat16)

        x = o[:, None] + d[:, None] * t[..., None]
        e = enc(x, 10)
        h = e
        for i in range(8):
            if i == 4:
                h = torch.cat([h, e], -1)
            h = F.relu(h @ p[f"w{i}"] + p[f"b{i}"])
        s = F.relu((h @ p["s"]).float()[..., 0])
        v = enc(d, 4)[:, None].expand(N, P, 24)
        c = torch.sigmoid((F.relu(torch.cat([h @ p["f"], v], -1) @ p["c"]) @ p["o"]).float())
        step = torch.cat([t[:, 1:] - t[:, :-1], torch.full((N, 1), 1e2, device=t.device)], 1)
        a = 1 - torch.exp(-s * step)
        w = a * torch.cat(
            [torch.ones(N, 1, device=t.device), torch.cumprod(1 - a + 1e-10, 1)[:, :-1]], 1
        )
        return F.mse_loss((w[..., None] * c).sum(1), y)

    t = np.sort(R.uniform(2, 6, (N, P)), 1).astype("f4")
    return Model(
        p,
        ours,
        theirs,
        [numbers(N, 3), numbers(N, 3) / 2, t, R.uniform(0, 1, (N, 3)).astype("f4")],
        2e-2,
    )


MODELS = {m.__name__: m for m in (resnet, convnext, mbconv, swin, nerf)}
