"""Tensors whose bytes lie on the host meanwhile: they move on a stream of their own, nothing reads
too early, and ts.plan() lists it."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_gpu import Copies
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowered_functions import normal
from lowering_cases import apart as apart
from tessera.runtime import offloaded
from tessera.state.movement_plan import clear_plan
from tolerance import assert_close

pytestmark = pytest.mark.usefixtures("gpu", "apart")
LATE = pytest.mark.parametrize("late", ["", "copies", "kernels"])


@pytest.fixture(autouse=True)
def nothing_planned() -> None:
    clear_plan()


def freed(driver: Any, monkeypatch: Any) -> list[int]:
    """Pointers of the pool, when they are given back."""
    from tessera.runtime import buffer

    found: list[int] = []
    monkeypatch.setattr(buffer, "_to_pool", lambda pointer, index: found.append(pointer))
    for name in ("_SMALL_BYTES", "LARGE_BYTES"):  # none are kept
        monkeypatch.setattr(buffer, name, 0)
    return found


@LATE
def test_what_is_offloaded_comes_back_when_it_is_used(late: str, driver: Any, monkeypatch: Any,
                                                      rng: Any) -> None:
    gone = freed(driver, monkeypatch)
    double = ts.jit(lambda x: x * 2.0)
    for _ in range(3):
        x = normal(rng, 40, 50)
        want = x.array
        y = double(x.cuda())
        driver.late = late
        y = double(y)
        pointer = y.memory.pointer
        assert ts.offload({"y": [y]})["y"][0] is y
        assert y.offloaded and y.device == "cuda:0" and "offloaded" in repr(y)
        z = double(ts.tensor(want).cuda())  # it may take no memory that is still copied
        assert np.array_equal(y.array, 4 * want) and y.offloaded  # to read it needs no device
        assert pointer in gone
        assert np.array_equal(double(y).array, 8 * want) and y.offloaded  # it has had its own copy
        assert np.array_equal((y + 0.0).array, 4 * want) and not y.offloaded
        assert np.array_equal(y.array, 4 * want) and np.array_equal(z.array, 2 * want)
        driver.late = ""


def test_a_known_result_is_placed_as_others_are(rng: Any) -> None:
    f = ts.jit(lambda x: (x + 1.0, ts.offload(ts.full((128, 128), 3.0))))
    for _ in range(2):
        _, y = f(normal(rng, 4).cuda())
        assert y.offloaded and (y.array == 3.0).all()


@LATE
def test_a_program_waits_until_its_argument_has_left(late: str, driver: Any, rng: Any) -> None:
    f, x = ts.jit(lambda x: x * 2.0), normal(rng, 40, 50)
    f(ts.offload(f(x.cuda())))
    for _ in range(2):  # into memory of the pool, which holds something else
        y = f((x + 1.0).cuda())
        x = x + 1.0
        driver.late = late
        z = f(ts.offload(y))
        np.testing.assert_array_equal(z.array, 4 * x.array)
        driver.late = ""


@LATE
def test_a_prefetch_begins_the_copy_and_the_reader_waits(late: str, driver: Any, monkeypatch: Any,
                                                         rng: Any) -> None:
    x, f = normal(rng, 40, 50), ts.jit(lambda x: ts.sum(x * x))
    there = ts.offload(x.cuda() + 1.0)
    f(x.cuda())
    driver.late = late
    waits = driver.waits
    counts = Copies(driver, monkeypatch)
    ts.prefetch(there, into="device")
    assert not there.offloaded and counts.to_device == x.nbytes and driver.waits == waits
    got = f(there)
    assert counts.to_device == x.nbytes
    np.testing.assert_allclose(got.item(), ((x.array + 1.0) ** 2).sum(), rtol=1e-4)


@pytest.mark.parametrize("late", ["copies", "kernels"])
def test_a_missing_wait_would_show(late: str, driver: Any, monkeypatch: Any,
                                   rng: Any) -> None:
    x, f = normal(rng, 40, 50), ts.jit(lambda x: x * 2.0)
    f(x.cuda())
    monkeypatch.setattr(offloaded.CopyEvent, "hold", lambda *_: None)
    driver.late = late
    y = f(x.cuda())
    ts.offload(y)
    ts.prefetch(y, into="device")
    z = f(y)
    driver.cuStreamSynchronize(0)
    driver.late = ""
    assert not np.array_equal(z.array, 4 * x.array)


def adam(params: Any, state: Any, grads: Any) -> Any:
    made, kept = [], []
    for p, (m, v), g in zip(params, state, grads, strict=True):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        made.append(p - 0.1 * m / (ts.sqrt(v) + 1e-3))
        kept.append((m, v))
    return made, ts.offload(kept)


def draw(rng: Any, count: int = 6) -> Any:
    params = [normal(rng, 64, 80) for _ in range(count)]
    return params, [(ts.zeros_like(p), ts.zeros_like(p)) for p in params]


@LATE
def test_moments_lie_on_the_host_between_steps(late: str, driver: Any, rng: Any) -> None:
    """A step brings each moment ahead of its kernel and keeps few of them at once."""
    f, g = ts.jit(adam, donate=("params", "state")), ts.jit(adam)
    here, there = draw(rng), None
    there = ts.to(here, "cuda")
    ts.offload(there[1])
    for n in range(4):
        grads = [normal(rng, 64, 80) for _ in here[0]]
        here = g(*here, grads)
        driver.late = late if n else ""
        there = f(*there, ts.to(grads, "cuda"))
        assert all(m.offloaded and v.offloaded for m, v in there[1])
        driver.late = ""
    for a, b in zip(there[0] + [x for pair in there[1] for x in pair],
                    here[0] + [x for pair in here[1] for x in pair], strict=True):
        np.testing.assert_allclose(a.array, b.array, rtol=1e-5, atol=1e-6)
    schedule = f.traced(*there, ts.to(grads, "cuda")).executable.program.plan
    size = here[0][0].nbytes
    assert len(schedule.transfers) == 24 and f.specializations == 1
    assert schedule.temporary_bytes <= 8 * size  # of 24 moments, old and new
    listed = ts.plan(f)
    copies = [m for m in listed if m.verb in ("fetch", "offload") and "tensors" not in m.object]
    assert len(copies) == 24 and {(m.source, m.destination) for m in copies} == {
        ("host", "cuda:0"), ("cuda:0", "host")}
    assert all(m.nbytes == size and m.overlap == "compute" for m in copies)
    assert "test_movement.py" in str(listed)


def test_results_that_are_placed_on_the_host(rng: Any) -> None:
    x = normal(rng, 8, 8).cuda()
    f = ts.jit(lambda x: (ts.offload(x * 2.0), x + 1.0, ts.offload(x)))
    for _ in range(2):
        a, b, c = f(x)
        assert a.offloaded and not b.offloaded and c.offloaded and not x.offloaded
        np.testing.assert_array_equal(a.array, 2 * x.array)
        np.testing.assert_array_equal(c.array, x.array)
        np.testing.assert_array_equal((a + c).array, 3 * x.array)
    captured = ts.jit(lambda x: ts.offload(x * 2.0), capture_graph=True)
    for _ in range(3):
        y = captured(x)
        assert y.offloaded
        np.testing.assert_array_equal(y.array, 2 * x.array)
    assert f.effects == {"movement"}


def test_gradients_pass_a_place(rng: Any) -> None:
    x = normal(rng, 5)
    for where in ("cpu", "cuda"):
        g = ts.jit(ts.grad(lambda x: ts.sum(ts.offload(x * x) * 3.0)))(x.to(where))
        np.testing.assert_allclose(g.array, 6 * x.array, rtol=1e-6)


def test_tensors_of_the_host_stay(rng: Any) -> None:
    x = normal(rng, 5)
    assert ts.offload(x) is x and not x.offloaded
    with ts.prefetch(x, into="device"):
        assert x.device == "cpu"
    with pytest.raises(ts.ArgumentError, match="offload needs tensors"):
        ts.offload(3)
    with pytest.raises(ts.ArgumentError, match="plan takes a compiled function"):
        ts.plan(len)


def test_the_plan_lists_what_has_moved(rng: Any) -> None:
    x = normal(rng, 4, 4).cuda()
    state = {"m": x, "v": [normal(rng, 2).cuda()]}
    ts.offload(state)
    ts.prefetch(state["m"], into="device", overlap="none")
    with ts.device(ts.gpu), ts.prefetch(x, into="smem", overlap="compute"):
        pass
    rows = [(m.verb, m.object.split()[-2:], m.source, m.destination, m.nbytes, m.overlap)
            for m in ts.plan()]
    assert [r[0] for r in rows] == ["offload", "offload", "prefetch", "prefetch"]
    assert [r[2:] for r in rows] == [
        ("cuda:0", "host", 64, "compute"), ("cuda:0", "host", 8, "compute"),
        ("host", "cuda:0", 64, "none"), ("cuda:0", "smem", 64, "compute")]
    assert "m f32[4, 4]" in str(ts.plan()) and "test_movement.py" in str(ts.plan())


@LATE
def test_a_cache_leaves_and_comes_back(late: str, driver: Any, monkeypatch: Any, rng: Any) -> None:
    k = normal(rng, 1, 2, 3, 8)
    cache = ts.to(ts.kv_cache((1, 2, 12, 8)), "cuda").append(k.cuda(), k.cuda())
    want = ts.flash_attention(k.cuda(), cache).array
    gone = freed(driver, monkeypatch)
    driver.late = late
    pointer = cache._storage.K.memory.pointer
    cache = cache.offload()
    assert cache.place == "host" and cache._storage.K.offloaded
    driver.cuCtxSynchronize()
    offloaded.copy_streams(0).release()
    gc.collect()
    assert pointer in gone
    np.testing.assert_array_equal(ts.flash_attention(k.cuda(), cache).array, want)
    assert cache.place == "device"
    cache = cache.offload().prefetch()
    assert cache.place == "device"
    cache = cache.append(k.cuda(), k.cuda())
    assert np.array_equal(cache.K.array, np.concatenate([k.array] * 2, axis=2))
    assert [m.object.split()[0] for m in ts.plan()][:2] == ["KVCache.K", "KVCache.V"]


@pytest.mark.parametrize("donate", [(), ("cache",)])
def test_a_compiled_step_takes_an_offloaded_cache(donate: Any, rng: Any) -> None:
    @ts.jit(donate=donate)
    def step(cache: Any, k: ts.Tensor) -> Any:
        cache = cache.append(k, k)
        return ts.flash_attention(k, cache), cache.offload()

    here = ts.kv_cache((1, 2, 12, 8))
    there = ts.to(here, "cuda").offload()
    for _ in range(3):
        k = normal(rng, 1, 2, 2, 8)
        here = here.append(k, k)
        y, there = step(there, k.cuda())
        assert there.place == "host" and there.length == here.length
        np.testing.assert_allclose(y.array, ts.flash_attention(k, here).array, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(there._storage.K.array, here._storage.K.array)


def test_what_a_block_prefetches_is_read_through_a_pipeline(rng: Any) -> None:
    @ts.jit
    def f(x: ts.Tensor, w: ts.Tensor) -> ts.Tensor:
        with ts.prefetch(w, into="smem", overlap="compute"):
            return x @ w

    x, w = (normal(rng, 64, 64).cuda() for _ in range(2))
    plain = ts.jit(lambda x, w: x @ w)(x, w)
    np.testing.assert_array_equal(f(x, w).array, plain.array)
    (row,) = ts.plan(f)
    assert (row.verb, row.destination, row.nbytes) == ("prefetch", "smem", 4 * 64 * 64)
    stages = int(row.overlap.split(", ")[1].split()[0])
    assert row.overlap.startswith("compute, ") and stages >= 2


# --- where types say ----------------------------------------------------------------------------
def test_types_place_new_tensors(rng: Any) -> None:
    there, held = ts.f32 @ ts.device(ts.gpu), ts.f32 @ ts.host
    for make in (lambda t: ts.tensor([1.0, 2.0], t), lambda t: ts.zeros(2, t),
                 lambda t: ts.cast(ts.ones(2), t), lambda t: ts.param([1.0, 2.0], t)):
        assert make(there).device == make(ts.f32 @ ts.device("cuda:0")).device == "cuda:0"
        assert make(held).device == "cpu" and make(held).type == ts.as_type("f32")
        with ts.device("cuda"):
            x = make(held)
        assert x.device == "cuda:0" and x.offloaded and x.type == ts.as_type("f32")
        assert make(ts.f32 @ ts.device(ts.cpu)).device == "cpu"
    x = normal(rng, 3).cuda()
    assert ts.cast(x, held).offloaded and not x.offloaded
    assert ts.cast(x, ts.f32 @ ts.device("cpu")).device == "cpu"
    with pytest.raises(ts.UnsupportedTargetError, match="no device 'cuda:9' here"):
        ts.zeros(2, ts.f32 @ ts.device("cuda:9"))


def test_annotations_place_arguments_and_results(rng: Any) -> None:
    @ts.jit
    def step(m: ts.Tensor["N", ts.f32 @ ts.host], g: ts.Tensor["N", ts.f32 @ ts.device(ts.gpu)]
             ) -> ts.Tensor["N", ts.f32 @ ts.host]:
        return 0.9 * m + g

    m, want = ts.offload(ts.zeros(4).cuda()), np.zeros(4)
    for _ in range(3):
        g = normal(rng, 4)
        m, want = step(m, g), 0.9 * want + g.array
        assert m.offloaded and m.device == "cuda:0" and m.type == ts.as_type("f32")
        assert_close(m.array, want, "f32", n=6, scale=1)  # two roundings each time
    assert step.specializations == 1
    assert [t.kind for t in step.traced(m, g.cuda()).executable.program.plan.transfers] == [
        "fetch", "offload"]


def test_the_type_of_a_cache_places_it() -> None:
    kind = ts.KVCache["B", "H", "S_max", "D_h", ts.bf16]
    there = (kind @ ts.device(ts.gpu))(1, 2, 8, 4)
    assert there._storage.K.device == there._storage.V.device == "cuda:0"
    k = ts.ones((1, 2, 3, 4)).cuda()
    assert there.append(k, k).length == 3 and there.append(k, k).K.device == "cuda:0"
    assert (kind @ ts.device(ts.cpu))(1, 2, 8, 4)._storage.K.device == "cpu"
    with ts.device("cuda"):
        assert (kind @ ts.host)(1, 2, 8, 4).place == "host"


def test_the_pool_of_the_host_gives_back_what_it_keeps(driver: Any, monkeypatch: Any,
                                                       rng: Any) -> None:
    x = ts.offload(normal(rng, 30).cuda())
    assert np.array_equal((x + 0.0).array, x.array)
    (spare,) = [s for s in offloaded._SPARE_BLOCKS.values() if s]
    answers = iter([(2, 0)])
    plain = driver.cuMemHostAlloc
    monkeypatch.setattr(driver, "cuMemHostAlloc",
                        lambda n, flags: next(answers, None) or plain(n, flags))
    ts.offload(normal(rng, 50).cuda())
    assert not spare


@LATE
def test_the_state_of_an_optimizer_lies_on_the_host(late: str, driver: Any, rng: Any) -> None:
    opt = ts.optim.AdamW()

    def step(params: Any, state: Any, x: Any) -> Any:
        loss, grads = ts.value_and_grad(lambda p: ts.mean(ts.square(x @ p["w"] + p["b"])))(params)
        params, state = opt.update(params, grads, state, 1e-2)
        return params, state, loss

    def held(params: Any, state: Any, x: Any) -> Any:
        params, state, loss = step(params, state, x)
        return params, ts.offload(state), loss

    params = {"w": normal(rng, 64, 48), "b": normal(rng, 48)}
    here, there = (params, opt.init(params)), ts.to(params, "cuda")
    there = there, ts.offload(opt.init(there))
    f, g = ts.jit(held, donate=("params", "state")), ts.jit(step)
    for n in range(3):
        x = normal(rng, 16, 64)
        *here, want = g(*here, x)
        driver.late = late if n else ""
        *there, loss = f(*there, x.cuda())
        np.testing.assert_allclose(loss.item(), want.item(), rtol=1e-4)
    for k in params:
        np.testing.assert_allclose(there[0][k].array, here[0][k].array, rtol=1e-4, atol=1e-5)


# --- parts that are written ---------------------------------------------------------------------
PARTS: dict[str, Any] = {
    "row": 1, "last": -1, "rows": slice(1, 3), "part": (slice(None), slice(2, 4)), "all": ...,
    "one": (2, 3), "front": (..., 0), "none": slice(2, 2), "numpy": np.int64(2),
    "steps": slice(0, 4, 2), "back": slice(None, None, -1), "list": [0, 2], "tensor": (1, [0, 3])}


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8", "fp4_e2m1"])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_written_where_it_lies(part: str, dtype: str, driver: Any, monkeypatch: Any,
                                         rng: Any) -> None:
    x = ts.tensor(rng.integers(-3, 4, (4, 6)).astype(np.float32), dtype)
    there, pointer = x.cuda(), None
    there[...] = x
    for value in (2, ts.tensor(1.5), ts.ones(x.array[PARTS[part]].shape[-1:]).cuda()):
        counts = Copies(driver, monkeypatch)
        pointer = there.memory.pointer
        there[PARTS[part]] = value
        if dtype == "f32" and part in ("row", "rows", "part", "front"):
            assert counts.to_device <= 20 and counts.to_host == 0
        x[PARTS[part]] = value
        assert there.memory.pointer == pointer and there.array.tobytes() == x.array.tobytes()
    with pytest.raises((ts.TesseraError, TypeError)):
        there[PARTS[part]] = ts.ones((7, 7, 7))
    with pytest.raises(ts.TesseraError):
        there[9] = 1.0


def test_what_shares_memory_sees_a_write(rng: Any) -> None:
    x = normal(rng, 4, 4).cuda()
    same = ts.from_bytes(ts.as_bytes(x), "f32", (4, 4))
    x[1] = 7.0
    same[2] = 5.0
    assert (same.array == x.array).all() and x.array[1:3, 0].tolist() == [7.0, 5.0]


def test_pages_of_many_sequences(rng: Any) -> None:
    made = []
    for where in ("cpu", "cuda"):
        with ts.device(where):
            manager = ts.KVCacheManager(heads=2, head_size=4, pages=6, page_size=8)
        draw = np.random.default_rng(5)
        sequences = [manager.alloc() for _ in range(2)]
        for n in (5, 9, 1, 1):
            for seq in sequences:
                k, v = (ts.tensor(draw.standard_normal((2, n, 4)).astype(np.float32)).to(where)
                        for _ in range(2))
                seq.append(k, v)
        q = ts.tensor(draw.standard_normal((1, 2, 1, 4)).astype(np.float32)).to(where)
        y = ts.flash_attention(q, sequences[0])
        f = ts.jit(lambda q, cache: ts.flash_attention(q, cache))
        np.testing.assert_allclose(f(q, sequences[0]).array, y.array, rtol=1e-4, atol=1e-6)
        assert sequences[1].K.device == y.device == ("cuda:0" if where == "cuda" else "cpu")
        made.append((sequences[1].K.array, sequences[0].prune(last=7).V.array, y.array))
    for a, b in zip(*made, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
