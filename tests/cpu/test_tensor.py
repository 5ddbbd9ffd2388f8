"""What a tensor shows of itself, and where it may live."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

import tessera as ts
from tessera.graph.assignment import _assigned, part_of
from tessera.tensor import DEVICES


def test_dir_lists_methods_and_every_name_of_it_works():
    x = ts.ones((2, 3))
    names = [n for n in dir(x) if n[0] != "_"]
    assert {"T", "sum", "reshape", "astype", "shape", "dtype", "numpy", "item"} <= set(names)
    assert all(hasattr(x, n) for n in names) and names == sorted(set(names))
    assert not [n for n in names if n.startswith("ufunc")]


@pytest.mark.parametrize("values, words", [
    ([True, False, True], "Tensor[3] bool_  2 of 3 True\n"),
    ([[False, False]], "Tensor[1, 2] bool_  0 of 2 True\n"),
    ([1.0, 3.0], "Tensor[2] f32  min 1 max 3 mean 2\n"),
    ([1.0, np.nan], "Tensor[2] f32  min 1 max 1 mean 1  NOT FINITE: 1\n"),
    (True, "Tensor[] bool_\nTrue"),
])
def test_repr_sums_the_values_up(values, words):
    assert repr(ts.tensor(values)).startswith(words)


def test_types_on_any_device_are_written_and_only_tensors_need_it(no_gpu):
    t = ts.as_type("bf16 @device('cuda:0')")
    assert ts.as_type(str(t)) == t == ts.bf16 @ ts.device("cuda:0")
    assert "cuda:0" in str(ts.Tensor["N", t])
    here = ts.tensor([1.0, 2.0], "f32 @device('cpu')")
    assert here.type.policy.device == "cpu" and (here + here).tolist() == [2.0, 4.0]
    for make in (ts.ones, ts.zeros, lambda n, t: ts.full(n, 1.0, t),
                 lambda n, t: ts.eye(n, dtype=t),
                 lambda n, t: ts.random.normal((n,), dtype=t), lambda n, t: ts.arange(n, dtype=t),
                 lambda n, t: ts.param([1.0] * n, t), lambda n, t: ts.ones((n,)).astype(t)):
        with pytest.raises(ts.UnsupportedTargetError, match="no device 'cuda:0' here.* exist: cpu"):
            make(3, t)


def test_a_device_that_a_runtime_has_added_is_accepted(monkeypatch):
    monkeypatch.setattr(sys.modules["tessera.tensor"], "DEVICES", DEVICES | {"sim:0"})
    assert ts.tensor([1.0], "f32 @device('sim:0')").policy.device == "sim:0"
    with pytest.raises(ts.UnsupportedTargetError, match="exist: cpu, sim:0"):
        ts.tensor([1.0], "f32 @device('sim:1')")


def test_draws_capture_nothing():
    """The second stream of a normal draw is numbered by a literal, in the graph's own text."""
    f = ts.jit(lambda x: x + ts.random.normal((3,)) + ts.dropout(x, 0.5))
    f(ts.ones((3,)))
    assert "capture" not in f.inspect_ir("graph") and not f.graph().captures
    key = ts.random.next_key()
    assert ts.fold_in(key, 1).tolist() == ts.fold_in(key, ts.tensor(1)).tolist()
    with pytest.raises(ts.DTypeError, match="fold_in needs an integer scalar"):
        ts.fold_in(key, True)


def test_an_accumulate_type_of_its_own_leaves_no_cast_in_the_graph():
    low, wide = ts.tensor([1.5, 2.5], "bf16 @accum(f32)"), ts.ones((2,))
    f = ts.jit(lambda a, b: ts.exp(a - b) * b)
    assert f(low, wide).type == ts.as_type("f32")
    casts = [n for n in f.graph().nodes if n.op.name in ("cast", "retype")]
    assert len(casts) == 1 and casts[0].attrs["source"].dtype is ts.bf16
    assert (low + low).type == low.type and str(low.type) == "bf16 @accum(f32)"


class TestParams:
    """ts.param of a tensor that is not simply an array: it stays what it is, and is marked."""

    def test_a_traced_value_is_marked(self, rng):
        x = ts.tensor(rng.standard_normal((3,)).astype(np.float32))
        made = ts.jit(lambda x: (ts.param(x * 2.0, name="w"), x))(x)
        assert [t.is_param for t in made] == [True, False] and not x.is_param
        assert made[0].tolist() == (2.0 * x.array).tolist()
        assert ts.jit(lambda x: ts.param(x, "bf16")).infer(x) == ts.Tensor[3, ts.bf16]

    def test_the_value_itself_is_not(self):
        """Only the handle that ts.param gives: the gradient is of w, not of x."""
        def f(x):
            w = ts.param(x)
            assert w.is_param and not x.is_param
            return ts.grad(lambda x, w: ts.sum(x * x * w))(x, w)

        assert ts.jit(f)(ts.tensor([1.0, 3.0])).tolist() == [1.0, 9.0]

    def test_weights_by_type_alone(self):
        def init(n):
            return {"w": ts.param(ts.random.normal((n, 4))), "b": ts.param(ts.zeros(4))}

        made = ts.jit(lambda: init(10**6)).infer()
        assert made == {"w": ts.Tensor[10**6, 4, ts.f32], "b": ts.Tensor[4, ts.f32]}

    def test_a_distributed_tensor_stays_one(self):
        mesh = ts.dist.mesh(axes=("dp",), shape=(2,))
        x = ts.dist.tensor((4, 2), ts.ShardSpec(("row",), ("dp",)), mesh, init=1.0)
        w = ts.param(x)
        assert isinstance(w, ts.dist.DistTensor) and w.layout == x.layout
        assert w.is_param and not x.is_param
        w[:] = np.zeros((4, 2), np.float32)
        assert (x.numpy() == 1).all()  # as ts.param of any tensor: a copy
        assert ts.param(x, "bf16").type == ts.as_type("bf16")
        stands = ts.dist.stand_in((4, 2), None, mesh)
        assert ts.param(stands).is_param and not stands.is_param


