"""Schedules of pipelines: who does what when, and the halves of backward steps."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera as ts
from tessera.mesh.parallel import schedules
from tessera.mesh.parallel.forward_backward import Halves
from tessera.mesh.parallel.schedules import Backward, Forward, needs, play, schedule
from tolerance import tolerance


class TestSchedules:
    @given(kind=st.sampled_from(["1f1b", "gpipe"]), ranks=st.integers(1, 6),
           chunks=st.integers(1, 3), microbatches=st.integers(1, 12))
    def test_every_step_once_and_after_what_it_needs(self, kind, ranks, chunks, microbatches):
        plan = schedule(kind, ranks * chunks, microbatches, ranks)
        every = {make(i, s) for make in (Forward, Backward) for i in range(microbatches)
                 for s in range(ranks * chunks)}
        assert sum(map(len, plan.steps)) == len(every)
        assert {s for own in plan.steps for s in own} == every
        for rank, own in enumerate(plan.steps):
            assert all(s.stage % ranks == rank for s in own)
        done = set()
        for step in plan.order:
            assert done.issuperset(needs(step, ranks * chunks)), step
            done.add(step)
        ends = {}
        for rank, own in enumerate(plan.steps):  # the timeline is what the lists allow
            spans = [s for s in plan.timeline.spans if s.row == rank]
            assert all(a.end <= b.begin for a, b in zip(spans, spans[1:], strict=False))
            ends |= dict(zip(own, spans, strict=True))
        for step, span in ends.items():
            assert all(ends[n].end <= span.begin for n in needs(step, ranks * chunks))

    @given(ranks=st.integers(1, 8), chunks=st.integers(1, 3), microbatches=st.integers(1, 20))
    def test_live_activations(self, ranks, chunks, microbatches):
        stages = ranks * chunks
        one, all_first = (schedule(k, stages, microbatches, ranks) for k in ("1f1b", "gpipe"))
        for rank in range(ranks):
            assert one.peak(rank) == min(stages - rank, microbatches * chunks) <= stages
            assert all_first.peak(rank) == microbatches * chunks

    @given(ranks=st.integers(1, 8), chunks=st.integers(1, 3), rounds=st.integers(1, 4),
           kind=st.sampled_from(["1f1b", "gpipe"]))
    def test_the_bubble(self, ranks, chunks, rounds, kind):
        p, m = ranks, ranks * rounds
        assert schedule(kind, p * chunks, m, p).bubble == pytest.approx(
            (p - 1) / (chunks * m + p - 1), abs=1e-12)
        assert schedule(kind, p, m + 1).bubble == pytest.approx((p - 1) / (m + p), abs=1e-12)

    @given(ranks=st.integers(1, 6), chunks=st.integers(2, 4), microbatches=st.integers(1, 15),
           units=st.integers(1, 3))
    def test_more_forward_steps_ahead_shorten_nothing(self, ranks, chunks, microbatches, units):
        stages = ranks * chunks
        plan = schedule("1f1b", stages, microbatches, ranks)
        further = []
        for rank, own in enumerate(plan.steps):
            forward = [s for s in own if isinstance(s, Forward)]
            backward = [s for s in own if isinstance(s, Backward)]
            ahead = min(2 * (ranks - 1 - rank) + (chunks - 1) * ranks, len(forward))
            steps = forward[:ahead]
            for pair in zip(forward[ahead:], backward, strict=False):
                steps += pair
            further.append((*steps, *backward[len(forward) - ahead:]))
        lengths = []
        for steps in (plan.steps, further):
            try:
                with mock.patch.object(schedules, "BACKWARD_UNITS", units):
                    lengths.append(max(end for *_, end in play(stages, steps)))
            except ts.ArgumentError:  # some counts of microbatches do not go through at all
                lengths.append(float("inf"))
        assert lengths[0] <= lengths[1]

    def test_1f1b_written_out(self):
        plan = schedule("1f1b", 3, 4)
        assert [" ".join(map(str, own)) for own in plan.steps] == [
            "F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]

    def test_picture(self):
        assert str(schedule("1f1b", 3, 3)) == (
            "1f1b: 3 stages, 3 microbatches, 40 % idle\n"
            "stage 0  F0 F1 F2             B0---    B1---    B2---\n"
            "stage 1     F0 F1       B0--- F2 B1---    B2---\n"
            "stage 2        F0 B0--- F1 B1--- F2 B2---")
        svg = schedule("gpipe", 4, 2, 2).timeline.svg()
        assert svg.count("<rect") == 16 and "F1b" in svg and svg.endswith("</svg>")

    @pytest.mark.parametrize("given, words", [
        (("2f2b", 2, 2), "no pipeline schedule '2f2b'"), (("1f1b", 0, 2), "stages is an integer"),
        (("1f1b", 2, True), "microbatches is an integer"),
        (("gpipe", 3, 2, 2), "3 stages cannot be spread over 2 ranks.*4")])
    def test_what_cannot_be(self, given, words):
        with pytest.raises(ts.ArgumentError, match=f"(?s){words}"):
            schedule(*given)


class TestHalves:
    def test_residuals_are_what_backward_reads_and_no_copies_of_parameters(self, rng):
        def stage(p, x):
            return ts.tanh(x @ ts.transpose(ts.cast(p["w"], "f32")) + p["b"])

        params = {"w": ts.tensor(rng.standard_normal((5, 4)), "bf16"),
                  "b": ts.tensor(rng.standard_normal(5), "f32")}
        x, g = (ts.tensor(rng.standard_normal(s), "f32") for s in ((3, 4), (3, 5)))
        halves = Halves(stage, params, x)
        value, kept = halves.run(params, x)
        assert kept.nbytes == value.nbytes  # tanh's derivative needs its result, nothing else
        assert {id(t) for t in kept.inputs} == {id(params["w"]), id(x)}
        y, pull = ts.vjp(stage, params, x)
        assert (value.array == y.array).all()
        (dp, dx), (mp, mx) = halves.pull(kept, [g]), pull(g)
        for a, b in [(dp["w"], mp["w"]), (dp["b"], mp["b"]), (dx, mx)]:
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=tolerance(ts.f32, 16),
                                       atol=1e-6)

    def test_random_draws_are_the_same_in_both_halves(self, rng):
        def stage(p, x):
            return ts.dropout(x * p, 0.5)

        x = ts.tensor(rng.uniform(1, 2, (64, 8)), "f32")
        p = ts.tensor(rng.uniform(1, 2, 8), "f32")
        halves = Halves(stage, p, x)
        y, kept = halves.run(p, x)
        _, dx = halves.pull(kept, [ts.ones(y.shape)])
        assert ((dx.numpy() != 0) == (y.numpy() != 0)).all() and 0 < (y.numpy() == 0).mean() < 1
        again, _ = halves.run(p, x)
        assert ((again.numpy() == 0) != (y.numpy() == 0)).any()


    def test_a_rematerialised_stage_keeps_its_inputs_only(self, rng):
        def stage(p, x):
            return ts.tanh(ts.tanh(x @ p) @ p)

        p, x, g = (ts.tensor(rng.standard_normal((6, 6)), "f32") for _ in range(3))
        plain, again = Halves(stage, p, x), Halves(ts.remat(stage), p, x)
        (_, kept), (_, less) = plain.run(p, x), again.run(p, x)
        assert less.nbytes == 0 < kept.nbytes
        for a, b in zip(plain.pull(kept, [g]), again.pull(less, [g]), strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)

    def test_what_a_stage_prints_is_printed_once(self, capsys):
        def stage(p, x):
            ts.debug.print("mean {}", ts.mean(x))
            return x * p

        halves = Halves(stage, ts.ones(()), ts.ones(3))
        _, kept = halves.run(ts.ones(()), ts.ones(3))
        assert capsys.readouterr().out.count("mean 1.0") == 1
        halves.pull(kept, [ts.ones(3)])
        assert capsys.readouterr().out == ""
