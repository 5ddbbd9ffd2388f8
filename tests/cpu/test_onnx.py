"""ONNX models: what is written means, to ONNX's own evaluator, what it means here; what is read
means what it means there; what has no form is refused by name."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import tessera as ts
from cpu.test_ops_registry import CASES, Draws
from tessera.errors import ArgumentError, BundleError, DTypeError, ShapeError, TesseraError
from tessera.graph.op import OPS
from tessera.graph.trace import apply
from tessera.onnx import exporting, importing
from tessera.onnx.reading import READERS
from tessera.onnx.spellings import REFUSED, why_refused
from tessera.onnx.writer import RULES
from tolerance import assert_close

onnx = pytest.importorskip("onnx", reason="the onnx package is not installed")
evaluator = pytest.importorskip("onnx.reference").ReferenceEvaluator

# Ops whose smaller ops are refused, and samples of types that ONNX does not compute in.
IN_PARTS = {"csr_product", "dropout_attention", "dropout_attention_vjp", "fft_planes",
            "filter_frequencies", "window_max_vjp", "window_spread"}
FP8 = {"cast-4", "matmul-6", "quantize-0", "quantize-2", "dequantize-0", "dequantize-2",
       "scaled_matmul-0", "scaled_matmul-1"}


def run(path, *xs) -> list[np.ndarray]:
    """The results by ONNX's reference evaluator."""
    model = onnx.load(path)
    names = [i.name for i in model.graph.input]
    with np.errstate(all="ignore"):
        return evaluator(model).run(None, dict(zip(names, xs, strict=True)))


def same(got, want, n: int = 64) -> None:
    """Two libraries' results, of one type and shape, as sums of n rounded terms differ."""
    got, want = (np.asarray(x.numpy() if isinstance(x, ts.Tensor) else x) for x in (got, want))
    assert got.dtype == want.dtype and got.shape == want.shape
    if got.dtype.kind in "iub":
        assert (got == want).all()
    else:
        finite = np.abs(np.float64(want[np.isfinite(np.float64(want))]))
        assert_close(got, want, str(ts.numerics.as_type(got.dtype)), n,
                     scale=finite.max(initial=1.0))


# --- every op -------------------------------------------------------------------------------------
def test_every_op_has_a_form_is_made_of_smaller_ones_or_is_refused():
    for op in OPS.values():
        ways = [op.name in RULES, bool(op.expand or op.derives or op.unroll),
                why_refused(op) is not None]
        assert any(ways), f"{op.name}: onnx/spellings.py says nothing of it"
    assert REFUSED.keys() | RULES.keys() <= OPS.keys()


def test_an_op_is_refused_by_its_own_name_though_smaller_ones_make_it(tmp_path):
    with pytest.raises(TesseraError, match="no form for it: scatter_max: it writes, or adds, at"):
        ts.onnx.export(lambda x: ts.scatter(x, [0, 1], 1.0, mode="max"), tmp_path / "f.onnx",
                       ts.ones(3))


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_what_an_op_is_in_onnx(op, sample, rng, tmp_path, request):
    """By ONNX's evaluator, and read again, it gives what the op gives."""
    args = [Draws(rng)(a) for a in sample.args]

    def f(*xs):
        return apply(op, *xs, **sample.attrs)

    case = request.node.callspec.id
    try:
        path = ts.onnx.export(f, tmp_path / "f.onnx", *args)
    except TesseraError as err:
        assert case in FP8 or op.name in IN_PARTS | REFUSED.keys() or why_refused(op), err
        assert "ONNX" in err.message
        return
    want = f(*args)
    want = want if op.multi else (want,)
    if not (op.name == "conv_input" and sample.attrs["groups"] > 1):  # the evaluator has no groups
        for got, y in zip(run(path, *[a.array for a in args]), want, strict=True):
            same(got, y)
    if op.name == "dynamic_slice":
        with pytest.raises(BundleError, match="starts that are data"):
            ts.onnx.import_(path)(*args)
        return
    again = ts.onnx.import_(path)(*args)
    for got, y in zip(again if isinstance(again, tuple) else (again,), want, strict=True):
        same(got, y)


