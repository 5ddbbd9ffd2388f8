"""What each op of the graph is in ONNX. Ops that are not here are written by the smaller ops of
which they are made; those that have none are in REFUSED, or of a family that is refused."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..graph.ir import Node
from ..graph.op import GraphOp
from ..numerics import DType, result_type
from ..numerics.policy import clamps
from .writer import Writer, exports, extents, number

# --- one for one ---------------------------------------------------------------------------------
SAME = {
    "abs": "Abs", "acos": "Acos", "add": "Add", "asin": "Asin", "atan": "Atan", "ceil": "Ceil",
    "cos": "Cos", "cosh": "Cosh", "det": "Det", "div": "Div", "equal": "Equal", "erf": "Erf",
    "exp": "Exp", "floor": "Floor", "greater": "Greater", "greater_equal": "GreaterOrEqual",
    "isinf": "IsInf", "isnan": "IsNaN", "less": "Less", "less_equal": "LessOrEqual", "log": "Log",
    "maximum": "Max", "minimum": "Min", "mul": "Mul", "neg": "Neg", "pow": "Pow", "relu": "Relu",
    "round": "Round", "sigmoid": "Sigmoid", "sign": "Sign", "sin": "Sin", "sinh": "Sinh",
    "softplus": "Softplus", "sqrt": "Sqrt", "sub": "Sub", "tan": "Tan", "tanh": "Tanh",
    "where": "Where",
}
BITS = {"bitwise_and": ("And", "BitwiseAnd"), "bitwise_or": ("Or", "BitwiseOr"),
        "bitwise_xor": ("Xor", "BitwiseXor"), "bitwise_not": ("Not", "BitwiseNot")}
EXTREMA = {"reduce_max": "ReduceMax", "reduce_all": "ReduceMin", "reduce_min": "ReduceMin",
           "reduce_any": "ReduceMax"}
SUMS = {"reduce_sum": "ReduceSum", "reduce_prod": "ReduceProd"}
PLACES = {"argmax": "ArgMax", "argmin": "ArgMin"}


@exports(*SAME)
def _same_op(w: Writer, node: Node, *xs: str) -> str:
    made: str = w.op(SAME[node.op.name], *xs)
    return made


@exports(*BITS)
def _bits(w: Writer, node: Node, *xs: str) -> str:
    bools = node.inputs[0].aval.dtype.kind == "bool"
    made: str = w.op(BITS[node.op.name][0 if bools else 1], *xs)
    return made


# The same elements, or those of a type beside its policy: what holds a value, or ends a derivative.
@exports("stop_gradient", "saved", "retype")
def _identity(w: Writer, node: Node, x: str) -> str:
    return x


# --- elementwise, of several ---------------------------------------------------------------------
@exports("not_equal")
def _not_equal(w: Writer, node: Node, a: str, b: str) -> Any:
    return w.op("Not", w.op("Equal", a, b))


@exports("isfinite")
def _isfinite(w: Writer, node: Node, x: str) -> Any:
    return w.op("Not", w.op("Or", w.op("IsNaN", x), w.op("IsInf", x)))


@exports("rsqrt")
def _rsqrt(w: Writer, node: Node, x: str) -> Any:
    return w.op("Reciprocal", w.op("Sqrt", x))


@exports("exp2")
def _exp2(w: Writer, node: Node, x: str) -> Any:
    return w.op("Pow", number(node, 2), x)


@exports("pow_constant")
def _pow_constant(w: Writer, node: Node, x: str) -> Any:
    return w.op("Pow", x, number(node, node.attrs["exponent"]))


@exports("log2")
def _log2(w: Writer, node: Node, x: str) -> Any:
    return w.op("Div", w.op("Log", x), number(node, np.log(2)))


@exports("log10")
def _log10(w: Writer, node: Node, x: str) -> Any:
    return w.op("Div", w.op("Log", x), number(node, np.log(10)))


@exports("log1p")
def _log1p(w: Writer, node: Node, x: str) -> Any:
    """log(1 + x) = 2 atanh(x / (2 + x)), which keeps the digits of a small x."""
    near = w.op("Atanh", w.op("Div", x, w.op("Add", x, number(node, 2))))
    far = w.op("Log", w.op("Add", x, number(node, 1)))
    return w.op("Where", w.op("Less", w.op("Abs", x), number(node, 0.5)),
                w.op("Mul", near, number(node, 2)), far)


@exports("expm1")
def _expm1(w: Writer, node: Node, x: str) -> Any:
    """e^x - 1 = 2 t / (1 - t) with t = tanh(x / 2), which keeps the digits of a small x."""
    t = w.op("Tanh", w.op("Mul", x, number(node, 0.5)))
    near = w.op("Div", w.op("Mul", t, number(node, 2)), w.op("Sub", number(node, 1), t))
    far = w.op("Sub", w.op("Exp", x), number(node, 1))
    return w.op("Where", w.op("Less", w.op("Abs", x), number(node, 1)), near, far)


@exports("trunc")
def _trunc(w: Writer, node: Node, x: str) -> Any:
    return w.op("Where", w.op("Less", x, number(node, 0)), w.op("Ceil", x), w.op("Floor", x))


@exports("silu")
def _silu(w: Writer, node: Node, x: str) -> Any:
    return w.op("Mul", x, w.op("Sigmoid", x))


@exports("gelu")
def _gelu(w: Writer, node: Node, x: str) -> Any:
    return w.op("Gelu", x, approximate="tanh")


@exports("remainder")
def _remainder(w: Writer, node: Node, a: str, b: str) -> Any:
    """With the sign of the divisor, as ONNX has it of integers; of floats it has C's fmod."""
    if node.inputs[0].aval.dtype.kind != "float":
        return w.op("Mod", a, b)
    left, zero = w.op("Mod", a, b, fmod=1), number(node, 0)
    other = w.op("Less", w.op("Mul", w.op("Sign", left), w.op("Sign", b)), zero)
    return w.op("Where", other, w.op("Add", left, b), left)