def test_a_format_spec_is_that_of_the_one_number():
    loss = ts.tensor(0.123456)
    assert f"{loss:.3f} {loss:8.2e} {ts.tensor([[3]]):d}" == "0.123 1.23e-01 3"
    assert f"{ts.cast(loss, ts.bf16):.4f}" == f"{0.1235:.4f}"
    assert f"{loss}" == str(loss)
    with pytest.raises(ts.ArgumentError, match=r"the format '.3f' of a tensor of shape \[2\]"):
        f"{ts.ones(2):.3f}"
    with pytest.raises(ts.TraceError, match="item"):
        ts.jit(lambda x: f"{x:.3f}")(loss)


def test_types_equal_their_names():
    x = ts.ones(2, "bf16 @accum(f32)")
    assert x.dtype == "bf16" and x.dtype == "bfloat16" and "bf16" == x.dtype != "f32"
    assert x.dtype in ("f16", "bf16") and x.dtype not in ("f16", "f32")
    assert x.type == "bf16@accum( f32 )" and x.type != "bf16" and x.type != ts.bf16
    assert ts.f32 == np.float32 == ts.f32 and ts.f32 == np.dtype("f4") == ts.f32
    assert np.dtype("f8") != ts.f32 and ts.int64 in (int,) and ts.bool_ == "bool"
    assert ts.as_type("f32") == ts.f32 == ts.as_type("f32") == np.float32
    for other in (None, 3, str, object, np.dtype("U3"), [], ts.bf16):
        assert ts.f32 != other and ts.as_type("f32") != other
    assert {ts.f32: 1}[ts.float32] == 1 and len({ts.f32, ts.f64, ts.float32}) == 2
    for word, hint in (("flaot32", "did you mean 'float32'"), ("float33", "float3")):
        for t in (ts.f32, ts.as_type("f32")):
            with pytest.raises(ts.DTypeError, match="unknown dtype") as info:
                t == word  # noqa: B015
            assert hint in info.value.hint


def test_operators_made_of_others():
    x = ts.tensor([[1.5, -2.5], [3.25, 0.0]])
    assert 3.25 in x and 4.0 not in x and 0 in x and [3.25, 0.0] in x and math.nan not in x
    assert 1 in ts.tensor([1, 2]) and 1.5 not in ts.tensor([1, 2])
    assert 1.0 not in ts.zeros((0, 3))
    assert round(x).tolist() == [[2, -2], [3, 0]] and round(x, 1).tolist() == np.round(
        x.numpy(), 1).tolist()
    for a, b in ((ts.tensor([7, -7, 7]), 2), (7, ts.tensor([2, -3])), (x, ts.tensor([2.0, -0.7]))):
        got, want = divmod(a, b), np.divmod(np.asarray(a), np.asarray(b))
        assert all(np.array_equal(np.asarray(g), w) for g, w in zip(got, want, strict=True))
    with pytest.raises(ts.TraceError, match="traced"):
        ts.jit(lambda x: 1.0 in x)(x)
    slopes = ts.grad(lambda x: ts.sum(divmod(x, 0.75)[1]))(x)
    assert slopes.tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("values", [
    [2**63 - 1, 2**64 - 1], [1, 2**63 + 1], [[0, 2**53 + 1], [2**63, 3]], (2**64 - 1, 0)])
def test_lists_of_great_integers_keep_their_digits(values):
    for x in (ts.tensor(values, "uint64"), ts.tensor(values)):
        assert x.dtype == "uint64" and x.tolist() == np.array(values, object).tolist()
    assert ts.tensor([1.0, 2.0**63]).dtype == "f32"


@pytest.mark.parametrize("kind", [">f8", ">f4", ">f2", ">i4", ">i8", ">u2"])
def test_arrays_in_the_other_order_of_bytes_are_numbers_as_any(kind):
    """Also in compiled loops, which take a buffer's bytes as they lie."""
    a = np.arange(6.0).reshape(2, 3).astype(kind)
    with ts.config.scope(loop_min_elements=1):
        for x in (a, ts.tensor(a), a[::-1][::-1]):
            y, total, same = ts.jit(lambda x: (x * 2 + 1, ts.sum(x), x))(x)
            assert y.tolist() == [[1, 3, 5], [7, 9, 11]] and total.item() == 15
            assert same.numpy().dtype.isnative and same.tolist() == a.tolist()
    assert ts.sum(a, axis=0).tolist() == [3, 5, 7] and a.dtype == kind


