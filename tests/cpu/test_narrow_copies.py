"""Copies of parameters in a narrower type that stay from one call to the next."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from tessera import hooks
from tessera.graph.cuda.passes import narrow_copies
from tolerance import assert_close

pytestmark = pytest.mark.usefixtures("gpu", "apart")
HALF = "bf16 @accum(f32)"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_copies, "LEAST", 16)


def descend(params: Any, momentum: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        y = ts.cast(x, HALF) @ ts.cast(p["w"], HALF)
        return ts.mean(ts.square(ts.cast(y, "f32") + p["b"]))

    value, grads = ts.value_and_grad(loss)(params)
    momentum = {k: 0.9 * momentum[k] + grads[k] for k in grads}
    return {k: params[k] - 0.5 * momentum[k] for k in grads}, momentum, value


class Training:
    """Steps on the GPU and on the host, side by side, from the same parameters."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        host = {"w": self.normal(8, 8), "b": self.normal(8)}
        self.host = host, {k: ts.zeros_like(p) for k, p in host.items()}
        self.there = ts.to(self.host, "cuda")
        self.step, self.plain = ts.jit(descend, donate=("params", "momentum")), ts.jit(descend)

    def normal(self, *shape: int) -> ts.Tensor:
        return ts.tensor(self.rng.standard_normal(shape).astype(np.float32))

    @property
    def w(self) -> Any:
        return self.there[0]["w"]

    @property
    def executable(self) -> Any:
        assert self.step._last is not None
        return self.step._last.executable

    def steps(self, count: int) -> None:
        for _ in range(count):
            x = self.normal(16, 8)
            *host, want = self.plain(*self.host, x)
            *there, got = self.step(*self.there, x.cuda())
            self.host, self.there = tuple(host), tuple(there)
            assert_close(got.array, want.array, "f32", 1 << 12)
        for a, b in zip(self.there, self.host, strict=True):
            for k in a:
                assert_close(a[k]._buffer, b[k].array, "f32", 1 << 14)


def held_copy(x: Any) -> ts.Tensor:
    ((held, place),) = x.narrow.values()
    assert place == 0
    return held.tensor


@pytest.fixture
def training(rng: np.random.Generator) -> Training:
    return Training(rng)


def test_a_step_leaves_the_copies_for_the_next(training: Training, monkeypatch: Any) -> None:
    training.steps(2)
    copies = training.executable.copies
    copy = held_copy(training.w)
    assert (copy.array == ts.cast(ts.tensor(training.w._buffer), "bf16").array).all()
    place = copy.storage.pointer
    monkeypatch.setattr(copies, "_first", None)  # no call casts from here on
    del copy
    training.steps(3)
    copy = held_copy(training.w)
    assert copy.storage.pointer == place


WRITES = {
    "an element": lambda w: w.__setitem__((0, 0), 3.0),
    "its bytes": lambda w: ts.as_bytes(w).__setitem__((0, 3), 64),
    "another library": lambda w: w.__dlpack__(),
    "a kernel": lambda w: doubled.launch(w, groups=8),
}


@ts.kernel
def doubled(x: ts.Tensor["M", "N", ts.f32]) -> None:
    i = ts.tile.group_id(0)
    ts.tile.store(x[i], 2.0 * ts.tile.load(x[i]))


@pytest.mark.parametrize("write", WRITES)
def test_what_somebody_may_have_written_is_cast_again(training: Training, write: str) -> None:
    training.steps(2)
    assert training.w.narrow
    WRITES[write](training.w)
    assert not training.w.narrow
    training.host = ts.to(training.there, "cpu")
    training.steps(2)
    assert training.w.narrow


def test_parameters_from_elsewhere_are_cast_first(training: Training) -> None:
    training.steps(2)
    training.there = ts.to(ts.to(training.there, "cpu"), "cuda")
    assert not training.w.narrow
    training.steps(2)


def test_memory_that_is_needed_is_given_back(training: Training) -> None:
    training.steps(2)
    for trim in hooks.trimmed:
        trim(training.w.storage.device)
    ((held, _),) = training.w.narrow.values()
    assert held.tensor is None
    training.steps(2)


def test_copies_die_with_the_parameters(training: Training) -> None:
    """The function has them no longer than the tensors that it returned."""
    training.steps(5)
    assert sum(h.tensor is not None for h in narrow_copies._all) == 1
    training.there = ()
    gc.collect()
    assert not any(h.tensor is not None for h in narrow_copies._all)


