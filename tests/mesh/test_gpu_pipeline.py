"""Pipelines on a mesh of GPUs, simulated, with a driver and NCCL that pretend."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from fake_nccl import nccl as nccl
from lowering_cases import apart as apart
from mesh import parallel
from mesh.parallel import MODEL, TIED, model_batch, model_params, squares
from mesh.test_gpu_programs import compute_on_hosts
from mesh.test_gpu_programs import gpus as gpus
from mesh.test_pipeline import check, reference
from tessera.mesh.parallel.batches import added, sums_of_gradients
from tessera.mesh.parallel.schedules import Backward, Forward, schedule

KINDS = pytest.mark.parametrize("kind", ["1f1b", "gpipe"])
GPUS = [f"cuda:{i}" for i in range(8)]


def mesh_of(axes: tuple[str, ...], shape: tuple[int, ...]) -> ts.dist.Mesh:
    return ts.dist.mesh(GPUS[:int(np.prod(shape))], axes, shape)


def train(kind: str = "1f1b", microbatches: int = 4) -> dict:
    """Two steps, of which the second's loss and gradients are given back."""
    step = ts.pipeline(MODEL, microbatches, schedule=kind, tied=TIED).value_and_grad(squares)
    for _ in range(2):
        loss, grads = step(model_params(), *model_batch())
    here = [g for own in grads if own for g in own.values()]
    assert all(g.place == 0 for g in here)
    return {"loss": loss.array} | {f"{s}.{k}": g.numpy() for s, own in enumerate(grads) if own
                                   for k, g in own.items()}


@pytest.mark.parametrize("route", ["nccl, kernels that come late", "host"])
@pytest.mark.parametrize("places", [4, 2])
@KINDS
def test_gradients_are_those_of_the_whole_model(gpus, request, route, places, kind):
    """Of two places each has two stages, which send to each other both ways."""
    by = None if route == "host" else request.getfixturevalue("nccl")
    gpus.driver.late = "kernels" if "late" in route else ""
    meant, mesh = reference(), mesh_of(("pp",), (places,))
    for rank, found in enumerate(ts.dist.simulate(train, mesh, kind)):
        own = {n for n in meant if n != "loss" and int(n[0]) % places == rank}
        check(found, meant, own | {"loss"})
    if by is not None:
        assert {what for _, what, _ in by.calls} == {"send", "swap"}  # swap: what is tied


def test_ranks_are_connected_before_a_schedule_begins(gpus, nccl):
    """At the first message NCCL lets the host wait for the other rank's, which in the middle of a
    schedule may wait for the GPU, and so for what this one has still to send."""
    def program():
        stages = [lambda p, x: x * p] * 4
        ts.pipeline(stages, 2)([ts.ones(()) for _ in stages], ts.ones((8, 16)))

    ts.dist.simulate(program, mesh_of(("pp",), (2,)))
    for rank in range(2):
        sent = [nbytes for who, what, nbytes in nccl.calls if (who, what) == (rank, "send")]
        assert sent[:2] == [4, 4] and 4 not in sent[2:]  # forward and back


def test_stages_of_several_ranks(gpus, nccl):
    """Weights split over tp, rows over dp, stages over pp."""
    meant = parallel.distributed()
    for rank, found in enumerate(ts.dist.simulate(parallel.distributed, 8, GPUS)):
        assert found.keys() == {f"{rank % 2}.0", f"{rank % 2}.1", "loss", *["y"] * (rank % 2)}
        check(found, meant, found.keys())


def test_sums_over_microbatches_take_the_largest_of_histories(gpus):
    def on_gpu(*values):
        return ts.tensor(values, "f32").to("cuda")

    total = [on_gpu(1, 4), on_gpu(1, 4)]
    slopes, largest = added(total, [on_gpu(3, 2), on_gpu(3, 2)], sums_of_gradients(), [False, True])
    assert slopes.tolist() == [4, 6] and largest.tolist() == [3, 4]


def test_an_evaluation_and_masks_are_those_of_hosts(gpus, nccl, monkeypatch):
    def program():
        pipe = ts.pipeline([embed, parallel.dropping], 3)
        ts.random.seed(4)
        y = pipe([model_params()[0], model_params()[1]], model_batch()[0])
        return None if y is None else y.numpy()

    embed, mesh = MODEL[0], mesh_of(("pp",), (2,))
    first, got = ts.dist.simulate(program, mesh)
    compute_on_hosts(monkeypatch)
    none, meant = ts.dist.simulate(program, mesh)
    assert first is none is None
    np.testing.assert_allclose(got, meant, rtol=1e-5)
    assert (got == 0).any() == (meant == 0).any()


def test_what_ran_when_is_asked_of_the_gpu(gpus, nccl):
    def program():
        pipe = ts.pipeline([lambda p, x: x * p] * 2, 4)
        pipe.value_and_grad(lambda y: ts.mean(y))([ts.ones(()) for _ in range(2)], ts.ones(8))
        return pipe.trace()

    timelines = ts.dist.simulate(program, mesh_of(("pp",), (2,)))
    assert timelines[0] == timelines[1]
    for rank, own in enumerate(schedule("1f1b", 2, 4).steps):
        spans = [s for s in timelines[0].spans if s.row == rank]
        assert [s.label for s in spans] == list(map(str, own))
        assert all(a.end <= b.begin + 1e-9 for a, b in zip(spans, spans[1:], strict=False))
        ticks = [(s.end - s.begin) / 125e-6 for s in spans]  # of the driver that pretends
        np.testing.assert_allclose(ticks, np.round(ticks), atol=1e-3)
        assert min(ticks) > 0.5


@given(kind=st.sampled_from(["1f1b", "gpipe"]), ranks=st.integers(2, 6), chunks=st.integers(1, 3),
       microbatches=st.integers(1, 12), forward=st.booleans())
def test_messages_are_taken_in_the_order_in_which_they_are_sent(kind, ranks, chunks, microbatches,
                                                                forward):
    """NCCL has no tags, and a way between two ranks may serve several stages."""
    plan = schedule(kind, ranks * chunks, microbatches, ranks)
    which, ahead = (Forward, 1) if forward else (Backward, -1)
    for place, own in enumerate(plan.steps):
        sent = [(s.microbatch, s.stage + ahead) for s in own
                if isinstance(s, which) and 0 <= s.stage + ahead < plan.stages]
        taken = [(s.microbatch, s.stage) for s in plan.steps[(place + ahead) % ranks]
                 if isinstance(s, which) and 0 <= s.stage - ahead < plan.stages]
        assert sent == taken


def test_plain_tensors_on_a_gpu_do_not_meet_parts_on_hosts(gpu):
    x = ts.dist.tensor((4, 2), ts.ShardSpec(("row",), ("x",)),
                       ts.dist.mesh(axes="x", shape=(2,)), init=1.0)
    with pytest.raises(ts.ArgumentError, match="computes on hosts, .* lies on cuda:0"):
        ts.jit(lambda x, y: x + y)(x, ts.ones((4, 2)).to("cuda"))
