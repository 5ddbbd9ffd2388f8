"""`ts.debug.print`: shows values when the graph runs, once."""

from __future__ import annotations

import builtins
import string
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..graph import functions as F
from ..graph.op import GraphOp, Sample, sample
from ..graph.trace import apply
from ..numerics import DType, NumericType, as_type, decode
from ..tensor import Tensor, as_tensor


def print(fmt: str, *args: Any, **kwargs: Any) -> None:
    """Prints `fmt.format(*args, **kwargs)` each time the program gets here, compiled or not.

    Tensors arrive as NumPy arrays, scalars as Python numbers (so "{:.3f}" works); anything else is
    printed as it was while tracing. An `io` effect: neither dropped, nor reordered with other
    prints, nor repeated by a recomputation. Under vmap the whole batch is printed at once.
    """
    if not isinstance(fmt, str):
        raise ArgumentError(f"debug.print needs a format first, got {type(fmt).__name__}",
                            hint='ts.debug.print("x = {}", x)')
    _check_fields(fmt, len(args), set(kwargs))
    named = {**{str(i): a for i, a in enumerate(args)}, **kwargs}
    tensors = {k: as_tensor(v) for k, v in named.items() if isinstance(v, Tensor | np.ndarray)}
    plain = {k: F.dequantize(t) if t.scale is not None else t for k, t in tensors.items()}
    fixed = tuple((k, str(v)) for k, v in named.items() if k not in tensors)
    apply(PRINT, *plain.values(), fmt=fmt, names=tuple(plain),
          types=tuple(t.type for t in plain.values()), fixed=fixed)


def _check_fields(fmt: str, count: int, names: set[str]) -> None:
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(fmt) if name is not None]
    except ValueError as err:
        raise ArgumentError(f"debug.print cannot read the format {fmt!r}: {err}") from err
    known = {str(i) for i in range(count)} | names
    for place, text in enumerate(fields):
        head = text.split(".")[0].split("[")[0] or str(place)
        if head not in known:
            raise ArgumentError(f"debug.print: the format {fmt!r} wants {{{text}}}, "
                                f"{count} values and the names {sorted(names)} were given")


def _value(array: np.ndarray, dtype: DType) -> Any:
    values = decode(array, dtype) if dtype.kind == "float" else array
    return values.item() if values.ndim == 0 else values


def _print_ref(*arrays: np.ndarray, fmt: str, names: tuple[str, ...],
               types: tuple[NumericType, ...], fixed: tuple) -> tuple[()]:
    values = {n: _value(a, t.dtype) for n, a, t in zip(names, arrays, types, strict=True)}
    values.update(fixed)
    places = [values.pop(str(i)) for i in range(len(values)) if str(i) in values]
    builtins.print(fmt.format(*places, **values))
    return ()


def _print_batch(size: Any, batched: tuple, *xs: Tensor, **attrs: Any) -> tuple:
    return apply(PRINT, *xs, **attrs), False


PRINT = GraphOp(
    "print",
    shape=lambda *xs, **attrs: (),
    ref=_print_ref,
    batch=_print_batch,
    effects=frozenset({"io"}),
    host="now",
    multi=True,  # no result; a recomputation does not run an op all of whose results it has
    differentiable=False,
    samples=(Sample(sample((2, 3)).args, {"fmt": "{}", "names": ("0",), "fixed": (),
                                          "types": (as_type("f32"),)}),),
    doc="print values when the graph runs",
)
