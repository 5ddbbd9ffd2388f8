"""Collectives as ops of a graph: derivatives, batches, merging, order; against one process."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from mesh.programs import adjoint_cases, distributed_loss, gradients
from tessera.graph.ir import verify
from tessera.mesh.collectives.merge import SMALL_BYTES, merge_all_reduces
from tessera.mesh.collectives.record import COLLECTIVES
from tessera.mesh.collectives.replicated import seed
from tolerance import assert_close

RANKS = pytest.mark.parametrize("ranks", [1, 2, 3, 4])
CASES = [pytest.param(*c, id=f"{c[0]}-{i}") for i, c in enumerate(adjoint_cases())]


def on_ranks(ranks: int, program) -> list:
    return ts.dist.simulate(lambda: program(ts.dist.rank()), ranks)


def like(y: ts.Tensor, rank: int, salt: int) -> ts.Tensor:
    rng = np.random.default_rng([rank, salt, 5])
    return ts.tensor(rng.standard_normal(y.shape))


class TestAdjoints:
    """<A t, g> = <t, A' g>, summed over the ranks."""

    @pytest.mark.row("AD-15")
    @RANKS
    @pytest.mark.parametrize("name, shape, attrs", CASES)
    def test_the_pull_back_is_the_adjoint_of_the_push_forward(self, name, shape, attrs, ranks):
        call = getattr(ts.dist, name)

        def program(rank):
            given = attrs(ranks)
            x = ts.tensor(np.random.default_rng([rank, 1]).standard_normal(shape(rank, ranks)))
            t = like(x, rank, 2)
            y, moved = ts.jvp(lambda x: call(x, **given), (x,), (t,))
            again, pull = ts.vjp(lambda x: call(x, **given), x)
            g = like(y, rank, 3)
            assert (again.numpy() == y.numpy()).all() and pull(g).shape == x.shape
            return (moved.numpy() * g.numpy()).sum(), (t.numpy() * pull(g).numpy()).sum()

        forward, backward = np.sum(on_ranks(ranks, program), axis=0)
        np.testing.assert_allclose(forward, backward, rtol=1e-12, atol=1e-12)

    @RANKS
    @pytest.mark.parametrize("name, shape, attrs", CASES)
    def test_the_push_forward_is_the_finite_difference(self, name, shape, attrs, ranks):
        call, step = getattr(ts.dist, name), 1e-6

        def program(rank):
            given = attrs(ranks)
            x = ts.tensor(np.random.default_rng([rank, 1]).standard_normal(shape(rank, ranks)))
            t = like(x, rank, 2)
            moved = ts.jvp(lambda x: call(x, **given), (x,), (t,))[1].numpy()
            ahead, behind = (call(x + s * t, **given).numpy() for s in (step, -step))
            np.testing.assert_allclose(moved, (ahead - behind) / (2 * step), rtol=1e-8, atol=1e-8)

        on_ranks(ranks, program)

    def test_every_collective_is_among_the_cases(self):
        assert {c.values[0] for c in CASES} == set(COLLECTIVES)

    def test_ranks_that_hold_the_same_largest_element_share_its_gradient(self):
        def program(rank):
            x = ts.tensor([1.0, 2.0, float(rank)])
            return ts.vjp(lambda x: ts.all_reduce(x, op="max"), x)[1](ts.ones(3)).tolist()

        assert on_ranks(3, program) == [[1, 1, 0], [1, 1, 0], [1, 1, 3]]

    def test_what_is_rounded_has_the_gradient_of_what_it_was(self):
        """max of f32 stored as fp8: the holder of the largest gets it, not all that round to it."""
        def program(rank):
            x = ts.tensor([1.0 + rank / 64])
            return ts.vjp(lambda x: ts.all_reduce(x, op="max", dtype="fp8"), x)[1](
                ts.ones(1)).item()

        assert on_ranks(2, program) == [0, 2]

    @pytest.mark.parametrize("kind", ["bf16", "fp6"])
    def test_low_precision_gathers_have_gradients_in_f32(self, kind):
        """1/3 is no bf16: the shard's cotangent is what the ranks' add up to in f32."""
        def program(rank):
            x = ts.cast(ts.tensor([1.0, 2.0]), kind)
            g = ts.vjp(lambda x: ts.all_gather(x), x)[1](ts.full((4,), 1 / 3))
            assert g.type == ts.as_type("f32")
            return g.numpy()

        third = np.float32(1 / 3)
        assert all((g == third + third).all() for g in on_ranks(2, program))

    def test_second_derivatives(self, rng):
        """d2/dx2 of sum(gather(x)^3) along a fixed direction, by reverse over reverse."""
        parts = np.array_split(rng.standard_normal(7), 3)
        whole = np.concatenate(parts)

        def slope(x):
            return ts.grad(lambda x: ts.sum(ts.all_gather(x) ** 3))(x)

        def program(rank):
            return ts.grad(lambda x: ts.sum(slope(x) ** 2))(parts[rank]).numpy()

        found = np.concatenate(on_ranks(3, program))
        np.testing.assert_allclose(found, 2 * 3 * whole ** 2 * 6 * whole, rtol=1e-12)

    def test_second_derivatives_of_a_broadcast_do_not_part_the_ranks(self):
        """Only the root's gradient is not zero, and every rank makes the same calls."""
        def slope(x):
            return ts.grad(lambda x: ts.sum(ts.dist.broadcast(x, root=1) ** 3))(x)

        def program(rank):
            return ts.grad(lambda x: ts.sum(slope(x) ** 2))(ts.tensor([2.0, 3.0])).numpy()

        found = on_ranks(3, program)
        np.testing.assert_allclose(found[1], 2 * 3 * np.array([4, 9]) * 6 * np.array([2, 3]))
        assert not found[0].any() and not found[2].any()


