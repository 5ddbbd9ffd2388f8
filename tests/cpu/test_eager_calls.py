"""Ops outside of `ts.jit` on a pretended GPU: views that share memory, and what a call does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from counting import python_calls
from fake_gpu import Copies
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from tessera.errors import AxisError
from tessera.graph.cuda.program import eager
from tessera.graph.cuda.program.run import GroupLaunch
from tolerance import assert_close

pytestmark = pytest.mark.usefixtures("gpu", "apart")


def normal(rng: np.random.Generator, *shape: int, dtype: Any = None) -> ts.Tensor:
    return ts.tensor(rng.standard_normal(shape).astype(np.float32), dtype).to("cuda")


def launches(driver: Any, run: Callable[[], Any]) -> int:
    before = len(driver.launches)
    run()
    return len(driver.launches) - before


# --- views --------------------------------------------------------------------------------------
VIEWS: dict[str, tuple[Callable[[ts.Tensor], ts.Tensor], Callable[[np.ndarray], np.ndarray]]] = {
    "mT": (lambda x: x.mT, lambda a: np.swapaxes(a, -1, -2)),
    "transpose": (lambda x: ts.transpose(x, (1, 0, 2)), lambda a: a.transpose(1, 0, 2)),
    "reshape": (lambda x: x.reshape(6, -1), lambda a: a.reshape(6, -1)),
    "new axis": (lambda x: x[None], lambda a: a[None]),
    "broadcast": (lambda x: ts.broadcast_to(x, (2, *x.shape)),
                  lambda a: np.broadcast_to(a, (2, *a.shape))),
    "twice": (lambda x: x.mT.mT, lambda a: a),
    "heads": (lambda x: x.reshape(2, 3, 2, 2).transpose((0, 2, 1, 3)),
              lambda a: a.reshape(2, 3, 2, 2).transpose(0, 2, 1, 3)),
    "and back": (lambda x: x.mT.reshape(24), lambda a: np.swapaxes(a, -1, -2).reshape(24))}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "int64"])
def test_a_view_launches_nothing_and_has_its_elements(name: str, dtype: str, driver: Any) -> None:
    take, want = VIEWS[name]
    x = ts.tensor(np.arange(24).reshape(2, 3, 4) % 7, dtype).to("cuda")
    for _ in range(3):
        assert launches(driver, lambda: take(x)) == 0
        y = take(x)
        assert (y.device, y.type, y.shape) == ("cuda:0", x.type, want(x.array).shape)
        z = y + y
        np.testing.assert_array_equal(z.numpy(), 2 * want(x.numpy()))
        np.testing.assert_array_equal(y.numpy(), want(x.numpy()))


def test_a_matmul_reads_a_transposed_matrix_as_it_lies(driver: Any,
                                                       rng: np.random.Generator) -> None:
    x, w = normal(rng, 5, 8), normal(rng, 6, 8)
    for _ in range(3):
        assert launches(driver, lambda: x @ w.mT) == 1
    assert_close((x @ w.mT).array, x.array @ w.array.T, "f32", 8)
    taken = w.mT  # kept
    for _ in range(2):
        assert launches(driver, lambda: x @ taken) == 1
    assert_close((x @ taken).array, x.array @ w.array.T, "f32", 8)


def test_a_view_keeps_its_elements_when_its_base_is_written(driver: Any,
                                                            rng: np.random.Generator) -> None:
    x = normal(rng, 4, 3)
    before = x.array
    turned, flat, again = x.mT, x.reshape(12), x.mT.reshape(12)
    x[1] = 7.0
    np.testing.assert_array_equal(x.array[1], np.full(3, 7.0, np.float32))
    np.testing.assert_array_equal(turned.array, before.T)
    np.testing.assert_array_equal(flat.array, before.reshape(12))
    np.testing.assert_array_equal(again.array, before.T.reshape(12))
    flat[0] = 9.0
    assert x.array[0, 0] == before[0, 0] and flat.array[0] == 9.0


def test_a_view_keeps_its_elements_when_a_kernel_writes_its_base(rng: np.random.Generator) -> None:
    @ts.kernel
    def clear(x):
        x[...] = 0.0

    x = normal(rng, 4, 4)
    before, turned = x.array, x.mT
    clear[1](x)
    assert not x.array.any()
    np.testing.assert_array_equal(turned.array, before.T)


def test_a_view_keeps_its_elements_when_its_base_is_donated(rng: np.random.Generator) -> None:
    x = normal(rng, 4, 4)
    before, turned, flat = x.array, x.mT, x.reshape(16)
    step = ts.jit(lambda x: x + 1.0, donate="x")
    want = before
    for _ in range(4):
        x, want = step(x), want + np.float32(1.0)
        np.testing.assert_array_equal(x.array, want)
    np.testing.assert_array_equal(turned.array, before.T)
    np.testing.assert_array_equal(flat.array, before.reshape(16))


def test_a_donated_view_leaves_its_base_as_it_is(rng: np.random.Generator) -> None:
    x = normal(rng, 4, 4)
    before = x.array
    step = ts.jit(lambda x: x + 1.0, donate="x")
    for take in (lambda: x.reshape(16), lambda: x.mT):
        for _ in range(3):
            y = take()
            want = y.array + np.float32(1.0)
            np.testing.assert_array_equal(step(y).array, want)
            np.testing.assert_array_equal(x.array, before)


def test_a_view_may_be_given_beside_its_donated_base(rng: np.random.Generator) -> None:
    step = ts.jit(lambda x, y: x + 1.0 + y.reshape(4, 4), donate="x")
    for _ in range(3):
        x = normal(rng, 4, 4)
        y, want = x.reshape(16), x.array + np.float32(1.0) + x.array
        kept = x.array.reshape(16)
        np.testing.assert_array_equal(step(x, y).array, want)
        np.testing.assert_array_equal(y.array, kept)


def test_rows_share_memory_where_new_memory_might_begin(driver: Any, monkeypatch: Any,
                                                        rng: np.random.Generator) -> None:
    x = normal(rng, 6, 64)
    before = x.array
    assert x[3].storage.pointer == x.storage.pointer + 3 * 256
    row, rows, again = x[-1], x[2:5], x[2:5][1]
    step = ts.jit(lambda x: x + 1.0, donate="x")
    for taken, want in ((row, before[-1]), (rows, before[2:5]), (again, before[3])):
        np.testing.assert_array_equal((taken + taken).array, 2 * want)
        np.testing.assert_array_equal(ts.jit(lambda x: x * 2.0)(taken).array, 2 * want)
    x[4] = 5.0
    for taken, want in ((row, before[-1]), (rows, before[2:5]), (again, before[3])):
        np.testing.assert_array_equal(taken.array, want)
    now = x.array
    row = x[1]
    row[3] = 7.0
    for _ in range(3):
        np.testing.assert_array_equal(step(x[2:4]).array, now[2:4] + np.float32(1.0))
    np.testing.assert_array_equal(x.array, now)
    narrow, large = normal(rng, 6, 63), normal(rng, 64, 64, 128)
    assert narrow[1].storage.pointer != narrow.storage.pointer + 252
    assert large[1].storage.pointer != large.storage.pointer + large[1].storage.nbytes
    np.testing.assert_array_equal(large[1].array, large.array[1])


def test_what_another_library_may_write_is_shared_by_no_view(driver: Any,
                                                             rng: np.random.Generator) -> None:
    x = normal(rng, 4, 4)
    told = x.__cuda_array_interface__["data"][0]
    before, turned = x.array, x.mT
    driver.cuMemsetD8Async(told, 0, 64, 0)
    assert not x.array.any()
    np.testing.assert_array_equal(turned.array, before.T)


def test_a_base_may_go_before_its_view(rng: np.random.Generator) -> None:
    x = normal(rng, 4, 4)
    before, flat = x.array, x.reshape(16)
    del x
    place = flat.storage.pointer
    assert flat.memory.pointer == place  # which nobody else has: nothing is copied
    np.testing.assert_array_equal(flat.array, before.reshape(16))


def test_a_view_is_read_by_a_compiled_function(rng: np.random.Generator) -> None:
    x, f = normal(rng, 4, 3), ts.jit(lambda x: x * 2.0)
    g = ts.jit(lambda y: y + x.mT)  # captured
    for _ in range(3):
        np.testing.assert_array_equal(f(x.mT).array, 2.0 * x.array.T)
        np.testing.assert_array_equal(f(x.reshape(12)).array, 2.0 * x.array.reshape(12))
        np.testing.assert_array_equal(g(x.mT).array, 2.0 * x.array.T)


# --- calls --------------------------------------------------------------------------------------
def calls(x: ts.Tensor, w: ts.Tensor, at: ts.Tensor) -> dict[str, Callable[[], Any]]:
    q = ts.stack([x, w])[None]
    return {"x + w": lambda: x + w, "by name": lambda: ts.sum(x, axis=-1),
            "a tuple": lambda: ts.sum(x, axis=(0, 1)), "a list": lambda: ts.stack([x, w]),
            "slices": lambda: x[1:, ::2], "an index": lambda: x[at], "float": lambda: x * 2.5,
            "a type": lambda: ts.cast(x, ts.bf16), 
            "attention": lambda: ts.attention(q, q, q, causal=True)}


@pytest.mark.parametrize("name", ["x + w", "by name", "a tuple", "a list", "slices", "an index",
                                  "float", "a type", "attention"])
def test_a_call_like_one_before_does_little_and_copies_nothing(
        name: str, driver: Any, monkeypatch: Any, rng: np.random.Generator) -> None:
    x, w = normal(rng, 4, 4), normal(rng, 4, 4)
    run = calls(x, w, ts.tensor([1, 0]).to("cuda"))[name]
    for _ in range(3):
        run()
    copies = Copies(driver, monkeypatch)
    found = []
    monkeypatch.setattr(eager._Call, "find", lambda self: found.append(self))
    driver.run = lambda launch: None
    count = python_calls(run)
    assert not found, "the program is looked for by its types"
    assert copies.to_device == 0, "a number is copied to the GPU again"
    assert count < 180, count


def test_results_that_lie_elsewhere_are_found_out_once(
        driver: Any, monkeypatch: Any, rng: np.random.Generator) -> None:
    x = normal(rng, 6, 8)
    want = x.array
    long, seen = [], []
    real, find = eager.EagerProgram._at_length, GroupLaunch.recipe
    monkeypatch.setattr(eager.EagerProgram, "_at_length",
                        lambda self, given: long.append(self) or real(self, given))
    monkeypatch.setattr(GroupLaunch, "recipe", lambda self, arrays, pointers: seen.append(
        ([a.pointer for a in arrays], [*pointers])) or find(self, arrays, pointers))
    kept = []  # so that each result lies elsewhere
    for _ in range(8):
        kept.append(ts.split(x, 2, axis=1))
        for y, part in zip(kept[-1], np.split(want, 2, 1), strict=True):
            np.testing.assert_array_equal(y.array, part)
    assert len(long) <= 2
    assert len(seen) >= 12 and all(lies == told for lies, told in seen)


def test_floats_are_data_once_copied(gpu: Any, driver: Any, monkeypatch: Any,
                                     rng: np.random.Generator) -> None:
    x = normal(rng, 4)
    for value in (2.5, -2.5, 0.0, -0.0, 2.5, 0.0, -0.0):
        want = np.copysign(x.array * np.float32(value), x.array * value)
        got = (x * value).array
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))
    compiled = len(gpu.requests)
    assert (x * 7.5).array.tolist() == (x.array * np.float32(7.5)).tolist()
    assert len(gpu.requests) == compiled


# --- writing ------------------------------------------------------------------------------------
@pytest.mark.parametrize("index", [2, -1, slice(1, 3), (2, slice(1, 3)), (slice(1, 2), 2), ...,
                                   (slice(0, 2), slice(None), 1), (1, 0, slice(2, 4))])
def test_elements_that_lie_together_are_written_by_one_copy(
        index: Any, driver: Any, rng: np.random.Generator) -> None:
    x = normal(rng, 4, 3, 5)
    want = x.array
    value = normal(rng, *want[index].shape)
    together = index != (slice(0, 2), slice(None), 1)
    for _ in range(2):
        want[index] = value.array
        assert launches(driver, lambda: x.__setitem__(index, value)) == (0 if together else 1)
        np.testing.assert_array_equal(x.array, want)


def test_a_number_on_the_host_is_copied_once(driver: Any, monkeypatch: Any,
                                             rng: np.random.Generator) -> None:
    x, rate = normal(rng, 4), ts.tensor(0.5)
    for _ in range(3):
        np.testing.assert_array_equal((x * rate).array, x.array * np.float32(0.5))
    copies = Copies(driver, monkeypatch)
    for _ in range(3):
        x * rate
    assert copies.to_device == 0
    rate[...] = 0.25
    np.testing.assert_array_equal((x * rate).array, x.array * np.float32(0.25))
    np.testing.assert_array_equal((x * ts.tensor(1, "int64")).array, x.array)


# --- steps --------------------------------------------------------------------------------------
@pytest.mark.parametrize("record", [ts.optim.SGD(momentum=0.9), ts.optim.AdamW()])
def test_an_optimizer_outside_of_jit_is_one_program(record: Any, monkeypatch: Any,
                                                    rng: np.random.Generator) -> None:
    def drawn() -> dict[str, Any]:
        return {n: rng.standard_normal(s).astype(np.float32)
                for n, s in {"w": (4, 3), "b": (3,), "v": (3, 4), "frozen": (7,)}.items()}

    host = {n: (ts.tensor if n == "frozen" else ts.param)(x) for n, x in drawn().items()}
    there = ts.to(host, "cuda")
    frozen, seen = there["frozen"], []
    real = eager.EagerProgram.run
    monkeypatch.setattr(eager.EagerProgram, "run",
                        lambda self, operands: seen.append(self) or real(self, operands))
    states = [record.init(host), record.init(there)]
    for _ in range(4):
        grads = {n: ts.tensor(x) for n, x in drawn().items() if n != "frozen"}
        moved = ts.to(grads, "cuda")
        host, states[0] = record.update(host, grads, states[0], 0.1)
        seen.clear()
        there, states[1] = record.update(there, moved, states[1], 0.1)
        assert not seen, "ops run one by one"
        assert there["frozen"] is frozen and there["w"].is_param
        for name in ("w", "b", "v"):
            assert there[name].device == "cuda:0"
            assert_close(there[name].array, host[name].array, "f32", 8)


# --- draws --------------------------------------------------------------------------------------
def test_draws_are_those_of_the_host(driver: Any, rng: np.random.Generator) -> None:
    x = rng.standard_normal((8, 16)).astype(np.float32)

    def drawn(place: str) -> list[np.ndarray]:
        y = ts.tensor(x).to("cuda") if place == "cuda" else ts.tensor(x)
        narrow = "bf16 @stochastic_round"
        made = []
        ts.random.seed(5)
        for i in range(4):
            made += [ts.dropout(y, 0.3), ts.cast(y, narrow), ts.random.uniform((3,))]
            if i == 1:  # a step between two calls of one program
                ts.random.next_key()
                made.append(ts.dropout(y * 2.0, 0.3))
        made += [ts.dropout(y, 0.3) for _ in range(3)]
        return [np.asarray(m.numpy(), np.float32) for m in made]

    for mine, want in zip(drawn("cuda"), drawn("cpu"), strict=True):
        np.testing.assert_array_equal(mine, want)


def test_dropout_is_sent_nothing(
        driver: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    x = normal(rng, 8, 16)
    for _ in range(4):
        y = ts.dropout(x, 0.3)
    copies = Copies(driver, monkeypatch)
    assert launches(driver, lambda: ts.dropout(x, 0.3)) == 2  # one makes 1 / (1 - p)
    assert copies.to_device == 0
    assert (y.array == 0).any()


def test_a_loop_over_places_compiles_one_kernel(gpu: Any, driver: Any,
                                                rng: np.random.Generator) -> None:
    x = normal(rng, 12, 10, 7)
    want = x.array
    loops: dict[str, Callable[[int], Any]] = {
        "columns": lambda i: (slice(None), i), "elements": lambda i: (i, -1 - i, i % 7),
        "blocks": lambda i: (slice(None), slice(i, i + 2), slice(1, 3)),
        "last": lambda i: (..., i % 7), "rows of rows": lambda i: (i, slice(i % 5, i % 5 + 3))}
    for name, at in loops.items():
        before = len(gpu.requests)
        for i in range(8):
            y = x[at(i)]
            assert y.device == "cuda:0" and y.type == x.type
            np.testing.assert_array_equal(y.array, want[at(i)])
        assert len(gpu.requests) - before <= 1, name
    y = x[:, 2:4]
    x[:, 2:4] = 0.0
    np.testing.assert_array_equal(y.array, want[:, 2:4])


def test_an_index_outside_is_an_error_of_its_line(rng: np.random.Generator) -> None:
    x = normal(rng, 4, 5)
    for _ in range(3):
        for index in (4, (0, 5), (slice(None), -6), (0, 0, 0)):
            with pytest.raises(AxisError) as error:
                x[index]
            assert error.value.where is not None and "x[index]" in error.value.where.text
        assert x[:, 3:99].shape == (4, 2) and x[:, 7:].shape == (4, 0)
    with pytest.raises(ts.errors.DTypeError):
        x[True]
    with pytest.raises(ts.errors.DTypeError):
        x[:, False]


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16", "int32", "int8", "uint64", "bool_",
                                   "fp8_e4m3"])
def test_a_number_is_what_the_host_has(dtype: str, driver: Any) -> None:
    for value in (1, 0, 3):
        here = ts.tensor(np.array([[value]]), dtype)
        there = here.to("cuda")
        for x in (there, there.reshape(()), there[0], there[0, 0], there.mT):
            got, want = x.item(), here.item()
            assert got == want and type(got) is type(want)


def test_a_number_waits_for_what_was_launched(driver: Any, rng: np.random.Generator) -> None:
    x = ts.tensor(np.float32(1.0)).to("cuda")
    for i in range(5):
        x = x + x
        assert float(x) == 2.0 ** (i + 1)
        assert bool(x > 3.0) == (i > 0)
        assert int(ts.cast(x, "int32")) == 2 ** (i + 1)
    with pytest.raises(ts.errors.ArgumentError, match="one element"):
        (x + ts.zeros((2,)).to("cuda")).item()


def test_parts_are_assigned_by_a_copy_whose_place_is_known(driver: Any,
                                                           rng: np.random.Generator) -> None:
    x, row = normal(rng, 6, 5), normal(rng, 5)
    want = x.array
    shared = x[2:4]
    for i in (3, 3, 3, -1, 3, 0):
        row = row + row
        x[i] = row
        want[i] = row.array
        np.testing.assert_array_equal(x.array, want)
    kept, before = x.mT, x.array
    x[3] = row + 1.0
    np.testing.assert_array_equal(kept.array, before.T)
    assert shared.shape == (2, 5)
    half = ts.cast(row, "bf16")
    x[3] = half
    np.testing.assert_array_equal(x.array[3], np.asarray(half.array, np.float32))
    x[3] = x[4]
    np.testing.assert_array_equal(x.array[3], x.array[4])
    for wrong in (normal(rng, 4), normal(rng, 2, 5)):
        with pytest.raises(ts.errors.ShapeError):
            x[3] = wrong


def test_a_type_or_name_of_an_operand_is_seen(driver: Any, rng: np.random.Generator) -> None:
    x, w = normal(rng, 4, 4), normal(rng, 4, 4)
    for _ in range(4):
        x + w
    half = ts.cast(w, "bf16")
    for _ in range(3):
        assert (x + half).type == ts.as_type("f32")
        np.testing.assert_array_equal((x + half).array,
                                      x.array + np.asarray(half.array, np.float32))
    w.name = "w"
    named = ts.param(w)
    for y in (x + w, x + named):
        assert y.name is None and not y.is_param
    with pytest.raises(ts.errors.ShapeError):
        x + normal(rng, 3)
