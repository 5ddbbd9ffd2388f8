"""An ONNX model as a function."""

from __future__ import annotations

import inspect
import os
import re
from typing import Any

import numpy as np

from ..errors import ArgumentError, BundleError, DTypeError, ShapeError
from ..graph.jit import jit
from ..numerics import NumericType, as_type
from ..tensor import Tensor, as_tensor
from . import readers, reading_layers  # noqa: F401  they fill the table of readers
from .package import onnx_package
from .reading import NEWEST, OLDEST, READERS, OnnxNode, need_readers

Values = dict[str, Any]
# Ops that compute from what is known alone, so that they need no reader.
FOLDED = ("Constant", "ConstantOfShape", "Range")


def import_(model: Any) -> ImportedModel:
    """The function of an ONNX model: a path, its bytes, or an onnx.ModelProto.

    Weights are captured; inputs are arguments, in the model's order. Extents that the model leaves
    open are those of the call. Raises BundleError for a model that ONNX's checker refuses, for ops
    that are not read, by name, for opsets before 13, and without the onnx package.
    """
    onnx = onnx_package()
    try:
        proto = onnx.load_model_from_string(model) if isinstance(model, bytes) else \
            onnx.load(model) if isinstance(model, str | os.PathLike) else model
        onnx.checker.check_model(proto)
    except FileNotFoundError as err:
        raise BundleError(f"there is no file {model}") from err
    except Exception as err:  # protobuf's and the checker's classes differ between their versions
        raise BundleError(f"it is damaged, or no ONNX model: {err}") from err
    proto = onnx.inliner.inline_local_functions(proto)
    opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), NEWEST)
    if not OLDEST <= opset <= NEWEST:
        raise BundleError(f"the model is of opset {opset}, read are {OLDEST} to {NEWEST}",
                          hint="onnx.version_converter.convert_version(model, 20)")
    need_readers([(n.domain, n.op_type, n.name) for n in proto.graph.node
                  if n.op_type not in FOLDED])
    return ImportedModel(proto, opset)


class ImportedModel:
    """A function that was read from an ONNX model. Make one with `ts.onnx.import_`.

    name: of the model's graph   inputs, outputs: names, in order
    """

    def __init__(self, proto: Any, opset: int):
        graph = proto.graph
        onnx = onnx_package()
        arrays = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
        self.name = graph.name
        self._wanted = {i.name: _about(i) for i in graph.input if i.name not in arrays}
        self.inputs = tuple(self._wanted)
        self.outputs = tuple(o.name for o in graph.output)
        self._arrays, self._nodes = arrays, list(graph.node)
        self._opsets = {"": opset}

        def run(*xs: Tensor) -> list[Tensor]:
            return self._evaluate(dict(zip(self.inputs, xs, strict=True)))

        run.__name__ = run.__qualname__ = self.__name__ = self.name
        names = [re.sub(r"\W|^(?=\d)", "_", n) for n in self.inputs]
        names = [n if names.count(n) == 1 else f"x{i}" for i, n in enumerate(names)]
        self.__signature__ = inspect.Signature([
            inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names])
        self.compiled = jit(run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result, or a tuple of them. Inputs by place, or by name where the name is one of
        Python. Raises ArgumentError, ShapeError and DTypeError for others than the model's."""
        named = dict(zip(self.inputs, args, strict=False)) | kwargs
        if len(args) + len(kwargs) != len(self.inputs) or named.keys() != set(self.inputs):
            raise ArgumentError(f"{self.name} has the inputs {', '.join(self.inputs)}")
        xs = [_fit(self.name, k, named[k], *self._wanted[k]) for k in self.inputs]
        made = self.compiled(*xs)
        return made[0] if len(made) == 1 else tuple(made)

    def __repr__(self) -> str:
        return f"ImportedModel {self.name}({', '.join(self.inputs)}) -> {', '.join(self.outputs)}"

    def _evaluate(self, env: Values) -> list[Tensor]:
        """Every node in order. What follows from constants and extents is computed at once."""
        env = self._arrays | env
        for proto in self._nodes:
            xs = [env[n] if n else None for n in proto.input]
            if all(x is None or isinstance(x, np.ndarray) for x in xs):
                made = self._fold(proto, env)
            else:
                made = READERS[proto.op_type](_node(proto), *xs)
            outputs = made if isinstance(made, tuple | list) else (made,)
            env.update(zip(proto.output, outputs, strict=False))
        return [as_tensor(env[n]) for n in self.outputs]

    def _fold(self, proto: Any, env: Values) -> list[Any]:
        """The results of a node whose operands are known, by ONNX's own meaning."""
        evaluator = onnx_package().reference.ReferenceEvaluator(proto, opsets=self._opsets)
        made: list[Any] = evaluator.run(None, {n: env[n] for n in proto.input if n})
        return made


def _node(proto: Any) -> OnnxNode:
    get = onnx_package().helper.get_attribute_value
    attrs = {a.name: get(a) for a in proto.attribute}
    attrs = {k: v.decode() if isinstance(v, bytes) else v for k, v in attrs.items()}
    return OnnxNode(proto.op_type, proto.name or proto.output[0], attrs,
                    sum(map(bool, proto.output)))


def _about(info: Any) -> tuple[NumericType, list[int | None] | None]:
    """The type of an input, and its extents, None where they are open."""
    kind = info.type.tensor_type
    numpy_type = onnx_package().helper.tensor_dtype_to_np_dtype(kind.elem_type)
    extents = [d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim]
    return as_type(numpy_type), extents if kind.HasField("shape") else None


def _fit(name: str, what: str, x: Any, kind: NumericType, extents: list[int | None] | None
         ) -> Tensor:
    x = as_tensor(x)
    if x.type.dtype is not kind.dtype:
        raise DTypeError(f"{name}: {what} is {x.type}, the model has {kind}",
                         hint=f"convert it: ts.cast(x, '{kind}')")
    if extents is not None and (len(extents) != x.ndim or any(
            n is not None and n != m for n, m in zip(extents, x.shape, strict=True))):
        raise ShapeError(f"{name}: {what} is {list(x.shape)}, the model has "
                         f"[{', '.join('any' if n is None else str(n) for n in extents)}]")
    return x


__all__ = ["ImportedModel", "import_"]