@pytest.mark.parametrize("source", ["f32", "f16", "bf16", "int32", "uint8", "bool_"])
@pytest.mark.parametrize("to", ["f64", "f16", "bf16", "int8", "uint8", "int64", "bool_"])
def test_casts(source, to, rng, tmp_path):
    """Towards zero, and to the nearest end where the type ends."""
    x = ts.cast(ts.tensor(np.array([0.0, 0.5, -2.5, 3.7, 126.9, 300.0, -300.0]), "f32"), source)
    path = ts.onnx.export(lambda x: ts.cast(x, to), tmp_path / "f.onnx", x)
    same(run(path, x.array)[0], ts.cast(x, to), 1)
    same(ts.onnx.import_(path)(x), ts.cast(x, to), 1)


@pytest.mark.parametrize("to", ["bf16", "f16", "f32"])
def test_casts_that_saturate(to, tmp_path):
    """Of another format and of the same one; infinities too, and NaN stays."""
    numeric = f"{to} @saturate"
    for source in ("f64", "f32", "bf16", "f16"):
        x = ts.cast(ts.tensor(np.array([3e38, -3.4e38, 1e5, -np.inf, np.nan, 1.5])), source)
        path = ts.onnx.export(lambda x: ts.cast(x, numeric) * 4.0, tmp_path / "f.onnx", x)
        want = ts.cast(x, numeric) * 4.0
        same(run(path, x.array)[0], want, 0)
        same(ts.onnx.import_(path)(x), ts.cast(want, to), 0)


# --- whole functions ------------------------------------------------------------------------------
@pytest.fixture
def network(rng):
    """(predict, params, x, f64 oracle); the head is captured."""
    P = {"w": rng.standard_normal((5, 8)), "b": rng.standard_normal(8)}
    X, V = rng.standard_normal((4, 5)), rng.standard_normal((8, 3))
    head = ts.param(V, "f32")

    @ts.jit
    def predict(params, x):
        h = ts.tanh(x @ params["w"] + params["b"])
        return {"y": ts.softmax(h @ head), "h": [h, x]}

    def oracle():
        h = np.tanh(X @ P["w"] + P["b"])
        e = np.exp(h @ V)
        return e / e.sum(-1, keepdims=True), h, X

    return predict, {k: ts.param(v, "f32") for k, v in P.items()}, ts.tensor(X, "f32"), oracle


@pytest.mark.row("DEP-05")
def test_a_function_as_a_model(network, tmp_path):
    """Params are in it, tensors are its inputs; nodes have the user's lines."""
    predict, params, x, oracle = network
    path = ts.onnx.export(predict, tmp_path / "f.onnx", params, x)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [i.name for i in model.graph.input] == ["x"]
    assert [o.name for o in model.graph.output] == ["y", "h.0", "h.1"]
    assert [n.op_type for n in model.graph.node] == \
        ["MatMul", "Add", "Tanh", "MatMul", "Softmax", "Identity"]
    assert "h = ts.tanh(x @ params" in model.graph.node[0].doc_string
    again = ts.onnx.import_(path)
    assert repr(again) == "ImportedModel predict(x) -> y, h.0, h.1"
    for got, read, right in zip(run(path, x.numpy()), again(x), oracle(), strict=True):
        assert_close(got, right, "f32", 8)
        assert_close(read.numpy(), right, "f32", 8)


