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

    Tensors arrive as NumPy arrays, each element written by the format, scalars as Python numbers;
    anything else is printed as it was while tracing. An `io` effect: neither dropped, nor
    reordered with other prints, nor repeated by a recomputation. Under vmap the whole batch is
    printed at once. Raises ArgumentError for a format that such values do not take.
    """
    if not isinstance(fmt, str):
        raise ArgumentError(f"debug.print needs a format first, got {type(fmt).__name__}",
                            hint='ts.debug.print("x = {}", x)')
    _check_fields(fmt, len(args), set(kwargs))
    named = {**{str(i): a for i, a in enumerate(args)}, **kwargs}
    tensors = {k: as_tensor(v) for k, v in named.items() if isinstance(v, Tensor | np.ndarray)}
    plain = {k: F.dequantize(t) if t.scale is not None else t for k, t in tensors.items()}
    fixed = tuple((k, v if type(v) in (int, float, bool) else str(v)) for k, v in named.items()
                  if k not in tensors)
    _try_format(fmt, plain, fixed)
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


def _try_format(fmt: str, tensors: dict[str, Tensor], fixed: tuple) -> None:
    """Raises ArgumentError for a format that values of these types and shapes do not take."""
    zeros = {}
    for name, t in tensors.items():
        shape = [n if isinstance(n, int) else 1 for n in t.shape]
        zero = np.zeros((), t.dtype.compute.numpy if t.dtype.kind == "float" else t.dtype.numpy)
        zeros[name] = _value(np.broadcast_to(zero, shape))
    try:
        _formatted(fmt, zeros, fixed)
    except (ValueError, TypeError, LookupError, AttributeError) as err:
        raise ArgumentError(f"debug.print cannot write these values by {fmt!r}: {err}",
                            hint="a format such as {:.3f} is of a number, and of each element of "
                            "a tensor") from err


class _Elements(np.ndarray):
    """An array whose format is that of each element: {:.2f}."""

    def __format__(self, spec: str) -> str:
        array = self.view(np.ndarray)
        if not spec or not array.ndim:
            return format(array if array.ndim else array.item(), spec)
        return np.array2string(array, formatter={"all": lambda x: format(x, spec)})

    def __repr__(self) -> str:
        return repr(self.view(np.ndarray))


def _value(values: np.ndarray) -> Any:
    return values.view(_Elements) if values.ndim else values.item()


def _formatted(fmt: str, values: dict[str, Any], fixed: tuple) -> str:
    values = values | dict(fixed)
    places = [values.pop(str(i)) for i in range(len(values)) if str(i) in values]
    return fmt.format(*places, **values)


def _decoded(array: np.ndarray, dtype: DType) -> np.ndarray:
    return decode(array, dtype) if dtype.kind == "float" else array


def _print_ref(*arrays: np.ndarray, fmt: str, names: tuple[str, ...],
               types: tuple[NumericType, ...], fixed: tuple) -> tuple[()]:
    values = {n: _value(_decoded(a, t.dtype)) for n, a, t in zip(names, arrays, types, strict=True)}
    builtins.print(_formatted(fmt, values, fixed))
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
