"""A model and the extents at which its step is measured, one record each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from ...errors import ArgumentError
from ...graph import tree
from ...lazy_dataclass import dataclass

MODELS: dict[str, StepModel] = {}
WEIGHT = 0.02  # the deviation of weights, as GPT-2 begins; gains are 1, biases 0


@dataclass(frozen=True)
class ModelFamily:
    """What models of one kind compute.

    shapes(model) -> tree of shapes: those of one axis are gains, or biases where the name ends
    with _b or is b, b1, b2.
    loss(params, tokens, targets, model): mean cross entropy in ops of ts; tokens, targets: [B, T]
    weights_per_token(model): elements of matrices that each token is multiplied with
    histories(model): of the largest numbers of its fp8 products, for scales that lag behind, or
        None; loss takes them as its last argument
    """

    name: str
    shapes: Callable[[StepModel], Any]
    loss: Callable[..., Any]
    weights_per_token: Callable[[StepModel], int]
    histories: Callable[[StepModel], Any] = lambda model: None


@dataclass(frozen=True)
class StepModel:
    """clip: largest norm of the gradient, 0: not clipped.  eager: PyTorch without its compiler is
    measured too.  spelling: see gpt2.py."""

    name: str
    family: ModelFamily
    B: int
    T: int
    layers: int
    d: int
    heads: int
    vocabulary: int
    kv_heads: int = 0
    hidden: int = 0
    clip: float = 0.0
    eager: bool = False
    spelling: Any = None

    def loss(self, params: Any, tokens: Any, targets: Any, history: Any = None) -> Any:
        more = () if history is None else (history,)
        return self.family.loss(params, tokens, targets, self, *more)

    @property
    def fp8(self) -> bool:
        """Whether its products are of fp8."""
        return getattr(self.spelling, "scaling", None) is not None

    @property
    def plain(self) -> StepModel:
        """The same model without fp8."""
        return replace(self, spelling=replace(self.spelling, scaling=None)) if self.fp8 else self

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.B * self.T

    @property
    def flops(self) -> float:
        """Of the matmuls of a step: forward, and twice as many backward. Attention counts the
        scores that a causal mask leaves; what a backward pass computes again is not counted."""
        scores = self.layers * 2 * self.T * self.d  # q k' and p v of half of T keys
        return 3.0 * self.tokens * (2 * self.family.weights_per_token(self) + scores)

    def sized(self, **extents: int) -> StepModel:
        return replace(self, **extents)  # type: ignore[arg-type]

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        names = ("B", "T", "layers", "d", "heads", "kv_heads", "hidden", "vocabulary", "clip")
        return {n: getattr(self, n) for n in names if getattr(self, n)}


def register(model: StepModel) -> StepModel:
    if model.name in MODELS:
        raise ArgumentError(f"the model {model.name!r} is declared twice")
    MODELS[model.name] = model
    return model


def shapes_of(model: StepModel, make: Callable[[tuple[int, ...]], Any]) -> Any:
    """The tree of a model's parameters, each made from its shape."""
    leaves, structure = tree.flatten(_leaves(model.family.shapes(model)))
    return tree.unflatten(structure, [make(s.extents) for s in leaves])


def weights(model: StepModel, seed: int = 0) -> Any:
    """A tree of f32 arrays, the same for a seed. Each has a generator of its own, so that they are
    drawn side by side: a billion normal numbers take seconds."""
    shapes, structure = tree.flatten(_leaves(model.family.shapes(model)))
    names = tree.paths(structure)
    seeds = np.random.SeedSequence(seed).spawn(len(shapes))
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(_array, names, [s.extents for s in shapes], seeds))
    return tree.unflatten(structure, made)


def _array(path: str, shape: tuple[int, ...], seed: np.random.SeedSequence) -> np.ndarray:
    if len(shape) > 1:
        x = np.random.default_rng(seed).standard_normal(prod(shape), np.float32)
        x *= WEIGHT
        return x.reshape(shape)
    name = path.rpartition(".")[2]
    bias = name.endswith("_b") or name in ("b", "b1", "b2")
    return np.zeros(shape, np.float32) if bias else np.ones(shape, np.float32)


@dataclass(frozen=True)
class _Shape:
    """A leaf of a tree of shapes: tuples are nodes of trees."""

    extents: tuple[int, ...]


def _leaves(shapes: Any) -> Any:
    if isinstance(shapes, dict):
        return {name: _leaves(s) for name, s in shapes.items()}
    return [_leaves(s) for s in shapes] if isinstance(shapes, list) else _Shape(shapes)


def batch(model: StepModel, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, targets): [B, T] int32, each target the token after."""
    drawn = np.random.default_rng([seed, 1]).integers(
        0, model.vocabulary, (model.B, model.T + 1)).astype(np.int32)
    return drawn[:, :-1].copy(), drawn[:, 1:].copy()


__all__ = ["MODELS", "ModelFamily", "StepModel", "batch", "register", "shapes_of", "weights"]