class TestBatches:
    @pytest.mark.parametrize("name, shape, attrs", CASES)
    def test_vmap_is_a_loop(self, name, shape, attrs):
        call, ranks = getattr(ts.dist, name), 3

        def program(rank):
            given = attrs(ranks)
            x = np.random.default_rng([rank, 4]).standard_normal((2, *shape(rank, ranks)))
            together = ts.vmap(lambda x: call(x, **given))(x).numpy()
            apart = [call(x[i], **given).numpy() for i in range(2)]
            return np.array_equal(together, np.stack(apart))

        assert all(on_ranks(ranks, program))

    def test_a_batch_has_one_key(self):
        def program(rank):
            return ts.vmap(lambda x, k: ts.all_reduce(x, dtype="bf16 @stochastic_round", key=k))(
                ts.ones((2, 3)), ts.tensor(np.zeros((2, 2), np.uint32)))

        with pytest.raises(ts.DTypeError, match="takes one key"):
            on_ranks(2, program)


class TestGradients:
    """Hand-called collectives in a loss, against the gradient of one process."""

    @pytest.mark.row("AD-06", "EX-21")
    @pytest.mark.parametrize("ranks, width", [(2, 8), (2, 7), (4, 8), (4, 7), (3, 3), (4, 3)])
    def test_the_seed_s_distributed_loss(self, ranks, width, rng):
        x = rng.standard_normal((3, 4)).astype(np.float32)
        whole = rng.standard_normal((4, width)).astype(np.float32)
        parts = np.array_split(whole, ranks, axis=1)
        mesh = ts.dist.mesh(axes=("tp",), shape=(ranks,))

        def program():
            w, loss = parts[ts.dist.rank()], distributed_loss()
            return loss(x, w).item(), ts.grad(loss)(x, ts.param(w)).numpy()

        meant = ts.grad(lambda w: ts.sum(ts.matmul(x, w) ** 2))(whole).numpy()
        found = ts.dist.simulate(program, mesh)
        assert all(loss == pytest.approx((x @ whole).astype(np.float64).__pow__(2).sum(), rel=1e-5)
                   for loss, _ in found)
        for got, block in zip(found, np.array_split(meant, ranks, axis=1), strict=True):
            np.testing.assert_allclose(got[1], block, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("ranks", [1, 2, 3, 4])
    def test_parallel_layers_in_every_transform(self, ranks):
        """A column- and a row-parallel layer with a label, through jit, checkpoint, scan, vjp..."""
        found = ts.dist.simulate(gradients, ranks)
        names = set(found[0])
        assert len(names) > 8 and all(set(f) == names for f in found)
        for rank, results in enumerate(found):
            for name, (got, meant) in results.items():
                np.testing.assert_allclose(got, meant, rtol=1e-9, atol=1e-9,
                                           err_msg=f"{name} on rank {rank}")

    def test_losses_that_differ_are_added(self, rng):
        """A ring: rank r's loss reads x_(r-1), so x's gradient is that of the next rank's loss."""
        parts = rng.standard_normal((3, 5))
        ring = [(r, (r + 1) % 3) for r in range(3)]

        def program(rank):
            return ts.grad(lambda x: (rank + 1) * ts.sum(ts.dist.permute(x, pairs=ring) ** 2))(
                parts[rank]).numpy()

        for rank, got in enumerate(on_ranks(3, program)):
            np.testing.assert_allclose(got, 2 * parts[rank] * ((rank + 1) % 3 + 1), rtol=1e-12)

    def test_one_axis_of_two(self, rng):
        """Rows over dp with a loss each, columns over tp with one loss: seeds of 1/2, not 1/6."""
        mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(3, 2))
        xs, whole = rng.standard_normal((3, 4)), rng.standard_normal((4, 5))
        columns = np.array_split(whole, 2, axis=1)

        def program():
            d, t = mesh.coords(ts.dist.rank())
            g = ts.grad(lambda w: ts.sum(ts.all_gather(xs[d] @ w, "tp") ** 2))(columns[t])
            return ts.all_reduce(g, "dp").numpy()

        meant = np.array_split(2 * xs.T @ (xs @ whole), 2, axis=1)
        for rank, got in enumerate(ts.dist.simulate(program, mesh)):
            assert_close(got, meant[rank % 2], n=16)

    def test_data_parallel_with_a_mean_over_the_ranks(self, rng):
        """Each rank's gradient is its share; their sum is that of the mean over the batch."""
        xs, w = rng.standard_normal((4, 6, 3)), rng.standard_normal(3)

        def program(rank):
            def loss(w):
                return ts.all_reduce(ts.mean((xs[rank] @ w) ** 2), op="mean")

            return ts.all_reduce(ts.grad(loss)(w)).numpy(), \
                ts.grad(lambda w: loss(ts.dist.replicated(w)))(w).numpy()

        meant = 2 * np.einsum("rbi,rb->i", xs, xs @ w) / 24
        for summed, marked in on_ranks(4, program):
            assert_close(summed, meant, n=72)
            assert_close(marked, meant, n=72)


