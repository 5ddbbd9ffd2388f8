"""What is trained of a tree, and what belongs to it."""

from __future__ import annotations

from typing import Any

from ..errors import DTypeError
from ..graph import tree
from ..graph.signature import is_data
from ..tensor import Tensor


def decays_matrices(path: str, param: Tensor) -> bool:
    """The usual choice: weight decay for matrices, none for norms, biases and embeddings."""
    return param.ndim >= 2 and "embed" not in path


def named_params(params: Any) -> dict[str, Tensor]:
    """{"blocks.0.qkv": tensor}: what is trained of a tree, its `ts.param`s, or all leaves where
    none is one. Raises DTypeError for one that is no float tensor."""
    leaves, structure = tree.flatten(params)
    every = dict(zip(tree.paths(structure), leaves, strict=True))
    named = {path: x for path, x in every.items() if isinstance(x, Tensor) and x.is_param} or every
    for path, p in named.items():
        if not isinstance(p, Tensor) or p.dtype.kind != "float" or p.scale is not None:
            kind = p.type if isinstance(p, Tensor) else type(p).__name__
            data = not isinstance(p, Tensor) and is_data(p)
            raise DTypeError(f"parameter {path!r} is {kind}, an optimizer needs float tensors",
                             hint="make it a parameter: ts.param(x)" if data else
                             "mark what is trained, ts.param(x): an optimizer leaves what is "
                             "beside it as it is")
    return named