@exports("floor_divide", when=lambda node: node.inputs[0].aval.dtype.kind in ("int", "uint"))
def _floor_divide(w: Writer, node: Node, a: str, b: str) -> Any:
    """One less than ONNX's quotient, which is cut off, where something is cut off below 0."""
    quotient = w.op("Div", a, b)
    if node.inputs[0].aval.dtype.kind == "uint":
        return quotient
    zero, one = number(node, 0), number(node, 1)
    cut = w.op("Not", w.op("Equal", w.op("Mod", a, b), zero))
    below = w.op("And", cut, w.op("Xor", w.op("Less", a, zero), w.op("Less", b, zero)))
    return w.op("Where", below, w.op("Sub", quotient, one), quotient)


# --- types and numbers ---------------------------------------------------------------------------
def _is_rounded(node: Node) -> bool:
    """Whether a cast rounds as ONNX does, to the nearest, or has nothing to round."""
    source, to = node.attrs["source"], node.attrs["to"]
    return to.policy.rounding != "toward_zero" or to.dtype.kind != "float" or (
        source.dtype.kind == "float" and result_type(source.dtype, to.dtype) is to.dtype)


@exports("cast", when=_is_rounded)
def _cast(w: Writer, node: Node, x: str) -> Any:
    """Once rounded; towards zero to integers, where ours saturates and ONNX says nothing. What is
    beyond a float that saturates has become an infinity of it."""
    given, made = node.attrs["source"], node.attrs["to"]
    source, to = given.dtype, made.dtype
    if source is not to:
        bounds = _bounds(source, to) if to.kind in ("int", "uint") else None
        x = w.cast(x if bounds is None else w.op("Clip", x, *bounds), to)
    elif not clamps(given, made):
        return x
    if to.kind != "float" or not made.policy.saturate:
        return x
    largest = np.asarray(to.max, to.numpy)
    return w.op("Clip", x, -largest, largest)


