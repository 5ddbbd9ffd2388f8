"""What ranks send says what it is: nothing is taken for something else, and who does not come is
named. tests/mesh/test_trials.py does so to every call that communicates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from mesh.launch import STOPPED_S, mpirun, needs_mpi
from tessera.mesh.ranks import envelope, transport
from tessera.mesh.ranks.envelope import MessageLabel, here_in
from tessera.mesh.ranks.messages import gather, share
from tessera.mesh.world import transport as here

ROWS = ts.ShardSpec(("row",), ("dp",))
FAULTS = Path(__file__).with_name("faults.py")


def ones(value: float = 1.0, spec=ROWS) -> ts.dist.DistTensor:
    mesh = ts.dist.mesh(axes=("dp",), shape=(ts.dist.world_size(),))
    return ts.dist.tensor((4,), spec, mesh, init=value)


def fails(program, ranks: int = 2, kind=ts.dist.DisagreementError) -> str:
    with pytest.raises(kind) as info:
        ts.dist.simulate(program, ranks)
    return str(info.value)


class TestHeaders:
    def test_a_header_comes_back_as_it_was(self):
        label = MessageLabel("all_reduce(f32[2, 3])", None, "key", (2, 3))
        data = envelope.pack(label, 7, 24) + b"more"
        header, at = envelope.unpack(memoryview(data), 1)
        assert header == envelope.Header(7, 24, label.digest, (2, 3), "all_reduce(f32[2, 3])")
        assert data[at:] == b"more" and at <= envelope.HEADER_BYTES

    def test_the_longest_header_has_room(self):
        label = MessageLabel("x" * 10_000, None, "key", (1,) * envelope.MAX_DIMS)
        assert len(envelope.pack(label, 0, 0)) == envelope.HEADER_BYTES

    @pytest.mark.parametrize("cut", [0, 10, 47, 50, 61])
    def test_bytes_that_are_no_header_are_not_shown(self, cut):
        data = bytearray(envelope.pack(MessageLabel("call()", None, "key", (5,)), 0, 0)[:cut])
        with pytest.raises(ts.dist.MeshError, match="that are no message") as info:
            envelope.unpack(memoryview(data), 3)
        assert "rank 3" in str(info.value)

    def test_a_text_of_another_length_than_it_says_is_refused(self):
        data = envelope.pack(MessageLabel("call()", None, "key"), 0, 0)
        with pytest.raises(ts.dist.MeshError, match="no message"):
            envelope.unpack(memoryview(data)[:-1], 0)

    def test_a_number_that_is_not_the_next_is_an_error(self):
        label = here_in("call()")
        got = envelope.Header(4, 0, label.digest, (), "call()")
        with pytest.raises(ts.dist.MeshError, match="message 4 of rank 1 .* number 3 was to come"):
            envelope.check(got, label, 3, 0, 1, 0)

    def test_paths_that_are_no_unicode(self):
        label = MessageLabel("save(bad\udcff)", None, "bad\udcff")
        header, _ = envelope.unpack(memoryview(envelope.pack(label, 0, 0)), 0)
        assert header.text == "save(bad?)" and header.digest == label.digest
        assert ts.dist.simulate(lambda: share("bad\udcff"), 2) == ["bad\udcff"] * 2


class TestWhatIsTakenForSomethingElse:
    def test_values_of_two_tensors(self):
        x, y = ones(1), ones(2)

        def program():
            x, y = ones(1), ones(2)
            if ts.dist.rank() == 0:
                x.numpy()  # forgotten on the other
            return y.numpy().tolist()

        text = fails(program)
        assert "rank 0: numpy() of f32[4] in (dp) on mesh(dp=2)" in text and "forgotten on" in text
        assert "rank 1: numpy() of f32[4]" in text and "return y.numpy().tolist()" in text
        assert x.tolist() == [1] * 4 and y.tolist() == [2] * 4

    @pytest.mark.parametrize("call", [
        lambda x: x.tolist(), lambda x: np.asarray(x), lambda x: float(ts.sum(x)),
        lambda x: ts.shard(x, ts.ShardSpec(replicate=True)), lambda x: share([1, 2]),
        lambda x: gather("mine"), lambda x: ts.dist.tensor((3,), mesh=x.mesh),
        lambda x: ts.dist.barrier(), lambda x: ts.jit(lambda x: ts.sum(x * 2))(x)])
    @pytest.mark.parametrize("rank", [0, 2])
    def test_calls_that_one_rank_alone_makes(self, call, rank):
        def program():
            x = ones()
            if ts.dist.rank() == rank:
                call(x)
            ts.dist.all_reduce(ts.ones((3,)))  # the others are here

        text = fails(program, 3)
        assert f"rank {rank}: " in text and "lambda x: " in text, text
        assert "the others are here" in text, text

    def test_messages_of_one_name_from_two_lines(self):
        def program():
            first = share("lr=0.1") if ts.dist.rank() == 0 else None  # only here
            return first, share(5)

        text = fails(program)
        assert "rank 0: share() at " in text and "only here" in text and "share(5)" in text

    def test_a_message_of_another_number_of_bytes(self):
        def program():
            label = here_in("step")
            if ts.dist.rank() == 0:
                here().send(1, np.full(3, 7, np.uint8), label)
            else:
                buffer = np.full(2, 9, np.uint8)
                try:
                    here().exchange({}, {0: buffer}, label)
                finally:
                    assert buffer.tolist() == [9, 9]

        text = fails(program, kind=ts.dist.MeshError)
        assert "rank 1 expects 2 bytes from rank 0 in step, which sent 3" in text

    def test_after_a_mix_up_a_rank_does_not_communicate_on(self):
        def program():
            if ts.dist.rank() == 0:
                share("first")
                return
            with pytest.raises(ts.dist.DisagreementError):
                share("second")
            share("third")

        assert "rank 1 cannot communicate any more" in fails(program, kind=ts.dist.MeshError)


class TestTheEnd:
    def test_what_nobody_has_taken_is_an_error(self):
        def program():
            for _ in range(3 if ts.dist.rank() == 0 else 2):
                share("one line")

        text = fails(program)
        assert "rank 1 has returned, and never received what rank 0 has sent" in text
        assert "rank 0: share() at " in text and 'share("one line")' in text

    def test_it_is_one_for_every_tag(self):
        def program():
            if ts.dist.rank() == 0:
                here().isend(1, np.ones(1, np.uint8), transport.MAX_TAG, here_in("activation"))

        assert "activation" in fails(program)

    def test_saving_on_one_rank(self, tmp_path):
        def program():
            if ts.dist.rank() == 0:
                ts.checkpoints.save(tmp_path / "c", {"w": ts.zeros(3)})

        text = fails(program, kind=ts.dist.StalledError)
        assert "rank 0 waits for rank 1 in checkpoints.save() at " in text
        assert "rank 1 has returned" in text and not (tmp_path / "c").exists()


class TestSilence:
    """What communicates nothing: any rank may do it alone."""

    def test_properties_and_pictures(self):
        def program():
            x = ones()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(transport.Transport, "_ready", None)  # whoever communicates fails
                assert repr(x) and str(x.layout) and x.shape == (4,) and x.mesh.backend == "local"
                assert x.local.numpy().tolist() and x.parts and x.nbytes and x.dtype
                whole = ones_held
                assert whole.numpy().tolist() == whole.tolist() == np.asarray(whole).tolist()
                assert float(held_sum) == 8.0 and f"{held_sum}" and bool(held_sum)
                with pytest.raises(ts.dist.MeshError, match="lie on several ranks") as info:
                    x.array  # noqa: B018  a property
                assert "x.numpy(), which all ranks" in info.value.hint

        mesh = ts.dist.mesh(axes=("dp",), shape=(2,))
        ones_held = ts.dist.distribute(np.full(4, 2.0, np.float32), ts.ShardSpec(replicate=True),
                                       mesh=mesh)
        held_sum = ts.dist.distribute(np.float32(8), ts.ShardSpec(replicate=True), mesh=mesh)
        ts.dist.simulate(program, 2)

    def test_what_communicates_says_so(self):
        for call in (ts.dist.DistTensor.numpy, ts.dist.share, ts.dist.distribute):
            assert "communicates" in call.__doc__ and "all ranks" in call.__doc__.lower()


# --- under mpirun -------------------------------------------------------------------------------
FAULTY = {  # program: words of the report
    "numpy_on_one": ["numpy() of f32[4]", "forgotten on the others", "y.numpy()"],
    "share_on_one": ["rank 0: share() at ", 'share("lr=0.1")', "share(5)"],
    "share_at_the_end": ["has ended the program, and never received what rank 0 has sent it",
                         "rank 0: share() at ", "one line"],
    "save_in_the_middle": ["rank 0: checkpoints.save() at ", "rank 0 alone", "all_reduce("],
    "save_at_the_end": ["rank 0 of 3 waits for rank 1 in checkpoints.save(), and rank",
                        "ended the program", "rank 0 alone"],
    "large_and_late": ["rank 0: numpy() of f32[90000]", ": barrier() over all ranks at "],
    "no_start": ["to communicate at all", "the only call"],
    "thread_raises": ["rank 2 of 3 failed in Thread", "ValueError: in a thread",
                      "where the other ranks are:", "ranks 0-1: in all_reduce("],
    "two_threads": ["all_reduce(f32[5]"],  # said by the rank, or by another that it misled
    "hangs_elsewhere": [" of 3 has waited 3 s for rank 2 in barrier() over all ranks",
                        "  rank 2: after all_reduce(", ": in barrier() over all ranks at "],
    "idle_before_the_first_call": [
        " s for rank 1 in sum() over dp; it is in no call of ours and has used no core for 3 s",
        "  rank 1: after dist.tensor("],
    "shorter_part": ["rank 2: dist.from_local(type=f32, shape=(9, 2), layout=(dp, -) on ",
                     ": all_reduce(f32[4], op=sum) over all ranks at "],
    "part_that_does_not_fit": ["rank 1 of 3 failed", "rank 1 gives a part [3, 2]; its part of "
                               "[12, 2] in (dp, -) on mesh(dp=3) is [4, 2]", "faults.py"],
    "other_modes": ["traced sum differently", ": determinism default", "rank 1: determinism fast"],
    "all_fail_differently": ["at the same time", "where the other ranks are:", ": has failed: "],
}


@needs_mpi
@pytest.mark.parametrize("program", FAULTY)
def test_under_mpirun_it_is_said_once(program, tmp_path):
    run = mpirun(3, program, tmp_path, battery=FAULTS, fresh=True)  # as users start them
    assert run.status != 0 and run.seconds < STOPPED_S and not run.results, run.text
    if program == "no_start" and "did not call \"init\"" in run.text:
        return  # Open MPI 4 ends all ranks itself when one leaves without MPI_Init, and says so
    for text in FAULTY[program]:
        assert text in run.text, run.text
    assert run.text.count("stopping all ranks") == 1, run.text
    assert len(run.text.splitlines()) < 30, run.text


@needs_mpi
@pytest.mark.parametrize("program", ["ends_at_different_times", "children",
                                     "busy_before_the_first_call"])
def test_under_mpirun_what_is_well_ends_well(program, tmp_path):
    run = mpirun(3, program, tmp_path, battery=FAULTS)
    assert run.status == 0 and set(run.results.values()) == {"well"} and not run.text, run.text


def test_a_message_is_the_same_on_every_rank_and_in_a_program_alone():
    message = {"a": (1, 2.5, [None, "x"]), "b": {}}
    found = ts.dist.simulate(lambda: ts.dist.share(message if ts.dist.rank() == 0 else None), 3)
    assert found == [ts.dist.share(message)] * 3 == [{"a": [1, 2.5, [None, "x"]], "b": {}}] * 3


@pytest.mark.parametrize("message, words", [
    (object(), "Object of type object is not JSON serializable"),
    ({"x": np.zeros(3)}, "Object of type ndarray"), ([{"a": {3: 1}}], "the key 3, which is no")])
def test_what_is_no_message_is_refused(message, words):
    for call in (lambda: ts.dist.share(message),
                 lambda: ts.dist.simulate(lambda: ts.dist.share(message), 2)):
        with pytest.raises(ts.ArgumentError, match=words) as info:
            call()
        assert info.value.where.file == __file__ and "ts.dist.broadcast" in info.value.hint
