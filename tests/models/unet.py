"""A U-Net: convolutions, pooling on the way down, resizing and joining on the way up
(Ronneberger et al. 2015, arXiv:1505.04597)."""

from __future__ import annotations

import tessera as ts

from .training import ones, weight, zeros

RATE = 0.3


def _block(rng, cin, cout):
    return {"w": weight(rng, cout, cin, 3, 3, fan=9 * cin), "b": zeros(cout), "g": ones(cout),
            "s": zeros(cout)}


def parameters(rng, width=8):
    c = width
    return {"down1": _block(rng, 1, c), "down2": _block(rng, c, 2 * c),
            "low": _block(rng, 2 * c, 2 * c), "up2": _block(rng, 4 * c, c),
            "up1": _block(rng, 2 * c, c), "out": weight(rng, 1, c, 1, 1, fan=c)}


def batch(rng, B=2, size=12):
    x = weight(rng, B, 1, size, size, fan=1)
    return x, (x > 0.5).astype(x.dtype)


def block(x, p, kind):
    y = ts.conv2d(ts.cast(x, kind), ts.cast(p["w"], kind), ts.cast(p["b"], kind), padding=1)
    return ts.silu(ts.group_norm(ts.cast(y, x.dtype), 4, p["g"], p["s"]))


def loss(p, x, mask, kind="f32"):
    one = block(x, p["down1"], kind)
    two = block(ts.max_pool2d(one, 2), p["down2"], kind)
    low = block(ts.avg_pool2d(two, 2), p["low"], kind)
    up = ts.interpolate(low, scale_factor=2)
    up = block(ts.concatenate([up, two], axis=1), p["up2"], kind)
    up = ts.interpolate(up, scale_factor=2, mode="bilinear")
    up = block(ts.concatenate([up, one], axis=1), p["up1"], kind)
    return ts.binary_cross_entropy_with_logits(ts.conv2d(up, p["out"]), mask)


def torch_loss(torch, p, x, mask):
    F = torch.nn.functional

    def block(x, p):
        x = F.conv2d(x, p["w"], p["b"], padding=1)
        return F.silu(F.group_norm(x, 4, p["g"], p["s"]))

    one = block(x, p["down1"])
    two = block(F.max_pool2d(one, 2), p["down2"])
    low = block(F.avg_pool2d(two, 2), p["low"])
    up = block(torch.cat([F.interpolate(low, scale_factor=2), two], 1), p["up2"])
    up = F.interpolate(up, scale_factor=2, mode="bilinear")
    up = block(torch.cat([up, one], 1), p["up1"])
    return F.binary_cross_entropy_with_logits(F.conv2d(up, p["out"]), mask)
