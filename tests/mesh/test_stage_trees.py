"""What is asked of all gradients of a pipeline together: their norm, whether they are finite."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest

import tessera as ts
from mesh.parallel import MODEL, TIED, model_batch, model_params, squares
from mesh.test_pipeline import reference, two
from tessera.mesh.parallel.stage_trees import StageGradientsWarning


class TestWholeModel:
    """What is asked of all gradients together is that of the model, on one rank as on several."""

    @pytest.mark.parametrize("ranks", [1, 2, 4])
    def test_norm_and_clipping(self, ranks):
        """A tied parameter, the sum of whose gradients two stages have, counts once; a second batch
        is added up in a list that was made of the parameters."""
        def norm(found: dict) -> float:
            return sum((g.astype(np.float64) ** 2).sum() for name, g in found.items()
                       if name not in ("loss", "3.embed")) ** 0.5

        both = [reference(model_batch(seed)) for seed in (6, 7)]
        want, total = norm(both[0]), norm({k: both[0][k] + both[1][k] for k in both[0]})

        def program():
            params = [p if ranks == 1 or ts.dist.rank() == s % ranks else None
                      for s, p in enumerate(model_params())]
            step = ts.pipeline(MODEL, 4, tied=TIED).value_and_grad(squares)
            grads, more = (step(params, *model_batch(seed))[1] for seed in (6, 7))
            clipped, found = ts.optim.clip_by_global_norm(grads, want / 4)
            _, compiled = ts.jit(lambda g: ts.optim.clip_by_global_norm(g, want / 4))(grads)
            sums = ts.map_tree(lambda p: p * 0.0, params)
            for g in (grads, more):
                sums = ts.map_tree(lambda t, g: t + g, sums, g)
            return [x.item() for x in (found, compiled, ts.optim.global_norm(clipped),
                                       ts.optim.global_norm(copy.deepcopy(sums)))]

        mesh = ts.dist.mesh(axes=("pp",), shape=(ranks,))
        made = [program()] if ranks == 1 else ts.dist.simulate(program, mesh)
        for found in made:
            assert found == made[0]
            np.testing.assert_allclose(found, [want, want, want / 4, total], rtol=2e-6)

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_what_is_not_trained_has_no_gradient_and_no_part(self, ranks, rng):
        """As under ts.grad: beside ts.params are constants, here frozen weights, of which two
        stages share one, and a name."""
        table = ts.tensor(rng.standard_normal((5, 4)), "f32")
        params = [{"table": table, "w": ts.param(rng.standard_normal((4, 4)), "f32"), "kind": kind}
                  for kind in ("first", "last")]
        ids = ts.tensor(rng.integers(0, 5, 6), "int32")

        def first(p, ids):
            scale = 2.0 if p["kind"] == "first" else 1.0
            return ts.take(p["table"], ids, axis=0) @ p["w"] * scale

        def last(p, h):
            return ts.tanh(h @ p["w"]) @ ts.transpose(p["table"])

        def loss(y, ids):
            return ts.mean(ts.cross_entropy(y, ids))

        want = ts.grad(lambda p: loss(last(p[1], first(p[0], ids)), ids))(params)

        def program():
            own = [p if ranks == 1 or ts.dist.rank() == s else None for s, p in enumerate(params)]
            step = ts.pipeline([first, last], 2, tied=[("0.table", "1.table")]).value_and_grad(loss)
            grads = step(own, ids, ids)[1]
            for g, meant in zip(grads, want, strict=True):
                if g is not None:
                    assert g["table"] is None and g["kind"] is None
                    np.testing.assert_allclose(g["w"].numpy(), meant["w"].numpy(), rtol=1e-5)
            return ts.optim.global_norm(grads).item()

        mesh = ts.dist.mesh(axes=("pp",), shape=(ranks,))
        found = [program()] if ranks == 1 else ts.dist.simulate(program, mesh)
        np.testing.assert_allclose(found, ts.optim.global_norm(want).item(), rtol=1e-6)

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_the_gradients_of_one_stage_are_not_clipped_by_their_own_norm(self, ranks):
        def program():
            step = two().value_and_grad(squares)
            grads = step([ts.ones(()), ts.ones(())], ts.ones(4), ts.zeros(4))[1]
            own, norm = next(g for g in grads if g is not None), ts.optim.global_norm(grads)
            clip = ts.optim.clip_by_global_norm
            for call in (lambda g: clip(g, 1.0), ts.jit(lambda g: clip({"w": g}, 1.0))):
                with pytest.raises(ts.ArgumentError, match="gradients of one stage of a") as info:
                    call(own)
                assert "norm=ts.optim.global_norm(grads)" in info.value.hint
            with pytest.raises(ts.ArgumentError, match="whether a step is finite .* one stage"):
                ts.DynamicLossScale().step([own], lambda g: g, None)
            assert ts.jit(lambda g, n: clip(g, 1.0, n)[0])(own, norm).item() == pytest.approx(
                own.item() / norm.item())
            return norm.item()

        mesh = ts.dist.mesh(axes=("pp",), shape=(ranks,))
        found = [program()] if ranks == 1 else ts.dist.simulate(program, mesh)
        np.testing.assert_allclose(found, 4 * 2**0.5, rtol=1e-6)

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_gradients_of_one_stage_that_were_scaled_by_hand_are_told_of(self, ranks):
        """They are new tensors, of which only the extents are known. Of a tree of other extents,
        and of the whole list, nothing is said."""
        stages = [lambda p, x: x * p["w"] + p["b"]] * 2

        def program():
            step = ts.pipeline(stages, 2).value_and_grad(squares)
            params = [{"w": ts.ones(3), "b": ts.ones(1)} for _ in stages]
            grads = step(params, ts.ones((4, 3)), ts.zeros((4, 3)))[1]
            own = next(g for g in grads if g is not None)
            clip, scaled = ts.optim.clip_by_global_norm, {k: g / 2.0 for k, g in own.items()}
            for call in (clip, ts.jit(lambda g, limit: clip([g["w"], g["b"]], 1.0))):
                with pytest.warns(StageGradientsWarning, match="extents are those of the gradients "
                                  "of one stage.*norm=ts.optim.global_norm"):
                    call(scaled, 1.0)
            with pytest.warns(StageGradientsWarning, match="whether a step is finite"):
                ts.DynamicLossScale().step(scaled, lambda g: g, None)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                clip([own["w"] / 2.0, own["w"] / 2.0], 1.0)
                clip(scaled, 1.0, norm=ts.optim.global_norm(grads) / 2.0)
                return clip(ts.map_tree(lambda g: g / 2.0, grads), 1.0)[1].item()

        mesh = ts.dist.mesh(axes=("pp",), shape=(ranks,))
        found = [program()] if ranks == 1 else ts.dist.simulate(program, mesh)
        assert len(set(found)) == 1

    def test_ranks_skip_a_step_together(self):
        """The gradient of one stage overflows under a scale of 2^126, the other's does not."""
        def program():
            step = two().value_and_grad(squares)
            params = [ts.tensor(1e-30), ts.ones(())]
            scale, found = ts.DynamicLossScale(2.0**126, largest=2.0**126), []
            for _ in range(2):
                loss, grads = step(params, ts.full(4, 8.0), ts.zeros(4), loss_scale=scale.value)
                own = [bool(np.isfinite(g.numpy())) for g in grads if g is not None]
                (kind, got), scale = scale.step(
                    grads, lambda g: ("done", [x.item() for x in g if x is not None]),
                    ("skipped", []))
                found.append((kind, own, loss.item(), got, scale.value))
            return found

        first, second = ts.dist.simulate(program, ts.dist.mesh(axes=("pp",), shape=(2,)))
        assert first[0] == ("skipped", [False], 1.0, [], 2.0**125)
        assert second[0] == ("skipped", [True], 1.0, [], 2.0**125)
        assert first[1] == ("skipped", [False], 1.0, [], 2.0**124)

    def test_of_distributed_tensors_it_is_asked_outside_of_compiled_functions(self):
        mesh = ts.dist.mesh(axes=("tp", "pp"), shape=(2, 2))

        def program():
            params = [ts.dist.distribute(np.full(4, k, np.float32), ts.ShardSpec(("row",), ("tp",)),
                                         mesh=mesh.sub(pp=s)) for s, k in enumerate((2.0, 3.0))]
            with mesh:
                grads = ts.pipeline([lambda p, x: x * p] * 2, 2).value_and_grad(
                    lambda y: ts.mean(y))(params, ts.ones((2, 4)))[1]
            norm = ts.optim.global_norm(grads)
            with pytest.raises(ts.ArgumentError, match="runs on the ranks of one stage"):
                ts.jit(ts.optim.global_norm)(grads)
            return norm.item()

        np.testing.assert_allclose(ts.dist.simulate(program, mesh), 13**0.5 / 2, rtol=1e-6)