@pytest.mark.row("DEP-06")
@pytest.mark.parametrize("given", [bytes, str, onnx.ModelProto])
def test_a_model_from_bytes(given, rng, tmp_path):
    """A perceptron that another program wrote, with a batch whose extent is open; it is
    differentiated and batched as any function."""
    W, B, V = (rng.standard_normal(s).astype("f") for s in ((8, 5), (8,), (8, 3)))
    model = model_with(
        [("Gemm", "x w b", "h", {"transB": 1}), ("Relu", "h", "r", {}), ("MatMul", "r v", "y", {})],
        {"x": np.zeros((4, 5), "f")}, {"w": W, "b": B, "v": V}, open_batch=True)
    onnx.save(model, tmp_path / "f.onnx")
    f = ts.onnx.import_({bytes: model.SerializeToString(), str: str(tmp_path / "f.onnx"),
                         onnx.ModelProto: model}[given])
    for rows in (1, 7):
        X = rng.standard_normal((rows, 5)).astype("f")
        hidden = np.float64(X) @ W.T.astype(float) + B
        assert_close(f(ts.tensor(X)).numpy(), np.maximum(hidden, 0) @ V, "f32", 8)
        assert_close(ts.grad(lambda x: ts.sum(f(x)))(ts.tensor(X)).numpy(),
                     (hidden > 0) * V.sum(1, dtype=float) @ W, "f32", 24)


def test_a_convolutional_network_in_bf16_and_f32(rng, tmp_path):
    """Pools whose windows overlap, a batch norm, a transposed convolution, gelu."""
    p = {k: ts.param(rng.standard_normal(s) / 4, "f32") for k, s in
         {"w": (6, 3, 3, 3), "g": (6,), "t": (6, 2, 2, 2), "v": (2, 4)}.items()}

    def f(p, x, kind="f32"):
        h = ts.conv2d(ts.cast(x, kind), ts.cast(p["w"], kind), stride=2, padding=1)
        h = ts.max_pool2d(ts.batch_norm(h, p["g"], mean=p["g"], var=p["g"] ** 2), 3, stride=2)
        h = ts.gelu(ts.conv_transpose2d(h, ts.cast(p["t"], h.type), stride=2))
        return ts.cast(ts.mean(h, axis=(2, 3)), "f32") @ p["v"]

    x = ts.tensor(rng.standard_normal((2, 3, 12, 12)), "f32")
    for kind in ("f32", "bf16"):
        path = ts.onnx.export(f, tmp_path / "f.onnx", p, x, kind)
        assert_close(run(path, x.numpy())[0], f(p, x, kind).numpy(), kind, 27, scale=1.0)
        same(ts.onnx.import_(path)(x), f(p, x, kind))


def test_attention_and_a_lookup(rng, tmp_path):
    table = ts.param(rng.standard_normal((11, 8)), "f32")

    def f(ids):
        q = ts.reshape(ts.take(table, ids), (2, 4, 2, 4)).transpose(0, 2, 1, 3)
        return ts.layernorm(ts.attention(q, q, q, causal=True)), ts.top_k(ids, 2)[1]

    ids = ts.tensor(rng.integers(0, 11, (2, 4)))
    path = ts.onnx.export(f, tmp_path / "f.onnx", ids)
    for got, read, want in zip(run(path, ids.numpy()), ts.onnx.import_(path)(ids), f(ids),
                               strict=True):
        same(got, want)
        same(read, want)


def test_weights_beyond_one_file_lie_beside_it(rng, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "ONE_FILE_BYTES", 4000)
    w, x = ts.param(rng.standard_normal((32, 32)), "f32"), ts.ones((1, 32))
    path = ts.onnx.export(lambda w, x: x @ w, tmp_path / "f.onnx", w, x)
    assert (tmp_path / "f.onnx.data").stat().st_size == 4096 and path.stat().st_size < 1000
    same(ts.onnx.import_(path)(x), x @ w)


