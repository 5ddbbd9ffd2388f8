"""One step of training a model: the loss, its gradient, AdamW."""

from __future__ import annotations

from typing import Any

import tessera as ts

from .record import StepModel

RATE = 3e-4
OPTIMIZER = ts.optim.AdamW()  # 0.9, 0.95, weight decay 0.1 of matrices


def training_step(model: StepModel, **how: Any) -> Any:
    """The compiled step (params, state, x, y) -> (loss, params, state). how: for ts.jit."""
    @ts.jit(**how)
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        value, grads = ts.value_and_grad(lambda p: model.loss(p, x, y))(params)
        if model.clip:
            grads, _ = ts.optim.clip_by_global_norm(grads, model.clip)
        params, state = OPTIMIZER.update(params, grads, state, RATE)
        return value, params, state

    return step


__all__ = ["OPTIMIZER", "RATE", "training_step"]
