"""Rows CORE, TILE and DIST of meshes as objects, and of programs that run on one of 72."""

from __future__ import annotations

import re
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import guide
import tessera as ts
from mesh import example
from tessera import KVCache, accum, bf16, f32
from tessera.__main__ import main
from tessera.planning.fabric import bus_factor

S = ts.ShardSpec
CUDA = [f"cuda:{i}" for i in range(72)]


# --- the object ------------------------------------------------------------------------------
@pytest.mark.row("TILE-77")
@pytest.mark.parametrize("axes, shape", [(("dp", "tp", "pp"), (4, 9, 2)), (("x",), (72,))])
def test_a_mesh_is_its_devices_in_order(axes, shape):
    mesh = ts.dist.mesh(devices=CUDA, axes=axes, shape=shape)
    assert list(mesh.devices) == CUDA and len(mesh.devices) == mesh.size()
    for place in np.ndindex(shape):
        assert mesh.devices[mesh.rank(place)] == f"cuda:{np.ravel_multi_index(place, shape)}"
    assert list(mesh.sub(**{axes[-1]: 1}).devices) == CUDA[1::shape[-1]]


@pytest.mark.row("CORE-23")
def test_72_devices_are_one_space_of_shards(rng):
    """Every rank's place and part, in one process that has none of the devices."""
    mesh = ts.dist.mesh(devices=CUDA, axes=("dp", "tp", "pp"), shape=(4, 9, 2))
    assert [mesh.rank(mesh.coords(r)) for r in range(72)] == list(range(72))
    assert len({mesh.coords(r) for r in range(72)}) == 72
    shape = (int(rng.integers(4, 40)), int(rng.integers(9, 90)))
    layout = S(("row", "col"), ("dp", "tp")).resolve(mesh, 2)
    held: Counter = Counter()
    for rank in range(72):
        index = ts.dist.indices(layout, shape, rank)
        assert index.shape == ts.dist.local_shape(layout, shape, rank)
        held.update(index.ravel().tolist())
        twin = mesh.rank((*mesh.coords(rank)[:2], 1 - mesh.coords(rank)[2]))
        assert (ts.dist.indices(layout, shape, twin) == index).all()  # pp repeats it
    assert held == dict.fromkeys(range(int(np.prod(shape))), 2)
    x = ts.dist.tensor(shape, layout, mesh, init=lambda i, j: i * shape[1] + j)
    for rank, part in x.parts.items():
        assert (part.array == ts.dist.indices(layout, shape, rank)).all()


