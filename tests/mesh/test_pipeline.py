"""Pipelines: schedules as data, gradients equal to those of the whole model, what ran when."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from mesh import parallel
from mesh.launch import mpirun, needs_mpi
from mesh.parallel import MODEL, TIED, dropping, model_batch, model_params, squares, train
from tessera.mesh.parallel.forward_backward import Halves
from tessera.mesh.parallel.schedules import schedule

PROGRAMS = Path(parallel.__file__)
KINDS = pytest.mark.parametrize("kind", ["1f1b", "gpipe"])


def whole_model(params, tokens, targets):
    h = tokens
    for stage, own in zip(MODEL, params, strict=True):
        h = stage(own, h)
    return squares(h, targets)


def reference(batch=None, dtype: str = "f32") -> dict:
    """The loss and gradients without a pipeline; a tied parameter has the sum."""
    params = model_params(dtype=dtype)
    loss, grads = ts.value_and_grad(whole_model)(params, *(batch or model_batch()))
    embed = ts.tensor(grads[0]["embed"] + grads[3]["embed"])
    grads[0]["embed"] = grads[3]["embed"] = embed
    return {"loss": loss.array} | {f"{s}.{k}": g.array for s, own in enumerate(grads)
                                   for k, g in own.items()}


def check(found: dict, meant: dict, names=None) -> None:
    assert found.keys() == (meant.keys() if names is None else names)
    for name, value in found.items():
        assert value.dtype == meant[name].dtype
        np.testing.assert_allclose(value, meant[name], rtol=2e-5, atol=2e-6, err_msg=name)


class TestMasks:
    """Dropout draws by stage, microbatch and call: the same in one process and in several."""

    def test_one_process_and_several_ranks_and_both_schedules(self):
        alone = parallel.dropouts()
        assert len(set(alone[:3])) == 3, "each step draws anew"
        assert parallel.dropouts("gpipe") == pytest.approx(alone, rel=1e-6)
        for ranks in (2, 4):
            mesh = ts.dist.mesh(axes=("pp",), shape=(ranks,))
            assert ts.dist.simulate(parallel.dropouts, mesh) == [alone] * ranks
            with mesh:
                assert parallel.dropouts() == alone

    @needs_mpi
    def test_under_mpirun(self, tmp_path):
        run = mpirun(2, "masks", tmp_path, battery=PROGRAMS)
        assert run.status == 0, run.text
        assert set(run.results.values()) == {str(parallel.dropouts())}

    def test_a_call_that_draws_takes_one_step_and_another_none(self):
        def steps(stage) -> int:
            before = ts.random.get_state().step
            pipe = ts.pipeline([embed_free, stage], 2)
            for _ in range(2):
                pipe([{"w": ts.ones((6, 6))}] * 2, ts.ones((8, 6)))
            return ts.random.get_state().step - before

        def embed_free(p, h):
            return ts.tanh(h @ p["w"])

        mesh = ts.dist.mesh(axes=("pp",), shape=(2,))
        for stage, meant in ((dropping, 2), (embed_free, 0)):
            assert steps(stage) == meant
            assert ts.dist.simulate(steps, mesh, stage) == [meant] * 2, "the first rank draws not"

    def test_a_run_continued_from_its_random_state_draws_on(self):
        ts.random.seed(3)
        pipe = ts.pipeline([dropping, dropping], 2)
        params = [{"w": ts.ones((6, 6))}, {"w": ts.ones((6, 6))}]
        step, x = pipe.value_and_grad(squares), ts.ones((8, 6))
        step(params, x, x)
        state = ts.random.get_state()
        meant = step(params, x, x)[0].item()
        ts.random.set_state(state)
        assert step(params, x, x)[0].item() == meant


class TestTraining:
    @pytest.mark.row("DIST-28")
    @KINDS
    def test_gradients_equal_those_without_a_pipeline(self, kind):
        """10 rows in 4 microbatches: 3, 3, 2 and 2 rows, weighted by them."""
        meant = reference()
        check(train(kind), meant)
        mesh = ts.dist.mesh(axes=("pp",), shape=(4,))
        with mesh:
            check(train(kind), meant)  # alone, the stages take turns here
        for rank, found in enumerate(ts.dist.simulate(train, mesh, kind)):
            own = {n for n in meant if n.startswith(f"{rank}.")} | {"loss"}
            check(found, meant, own)

    @KINDS
    def test_several_stages_per_rank(self, kind):
        meant, mesh = reference(), ts.dist.mesh(axes=("pp",), shape=(2,))
        for rank, found in enumerate(ts.dist.simulate(train, mesh, kind)):
            own = {n for n in meant if n[0] in (str(rank), str(rank + 2))} | {"loss"}
            check(found, meant, own)

    @KINDS
    @pytest.mark.parametrize("microbatches", [1, 3, 10])
    def test_schedules_give_the_same_bits(self, kind, microbatches):
        first = train("1f1b", microbatches)
        found = train(kind, microbatches)
        assert all((found[k] == first[k]).all() for k in first)
        for own in ts.dist.simulate(train, ts.dist.mesh(axes=("pp",), shape=(4,)), kind,
                                    microbatches):
            assert all((own[k] == first[k]).all() for k in own)

    @pytest.mark.parametrize("numerics", ["off", "raise"])
    def test_gradients_that_share_memory_are_added_up_apart(self, numerics):
        """Under sentinels a graph runs node by node, and its results may be one array."""
        pipe = ts.pipeline([lambda p, x: x + (p["a"] + p["b"])], 4)
        params = {k: ts.zeros(3) for k in "ab"}
        with ts.config.scope(numerics=numerics):
            _, (grads,) = pipe.value_and_grad(lambda y: ts.mean(y))([params], ts.ones((8, 3)))
        for g in grads.values():
            np.testing.assert_allclose(g.numpy(), np.full(3, 1 / 3), rtol=1e-6)

    def test_gradients_of_bf16_parameters_add_up_in_f32(self):
        """256 microbatches of equal gradients 2^-9: a sum in bf16 stops at 1/2."""
        pipe = ts.pipeline([lambda p, x: p * x], microbatches=256)
        x = ts.full((256,), 0.5, "bf16")
        loss, (g,) = pipe.value_and_grad(lambda y: ts.mean(ts.cast(y, "f32")))(
            [ts.ones((), "bf16")], x)
        assert g.type == ts.as_type("f32") and g.item() == 0.5 and loss.item() == 0.5

    def test_f64(self):
        batch = model_batch(dtype="f64")
        pipe = ts.pipeline(MODEL, 4, tied=TIED)
        loss, grads = pipe.value_and_grad(squares)(model_params(dtype="f64"), *batch)
        meant = reference(batch, "f64")
        assert loss.dtype is ts.f64 and grads[1]["w"].dtype is ts.f64
        np.testing.assert_allclose(grads[0]["embed"].numpy(), meant["0.embed"], rtol=1e-12)

    def test_no_rank_needs_the_parameters_of_others(self):
        mesh, meant = ts.dist.mesh(axes=("pp",), shape=(4,)), reference()

        def program():
            params = [p if s == ts.dist.rank() else None for s, p in enumerate(model_params())]
            pipe = ts.pipeline(MODEL, 4, tied=TIED)
            loss, grads = pipe.value_and_grad(squares)(params, *model_batch())
            assert [g is None for g in grads] == [p is None for p in params]
            return loss.item()

        np.testing.assert_allclose(ts.dist.simulate(program, mesh), meant["loss"], rtol=1e-6)

    @pytest.mark.row("DIST-28")
    def test_five_steps_of_training(self):
        """Weights after five steps, tied ones among them, equal those of the whole model."""
        def whole(weights, tokens, targets):
            return whole_model([*weights, {"embed": weights[0]["embed"]}], tokens, targets)

        weights = model_params()[:3]
        optimizer = ts.optim.AdamW(weight_decay=0.1)
        state = optimizer.init(weights)
        for seed in range(5):
            _, grads = ts.value_and_grad(whole)(weights, *model_batch(seed))
            weights, state = optimizer.update(weights, grads, state, 0.02)

        def program():
            params, me = model_params(), ts.dist.rank()
            own, step = params[me], ts.pipeline(MODEL, 3, tied=TIED).value_and_grad(squares)
            state = optimizer.init(own)
            for seed in range(5):
                mine = [own if s == me else None for s in range(4)]
                _, grads = step(mine, *model_batch(seed))
                own, state = optimizer.update(own, grads[me], state, 0.02)
            return {k: v.numpy() for k, v in own.items()}

        found = ts.dist.simulate(program, ts.dist.mesh(axes=("pp",), shape=(4,)))
        assert (found[0]["embed"] == found[3]["embed"]).all()
        for own, meant in zip(found, weights, strict=False):
            for name, value in own.items():
                np.testing.assert_allclose(value, meant[name].numpy(), rtol=1e-3, atol=1e-4)
        assert np.abs(found[0]["embed"] - model_params()[0]["embed"].numpy()).max() > 0.05

    def test_evaluation(self):
        params, (tokens, _) = model_params(), model_batch()
        meant = tokens
        for stage, own in zip(MODEL, params, strict=True):
            meant = stage(own, meant)
        pipe = ts.pipeline(MODEL, 3)
        np.testing.assert_allclose(pipe(params, tokens).numpy(), meant.numpy(), rtol=1e-5)
        for ranks in (2, 4):
            mesh = ts.dist.mesh(axes=("pp",), shape=(ranks,))
            *others, last = ts.dist.simulate(lambda: pipe(params, tokens), mesh)
            assert others == [None] * (ranks - 1)
            np.testing.assert_allclose(last.numpy(), meant.numpy(), rtol=1e-5)

    def test_live_residuals_follow_the_schedule(self, monkeypatch):
        """What a 1F1B stage keeps at the same time, counted while it runs."""
        live, most = {}, {}
        run, pull = Halves.run, Halves.pull

        def counted_run(self, *args):
            me = ts.dist.rank()
            live[me] = live.get(me, 0) + 1
            most[me] = max(most.get(me, 0), live[me])
            return run(self, *args)

        def counted_pull(self, *args):
            live[ts.dist.rank()] -= 1
            return pull(self, *args)

        monkeypatch.setattr(Halves, "run", counted_run)
        monkeypatch.setattr(Halves, "pull", counted_pull)
        mesh = ts.dist.mesh(axes=("pp",), shape=(4,))
        ts.dist.simulate(train, mesh, "1f1b", 8)
        assert most == {0: 4, 1: 3, 2: 2, 3: 1} and set(live.values()) == {0}
        most.clear()
        ts.dist.simulate(train, mesh, "gpipe", 8)
        assert set(most.values()) == {8}


class TestOtherAxes:
    def test_data_parallel_ranks_have_batches_of_their_own(self):
        mesh = ts.dist.mesh(axes=("dp", "pp"), shape=(2, 2))
        meant = reference()

        def program():
            place = mesh.coords(ts.dist.rank())
            tokens, targets = model_batch()
            rows = slice(0, 5) if place[0] == 0 else slice(5, 10)
            pipe = ts.pipeline(MODEL, 2, tied=TIED)
            loss, grads = pipe.value_and_grad(squares)(model_params(), tokens[rows], targets[rows])
            mean = {f"{s}.{k}": ts.dist.all_reduce(g, "dp", op="mean").array
                    for s, own in enumerate(grads) if own for k, g in own.items()}
            return {"loss": ts.dist.all_reduce(loss, "dp", op="mean").array, **mean}

        for rank, found in enumerate(ts.dist.simulate(program, mesh)):
            check(found, meant, {n for n in meant if n[0] in (str(rank % 2), str(rank % 2 + 2))}
                  | {"loss"})

    def test_stages_may_communicate_on_the_axes_that_are_left(self, rng):
        """Two stages, each with its first matrix cut in columns and its second in rows."""
        w = [[ts.tensor(rng.standard_normal(s) / 3, "f32") for s in ((6, 8), (8, 6))]
             for _ in range(2)]
        x, t = (ts.tensor(rng.standard_normal((8, 6)), "f32") for _ in range(2))

        def loss_fn(y, t):
            return ts.mean((y - t) ** 2)

        def whole(w):
            h = x
            for a, b in w:
                h = ts.tanh(h @ a) @ b
            return loss_fn(h, t)

        loss, grads = ts.value_and_grad(whole)(w)
        mesh = ts.dist.mesh(axes=("tp", "pp"), shape=(2, 2))

        def stage(p, h):
            return ts.dist.all_reduce(ts.tanh(h @ p[0]) @ p[1], "tp")

        def tp_loss(y, t):
            return loss_fn(y, ts.dist.replicated(t, "tp"))

        def program():
            tp, pp = mesh.coords(ts.dist.rank())
            cut = slice(4 * tp, 4 * tp + 4)
            params = [None, None]
            params[pp] = [w[pp][0][:, cut], w[pp][1][cut]]
            pipe = ts.pipeline([stage, stage], 3)
            found, grads = pipe.value_and_grad(tp_loss)(params, x, t)
            return found.item(), [g.numpy() for g in grads[pp]]

        for rank, (found, (da, db)) in enumerate(ts.dist.simulate(program, mesh)):
            tp, pp = mesh.coords(rank)
            cut = slice(4 * tp, 4 * tp + 4)
            assert found == pytest.approx(loss.item(), rel=1e-5)
            np.testing.assert_allclose(da, grads[pp][0].numpy()[:, cut], rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(db, grads[pp][1].numpy()[cut], rtol=1e-4, atol=1e-6)


    @pytest.mark.parametrize("places", [1, 2])
    def test_a_loss_that_several_ranks_have_counts_once(self, places, rng):
        """That it is the same on all is known from the stage before the last."""
        w = ts.tensor(rng.standard_normal((6, 6)), "f32")
        x, t = (ts.tensor(rng.standard_normal((8, 6)), "f32") for _ in range(2))
        meant = ts.grad(lambda w: squares(ts.tanh(x @ w), t))(w)
        mesh = ts.dist.mesh(axes=("tp", "pp"), shape=(2, places))

        def rows(p, h):
            half = slice(3 * mesh.coords(ts.dist.rank())[0], None)
            return ts.dist.all_reduce(h[:, half][:, :3] @ p, "tp")

        def program():
            tp, pp = mesh.coords(ts.dist.rank())
            pipe = ts.pipeline([rows, lambda p, h: ts.tanh(h)], 2)
            _, grads = pipe.value_and_grad(lambda y, t: squares(y, ts.dist.replicated(t, "tp")))(
                [w[3 * tp:3 * tp + 3], None], x, t)
            return None if grads[0] is None else grads[0].numpy()

        for rank, found in enumerate(ts.dist.simulate(program, mesh)):
            tp, pp = mesh.coords(rank)
            assert (found is None) == (pp == 1)
            if found is not None:
                np.testing.assert_allclose(found, meant.numpy()[3 * tp:3 * tp + 3], rtol=1e-4,
                                           atol=1e-6)

    def test_distributed_tensors_keep_their_layouts(self):
        """Weights split over tp, 10 rows over dp, stages over pp: as one process computes it. The
        microbatches have 4, 4 and 2 rows: each of the two ranks has 2, 2 and 1."""
        weights, x, t = parallel.blocks_of()

        def whole(weights):
            h = ts.tensor(x)
            for own in weights:
                h = parallel.block(own, h)
            return squares(h, ts.tensor(t)), h

        (loss, y), grads = ts.value_and_grad(whole, has_aux=True)(
            [[ts.tensor(w) for w in own] for own in weights])
        meant = {"loss": loss.array, "y": y.array} | {
            f"{s}.{k}": g.array for s, own in enumerate(grads) for k, g in enumerate(own)}
        check(parallel.distributed(), meant)
        for rank, found in enumerate(ts.dist.simulate(parallel.distributed, 8)):
            mine = {f"{rank % 2}.0", f"{rank % 2}.1", "loss"} | ({"y"} if rank % 2 else set())
            check(found, meant, mine)


def test_sentinels_name_the_stage_the_microbatch_and_the_parameter():
    mesh = ts.dist.mesh(axes=("pp",), shape=(2,))

    def last(p, x):
        return ts.log(x) * p["w"]

    def program(value, weight):
        x = np.ones((8, 3), np.float32)
        x[5, 1] = value
        step = ts.pipeline([lambda p, x: x * p, last], 4).value_and_grad(ts.mean)
        step([ts.ones(()), {"w": ts.tensor(weight)}], ts.tensor(x))

    with ts.debug.numerics("raise"):
        with pytest.raises(ts.NumericsError, match="in last, call .*, iteration 2 of microbatches"):
            ts.dist.simulate(program, mesh, -1.0, 1.0)
        with pytest.raises(ts.NumericsError, match="came in with argument params.w"):
            program(1.0, float("nan"))


class TestTrace:
    def test_what_ran_when(self):
        mesh = ts.dist.mesh(axes=("pp",), shape=(3,))

        def program():
            pipe = ts.pipeline([lambda p, x: x * p] * 3, 4)
            with pytest.raises(ts.ArgumentError, match="has not run yet"):
                pipe.trace()
            pipe.value_and_grad(lambda y: ts.mean(y))([ts.ones(()) for _ in range(3)], ts.ones(8))
            return pipe.trace()

        timelines = ts.dist.simulate(program, mesh)
        assert timelines[0] == timelines[1] == timelines[2]
        for rank, own in enumerate(schedule("1f1b", 3, 4).steps):
            assert [s.label for s in timelines[0].spans if s.row == rank] == list(map(str, own))
        assert "3 stages, 4 microbatches" in str(timelines[0]) and "ms" in str(timelines[0])

    @pytest.mark.row("DIST-28")
    @needs_mpi
    def test_stages_overlap(self, tmp_path):
        """At least once in ten: other processes may hold the cores that a run is given."""
        overlaps: list[float] = []
        while max(overlaps, default=0.0) <= 0.2 and len(overlaps) < 10:
            folder = tmp_path / str(len(overlaps))
            folder.mkdir()
            run = mpirun(2, "overlap", folder, battery=PROGRAMS)
            assert run.status == 0, run.text
            print(run.results[0])
            overlaps.append(float(run.results[0].split("\n")[0]))
        assert overlaps[-1] > 0.2, overlaps

    @needs_mpi
    @pytest.mark.parametrize("program, ranks", [
        ("pipelines", 2), ("pipelines", 4), ("distributed_pipeline", 8)])
    def test_mpi_gives_the_bits_of_the_simulation(self, program, ranks, tmp_path):
        run = mpirun(ranks, program, tmp_path, battery=PROGRAMS)
        assert run.status == 0, run.text
        meant = ts.dist.simulate(getattr(parallel, program), ranks)
        assert run.results == dict(enumerate(meant))


def test_names_that_hold_something_else_are_seen():
    """As under ts.jit: of a stage, of the last one and of the loss; and a tensor."""
    now = {"first": 1.0, "last": 1.0, "loss": 1.0, "shift": ts.tensor(0.0)}
    pipe = ts.pipeline([lambda p, x: x * p * now["first"],
                        lambda p, x: x * p * now["last"] + now["shift"]], 2)
    step = pipe.value_and_grad(lambda y: now["loss"] * ts.mean(y))
    found = []
    for name, value in [("first", 1.0), ("first", 2.0), ("last", 3.0), ("loss", 5.0),
                        ("shift", ts.tensor(1.0))]:
        now[name] = value
        found.append(step([ts.ones(()), ts.ones(())], ts.ones(4))[0].item())
    assert found == [1.0, 2.0, 6.0, 30.0, 35.0]


def two(**options):
    return ts.pipeline([lambda p, x: x * p, lambda p, x: x + p], 2, **options)


class TestMistakes:
    @pytest.mark.parametrize("make, words", [
        (lambda: ts.pipeline([], 2), "needs a list of functions"),
        (lambda: ts.pipeline(squares, 2), "needs a list of functions"),
        (lambda: ts.pipeline([squares, 3], 2), "needs a list of functions"),
        (lambda: two(schedule="zb"), "no pipeline schedule 'zb'"),
        (lambda: two(tied=[("0.w", "2.w")]), "'2.w' names no parameter of 2 stages"),
        (lambda: two()([1.0], ts.ones(4)), "one tree of parameters per stage, got 1 entries"),
        (lambda: two()([1.0, 2.0], ts.ones(1)), "2 microbatches of the batch, .* of 1, 0 rows"),
        (lambda: two().value_and_grad(3), "needs a loss function, got 3"),
        (lambda: two(tied=[("0", "1.w")]).value_and_grad(ts.mean)(
            [ts.ones(()), ts.ones(())], ts.ones(4)), "stage 1 has no parameter 'w'"),
    ])
    def test_arguments(self, make, words):
        with pytest.raises(ts.ArgumentError, match=words):
            make()

    def test_shapes(self):
        with pytest.raises(ts.ShapeError, match="x is a scalar"):
            two()([1.0, 2.0], 3.0)
        with pytest.raises(ts.ShapeError, match="x.0 has 4, x.1 has 3"):
            two()([1.0, 2.0], (ts.ones(4), ts.ones(3)))
        with pytest.raises(ts.ShapeError, match="x has 4 rows, the targets 3"):
            two().value_and_grad(squares)([1.0, 2.0], ts.ones(4), ts.ones(3))

    def test_a_loss_that_is_none(self):
        with pytest.raises(ts.GradError, match=r"must return a float scalar, it returns f32\[2\]"):
            two().value_and_grad(lambda y: y)([ts.ones(()), ts.ones(())], ts.ones(4))

    def test_the_same_tensor_in_two_stages_must_be_tied(self):
        w = ts.ones(())
        with pytest.raises(ts.ArgumentError, match="stages 0 and 1 have the same tensor") as info:
            two().value_and_grad(ts.mean)([{"w": w}["w"], w], ts.ones(4))
        assert 'tied=[("0", "1")]' in info.value.hint

    def test_batches_that_are_split_in_different_ways(self):
        mesh = ts.dist.mesh(axes=("dp", "pp"), shape=(2, 2))
        rows = ts.ShardSpec(("row",), ("dp",))
        x = ts.dist.tensor((8, 3), rows, mesh, init=1.0)
        step = two(mesh=mesh).value_and_grad(squares)
        params = [ts.ones(()), ts.ones(())]
        with pytest.raises(ts.ArgumentError, match="the batch.0 over dp, the batch.1 over no axis"):
            step(params, x, ts.ones((8, 3)))
        few = ts.dist.tensor((2, 3), rows, mesh, init=1.0)
        with pytest.raises(ts.ArgumentError, match="too few rows: microbatches of 2, 0 rows"):
            step(params, few, few)

    def test_distributed_tensors_that_lie_elsewhere(self):
        mesh = ts.dist.mesh(axes=("dp", "pp"), shape=(2, 2))
        x, (p, q) = ts.ones(4), (ts.dist.tensor((), mesh=mesh.sub(pp=s)) for s in (0, 1))
        with mesh:
            with pytest.raises(ts.dist.MeshError, match="is used by a stage on mesh.*ranks 1, 3"):
                two()([p, p], x)
            rows = ts.dist.tensor((4, 1), ts.ShardSpec(("row",), ("pp",)), mesh)
            with pytest.raises(ts.ArgumentError, match="cannot be used by one stage") as info:
                two()([p, q], rows)
        assert "may be split over 'pp'" in info.value.hint

    def test_inside_jit(self):
        with pytest.raises(ts.TraceError, match="a pipeline cannot be traced"):
            ts.jit(lambda x: two()([1.0, 2.0], x))(ts.ones(4))

    def test_a_mesh_without_the_axis(self):
        with pytest.raises(ts.AxisError, match="has no axis 'pp'"):
            two(mesh=ts.dist.mesh(axes=("dp",), shape=(2,)))

    def test_ranks_with_different_batches(self):
        def program():
            return two()([1.0, 2.0], ts.ones(4 + ts.dist.rank()))

        with pytest.raises(ts.dist.DisagreementError, match="(?s)rows=4.*rows=5"):
            ts.dist.simulate(program, ts.dist.mesh(axes=("pp",), shape=(2,)))

    def test_a_stage_that_fails_stops_all(self):
        def broken(p, x):
            raise ValueError("broken stage")

        def program():
            return ts.pipeline([lambda p, x: x, broken], 2)([1.0, 2.0], ts.ones(4))

        with pytest.raises(ValueError, match="broken stage") as info:
            ts.dist.simulate(program, ts.dist.mesh(axes=("pp",), shape=(2,)))
        assert "raised on rank 1 of 2" in info.value.__notes__[0]


# --- scales of fp8 --------------------------------------------------------------------------------
SCALING = ts.DelayedScaling(amax_history_len=4)
FP8_STAGES = [lambda p, x: ts.tanh(SCALING.matmul(x, p["w"], p["h"]))]
FP8_STAGES.append(lambda p, x: ts.scan(lambda c, own: (FP8_STAGES[0](own, c), None), x, p)[0])


def fp8_training(microbatches: int = 4) -> list:
    """A step of a stage with one product, and of one that scans over two."""
    rng = np.random.default_rng(5)
    w, (x, y) = rng.normal(size=(3, 8, 8)), rng.normal(size=(2, 14, 8))
    histories = [{k: ts.full(shape, 4.0) for k in ("x", "w", "cotangent")}
                 for shape in ((4,), (2, 4))]
    params = [{"w": ts.tensor(v, "f32"), "h": h} for v, h in zip((w[0], w[1:]), histories,
                                                                 strict=True)]
    step = ts.pipeline(FP8_STAGES, microbatches).value_and_grad(squares)
    return step(params, *(ts.tensor(v, "f32") for v in (x, y)))[1]


def test_the_largest_numbers_of_microbatches_are_those_of_the_batch():
    """They added up, so that scales of m microbatches were m times too wide."""
    meant = fp8_training(1)
    for found in (fp8_training(), *ts.dist.simulate(fp8_training,
                                                    ts.dist.mesh(axes=("pp",), shape=(2,)))):
        for own, other in zip(found, meant, strict=True):
            for k in own["h"] if own is not None else ():
                np.testing.assert_array_equal(own["h"][k].numpy(), other["h"][k].numpy())
