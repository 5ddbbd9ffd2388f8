"""Where tensors lie decides where what is computed of them runs; nothing moves that is there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from lowered_functions import normal
from tessera.runtime.device import device, device_count
from tolerance import assert_close

require_gpu()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "fp8_e4m3", "int64", "bool_", "fp4_e2m1", "int4",
                                   'fp8_e4m3 @scaled("amax")'])
def test_there_and_back(dtype: str, rng: Any) -> None:
    x = ts.tensor(rng.integers(-3, 4, (257, 129)).astype(np.float32), dtype)
    there = x.to("cuda")
    assert there.device == "cuda:0" and there.to("cuda") is there
    assert there.cpu().buffer.tobytes() == x.buffer.tobytes() == there.copy().buffer.tobytes()
    assert ts.to({"x": [x]}, "cuda")["x"][0].device == "cuda:0"


@pytest.mark.row("PLACE-01", "PLACE-02")
def test_blocks(rng: Any) -> None:
    x, w = normal(rng, 300, 200), normal(rng, 200, 100)
    ts.random.seed(3)
    want = ts.random.normal((50, 20))
    for where in (ts.gpu, ts.gpu[0], "cuda"):
        ts.random.seed(3)
        with ts.device(where):
            made = ts.random.normal((50, 20)), ts.zeros(3), ts.param([1.0]), x @ w, ts.jit(
                lambda x, w: x @ w)(x, w)
        assert {y.device for y in made} == {"cuda:0"}
        assert made[0].array.tobytes() == want.array.tobytes()
        assert_close(made[3].array, x.array.astype(np.float64) @ w.array, "f32", 200)
    with ts.device(ts.cpu):
        assert (x @ w).device == "cpu"
    if device_count() > 1:
        with ts.device(ts.gpu[1]):
            y = x @ w
        assert y.device == "cuda:1"
        np.testing.assert_array_equal(y.to("cuda:0").array, y.array)


def loss(params: Any, x: ts.Tensor) -> ts.Tensor:
    for w, b in params:
        x = ts.tanh(x @ w + b)
    return ts.mean(ts.square(x))


def step(params: Any, state: Any, x: ts.Tensor) -> Any:
    value, grads = ts.value_and_grad(loss)(params, x)
    state = [(0.9 * a + ga, 0.9 * b + gb) for (a, b), (ga, gb) in zip(state, grads, strict=True)]
    return [(w - 0.1 * a, b - 0.1 * c)
            for (w, b), (a, c) in zip(params, state, strict=True)], state, value


def draw(rng: Any, layers: int = 3, width: int = 96) -> Any:
    params = [(ts.tensor(rng.standard_normal((width, width)).astype(np.float32) / width**0.5),
               normal(rng, width)) for _ in range(layers)]
    return params, [(ts.zeros_like(w), ts.zeros_like(b)) for w, b in params]


@pytest.mark.parametrize("donate", [(), ("params", "state")])
def test_training_where_the_data_lies(donate: tuple[str, ...], rng: Any) -> None:
    """Nothing is changed but where the data lies; donated memory is that of the results."""
    here = draw(rng)
    there = ts.to(here, "cuda")
    f, g = ts.jit(step, donate=donate), ts.jit(step)
    pointers = {t.memory.pointer for tree in there for pair in tree for t in pair}
    for _ in range(20):
        x = normal(rng, 64, 96)
        *here, want = g(*here, x)
        *there, got = f(*there, x.cuda())
        assert got.device == "cuda:0"
        assert abs(got.item() - want.item()) < 1e-4
        found = {t.memory.pointer for tree in there for pair in tree for t in pair}
        assert not donate or found == pointers
    for mine, ours in zip(there[0], here[0], strict=True):
        for a, b in zip(mine, ours, strict=True):
            assert_close(a.array, b.array, "f32", 96 * 20)


def test_a_donated_argument_is_used_up(rng: Any) -> None:
    x = normal(rng, 1000).cuda()
    pointer = x.memory.pointer
    y = ts.jit(lambda x: x * 2.0, donate="x")(x)
    assert y.memory.pointer == pointer
    with pytest.raises(ts.ArgumentError, match=r"donated to <lambda> at .*test_placement\.py"):
        x + 1.0


def test_steps_allocate_nothing_when_all_is_donated(rng: Any) -> None:
    f = ts.jit(step, donate=("params", "state"))
    there, x = ts.to(draw(rng, 2, 1024), "cuda"), normal(rng, 64, 1024).cuda()
    for _ in range(3):
        *there, _ = f(*there, x)
    device().synchronize()
    before = device().free_bytes()
    for _ in range(20):
        *there, _ = f(*there, x)
    device().synchronize()
    assert before - device().free_bytes() <= 2 << 20


def test_captured_graphs_take_arguments_that_lie_there(rng: Any) -> None:
    f = ts.jit(lambda x, w: ts.tanh(x @ w), capture_graph=True)
    w = normal(rng, 96, 96).cuda()
    for n in (3, 3, 3):
        x = normal(rng, n, 96).cuda()
        assert_close(f(x, w).array, np.tanh(x.array.astype(np.float64) @ w.array), "f32", 96)
    assert f.capture.endswith("in one launch")


EAGER = {"add": lambda x: x + 1.5, "matmul": lambda x: x @ x.T, "softmax": lambda x: ts.softmax(x),
         "mean": lambda x: ts.mean(x, axis=1), "cast": lambda x: ts.cast(x, "bf16"),
         "reshape": lambda x: x.reshape(20, -1), "row": lambda x: x[2], "rows": lambda x: x[1:3],
         "part": lambda x: x[:, 1:7], "joined": lambda x: ts.concatenate([x, x]),
         "where": lambda x: ts.where(x > 0.0, x, 0.0), "T": lambda x: x.T,
         "numpy": lambda x: np.tanh(x), "like": lambda x: ts.zeros_like(x),
         "gelu": lambda x: ts.gelu(x), "power": lambda x: x ** 2, "tril": lambda x: ts.tril(x),
         "layernorm": lambda x: ts.layernorm(x, x[0], x[1])}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", EAGER)
def test_ops_run_where_their_operands_lie(name: str, dtype: str, rng: Any) -> None:
    x = normal(rng, 40, 60, dtype=dtype)
    want, got = EAGER[name](x), EAGER[name](x.cuda())
    assert got.device == "cuda:0" and got.type == want.type
    assert_close(got.array, want.array, dtype, 60, scale=4.0)


def test_mixed_places_and_missing_kernels_say_so(rng: Any) -> None:
    x, y = normal(rng, 4), normal(rng, 4).cuda()
    with pytest.raises(ts.ArgumentError, match="a lies in host memory, b lies on cuda:0"):
        ts.jit(lambda a, b: a + b)(x, y)
    with pytest.raises(ts.ArgumentError, match="host memory"):
        x + y
    with pytest.raises(ts.UnsupportedTargetError) as info:
        y[y > 0.0]
    assert "x.cpu()" in info.value.hint


@pytest.mark.alone
def test_a_call_copies_nothing(rng: Any) -> None:
    """64 MiB in, 64 MiB out: the kernels' time alone, not that of copies beside them."""
    import time

    x = ts.zeros((4096, 4096)).cuda()
    f = ts.jit(lambda x: x + 1.0)
    times = []
    for _ in range(5):
        f(x)
        device().synchronize()
        start = time.perf_counter()
        for _ in range(50):
            f(x)
        device().synchronize()
        times.append((time.perf_counter() - start) / 50)
    moved = 2 * x.nbytes / min(times)
    print("test_a_call_copies_nothing", {"us": 1e6 * min(times), "gb_per_s": moved / 1e9})
    assert moved > 1.5e12  # a copy in and a copy out would make it three times the traffic
