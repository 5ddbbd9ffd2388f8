"""Arguments for a kernel, made from its annotations and the extents that are given."""

from __future__ import annotations

import zlib
from math import prod
from typing import Any

import numpy as np

from ..dims import Dim
from ..errors import ArgumentError
from ..numerics import DType, NumericType, as_type, encode
from ..tensor import Tensor, TensorType
from ..tile.kernel.kernel import Kernel

RANDOM_ELEMENTS = 1 << 20  # larger tensors are zeros, whose pages cost nothing


def missing_extents(kernel: Kernel, sizes: dict[str, int]) -> tuple[str, ...]:
    """Named extents of the annotations that have no size, in order of appearance."""
    tensors = [a for a in kernel.annotations.values() if isinstance(a, TensorType)]
    names = [n for a in tensors for d in a.shape if isinstance(d, Dim) for n in sorted(d.names)]
    return tuple(n for n in dict.fromkeys(names) if n not in sizes)


def tensors_without_type(kernel: Kernel) -> tuple[str, ...]:
    """Parameters whose annotation gives the extents alone: x: Tensor["N"]."""
    return tuple(n for n, a in kernel.annotations.items()
                 if isinstance(a, TensorType) and a.type is None)


def sample_arguments(kernel: Kernel, sizes: dict[str, int],
                     values: dict[str, Any]) -> dict[str, Any]:
    """Tensors of normal random numbers (large ones of zeros), scalars of 1, and defaults.

    values: of parameters by name; for a tensor, the name of its type. Raises ArgumentError for a
    parameter whose type is not written down, or without the size of an extent.
    """
    missing = missing_extents(kernel, sizes)
    if missing:
        raise ArgumentError(f"{kernel.__name__} needs the extents {', '.join(missing)}",
                            hint="--size " + " ".join(f"{n}=1024" for n in missing))
    unknown = values.keys() - kernel.signature.parameters.keys()
    if unknown:
        raise ArgumentError(f"{kernel.__name__} has no parameter {sorted(unknown)[0]!r}",
                            hint=f"{kernel.__name__}{kernel.signature}")
    annotations, given = kernel.annotations, dict(values)
    for name, p in kernel.signature.parameters.items():
        annotation, value = annotations.get(name), given.get(name)
        if isinstance(annotation, TensorType) and isinstance(value, str):
            given[name] = _sample_tensor(name, annotation, as_type(value), sizes)
        elif name not in given and (isinstance(annotation, TensorType) or p.default is p.empty):
            given[name] = _sample(kernel, name, annotation, sizes)
    return given


def _sample(kernel: Kernel, name: str, annotation: Any, sizes: dict[str, int]) -> Any:
    if isinstance(annotation, TensorType):
        if annotation.type is None:
            raise ArgumentError(f"{kernel.__name__}: the annotation of {name} names no type",
                                hint=f"--set {name}=f32, or another type")
        return _sample_tensor(name, annotation, annotation.type, sizes)
    if isinstance(annotation, DType | NumericType):
        return 1.0 if as_type(annotation).dtype.kind == "float" else 1
    raise ArgumentError(f"{kernel.__name__}: no value can be made for the parameter {name}",
                        hint=f"--set {name}=VALUE, or annotate it: {name}: Tensor[\"N\", f32]")


def _sample_tensor(name: str, annotation: TensorType, type: NumericType,
                   sizes: dict[str, int]) -> Tensor:
    shape = tuple(d.bind(sizes) if isinstance(d, Dim) else d for d in annotation.shape)
    return _tensor(name, shape, type)


def _tensor(name: str, shape: tuple[Any, ...], numeric: NumericType) -> Tensor:
    dtype = numeric.dtype
    if prod(shape) > RANDOM_ELEMENTS or dtype.kind != "float":
        return Tensor(np.zeros(shape, dtype.numpy), numeric)
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    return Tensor(encode(values.astype(np.float32), dtype), numeric)


__all__ = ["missing_extents", "sample_arguments", "tensors_without_type"]
