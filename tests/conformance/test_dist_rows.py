"""Rows DIST: meshes and layouts as data, and collectives on simulated ranks."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from tessera import dist
from tessera.numerics import decode, encode

LETTERS = np.arange(64.0).reshape(8, 8)


def cuda(count: int) -> list[str]:
    return [f"cuda:{i}" for i in range(count)]


def shards(spec, mesh, whole: np.ndarray) -> list[np.ndarray]:
    layout = spec.resolve(mesh, whole.ndim)
    return [dist.take(whole, layout, rank) for rank in range(mesh.size())]


class TestMeshes:
    @pytest.mark.row("DIST-01")
    def test_the_shape_is_that_of_the_devices(self):
        mesh = ts.dist.mesh(devices=cuda(6), axes=("a", "b"), shape=(2, 3))
        assert [mesh.coords(r) for r in range(6)] == [(i, j) for i in range(2) for j in range(3)]
        with pytest.raises(ts.ShapeError, match="2 x 4 = 8 ranks cannot have 6 devices"):
            ts.dist.mesh(devices=cuda(6), axes=("a", "b"), shape=(2, 4))

    @pytest.mark.row("DIST-02", "DIST-03")
    def test_72_devices_on_any_host(self):
        mesh = dist.mesh(devices=cuda(72), axes=("dp", "tp", "pp"), shape=(4, 9, 2))
        assert mesh.devices[71] == "cuda:71" and mesh.size("tp") == 9 and mesh.size() == 72
        groups = mesh.groups("tp")
        assert len(groups) == 8 and all(len(set(g)) == 9 for g in groups)
        assert groups[0] == tuple(range(0, 18, 2))  # pp runs fastest

    @pytest.mark.row("DIST-04", "DIST-05", "DIST-06", "DIST-07", "DIST-08")
    @pytest.mark.parametrize("axes, shape", [
        (("dp", "tp"), (8, 9)), (("dp", "tp"), (4, 2)), (("dp",), (4,)), (("tp",), (2,)),
        (("dp", "tp", "pp"), (4, 2, 2)),
    ])
    def test_the_meshes_of_the_guides(self, axes, shape):
        mesh = ts.dist.mesh(devices=cuda(int(np.prod(shape))), axes=axes, shape=shape)
        grid = np.arange(mesh.size()).reshape(shape)
        for at, axis in enumerate(axes):
            assert mesh.size(axis) == shape[at]
            lines = np.moveaxis(grid, at, -1).reshape(-1, shape[at])
            assert {tuple(line) for line in lines.tolist()} == set(mesh.groups(axis))

    @pytest.mark.row("DIST-34")
    def test_a_with_block_sets_the_mesh_and_what_names_mean(self):
        assert ts.current_mesh() is None
        with ts.mesh(cuda(4), layout={"batch": "shard"}) as mesh:
            assert ts.current_mesh() is mesh and mesh.layout == {"batch": "shard"}
        assert ts.current_mesh() is None


class TestSpecs:
    @pytest.mark.row("DIST-09")
    def test_columns(self):
        mesh = ts.dist.mesh(cuda(3), ("tp",), (3,))
        got = shards(ts.ShardSpec(partition=("col",), mesh_axes=("tp",)), mesh, LETTERS)
        for mine, meant in zip(got, np.array_split(LETTERS, 3, axis=1), strict=True):
            assert (mine == meant).all()

    @pytest.mark.row("DIST-10")
    @pytest.mark.parametrize("axis", ["tp", "dp"])
    def test_rows(self, axis):
        mesh = ts.dist.mesh(cuda(4), ("dp", "tp"), (2, 2))
        got = shards(ts.ShardSpec(partition=("row",), mesh_axes=(axis,)), mesh, LETTERS)
        for rank, mine in enumerate(got):
            half = mesh.coords(rank)[mesh.position(axis)]
            assert (mine == LETTERS[4 * half:4 * half + 4]).all()

    @pytest.mark.row("DIST-11")
    def test_rows_and_columns(self):
        mesh = ts.dist.mesh(cuda(8), ("dp", "tp"), (4, 2))
        spec = ts.ShardSpec(partition=("row", "col"), mesh_axes=("dp", "tp"))
        for rank, mine in enumerate(shards(spec, mesh, LETTERS)):
            i, j = divmod(rank, 2)
            assert (mine == LETTERS[2 * i:2 * i + 2, 4 * j:4 * j + 4]).all()

    @pytest.mark.row("DIST-12")
    def test_one_class(self):
        names: dict = {}
        exec("from tessera import *", names)
        assert dist.ShardSpec is ts.ShardSpec is names["ShardSpec"] is ts.dist.ShardSpec

    @pytest.mark.row("DIST-35")
    def test_layout_dicts(self):
        mesh = ts.dist.mesh(cuda(8), ("dp", "tp"), (4, 2))
        layout = {"batch": "replicate", "seq": "shard", "params": "replicate"}
        assert dist.spec_of(layout, ("batch", "seq", "d"), mesh) == ts.ShardSpec((1,), ("dp",))
        assert dist.spec_of(layout, ("batch", "d"), mesh) == ts.ShardSpec(replicate=True)
        both = {"seq": "shard", "batch": ("shard", "dp"), "d": ("dp", "tp")}
        assert dist.axes_of_names({k: both[k] for k in ("seq", "batch")}, mesh) == {
            "seq": ("tp",), "batch": ("dp",)}
        assert dist.spec_of({"d": both["d"]}, ("s", "d"), mesh) == ts.ShardSpec(
            (1,), (("dp", "tp"),))


class TestCollectives:
    """tests/mesh runs them under mpirun too, with the same bits."""

    @pytest.mark.row("DIST-23")
    @pytest.mark.parametrize("op, meaning", [("sum", np.sum), ("max", np.max), ("min", np.min),
                                             ("mean", np.mean)])
    def test_all_reduce(self, op, meaning, rng):
        terms = rng.standard_normal((6, 5, 3))
        mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 3))
        got = ts.dist.simulate(lambda: ts.all_reduce(
            terms[ts.dist.rank()], axis="tp", op=op).numpy(), mesh)
        for rank, y in enumerate(got):
            first = 3 * mesh.coords(rank)[0]
            meant = meaning(terms[first:first + 3], axis=0)
            np.testing.assert_allclose(y, meant, rtol=1e-14, atol=1e-14)

    @pytest.mark.row("DIST-23", "NUM-42")
    @pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3"])
    def test_low_precision_is_added_in_f32_and_cast_once(self, kind, rng):
        terms = [ts.tensor(rng.standard_normal(50), kind) for _ in range(4)]
        wide = [decode(t.array, t.dtype) for t in terms]
        meant = encode((wide[0] + wide[1]) + (wide[2] + wide[3]), kind)
        for y in ts.dist.simulate(lambda: ts.dist.all_reduce(terms[ts.dist.rank()]), 4):
            assert y.array.tobytes() == meant.tobytes()

    @pytest.mark.row("DIST-22")
    @pytest.mark.parametrize("ranks", [1, 3, 4])
    def test_all_gather_of_uneven_columns(self, ranks, rng):
        whole = rng.standard_normal((3, 10))
        columns = np.array_split(whole, ranks, axis=1)
        with ts.dist.mesh(axes=("tp",), shape=(ranks,)):
            got = ts.dist.simulate(
                lambda: ts.all_gather(columns[ts.dist.rank()], axis="tp").numpy(), ranks)
        assert all((y == whole).all() for y in got)

    @pytest.mark.row("DIST-24")
    def test_reduce_scatter(self, rng):
        terms = rng.standard_normal((4, 3, 10))
        got = ts.dist.simulate(lambda: ts.reduce_scatter(terms[ts.dist.rank()]).numpy(), 4)
        blocks = np.array_split(terms.sum(0), 4, axis=1)
        for y, meant in zip(got, blocks, strict=True):
            np.testing.assert_allclose(y, meant, rtol=1e-14, atol=1e-14, strict=True)

    @pytest.mark.row("DIST-25")
    def test_all_to_all_twice_is_the_identity(self, rng):
        x = rng.standard_normal((4, 8, 4))

        def program():
            mine = x[ts.dist.rank()]
            y = ts.all_to_all(mine, split=0, concat=1)
            return y.numpy(), ts.all_to_all(y, split=1, concat=0).numpy()

        for rank, (y, back) in enumerate(ts.dist.simulate(program, 4)):
            meant = np.concatenate([x[r, 2 * rank:2 * rank + 2] for r in range(4)], axis=1)
            assert (y == meant).all() and (back == x[rank]).all()

    def test_the_order_of_a_sum_is_fixed(self, rng):
        terms = rng.standard_normal((4, 1000)).astype(np.float32) * 1e3 ** rng.random((4, 1))
        runs = [ts.dist.simulate(lambda: ts.dist.all_reduce(terms[ts.dist.rank()]).numpy(), 4)
                for _ in range(3)]
        assert len({y.tobytes() for run in runs for y in run}) == 1
