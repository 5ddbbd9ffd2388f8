"""Conformance rows of collectives: numerics, order, names, and runs under mpirun."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from mesh import battery
from mesh.launch import mpirun, needs_mpi
from mesh.programs import distributed_loss
from tessera.mesh.collectives.record import COLLECTIVES
from tessera.numerics import decode, encode


def on_ranks(ranks: int, program) -> list:
    return ts.dist.simulate(lambda: program(ts.dist.rank()), ranks)


@functools.cache
def proofs(ranks: int) -> list[dict[str, str]]:
    """What each rank of mpirun says of both programs."""
    with tempfile.TemporaryDirectory() as folder:
        run = mpirun(ranks, "proofs", Path(folder))
    assert run.status == 0, run.text
    return [json.loads(run.results[rank]) for rank in range(ranks)]


@needs_mpi
@pytest.mark.row("AD-06", "AD-16", "EX-21")
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_guide_s_snippet_under_mpirun(ranks):
    assert [p["seed_snippet"] for p in proofs(ranks)] == ["right"] * ranks


@needs_mpi
@pytest.mark.row("AD-06", "AD-15")
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_under_mpirun_have_the_bits_of_the_simulation(ranks):
    found = [p["gradients"] for p in proofs(ranks)]
    assert found == ts.dist.simulate(battery.gradients, ranks)


def test_the_backward_pass_of_a_gather_has_one_reduce_scatter_on_its_axis():
    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(1, 3))

    def program():
        loss = distributed_loss()
        loss(ts.ones((2, 4)), ts.ones((4, 2)))
        forward = loss.inspect_ir("graph")
        return forward, loss.inspect_ir("graph", backward=True), ts.inspect_ir(
            "graph", loss, backward=True)

    for forward, backward, again in ts.dist.simulate(program, mesh):
        (gather,) = [s for s in forward.splitlines() if " all_gather(" in s]
        (scatter,) = [s for s in backward.splitlines() if " reduce_scatter(" in s]
        assert "reduce_scatter" not in forward and again == backward
        for line in (gather, scatter):
            assert "axis=('tp')" in line and "dim=1" in line and "!collective" in line
            assert 'y = ts.all_gather(y, axis="tp")' in line


class TestPrecision:
    @pytest.mark.row("AD-19", "NUM-42")
    @pytest.mark.parametrize("kind", ["bf16", "fp8"])
    def test_data_parallel_gradients_travel_in_f32(self, kind, rng):
        """Parameters of few bits; the gradient that is exchanged is f32, and so is its sum."""
        xs = rng.standard_normal((4, 5, 3)).astype(np.float32)
        w = ts.param(ts.cast(ts.tensor(rng.standard_normal(3), "f32"), kind))

        def program(rank):
            @ts.jit
            def step(w):
                g = ts.grad(lambda w: ts.mean((xs[rank] @ w) ** 2))(w)
                return g, ts.all_reduce(g)

            step(w)
            with ts.dist.traffic() as sent:
                own, total = step(w)
            return own, total, sent

        found = on_ranks(4, program)
        own = [o.numpy() for o, _, _ in found]
        meant = (own[0] + own[1]) + (own[2] + own[3])
        for mine, total, sent in found:
            assert mine.dtype is ts.f32 and mine.numpy().dtype == np.float32
            assert total.numpy().tobytes() == meant.tobytes()
            assert [(s.op, s.types) for s in sent] == [("all_reduce", ("f32",))]

    @pytest.mark.row("AD-19")
    @pytest.mark.parametrize("kind", ["bf16", "fp8"])
    def test_so_do_cotangents_of_gathered_parameters(self, kind):
        def program(rank):
            w = ts.cast(ts.tensor(np.full(2, 1.5 + rank), "f32"), kind)
            graph = ts.grad(lambda w: ts.sum(ts.cast(ts.all_gather(w), "f32") ** 3)).graph(w)
            return {n.op.name: str(n.attrs["type"].dtype) for n in graph.nodes
                    if n.op.name in COLLECTIVES}

        meant = {"all_gather": str(ts.as_type(kind).dtype), "reduce_scatter": "f32"}
        assert on_ranks(2, program) == [meant] * 2

    @pytest.mark.row("NUM-42")
    @pytest.mark.parametrize("call", [ts.all_reduce, ts.reduce_scatter])
    def test_fp8_is_added_in_f32_and_cast_once_in_a_graph_too(self, call, rng):
        terms = [ts.tensor(rng.standard_normal(8), "fp8") for _ in range(4)]
        wide = [decode(t.array, t.dtype) for t in terms]
        meant = encode((wide[0] + wide[1]) + (wide[2] + wide[3]), "fp8")
        got = on_ranks(4, lambda r: ts.jit(lambda x: call(x))(terms[r]).array)
        if call is ts.reduce_scatter:
            got = [np.concatenate(got)]
        assert all(y.tobytes() == meant.tobytes() for y in got)

    @pytest.mark.row("DIST-36")
    @pytest.mark.parametrize("kind", ["bf16", "fp6"])
    def test_72_ranks(self, kind, rng):
        """Gradients of few bits, summed over 72 ranks, against fp64."""
        terms = [ts.tensor(rng.standard_normal((4, 9)), kind) for _ in range(72)]
        exact = np.sum([t.numpy().astype(np.float64) for t in terms], axis=0)
        got = on_ranks(72, lambda r: ts.all_reduce(terms[r], dtype="f32").numpy())
        assert all(g.tobytes() == got[0].tobytes() for g in got)
        assert np.linalg.norm(got[0] - exact) <= 1e-5 * np.linalg.norm(exact)

    def test_stochastic_rounding_in_a_graph_is_that_of_one_rank(self, rng):
        """Terms whose sums are exact in f32: four ranks round to the bits that one would."""
        terms = [rng.integers(-4000, 4000, (8, 6)).astype(np.float32) for _ in range(4)]
        kind = "bf16 @stochastic_round"

        def total(x):
            return ts.all_reduce(x, dtype=kind, key=9)

        alone = ts.jit(total)(sum(terms)).array
        assert (alone != ts.cast(ts.tensor(sum(terms)), "bf16").array).any()
        assert all((y == alone).all() for y in on_ranks(
            4, lambda r: ts.jit(total)(terms[r]).array))
        blocks = on_ranks(4, lambda r: ts.jit(lambda x: ts.reduce_scatter(
            x, dim=0, dtype=kind, key=9))(terms[r]).array)
        assert (np.concatenate(blocks) == alone).all()
        with pytest.raises(ts.ArgumentError, match="needs a key"):
            ts.jit(lambda x: ts.all_reduce(x, dtype=kind))(terms[0])


@pytest.mark.row("DIST-22")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gathers_of_uneven_parts_in_a_graph(dim, ranks, rng):
    whole = rng.standard_normal((7, 4))
    parts = np.array_split(whole, ranks, axis=dim)
    with ts.dist.mesh(axes=("tp",), shape=(ranks,)):
        got = on_ranks(ranks, lambda r: ts.jit(lambda x: ts.all_gather(x, "tp", dim=dim))(
            parts[r]).numpy())
    assert all((y == whole).all() for y in got)


class TestMeshes:
    """The mesh of a call: given, open, or the only one there is."""

    @pytest.fixture(autouse=True)
    def no_other(self, monkeypatch):
        monkeypatch.setattr("tessera.mesh.device_mesh._created", {})

    @pytest.mark.row("DIST-22")
    def test_the_only_mesh(self):
        mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))
        got = on_ranks(4, lambda r: ts.all_gather(ts.full((1,), r), axis="tp").tolist())
        assert got == [[0, 1], [0, 1], [2, 3], [2, 3]] and mesh.size("tp") == 2

    def test_equal_ones_are_one(self):
        def program(rank):
            mesh = ts.dist.mesh(axes=("tp",), shape=(3,))
            return ts.all_reduce(ts.ones(()), "tp").item(), mesh

        assert [v for v, _ in on_ranks(3, program)] == [3, 3, 3]

    def test_several_are_listed_and_none_is_said(self):
        with pytest.raises(ts.ArgumentError, match="of no mesh: none is given and there is none"):
            ts.all_reduce(ts.ones(()), "tp")
        meshes = [ts.dist.mesh(axes=("tp",), shape=(1,)), ts.dist.mesh(axes=("dp",), shape=(1,))]
        with pytest.raises(ts.ArgumentError, match=r"any of 2 meshes: mesh\(tp=1\), mesh\(dp=1\)"):
            ts.all_reduce(ts.ones(()), "tp")
        assert ts.all_reduce(ts.ones(()), "tp", mesh=meshes[0]).item() == 1
        with meshes[1]:
            assert ts.all_reduce(ts.ones(()), "dp").item() == 1

    def test_without_an_axis_all_ranks_take_part(self):
        made = [ts.dist.mesh(axes=("tp",), shape=(1,)), ts.dist.mesh(axes=("dp",), shape=(1,))]
        assert on_ranks(2, lambda r: ts.all_reduce(ts.ones(())).item()) == [2, 2] and made


class TestOrder:
    @pytest.mark.parametrize("ranks", [2, 3, 4])
    def test_every_run_and_transform_has_the_same_bits(self, ranks, rng):
        terms = [rng.standard_normal(40).astype(np.float32) * 10.0 ** r for r in range(ranks)]
        runs = [on_ranks(ranks, lambda r, call=call: call(terms[r]).array.tobytes())
                for call in (ts.all_reduce, ts.all_reduce, ts.jit(lambda x: ts.all_reduce(x)),
                             ts.jit(lambda x: ts.concatenate([
                                 ts.all_reduce(x[:7]), ts.all_reduce(x[7:])])))]
        assert len({bits for run in runs for bits in run}) == 1

    @pytest.mark.row("DIST-40")
    @pytest.mark.parametrize("compiled", [False, True])
    def test_a_branch_on_the_rank_is_refused_before_anything_is_sent(self, compiled):
        def f(x):
            y = ts.all_reduce(x)
            if ts.dist.rank() == 1:
                return y + 1
            return ts.all_gather(y)[:3]

        def program(rank):
            with ts.dist.traffic() as sent:
                try:
                    (ts.jit(f) if compiled else f)(ts.ones(3))
                    ts.all_reduce(ts.ones(()))
                finally:
                    ops = [s.op for s in sent]
                    assert ops == ([] if compiled else ["all_reduce"]), ops

        with pytest.raises(ts.dist.DisagreementError) as info:
            on_ranks(3, program)
        text = str(info.value)
        assert "ranks 0, 2: " in text and "return ts.all_gather(y)[:3]" in text
        assert "rank 1: " in text and "branch that depends on the rank" in text

    @pytest.mark.row("DIST-40")
    def test_so_is_another_order(self):
        def f(x):
            a, b = ts.all_reduce, ts.all_gather
            first, second = (a, b) if ts.dist.rank() else (b, a)
            return ts.sum(first(x)) + ts.sum(second(x))

        with pytest.raises(ts.dist.DisagreementError, match="trace of all_gather"):
            on_ranks(2, lambda r: ts.jit(f)(ts.ones(3)))

    @pytest.mark.row("EFF-04")
    def test_what_is_merged_is_seen_in_the_plan_and_in_the_traffic(self):
        def f(x, y):
            return ts.all_reduce(x), ts.all_reduce(y)

        def program(rank):
            g = ts.jit(f)
            g(ts.ones(3), ts.ones((2, 2)))
            with ts.dist.traffic() as sent:
                together = g(ts.ones(3), ts.ones((2, 2)))
            with ts.dist.traffic() as apart:
                f(ts.ones(3), ts.ones((2, 2)))
            assert [t.tolist() for t in together] == [[2, 2, 2], [[2, 2], [2, 2]]]
            plan = [s for s in g.inspect_ir("schedule").splitlines() if "call all_reduce" in s]
            return len(plan), len(sent), len(apart), sum(s.sent_bytes for s in sent)

        assert on_ranks(2, program) == [(1, 1, 2, 28)] * 2


class TestNames:
    @pytest.mark.row("CORE-02")
    def test_ts_and_ts_dist_have_the_same_functions(self):
        import tessera.dist as dist

        assert dist is ts.dist
        for name in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter"):
            assert getattr(ts, name) is getattr(dist, name)
        assert ts.allreduce is ts.all_reduce

    @pytest.mark.row("RT-07")
    def test_what_carries_the_bytes_has_a_name(self):
        assert ts.dist.backend() == "single"
        assert on_ranks(2, lambda r: ts.dist.backend()) == ["local", "local"]

    @needs_mpi
    @pytest.mark.row("RT-07")
    def test_and_so_has_mpi(self, tmp_path):
        run = mpirun(2, "backend", tmp_path)
        assert run.results == {0: "mpi", 1: "mpi"}, run.text
