"""Types of optimizer states: what is held for some parameters, and what can be done with it.

    kind = ts.OptimizerState[params] @ ts.fp32_master @ ts.checkpointable
    state = kind(ts.optim.AdamW())             # as optimizer.init(params), a tree of tensors
    kind.save("run", params, state, step=100)
    params, state, step = kind.load("run")     # ts.random goes on as it stood, too

The state is the dict that optimizers take and give: `step`, moments by the path of the parameter,
and `master`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from . import checkpoints, optim
from .errors import ArgumentError, PolicyError, user_line
from .graph import random
from .graph.operand import compute_type, convert
from .lazy_dataclass import dataclass
from .state.kv_type import Flag

fp32_master = Flag("fp32_master")  # narrow parameters have a wide copy that updates add up in
checkpointable = Flag("checkpointable")  # the type saves and loads its states
paged = Flag("paged")  # pages of the state lie in host memory; ts.optim.paged updates it
POLICIES = (fp32_master, paged, checkpointable)


class OptimizerState:
    """`OptimizerState[params]` is a type: of the state of an optimizer for a parameter, a list or
    any tree of them. `@fp32_master`, `@paged` and `@checkpointable` are its policies. See
    OptimizerStateType."""

    def __class_getitem__(cls, params: Any) -> OptimizerStateType:
        optim.named_params(params)
        return OptimizerStateType(params)


@dataclass(frozen=True, repr=False, eq=False)
class OptimizerStateType:
    """`OptimizerState[params] @fp32_master @paged @checkpointable`. Calling it makes a state.

    With @fp32_master every parameter that is narrower than f32 has an f32 copy in the state:
    updates apply to it, and the parameter is the copy rounded once. Without, updates apply to the
    parameter itself, in f32, and are rounded to its type in each step.
    With @paged the optimizer is one of `ts.optim.paged`, which says how much of the state stays on
    the GPU. The rest lies in host memory, and comes for the update that reads it.
    """

    params: Any
    policies: tuple[Flag, ...] = ()

    def __matmul__(self, policy: Any) -> OptimizerStateType:
        if not any(policy is known for known in POLICIES):
            raise PolicyError(f"{self} has no policy {policy!r}",
                              hint="policies: " + ", ".join(map(repr, POLICIES)))
        if policy in self.policies:
            return self
        return replace(self, policies=(*self.policies, policy))

    def __call__(self, optimizer: Any = optim.AdamW()) -> dict[str, Any]:  # noqa: B008  frozen
        """The state before the first step of an optimizer: zero moments of the parameters' shapes,
        and master copies where the type says so. Raises ArgumentError where it is @paged and the
        optimizer is not."""
        if paged in self.policies and not isinstance(optimizer, optim.Paged):
            raise ArgumentError(
                f"{self} is given {type(optimizer).__name__}, which leaves all of a state on the "
                "GPU", where=user_line(), hint="optimizer = ts.optim.paged(ts.optim.AdamW(), "
                "resident_bytes=1 << 30)")
        state = self._made(optimizer)
        return optimizer.placed(state) if isinstance(optimizer, optim.Paged) else state

    def _made(self, optimizer: Any) -> dict[str, Any]:
        state: dict[str, Any] = optimizer.init(self.params)
        if fp32_master not in self.policies:
            return state | {"master": {}}
        missing = {path: convert(p, compute_type(p.type))
                   for path, p in optim.named_params(self.params).items()
                   if p.dtype is not compute_type(p.type).dtype and path not in state["master"]}
        return state | {"master": state["master"] | missing}

    def save(self, path: str | os.PathLike, params: Any, state: dict[str, Any], *, step: int = 0
             ) -> None:
        """Parameters and state as a checkpoint, all or nothing, with the state of ts.random. Raises
        ArgumentError without @checkpointable, else what ts.checkpoints.save raises."""
        self._need_checkpoints("save")
        checkpoints.save(path, {"params": params, "state": state}, step=step)

    def load(self, path: str | os.PathLike, optimizer: Any = optim.AdamW()  # noqa: B008  frozen
             ) -> tuple[Any, dict[str, Any], int]:
        """(params, state, step) of what save wrote; ts.random goes on from where it stood then.
        Raises ArgumentError without @checkpointable, CheckpointError where it does not fit."""
        self._need_checkpoints("load")
        saved = checkpoints.load(path)
        made = saved.tree({"params": self.params, "state": self(optimizer)})
        random.set_state(saved.random)
        return made["params"], made["state"], saved.step

    def _need_checkpoints(self, what: str) -> None:
        if checkpointable not in self.policies:
            raise ArgumentError(f"{self} does not {what}", where=user_line(),
                                hint="OptimizerState[params] @ ts.checkpointable does")

    def __repr__(self) -> str:
        names = ", ".join(f"{path or 'param'}: {p.type}{list(p.shape)}"
                          for path, p in optim.named_params(self.params).items())
        return " ".join([f"OptimizerState[{names}]", *map(repr, self.policies)])


__all__ = ["OptimizerState", "OptimizerStateType", "checkpointable", "fp32_master", "paged"]
