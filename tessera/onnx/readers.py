"""What ops of ONNX are among the functions of `ts`: elementwise ops, moves, reductions."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..graph import functions as F
from ..numerics import as_type
from ..tensor import Tensor
from .package import onnx_package
from .reading import OnnxNode, reads, tensor

# --- one for one ---------------------------------------------------------------------------------
SAME = {
    "Abs": "abs", "Acos": "acos", "Add": "add", "And": "logical_and", "Asin": "asin",
    "Atan": "atan", "BitwiseAnd": "bitwise_and", "BitwiseNot": "bitwise_not",
    "BitwiseOr": "bitwise_or", "BitwiseXor": "bitwise_xor", "Ceil": "ceil", "Cos": "cos",
    "Cosh": "cosh", "Det": "det", "Equal": "equal", "Erf": "erf", "Exp": "exp", "Floor": "floor",
    "Greater": "greater", "GreaterOrEqual": "greater_equal", "IsNaN": "isnan", "Less": "less",
    "LessOrEqual": "less_equal", "Log": "log", "MatMul": "matmul", "Mul": "multiply",
    "Neg": "negative", "Not": "logical_not", "Or": "logical_or", "Reciprocal": "reciprocal",
    "Relu": "relu", "Round": "round", "Sigmoid": "sigmoid", "Sign": "sign", "Sin": "sin",
    "Sinh": "sinh", "Softplus": "softplus", "Sqrt": "sqrt", "Sub": "subtract", "Tan": "tan",
    "Tanh": "tanh", "Where": "where", "Xor": "logical_xor",
}
VARIADIC = {"Max": "maximum", "Min": "minimum", "Sum": "add"}
REDUCTIONS = {"ReduceMax": "max", "ReduceMean": "mean", "ReduceMin": "min", "ReduceProd": "prod",
              "ReduceSum": "sum"}
PLACES = {"ArgMax": "argmax", "ArgMin": "argmin"}


@reads(*SAME)
def _same_op(node: OnnxNode, *xs: Any) -> Tensor:
    made: Tensor = getattr(F, SAME[node.kind])(*map(tensor, xs))
    return made


@reads(*VARIADIC)
def _variadic(node: OnnxNode, *xs: Any) -> Tensor:
    return functools.reduce(getattr(F, VARIADIC[node.kind]), map(tensor, xs))


@reads("Mean")
def _mean(node: OnnxNode, *xs: Any) -> Tensor:
    return functools.reduce(F.add, map(tensor, xs)) / len(xs)


@reads("Identity")
def _identity(node: OnnxNode, x: Any) -> Any:
    return x


@reads("Dropout")
def _dropout(node: OnnxNode, x: Any, ratio: Any = None, training: Any = None) -> Any:
    node.one_result()
    if training is not None and np.any(training):
        raise node.refuse("training_mode")
    return x


# --- elementwise, of several ---------------------------------------------------------------------
@reads("Div")
def _div(node: OnnxNode, a: Any, b: Any) -> Tensor:
    """Of integers towards zero."""
    a, b = tensor(a), tensor(b)
    if a.type.dtype.kind == "float":
        return F.divide(a, b)
    if a.type.dtype.kind == "uint":
        return F.floor_divide(a, b)
    quotient = F.floor_divide(a, b)
    return F.where(_is_cut_below(a, b), quotient + 1, quotient)


def _is_cut_below(a: Tensor, b: Tensor) -> Tensor:
    """Where a / b of integers is below 0 and no integer: there rounding down and towards zero
    differ."""
    return F.logical_and(F.not_equal(F.remainder(a, b), 0),
                         F.logical_xor(F.less(a, 0), F.less(b, 0)))


@reads("Mod")
def _mod(node: OnnxNode, a: Any, b: Any) -> Tensor:
    """With the sign of the divisor; with fmod=1 with that of the dividend."""
    a, b = tensor(a), tensor(b)
    if not node.option("fmod", 0) or a.type.dtype.kind == "uint":
        return F.remainder(a, b)
    if a.type.dtype.kind == "float":
        return F.remainder(F.abs(a), F.abs(b)) * F.sign(a)
    left = F.remainder(a, b)
    return F.where(_is_cut_below(a, b), left - b, left)


@reads("Pow")
def _pow(node: OnnxNode, a: Any, b: Any) -> Tensor:
    a = tensor(a)
    if not isinstance(b, Tensor) and np.ndim(b) == 0:
        return F.cast(F.power(a, b.item()), a.type)
    return F.cast(F.power(a, F.cast(tensor(b), a.type)), a.type)


@reads("Asinh")
def _asinh(node: OnnxNode, x: Any) -> Tensor:
    """sign(x) log1p(|x| + x^2 / (1 + sqrt(x^2 + 1)))"""
    x = tensor(x)
    size, square = F.abs(x), F.square(x)
    return F.sign(x) * F.log1p(size + square / (1 + F.sqrt(square + 1)))


@reads("Atanh")
def _atanh(node: OnnxNode, x: Any) -> Tensor:
    x = tensor(x)
    return 0.5 * (F.log1p(x) - F.log1p(-x))


@reads("IsInf")
def _isinf(node: OnnxNode, x: Any) -> Tensor:
    node.only(detect_negative=1, detect_positive=1)
    return F.isinf(tensor(x))


@reads("Clip")
def _clip(node: OnnxNode, x: Any, low: Any = None, high: Any = None) -> Tensor:
    made = tensor(x)
    made = made if low is None else F.maximum(made, tensor(low))
    return made if high is None else F.minimum(made, tensor(high))


@reads("LeakyRelu")
def _leaky_relu(node: OnnxNode, x: Any) -> Tensor:
    return F.leaky_relu(tensor(x), node.option("alpha", 0.01))


@reads("PRelu")
def _prelu(node: OnnxNode, x: Any, slope: Any) -> Tensor:
    x = tensor(x)
    return F.where(x < 0, x * tensor(slope), x)


@reads("Elu")
def _elu(node: OnnxNode, x: Any) -> Tensor:
    return F.elu(tensor(x), node.option("alpha", 1.0))


@reads("HardSigmoid")
def _hard_sigmoid(node: OnnxNode, x: Any) -> Tensor:
    return F.clip(node.option("alpha", 0.2) * tensor(x) + node.option("beta", 0.5), 0.0, 1.0)


@reads("HardSwish")
def _hard_swish(node: OnnxNode, x: Any) -> Tensor:
    x = tensor(x)
    return x * F.clip(x * (1 / 6) + 0.5, 0.0, 1.0)


@reads("Gelu")
def _gelu(node: OnnxNode, x: Any) -> Tensor:
    return F.gelu(tensor(x), exact=node.option("approximate", "none") == "none")


@reads("Cast")
def _cast(node: OnnxNode, x: Any) -> Tensor:
    to = onnx_package().helper.tensor_dtype_to_np_dtype(node.attrs["to"])
    return F.cast(tensor(x), as_type(to))


# --- moves ---------------------------------------------------------------------------------------
@reads("Shape")
def _shape(node: OnnxNode, x: Any) -> np.ndarray:
    return np.array(x.shape, np.int64)[node.option("start", 0):node.option("end")]


@reads("Size")
def _size(node: OnnxNode, x: Any) -> np.ndarray:
    return np.asarray(np.prod(x.shape), np.int64)


@reads("Reshape")
def _reshape(node: OnnxNode, x: Any, shape: Any) -> Tensor:
    """0 is the extent that is there, unless allowzero."""
    wanted = node.static(shape, "extents")
    if not node.option("allowzero", 0):
        wanted = [x.shape[i] if n == 0 else n for i, n in enumerate(wanted)]
    return F.reshape(tensor(x), wanted)


@reads("Flatten")
def _flatten(node: OnnxNode, x: Any) -> Tensor:
    axis = node.option("axis", 1)
    axis = axis + len(x.shape) if axis < 0 else axis
    rows = int(np.prod(x.shape[:axis]))
    return F.reshape(tensor(x), (rows, int(np.prod(x.shape[axis:]))))


@reads("Squeeze")
def _squeeze(node: OnnxNode, *xs: Any) -> Tensor:
    axes = node.axes(xs)
    return F.squeeze(tensor(xs[0]), None if axes is None else tuple(axes))


@reads("Unsqueeze")
def _unsqueeze(node: OnnxNode, *xs: Any) -> Tensor:
    return F.expand_dims(tensor(xs[0]), tuple(node.axes(xs) or ()))


@reads("Transpose")
def _transpose(node: OnnxNode, x: Any) -> Tensor:
    return F.transpose(tensor(x), node.option("perm"))


@reads("Concat")
def _concat(node: OnnxNode, *xs: Any) -> Tensor:
    return F.concatenate(list(map(tensor, xs)), node.attrs["axis"])


@reads("Split")
def _split(node: OnnxNode, x: Any, sizes: Any = None) -> tuple:
    """Into parts of these extents, or as many as there are results, the last of them smaller."""
    axis = node.option("axis", 0)
    n, parts = int(x.shape[axis]), node.n_outputs
    each = -(-n // parts)
    wanted = [min(each, n - i * each) for i in range(parts)] if sizes is None else \
        node.static(sizes, "extents")
    return tuple(F.split(tensor(x), wanted, axis))


@reads("Slice")
def _slice(node: OnnxNode, x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None
           ) -> Tensor:
    begin, end = node.static(starts, "starts"), node.static(ends, "ends")
    along = list(range(len(begin))) if axes is None else node.static(axes, "axes")
    step = [1] * len(begin) if steps is None else node.static(steps, "steps")
    items = [slice(None)] * len(x.shape)
    for a, b, e, s in zip(along, begin, end, step, strict=True):
        items[a] = slice(b, e, s)
    made: Tensor = tensor(x)[tuple(items)]
    return made


@reads("Gather")
def _gather(node: OnnxNode, x: Any, ids: Any) -> Tensor:
    return F.take(tensor(x), tensor(ids), node.option("axis", 0))


@reads("GatherElements")
def _gather_elements(node: OnnxNode, x: Any, ids: Any) -> Tensor:
    return F.take_along_axis(tensor(x), tensor(ids), node.option("axis", 0))


@reads("Expand")
def _expand(node: OnnxNode, x: Any, shape: Any) -> Tensor:
    wanted = np.broadcast_shapes(tuple(x.shape), tuple(node.static(shape, "extents")))
    return F.broadcast_to(tensor(x), wanted)


@reads("Tile")
def _tile(node: OnnxNode, x: Any, repeats: Any) -> Tensor:
    return F.tile(tensor(x), tuple(node.static(repeats, "repeats")))


@reads("Pad")
def _pad(node: OnnxNode, x: Any, pads: Any, value: Any = None, axes: Any = None) -> Tensor:
    widths, rank = node.static(pads, "widths"), len(x.shape)
    along = list(range(rank)) if axes is None else node.static(axes, "axes")
    pairs = [(0, 0)] * rank
    for i, a in enumerate(along):
        pairs[a] = (widths[i], widths[i + len(along)])
    mode = node.option("mode", "constant")
    x = tensor(x)
    if mode != "constant" or value is None:
        return F.pad(x, pairs, mode=mode)
    return F.pad(x, pairs, F.reshape(tensor(value), ()))


@reads("Trilu")
def _trilu(node: OnnxNode, x: Any, k: Any = None) -> Tensor:
    offset = 0 if k is None else node.static(k, "diagonals")[0]
    return (F.triu if node.option("upper", 1) else F.tril)(tensor(x), offset)


# --- reductions and lines ------------------------------------------------------------------------
@reads(*REDUCTIONS)
def _reduction(node: OnnxNode, *xs: Any) -> Tensor:
    made: Tensor = _reduced(node, xs, getattr(F, REDUCTIONS[node.kind]), tensor(xs[0]))
    return made


@reads("ReduceSumSquare")
def _sum_square(node: OnnxNode, *xs: Any) -> Tensor:
    return _reduced(node, xs, F.sum, F.square(tensor(xs[0])))


@reads("ReduceL1")
def _l1(node: OnnxNode, *xs: Any) -> Tensor:
    return _reduced(node, xs, F.sum, F.abs(tensor(xs[0])))


@reads("ReduceL2")
def _l2(node: OnnxNode, *xs: Any) -> Tensor:
    return F.sqrt(_reduced(node, xs, F.sum, F.square(tensor(xs[0]))))


@reads("ReduceLogSumExp")
def _logsumexp(node: OnnxNode, *xs: Any) -> Tensor:
    return _reduced(node, xs, F.logsumexp, tensor(xs[0]))


def _reduced(node: OnnxNode, xs: tuple, reduce: Any, x: Tensor) -> Any:
    """Over the axes that the node names; over all where it names none."""
    axes = node.axes(xs)
    if not axes and node.option("noop_with_empty_axes", 0):
        return x
    along = tuple(axes) if axes else tuple(range(x.ndim))
    made = reduce(x, along, bool(node.option("keepdims", 1)))
    return made if made.type == x.type else F.cast(made, x.type)


@reads(*PLACES)
def _arg_extremum(node: OnnxNode, x: Any) -> Tensor:
    node.only(select_last_index=0)
    made: Tensor = getattr(F, PLACES[node.kind])(tensor(x), node.option("axis", 0),
                                                 bool(node.option("keepdims", 1)))
    return made


@reads("TopK")
def _top_k(node: OnnxNode, x: Any, k: Any) -> tuple:
    return tuple(F.top_k(tensor(x), node.static(k, "counts")[0], node.option("axis", -1),
                         bool(node.option("largest", 1))))


@reads("CumSum")
def _cumsum(node: OnnxNode, x: Any, axis: Any) -> Tensor:
    node.only(exclusive=0)
    along = node.static(axis, "axes")[0]
    if not node.option("reverse", 0):
        return F.cumsum(tensor(x), along)
    return F.flip(F.cumsum(F.flip(tensor(x), along), along), along)
