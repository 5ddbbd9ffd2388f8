"""A training step of ours on a GPU, with what is measured of it."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import numpy as np

import tessera as ts

from ..graph import tree
from ..runtime import memory_pools
from ..runtime.device import device
from .kernel_classes import ClassTimes, of_launch
from .models.record import StepModel
from .models.step import first_state, training_step

if TYPE_CHECKING:
    from ..debug.launch_profile import LaunchRecord


class OurStep:
    """Parameters and state are donated: a step's results take their memory."""

    def __init__(self, model: StepModel, weights: Any, batch: tuple, where: str = "cuda"):
        self.where, self.others = where, 0
        if where != "cpu":
            self.reset_peak()
            self.others = memory_pools.peak_bytes(device())
        params = tree.map_tree(ts.tensor, weights)
        state = first_state(model, params)
        self.params, self.state = ts.to(params, where), ts.to(state, where)
        self.x, self.y = (ts.to(ts.tensor(t), where) for t in batch)
        self.compiled = training_step(model, donate=("params", "state"))

    def step(self) -> Any:
        """The loss, on the device."""
        value, self.params, self.state = self.compiled(self.params, self.state, self.x, self.y)
        return value

    def read(self, value: Any) -> float:
        """A loss, when the device is done with it and all before."""
        found = float(value.item())
        if self.where != "cpu":
            device().synchronize()
        return found

    def reset_peak(self) -> None:
        memory_pools.reset_peak(device())

    def peak_bytes(self) -> int:
        """Most bytes of our memory that were in use since `reset_peak`, beside those that were in
        use before this step was made: another one of ours may be measured in the same process."""
        return memory_pools.peak_bytes(device()) - self.others

    def classes(self, steps: int = 3) -> ClassTimes:
        """GPU time of a step by class of kernel, from the events behind each launch. Each launch
        counts as its median of `steps`: an event behind it also waits for a host that is late."""
        seen: list[list[LaunchRecord]] = []
        for _ in range(steps):
            with ts.debug.profile() as p:
                self.read(self.step())
            seen.append([r for r in p.launches.records if r.event.device >= 0])
        times = ClassTimes()
        for records in zip(*seen, strict=True):
            name = records[0].work.name  # without the number of the group
            times.add(of_launch(records[0]), name.partition("_")[2] or name,
                      statistics.median(r.us for r in records))
        return times

    def launches(self) -> dict[str, int]:
        """Of a step, by form."""
        return dict(self.compiled.schedule().forms)

    def moments(self) -> dict[str, np.ndarray]:
        """AdamW's first moments by the parameter's path."""
        return {path: np.array(m.numpy()) for path, m in self.state["m"].items()}

    def weights(self) -> dict[str, np.ndarray]:
        leaves, structure = tree.flatten(self.params)
        return {path: np.array(p.numpy())
                for path, p in zip(tree.paths(structure), leaves, strict=True)}


__all__ = ["OurStep"]
