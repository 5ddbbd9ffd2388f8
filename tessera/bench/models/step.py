"""One step of training a model: the loss, its gradient, AdamW, and the scales of fp8 products."""

from __future__ import annotations

from typing import Any

import tessera as ts

from .record import StepModel

RATE = 3e-4
OPTIMIZER = ts.optim.AdamW()  # 0.9, 0.95, weight decay 0.1 of matrices


def first_state(model: StepModel, params: Any) -> dict[str, Any]:
    """What a step carries beside the parameters: the optimizer's state, and histories of fp8."""
    state, history = OPTIMIZER.init(params), model.family.histories(model)
    return state if history is None else {**state, "fp8": history}


def training_step(model: StepModel, optimizer: Any = OPTIMIZER, **how: Any) -> Any:
    """The compiled step (params, state, x, y) -> (loss, params, state). how: for ts.jit."""
    @ts.jit(**how)
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        history = state.get("fp8")
        value, (grads, amax) = ts.value_and_grad(
            lambda p, h: model.loss(p, x, y, h), argnums=(0, 1))(params, history)
        if model.clip:
            grads, _ = ts.optim.clip_by_global_norm(grads, model.clip)
        params, new = optimizer.update(params, grads, state, RATE)
        if history is not None:
            new["fp8"] = model.spelling.scaling.update(history, amax, state["step"])
        return value, params, new

    return step


__all__ = ["OPTIMIZER", "RATE", "first_state", "training_step"]