def test_only_what_is_given_back_has_a_copy(rng: np.random.Generator) -> None:
    """No result is made from the argument, and what is not donated stays as it is."""
    w, x = (ts.tensor(rng.standard_normal((8, 8)).astype(np.float32)) for _ in "wx")
    ahead = ts.jit(lambda w, x: ts.cast(x, HALF) @ ts.cast(w, HALF), donate="w")
    kept = ts.jit(lambda w, x: (ts.cast(x, HALF) @ ts.cast(w, HALF), w * 0.5))
    for f in (ahead, kept):
        f(w.cuda(), x.cuda())
        assert f._last.executable.copies.copies == ()


def three(w: Any, x: Any) -> Any:
    """Three weights of the same rows, whose matmuls are one."""
    x = ts.cast(x, HALF)
    q, k, v = (ts.cast(x @ ts.cast(w[k], HALF), "bf16") for k in "qkv")
    return (ts.relu(q), -k, ts.tanh(v)), {k: w[k] * 0.5 for k in "kqv"}


def test_copies_that_are_read_side_by_side_are_one(rng: np.random.Generator) -> None:
    def random(*shape: int) -> ts.Tensor:
        return ts.tensor(rng.standard_normal(shape).astype(np.float32))

    host = {"q": random(192, 128), "k": random(192, 64), "v": random(192, 64)}
    x = random(256, 192)
    f, plain = ts.jit(three, donate="w"), ts.jit(three)
    there = ts.to(host, "cuda")
    for _ in range(3):
        got, there = f(there, x.cuda())
        want, host = plain(host, x)
        for a, b in zip(got, want, strict=True):
            assert_close(a.array, b.array, "bf16", 64)
    keeper = f._last.executable.copies
    assert [len(c.arguments) for c in keeper.copies] == [3]
    assert there["k"].memory  # somebody is told where one of them lies
    got, _ = f(there, x.cuda())
    for a, b in zip(got, plain(host, x)[0], strict=True):
        assert_close(a.array, b.array, "bf16", 64)


def test_a_copy_of_a_parameter_that_is_reshaped_is_written_where_it_is_made(
        rng: np.random.Generator) -> None:
    """By heads for the optimizer, as a matrix for the matmul. Its loop writes both."""
    def step(w: Any, x: Any) -> Any:
        heads = ts.reshape(w, (16, 24))
        return ts.cast(x, HALF) @ ts.cast(heads, HALF), w * 0.5

    host = ts.tensor(rng.standard_normal((16, 3, 8)).astype(np.float32))
    x = ts.tensor(rng.standard_normal((32, 16)).astype(np.float32))
    f, plain = ts.jit(step, donate="w"), ts.jit(step)
    there = host.cuda()
    for _ in range(3):
        got, there = f(there, x.cuda())
        want, host = plain(host, x)
        assert_close(got.array, want.array, "bf16", 16)
    found = f._last.executable
    assert [c.arguments for c in found.copies.copies] == [(0,)]
    loops = [g for g in found.program.plan.groups if g.kind == "loop" and "f32" in {
        o.type.dtype.name for o in g.writes}]
    assert [sorted(o.type.dtype.name for o in g.writes) for g in loops] == [["bf16", "f32"]]


def test_a_part_of_joined_copies_has_none_of_its_own(rng: np.random.Generator) -> None:
    """A gradient reads one of the weights alone, where it lies beside the others."""
    def step(w: Any, x: Any, g: Any) -> Any:
        found, new = three(w, x)
        return (*found, ts.cast(ts.cast(g, HALF) @ ts.cast(w["k"], HALF).T, "bf16")), new

    host = {k: ts.tensor(rng.standard_normal((192, n)).astype(np.float32))
            for k, n in (("q", 128), ("k", 64), ("v", 64))}
    x, g = (ts.tensor(rng.standard_normal((256, n)).astype(np.float32)) for n in (192, 64))
    f, plain = ts.jit(step, donate="w"), ts.jit(step)
    there = ts.to(host, "cuda")
    for _ in range(3):
        got, there = f(there, x.cuda(), g.cuda())
        want, host = plain(host, x, g)
        for a, b in zip(got, want, strict=True):
            assert_close(a.array, b.array, "bf16", 64)
    found = f._last.executable
    assert [len(c.arguments) for c in found.copies.copies] == [3]
    assert not [s.kernel for s in found.program.plan.groups if "concatenate" in s.kernel]
