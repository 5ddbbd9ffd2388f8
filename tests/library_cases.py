"""Calls of the standard library with their oracles in f64, for tests with and without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import tessera as ts
from tessera import stdlib
from tessera.numerics import decode


@dataclass(frozen=True)
class Call:
    """routine(*arrays, **options) against oracle(*arrays in f64, **options).

    rounds: the coarsest type on the way.  terms: of the longest sum.
    """

    routine: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "f32"
    options: Any = ()
    rounds: str = ""
    terms: int = 1

    def arrays(self, rng: Any) -> list[ts.Tensor]:
        return [ts.tensor(rng.standard_normal(s).astype(np.float32), self.dtype)
                for s in self.shapes]

    def run(self, arrays: list[Any], schedule: ts.Schedule | None = None,
            target: str | None = None) -> Any:
        """target: "cuda" copies host arrays to the GPU and back."""
        routine = getattr(stdlib, self.routine)
        routine = routine if schedule is None else routine.with_schedule(schedule)
        if target is None:
            return routine(*arrays, **dict(self.options))
        return routine.launch(*arrays, target=target, **dict(self.options))

    def expected(self, arrays: list[ts.Tensor]) -> np.ndarray:
        return ORACLES[self.routine](*map(wide, arrays), **dict(self.options))


def wide(x: Any) -> np.ndarray:
    return np.asarray(decode(x.array, x.dtype), np.float64)


def softmax(x: np.ndarray) -> np.ndarray:
    m = x.max(-1, keepdims=True)
    e = np.exp(x - m)
    return e / e.sum(-1, keepdims=True)


def layernorm(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    c = x - x.mean(-1, keepdims=True)
    return c / np.sqrt((c * c).mean(-1, keepdims=True) + eps) * gamma + beta


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = False,
              scale: float | None = None) -> np.ndarray:
    G = q.shape[-3] // k.shape[-3]
    k, v = np.repeat(k, G, -3), np.repeat(v, G, -3)
    s = q @ k.swapaxes(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    S, T = s.shape[-2:]
    if causal:
        s = np.where(np.tril(np.ones((S, T), bool), T - S), s, -np.inf)
    return softmax(s) @ v


def rotary(x: np.ndarray, base: float = 10000.0, start: int = 0) -> np.ndarray:
    h = x.shape[-1] // 2
    t = (start + np.arange(x.shape[-2]))[:, None] * base ** (-np.arange(h) / h)
    a, b = x[..., :h], x[..., h:]
    return np.concatenate([a * np.cos(t) - b * np.sin(t), b * np.cos(t) + a * np.sin(t)], -1)


def gemm(a: np.ndarray, b: np.ndarray, transpose_b: bool = False) -> np.ndarray:
    return a @ (b.T if transpose_b else b)


ORACLES: dict[str, Callable[..., np.ndarray]] = {
    "stable_softmax": softmax, "efficient_layernorm": layernorm, "flash_attention_2": attention,
    "rotary_embedding": rotary, "gemm": gemm,
}
CAUSAL = (("causal", True),)
CALLS: dict[str, Call] = {
    "softmax": Call("stable_softmax", ((3, 7, 100),), terms=100),
    "softmax bf16": Call("stable_softmax", ((9, 1000),), "bf16"),
    "softmax of long rows": Call("stable_softmax", ((3, 17000),), terms=170),
    "softmax of a vector": Call("stable_softmax", ((33,),), terms=33),
    "layernorm": Call("efficient_layernorm", ((3, 7, 300), (300,), (300,)), terms=300),
    "layernorm f16": Call("efficient_layernorm", ((7, 129), (129,), (129,)), "f16", terms=4),
    "layernorm of long rows": Call("efficient_layernorm", ((3, 17000), (17000,), (17000,)),
                                   terms=17000),
    "attention": Call("flash_attention_2", ((2, 2, 70, 64),) * 3, "bf16", terms=16),
    "attention causal": Call("flash_attention_2", ((2, 2, 70, 64),) * 3, "bf16", CAUSAL, terms=16),
    "attention f32": Call("flash_attention_2", ((3, 40, 16),) * 3, "f32", CAUSAL, terms=40),
    "attention of groups": Call("flash_attention_2", ((2, 4, 33, 32), (2, 2, 33, 32),
                                                      (2, 2, 33, 48)), "f16", terms=16),
    "attention with a past": Call("flash_attention_2", ((1, 2, 20, 32), (1, 2, 90, 32),
                                                        (1, 2, 90, 32)), "bf16", CAUSAL, terms=16),
    "attention scaled": Call("flash_attention_2", ((2, 20, 16), (2, 35, 16), (2, 35, 16)), "f32",
                             (("scale", 0.3),), terms=35),
    "rotary": Call("rotary_embedding", ((2, 3, 50, 32),), "f32", (("start", 100000),), terms=8),
    "rotary bf16": Call("rotary_embedding", ((4, 33, 64),), "bf16", (("base", 500.0),),
                        terms=2),
    "gemm": Call("gemm", ((70, 50), (50, 90)), terms=50),
    "gemm bf16 nt": Call("gemm", ((130, 80), (300, 80)), "bf16", (("transpose_b", True),),
                         terms=4),
}
SCHEDULES = {
    "stable_softmax": ts.Schedule(m=4, warps=2), "efficient_layernorm": ts.Schedule(m=2, warps=8),
    "flash_attention_2": ts.Schedule(block=(64, 32), warps=4), "rotary_embedding":
    ts.Schedule(m=16, warps=2), "gemm": ts.Schedule(block=(64, 64), k=16, warps=4, stages=3),
}


def adam(steps: int, rng: Any, n: tuple[int, ...]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Gradients of some steps, and p, m, v before the first."""
    return ([rng.standard_normal(n).astype(np.float32) for _ in range(steps)],
            [rng.standard_normal(n).astype(np.float32), np.zeros(n, np.float32),
             np.zeros(n, np.float32)])


def adam_f64(p: np.ndarray, gradients: list[np.ndarray], lr: float, b1: float, b2: float,
             eps: float, decay: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    p = p.astype(np.float64)
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(gradients, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g.astype(np.float64)**2
        p = p - lr * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + decay * p)
    return p, m, v