class TestReplication:
    """A loss that n ranks hold is seeded with 1/n on each."""

    MESH = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 3))

    @pytest.mark.parametrize("loss, share", [pytest.param(*p, id=name) for name, p in {
        "local": (lambda x: x * 1.0, 1),
        "reduced": (lambda x: ts.all_reduce(x, "tp"), 3),
        "reduced over both": (lambda x: ts.all_reduce(x, ("dp", "tp")), 6),
        "one after the other": (lambda x: ts.all_reduce(ts.all_reduce(x, "tp"), "dp"), 6),
        "all ranks": (lambda x: ts.all_reduce(x), 6),
        "gathered": (lambda x: ts.sum(ts.all_gather(ts.reshape(x, (1,)), "dp")), 2),
        "sent by a root": (lambda x: ts.dist.broadcast(x, "tp", root=2), 3),
        "with what varies": (lambda x: ts.all_reduce(x, "tp") + x, 1),
        "less": (lambda x: ts.all_reduce(x, "tp") * ts.all_reduce(x, ("dp", "tp")), 3),
        "dealt out again": (lambda x: ts.sum(ts.reduce_scatter(
            ts.all_gather(ts.reshape(x, (1,)), "tp"), "tp")), 1),
        "moved": (lambda x: ts.dist.permute(ts.all_reduce(x, ("dp", "tp")), "tp",
                                            pairs=[(0, 1), (1, 2)]), 2),
        "with a random number": (lambda x: ts.all_reduce(x, "tp") * ts.random.normal(()), 3),
        "in a scan": (lambda x: ts.scan(lambda c, i: (ts.all_reduce(x, "tp") + c, None),
                                        ts.zeros((), "f64"), ts.arange(2))[0], 3),
        "a scan that mixes": (lambda x: ts.scan(lambda c, i: ((c[1], c[0] * x), None), (
            ts.all_reduce(x, "tp"), ts.all_reduce(x, "tp")), ts.arange(3))[0][0], 1),
        "in a branch": (lambda x: ts.cond(ts.all_reduce(x, "tp") > -1e9, lambda y: ts.all_reduce(
            y, "tp"), lambda y: ts.all_reduce(y, ("tp",)), x), 3),
        "a branch that varies": (lambda x: ts.cond(x > -1e9, lambda y: ts.all_reduce(
            y, "tp"), lambda y: ts.all_reduce(y, ("tp",)), x), 1),
        "recomputed": (lambda x: ts.checkpoint(lambda y: ts.all_reduce(y, "tp"))(x), 3),
        "said to be": (lambda x: ts.dist.replicated(x, "tp"), 3),
    }.items()])
    def test_seeds(self, loss, share):
        found = []

        def program():
            x = ts.tensor(1.0 + ts.dist.rank(), "f64")
            ts.grad(loss)(x)
            graph = ts.jit(loss).graph(x)
            found.append(seed(graph, graph.outputs[0]))

        ts.dist.simulate(program, self.MESH)
        assert found == [1 / share if share > 1 else 1] * 6

    def test_a_value_of_the_function_around_it(self):
        """The gathered z is closed over: the inner loss is one loss on all ranks, of gradient z."""
        def program():
            @ts.jit
            def step(x):
                z = ts.all_gather(x, "tp")
                return ts.grad(lambda y: ts.sum(ts.all_gather(y, "tp") * z))(x)

            return step(ts.ones((2,)) * (1.0 + ts.dist.rank())).tolist()

        mesh = ts.dist.mesh(axes=("tp",), shape=(2,))
        assert ts.dist.simulate(program, mesh) == [[1, 1], [2, 2]]