# --- what is refused ------------------------------------------------------------------------------
def test_ops_and_types_without_a_form_are_named_at_their_line(tmp_path):
    x, path = ts.ones((3, 3)), tmp_path / "f.onnx"
    with pytest.raises(BundleError, match="inv: it is a factorization") as err:
        ts.onnx.export(lambda x: ts.inv(x) + 1, path, x)
    assert "ts.inv(x) + 1" in str(err.value) and err.value.hint
    with pytest.raises(BundleError, match="draws random numbers") as err:
        ts.onnx.export(lambda x: ts.dropout(x, 0.5), path, x)
    assert "ts.dropout" in str(err.value)
    with pytest.raises(BundleError, match="16 bits and more"):
        ts.onnx.export(lambda x: ts.cast(x, "fp8_e4m3"), path, x)
    for name, cut in (("f32", 'bf16 @rounding("toward_zero")'),
                      ("int32", 'f32 @rounding("toward_zero")')):
        with pytest.raises(BundleError, match="it cuts off where ONNX rounds to the nearest"):
            ts.onnx.export(lambda x, to=cut: ts.cast(x, to), path, ts.cast(x, name))
    with pytest.raises(BundleError, match="loop whose length is data"):
        ts.onnx.export(lambda x: ts.while_loop(lambda x: ts.sum(x) < 99, lambda x: x * 2, x),
                       path, x)
    with pytest.raises(BundleError, match="Det takes no bfloat16") as err:
        ts.onnx.export(lambda x: apply(OPS["det"], x), path, ts.cast(x, "bf16"))
    assert "tensor(float)" in err.value.hint and "OPS" in str(err.value)
    with pytest.raises(BundleError, match="extents that are names"):
        ts.onnx.export(lambda x: x * 2, path, ts.Tensor["N", ts.f32])
    with pytest.raises(BundleError, match="gives more than tensors"):
        ts.onnx.export(lambda x: (x, "text"), path, x)
    mesh = ts.mesh.Mesh(("cpu:0", "cpu:1"), ("dp",), (2,))
    far = ts.dist.tensor((4,), ts.ShardSpec(("row",), ("dp",)), mesh, init=1.0)
    with pytest.raises(BundleError, match="distributed"):
        ts.onnx.export(lambda x: x * 2, path, far)
    assert not path.exists()


def test_without_the_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnx", None)
    for call in (lambda: ts.onnx.export(ts.tanh, tmp_path / "f", ts.ones(3)),
                 lambda: ts.onnx.import_(b"")):
        with pytest.raises(BundleError, match="not installed") as err:
            call()
        assert err.value.hint == "pip install onnx"


def test_models_that_are_not_read(tmp_path):
    x = {"x": np.zeros((2, 2), "f")}
    with pytest.raises(BundleError, match="no ONNX model"):
        ts.onnx.import_(b"none")
    with pytest.raises(BundleError, match="there is no file"):
        ts.onnx.import_(tmp_path / "f.onnx")
    with pytest.raises(BundleError, match="HardmaxNot|Hardmax .*which is not read") as err:
        ts.onnx.import_(model_with([("Hardmax", "x", "y", {})], x))
    assert err.value.hint
    with pytest.raises(BundleError, match="opset 11, read are 13"):
        ts.onnx.import_(model_with([("Relu", "x", "y", {})], x, opset=11))
    with pytest.raises(BundleError, match="CumSum .* is not read with exclusive=1"):
        ts.onnx.import_(model_with([("CumSum", "x k", "y", {"exclusive": 1})], x,
                                   {"k": np.int64(0)}))(np.ones((2, 2), "f"))


def test_other_inputs_are_refused():
    f = ts.onnx.import_(model_with([("Relu", "x", "y", {})], {"x": np.zeros((2, 3), "f")}))
    with pytest.raises(ShapeError, match=r"x is \[3, 3\], the model has \[2, 3\]"):
        f(ts.ones((3, 3)))
    with pytest.raises(DTypeError, match="x is f64, the model has f32"):
        f(np.ones((2, 3)))
    for args, named in (((), {}), ((ts.ones((2, 3)),) * 2, {}), ((), {"z": ts.ones((2, 3))})):
        with pytest.raises(ArgumentError, match="has the inputs x"):
            f(*args, **named)
    assert f(x=-ts.ones((2, 3))).tolist() == [[0.0] * 3] * 2


# --- every op that is read ------------------------------------------------------------------------
def model_with(nodes, inputs, weights=None, opset=20, open_batch=False):
    """A model of (kind, inputs, outputs, attributes); its result is "y"."""
    helper = onnx.helper
    code = helper.np_dtype_to_tensor_dtype
    infos = [helper.make_tensor_value_info(
        k, code(a.dtype), ["N", *a.shape[1:]] if open_batch else a.shape)
        for k, a in inputs.items()]
    names = nodes[-1][2].split()
    outs = [helper.make_value_info(n, onnx.TypeProto()) for n in names]
    made = [helper.make_node(kind, [n if n != "-" else "" for n in xs.split()], ys.split(), **attrs)
            for kind, xs, ys, attrs in nodes]
    held = [onnx.numpy_helper.from_array(np.asarray(a), k) for k, a in (weights or {}).items()]
    graph = helper.make_graph(made, "model", infos, outs, held)
    model = onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9))
    return model