def _bounds(source: DType, to: DType) -> list[np.ndarray] | None:
    """What an integer type holds, in the type of the source; None where the source holds no more,
    or not just that."""
    if source.kind == "bool":
        return None
    limits = [np.iinfo(to.numpy).min, np.iinfo(to.numpy).max]
    if source.kind == "float":
        with np.errstate(over="ignore"):
            made = [np.asarray(b, source.numpy) for b in limits]
        return made if [float(b) for b in made] == limits else None
    own = [np.iinfo(source.numpy).min, np.iinfo(source.numpy).max]
    inside = [max(own[0], limits[0]), min(own[1], limits[1])]
    return None if inside == own else [np.asarray(b, source.numpy) for b in inside]


@exports("constant")
def _constant(w: Writer, node: Node) -> Any:
    return w.constant(np.asarray(node.op.ref(**node.attrs)))


@exports("full")
def _full(w: Writer, node: Node) -> Any:
    one = np.asarray(node.op.ref(**node.attrs | {"shape": ()}))
    shape = extents(node.outputs[0])
    return w.op("Expand", one, w.ints(*shape)) if shape else w.constant(one)


@exports("iota")
def _iota(w: Writer, node: Node) -> Any:
    bounds = (np.asarray(n, np.int64) for n in (0, node.attrs["size"], 1))
    made, to = w.op("Range", *bounds), node.outputs[0].aval.dtype
    return made if to.name == "int64" else w.cast(made, to)


# --- moves ---------------------------------------------------------------------------------------
@exports("reshape")
def _reshape(w: Writer, node: Node, x: str) -> Any:
    return w.op("Reshape", x, w.ints(*extents(node.outputs[0])), allowzero=1)


@exports("broadcast_to")
def _broadcast_to(w: Writer, node: Node, x: str) -> Any:
    return w.op("Expand", x, w.ints(*extents(node.outputs[0])))


@exports("transpose")
def _transpose(w: Writer, node: Node, x: str) -> Any:
    return w.op("Transpose", x, perm=list(node.attrs["axes"]))


@exports("concatenate")
def _concatenate(w: Writer, node: Node, *xs: str) -> Any:
    return w.op("Concat", *xs, axis=node.attrs["axis"])


@exports("slice")
def _slice(w: Writer, node: Node, x: str) -> Any:
    starts, stops, steps = (node.attrs[k] for k in ("starts", "stops", "steps"))
    return w.op("Slice", x, w.ints(*starts), w.ints(*stops), w.ints(*range(len(starts))),
                w.ints(*steps))


@exports("flip")
def _flip(w: Writer, node: Node, x: str) -> Any:
    axes = node.attrs["axis"]
    n, beyond = len(axes), np.iinfo(np.int64).min
    return w.op("Slice", x, w.ints(*[-1] * n), w.ints(*[beyond] * n), w.ints(*axes),
                w.ints(*[-1] * n))


@exports("pad", when=lambda node: not any(node.attrs["holes"]))
def _pad(w: Writer, node: Node, x: str, value: str) -> Any:
    """What is negative is cut off afterwards."""
    before, after = node.attrs["before"], node.attrs["after"]
    widths = [max(n, 0) for n in (*before, *after)]
    padded = w.op("Pad", x, w.ints(*widths), value)
    if min((*before, *after), default=0) >= 0:
        return padded
    padded_to = [n + lo + hi for n, lo, hi in
                 zip(extents(node.inputs[0]), widths, widths[len(before):], strict=False)]
    return w.op("Slice", padded, w.ints(*[max(-n, 0) for n in before]),
                w.ints(*[n - max(-hi, 0) for n, hi in zip(padded_to, after, strict=True)]),
                w.ints(*range(len(before))))