def test_arrays_of_a_class_of_their_own_are_arrays():
    class Matrix(np.ndarray):  # as np.matrix and the dense form of SciPy's sparse ones
        def __mul__(self, other):
            return self @ other

    a = np.array([[1.0, 2.0], [3.0, 4.0]]).view(Matrix)
    for run in (lambda f: f, ts.jit):
        assert run(ts.square)(a).tolist() == [[1, 4], [9, 16]]
        assert run(ts.sum)(a).item() == 10 and run(lambda x: ts.tensor(x) * x)(a)[1, 1] == 16
    with pytest.raises(ts.ArgumentError, match="a masked array"):
        ts.sum(np.ma.masked_less(np.ones(2), 2))


@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["now", "jit"])
def test_lists_that_hold_tensors_are_joined_whether_traced_or_not(run):
    x, half = ts.tensor([3.0, 5.0]), ts.tensor([0.5], ts.bf16)
    nested = run(lambda x: ts.tensor([[x[0] * 2, 1.0], [2, x[1]]]))
    assert nested(x).tolist() == [[6.0, 1.0], [2.0, 5.0]]
    assert run(lambda x: x + [x[1], 1])(x).tolist() == [8.0, 6.0]
    made = run(lambda h: ts.tensor([h[0], 2]))(half)
    assert made.type == ts.bf16 and made.tolist() == [0.5, 2.0]
    assert run(lambda x: ts.tensor(x, ts.f64))(x).type == ts.f64
    slope = run(ts.grad(lambda x: ts.sum(ts.tensor([x[0] * x[1], x[0]]))))(x)
    assert slope.tolist() == [6.0, 3.0]


def test_data_is_cut_off_where_the_type_says_so():
    t = ts.as_type('bf16 @rounding("toward_zero")')
    data = [1.0062, -1.0062, 3.0]  # to the nearest: 1.0078125
    assert ts.tensor(data, t).tolist() == ts.cast(ts.tensor(data), t).tolist() == [1.0, -1.0, 3.0]
    x = ts.zeros(3, t)
    x[:] = data
    assert x.tolist() == [1.0, -1.0, 3.0]
    for run in (lambda f: f, ts.jit):
        assert run(lambda: ts.full((2,), 1.0062, t))().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_new_tensors_hold_numbers_of_their_type(run):
    x = ts.zeros(100_000, "tf32")
    for made in (run(lambda: ts.full((3,), 1.0001, "tf32"))(),
                 run(lambda x: x + ts.full(x.shape, 1.0001, "tf32"))(x)):
        assert set(made.tolist()) == {1.0}  # 10 bits: 1.0001 lies between 1 and 1.001
    thirds = run(lambda: ts.linspace(0, 1, 4, "tf32"))()
    assert thirds.tolist() == ts.cast(ts.tensor([0.0, 1 / 3, 2 / 3, 1.0]), "tf32").tolist()


@pytest.mark.parametrize("index", [np.array([[0, 1], [2, -3]]), np.array([True, False, True]),
                                   [0, 1], (slice(None, None, 2),), (0, 0, 0), (np.array(0), [1])])
def test_what_is_no_run_is_assigned_on_the_host(index):
    """An index of arrays is looked for no ellipsis by ==, which compares elements."""
    assert part_of((3, 4), index) is None
    assert part_of((3, 4), (..., 2)) == ((0, 2), (3, 1), (3,))


@pytest.mark.parametrize("dtype", ["bf16 @stochastic_round", "fp8_e4m3 @stochastic_round @saturate",
                                   "int8 @stochastic_round"])
def test_what_is_assigned_is_rounded_to_the_nearest(dtype, rng):
    """On the host, and by the program that writes tensors on GPUs: ts.cast alone draws."""
    value = ts.tensor(rng.uniform(-90, 90, (4, 50)).astype(np.float32))
    plain = dtype.replace("@stochastic_round", "").strip()
    want = ts.cast(ts.cast(value, plain), "f32").numpy()
    x, y = ts.zeros((6, 50), dtype), ts.zeros((6, 50), dtype)
    x[1:5] = value
    starts = ts.tensor(np.array([1, 0]))
    fn = ts.jit(_assigned.fn, static=("sizes", "own"))
    made = fn(y, value, starts, sizes=(4, 50), own=(4, 50))
    assert made.type == x.type == dtype
    traced = ts.jit(lambda v: ts.concatenate((ts.zeros((1, 50), dtype), ts.tensor(v, dtype),
                                              ts.zeros((1, 50), dtype))))(value)
    assert traced.type == ts.tensor(value, dtype).type == dtype
    for got in (x, made, traced):
        assert np.array_equal(ts.cast(got, "f32").numpy()[1:5], want)
        assert not ts.cast(got, "f32").numpy()[[0, 5]].any()
