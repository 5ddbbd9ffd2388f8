"""A training step in PyTorch, compiled or not, with what is measured of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..graph import tree
from .kernel_classes import ClassTimes, of_torch
from .models.record import StepModel
from .models.step import OPTIMIZER, RATE
from .torch_models import loss_of


class TorchStep:
    """compiled: through torch.compile, as it is without options.  half: type of the matmuls."""

    def __init__(self, model: StepModel, weights: Any, batch: tuple, compiled: bool = True,
                 half: str = "bfloat16", device: str = "cuda"):
        torch.backends.cuda.matmul.allow_tf32 = False
        self.model, self.device = model, device
        self.others = torch.cuda.memory_allocated() if device == "cuda" else 0
        leaves, structure = tree.flatten(weights)
        self.paths = tree.paths(structure)
        self.leaves = [torch.from_numpy(np.ascontiguousarray(a)).to(device, copy=True)
                       .requires_grad_() for a in leaves]
        self.params = tree.unflatten(structure, self.leaves)
        self.x, self.y = (torch.from_numpy(t).long().to(device) for t in batch)
        loss = loss_of(model, getattr(torch, half), device)
        self.loss: Callable[..., Any] = torch.compile(loss) if compiled else loss
        self.optimizer = torch.optim.AdamW(self._groups(), lr=RATE, eps=OPTIMIZER.eps,
                                           betas=(OPTIMIZER.b1, OPTIMIZER.b2), fused=True)

    def _groups(self) -> list[dict]:
        """Parameters that decay, and those that do not, as ours decides it."""
        decays = [OPTIMIZER.decays(path, p) for path, p in zip(self.paths, self.leaves,
                                                               strict=True)]
        return [{"params": [p for p, d in zip(self.leaves, decays, strict=True) if d is want],
                 "weight_decay": OPTIMIZER.weight_decay if want else 0.0}
                for want in (True, False) if want in decays]

    def step(self) -> Any:
        """The loss, on the device."""
        self.optimizer.zero_grad()
        value = self.loss(self.params, self.x, self.y)
        value.backward()
        if self.model.clip:
            torch.nn.utils.clip_grad_norm_(self.leaves, self.model.clip)
        self.optimizer.step()
        return value

    def read(self, value: Any) -> float:
        """A loss, when the device is done with it and all before."""
        found = float(value.item())
        if self.device == "cuda":
            torch.cuda.synchronize()
        return found

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Most bytes of tensors that lived at a time since `reset_peak`, beside those from before
        this side was made."""
        return int(torch.cuda.max_memory_allocated()) - self.others

    def classes(self) -> ClassTimes:
        """GPU time of a step by class of kernel, from torch.profiler."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
            self.read(self.step())
        times = ClassTimes()
        for event in p.events():
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
                times.add(of_torch(event.name), event.name, event.device_time)
        return times

    def moments(self) -> dict[str, np.ndarray]:
        """AdamW's first moments by the parameter's path."""
        state = self.optimizer.state
        return {path: state[p]["exp_avg"].cpu().numpy()
                for path, p in zip(self.paths, self.leaves, strict=True)}

    def weights(self) -> dict[str, np.ndarray]:
        return {path: p.detach().cpu().numpy().copy()
                for path, p in zip(self.paths, self.leaves, strict=True)}

    @staticmethod
    def free() -> None:
        """Gives back what the caching allocator keeps of steps that are gone."""
        torch.cuda.empty_cache()


def version() -> str:
    return str(torch.__version__)


__all__ = ["TorchStep", "version"]
