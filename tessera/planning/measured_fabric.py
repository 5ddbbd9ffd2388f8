"""A fabric as it was measured: figures of a declared one, fitted to collectives of this machine.

    mpirun -n 2 python -m tessera fabric --out here.json
    python -m tessera plan train.py --mesh dp=8,tp=9 --fabric here.json    # TESSERA_FABRIC as well

The file has what was measured and what follows from it. What was not measured, such as how many
ranks a domain has and how domains are joined, is that of the fabric it names ("like").
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from tessera.errors import ArgumentError

from ..lazy_dataclass import dataclass
from ..mesh.collectives.cost import COSTS
from .fabric import FABRICS, LOW_PART, Fabric, Link, read_fabric

SMALL, LARGE = 1 << 16, 1 << 24  # bytes: up to and from which the quicker protocol is known


@dataclass(frozen=True)
class ExchangeTime:
    """Microseconds of a collective of so many bytes, NCCL's size, on so many ranks of a domain."""

    op: str
    ranks: int
    bytes: int
    us: float

    @property
    def steps(self) -> int:
        return COSTS[self.op].steps(self.ranks)

    @property
    def sent(self) -> float:
        return COSTS[self.op].sent(self.ranks) * self.bytes


def fit_link(link: Link, times: Sequence[ExchangeTime], shared: bool = False) -> Link:
    """The link with what was measured: the bandwidth, and factors of what steps and calls take, by
    the protocols for large and for small messages; least relative errors. shared: the ranks take
    turns, so that each has its part of the bandwidth."""
    large = [t for t in times if t.bytes >= LARGE]
    small = [t for t in times if t.bytes <= SMALL]
    if len(large) < 2 or not small:
        raise ArgumentError(f"{len(large)} large messages and {len(small)} small ones do not give "
                            "figures", hint=f"some of {LARGE} bytes and more, some of up to "
                            f"{SMALL}")
    wait = [link.base + t.steps * link.step for t in large]
    factor, per_us = _least_errors([[w, t.sent] for w, t in zip(wait, large, strict=True)], large)
    rate = 1 / (per_us * 1e3)  # GB/s that a rank sends
    left = [max(t.us - t.sent / (LOW_PART * rate * 1e3), 0.1 * t.us) for t in small]
    low = float(np.median([us / (link.low_base + t.steps * link.low_step)
                           for us, t in zip(left, small, strict=True)]))
    whole = rate * (small[0].ranks if shared else 1)
    return replace(link, bus_gbps=whole, base=factor * link.base, step=factor * link.step,
                   low_base=low * link.low_base, low_step=low * link.low_step)


def _least_errors(rows: Sequence[Sequence[float]], times: Sequence[ExchangeTime]
                  ) -> tuple[float, float]:
    """a, b >= 0 of a wait + b sent = us. Of a negative a: that of none."""
    x, y = np.array(rows), np.array([t.us for t in times])
    a, b = np.linalg.lstsq(x / y[:, None], np.ones(len(y)), rcond=None)[0]
    if a < 0 or b <= 0:
        a, b = 0.0, float(np.median(y / x[:, 1]))
    return float(a), float(b)


def write_fabric(path: Path, like: Fabric, times: Sequence[ExchangeTime],
                 rates: dict[str, float], about: dict[str, Any]) -> Fabric:
    """The file, and the fabric that it is. rates: memory_efficiency and matmul_efficiency, as far
    as they were measured. about: the device, the date."""
    link = asdict(fit_link(like.inside, times, like.shared))
    figures = {n: link[n] for n in ("bus_gbps", "base", "step", "low_base", "low_step")}
    path.write_text(json.dumps({**about, "like": like.name, "inside": figures, "rates": rates,
                                "measured": [asdict(t) for t in times]}, indent=1) + "\n")
    FABRICS.pop(str(path), None)
    return read_fabric(str(path))


__all__ = ["ExchangeTime", "fit_link", "write_fabric"]
