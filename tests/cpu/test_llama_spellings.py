"""A layer of a llama, in several spellings that compute the same: none copies, and they are the
same launches up to what they compute otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera.graph import tree
from tessera.graph.cuda.launch_plan import plan_of
from tessera.graph.cuda.levels import program_of
from tolerance import assert_close

BF16 = "bf16 @accum(f32)"


@dataclass(frozen=True)
class Layer:
    """qkv, gate_up: whether one weight has them.  repeat: whether shared keys are repeated."""

    B: int
    T: int
    heads: int
    shared: int
    D: int
    hidden: int
    qkv: bool = False
    gate_up: bool = False
    repeat: bool = False
    turn: str = "op"

    @property
    def d(self) -> int:
        return self.heads * self.D

    def angles(self) -> list[np.ndarray]:
        """[T, D/2]"""
        half = self.D // 2
        angle = np.arange(self.T)[:, None] * 10000.0 ** (-np.arange(half) / half)
        return [f(angle).astype(np.float32) for f in (np.cos, np.sin)]

    def weights(self, make: Callable) -> dict:
        d, s, h = self.d, self.shared * self.D, self.hidden
        own = {"qkv": (d, d + 2 * s)} if self.qkv else {"q": (d, d), "k": (d, s), "v": (d, s)}
        own |= {"gate_up": (d, 2 * h)} if self.gate_up else {"gate": (d, h), "up": (d, h)}
        own |= {"norm1": (d,), "norm2": (d,), "out": (d, d), "down": (h, d)}
        return {name: make(shape) for name, shape in own.items()}

    def turned(self, x: Any) -> Any:
        if self.turn == "op":
            return ts.rotary_embedding(x)
        x, half = ts.cast(x, "f32"), self.D // 2
        c, s = self.angles()
        if self.turn == "rotate_half":
            c, s = (ts.tensor(np.concatenate([t, t], -1)) for t in (c, s))
            other = ts.concatenate([-x[..., half:], x[..., :half]], -1)
            return ts.cast(x * c + other * s, BF16)
        if self.turn == "flip":
            c, s = (ts.tensor(t[:, None]) for t in (c, s * 1.0))
            sign = ts.tensor(np.array([[-1.0], [1.0]], np.float32))
            parts = ts.reshape(x, (*x.shape[:-1], 2, half))
            y = parts * c + ts.flip(parts, -2) * s * sign
            return ts.cast(ts.reshape(y, x.shape), BF16)
        c, s = map(ts.tensor, (c, s))
        a, b = ts.split(x, 2, axis=-1)
        return ts.cast(ts.concatenate([a * c - b * s, b * c + a * s], -1), BF16)

    def attention(self, h: Any, p: dict) -> Any:
        d, s = self.d, self.shared * self.D
        if self.qkv:
            y = h @ ts.cast(p["qkv"], BF16)
            parts = [y[..., :d], y[..., d:d + s], y[..., d + s:]]
        else:
            parts = [h @ ts.cast(p[name], BF16) for name in "qkv"]
        q, k, v = (ts.transpose(ts.reshape(t, (self.B, self.T, -1, self.D)), (0, 2, 1, 3))
                   for t in parts)
        q, k = self.turned(q), self.turned(k)
        if self.repeat:
            n = self.heads // self.shared
            wide = (self.B, self.shared, n, self.T, self.D)
            k, v = (ts.reshape(ts.broadcast_to(ts.expand_dims(t, 2), wide), q.shape)
                    for t in (k, v))
        y = ts.attention(q, k, v, causal=True)
        return ts.reshape(ts.transpose(y, (0, 2, 1, 3)), h.shape) @ ts.cast(p["out"], BF16)

    def __call__(self, x: Any, p: dict) -> Any:
        h = ts.cast(ts.rmsnorm(x, p["norm1"]), BF16)
        x = x + ts.cast(self.attention(h, p), "f32")
        h = ts.cast(ts.rmsnorm(x, p["norm2"]), BF16)
        if self.gate_up:
            gate, up = ts.split(h @ ts.cast(p["gate_up"], BF16), 2, axis=-1)
        else:
            gate, up = (h @ ts.cast(p[name], BF16) for name in ("gate", "up"))
        return x + ts.cast((ts.silu(gate) * up) @ ts.cast(p["down"], BF16), "f32")

    def gradient(self) -> Callable:
        def loss(p: dict, x: Any) -> Any:
            return ts.sum(self(x, p) ** 2)

        return ts.jit(ts.value_and_grad(loss, argnums=(0, 1)))


SPELLINGS: dict[str, dict[str, Any]] = {
    "one weight of queries, keys and values": {"qkv": True},
    "one weight of gate and up": {"gate_up": True},
    "repeated keys": {"repeat": True},
    "rotary halves": {"turn": "split"},
    "rotary by rotate_half": {"turn": "rotate_half"},
    "rotary by flips": {"turn": "flip"},
    "all at once": {"qkv": True, "gate_up": True, "repeat": True, "turn": "rotate_half"},
}
WIDE = {"B": 2, "T": 256, "heads": 8, "shared": 2, "D": 64, "hidden": 1024}
SMALL = {"B": 1, "T": 32, "heads": 4, "shared": 2, "D": 16, "hidden": 64}


def planned(**how: Any) -> Any:
    layer = Layer(**WIDE, **how)
    args = layer.weights(ts.zeros), ts.zeros((layer.B, layer.T, layer.d))
    return plan_of(program_of(layer.gradient().graph(*args), "sm_90a"))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_spelling_copies(spelling: str) -> None:
    plain, plan = planned(), planned(**SPELLINGS[spelling])
    assert not plan.copies and not plain.copies
    assert {x.form for x in plan.matmuls} == {"wgmma"}
    more = len(plan.launches) - len(plain.launches)
    if SPELLINGS[spelling].get("repeat"):  # sums of the cotangents of what was repeated
        assert more <= 3
    elif SPELLINGS[spelling].get("turn") == "flip":  # of a flip in reverse a loop before the flip
        assert more <= 2
    else:
        assert more <= 0


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_compute_the_same(spelling: str, rng: np.random.Generator) -> None:
    """The kernels' loss against that in f64, and gradients against the program's for a CPU."""
    layer = Layer(**SMALL, **SPELLINGS[spelling])
    p = layer.weights(lambda s: rng.standard_normal(s).astype(np.float32) * 0.2 + (len(s) == 1))
    x = rng.standard_normal((layer.B, layer.T, layer.d)).astype(np.float32)
    args = tree.map_tree(ts.tensor, p), ts.tensor(x)
    leaves = tree.flatten((p, x))[0]
    got = program_of(layer.gradient().graph(*args), "sm_90a").run(leaves)
    want = _in_f64(p, x, layer)
    assert_close(got[0], want, "bf16", n=layer.d, scale=float(want))
    same = tree.flatten(layer.gradient()(*args))[0]
    for a, b in zip(got[1:], same[1:], strict=True):
        assert_close(a, b.array.astype(np.float64), "bf16", n=layer.d,
                     scale=float(np.abs(b.array).max()))


def _in_f64(p: dict, x: np.ndarray, m: Layer) -> np.ndarray:
    """The loss by NumPy."""
    w = {name: t.astype(np.float64) for name, t in p.items()}
    d, s = m.d, m.shared * m.D
    if m.qkv:
        w |= dict(zip("qkv", np.split(w["qkv"], [d, d + s], 1), strict=True))
    if m.gate_up:
        w |= dict(zip(("gate", "up"), np.split(w["gate_up"], 2, 1), strict=True))
    c, sin = (t.astype(np.float64) for t in m.angles())

    def norm(t: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return t / np.sqrt((t * t).mean(-1, keepdims=True) + 1e-6) * gain

    def heads(t: np.ndarray, turn: bool) -> np.ndarray:
        t = t.reshape(m.B, m.T, -1, m.D).transpose(0, 2, 1, 3)
        a, b = np.split(t, 2, -1)
        t = np.concatenate([a * c - b * sin, b * c + a * sin], -1) if turn else t
        return np.repeat(t, m.heads // t.shape[1], 1)

    x = x.astype(np.float64)
    h = norm(x, w["norm1"])
    q, k, v = (heads(h @ w[n], n != "v") for n in "qkv")
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(m.D)
    scores = np.where(np.tril(np.ones((m.T, m.T), bool)), scores, -np.inf)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    y = (e / e.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
    x = x + y @ w["out"]
    h = norm(x, w["norm2"])
    gate = h @ w["gate"]
    x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
    return (x * x).sum()
