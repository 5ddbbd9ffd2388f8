"""The accuracy gate of tuning: a candidate must give what the reference gives, up to rounding.

Both run on copies, so that the caller's arrays change only in the call itself. The tolerance comes
from the coarsest type that the kernel rounds to on the way to its results, and from the length of
its sums: |got - want| <= (4 eps(type) + 4 eps(f32) sqrt(n)) (|want| + rms(want)).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, user_line
from tessera.lazy_dataclass import dataclass
from tessera.numerics import DType, decode
from tessera.runtime.arrays import read_array
from tessera.tensor import Tensor as Array
from tessera.tile.interpreter.arguments import Bound
from tessera.tile.ir.ir import Function, Op, definitions, walk
from tessera.tile.ir.types import TileType
from tessera.tile.passes.written_arguments import written_parameters

FACTOR = 4.0  # half a unit for a result, and room for the roundings before it
EPS_F32, EPS_TF32 = 2.0**-23, 2.0**-10
COPY: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("numpy", "tessera", "resident", "cupy"), lambda x: x.copy()),
    "torch": lambda x: x.clone(), "jax": lambda x: x}


@dataclass(frozen=True)
class Limit:
    """How far results may lie apart: relative to each element and to their root mean square."""

    relative: float

    def miss(self, name: str, got: np.ndarray, want: np.ndarray) -> str:
        """What is wrong, or nothing."""
        if got.shape != want.shape:
            return f"{name} has shape {list(got.shape)}, not {list(want.shape)}"
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        with np.errstate(invalid="ignore", over="ignore"):
            finite = want[np.isfinite(want)]
            scale = math.sqrt(float(np.mean(np.square(finite)))) if finite.size else 0.0
            near = np.abs(got - want) <= self.relative * (np.abs(want) + scale)
        bad = ~(same | (near & np.isfinite(want)))
        if not bad.any():
            return ""
        at = np.unravel_index(int(np.argmax(bad)), bad.shape)
        return (f"{int(bad.sum())} of {bad.size} elements of {name} are wrong: [{_index(at)}] is "
                f"{got[at]:.6g}, expected {want[at]:.6g}")


def _index(at: tuple[Any, ...]) -> str:
    return ", ".join(str(int(i)) for i in at)


def limit_of(function: Function, bound: Bound) -> Limit:
    """The tolerance of a kernel's results."""
    eps = max((_eps(d) for d in _roundings(function)), default=0.0)
    length = max(bound.texts.values(), default=1)
    floats = any(t.dtype.kind == "float" for t in definitions(function).values())
    return Limit(FACTOR * (eps + EPS_F32 * math.sqrt(max(length, 1))) if floats else 0.0)


def _roundings(function: Function) -> list[DType | None]:
    """Types that values are rounded to: of written tensors and of conversions; None for tf32."""
    written = written_parameters(function)
    found: list[DType | None] = [p.type.dtype for p in function.params if p.value.name in written]
    for node in walk(function.body):
        if isinstance(node, Op) and node.name == "convert" and isinstance(node.outs[0].type,
                                                                          TileType):
            found.append(node.outs[0].type.dtype)
        if isinstance(node, Op) and node.name == "matmul" and node.attr["precision"] == "tf32":
            found.append(None)
    return found


def _eps(dtype: DType | None) -> float:
    if dtype is None or dtype.name == "tf32":
        return EPS_TF32
    return 2.0 ** -dtype.man if dtype.kind == "float" else 0.0


# --- arrays of any library --------------------------------------------------------------------
def copies(function: Function, bound: Bound) -> dict[str, Any]:
    """The call's arguments by name, those that the kernel writes as copies."""
    names = written_parameters(function)
    return {**bound.constants, **{n: copied(x, n) if n in names else x
                                  for n, x in bound.given.items()}}


def copied(x: Any, name: str) -> Any:
    """A copy of an array in its own library."""
    library = read_array(x, name).library
    if library not in COPY:
        raise ArgumentError(f"argument {name}: tuning copies what the kernel writes, and does not "
                            f"know how to copy an array of {library}", where=user_line(),
                            hint=f"pass an array of {', '.join(COPY)}, or give a schedule")
    return COPY[library](x)


def outputs(function: Function, given: dict[str, Any], result: Any) -> dict[str, np.ndarray]:
    """What a run wrote and returned, on the host in f64 (integers as they are)."""
    names = [n for n in sorted(written_parameters(function)) if n in given]
    found = {n: on_host(given[n]) for n in names}
    results = result if isinstance(result, tuple) else (result,)
    for i, r in enumerate(results):
        if r is not None and not any(r is given[n] for n in names):
            found[f"result {i}" if len(results) > 1 else "the result"] = on_host(r)
    return found


def on_host(x: Any) -> np.ndarray:
    """An array or number as NumPy's."""
    if isinstance(x, Array):
        return _as_f64(np.asarray(decode(x.array, x.dtype)))
    library = type(x).__module__.partition(".")[0]
    if library == "torch":
        x = x.detach().cpu()
        x = (x.double() if x.is_floating_point() else x).numpy()
    elif library == "cupy":
        x = x.get()
    return _as_f64(np.asarray(x))


def _as_f64(x: np.ndarray) -> np.ndarray:
    return x if x.dtype.kind in "biu" else x.astype(np.float64)


def compare(got: dict[str, np.ndarray], want: dict[str, np.ndarray], limit: Limit) -> str:
    """The first thing that is wrong, or nothing."""
    for name, expected in want.items():
        if message := limit.miss(name, got[name], expected):
            return message
    return ""


__all__ = ["Limit", "compare", "copies", "limit_of", "on_host", "outputs"]
