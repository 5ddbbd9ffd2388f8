"""Steps of the models: gradient descent in one compiled function, and the same in PyTorch."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np

import tessera as ts

NAMES = ("gpt", "mixture", "vision", "unet", "gru", "graphs", "physics", "fourier", "autoencoder",
         "contrastive", "ppo")


def model(name: str) -> ModuleType:
    return importlib.import_module(f"models.{name}")


def tensors(x: Any, dtype: Any = None) -> Any:
    """NumPy arrays as tensors, in nested values."""
    if isinstance(x, dict):
        return {k: tensors(v, dtype) for k, v in x.items()}
    if isinstance(x, tuple | list):
        return [tensors(v, dtype) for v in x]
    return ts.tensor(x, dtype if x.dtype.kind == "f" else None)


def leaves(x: Any) -> list:
    if isinstance(x, dict):
        return [y for v in x.values() for y in leaves(v)]
    return [y for v in x for y in leaves(v)] if isinstance(x, tuple | list) else [x]


def replaced(x: Any, new: Any) -> Any:
    """x with the next items of an iterator as leaves."""
    if isinstance(x, dict):
        return {k: replaced(v, new) for k, v in x.items()}
    return [replaced(v, new) for v in x] if isinstance(x, tuple | list) else next(new)


def gradients(m: ModuleType, p: Any, *batch: Any) -> Any:
    """(loss, gradients like the parameters)"""
    own = getattr(m, "gradients", None)
    return own(p, *batch) if own else ts.value_and_grad(lambda p: m.loss(p, *batch))(p)


def step_of(m: ModuleType) -> Any:
    """The compiled step (parameters, *batch) -> (loss, new parameters)."""
    optimizer = ts.optim.SGD()

    @ts.jit
    def step(p, batch):
        value, grads = gradients(m, p, *batch)
        p, _ = optimizer.update(p, grads, optimizer.init(p), m.RATE)
        return value, p

    return step


def losses(m: ModuleType, device: str, steps: int, seed: int = 0) -> list[float]:
    """Of `steps` steps on data that lies there. Nothing else says where they run."""
    rng = np.random.default_rng(seed)
    p, batch = ts.to(tensors(m.parameters(rng)), device), ts.to(tensors(m.batch(rng)), device)
    step, made = step_of(m), []
    for _ in range(steps):
        value, p = step(p, batch)
        made.append(float(value.item()))
    return made


def torch_losses(m: ModuleType, device: str, steps: int, seed: int = 0) -> list[float]:
    """The same steps in PyTorch."""
    import torch

    rng = np.random.default_rng(seed)
    p = m.parameters(rng)
    given = m.batch(rng)
    batch = replaced(given, (torch.tensor(x, device=device) for x in leaves(given)))
    flat = [torch.tensor(x, device=device, requires_grad=True) for x in leaves(p)]
    made = []
    for _ in range(steps):
        value, grads = _torch_gradients(torch, m, replaced(p, iter(flat)), flat, batch)
        flat = [(x - m.RATE * g).detach().requires_grad_()
                for x, g in zip(flat, grads, strict=True)]
        made.append(value.item())
    return made


def _torch_gradients(torch: Any, m: ModuleType, p: Any, flat: list, batch: list) -> Any:
    if own := getattr(m, "torch_gradients", None):
        return own(torch, p, flat, *batch)
    value = m.torch_loss(torch, p, *batch)
    return value, torch.autograd.grad(value, flat)


def weight(rng: np.random.Generator, *shape: int, fan: int = 0) -> np.ndarray:
    """Normal, of variance 1 / fan; fan: the first extent when 0."""
    return (rng.standard_normal(shape) / (fan or shape[0]) ** 0.5).astype(np.float32)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