@exports("unfold")
def _unfold(w: Writer, node: Node, x: str) -> Any:
    """Windows as columns: along each spatial axis the places of all windows' elements."""
    window, padding = node.attrs["window"], node.attrs["padding"]
    n, shape = len(window), extents(node.outputs[0])
    lead = len(shape) - 2 * n
    pads = [p[side] for side in (0, 1) for p in padding]
    x = w.op("Pad", x, w.ints(*[0] * lead, *pads[:n], *[0] * lead, *pads[n:]), number(node, 0))
    for a in reversed(range(n)):
        first = np.arange(shape[lead + n + a]) * node.attrs["stride"][a]
        ids = np.arange(window[a])[:, None] * node.attrs["dilation"][a] + first
        x = w.op("Gather", x, ids.astype(np.int64), axis=lead + a)
    order = [lead + 2 * a + side for side in (0, 1) for a in range(n)]
    return w.op("Transpose", x, perm=[*range(lead), *order])


@exports("take")
def _take(w: Writer, node: Node, x: str, ids: str) -> Any:
    return w.op("Gather", x, ids, axis=node.attrs["axis"])


@exports("take_along")
def _take_along(w: Writer, node: Node, x: str, ids: str) -> Any:
    return w.op("GatherElements", x, ids, axis=node.attrs["axis"])


@exports("check_index")
def _check_index(w: Writer, node: Node, ids: str) -> Any:
    """Counted from the front. Nothing checks: what a runtime does beyond the extent is its own."""
    if not node.attrs["wrap"]:
        return ids
    return w.op("Where", w.op("Less", ids, number(node, 0)),
                w.op("Add", ids, number(node, node.attrs["extent"])), ids)


@exports("dynamic_slice")
def _dynamic_slice(w: Writer, node: Node, x: str, starts: str) -> Any:
    sizes = node.attrs["sizes"]
    return w.op("Slice", x, starts, w.op("Add", starts, w.ints(*sizes)), w.ints(*range(len(sizes))))


# --- reductions and lines ------------------------------------------------------------------------
@exports(*EXTREMA)
def _extremum(w: Writer, node: Node, x: str) -> Any:
    return w.op(EXTREMA[node.op.name], x, w.ints(*node.attrs["axis"]),
                keepdims=int(node.attrs["keepdims"]), noop_with_empty_axes=1)


@exports(*SUMS)
def _sum(w: Writer, node: Node, x: str) -> Any:
    (x,) = w.operands(node, (x,))
    return w.op(SUMS[node.op.name], x, w.ints(*node.attrs["axis"]),
                keepdims=int(node.attrs["keepdims"]), noop_with_empty_axes=1)


@exports(*PLACES)
def _arg_extremum(w: Writer, node: Node, x: str) -> Any:
    return w.op(PLACES[node.op.name], x, axis=node.attrs["axis"][0],
                keepdims=int(node.attrs["keepdims"]))


@exports("argsort")
def _argsort(w: Writer, node: Node, x: str) -> Any:
    axis, shape = node.attrs["axis"], extents(node.inputs[0])
    return w.op("TopK", x, w.ints(shape[axis]), n_outputs=2, axis=axis,
                largest=int(node.attrs["descending"]))[1]


@exports("top_k_index")
def _top_k(w: Writer, node: Node, x: str) -> Any:
    return w.op("TopK", x, w.ints(node.attrs["k"]), n_outputs=2, axis=-1,
                largest=int(node.attrs["largest"]))[1]


@exports("cumsum")
def _cumsum(w: Writer, node: Node, x: str) -> Any:
    (x,) = w.operands(node, (x,))
    return w.op("CumSum", x, np.asarray(node.attrs["axis"], np.int64))


@exports("softmax", when=lambda node: not node.attrs["safe"])
def _softmax(w: Writer, node: Node, x: str) -> Any:
    return w.op("Softmax", x, axis=node.attrs["axis"])


@exports("log_softmax")
def _log_softmax(w: Writer, node: Node, x: str) -> Any:
    return w.op("LogSoftmax", x, axis=node.attrs["axis"])


# --- matmuls and convolutions --------------------------------------------------------------------
@exports("matmul")
def _matmul(w: Writer, node: Node, a: str, b: str) -> Any:
    return w.op("MatMul", *w.operands(node, (a, b)))


