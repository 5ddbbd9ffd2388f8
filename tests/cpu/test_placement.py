"""Where tensors lie decides where what is computed of them runs, on a pretended GPU."""

from __future__ import annotations

import sys
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_gpu import Copies, Torch, filled
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowered_functions import normal
from lowering_cases import apart as apart
from tessera.errors import ArgumentError, TraceError, UnsupportedTargetError
from tessera.graph.cuda.program import eager
from tessera.graph.devices import TOLD_BYTES, PlacementWarning
from tessera.graph.op import OPS
from tessera.graph.trace import apply
from tolerance import assert_close

on_gpu = pytest.mark.usefixtures("gpu", "apart", "programs")


@pytest.fixture
def programs(monkeypatch: Any) -> Any:
    """Eager programs that no other test has compiled."""
    monkeypatch.setattr(eager, "_programs", eager.EagerPrograms())
    return eager._programs


# --- moving -----------------------------------------------------------------------------------
@on_gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16", "fp8_e4m3", "int64", "bool_", "fp4_e2m1", "int4",
                                   'fp8_e4m3 @scaled("amax")'])
def test_there_and_back(dtype: str, rng: np.random.Generator) -> None:
    x = ts.tensor(rng.integers(-3, 4, (3, 5)).astype(np.float32), dtype)
    there = x.to("cuda")
    assert (x.device, there.device, there.type, there.shape) == ("cpu", "cuda:0", x.type, (3, 5))
    back = there.cpu()
    assert back.device == "cpu" and type(back) is ts.Tensor
    assert back.buffer.tobytes() == x.buffer.tobytes()
    if x.scale is not None:
        assert there.scale.device == "cuda:0"
        np.testing.assert_array_equal(back.numpy(), x.numpy())
    assert there.to("cuda") is there and x.to("cpu") is x


@on_gpu
def test_between_gpus(driver: Any, rng: np.random.Generator) -> None:
    x = normal(rng, 4, 3)
    second = x.cuda().to("cuda:1")
    assert second.device == "cuda:1" and x.cuda(1).device == "cuda:1"
    np.testing.assert_array_equal(second.numpy(), x.numpy())


@on_gpu
def test_trees_and_other_arrays(rng: np.random.Generator) -> None:
    x = normal(rng, 4)
    tree = {"w": ts.param(x, name="w"), "rest": [x.numpy(), 3, None, "relu"],
            "torch": Torch(filled(x.array))}
    there = ts.to(tree, "cuda")
    assert there["w"].is_param and there["w"].name == "w" and there["w"].device == "cuda:0"
    assert there["rest"][0].device == "cuda:0" and there["rest"][1:] == [3, None, "relu"]
    assert there["torch"].device == "cuda:0"
    assert ts.to(there, "cpu")["torch"].tolist() == x.tolist()


@on_gpu
def test_what_cannot_be_moved_says_so() -> None:
    with pytest.raises(ArgumentError, match="no device 'f32'") as info:
        ts.ones(3).to("f32")
    assert "x.astype(dtype)" in info.value.hint and "test_placement" in info.value.where.file
    with pytest.raises(TraceError, match="moved to another device"):
        ts.jit(lambda x: x.to("cuda"))(ts.ones(3))


def test_without_a_gpu(no_gpu: None) -> None:
    with pytest.raises(UnsupportedTargetError, match="cuda cannot be used") as info:
        ts.ones(3).to("cuda")
    assert 'to("gpu")' in info.value.hint and "test_placement" in info.value.where.file
    assert ts.ones(3).to("gpu").device == "cpu"
    with ts.device(ts.gpu):
        assert (ts.ones(3) + 1.0).device == "cpu"
    with pytest.raises(UnsupportedTargetError), ts.device("cuda"):
        pass
    with ts.config.scope(device="gpu"):
        assert ts.zeros(2).device == "cpu"
    with ts.config.scope(device="cuda"), pytest.raises(UnsupportedTargetError):
        ts.zeros(2)