# --- four kinds of annotation -----------------------------------------------------------------
@pytest.mark.row("CORE-13")
def test_numerics_movement_state_and_sharding_are_in_the_graph(rng):
    """A block of a transformer with a cache, on a mesh; and it computes what it does alone."""
    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))
    half, D, H = bf16 @accum(f32), 16, 2
    kind = KVCache["B", "H", "S", "D_h", bf16]

    @ts.jit
    def transformer_block(x, w, cache: kind):
        def heads(name):
            y = ts.cast(x, half).reshape(2, D) @ ts.cast(w[name], half)
            return ts.cast(y, f32).reshape(2, 1, H, D // H).swapaxes(1, 2)

        cache = cache.append(heads("k"), heads("v"))
        with ts.prefetch(cache, into="smem", overlap="compute"):
            y = ts.flash_attention(heads("q"), cache)
        y = ts.cast(y.reshape(2, D), half) @ ts.cast(w["out"], half)
        return x + ts.cast(y, f32).reshape(2, 1, D), cache

    a = {k: rng.standard_normal((D, D)).astype(np.float32) / 4 for k in ("q", "k", "v", "out")}
    x = rng.standard_normal((2, 1, D)).astype(np.float32)
    columns, rows = S(("col",), ("tp",)), S(("row",), ("tp",))
    w = {k: ts.dist.distribute(v, rows if k == "out" else columns, mesh=mesh)
         for k, v in a.items()}
    y, _ = transformer_block(
        ts.dist.distribute(x, S(("row",), ("dp",)), mesh=mesh), w, kind(2, H, 8, D // H))
    text = transformer_block.inspect_ir("graph")
    assert "bf16 @accum(f32)[2, 1, 16] = cast(" in text  # a policy
    assert "move(" in text and "verb='prefetch'" in text and "!movement" in text
    assert "state(" in text and "verb='append'" in text and "!state" in text
    assert "(dp, tp): f32[2, 16] = matmul(" in text and "all_reduce over tp" in text
    plain, _ = transformer_block(ts.tensor(x), {k: ts.tensor(v) for k, v in a.items()},
                                 kind(2, H, 8, D // H))
    np.testing.assert_allclose(y.numpy(), plain.numpy(), atol=0.05)


# --- the chapter -----------------------------------------------------------------------------
@pytest.mark.row("DIST-47")
def test_the_example_of_the_chapter_runs_on_72_simulated_ranks():
    """Its lines as a program of each rank, and in one process that plays all of them."""
    page = (Path(guide.ROOT) / "docs" / "guide" / "rack.md").read_text()
    blocks = [b.text for b in guide.blocks_of(page) if b.words == ("python",)]
    assert "axes=(\"dp\", \"tp\"), shape=(8, 9)" in blocks[0] and "def step" in blocks[1]
    code = compile("\n".join(blocks[:2]), "example.py", "exec")

    def program():
        space: dict = {"__name__": "__main__", "print": lambda *shown: None}
        exec(code, space)
        plan = [(e.op, e.axes, e.bytes) for e in space["step"].plan]
        return space["losses"], space["up"].local.shape, plan

    losses, _, plan = program()
    found = ts.dist.simulate(program, 72)
    assert all((f[0], f[2]) == (losses, plan) for f in found)
    assert [f[1][1] for f in found[:9]] == [29] * 4 + [28] * 5
    assert {(op, axes) for op, axes, _ in plan} == {
        ("all_reduce", ("tp",)), ("all_reduce", ("dp",))}
    assert losses[0] > losses[1] > losses[2]


# --- the training example, planned -----------------------------------------------------------
class TestThePlanOfTheExample:
    """What `python -m tessera plan examples/train.py` calls."""

    @pytest.mark.row("DIST-47")
    def test_it_has_the_exchanges_of_a_step(self, monkeypatch):
        train, transformer = example.modules()
        c = transformer.Config(d=32, layers=1, heads=4, T=16, B=8, mesh="dp=2,tp=2")
        mesh = c.grid
        monkeypatch.setattr(train, "PLANNED", c)
        f, arguments = train.plan(mesh)
        planned = ts.dist.plan_report(f, *arguments)
        run, model = train.new_run(c), train.Model(c)
        tokens = np.zeros((c.B, c.T), np.int64)
        model.advance(run, transformer.place_batch(c, (tokens, tokens)), c.lr)
        meant, found = Counter(), Counter()
        for e in model.step.plan:
            meant[e.op, e.axes, e.bytes] += e.times
        for e in planned.exchanges:
            sent = round(e.bytes * bus_factor(e.op, mesh.size(e.axes)))
            found[e.op, e.axes, sent] += e.count
        assert found == meant and len(meant) >= 3
        held = [t.parts[0].nbytes for t in ts.optim.named_params(run.params[0]).values()]
        assert planned.memory["parameters"] == sum(held)
        moments = sum(t.parts[0].nbytes for name in ("m", "v")
                      for t in run.state[0][name].values())
        assert planned.memory["optimizer"] == moments + 8  # the step

    def test_it_allocates_none_of_the_weights(self, monkeypatch):
        train, transformer = example.modules()
        c = transformer.Config(d=8192, layers=1, heads=8, T=2048, B=72)
        monkeypatch.setattr(train, "PLANNED", c)
        mesh = ts.dist.mesh(CUDA, ("dp", "tp"), (9, 8), topology="nvl72")
        tracemalloc.start()
        try:
            f, arguments = train.plan(mesh)
            planned = ts.dist.plan_report(f, *arguments)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert planned.memory["parameters"] > 12 * 8192**2 * 4 / 8 and peak < 64e6

    @pytest.mark.row("DIST-47")
    def test_the_command_of_the_readme(self, capsys):
        """As it stands there; 911 MB of f32 weights on each of 72 ranks, and none here."""
        found = re.search(r"`python -m tessera (plan examples/train.py [^`]*)`",
                          (guide.ROOT / "README.md").read_text())
        words = found[1].replace("examples/", f"{guide.ROOT}/examples/").split()
        assert main(words) == 0
        text = capsys.readouterr().out
        assert "on mesh(dp=8, tp=9)" in text and "parameters    911 MB" in text
        assert "all_reduce  tp" in text and "all_reduce  dp" in text and "MFU" in text

    def test_stages_are_refused(self):
        train, _ = example.modules()
        with pytest.raises(ts.ArgumentError, match="stages are several") as info:
            train.plan(ts.dist.mesh(axes=("pp",), shape=(2,)))
        assert "--transformer" in info.value.hint
