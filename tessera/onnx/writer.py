"""An ONNX graph under construction, and the table of what each op of ours is in ONNX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

import numpy as np

from ..errors import BundleError, SourceLine
from ..graph.ir import Node, Value
from ..lazy_dataclass import dataclass
from ..numerics import DType

OPSET = 20  # has Gelu and reductions of bools; 2023, ONNX 1.15


@dataclass(frozen=True)
class Step:
    """One node of the ONNX graph, and the user's line that it comes from."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: dict[str, Any]
    where: SourceLine | None


@dataclass
class Writer:
    """Steps and constants, each value by its name."""

    steps: list[Step] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    where: SourceLine | None = None  # of the op that is being written
    _known: dict[Any, str] = field(default_factory=dict)

    def op(self, kind: str, *inputs: str | np.ndarray, n_outputs: int = 1, **attrs: Any) -> Any:
        """The name of what an ONNX op gives, or a tuple of several; arrays become constants."""
        names = tuple(x if isinstance(x, str) else self.constant(x) for x in inputs)
        first = len(self.steps)
        outputs = tuple(f"v{first}" if not i else f"v{first}_{i}" for i in range(n_outputs))
        self.steps.append(Step(kind, names, outputs, attrs, self.where))
        return outputs[0] if n_outputs == 1 else outputs

    def constant(self, array: np.ndarray) -> str:
        """The name of a small array: one for all that are equal."""
        key = array.dtype, array.shape, array.tobytes()
        if key not in self._known:
            self._known[key] = f"c{len(self._known)}"
            self.constants[self._known[key]] = array
        return self._known[key]

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def cast(self, x: str, to: DType) -> str:
        made: str = self.op("Cast", x, to=type_code(to))
        return made

    def operands(self, node: Node, xs: tuple[str, ...]) -> list[str]:
        """The operands in the type of the result, in which ours adds up and ONNX then does too."""
        to = node.outputs[0].aval.dtype
        return [x if v.aval.dtype is to else self.cast(x, to)
                for x, v in zip(xs, node.inputs, strict=True)]


def type_code(dtype: DType) -> int:
    """ONNX's number of an element type."""
    import onnx

    code: int = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype.numpy))
    return code


def extents(v: Value) -> list[int]:
    """Its extents, which are numbers."""
    return [int(n) for n in v.aval.shape]


def number(node: Node, value: float) -> np.ndarray:
    """A number in the type of the first operand."""
    return np.asarray(value, node.inputs[0].aval.dtype.numpy)


Rule = Callable[..., Any]
RULES: dict[str, tuple[Rule, Callable[[Node], bool]]] = {}


def exports(*names: str, when: Callable[[Node], bool] = lambda node: True) -> Callable[[Rule],
                                                                                       Rule]:
    """Registers what ops are in ONNX: rule(writer, node, *names of operands) -> name, or a tuple.

    when: of which nodes; others are written by the smaller ops that they are made of, or refused.
    """
    def register(rule: Rule) -> Rule:
        for name in names:
            if name in RULES:
                raise ValueError(f"what {name!r} is in ONNX is declared twice")
            RULES[name] = rule, when
        return rule

    return register


def rule_of(node: Node) -> Rule | None:
    rule, when = RULES.get(node.op.name, (None, None))
    return rule if when is not None and when(node) else None


def refuse(why: str, where: SourceLine | None, hint: str | None = None) -> BundleError:
    return BundleError(f"ONNX has no form for it: {why}", where=where, hint=hint)
