"""Fully sharded data parallel: parameters are whole only while they are used."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from mesh import training
from mesh.launch import needs_mpi, results_of_all
from mesh.training import ROWS, held_bytes, mesh_of
from tessera.graph.simplify import simplify
from tessera.mesh.sharding import collective_order, control_flow
from tolerance import assert_close

PROGRAMS = Path(training.__file__)
LAYERS, WIDTH, BATCH = 6, 40, 202


@pytest.fixture
def all_are_long(monkeypatch):
    """Every parameter is gathered by itself: short ones go together."""
    monkeypatch.setattr(collective_order, "SHORT_BYTES", 0)


def model(rng: np.random.Generator, dtype: str = "f32") -> tuple[list, np.ndarray]:
    weights = [rng.normal(size=(WIDTH, WIDTH)) / np.sqrt(WIDTH) for _ in range(LAYERS)]
    return [ts.param(w, dtype) for w in weights], rng.normal(size=(BATCH, WIDTH)).astype("f")


def deep(weights: list, x: ts.Tensor) -> ts.Tensor:
    for w in weights:
        x = ts.tanh(x @ w)
    return ts.mean(x**2)


def whole_first(weights: list, x: ts.Tensor) -> ts.Tensor:
    """The same with every parameter gathered before the first use."""
    return deep([ts.dist.all_gather(w, "dp") for w in weights], x)


def peak_bytes(f: ts.graph.jit.JitFunction, *args) -> int:
    """What rank 0 holds at most beside the arguments."""
    graph = simplify(f.traced(*args).program.local(0).graph)
    given = sum(4 * int(np.prod(v.aval.shape)) for v in graph.inputs)
    return ts.debug.memory_timeline(graph).peak_bytes - given


@pytest.mark.row("DIST-42")
def test_gradients_equal_and_the_peak_is_that_of_one_layer(rng, all_are_long):
    mesh = mesh_of(dp=4)
    plain, x = model(rng)
    params, rows = ts.dist.fsdp(plain, mesh=mesh), ts.dist.distribute(x, ROWS, mesh=mesh)
    assert all(p.is_param and p.layout.describe() == "(dp, -) regather dp" for p in params)
    assert held_bytes(params, 0) == sum(p.nbytes for p in plain) / 4

    want = ts.grad(deep)(plain, ts.tensor(x))
    step, early = (ts.jit(ts.grad(f)) for f in (deep, whole_first))
    grads = step(params, rows)
    for g, w in zip(grads, want, strict=True):
        assert g.layout.describe() == "(dp, -)"
        assert_close(g.numpy(), w.numpy(), "f32", n=WIDTH)
    stored = [ts.dist.distribute(p, g.layout) for p, g in zip(params, grads, strict=True)]
    for g, w in zip(early(stored, rows), want, strict=True):
        assert_close(g.numpy(), w.numpy(), "f32", n=WIDTH)

    # each layer is gathered forward, all but the first once more backward; each gradient is split
    assert Counter(c.op for c in step.plan) == {"all_gather": 2 * LAYERS - 1,
                                                "reduce_scatter": LAYERS}
    peaks = peak_bytes(step, params, rows), peak_bytes(early, stored, rows)
    print(f"peak of rank 0: {peaks[0]} bytes, {peaks[1]} with all gathered first")
    layer = WIDTH * WIDTH * 4
    assert peaks[1] - peaks[0] > (LAYERS - 2) * layer


def test_a_narrow_type_is_gathered_before_it_is_widened(rng, all_are_long):
    mesh = mesh_of(dp=4)
    plain, x = model(rng, "bf16")
    params, rows = ts.dist.fsdp(plain, mesh=mesh), ts.dist.distribute(x, ROWS, mesh=mesh)
    step = ts.jit(ts.grad(deep))
    for g, w in zip(step(params, rows), ts.grad(deep)(plain, ts.tensor(x)), strict=True):
        assert_close(g.numpy(), w.numpy(), "f32", n=WIDTH)
    gathers = [c for c in step.plan if c.op == "all_gather"]
    assert len(gathers) == 2 * LAYERS - 1 and {c.dtype for c in gathers} == {"bf16"}
    assert {c.bytes for c in gathers} == {WIDTH * WIDTH * 2 * 3 // 4}


def test_the_mark_goes_with_the_tensor(rng):
    mesh = mesh_of(dp=2, tp=3)
    w = ts.dist.distribute(ts.param(rng.normal(size=(5, 7))), training.COLUMNS, mesh=mesh)
    (p,) = ts.dist.fsdp([w])
    assert p.layout.describe() == "(dp, tp) regather dp" and p.layout.regather == ("dp",)
    assert ts.dist.fsdp([p])[0].layout == p.layout == p.copy().layout
    assert p.parts[0].shape == (3, 3) and (p.numpy() == w.numpy()).all()

    x = ts.dist.distribute(rng.normal(size=(8, 5)).astype("f"), ROWS, mesh=mesh)
    product = ts.jit(lambda p, x: x @ p)
    y = product(p, x)
    assert [(c.op, c.axes) for c in product.plan] == [("all_gather", ("dp",))]
    assert y.layout.describe() == "(dp, tp)"
    assert_close(y.numpy(), x.numpy() @ w.numpy(), "f32", n=5)

    one = ts.jit(lambda p, x: x @ p)  # cheaper to add up a row of results, and yet it is gathered
    row = ts.dist.distribute(x.numpy()[:1], None, mesh=mesh)
    assert_close(one(p, row).numpy(), x.numpy()[:1] @ w.numpy(), "f32", n=5)
    assert [(c.op, c.axes) for c in one.plan] == [("all_gather", ("dp",))]

    captured = ts.jit(lambda x: x @ p)
    assert (captured(x).numpy() == y.numpy()).all()
    assert [(c.op, c.axes) for c in captured.plan] == [("all_gather", ("dp",))]
    halves = ts.jit(lambda p: p * 0.5)
    assert halves(p).layout.describe() == "(dp, tp)" and not halves.plan
    assert ts.dist.shard(p, training.COLUMNS).layout == w.layout


@pytest.mark.parametrize("longest", [0, 1 << 30])
def test_several_types_and_extents_go_in_one_message_with_the_same_bits(longest, rng, monkeypatch):
    """Extents that ranks do not divide, elements of 16 and 32 bits in one."""
    monkeypatch.setattr(collective_order, "SHORT_BYTES", longest)
    mesh = mesh_of(dp=3)
    plain = [ts.param(rng.normal(size=s), t) for s, t in (
        ((7, 11), "f32"), ((11,), "bf16"), ((11, 5), "bf16"), ((5, 3), "f32"))]
    x = rng.normal(size=(200, 7)).astype("f")

    def loss(ws, x):
        a, b, c, d = (ts.cast(w, "f32") for w in ws)
        return ts.mean((ts.tanh(x @ a + b) @ c @ d) ** 2)

    step = ts.jit(ts.value_and_grad(loss))
    value, grads = step(ts.dist.fsdp(plain, mesh=mesh), ts.dist.distribute(x, ROWS, mesh=mesh))
    want, slopes = ts.value_and_grad(loss)(plain, ts.tensor(x))
    assert_close(value.numpy(), want.numpy(), "f32", n=200)
    for g, w in zip(grads, slopes, strict=True):
        assert g.type == w.type and g.layout.describe()[:3] == "(dp"
        assert_close(g.numpy(), w.numpy(), str(g.dtype.name), n=200, scale=1.0)
    scatters = [c for c in step.plan if c.op == "reduce_scatter"]
    assert len([c for c in step.plan if c.op == "all_gather"]) == (1 if longest else 6)
    assert len(scatters) == (1 if longest else 4)


def positioned(params: dict, x: ts.Tensor) -> ts.Tensor:
    """x: [B, T, d]"""
    h = ts.layernorm(x + params["positions"], params["gain"], params["bias"])
    return ts.mean((ts.gelu(h @ params["up"]) @ params["down"] + x) ** 2)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dims", ["batch", "sequence"])
def test_a_batch_stays_as_it_lies_however_few_rows_a_rank_has(rng, rows, dims):
    """With one row to a rank positions of a sequence cost as much as the batch itself: it was
    split by positions from there on, and a GPT-2 of two layers on eight ranks had 70 collectives
    for 6. A sequence that the same axis splits is added to the positions that lie beside it."""
    mesh, T, d = mesh_of(dp=4), 24, 16
    shapes = {"positions": (T, d), "gain": (d,), "bias": (d,), "up": (d, 4 * d),
              "down": (4 * d, d)}
    plain = {k: ts.param(rng.normal(size=s) / 4, "f32") for k, s in shapes.items()}
    x = rng.normal(size=(4 * rows if dims == "batch" else 1, T, d)).astype("f")
    step = ts.jit(ts.value_and_grad(positioned))
    value, grads = step(ts.dist.fsdp(plain, mesh=mesh), ts.dist.distribute(
        x, ROWS if dims == "batch" else ts.ShardSpec((1,), ("dp",)), mesh=mesh))
    want, slopes = ts.value_and_grad(positioned)(plain, ts.tensor(x))
    assert_close(value.numpy(), want.numpy(), "f32", n=x.size)
    for k, g in grads.items():
        assert g.layout.describe()[:3] == "(dp"
        assert_close(g.numpy(), slopes[k].numpy(), "f32", n=x.size, scale=1.0)
    sent = [c for c in step.plan if c.op != "all_reduce"]
    assert [c.op for c in sent] == ["all_gather", "reduce_scatter"], step.plan
    small = 4 * (d * 4 * d * 2 + 2 * d) * 3 // 4  # in bytes, of which a rank gets three quarters
    assert sent[0].bytes == small + (4 * T * d * 3 // 4 if dims == "batch" else 0)


def recurrent(params: dict, x: ts.Tensor) -> ts.Tensor:
    """x: [T, B, d]"""
    h0 = ts.zeros((x.shape[1], params["u"].shape[0]))
    _, hs = ts.scan(lambda h, z: 2 * (ts.tanh(z + h @ params["u"]),), h0, x @ params["w"])
    return ts.mean(hs ** 2)


@pytest.mark.parametrize(("way", "room"), [("fsdp", 1 << 20), ("fsdp", 0), ("dp", 0)])
def test_what_a_loop_is_given_is_gathered_in_front_of_it(rng, monkeypatch, way, room):
    """And its gradient summed over ranks behind it: of a step of an LSTM over 32 tokens both had
    been sent in each iteration."""
    monkeypatch.setattr(control_flow, "KEPT_ON_HOSTS_BYTES", room)
    mesh, T = mesh_of(dp=4), 9
    plain = {k: ts.param(rng.normal(size=s) / 4, "f32") for k, s in (("w", (5, 12)),
                                                                     ("u", (12, 12)))}
    x = rng.normal(size=(T, 4, 5)).astype("f")
    params = ts.dist.fsdp(plain, mesh=mesh) if way == "fsdp" else {
        k: ts.dist.distribute(p, None, mesh=mesh) for k, p in plain.items()}
    step = ts.jit(ts.value_and_grad(recurrent))
    value, grads = step(params, ts.dist.distribute(x, ts.ShardSpec((1,), ("dp",)), mesh=mesh))
    want, slopes = ts.value_and_grad(recurrent)(plain, ts.tensor(x))
    assert_close(value.numpy(), want.numpy(), "f32", n=x.size)
    for k, g in grads.items():
        assert g.layout.unmarked() == params[k].layout.unmarked()
        assert_close(g.numpy(), slopes[k].numpy(), "f32", n=T * x.size, scale=1.0)
    inside = {(c.op, c.times) for c in step.plan if c.inside}
    assert inside == ({("all_gather", T)} if (way, room) == ("fsdp", 0) else set()), step.plan

    def sampled(p: dict, h: ts.Tensor) -> ts.Tensor:
        return ts.while_loop(lambda s: s[1] < T, lambda s: (ts.tanh(s[0] @ p["u"]), s[1] + 1),
                             (h, ts.tensor(0)))[0]

    h = rng.normal(size=(4, 12)).astype("f")
    decode = ts.jit(sampled)
    found = decode(params, ts.dist.distribute(h, ROWS, mesh=mesh))
    assert_close(found.numpy(), sampled(plain, ts.tensor(h)).numpy(), "f32", n=12 * T)
    assert [c.inside for c in decode.plan] == [room == 0] * (way == "fsdp"), decode.plan


def in_parts(params: dict, xs: ts.Tensor, how: str) -> dict:
    """A step of SGD by the sum of the gradients of three parts of a batch, the first extent."""
    slope = ts.grad(lambda p, x: ts.mean((ts.tanh(x @ p["w"]) @ p["u"]) ** 2))
    total = ts.map_tree(ts.zeros_like, params)

    def add(total: dict, x: ts.Tensor) -> dict:
        return ts.map_tree(lambda a, g: a + g, total, slope(params, x))

    if how == "scan":
        total = ts.scan(lambda t, x: (add(t, x), None), total, xs)[0]
    else:
        for i in range(3):
            total = add(total, xs[i])
    return ts.map_tree(lambda p, g: p - 0.1 * g, params, total)


@pytest.mark.parametrize("how", ["scan", "for"])
@pytest.mark.parametrize("way", ["dp", "fsdp", "dp, clipped"])
def test_gradients_of_several_parts_of_a_batch_are_summed_over_ranks_once(rng, how, way):
    """The parameters come back as they lay. Where they are split, gradients are scattered for each
    part: no rank then has whole ones."""
    mesh = mesh_of(dp=4)
    plain = {k: ts.param(rng.normal(size=s) / 4, "f32") for k, s in (("w", (16, 24)),
                                                                     ("u", (24, 5)))}
    x = rng.normal(size=(3, 200, 16)).astype("f")
    params = ts.dist.fsdp(plain, mesh=mesh) if way == "fsdp" else {
        k: ts.dist.distribute(p, None, mesh=mesh) for k, p in plain.items()}

    def fn(params: dict, xs: ts.Tensor) -> dict:
        new = in_parts(params, xs, how)
        return ts.optim.clip_by_global_norm(new, 1.0)[0] if "clipped" in way else new

    step = ts.jit(fn)
    got = step(params, ts.dist.distribute(x, ts.ShardSpec((1,), ("dp",)), mesh=mesh))
    want = fn(plain, ts.tensor(x))
    for k, p in got.items():
        assert p.layout == params[k].layout.unmarked(), k
        assert_close(p.numpy(), want[k].numpy(), "f32", n=600, scale=1.0)
    sums = [c for c in step.plan if c.op in ("all_reduce", "reduce_scatter") and c.elements > 1]
    if way != "fsdp":
        assert [(c.op, c.times, c.inside) for c in sums] == [("all_reduce", 1, False)], step.plan
    else:
        assert {c.op for c in sums} == {"reduce_scatter"}, step.plan
        assert sum(c.times * c.bytes for c in sums) == 3 * 4 * (16 * 24 + 24 * 5) * 3 // 4


def test_what_is_too_small_stays_whole(rng):
    mesh = mesh_of(dp=4)
    params = ts.dist.fsdp({"b": ts.param(rng.normal(size=(3,))), "s": ts.param(1.5)}, mesh=mesh)
    assert {k: p.layout.describe() for k, p in params.items()} == {"b": "(-)", "s": "()"}


def test_errors():
    mesh = mesh_of(dp=2)
    with pytest.raises(ts.AxisError, match="has no axis 'tp'"):
        ts.dist.fsdp([ts.ones(4)], axis="tp", mesh=mesh)
    for odd, kind in ((1.0, "float"), (np.ones(4, np.float32), "ndarray")):
        with pytest.raises(ts.ArgumentError, match=f"parameter 'a.1' is {kind}, not a tensor"):
            ts.dist.fsdp({"a": [ts.ones(4), odd]}, mesh=mesh)
    with pytest.raises(ts.ArgumentError, match="no parameters among the 2 leaves"):
        ts.dist.fsdp([ts.tensor([1, 2]), 3], mesh=mesh)
    with pytest.raises(ts.ArgumentError, match="only what is split over an axis"):
        ts.dist.Layout(mesh, (ts.dist.Split(),), regather=("dp",))


def test_what_is_no_parameter_is_repeated_or_stays_as_it_is(rng):
    mesh = mesh_of(dp=2)
    ids, table = ts.tensor([3, 1, 2, 0]), np.arange(4)
    spread = ts.dist.distribute(ts.ones(4), ts.ShardSpec(("row",), ("dp",)), mesh=mesh)
    params = ts.dist.fsdp([ts.ones(4), ids, table, 3, "gelu", True], mesh=mesh)
    assert [p.layout.describe() for p in params[:2]] == ["(dp) regather dp", "(-)"]
    assert params[2] is table and params[3:] == [3, "gelu", True]
    assert params[1].tolist() == ids.tolist()
    marked = ts.dist.fsdp([ts.param(ts.ones(4)), ts.ones(4), 0.5, table, spread], mesh=mesh)
    assert [p.layout.describe() for p in marked[:2]] == ["(dp) regather dp", "(-)"]
    assert marked[2] == 0.5 and marked[3] is table and marked[4] is spread


def test_trees_of_more_than_parameters_train_as_the_oracle():
    assert set(ts.dist.simulate(training.mixed, 4)) == {training.mixed()}


@needs_mpi
def test_mpi_trains_such_trees_to_the_bits_of_one_process():
    found = results_of_all(PROGRAMS, training.COMPARED, 4)["mixed"]
    assert found == dict.fromkeys(range(4), training.mixed())


@pytest.mark.row("DIST-42")
def test_simulated_ranks_train_beside_tensor_parallel_layers():
    texts = [text.split() for text in ts.dist.simulate(training.fsdp, 4)]
    assert len({digest for digest, *_ in texts}) == 1
    split = sum(training.problem()[k].nbytes for k in ("w1", "b", "w2"))
    assert sum(int(held) for _, held, _ in texts) >= split


@needs_mpi
@pytest.mark.row("DIST-42")
def test_mpi_trains_to_the_bits_of_the_simulation():
    found = results_of_all(PROGRAMS, training.COMPARED, 4)["fsdp"]
    assert found == dict(enumerate(ts.dist.simulate(training.fsdp, 4)))