class TestTracing:
    def test_ranks_that_trace_different_things_learn_it_before_anything_is_sent(self):
        def program(rank):
            with ts.dist.traffic() as sent:
                try:
                    ts.jit(lambda x: ts.all_gather(x) if rank else ts.all_reduce(x))(ts.ones(3))
                finally:
                    assert not sent

        with pytest.raises(ts.dist.DisagreementError) as info:
            on_ranks(3, program)
        assert "rank 0: trace of all_reduce(f32[3], op=sum)" in str(info.value)
        assert "ranks 1, 2: trace of all_gather(f32[3], dim=0)" in str(info.value)

    WIDTHS = [(2, 2), (2, 2), (2, 3), (2, 2), (1, 3), (2, 3)]  # of ranks 0 and 1, call by call

    @pytest.mark.parametrize("wrap", [
        lambda f: ts.jit(f),
        lambda f: ts.jit(lambda x: ts.scan(lambda c, i: (c, f(x)), 0.0, ts.arange(1))[1][0]),
        lambda f: ts.jit(ts.jit(f)),
    ])
    def test_an_extent_that_changes_on_one_rank_only(self, wrap):
        """All ranks trace anew then, and find both traces again later."""
        traces = []

        def f(x):
            traces.append(ts.dist.rank())
            return ts.all_gather(x)

        def program(rank):
            g = wrap(f)
            return [g(ts.full((n[rank],), rank)).tolist() for n in self.WIDTHS]

        assert on_ranks(2, program) == [[[0] * a + [1] * b for a, b in self.WIDTHS]] * 2
        assert traces.count(0) == traces.count(1) and len(traces) // 2 % 3 == 0

    @pytest.mark.parametrize("wrap", [
        lambda f: ts.grad(f), lambda f: ts.jit(ts.grad(f)), lambda f: ts.jit(ts.grad(ts.jit(f))),
    ])
    def test_its_gradient_then(self, wrap):
        def program(rank):
            g = wrap(lambda x: ts.sum(ts.all_gather(x)) ** 2)
            return [g(ts.ones((n[rank],))).tolist() for n in self.WIDTHS]

        for rank, found in enumerate(on_ranks(2, program)):
            assert found == [[2 * sum(n)] * n[rank] for n in self.WIDTHS]

    def test_ranks_on_different_axes_trace_on_their_own(self, rng):
        """Groups over tp and then over dp; the extents differ along both, and change."""
        mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))
        f = ts.jit(lambda x: ts.all_gather(ts.all_gather(x, "tp", dim=1), "dp", dim=0))

        def program():
            d, t = mesh.coords(ts.dist.rank())
            return [f(ts.ones((1 + d * a, 2 + t * b))).shape for a, b in (
                (0, 0), (1, 0), (1, 3), (0, 0), (2, 1))]

        assert ts.dist.simulate(program, mesh) == [[(2, 4), (3, 4), (3, 7), (2, 4), (4, 5)]] * 4

    def test_the_lines_are_those_of_the_collectives(self):
        def program(rank):
            f = ts.jit(lambda x: ts.all_reduce(x) + ts.all_gather(x))
            with ts.dist.traffic() as sent:
                f(ts.ones(1))
            return [s.where.text for s in sent]

        for lines in on_ranks(2, program):
            assert len(lines) == 2 and all("f = ts.jit(" in text for text in lines)

    def test_a_function_of_all_ranks_is_traced_by_each(self):
        """Simulated ranks share this process; what a trace knows of its rank is its own."""
        f = ts.jit(lambda x: ts.all_gather(x * ts.dist.rank()))
        for ranks in (3, 2):
            for got in on_ranks(ranks, lambda rank: f(ts.ones(1)).tolist()):
                assert got == list(range(ranks))

    def test_the_open_mesh_is_part_of_what_was_traced(self):
        f = ts.jit(lambda x: ts.all_reduce(x, "tp"))

        def program(rank):
            found = []
            for shape in ((2, 2), (4, 1), (1, 4)):
                with ts.dist.mesh(axes=("dp", "tp"), shape=shape):
                    found.append(f(ts.ones(())).item())
            return found

        assert on_ranks(4, program) == [[2, 1, 4]] * 4

    @pytest.mark.row("EFF-03")
    def test_effects(self):
        f = ts.jit(lambda x: ts.all_reduce(x))
        f(ts.ones(2))
        assert f.effects == {"collective"}
        g = ts.jit(lambda x: ts.scan(lambda c, i: (ts.all_gather(c)[:2], None), x, ts.arange(2))[0])
        g(ts.ones(2))
        assert g.effects == {"collective"}
        with pytest.raises(ts.EffectError, match="collective: all_reduce"):
            ts.pure(lambda x: ts.all_reduce(x))(ts.ones(2))
        ts.effects("collective")(lambda x: ts.all_reduce(x))(ts.ones(2))

    @pytest.mark.row("EFF-03")
    def test_order_and_number_are_those_of_the_program(self, rng):
        """The results of some are unread, of two equal, and big loops stand between."""
        x = rng.standard_normal((64, 64)).astype(np.float32)

        def f(x):
            ts.dist.barrier()
            a = ts.all_gather(x, dim=0)
            ts.all_reduce(x, op="min")
            b = ts.sum(ts.exp(x) * ts.tanh(x), axis=-1)
            c = ts.all_reduce(x, op="max") + ts.dist.permute(x, pairs=())
            d = ts.reduce_scatter(ts.exp(x) + b[:, None], dim=0)
            return ts.sum(a) + ts.sum(c) + ts.sum(d)

        def program(rank):
            g = ts.jit(f)
            g(x)
            with ts.dist.traffic() as sent:
                g(x)
            lines = [s.strip() for s in g.inspect_ir("schedule").splitlines() if " call " in s]
            ops = [s.split()[1] for s in lines if s.split()[1] in {*COLLECTIVES, "barrier"}]
            return [s.op for s in sent], ops

        order = ["all_gather", "all_reduce", "all_reduce", "permute", "reduce_scatter"]
        assert on_ranks(2, program) == [(order, ["barrier", *order])] * 2

    def test_fused_loops_do_not_change_the_order(self, rng, monkeypatch):
        """tanh(u) + b would join the loop of u, and a, which reads u, would then come after b."""
        x = rng.standard_normal((64, 64)).astype(np.float32)

        def f(x):
            u = ts.exp(x)
            a = ts.all_reduce(u, op="max")
            b = ts.dist.permute(x, pairs=[(0, 1), (1, 0)])
            return a, ts.tanh(u) + b

        def program(rank):
            g = ts.jit(f)
            with ts.dist.traffic() as sent:
                g(x)
            return [s.op for s in sent]

        assert on_ranks(2, program) == [["all_reduce", "permute"]] * 2
        monkeypatch.setattr("tessera.graph.schedule.fuse.KEEP_EFFECTS", frozenset())
        assert on_ranks(2, program) == [["permute", "all_reduce"]] * 2, "no order to keep"


