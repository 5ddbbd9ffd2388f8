"""Functions of distributed tensors on GPUs: the local programs, with their collectives inside."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from fake_nccl import nccl as nccl
from lowering_cases import apart as apart
from tessera import config
from tessera.graph import host_loop
from tessera.mesh import placement
from tessera.mesh.sharding import compare_programs, sharded_graph
from tessera.runtime import device as devices
from tolerance import assert_close

DEVICES = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
SPLIT = {"rows": ts.ShardSpec(("row",), ("x",)), "columns": ts.ShardSpec(("col",), ("x",)),
         "whole": ts.ShardSpec(replicate=True)}


@pytest.fixture
def gpus(gpu, apart, monkeypatch):
    """Simulated ranks compute on GPUs."""
    monkeypatch.setattr(placement, "REAL", {"local"})
    monkeypatch.setattr(sharded_graph, "_PROGRAMS", {})
    placement._device_number.cache_clear()
    yield gpu
    sharded_graph._PROGRAMS.clear()
    gc.collect()  # their memory goes while there is a driver to give it back to


def compute_on_hosts(monkeypatch) -> None:
    """From here on simulated ranks do, as they do without these fixtures."""
    monkeypatch.setattr(placement, "REAL", set())
    monkeypatch.setattr(sharded_graph, "_PROGRAMS", {})


def on_ranks(n: int, program: Callable[[Any], Any]) -> list:
    mesh = ts.dist.mesh(DEVICES[:n], axes="x")
    return ts.dist.simulate(lambda: program(mesh), mesh)


def values(rng: np.random.Generator, *shapes: tuple) -> list[np.ndarray]:
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def placed(mesh: Any, x: np.ndarray, how: str, kind: str = "f32") -> ts.Tensor:
    return ts.dist.distribute(ts.tensor(x, kind), SPLIT[how], mesh=mesh)


@pytest.mark.parametrize("n", [2, 3])
def test_parts_lie_on_the_gpu_from_the_beginning(gpus, nccl, rng, n):
    (X,) = values(rng, (5, 4))

    def program(mesh):
        x, y = placed(mesh, X, "rows"), ts.dist.tensor((5, 4), SPLIT["rows"], mesh, init=1.0)
        assert x.local.device == y.local.device == (x + y).local.device == "cuda:0"
        np.testing.assert_array_equal(x.numpy(), X)
        return (x + y).numpy()

    for y in on_ranks(n, program):
        np.testing.assert_array_equal(y, X + 1)


@pytest.mark.parametrize("route", ["nccl", "host"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_an_mlp_and_its_gradient(gpus, request, rng, n, route):
    by = request.getfixturevalue("nccl") if route == "nccl" else None
    X, W, V = values(rng, (6, 8), (8, 12), (12, 5))

    def loss(w, v, x):
        return ts.mean(ts.square(ts.gelu(x @ w) @ v))

    want = ts.value_and_grad(loss, argnums=(0, 1))(ts.tensor(W), ts.tensor(V), ts.tensor(X))

    def program(mesh):
        step = ts.jit(ts.value_and_grad(loss, argnums=(0, 1)))
        args = (placed(mesh, W, "columns"), placed(mesh, V, "rows"), placed(mesh, X, "whole"))
        with ts.dist.traffic() as sent:
            made, grads = step(*args)
        assert all(g.local.place == 0 for g in grads)
        return made.numpy(), [g.numpy() for g in grads], str(step.plan), len(sent)

    for made, grads, plan, _ in on_ranks(n, program):
        assert_close(made, want[0].numpy(), "f32", 100)
        for g, w in zip(grads, want[1], strict=True):
            assert_close(g, w.numpy(), "f32", 100)
        assert f"all_reduce over x: {plan.split(': ')[1].split()[0]} bytes through" in plan
        assert ("through NCCL" if route == "nccl" else "through the host") in plan
    if by is not None:
        assert {what for _, what, _ in by.calls} >= {"all_reduce"}


@pytest.mark.parametrize("kind", ["f32", "bf16", "int32"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_change_of_layout_has_the_bits_of_the_host(gpus, nccl, monkeypatch, rng, n, kind):
    (X,) = values(rng, (7, 9))

    def program(mesh):
        x, out = placed(mesh, 9 * X, "rows", kind), []
        for how in ("columns", "whole", "rows"):
            x = ts.shard(x, SPLIT[how])
            out.append(x.numpy())
        w = placed(mesh, 9 * X.T, "columns", kind)  # contracted along what is split: terms
        if kind != "int32":
            out += [ts.matmul(placed(mesh, 9 * X.T, "columns", kind), placed(mesh, X, "rows", kind)
                              ).numpy(), ts.sum(w, axis=1).numpy()]
        out += [ts.max(w, axis=1).numpy(), ts.min(w).numpy()]
        return out

    got = on_ranks(n, program)
    compute_on_hosts(monkeypatch)
    for mine, host in zip(got, on_ranks(n, program), strict=True):
        for a, b in zip(mine, host, strict=True):
            if kind == "int32":
                np.testing.assert_array_equal(a, b)
            else:
                assert_close(a, np.asarray(b, np.float64), kind, 9)


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("n", [2, 3])
def test_changes_of_layout_inside_a_program(gpus, nccl, rng, n, kind):
    X, W = values(rng, (9, 10), (10, 7))
    exact, wide = (ts.tensor(a, kind).numpy().astype(np.float64) for a in (X, W))

    def program(mesh):
        x, w = placed(mesh, X, "rows", kind), placed(mesh, W, "rows", kind)

        @ts.jit
        def moved(x, w):
            columns = ts.shard(x, SPLIT["columns"])
            return (columns, ts.shard(columns, SPLIT["whole"]), ts.shard(columns, SPLIT["rows"]),
                    columns @ w, ts.max(columns, axis=1))

        found = [[y.numpy().astype(np.float64) for y in moved(x, w)] for _ in range(3)]
        return found, moved._last.program.local(ts.dist.rank()).no_graph

    for found, why in on_ranks(n, program):
        assert not why
        for *same, product, most in found:
            for y in same:
                np.testing.assert_array_equal(y, exact)
            assert_close(product, exact @ wide, kind, 10)
            np.testing.assert_array_equal(most, exact.max(1))


def test_ranks_compare_a_program_once(gpus, nccl, rng, monkeypatch):
    compared, agree = [], compare_programs.agree
    monkeypatch.setattr(compare_programs, "agree", lambda *a: compared.append(1) or agree(*a))
    (X,) = values(rng, (4, 6))

    def program(mesh):
        f, x = ts.jit(lambda x: ts.sum(x)), placed(mesh, X, "rows")
        return [f(x) for _ in range(4)]

    on_ranks(2, program)
    assert len(compared) == 2  # each rank, once
    compared.clear()
    with config.scope(comm_check="each"):
        on_ranks(2, program)
    assert len(compared) == 8


def test_the_schedule_says_how_a_collective_goes(gpus, nccl, rng):
    (X,) = values(rng, (4, 6))

    def program(mesh):
        x, f = placed(mesh, X, "rows"), ts.jit(lambda x: ts.sum(x * 2))
        f(x)
        return f._last.program.local(ts.dist.rank()).describe()

    text = on_ranks(2, program)[0]
    assert "form nccl: NCCL, between the ranks' GPUs" in text and "no CUDA graph" not in text


def test_ranks_that_share_a_gpu_say_so_in_the_schedule(gpus, rng):
    (X,) = values(rng, (4, 6))

    def program(mesh):
        x, f = placed(mesh, X, "rows"), ts.jit(lambda x: ts.sum(x * 2))
        f(x)
        return f._last.program.local(ts.dist.rank()).describe()

    text = on_ranks(2, program)[0]
    assert "form host: the host, of copies: messages between the ranks" in text
    assert "no CUDA graph, because mesh_rank_sums sends between ranks by way of the host" in text


def test_calls_are_cuda_graphs_with_their_collectives(gpus, nccl, rng):
    X, W, V = values(rng, (6, 8), (8, 12), (12, 8))

    def program(mesh):
        f = ts.jit(lambda x, w, v: x + ts.gelu(x @ w) @ v)
        w, v = placed(mesh, W, "columns"), placed(mesh, V, "rows")
        x, found = placed(mesh, X, "whole"), []
        for _ in range(6):
            x = f(x, w, v)
            found.append(x.numpy())
        return found, f.capture

    f, x = ts.jit(lambda x, w, v: x + ts.gelu(x @ w) @ v), ts.tensor(X)
    want = [(x := f(x, ts.tensor(W), ts.tensor(V))).numpy() for _ in range(6)]
    for found, captured in on_ranks(2, program):
        assert captured.startswith("on: ") and captured.endswith("in one launch")
        for a, b in zip(found, want, strict=True):
            assert_close(a, b, "f32", 12, scale=np.abs(b).max() * 8)
    assert gpus.driver.graph_launches


def test_random_numbers_are_those_of_the_host(gpus, nccl, monkeypatch):
    def program(mesh):
        ts.random.seed(3)
        x = ts.dist.tensor((9, 1000), SPLIT["rows"], mesh, init=1.0)
        y = ts.dist.tensor((9, 1000), SPLIT["columns"], mesh, init=1.0)
        f = ts.jit(lambda x: ts.dropout(x, 0.5))
        return [f(z).numpy() for z in (x, x, y, y)]

    got = on_ranks(2, program)
    compute_on_hosts(monkeypatch)
    for mine, host in zip(got, on_ranks(2, program), strict=True):
        for a, b in zip(mine, host, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_mesh_of_one_gpu_is_the_one_that_it_names(gpus, monkeypatch):
    monkeypatch.setattr(placement, "REAL", {"single"})
    monkeypatch.setattr(devices, "device_count", lambda: 2)
    assert placement.gpu_of(ts.dist.mesh(["cuda:1"])) == 1
    with pytest.raises(ts.UnsupportedTargetError, match="cuda:2, and this machine has 2 GPUs"):
        ts.dist.tensor((4,), None, ts.dist.mesh(["cuda:2"]))


def test_a_mesh_of_gpus_where_there_is_none_says_what_to_do(no_gpu, monkeypatch):
    placement._device_number.cache_clear()
    with pytest.raises(ts.UnsupportedTargetError, match="names GPUs .*, and rank 0 has none"):
        ts.dist.tensor((4,), None, ts.dist.mesh(["cuda:0"]))


@pytest.mark.parametrize("mode", ["raise", "flag"])
def test_a_bad_value_is_told_by_the_rank_that_made_it(gpus, nccl, rng, mode):
    (X,) = values(rng, (4, 6))
    X = np.abs(X) + 1
    X[3, 2] = -1.0  # of rank 1

    def program(mesh):
        x, f = placed(mesh, X, "rows"), ts.jit(lambda x: ts.sum(ts.log(x)))
        with ts.debug.numerics(mode):
            y = f(x)
            return np.isnan(y.numpy()).all(), str(ts.debug.flags())

    if mode == "raise":
        with pytest.raises(ts.NumericsError, match="log") as info:
            on_ranks(2, program)
        assert info.value.where.file == __file__ and "rank 1" in str(info.value.__notes__)
        assert "in <lambda>, call 1, random step 0, rank 1" in str(info.value)
    else:
        first, second = on_ranks(2, program)
        assert first[0] and second[0] and "log" in second[1]


def test_checkpoints_go_between_gpus_and_hosts(gpus, nccl, monkeypatch, rng, tmp_path):
    X, W = values(rng, (5, 4), (3, 6))

    def tree(mesh, x, w):
        return {"x": placed(mesh, x, "rows"), "w": placed(mesh, w, "columns", "bf16")}

    def restored(mesh):
        like = tree(mesh, np.zeros_like(X), np.zeros_like(W))
        found = ts.checkpoints.load(tmp_path / "gpus").tree(like)
        return {k: v.numpy() for k, v in found.items()}, found["x"].local.place

    on_ranks(2, lambda mesh: ts.checkpoints.save(tmp_path / "gpus", tree(mesh, X, W)))
    again = on_ranks(4, restored)
    compute_on_hosts(monkeypatch)
    host = on_ranks(3, restored)
    for place, found in ((0, again), (-1, host)):
        for made, at in found:
            assert at == place
            np.testing.assert_array_equal(made["x"], X)
            np.testing.assert_array_equal(made["w"], ts.tensor(W, "bf16").numpy())


@pytest.mark.parametrize("kind", ["f32", "bf16", "int32", "fp8_e4m3"])
@pytest.mark.parametrize("n", [2, 3])
def test_boxes_go_between_ranks(gpus, nccl, rng, n, kind):
    """Slices, joins and padding along what is split, and other cuts of it."""
    X = np.round(9 * rng.standard_normal((13, 5))).astype(np.float32)

    def boxes(x):
        return (x[2:9], ts.concatenate([x[5:], x], axis=0), ts.pad(x, ((3, 2), (0, 0))),
                ts.roll(x, 4, axis=0))

    want = [y.numpy().astype(np.float64) for y in boxes(ts.tensor(X, kind))]

    def program(mesh):
        x, f = placed(mesh, X, "rows", kind), ts.jit(boxes)
        found = [[y.numpy().astype(np.float64) for y in f(x)] for _ in range(3)]
        dealt = ts.dist.distribute(x, ts.dist.Cyclic(("x",), 2), mesh=mesh)
        return found, dealt.numpy().astype(np.float64), str(f.plan), f.capture

    for found, dealt, plan, captured in on_ranks(n, program):
        for made in found:
            for a, b in zip(made, want, strict=True):
                np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(dealt, ts.tensor(X, kind).numpy().astype(np.float64))
        assert "permute over x" in plan and "through the host" not in plan
        assert captured.startswith("on: ")


def test_batches_that_are_sent_need_no_graph_of_their_own(gpus, nccl, rng):
    """NCCL reads an input itself, and each call brings another: it is copied to one place."""
    batches = values(rng, *[(4, 6)] * 12)

    def program(mesh):
        f = ts.jit(lambda x: ((y := ts.shard(x, SPLIT["whole"])) @ y.T @ y, y * 2, y + 1, y - 1,
                              y * y, y / 2))
        kept = [placed(mesh, x, "rows") for x in batches]
        found = [f(x)[1].numpy() for x in kept]
        repeated = f._last.program.local(ts.dist.rank())._workspace.repeated
        return found, repeated.steady, repeated.graphs.stopped, f.capture

    for found, steady, stopped, captured in on_ranks(2, program):
        assert not stopped and len(steady) == 1 and captured.startswith("on: ")
        for x, y in zip(batches, found, strict=True):
            np.testing.assert_array_equal(y, 2 * x)


@pytest.mark.parametrize("n", [2, 3])
def test_pmap_maps_rows_where_they_lie(gpus, rng, n):
    X, W = values(rng, (2 if n > 2 else 7, 4), (4, 3))  # of 3 ranks one has none

    def program(mesh):
        f = ts.pmap(lambda r, *, w: (ts.tanh(r @ w), ts.sum(r)), donate={0}, mesh=mesh)
        whole, there = ts.tensor(X), ts.tensor(X).to("cuda")
        found = [f(x, w=ts.tensor(W)) for x in (placed(mesh, X, "columns"), whole, there)]
        for x in (whole, there):
            with pytest.raises(ts.ArgumentError, match="donated to pmap"):
                x.numpy()
        assert all(y.local.place == 0 for pair in found for y in pair)
        return [[y.numpy() for y in pair] for pair in found]

    for found in on_ranks(n, program):
        for y, total in found:
            assert_close(y, np.tanh(X.astype(np.float64) @ W), "f32", 4)
            assert_close(total, X.astype(np.float64).sum(1), "f32", 4)


def test_parts_are_offloaded_and_come_back(gpus, nccl, rng):
    (X,) = values(rng, (256, 256))

    def program(mesh):
        f, found = ts.jit(lambda x: x @ x.T), []
        x = placed(mesh, X, "rows")
        for _ in range(3):
            assert ts.offload({"x": x})["x"] is x and x.local.offloaded
            found.append(f(x).numpy())
        ts.prefetch(ts.offload(x), into="device")
        assert not x.local.offloaded
        return found, (x + x).numpy()

    for found, twice in on_ranks(2, program):
        np.testing.assert_array_equal(twice, 2 * X)
        for y in found:
            assert_close(y, X.astype(np.float64) @ X.T, "f32", n=256, scale=np.abs(X) @ np.abs(X.T))


@pytest.mark.parametrize("how", ["rows", "columns"])
def test_a_recurrent_network(gpus, nccl, monkeypatch, rng, how):
    """Sequences split over ranks: iterations are launches of each rank's graph. A weight split over
    them: what they send stands in the loop, which the host launches."""
    monkeypatch.setattr(host_loop, "LONG", 0)
    X, H, W = values(rng, (5, 4, 8), (4, 8), (8, 8))
    batch = ts.ShardSpec((1,), ("x",))

    def loss(w, h, x):
        last, states = ts.scan(lambda h, x: (h := ts.tanh(h @ w * 0.3 + x), h), h, x)
        return ts.mean(ts.square(states)) + ts.sum(last)

    want = ts.value_and_grad(loss)(ts.tensor(W), ts.tensor(H), ts.tensor(X))

    def program(mesh):
        x = ts.dist.distribute(ts.tensor(X), batch if how == "rows" else SPLIT["whole"], mesh=mesh)
        h = placed(mesh, H, "rows" if how == "rows" else "whole")
        w = placed(mesh, W, "whole" if how == "rows" else "columns")
        step = ts.jit(ts.value_and_grad(loss))
        return [(y.numpy(), g.numpy()) for y, g in (step(w, h, x) for _ in range(3))], step.capture

    for made, capture in on_ranks(2, program):
        for y, g in made:
            assert_close(y, want[0].numpy(), "f32", 200)
            assert_close(g, want[1].numpy(), "f32", 200, scale=np.abs(want[1].numpy()).max())
        assert "in one launch" in capture if how == "rows" else "host launches" in capture


@pytest.mark.parametrize("way", ["whole", "fsdp"])
@pytest.mark.parametrize("how", ["scan", "for"])
def test_gradients_of_parts_of_a_batch_and_what_a_loop_is_given(gpus, nccl, rng, how, way):
    """Summed over ranks behind the last part where parameters are whole; a loop's parameters are
    gathered in front of it."""
    X, W, U = values(rng, (3, 8, 6), (6, 10), (10, 10))

    def step(p, xs):
        def loss(p, x):
            h = ts.scan(lambda h, _: (ts.tanh(h @ p["u"]), None), x @ p["w"], None, length=4)[0]
            return ts.mean(h ** 2)

        def add(total, x):
            return ts.map_tree(lambda a, g: a + g, total, ts.grad(loss)(p, x))

        total = ts.map_tree(ts.zeros_like, p)
        if how == "scan":
            total = ts.scan(lambda t, x: (add(t, x), None), total, xs)[0]
        else:
            for i in range(3):
                total = add(total, xs[i])
        return ts.map_tree(lambda p, g: p - 0.5 * g, p, total)

    want = step({"w": ts.tensor(W), "u": ts.tensor(U)}, ts.tensor(X))

    def program(mesh):
        plain = {"w": ts.param(W), "u": ts.param(U)}
        params = ts.dist.fsdp(plain, "x", mesh) if way == "fsdp" else {
            k: placed(mesh, v.numpy(), "whole") for k, v in plain.items()}
        xs = ts.dist.distribute(X, ts.ShardSpec((1,), ("x",)), mesh=mesh)
        run = ts.jit(step)
        for _ in range(2):  # step by step, and recorded
            made = run(params, xs)
        return {k: v.numpy() for k, v in made.items()}, run.plan

    for made, plan in on_ranks(2, program):
        for k, v in made.items():
            assert_close(v, want[k].numpy(), "f32", 100)
        inside = {c.op for c in plan if c.inside}  # of each part of the batch
        assert inside == ({"reduce_scatter"} if (way, how) == ("fsdp", "scan") else set()), plan
        if way == "whole":
            assert [c.op for c in plan] == ["all_reduce"], plan
