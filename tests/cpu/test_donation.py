"""Arguments that are donated: a result has their memory, and reading them is an error."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowered_functions import normal
from lowering_cases import apart as apart
from tessera.errors import ArgumentError
from tessera.runtime import dlpack
from tolerance import assert_close

on_gpu = pytest.mark.usefixtures("gpu", "apart")


def descend(params: Any, state: Any, x: Any) -> Any:
    loss, grads = ts.value_and_grad(lambda p: ts.mean(ts.square(x @ p["w"] + p["b"])))(params)
    state = {k: 0.9 * state[k] + grads[k] for k in grads}
    return {k: params[k] - 0.1 * state[k] for k in grads}, state, loss


def start(rng: np.random.Generator) -> Any:
    params = {"w": normal(rng, 8, 4), "b": normal(rng, 4)}
    return params, {k: ts.zeros_like(p) for k, p in params.items()}


@on_gpu
def test_parameters_and_state_stay_in_their_memory(driver: Any, rng: np.random.Generator) -> None:
    step = ts.jit(descend, donate=("params", "state"))
    params, state = start(rng)
    there, held = ts.to((params, state), "cuda")
    pointers = {t[k].memory.pointer for t in (there, held) for k in t}
    for _ in range(4):
        x = normal(rng, 16, 8)
        params, state, loss = ts.jit(descend)(params, state, x)
        made = len(driver.memory)
        there, held, got = step(there, held, x.cuda())
        assert {t[k].memory.pointer for t in (there, held) for k in t} == pointers
        assert_close(got.array, loss.array, "f32", 64)
    assert len(driver.memory) <= made + 2  # the batch and the loss
    for k in params:
        assert_close(there[k].array, params[k].array, "f32", 256)
        assert_close(held[k].array, state[k].array, "f32", 256)


USES = {"op": lambda x: x + 1.0, "numpy": lambda x: x.numpy(), "jit": lambda x: ts.jit(
    lambda v: v)(x), "item": lambda x: x[0], "copy": lambda x: x.copy(), "to": lambda x: x.cpu(),
    "write": lambda x: x.__setitem__(0, 1.0), "dlpack": lambda x: x.__dlpack__(),
    "device": lambda x: x.device, "bytes": lambda x: x.buffer, "again": lambda x: ts.jit(
        lambda v: v * 2.0, donate="v")(x), "captured": lambda x: ts.jit(lambda: x * 2.0)(),
    "grad": lambda x: ts.grad(lambda v: ts.sum(v))(x), "tensor": lambda x: ts.tensor(x)}


@on_gpu
@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("use", USES)
def test_what_was_donated_is_used_up(use: str, place: str, rng: np.random.Generator) -> None:
    x = normal(rng, 4).to(place)
    want = 2 * x.numpy()
    y = ts.jit(lambda x: x * 2.0, donate=0)(x)
    np.testing.assert_array_equal(y.numpy(), want)
    with pytest.raises(ArgumentError, match=r"f32\[4\] is used after it was donated to <lambda> at "
                                            r".*test_donation\.py:\d+") as info:
        USES[use](x)
    assert "x.copy()" in info.value.hint
    assert x.shape == (4,) and "donated to <lambda>" in repr(x)


@on_gpu
@pytest.mark.parametrize("fn, takes", [
    (lambda x: x * 2.0 + x, True),
    (lambda x: ts.reshape(x + 1.0, (3, 4)), True),
    (lambda x: (x, x + 1.0), False),
    (lambda x: x.T @ x, False),
    (lambda x: ts.softmax(x), False),
    (lambda x: ts.cast(x, "bf16"), False),
    (lambda x: x[::-1] + x, False),  # it reads the rows in another order
    (lambda x: x @ ts.ones((3, 3)) + x, False),
    (lambda x: x @ ts.ones((3, 3)), False),
    (lambda x: (x @ ts.ones((3, 3)), ts.softmax(x)), False),  # read again after the matmul
    (lambda x: x + ts.sum(x, 0), True),
    (lambda x: ts.dynamic_update_slice(x, ts.ones((1, 3)), (2, 0)), True),
    (lambda x: ts.dynamic_update_slice(ts.dynamic_update_slice(
        x, ts.ones((1, 3)), (2, 0)), 2.0 * x[:1, :2], (1, 1)), None),
    (lambda x: (ts.dynamic_update_slice(x, ts.ones((1, 3)), (2, 0)), x), False),
    (lambda x: (ts.dynamic_update_slice(x, ts.ones((1, 3)), (2, 0)),
                ts.dynamic_update_slice(x, ts.ones((1, 3)), (0, 0))), None),
    (lambda x: (y := x + 1.0, ts.sum(y * x)), None)])
def test_only_what_nothing_reads_is_overwritten(fn: Any, takes: bool | None,
                                                rng: np.random.Generator) -> None:
    x = normal(rng, 4, 3)
    want = ts.jit(fn)(x)
    there = x.cuda()
    pointer = there.memory.pointer
    got = ts.jit(fn, donate="x")(there)
    flat = [y for y in (got if isinstance(got, tuple) else (got,))]
    for y, expected in zip(flat, want if isinstance(want, tuple) else (want,), strict=True):
        assert_close(y.array, expected.array, y.dtype, 16, scale=4.0)
    if takes is not None:
        assert (pointer in {y.memory.pointer for y in flat}) == takes


@on_gpu
def test_memory_that_others_have_is_left_alone(rng: np.random.Generator) -> None:
    f = ts.jit(lambda x: x * 2.0, donate="x")
    for hold in (lambda x: x.__dlpack__(max_version=dlpack.VERSION), lambda x: ts.as_bytes(x)):
        x = normal(rng, 4).cuda()
        want, pointer = x.array, x.memory.pointer
        held = hold(x)
        y = f(x)
        assert y.memory.pointer != pointer and held is not None
        np.testing.assert_array_equal(y.array, 2 * want)
        g = ts.jit(lambda x: ts.dynamic_update_slice(x, ts.ones(1), (2,)), donate="x")
        g(normal(rng, 4).cuda())  # compiled
        x = normal(rng, 4).cuda()
        held, want = hold(x), x.array
        alive = ts.as_bytes(x)
        y = g(x)
        assert alive.array.tobytes() == want.tobytes()
        assert y.array.tolist() == [want[0], want[1], 1.0, want[3]]
    owner = normal(rng, 4).cuda()
    y = f(ts.from_bytes(ts.as_bytes(owner), "f32", (4,)))
    np.testing.assert_array_equal(y.array, 2 * owner.array)


@on_gpu
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_an_argument_given_twice(place: str, rng: np.random.Generator) -> None:
    x = normal(rng, 4).to(place)
    with pytest.raises(ArgumentError, match="a is donated and is given as b too"):
        ts.jit(lambda a, b: a + b, donate="a")(x, x)
    assert x.numpy().shape == (4,)  # nothing ran


@on_gpu
def test_tensors_that_nobody_has_are_results_again(rng: np.random.Generator) -> None:
    """What somebody has stays used up, and a result has nothing of the tensor that it was."""
    f = ts.jit(lambda xs, c: [x + c for x in xs], donate="xs")
    xs = [normal(rng, 4, i + 1).cuda() for i in range(40)]
    want = [x.array for x in xs]
    kept, watched, seen = list[Any](), list[Any](), list[set[int]]()
    for i in range(6):
        xs[3].name, xs[5].is_param = "mine", i == 2
        kept.append(xs[7])
        watched.append(weakref.ref(xs[9]))
        seen.append({*map(id, xs)})
        xs, want = f(xs, 1.0), [w + np.float32(1) for w in want]
        assert [x.array.tolist() for x in xs] == [w.tolist() for w in want]
        assert all(x.name is None and not x.is_param and x.device == "cuda:0" for x in xs)
    assert len(seen[2] & seen[4]) > 30 and not {id(x) for x in kept} & {id(x) for x in xs}
    assert [w() is None for w in watched][:-2] == [True] * 4
    for x in kept:
        with pytest.raises(ArgumentError, match="is used after it was donated"):
            x.numpy()


def test_options() -> None:
    with pytest.raises(ArgumentError, match="donated argument 'p' is not a parameter") as info:
        ts.jit(lambda params: params, donate="p")
    with pytest.raises(ArgumentError, match="jit has no option 'donate_argnums'") as info:
        ts.jit(lambda x: x, donate_argnums=0)
    assert 'donate=("params",)' in info.value.hint
    with pytest.raises(ArgumentError, match="no option 'static_argnames'") as info:
        ts.jit(lambda x: x, static_argnames="n")
    assert 'static=("n",)' in info.value.hint
    assert ts.jit(lambda x, mode: x * mode, static="mode")(ts.ones(1), 2).tolist() == [2.0]


def test_inside_a_trace_nothing_is_used_up() -> None:
    inner = ts.jit(lambda x: x * 2.0, donate="x")
    x = ts.ones(3)
    assert ts.jit(lambda x: inner(x) + x)(x).tolist() == [3.0] * 3 == ts.grad(
        lambda x: ts.sum(inner(x) + x))(x).tolist()
