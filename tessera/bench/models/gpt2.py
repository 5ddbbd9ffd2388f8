"""GPT-2: learned positions, layer norms, biases, gelu, tied vocabulary. In several spellings that
compute the same, which are to run at the same speed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tessera as ts

from ...lazy_dataclass import dataclass
from .record import ModelFamily, StepModel, register

BF16 = "bf16 @accum(f32)"


@dataclass(frozen=True)
class Spelling:
    """How it is written.

    product: "batched", gemm of [B, T, d] | "flat", of [B T, d] | "einsum", which rounds before the
    bias is added
    qkv: "split" | "slices", of one matmul | "three", matmuls with a weight each
    scaling: a recipe of fp8 (ts.CurrentScaling, ts.DelayedScaling) for the products of the layers;
        attention, the vocabulary's and all that is between stay as they are
    """

    product: str = "batched"
    qkv: str = "split"
    biases: bool = True
    scaling: Any = None


SPELLINGS = {
    "gemm of [B, T, d], one qkv weight, split": Spelling(),
    "gemm of [B T, d]": Spelling(product="flat"),
    "einsum": Spelling(product="einsum"),
    "qkv by slices": Spelling(qkv="slices"),
    "three weights": Spelling(qkv="three"),
    "no biases": Spelling(biases=False),
}


def products(m: StepModel) -> dict[str, tuple[int, int]]:
    """The weights of a layer's products."""
    d = m.d
    three = m.spelling is not None and m.spelling.qkv == "three"
    qkv = dict.fromkeys("qkv", (d, d)) if three else {"qkv": (d, 3 * d)}
    return {**qkv, "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}


def shapes(m: StepModel) -> Any:
    d, how, weights = m.d, m.spelling or Spelling(), products(m)
    biases = {f"{n}_b": s[1:] for n, s in weights.items()} if how.biases else {}
    norms = dict.fromkeys(("g1", "b1", "g2", "b2"), (d,))
    return {"table": (m.vocabulary, d), "positions": (m.T, d),
            "layers": [{**norms, **weights, **biases} for _ in range(m.layers)],
            "g": (d,), "b": (d,)}


def product(x: Any, w: Any, how: Spelling, bias: Any = None) -> Any:
    """x w + bias.   x: [B, T, I]   w: [I, O]   bias: [O]"""
    if how.product == "einsum":
        y = ts.einsum("bti,io->bto", x, w)
        return y if bias is None else y + bias
    if how.product == "batched":
        return ts.gemm(x, w, bias)
    B, T, width = x.shape
    y = ts.gemm(ts.reshape(x, (B * T, width)), w, bias)
    return ts.reshape(y, (B, T, w.shape[1]))


def linear(x: Any, p: dict, name: str, how: Spelling, history: Any = None) -> Any:
    """Rounded once, bias and all: one that is small beside the product would be lost if it were
    added to what is rounded already, and biases are small for all of the first steps."""
    bias = ts.cast(p[name + "_b"], BF16) if how.biases else None
    if how.scaling is not None:  # of x in bf16: then its gradient is no wider either
        y = how.scaling.matmul(ts.cast(x, BF16), p[name], history and history[name])
        return ts.cast(y if bias is None else y + ts.cast(bias, "f32"), BF16)
    return product(ts.cast(x, BF16), ts.cast(p[name], BF16), how, bias)


def queries_keys_values(x: Any, p: dict, how: Spelling, history: Any) -> Any:
    """Three of [B, T, d]."""
    if how.qkv == "three":
        return [linear(x, p, name, how, history) for name in "qkv"]
    h = linear(x, p, "qkv", how, history)
    if how.qkv == "split":
        return ts.split(h, 3, axis=-1)
    d = x.shape[-1]
    return [h[..., i * d:(i + 1) * d] for i in range(3)]


def layer(x: Any, p: dict, m: StepModel, history: Any = None) -> Any:
    (B, T, d), H, how = x.shape, m.heads, m.spelling or Spelling()
    h = ts.layernorm(x, p["g1"], p["b1"])
    parts = [ts.reshape(t, (B, T, H, d // H)) for t in queries_keys_values(h, p, how, history)]
    q, k, v = (ts.transpose(t, (0, 2, 1, 3)) for t in parts)
    y = ts.attention(q, k, v, causal=True)
    y = ts.reshape(ts.transpose(y, (0, 2, 1, 3)), (B, T, d))
    x = x + ts.cast(linear(y, p, "out", how, history), "f32")
    h = ts.layernorm(x, p["g2"], p["b2"])
    h = linear(h, p, "up", how, history)
    h = ts.gelu(h)
    return x + ts.cast(linear(h, p, "down", how, history), "f32")


def histories(m: StepModel) -> Any:
    """Of the products of each layer, for a recipe that has them: guesses that the first steps
    replace. Activations behind norms are of size 1, cotangents those of a mean over all tokens."""
    scaling = m.spelling and m.spelling.scaling
    if not isinstance(scaling, ts.DelayedScaling):
        return None
    return [{name: scaling.init(x=8.0, w=0.1, cotangent=1.0 / m.tokens) for name in products(m)}
            for _ in range(m.layers)]


def loss(p: dict, tokens: Any, targets: Any, m: StepModel, history: Any = None) -> Any:
    x = ts.embedding(p["table"], tokens)
    x = x + p["positions"]
    for i, weights in enumerate(p["layers"]):
        x = layer(x, weights, m, history and history[i])
    x = ts.layernorm(x, p["g"], p["b"])
    logits = product(ts.cast(x, BF16), ts.transpose(ts.cast(p["table"], BF16)),
                     m.spelling or Spelling())
    return ts.cross_entropy(ts.cast(logits, "f32"), targets)


def weights_per_token(m: StepModel) -> int:
    return m.layers * 12 * m.d * m.d + m.vocabulary * m.d


GPT2 = ModelFamily("gpt2", shapes, loss, weights_per_token, histories)
SMALL = register(StepModel("gpt2-124m", GPT2, 32, 1024, 12, 768, 12, 50304))
register(StepModel("gpt2-124m-b8", GPT2, 8, 1024, 12, 768, 12, 50304))
MEDIUM = register(StepModel("gpt2-350m", GPT2, 16, 1024, 24, 1024, 16, 50304))
register(replace(MEDIUM, name="gpt2-350m-fp8", spelling=Spelling(scaling=ts.DelayedScaling())))
register(replace(MEDIUM, name="gpt2-350m-fp8-current",
                 spelling=Spelling(scaling=ts.CurrentScaling())))

__all__ = ["GPT2", "SMALL", "SPELLINGS", "Spelling"]