class TestMerging:
    @staticmethod
    def many(x, y, z):
        return (ts.all_reduce(x), ts.all_reduce(y * 2), ts.all_reduce(ts.exp(z)) + 1)

    @pytest.mark.row("EFF-04")
    def test_small_neighbours_are_one_call_with_the_same_bits(self, rng):
        xs = [[rng.standard_normal(s).astype(np.float32) for s in ((2, 3), (), (5,))]
              for _ in range(3)]

        def program(rank):
            f = ts.jit(self.many)
            apart = self.many(*map(ts.tensor, xs[rank]))
            f(*xs[rank])
            with ts.dist.traffic() as sent:
                together = f(*xs[rank])
            same = [np.array_equal(a.numpy(), b.numpy()) for a, b in zip(
                apart, together, strict=True)]
            plan = f.inspect_ir("schedule")
            return all(same), [s.op for s in sent], plan.count("call all_reduce -> f32[12]")

        assert on_ranks(3, program) == [(True, ["all_reduce"], 1)] * 3

    @pytest.mark.parametrize("change, calls", [
        (lambda x: (ts.all_reduce(x), ts.all_reduce(x, op="max")), 2),
        (lambda x: (ts.all_reduce(x), ts.all_reduce(ts.cast(x, "f64"))), 2),
        (lambda x: (ts.all_reduce(x), ts.all_gather(x), ts.all_reduce(x)), 2),
        (lambda x: (ts.all_reduce(ts.all_reduce(x)),), 2),
        (lambda x: (ts.all_reduce(x), ts.all_reduce(x, dtype="bf16 @stochastic_round", key=1)), 2),
        (lambda x: (ts.all_reduce(ts.broadcast_to(x, (SMALL_BYTES, 3))), ts.all_reduce(x)), 2),
        (lambda x: (ts.all_reduce(x), ts.exp(x) + ts.all_reduce(x * 3)), 1),
        (lambda x: (ts.all_reduce(x) + 1, ts.all_reduce(x * 3)), 2),
    ])
    def test_what_may_not_be_merged(self, change, calls):
        """Other ops, types and effects in between end a run, and so does a reader."""
        def program(rank):
            f = ts.jit(change)
            graph = f.graph(ts.ones(3) + rank)
            merged = merge_all_reduces(graph)
            verify(merged)
            for got, meant in zip(f(ts.ones(3) + rank), change(ts.ones(3) + rank), strict=True):
                assert (got.array == meant.array).all()
            return sum(n.op.name == "all_reduce" for n in merged.nodes)

        assert on_ranks(2, program) == [calls] * 2

    def test_gradients_of_many_parameters_travel_together(self, rng):
        ws = {f"w{i}": rng.standard_normal((3, 3)) for i in range(5)}

        def program(rank):
            @ts.jit
            def step(ws):
                grads = ts.grad(lambda ws: sum(ts.sum(w ** 2) for w in ws.values()))(ws)
                return {k: ts.all_reduce(g) for k, g in grads.items()}

            step(ws)
            with ts.dist.traffic() as sent:
                grads = step(ws)
            np.testing.assert_allclose(grads["w3"].numpy(), 4 * ws["w3"])
            return len(sent)

        assert on_ranks(2, program) == [1, 1]


class TestDistributedTensors:
    """What says something about the tensors of ranks has nothing to say about whole ones."""

    def test_replicated_and_barrier(self, rng):
        mesh = ts.dist.mesh(axes=("tp",), shape=(2,))
        rows = ts.ShardSpec(("row",), ("tp",))
        x = ts.dist.distribute(rng.standard_normal((4, 4)), rows, mesh=mesh)

        def f(x):
            ts.dist.barrier("tp", mesh=mesh)
            return ts.dist.replicated(x, "tp", mesh=mesh) * 2

        assert (ts.jit(f)(x).numpy() == 2 * x.numpy()).all()
        assert ts.dist.replicated(x, "tp", mesh=mesh) is x
