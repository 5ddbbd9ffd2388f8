"""Optimizers: frozen records of hyper-parameters. Their state is a tree of tensors like any other:
it passes through `ts.jit` and is saved beside the parameters.

    optimizer = ts.optim.AdamW(weight_decay=0.1)
    state = optimizer.init(params)

    @ts.jit
    def step(params, state, x, y, lr):
        loss, grads = ts.value_and_grad(loss_fn)(params, x, y)
        grads, norm = ts.optim.clip_by_global_norm(grads, 1.0)
        params, state = optimizer.update(params, grads, state, lr)
        return params, state, loss, norm

What is trained of a tree are its `ts.param`s; its other leaves, such as running statistics, stay as
they are. Of a tree without any all leaves are trained.

Of distributed parameters the states lie as the parameters do, and a step's results lie as its
arguments, so that the next step runs the same compiled program. `ts.dist.zero` splits the states.
"""

from __future__ import annotations

import importlib
import pkgutil

from ..errors import UnknownNameError
from ..foreign import OPTIM
from .clipping import clip_by_global_norm, global_norm
from .factored_moments import Adafactor
from .first_order import SGD, AdamW, Lion
from .orthogonal_steps import Muon, hidden_matrices
from .paged_states import Paged, paged
from .record import OPTIMIZERS, OptimizerRecord
from .schedules import CosineSchedule
from .trainable import decays_matrices, named_params

for _module in pkgutil.iter_modules(__path__):  # each registers what it has
    importlib.import_module(f"{__name__}.{_module.name}")


def __getattr__(name: str) -> type[OptimizerRecord]:
    """An optimizer that is not imported above; else the error says which name is near."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    if name.startswith("__"):
        raise AttributeError(name)
    raise UnknownNameError(f"tessera.optim has no name {name!r}", name,
                           lambda: sorted({*__all__, *OPTIMIZERS}), OPTIM)


__all__ = [
    "OPTIMIZERS", "Adafactor", "AdamW", "CosineSchedule", "Lion", "Muon", "OptimizerRecord",
    "Paged", "SGD", "clip_by_global_norm", "decays_matrices", "global_norm", "hidden_matrices",
    "named_params", "paged",
]
__all__ += sorted(OPTIMIZERS.keys() - __all__)