A, B = (2, 3, 4), (3, 1)
# (kind, drawn operands, constant operands, attributes)
READ = [
    *((k, {"x": A}, {}, {}) for k in (
        "Abs", "Atan", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "IsNaN", "IsInf", "Neg",
        "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Tan", "Tanh",
        "Asinh", "Identity", "Dropout", "LeakyRelu", "Elu", "HardSigmoid", "HardSwish", "Shape",
        "Size", "Flatten", "Transpose", "Softmax", "LogSoftmax", "GlobalAveragePool", "Trilu")),
    ("GlobalMaxPool", {"x": (2, 3, 4, 5)}, {}, {}),
    *((k, {"x": ("unit", A)}, {}, {}) for k in ("Acos", "Asin", "Atanh")),
    *((k, {"x": ("positive", A)}, {}, {}) for k in ("Log", "Sqrt")),
    *((k, {"a": A, "b": B}, {}, {}) for k in (
        "Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean", "PRelu", "Greater", "Less",
        "GreaterOrEqual", "LessOrEqual")),
    *((k, {"a": ("int", A), "b": ("int", A)}, {}, {}) for k in (
        "Equal", "Div", "Mod", "BitwiseAnd", "BitwiseOr", "BitwiseXor")),
    ("Mod", {"a": ("int", A), "b": ("int", A)}, {}, {"fmod": 1}),
    ("Mod", {"a": A, "b": A}, {}, {"fmod": 1}),
    *((k, {"a": ("bool", A), "b": ("bool", A)}, {}, {}) for k in ("And", "Or", "Xor")),
    ("Not", {"x": ("bool", A)}, {}, {}), ("BitwiseNot", {"x": ("int", A)}, {}, {}),
    ("Where", {"c": ("bool", A), "a": A, "b": B}, {}, {}),
    ("Pow", {"x": ("positive", A)}, {"n": np.float32(2.5)}, {}),
    ("Pow", {"x": ("positive", A), "n": A}, {}, {}),
    ("Pow", {"x": A}, {"n": np.int64([2, 3, 0, 1])}, {}),
    ("Clip", {"x": A}, {"low": np.float32(-0.5), "high": np.float32(0.25)}, {}),
    ("Gelu", {"x": A}, {}, {}), ("Gelu", {"x": A}, {}, {"approximate": "tanh"}),
    ("Cast", {"x": A}, {}, {"to": 11}), ("Cast", {"x": A}, {}, {"to": 16}),
    ("Shape", {"x": A}, {}, {"start": 1}), ("Flatten", {"x": A}, {}, {"axis": -1}),
    ("Reshape", {"x": A}, {"shape": np.int64([0, -1])}, {}),
    ("Squeeze", {"x": (2, 1, 1)}, {"axes": np.int64([-1])}, {}),
    ("Squeeze", {"x": (2, 1, 1)}, {}, {}),
    ("Unsqueeze", {"x": A}, {"axes": np.int64([0, -1])}, {}),
    ("Transpose", {"x": A}, {}, {"perm": [1, 2, 0]}),
    ("Concat", {"a": A, "b": A}, {}, {"axis": -1}),
    ("Split", {"x": A}, {"sizes": np.int64([1, 3])}, {"axis": -1}),
    ("Split", {"x": A}, {}, {"axis": 1, "num_outputs": 2}),
    ("Slice", {"x": A}, {"starts": np.int64([-1, 0]), "ends": np.int64([-99, 99]),
                         "axes": np.int64([2, 1]), "steps": np.int64([-2, 2])}, {}),
    ("Slice", {"x": A}, {"starts": np.int64([1]), "ends": np.int64([2])}, {}),
    ("Gather", {"x": A, "ids": ("index:3", (2, 2))}, {}, {"axis": 1}),
    ("GatherElements", {"x": A, "ids": ("index:3", (2, 2, 4))}, {}, {"axis": 1}),
    ("Expand", {"x": B}, {"shape": np.int64([2, 1, 5])}, {}),
    ("Tile", {"x": B}, {"n": np.int64([2, 3])}, {}),
    ("Pad", {"x": B}, {"pads": np.int64([1, 0, 0, 2]), "value": np.float32(7)}, {}),
    ("Pad", {"x": A}, {"pads": np.int64([1, 2]), "-": None, "axes": np.int64([1])},
     {"mode": "reflect"}),
    ("Trilu", {"x": A}, {"k": np.int64(1)}, {"upper": 0}),
    *((k, {"x": A}, {"axes": np.int64([0, -1])}, {"keepdims": keep}) for keep in (0, 1) for k in (
        "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare",
        "ReduceL1", "ReduceL2", "ReduceLogSumExp")),
    ("ReduceMean", {"x": A}, {}, {"axes": [-1], "opset": 13}),
    ("ReduceSum", {"x": A}, {}, {}), ("ReduceSum", {"x": A}, {}, {"noop_with_empty_axes": 1}),
    *((k, {"x": A}, {}, {"axis": 1, "keepdims": 0}) for k in ("ArgMax", "ArgMin")),
    ("TopK", {"x": A}, {"k": np.int64([2])}, {"largest": 0}),
    ("CumSum", {"x": A}, {"axis": np.int64(1)}, {"reverse": 1}),
    ("Det", {"x": (2, 3, 3)}, {}, {}), ("MatMul", {"a": A, "b": (4, 5)}, {}, {}),
    ("Gemm", {"a": (4, 3), "b": (5, 4), "c": (5,)}, {},
     {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}),
    ("Einsum", {"a": A, "b": (4, 5)}, {}, {"equation": "bij, jk -> bik"}),
    ("Softmax", {"x": A}, {}, {"axis": 0}),
    ("LayerNormalization", {"x": A, "s": (3, 4), "b": (3, 4)}, {}, {"axis": 1}),
    ("BatchNormalization", {"x": A, "s": (3,), "b": (3,), "m": (3,), "v": ("positive", (3,))}, {},
     {"epsilon": 1e-3}),
    ("Conv", {"x": (2, 4, 7), "w": (6, 2, 3), "b": (6,)}, {},
     {"group": 2, "strides": [2], "pads": [1, 2]}),
    ("Conv", {"x": (1, 2, 7, 6), "w": (3, 2, 3, 2)}, {}, {"auto_pad": "SAME_UPPER"}),
    ("ConvTranspose", {"x": (1, 2, 5), "w": (2, 3, 3)}, {}, {"strides": [2], "pads": [1, 0]}),
    ("ConvTranspose", {"x": (1, 2, 3, 4), "w": (2, 3, 3, 3), "b": (3,)}, {},
     {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}),
    ("MaxPool", {"x": (1, 2, 7, 6)}, {},
     {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}),
    ("AveragePool", {"x": (1, 2, 7, 6)}, {},
     {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
]


def drawn(rng, spec) -> np.ndarray:
    kind, shape = spec if isinstance(spec[0], str) else ("normal", spec)
    made = rng.standard_normal(shape).astype("f")
    if kind == "int":
        return rng.integers(1, 9, shape) * rng.choice([-1, 1], shape)
    if kind.startswith("index"):
        return rng.integers(0, int(kind[6:]), shape)
    return {"normal": made, "unit": np.tanh(made) * np.float32(0.9),
            "positive": np.abs(made) + np.float32(0.5), "bool": made > 0}[kind]


@pytest.mark.parametrize("kind", ["int8", "int16", "int32", "int64", "uint8"])
def test_quotients_of_integers_at_their_ends(kind, tmp_path):
    """ONNX cuts them off, and its other remainder is C's; the least number has no absolute one."""
    ends = np.iinfo(kind)
    every = np.unique(np.array([ends.min, ends.min + 1, ends.max, 1, 2, 3, 7, 100, 0,
                                *([-1, -2, -3, -7] if ends.min else [])], kind))
    a, b = (x.reshape(-1) for x in np.meshgrid(every, every[every != 0]))
    keep = (a != ends.min) | (b != -1 if ends.min else True)  # whose quotient is not among them
    a, b = a[keep], b[keep]
    ts.onnx.export(ts.floor_divide, tmp_path / "f.onnx", ts.tensor(a), ts.tensor(b))
    (got,) = run(tmp_path / "f.onnx", a, b)
    np.testing.assert_array_equal(got, a // b)
    np.testing.assert_array_equal(
        ts.onnx.import_(tmp_path / "f.onnx")(ts.tensor(a), ts.tensor(b)).numpy(), a // b)
    exact = [[int(x) for x in v] for v in (a, b)]
    for name, attrs, c in (("Div", {}, lambda x, y: abs(x) // abs(y) * (-1) ** (x * y < 0)),
                           ("Mod", {"fmod": 1}, lambda x, y: abs(x) % abs(y) * (-1) ** (x < 0))):
        read = ts.onnx.import_(model_with([(name, "a b", "y", attrs)], {"a": a, "b": b}))
        want = [c(x, y) for x, y in zip(*exact, strict=True)]
        assert read(ts.tensor(a), ts.tensor(b)).tolist() == want


@pytest.mark.parametrize(("kind", "operands", "constants", "attrs"), READ,
                         ids=[f"{k[0]}-{i}" for i, k in enumerate(READ)])
def test_what_an_op_of_onnx_is_here(kind, operands, constants, attrs, rng):
    inputs = {k: drawn(rng, spec) for k, spec in operands.items()}
    weights = {k: v for k, v in constants.items() if v is not None}
    outputs = "y z" if kind in ("Split", "TopK") else "y"
    attrs, opset = {k: v for k, v in attrs.items() if k != "opset"}, attrs.get("opset", 20)
    model = model_with([(kind, " ".join([*inputs, *constants]), outputs, attrs)], inputs, weights,
                       opset)
    with np.errstate(all="ignore"):
        want = evaluator(model).run(None, inputs)
    got = ts.onnx.import_(model)(*map(ts.tensor, inputs.values()))
    for a, b in zip(got if isinstance(got, tuple) else (got,), want, strict=True):
        same(a, b)


def test_every_reader_is_tried():
    assert {case[0] for case in READ} == READERS.keys()
    assert not READERS.keys() & set(importing.FOLDED)


def test_an_imported_function_is_one_as_any_other(rng, tmp_path):
    """It is batched, and goes into files again."""
    w, X = rng.standard_normal((3, 3)), rng.standard_normal((4, 2, 3))
    f = ts.onnx.import_(ts.onnx.export(lambda p: ts.tanh(p["a"] @ ts.tensor(w, "f32")),
                                       tmp_path / "f.onnx", {"a": ts.ones((2, 3))}))
    assert f.inputs == ("p.a",)
    assert_close(ts.vmap(f)(ts.tensor(X, "f32")).numpy(), np.tanh(X @ w), "f32", 3)
    x = ts.tensor(X[0], "f32")
    for again in (ts.load(ts.export(f, tmp_path / "f.tsf", x)),
                  ts.onnx.import_(ts.onnx.export(f, tmp_path / "g.onnx", x))):
        assert (again(x).numpy() == f(x).numpy()).all()
    assert again.inputs == ("p_a",)


def test_what_follows_from_extents_and_constants_is_known(rng):
    """As exporters of other tools write a flattening: Shape, Gather, Concat, Reshape."""
    x = rng.standard_normal((2, 3, 4)).astype("f")
    nodes = [("Shape", "x", "s", {}), ("Gather", "s zero", "n", {}), ("Concat", "n rest", "to",
             {"axis": 0}), ("Reshape", "x to", "y", {})]
    f = ts.onnx.import_(model_with(nodes, {"x": x}, {"zero": np.int64([0]),
                                                     "rest": np.int64([-1])}))
    assert (f(x).numpy() == x.reshape(2, -1)).all()