# --- new tensors --------------------------------------------------------------------------------
MAKE = {"tensor": lambda: ts.tensor([1.0, 2.0]), "param": lambda: ts.param([1.0]),
        "zeros": lambda: ts.zeros((2, 3)), "full": lambda: ts.full((2,), 3, "bf16"),
        "arange": lambda: ts.arange(5), "eye": lambda: ts.eye(3),
        "key": lambda: ts.random.key(3),
        "normal": lambda: ts.random.normal((4, 3)),
        "uniform": lambda: ts.random.uniform((5,), dtype="bf16")}


@on_gpu
@pytest.mark.parametrize("name", MAKE)
def test_new_tensors_lie_where_the_block_says(name: str) -> None:
    ts.random.seed(5)
    want = MAKE[name]()
    for device, where in ((ts.gpu, "cuda:0"), ("cuda", "cuda:0"), (ts.gpu[1], "cuda:1"),
                          ("cpu", "cpu")):
        ts.random.seed(5)
        with ts.device(device):
            got = MAKE[name]()
        assert (got.device, got.type, got.is_param) == (where, want.type, want.is_param)
        assert got.array.tobytes() == want.array.tobytes()
    with ts.config.scope(device="cuda:1"), ts.device("cpu"):
        assert MAKE[name]().device == "cpu"


@on_gpu
def test_what_a_block_computes_is_computed_there(driver: Any, rng: np.random.Generator) -> None:
    x, w = normal(rng, 4, 3), normal(rng, 3, 2)
    with ts.device("cuda"):
        y, z = x @ w, ts.jit(lambda x, w: x @ w)(x, w.numpy())
    assert y.device == z.device == "cuda:0" and len(driver.launches) == 2
    assert_close(y.array, x.array @ w.array, "f32", 3)
    with pytest.raises(ArgumentError, match="is to run on the CPU, but a lies on cuda:0"), \
            ts.device("cpu"):
        y + 1.0


# --- compiled functions -------------------------------------------------------------------------
@on_gpu
def test_a_function_runs_where_its_arguments_lie(driver: Any, rng: np.random.Generator) -> None:
    x, w = normal(rng, 4, 3), normal(rng, 3, 2)
    want = ts.tanh(x @ w)
    loss = lambda x, w: ts.sum(ts.tanh(x @ w))  # noqa: E731
    f = ts.jit(lambda x, w: ts.tanh(x @ w))
    assert f(x, w).device == "cpu" and not driver.launches
    for place in (0, 1):
        there = ts.to((x, w), f"cuda:{place}")
        for _ in range(2):
            got = f(*there)
            assert got.device == f"cuda:{place}"
            assert_close(got.array, want.array, "f32", 3)
        assert {one.context for one in driver.launches[-2:]} == {77 + place}
        g = ts.grad(loss, argnums=(0, 1))(*there)
        for mine, ours in zip(g, ts.grad(loss, argnums=(0, 1))(x, w), strict=True):
            assert mine.device == f"cuda:{place}"
            assert_close(mine.array, ours.array, "f32", 8)
        rows = ts.vmap(lambda x, w: ts.sum(x * x), in_axes=(0, None))(*there)
        assert rows.device == f"cuda:{place}"
    assert f.specializations == 3 and f(x, w).device == "cpu"


@on_gpu
@pytest.mark.parametrize("call", [
    lambda f, x, y: f(x, y), lambda f, x, y: f(x, b=y), lambda f, x, y: f(x, y.numpy()),
    lambda f, x, y: ts.grad(lambda a, b: ts.sum(a * b))(x, y)])
def test_mixed_places_are_named(call: Any, rng: np.random.Generator) -> None:
    x, y = normal(rng, 4).cuda(), normal(rng, 4)
    with pytest.raises(ArgumentError, match="a lies on cuda:0, b lies in host memory") as info:
        call(ts.jit(lambda a, b: a * b), x, y)
    assert 'x.to("cuda")' in info.value.hint and "test_placement" in info.value.where.file


@on_gpu
def test_a_leaf_of_a_tree_is_named(rng: np.random.Generator) -> None:
    params = {"w": normal(rng, 3).cuda(), "b": [normal(rng, 3).cuda(1), normal(rng, 3)]}
    f = ts.jit(lambda params, scale: params["w"] + params["b"][0])
    with pytest.raises(ArgumentError, match=r"params\.w lies on cuda:0, params\.b\.0 lies on "
                                            r"cuda:1, params\.b\.1 lies in host memory"):
        f(params, 2.0)


