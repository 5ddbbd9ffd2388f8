"""The standard library: pre-tuned kernels, used as they are or with a schedule of yours.

    from tessera.stdlib import flash_attention_2
    y = flash_attention_2(q, k, v, causal=True)
    mine = flash_attention_2.with_schedule(ts.Schedule(block=(64, 64), warps=4))

Its names are those of the routines that `tessera/kernels/` declares.
"""

from __future__ import annotations

from .errors import did_you_mean
from .kernels import ROUTINES, Routine


def __getattr__(name: str) -> Routine:
    if name in ROUTINES:
        return ROUTINES[name]
    raise AttributeError(f"the library has no routine {name!r}; "
                         f"{did_you_mean(name, sorted(ROUTINES))}", name=name)


def __dir__() -> list[str]:
    return sorted({"ROUTINES", "Routine", *ROUTINES})


__all__ = ["ROUTINES", "Routine", *sorted(ROUTINES)]
