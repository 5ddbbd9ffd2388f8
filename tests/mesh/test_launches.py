"""Index launches, domains, `mesh.shard`, `@ts.on`, layout dicts and pmap."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from mesh import parallel
from mesh.launch import needs_mpi, results_of_all
from mesh.parallel import double_rows
from tessera.mesh.partition import balanced

PROGRAMS = Path(parallel.__file__)
COLUMNS = ts.ShardSpec(("col",), ("tp",))


def line(ranks: int, axis: str = "tp"):
    return ts.dist.mesh(axes=(axis,), shape=(ranks,))


class TestIndexLaunch:
    @pytest.mark.row("DIST-30")
    @pytest.mark.parametrize("ranks", [1, 2, 3, 9])
    def test_a_kernel_on_each_shard_equals_a_loop(self, ranks, rng):
        """20 columns: 9 parts of 3 or 2."""
        whole = rng.standard_normal((4, 20)).astype(np.float32)
        mesh = line(ranks)

        def program():
            a = ts.dist.distribute(whole, COLUMNS, mesh=mesh)
            c = ts.dist.tensor((4, 20), COLUMNS, mesh)
            with mesh:
                ts.index_launch(axis="tp")(double_rows)(a.parts("tp"), c.parts("tp"), 3.0)
            return c.numpy()

        loop = []
        for lo, hi in balanced(20, ranks):
            part = np.zeros((4, hi - lo), np.float32)
            double_rows(np.ascontiguousarray(whole[:, lo:hi]), part, 3.0)
            loop.append(part)
        meant = np.concatenate(loop, axis=1)
        assert (meant == 3 * whole).all()
        for found in [program(), *ts.dist.simulate(program, mesh)]:
            np.testing.assert_array_equal(found, meant)

    @pytest.mark.row("DIST-31")
    def test_each_rank_launches_exactly_one_kernel(self):
        mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 3))
        launched = []

        def program():
            x = ts.dist.tensor((6, 9), COLUMNS, mesh, init=lambda i, j: i + j)

            def kernel(part, shared, factor):
                launched.append((ts.dist.rank(), part.shape, shared is weights, factor))
                return ts.sum(part)

            found = ts.index_launch("tp")(kernel)(x, weights, factor=2)
            return [None if y is None else y.item() for y in found]

        weights = ts.ones(3)
        sums = [sum(i + j for i in range(6) for j in range(3 * t, 3 * t + 3)) for t in range(3)]
        for rank, found in enumerate(ts.dist.simulate(program, mesh)):
            assert found == [s if t == rank % 3 else None for t, s in enumerate(sums)]
        assert sorted(launched) == [(r, (6, 3), True, 2) for r in range(6)]
        launched.clear()
        assert program() == sums  # alone, all ranks are here
        assert [who for who, *_ in launched] == list(range(6))

    def test_lists_of_parts_run_once_per_place(self):
        calls = []
        with ts.dist.mesh(axes=("dp", "tp"), shape=(2, 3)):
            parts = [np.full(n, n) for n in (1, 2, 3)]
            launch = ts.index_launch("tp")(lambda p, q: calls.append(p.size) or p.sum() + q)
            found = launch(parts, 1)
        assert found == [2, 5, 10] and calls == [1, 2, 3]

    @needs_mpi
    @pytest.mark.parametrize("program", ["launches", "mapped"])
    def test_mpi_gives_the_bits_of_the_simulation(self, program):
        found = results_of_all(PROGRAMS, parallel.COMPARED, 4)[program]
        assert found == dict(enumerate(ts.dist.simulate(getattr(parallel, program), 4)))

    @pytest.mark.parametrize("ranks", [2, 4])
    def test_programs(self, ranks):
        assert len(set(ts.dist.simulate(parallel.launches, ranks))) == ranks

    def test_mistakes(self):
        launch = ts.index_launch("tp")(lambda *parts: None)
        with line(2):
            with pytest.raises(ts.ArgumentError, match="a list of 3 parts, and tp .* has 2 places"):
                launch([ts.ones(1)] * 3)
            with pytest.raises(ts.ArgumentError, match="nothing at place 1, that of rank 1"):
                launch([ts.ones(1), None])
        with pytest.raises(ts.ArgumentError, match="needs a kernel or a function, got 3"):
            ts.index_launch("tp")(3)
        with pytest.raises(ts.dist.MeshError, match="different meshes"):
            launch(ts.dist.tensor(4, mesh=line(2)), ts.dist.tensor(4, mesh=line(3)))
        with pytest.raises(ts.AxisError, match="has no axis 'tp'"):
            launch(ts.dist.tensor(4, mesh=line(2, "dp")))
        with line(2), pytest.raises(ts.TraceError, match="of a traced value"):
            ts.jit(lambda x: launch(x))(ts.ones(3))


class TestDomains:
    @pytest.mark.row("DIST-32")
    @given(ranks=st.integers(1, 5), rows=st.integers(1, 12), run=st.integers(1, 3))
    def test_shapes_per_rank(self, ranks, rows, run):
        domain, mesh = ts.domain.Rect((rows, 3)), line(ranks, "dp")
        block = ts.array.from_domain(domain, distribution=ts.dist.Block(("dp",)), mesh=mesh)
        assert [block.parts[r].shape for r in range(ranks)] == [
            (hi - lo, 3) for lo, hi in balanced(rows, ranks)]
        cyclic = ts.array.from_domain(domain, distribution=ts.dist.Cyclic(("dp",), run), mesh=mesh,
                                      init=lambda i, j: i, dtype="int32")
        for r in range(ranks):
            mine = [i for i in range(rows) if i // run % ranks == r]
            assert cyclic.parts[r].numpy()[:, 0].tolist() == mine
        whole = ts.array.from_domain(domain, "bf16", ts.dist.Replicated(), mesh)
        assert {p.shape for p in whole.parts.values()} == {(rows, 3)} and whole.dtype is ts.bf16

    @pytest.mark.row("DIST-32")
    def test_on_ranks_each_holds_its_own(self):
        mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))
        domain = ts.domain.Rect((4, 6), lo=(10, 20))

        def program():
            x = ts.array.from_domain(domain, distribution=ts.dist.Block(("dp", "tp")),
                                     init=lambda i, j: 100 * i + j)
            assert list(x.parts) == [ts.dist.rank()]
            return x.local.numpy()[0, 0]

        assert ts.dist.simulate(program, mesh) == [1020, 1023, 1220, 1223]

    def test_array_is_a_module(self):
        with pytest.raises(ts.TesseraError, match="ts.array is the module") as info:
            ts.array([1.0, 2.0])
        assert "ts.tensor(data)" in info.value.hint


class TestShard:
    @pytest.mark.row("DIST-33")
    def test_a_named_dimension(self, rng):
        devices = [f"cuda:{i}" for i in range(4)]
        w = rng.standard_normal((6, 10)).astype(np.float32)
        found = ts.mesh(devices).shard(w, {"d_model"}, dims=("vocab", "d_model"))
        assert found.layout.describe() == "(-, devices)" and found.shape == (6, 10)
        for rank, part in enumerate(np.array_split(w, 4, axis=1)):
            np.testing.assert_array_equal(found.parts[rank].numpy(), part)

    @pytest.mark.row("DIST-33")
    @pytest.mark.parametrize("which, layout", [
        ({"d_model"}, "(-, tp)"), ({"d_model": "dp"}, "(-, dp)"), ("vocab", "(tp, -)"),
        ((), "(-, -)"),
        ({"vocab": "dp", "d_model": "tp"}, "(dp, tp)"), ({"row"}, "(tp, -)"), ({1}, "(-, tp)"),
        ({"vocab": ("dp", "tp")}, "(dp*tp, -)")])
    def test_which_dimensions(self, which, layout):
        mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))
        found = mesh.shard(ts.ones((6, 10)), which, dims=("vocab", "d_model"))
        assert found.layout.describe() == layout

    @pytest.mark.row("DIST-33")
    def test_a_type_has_names_of_its_own(self):
        mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))
        kind = ts.Tensor["vocab", "d_model", ts.bf16]
        assert mesh.shard(kind, {"d_model"}) == ts.ShardSpec((1,), ("tp",))
        assert mesh.shard(kind, {"vocab": "dp", "d_model": "tp"}) == ts.ShardSpec(
            (0, 1), ("dp", "tp"))
        assert mesh.shard(kind, set()) == ts.ShardSpec(replicate=True)
        with pytest.raises(ts.AxisError, match="no dimension 'heads'"):
            mesh.shard(kind, {"heads"})

    def test_mistakes(self):
        mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))
        with pytest.raises(ts.AxisError, match="no dimension 'd_modle'"):
            mesh.shard(ts.ones((6, 10)), {"d_modle"}, dims=("vocab", "d_model"))
        with pytest.raises(ts.AxisError, match="has no axis 'pp'"):
            mesh.shard(ts.ones((6, 10)), {0: "pp"})
        with pytest.raises(ts.ArgumentError, match="'tp'.* is used twice"):
            mesh.shard(ts.ones((6, 10)), {0, 1})


class TestOn:
    @pytest.mark.row("DIST-34")
    def test_inside_and_outside(self):
        mesh = line(2)

        @ts.on(mesh)
        def f(x, *, k=1):
            """What it does."""
            return ts.current_mesh(), x + k

        assert ts.current_mesh() is None
        found, y = f(1, k=2)
        assert found is mesh and y == 3 and ts.current_mesh() is None
        assert f.__name__ == "f" and f.__doc__ == "What it does."
        with line(3) as outer:
            assert f(1)[0] is mesh and ts.current_mesh() is outer
        with pytest.raises(ZeroDivisionError):
            ts.on(mesh)(lambda: 1 / 0)()
        assert ts.current_mesh() is None

    @pytest.mark.row("DIST-34", "DIST-35")
    def test_devices_and_a_layout(self):
        @ts.on(["cpu:0", "cpu:1"], layout={"batch": "replicate", "seq": "shard"})
        def f():
            x = ts.dist.tensor((2, 6, 4), dims=("batch", "seq", "d"))
            return ts.current_mesh().layout, x.layout.describe(), x.parts[1].shape

        assert f() == ({"batch": "replicate", "seq": "shard"}, "(-, devices, -)", (2, 3, 4))

    @pytest.mark.row("DIST-35")
    def test_the_layout_of_the_seed(self):
        layout = {"batch": "replicate", "seq": "shard", "params": "replicate"}
        mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2), layout=layout)
        spec = ts.dist.spec_of(mesh.layout, ("batch", "seq", "d_model"), mesh)
        assert spec == ts.ShardSpec((1,), ("dp",))
        assert ts.dist.spec_of(layout, ("params",), mesh) == ts.ShardSpec(replicate=True)
        with mesh:
            assert ts.dist.tensor((4, 8), dims=("batch", "seq")).layout.describe() == "(-, dp)"
            assert ts.dist.tensor((4, 8), dims=("params", "d")).layout.describe() == "(-, -)"

    def test_mistakes(self):
        with pytest.raises(ts.ArgumentError, match="takes no options, got layout"):
            ts.on(line(2), layout={})
        with pytest.raises(ts.ArgumentError, match="decorates a function, got 3"):
            ts.on(line(2))(3)


def normalise(row, scale):
    return {"row": row * scale["k"], "sum": ts.sum(row)}


class TestPmap:
    @pytest.mark.row("DIST-44")
    @pytest.mark.parametrize("ranks", [1, 2, 3, 5])
    def test_it_equals_vmap(self, ranks, rng):
        """7 rows: uneven blocks."""
        x = ts.tensor(rng.standard_normal((7, 4)), "f32")
        scale = {"k": ts.tensor(rng.standard_normal(7), "f32")}
        meant, mesh = ts.vmap(normalise)(x, scale), line(ranks, "dp")

        def program():
            y = ts.pmap(normalise)(x, scale)
            assert y["row"].layout.describe() == "(dp, -)" and y["sum"].shape == (7,)
            rank = ts.dist.rank() if ts.dist.world_size() > 1 else ranks - 1
            assert y["sum"].parts[rank].shape == (len(np.array_split(range(7), ranks)[rank]),)
            return {k: v.numpy() for k, v in y.items()}

        with mesh:
            alone = program()
        for found in [alone, *ts.dist.simulate(program, mesh)]:
            for name, value in found.items():
                np.testing.assert_array_equal(value, meant[name].numpy())

    def test_without_a_mesh_it_is_vmap(self, rng):
        x = ts.tensor(rng.standard_normal((3, 4)), "f32")
        found = ts.pmap(lambda r: ts.sum(r))(x)
        assert type(found) is ts.Tensor
        np.testing.assert_array_equal(found.numpy(), ts.vmap(lambda r: ts.sum(r))(x).numpy())

    def test_only_the_first_axis_has_rows_and_keywords_are_whole(self, rng):
        x = ts.tensor(rng.standard_normal((4, 3)), "f32")
        w = ts.tensor(rng.standard_normal((3, 2)), "f32")
        mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))
        y = ts.pmap(lambda r, *, w: r @ w, mesh=mesh)(x, w=w)
        assert [p.shape for p in y.parts.values()] == [(2, 2)] * 4
        np.testing.assert_allclose(y.numpy(), x.numpy() @ w.numpy(), rtol=1e-5, atol=1e-6)

    @pytest.mark.row("DIST-44")
    @pytest.mark.parametrize("donate", [{"row"}, {0}, "row", (0, "scale")])
    def test_donated_arguments_raise_on_reuse(self, donate):
        x, scale = ts.ones((4, 3)), {"k": ts.ones(4)}
        with line(2, "dp"):
            y = ts.pmap(normalise, donate=donate)(x, scale)
        touches = [lambda: x.numpy(), lambda: x + 1, lambda: ts.jit(ts.sum)(x), lambda: x[0],
                   lambda: np.asarray(x), lambda: ts.pmap(normalise)(x, scale), lambda: x.tolist()]
        for touch in touches:
            with pytest.raises(ts.TesseraError, match=r"f32\[4, 3\] is used after it was donated "
                               r"to pmap\(normalise\) at .*test_launches"):
                touch()
        assert x.shape == (4, 3) and repr(x) == "Tensor[4, 3] f32 donated"
        assert y["sum"].numpy().tolist() == [3.0] * 4
        if donate == (0, "scale"):
            with pytest.raises(ts.ArgumentError, match="donated") as info:
                scale["k"].numpy()
            assert info.value.code == "E_DONATED"
        else:
            assert scale["k"].numpy().tolist() == [1.0] * 4

    def test_a_donated_distributed_tensor(self):
        mesh = line(2, "dp")
        x = ts.dist.tensor((4, 3), ts.ShardSpec(("row",), ("dp",)), mesh, init=1.0)
        part = x.parts[0]
        ts.pmap(lambda r: r + 1, donate={0}, mesh=mesh)(x)
        for touch in (lambda: x.numpy(), lambda: x.local, lambda: x * 2, lambda: x.parts[0]):
            with pytest.raises(ts.TesseraError, match="after it was donated"):
                touch()
        assert part.numpy().shape == (2, 3)

    def test_the_memory_of_a_donated_tensor_is_given_back(self):
        import weakref

        x = ts.tensor(np.ones((4, 3), np.float32))
        memory = weakref.ref(x.array.base if x.array.base is not None else x.array)
        assert memory() is not None
        ts.pmap(lambda r: ts.sum(r), donate={0})(x)
        assert memory() is None

    def test_mistakes(self):
        with pytest.raises(ts.ArgumentError, match="donate='rows' is no argument of normalise"):
            ts.pmap(normalise, donate={"rows"})
        with pytest.raises(ts.ArgumentError, match="donate=2 is no argument"):
            ts.pmap(normalise, donate={2})
        x = ts.ones((4, 3))
        with pytest.raises(ts.ArgumentError, match="a donated tensor is an argument twice"):
            ts.pmap(lambda a, b: a + b, donate={0})(x, x)
        with pytest.raises(ts.ArgumentError, match="a donated argument is a ndarray"):
            ts.pmap(lambda a: a, donate={0})(np.ones(3))
        assert x.numpy().sum() == 12
        with line(2), pytest.raises(ts.ShapeError, match="the arguments.0 has 4, .*1 has 3"):
            ts.pmap(lambda a, b: a + b)(x, ts.ones(3))
        with pytest.raises(ts.TraceError, match="cannot be traced"):
            ts.jit(lambda a: ts.pmap(lambda r: r)(a))(x)