@on_gpu
def test_numbers_and_arrays_without_axes_lie_anywhere(rng: np.random.Generator) -> None:
    x = normal(rng, 4)
    f = ts.jit(lambda x, a, b, c: x * a + b * c)
    got = f(x.cuda(), 2.0, np.float32(3.0), ts.tensor(0.5))
    assert got.device == "cuda:0"
    assert_close(got.array, x.array * 2 + 1.5, "f32", 2)


@on_gpu
def test_a_target_that_is_said_wins_or_is_a_conflict(rng: np.random.Generator) -> None:
    x = normal(rng, 4)
    assert ts.jit(lambda x: x + 1.0, target="cuda")(x).device == "cuda:0"
    assert ts.jit(lambda x: x + 1.0, target="cuda:1")(x).device == "cuda:1"
    assert ts.jit(lambda x, y: x + y, target="cuda")(x.cuda(1), x).device == "cuda:1"
    for setting in ("cuda", "gpu"):
        with ts.config.scope(device=setting):
            assert ts.jit(lambda x, y: x + y)(x.cuda(1), x).device == "cuda:1"
            assert (x.cuda(1) + x).device == "cuda:1" and (x + x).device == "cuda:0"
    with pytest.raises(ArgumentError, match="is to run on the CPU, but x lies on cuda:0") as info:
        ts.jit(lambda x: x + 1.0, target="cpu")(x.cuda())
    assert "x.cpu()" in info.value.hint
    with pytest.raises(ArgumentError, match="is to run on cuda:1, but x lies on cuda:0"):
        ts.jit(lambda x: x + 1.0, target="cuda:1")(x.cuda())


@on_gpu
def test_captured_tensors_have_a_say(rng: np.random.Generator) -> None:
    x, w = normal(rng, 4), normal(rng, 4).cuda()
    f = ts.jit(lambda x: x * w)
    assert_close(f(x.cuda()).array, x.array * w.array, "f32", 1)
    assert ts.jit(lambda: w * 2.0)().device == "cuda:0"
    with pytest.raises(ArgumentError, match=r"x lies in host memory, the captured f32\[4\] lies on"
                                            " cuda:0"):
        f(x)