def _window(attrs: dict[str, Any]) -> dict[str, Any]:
    return {"strides": list(attrs["stride"]), "dilations": list(attrs["dilation"]),
            "pads": [p[side] for side in (0, 1) for p in attrs["padding"]],
            "group": attrs["groups"]}


@exports("conv")
def _conv(w: Writer, node: Node, x: str, weights: str) -> Any:
    return w.op("Conv", *w.operands(node, (x, weights)), **_window(node.attrs))


def _left_over(node: Node) -> list[int]:
    """By how much the image of a transposed convolution is larger than its windows reach."""
    a, (g, k) = node.attrs, (extents(v) for v in node.inputs)
    return [n - ((m - 1) * s + d * (width - 1) + 1 - sum(p)) for n, m, width, s, d, p in
            zip(a["spatial"], g[2:], k[2:], a["stride"], a["dilation"], a["padding"],
                strict=True)]


@exports("conv_input", when=lambda node: all(
    0 <= n < s for n, s in zip(_left_over(node), node.attrs["stride"], strict=True)))
def _conv_transpose(w: Writer, node: Node, g: str, weights: str) -> Any:
    return w.op("ConvTranspose", *w.operands(node, (g, weights)),
                output_padding=_left_over(node), **_window(node.attrs))


# --- what has no form ----------------------------------------------------------------------------
_MATRICES = "it is a factorization, and ONNX has none of matrices"
_WRITES = "it writes, or adds, at places that are data"
_WAVES = "it is a transform of frequencies with numbers as two arrays"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("add_along", "scatter_set", "scatter_max", "scatter_min", "segment_sum",
                     "segment_max", "segment_min", "dynamic_update_slice", "fill_slots", "fold"),
                    _WRITES),
    **dict.fromkeys(("cholesky", "cofactor", "eig", "eigh", "inv", "lu", "matrix_exp", "pinv", "qr",
                     "slogdet", "solve", "svd", "triangular_solve"), _MATRICES),
    **dict.fromkeys(("dct", "fft", "irfft", "rfft"), _WAVES),
    **dict.fromkeys(("cumprod", "cumargmax", "cumargmin", "logcumsumexp", "linear_recurrence"),
                    "of running results ONNX has the sum"),
    **dict.fromkeys(("fold_in_each", "random_bits_of_keys"), "it draws random numbers"),
    "conv_filter": "it is the derivative of a convolution",
    "conv_input": "its image is larger than its windows reach",
    **dict.fromkeys(("diagonal", "diagonal_embed"), "ONNX has no diagonals"),
    **dict.fromkeys(("along_sequence", "constrain", "lie_as", "replicated", "shard", "shard_like",
                     "zero_split", "mesh_copied", "mesh_random_bits", "mesh_cast_stochastic"),
                    "it says how tensors lie on a mesh"),
    **dict.fromkeys(("ring_attention", "ring_attention_back"), "it is written for many ranks"),
    "atan2": "ONNX has no angle of two operands",
    "csr_rows": "ONNX has no operations of sparse rows",
    "cast": "it cuts off where ONNX rounds to the nearest",
    "erfc": "ONNX has erf alone: 1 - ts.erf(x), where its digits are enough",
    "floor_divide": "of floats ONNX has no division that rounds down",
    "kernel": "it is a kernel of the program's",
    "place": "it moves a tensor to another memory",
    "read_slots": "it reads slots that may be empty",
    "pad": "holes between elements",
    "scan": "a long loop",
    "while_loop": "a loop whose length is data",
    "searchsorted": "ONNX has no search",
    "segment_spans": "ONNX has no running maxima",
    **dict.fromkeys(("left_shift", "right_shift"), "ONNX shifts no integers with a sign"),
}


def why_refused(op: GraphOp) -> str | None:
    """Why an op has no form of its own; None where nothing says so."""
    if op.name in REFUSED:
        return REFUSED[op.name]
    if op.makes in ("key", "bits", "bits_at") or op.spread is not None:
        return "it draws random numbers"
    if op.effects or op.host:
        return f"its effect is {', '.join(sorted(op.effects)) or 'a check on the host'}"
    return None
