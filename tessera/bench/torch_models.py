"""The same models in PyTorch: weights and the residual stream in f32, matmuls and attention in the
type `half`, norms and the loss in f32. Weights lie as ours do: [inputs, outputs].

PyTorch is no dependency: who imports this module has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .models.llama import BASE as LLAMA_BASE
from .models.record import StepModel

Weights = Any  # the tree of a model, its leaves torch tensors


def attend(q: Any, k: Any, v: Any) -> Any:
    """Causal.   q: [B, H, T, D]   k, v: [B, Hk, T, D]   y: [B, T, H D]"""
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True,
                                       enable_gqa=k.shape[1] != q.shape[1])
    B, H, T, D = y.shape
    return y.transpose(1, 2).reshape(B, T, H * D)


def heads(x: Any, n: int) -> Any:
    """[B, T, n D] -> [B, n, T, D]"""
    B, T, width = x.shape
    return x.view(B, T, n, width // n).transpose(1, 2)


def rotary(x: Any, table: tuple[Any, Any]) -> Any:
    """Pairs (i, i + D/2) turned, in f32.   x: [B, H, T, D]"""
    c, s = table
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)


def rotary_table(T: int, D: int, base: float, device: str) -> tuple[Any, Any]:
    """cos and sin of t base^(-2i / D), each [T, D/2], computed in f64."""
    rate = base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angle = torch.outer(torch.arange(T, dtype=torch.float64), rate)
    return angle.cos().float().to(device), angle.sin().float().to(device)


def gpt2(p: Weights, x: Any, y: Any, m: StepModel, half: Any, table: Any) -> Any:
    def linear(h: Any, w: dict, name: str) -> Any:
        return F.linear(h.to(half), w[name].to(half).t(), w[name + "_b"].to(half))

    h = F.embedding(x, p["table"]) + p["positions"]
    for w in p["layers"]:
        a = linear(F.layer_norm(h, (m.d,), w["g1"], w["b1"]), w, "qkv")
        q, k, v = (heads(t, m.heads) for t in a.split(m.d, -1))
        h = h + linear(attend(q, k, v), w, "out").float()
        a = linear(F.layer_norm(h, (m.d,), w["g2"], w["b2"]), w, "up")
        h = h + linear(F.gelu(a, approximate="tanh"), w, "down").float()
    h = F.layer_norm(h, (m.d,), p["g"], p["b"])
    return cross_entropy(h.to(half) @ p["table"].to(half).t(), y)


def llama(p: Weights, x: Any, y: Any, m: StepModel, half: Any, table: Any) -> Any:
    def linear(h: Any, w: Any) -> Any:
        return F.linear(h, w.to(half).t())

    h = F.embedding(x, p["table"])
    for w in p["layers"]:
        a = F.rms_norm(h, (m.d,), w["norm1"], 1e-6).to(half)
        q, k, v = (heads(linear(a, w[n]), H) for n, H in
                   (("q", m.heads), ("k", m.kv_heads), ("v", m.kv_heads)))
        q, k = rotary(q, table), rotary(k, table)
        h = h + linear(attend(q, k, v), w["out"]).float()
        a = F.rms_norm(h, (m.d,), w["norm2"], 1e-6).to(half)
        a = F.silu(linear(a, w["gate"])) * linear(a, w["up"])
        h = h + linear(a, w["down"]).float()
    h = F.rms_norm(h, (m.d,), p["norm"], 1e-6)
    return cross_entropy(h.to(half) @ p["table"].to(half).t(), y)


def byte_level(p: Weights, x: Any, y: Any, m: StepModel, half: Any, table: Any) -> Any:
    def linear(h: Any, w: Any) -> Any:
        return F.linear(h.to(half), w.to(half).t()).float()

    h = F.embedding(x, p["embedding"])
    for w in p["blocks"].values():
        a = linear(F.rms_norm(h, (m.d,), w["norm1"], 1e-6), w["qkv"].reshape(m.d, 3 * m.d))
        q, k, v = a.view(m.B, m.T, m.heads, 3, m.d // m.heads).permute(3, 0, 2, 1, 4)
        q, k = rotary(q, table), rotary(k, table)
        h = h + linear(attend(*(t.to(half) for t in (q, k, v))), w["out"].reshape(m.d, m.d))
        a = linear(F.rms_norm(h, (m.d,), w["norm2"], 1e-6), w["up"])
        h = h + linear(F.gelu(a, approximate="tanh"), w["down"])
    h = F.rms_norm(h, (m.d,), p["norm"], 1e-6)
    return cross_entropy(linear(h, p["embedding"].t()), y)


def cross_entropy(logits: Any, y: Any) -> Any:
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), y.reshape(-1))


LOSSES: dict[str, Callable[..., Any]] = {"gpt2": gpt2, "llama": llama, "bytes": byte_level}
BASES = {"llama": LLAMA_BASE, "bytes": 10000.0}  # of rotary positions, by family


def loss_of(m: StepModel, half: Any, device: str) -> Callable[[Weights, Any, Any], Any]:
    """(weights, tokens, targets) -> mean cross entropy"""
    family, base = LOSSES[m.family.name], BASES.get(m.family.name)
    table = rotary_table(m.T, m.d // m.heads, base, device) if base is not None else None
    return lambda p, x, y: family(p, x, y, m, half, table)


__all__ = ["loss_of"]