@on_gpu
def test_captured_host_tensors_are_copied_once(driver: Any, monkeypatch: Any,
                                               rng: np.random.Generator) -> None:
    table = ts.tensor(rng.standard_normal(TOLD_BYTES // 4).astype(np.float32), name="table")
    want = table.array[:4].copy()
    f = ts.jit(lambda x: x + table[:4])
    x = ts.zeros(4).to("cuda")
    with pytest.warns(PlacementWarning, match=r"captures f32\[262144\] 'table', 1.0 MiB in host"):
        f(x)
    counts = Copies(driver, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(f(x).array, want)
    assert counts.to_device == 0
    table[0] = want[0] = 7.0  # seen, and copied again
    np.testing.assert_array_equal(f(x).array, want)
    assert counts.to_device == TOLD_BYTES
    held = table.numpy()  # somebody may write through NumPy now: copied at each call
    held[1] = want[1] = 9.0
    np.testing.assert_array_equal(f(x).array, want)


# --- what is built on ops -----------------------------------------------------------------------
def network(p: Any, x: ts.Tensor) -> ts.Tensor:
    return ts.mean(ts.square(ts.tanh(x @ p["w"]) + p["b"]))


@on_gpu
@pytest.mark.parametrize("form", ["ops", "jit", "donated"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_an_optimizer_keeps_its_state_where_the_parameters_lie(dtype: str, form: str,
                                                               rng: np.random.Generator) -> None:
    """Narrow parameters have master copies there."""
    opt = ts.optim.AdamW()

    def step(params: Any, state: Any, x: ts.Tensor, lr: float) -> Any:
        loss, grads = ts.value_and_grad(network)(params, x)
        grads = ts.optim.clip_by_global_norm(grads, 1.0)[0]
        return *opt.update(params, grads, state, lr), loss

    params = {"w": ts.param(normal(rng, 8, 4), dtype), "b": ts.param(normal(rng, 4), dtype)}
    there = ts.to(params, "cuda")
    state, held = opt.init(params), opt.init(there)
    assert {m.device for k in ("m", "v", "master") for m in held[k].values()} == {"cuda:0"}
    run = {"ops": step, "jit": ts.jit(step), "donated": ts.jit(step, donate=(0, 1))}[form]
    for i in range(3):
        x = normal(rng, 16, 8, dtype=dtype)
        params, state, loss = step(params, state, x, 0.1 / (i + 1))
        there, held, got = run(there, held, x.cuda(), 0.1 / (i + 1))
        assert_close(got.array, loss.array, dtype, 16, scale=4.0)
    assert there["w"].is_param and there["w"].device == held["m"]["w"].device == "cuda:0"
    if dtype == "f32":
        assert_close(there["w"].array, params["w"].array, "f32", 256, scale=4.0)


@on_gpu
def test_custom_rules_and_checkpoints(tmp_path: Any, rng: np.random.Generator) -> None:
    @ts.custom_vjp
    def twice(x: ts.Tensor) -> ts.Tensor:
        return x * 2.0

    twice.defvjp(lambda x: (x * 2.0, None), lambda saved, g: (g * 2.0,))
    x = normal(rng, 5)
    there = x.cuda()
    assert twice(there).device == ts.grad(lambda x: ts.sum(twice(x)))(there).device == "cuda:0"
    ts.checkpoints.save(tmp_path / "c", {"x": there})
    for like in (x, there):
        found = ts.checkpoints.load(tmp_path / "c").tree({"x": like})["x"]
        assert found.device == like.device and found.array.tobytes() == x.array.tobytes()


@on_gpu
def test_regions_are_written_where_they_lie() -> None:
    @ts.jit
    def doubled(x: ts.Region[ts.write], y: ts.Region[ts.read]) -> None:
        x[:2] = y[:2] * 2.0

    x, y = ts.zeros(4).cuda(), ts.ones(4).cuda()
    pointer = x.memory.pointer
    doubled(x, y)
    assert x.tolist() == [2.0, 2.0, 0.0, 0.0] and x.memory.pointer == pointer


@on_gpu
def test_several_threads_call_one_function(rng: np.random.Generator) -> None:
    f = ts.jit(lambda x: ts.tanh(x) * 2.0)
    xs = [normal(rng, 64).cuda() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for x, y in zip(xs, pool.map(f, xs), strict=True):
                assert_close(y.array, 2 * np.tanh(x.array), "f32", 2)


# --- nothing is copied that is there ------------------------------------------------------------
@on_gpu
def test_kernels_read_arguments_and_write_results_where_they_lie(driver: Any, monkeypatch: Any,
                                                                 rng: np.random.Generator) -> None:
    f = ts.jit(lambda x, w: (ts.tanh(x @ w), ts.sum(x)))
    x, w = normal(rng, 8, 8).cuda(), normal(rng, 8, 8).cuda()
    f(x, w)
    counts, copied = Copies(driver, monkeypatch), []
    monkeypatch.setattr(driver, "cuMemcpyDtoDAsync", lambda *a: copied.append(a) or (0,))
    start = len(driver.launches)
    y, total = f(x, w)
    used = {v for one in driver.launches[start:] for v in one.values}
    assert {x.memory.pointer, w.memory.pointer, y.memory.pointer, total.memory.pointer} <= used
    assert not copied and counts.to_device == 0 and counts.to_host == 0
    assert_close(y.array, np.tanh(x.array @ w.array), "f32", 8)


@on_gpu
@pytest.mark.parametrize("fn", [
    lambda x: x, lambda x: (x, x), lambda x: (y := x * 2.0, y, ts.reshape(y, (2, 2))),
    lambda x: ts.reshape(x, (2, 2)), lambda x: ts.zeros(3)])
def test_results_share_no_memory(fn: Any, rng: np.random.Generator) -> None:
    x = normal(rng, 4).cuda()
    made = ts.jit(fn)(x)
    made = made if isinstance(made, tuple) else (made,)
    assert len({y.memory.pointer for y in (x, *made)}) == 1 + len(made)
    for y, want in zip(made, ts.jit(fn)(x) if len(made) > 1 else (ts.jit(fn)(x),), strict=True):
        np.testing.assert_array_equal(y.array, want.array)


@on_gpu
def test_a_call_keeps_no_memory_of_its_arguments(rng: np.random.Generator) -> None:
    f = ts.jit(lambda x: x + 1.0)
    x = normal(rng, 4).cuda()
    gone = weakref.ref(x.memory)
    y = f(x)
    there = weakref.ref(y.memory)
    del x, y
    assert gone() is None and there() is None


@on_gpu
@pytest.mark.parametrize("late", ["", "kernels"])
@pytest.mark.parametrize("how", ["jit", "copy", "rows", "op"])
def test_arrays_of_side_streams_are_ordered(how: str, late: str, driver: Any,
                                            rng: np.random.Generator) -> None:
    """Behind the work of the stream on which torch made it, and before what torch does next."""
    f, x = ts.jit(lambda x: x * 2.0), normal(rng, 4)
    sys.modules["torch"].streams[0] = 9
    f(Torch(filled(x.array)))
    take = {"jit": lambda t: f(t), "copy": lambda t: f(ts.tensor(t)), "rows": lambda t: f(
        ts.from_dlpack(t)[0:4]), "op": lambda t: ts.from_dlpack(t) * 2.0}[how]
    take(Torch(filled(x.array)))
    driver.late = late
    there, waits = Torch(filled(np.zeros(4, np.float32))), driver.waits
    driver._do(9, lambda: there.x.__setitem__(slice(None), x.array), True)
    y = take(there)
    driver._flush(9)
    driver._do(9, lambda: there.x.fill(0), True)  # torch uses the memory again
    assert driver.waits == waits  # the host waits for none
    np.testing.assert_array_equal(y.array, 2 * x.array)


# --- one op at a time ---------------------------------------------------------------------------
EAGER = {"add": lambda x: x + 1.5, "matmul": lambda x: x @ x.T, "softmax": lambda x: ts.softmax(x),
         "mean": lambda x: ts.mean(x, axis=1), "cast": lambda x: ts.cast(x, "bf16"),
         "reshape": lambda x: x.reshape(2, -1), "row": lambda x: x[2], "rows": lambda x: x[1:3],
         "part": lambda x: x[:, 1], "joined": lambda x: ts.concatenate([x, x]),
         "where": lambda x: ts.where(x > 0.0, x, 0.0), "T": lambda x: x.T,
         "numpy": lambda x: np.tanh(x), "like": lambda x: ts.zeros_like(x),
         "gelu": lambda x: ts.gelu(x), "power": lambda x: x ** 2, "tril": lambda x: ts.tril(x)}


@on_gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", EAGER)
def test_ops_run_where_their_operands_lie(name: str, dtype: str, driver: Any, monkeypatch: Any,
                                          rng: np.random.Generator) -> None:
    x = normal(rng, 4, 6, dtype=dtype)
    want, there = EAGER[name](x), x.cuda()
    EAGER[name](there)
    counts = Copies(driver, monkeypatch)
    got = EAGER[name](there)
    assert got.device == "cuda:0" and got.type == want.type
    assert counts.to_host == 0 and counts.to_device <= 16  # two numbers
    assert_close(got.array, want.array, dtype, 16)


@on_gpu
def test_a_float_is_data_and_an_attribute_is_not(programs: Any, rng: np.random.Generator) -> None:
    x = normal(rng, 4, 6)
    there = x.cuda()
    for c in (0.5, 2.0, 3.0):
        assert_close((there * c).array, x.array * np.float32(c), "f32", 1)
    assert len(programs) == 1
    for axis in (0, 1):
        assert_close(ts.sum(there, axis=axis).array, x.array.sum(axis), "f32", 6)
    assert len(programs) == 3


@on_gpu
def test_calls_are_known_at_a_glance(programs: Any, monkeypatch: Any,
                                     rng: np.random.Generator) -> None:
    """By what decides about them: 2.0 and 3.0 are data, 1, True and 1.0 are not alike."""
    find, seen = eager._Call.find, list[str]()
    monkeypatch.setattr(eager._Call, "find", lambda c: seen.append(c.name) or find(c))
    x, half = normal(rng, 4, 6), normal(rng, 4, 6, dtype="bf16")
    calls = [(lambda a: a * 2.0, 1), (lambda a: a * 3.0, 0), (lambda a: a * 2, 1),
             (lambda a: a * True, 1), (lambda a: a * 1, 1), (lambda a: a * 1.0, 0),
             (lambda a: ts.sum(a, 0), 1), (lambda a: ts.sum(a, 1), 1), (lambda a: ts.sum(a), 1),
             (lambda a: a + a, 1), (lambda a: a[:2] + a[2:], 1)]
    for value in (x, half):
        for call, new in calls:
            seen.clear()
            want, there = call(value), value.cuda()
            for _ in range(3):
                got = call(there)
                assert got.type == want.type and got.device == "cuda:0"
                assert_close(got.array, want.array, value.dtype.name, 16)
            assert len(seen) == new, seen
    there = x.cuda()
    with ts.config.scope(device="cpu"), pytest.raises(ts.ArgumentError):
        _ = there + there
    gone = there.copy()
    ts.jit(lambda a: a + 1.0, donate="a")(gone)
    with pytest.raises(ts.ArgumentError, match="after it was donated"):
        _ = gone + gone


@on_gpu
def test_draws_of_ops_on_a_gpu_are_those_of_the_host(rng: np.random.Generator) -> None:
    x = normal(rng, 40, 3)
    for draw in (lambda x: ts.dropout(x, 0.5), lambda x: ts.dropout(x, 0.5, training=False),
                 lambda x: ts.dropout(x, 0.25, key=ts.random.key(2).to(x.device))):
        ts.random.seed(11)
        want = [draw(x).array for _ in range(3)]
        ts.random.seed(11)
        got = [draw(x.cuda()) for _ in range(3)]
        assert {y.device for y in got} == {"cuda:0"}
        for a, b in zip(got, want, strict=True):
            assert_close(a.array, b, "f32", 1)


@on_gpu
def test_mixed_operands_are_named(rng: np.random.Generator) -> None:
    x, y = normal(rng, 4), normal(rng, 4).cuda()
    for call in (lambda: x + y, lambda: ts.add(y, x.numpy()), lambda: ts.concatenate([x, y]),
                 lambda: np.add(x, y)):
        with pytest.raises(ArgumentError, match="lies on cuda:0.*lies in host memory|"
                                                "lies in host memory.*lies on cuda:0"):
            call()


@on_gpu
@pytest.mark.parametrize("fn", [
    lambda x: ts.nonzero(x), lambda x: x[x > 0], lambda x: ts.unique(x)])
def test_what_has_no_kernel_names_the_line_and_says_cpu(fn: Any, rng: np.random.Generator) -> None:
    with pytest.raises(UnsupportedTargetError) as info:
        fn(normal(rng, 8).cuda())
    assert "x.cpu()" in info.value.hint and "test_placement" in info.value.where.file


@on_gpu
def test_what_a_target_cannot_run_names_the_line(rng: np.random.Generator) -> None:
    def f(x: ts.Tensor) -> ts.Tensor:
        apply(OPS["barrier"], axis=None, mesh=None)
        return x

    with pytest.raises(UnsupportedTargetError, match="barrier.* has no form for GPUs") as info:
        ts.jit(f)(normal(rng, 8).cuda())
    assert 'OPS["barrier"]' in info.value.where.text


@on_gpu
def test_memory_of_results_is_there_when_a_call_begins(
    driver: Any, monkeypatch: Any, rng: np.random.Generator
) -> None:
    """Allocating it keeps a GPU waiting: 8 ms for the 450 tensors of a step."""
    asked, make = [], driver.cuMemAllocAsync
    monkeypatch.setattr(driver, "cuMemAllocAsync", lambda *a: asked.append(a) or make(*a))
    f = ts.jit(lambda x: (y := ts.softmax(x @ x), y @ x), capture_graph=False)
    x = normal(rng, 40, 40).cuda()
    want = [y.array for y in f(x)]
    for counted in (True, True, False, False):
        got = f(x)
        assert counted or not asked
        asked.clear()
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a.array, b)
