"""Ranks that disagree, fail, leave, wait for nothing or hang: all stop, and say why."""

from __future__ import annotations

import re
import sys
import threading

import numpy as np
import pytest

import tessera as ts
from mesh.launch import STOPPED_S, mpirun, needs_mpi
from tessera.mesh.ranks.abort import _short
from tessera.mesh.ranks.envelope import here_in
from tessera.mesh.world import transport

X = np.ones((2, 3), np.float32)


def reduce(x, **attrs):
    return ts.dist.all_reduce(x, **attrs)


DISAGREEMENTS = {
    "op": (lambda: reduce(X, op="sum"), lambda: reduce(X, op="max"), "op=sum", "op=max"),
    "collective": (lambda: reduce(X), lambda: ts.dist.broadcast(X), "all_reduce(", "broadcast("),
    "shape": (lambda: reduce(X), lambda: reduce(X.T), "f32[2, 3]", "f32[3, 2]"),
    "type": (lambda: reduce(X), lambda: reduce(X.astype(np.float64)), "f32[", "f64["),
    "policy": (lambda: reduce(ts.cast(X, "bf16 @saturate")), lambda: reduce(ts.cast(X, "bf16")),
               "bf16 @saturate", "bf16["),
    "result": (lambda: reduce(X, dtype="bf16"), lambda: reduce(X), "dtype=bf16", "op=sum)"),
    "dimensions": (lambda: ts.dist.all_gather(X, dim=0), lambda: ts.dist.all_gather(X, dim=1),
                   "dim=0", "dim=1"),
    "other extents": (lambda: ts.dist.all_gather(X), lambda: ts.dist.all_gather(X[:1]),
                      "[2, 3]", "[1, 3]"),
}


@pytest.mark.parametrize("one, other, first, second", DISAGREEMENTS.values(), ids=DISAGREEMENTS)
def test_ranks_that_disagree_all_learn_what_the_others_do(one, other, first, second):
    texts = {}

    def program():
        rank = ts.dist.rank()
        try:
            one() if rank != 1 else other()
        except ts.dist.DisagreementError as error:
            texts[rank] = str(error)
            raise

    with pytest.raises(ts.dist.DisagreementError) as info:
        ts.dist.simulate(program, 3)
    text = str(info.value)
    assert "ranks 0, 2: " in text and "rank 1: " in text and first in text and second in text
    assert text.count("test_failures.py:") == 3 and "depends on the rank" in info.value.hint
    assert len(texts) >= 1 and info.value.code == "E_MESH_ORDER"


def test_the_line_counts():
    def program():
        if ts.dist.rank() == 0:
            return ts.dist.barrier()
        return ts.dist.barrier()

    with pytest.raises(ts.dist.DisagreementError, match=r"return ts.dist.barrier\(\)"):
        ts.dist.simulate(program, 2)


def test_different_axes_are_found_as_a_circle():
    """Nobody in rank 1's group of tp knows that rank 1 is in dp: everybody waits."""
    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))
    with pytest.raises(ts.dist.StalledError) as info:
        ts.dist.simulate(lambda: ts.dist.barrier("dp" if ts.dist.rank() == 1 else "tp"), mesh)
    text = str(info.value)
    assert "rank 0 waits for rank 1 in barrier() over tp" in text
    assert "rank 1 waits for rank 3 in barrier() over dp" in text
    assert info.value.where.file == __file__


def test_calls_that_look_alike_on_different_meshes():
    def program():
        shape = (2, 2) if ts.dist.rank() else (1, 4)
        mesh = ts.dist.mesh(axes=("dp", "tp"), shape=shape)
        ts.dist.all_reduce(X, "tp", mesh=mesh)

    with pytest.raises(ts.dist.DisagreementError) as info:
        ts.dist.simulate(program, 4)
    text = str(info.value)
    assert text.count("all_reduce(f32[2, 3], op=sum) over tp") == 2
    assert "are the meshes the same?" in text


def test_a_rank_that_returns_early_is_named():
    with pytest.raises(ts.dist.StalledError, match="rank 1 has returned"):
        ts.dist.simulate(lambda: ts.dist.rank() == 1 or ts.dist.barrier(), 3)


def test_an_exception_stops_the_others_and_is_raised_with_its_rank():
    ended = []

    def program():
        rank = ts.dist.rank()
        ts.dist.barrier()
        if rank == 2:
            raise ValueError("broken")
        try:
            ts.dist.barrier()
        except ts.dist.StoppedError as error:
            ended.append((rank, str(error)))
            raise

    with pytest.raises(ValueError, match="broken") as info:
        ts.dist.simulate(program, 4)
    assert info.value.__notes__ == ["raised on rank 2 of 4; the other ranks were stopped"]
    assert sorted(r for r, _ in ended) == [0, 1, 3]
    assert all("because rank 2 failed: ValueError: broken" in text for _, text in ended)


def test_ranks_that_had_not_begun_do_not_begin():
    began = []

    def program():
        began.append(ts.dist.rank())
        raise ValueError("at once")

    with pytest.raises(ValueError, match="at once"):
        ts.dist.simulate(program, 3)
    assert began == [0]


def test_a_rank_that_swallows_the_stop_is_stopped_again():
    def program():
        if ts.dist.rank() == 0:
            raise KeyError("first")
        for _ in range(3):
            try:
                ts.dist.barrier()
            except ts.dist.MeshError:
                pass
        ts.dist.barrier()

    with pytest.raises(KeyError, match="first"):
        ts.dist.simulate(program, 3)


def test_a_rank_that_hangs_is_named_with_its_line():
    free = threading.Event()

    def program():
        ts.dist.barrier()
        if ts.dist.rank() == 1:
            free.wait(60)  # here it hangs
        ts.dist.barrier()

    with ts.config.scope(comm_timeout=1), pytest.raises(ts.dist.StalledError) as info:
        ts.dist.simulate(program, 3)
    left = [t for t in threading.enumerate() if t.name.startswith("rank ")]
    free.set()
    assert "rank 1" in {t.name for t in left}
    for thread in left:
        thread.join(10)
        assert not thread.is_alive()
    assert "rank 1 of 3 has not communicated for 1 s" in str(info.value)
    assert "here it hangs" in info.value.where.text and "TESSERA_COMM_TIMEOUT" in info.value.hint


def test_ranks_leave_no_threads_behind():
    ts.dist.simulate(ts.dist.barrier, 8)
    with pytest.raises(ZeroDivisionError):
        ts.dist.simulate(lambda: ts.dist.barrier() or 1 / (ts.dist.rank() - 3), 8)
    assert not [t for t in threading.enumerate() if t.name.startswith("rank ")]


def test_ranks_take_turns():
    """One runs at a time, in the order of their numbers: no lock is needed around a list."""
    log = []

    def program():
        log.append((0, ts.dist.rank()))
        ts.dist.barrier()
        log.append((1, ts.dist.rank()))

    ts.dist.simulate(program, 4)
    assert log[:4] == [(0, r) for r in range(4)] and sorted(log[4:]) == [(1, r) for r in range(4)]
    first = list(log)
    log.clear()
    ts.dist.simulate(program, 4)
    assert log == first


@pytest.mark.parametrize("wrong", [
    lambda mesh: ts.ShardSpec(("row",), ("xx",)).resolve(mesh, 2),  # in what a dataclass makes
    lambda mesh: ts.jit(lambda a, b: a + b)(*(  # in a cached property
        ts.dist.tensor((4,), None, m) for m in (mesh, ts.dist.mesh(axes="tp", shape=2))))])
def test_what_a_rank_says_of_an_error_has_the_user_s_frames_alone(wrong):
    with pytest.raises(ts.TesseraError) as info:
        wrong(ts.dist.mesh(axes="dp", shape=2))
    said = _short(info.type, info.value, info.tb)
    files = re.findall(r'  File "(.*?)", line', said)
    assert files and {*files} == {__file__}, said


class TestTransport:
    def test_messages_arrive_in_the_order_in_which_they_were_sent(self):
        def program():
            here, label = transport(), here_in("numbers")
            if here.rank == 0:
                for n in range(5):
                    here.send(1, np.array([n], np.uint8), label)
                return None
            return [int(here.take(0, label)[0]) for _ in range(5)]

        assert ts.dist.simulate(program, 2)[1] == [0, 1, 2, 3, 4]

    def test_what_is_sent_may_be_overwritten_at_once(self):
        def program():
            here, data, label = transport(), np.zeros(3, np.uint8), here_in("zeros")
            if here.rank == 0:
                here.send(1, data, label)
                data[:] = 9
            else:
                here.exchange({}, {0: data}, label)
            return data.tolist()

        assert ts.dist.simulate(program, 2) == [[9, 9, 9], [0, 0, 0]]

    @pytest.mark.parametrize("peer", [-1, 0, 2])
    def test_a_rank_that_is_not_there(self, peer):
        def program():
            if ts.dist.rank() == 0:
                transport().send(peer, np.zeros(1, np.uint8), here_in("x"))

        with pytest.raises(ts.dist.MeshError, 
                           match=f"rank 0 of 2 cannot exchange with rank {peer}"):
            ts.dist.simulate(program, 2)

    def test_alone_there_is_nobody(self):
        assert transport().name == "single" and ts.dist.rank() == 0 and ts.dist.world_size() == 1
        with pytest.raises(ts.dist.MeshError, match="rank 0 of 1 cannot exchange with rank 1"):
            transport().take(1, here_in("x"))

    def test_a_message_of_another_length(self):
        def program():
            here, label = transport(), here_in("this step")
            if here.rank == 0:
                here.send(1, np.zeros(3, np.uint8), label)
            else:
                here.exchange({}, {0: np.zeros(4, np.uint8)}, label)

        with pytest.raises(ts.dist.MeshError, match="expects 4 bytes from rank 0 in this step"):
            ts.dist.simulate(program, 2)


class TestNumerics:
    """NaN made on rank 2, with sentinels that raise: that rank stops all, before it sends it."""

    @staticmethod
    def step(x):
        y = ts.log(x)  # here a rank has a negative number
        return ts.all_reduce(ts.sum(y))

    @pytest.mark.row("DBG-22")
    @pytest.mark.parametrize("wrap", [ts.jit, lambda f: f, lambda f: ts.grad(f)])
    def test_the_rank_that_made_it_is_named(self, wrap):
        def program():
            rank, f = ts.dist.rank(), wrap(self.step)
            f(ts.ones((4,)))
            return f(ts.tensor([1.0, 2.0, -1.0 if rank == 2 else 1.0]))

        with ts.config.scope(numerics="raise"), pytest.raises(ts.NumericsError) as info:
            ts.dist.simulate(program, 4)
        assert info.value.__notes__ == ["raised on rank 2 of 4; the other ranks were stopped"]
        assert "here a rank has a negative number" in str(info.value)
        assert str(info.value.message).startswith("log: nan")

    def test_what_came_in_with_the_data_counts_where_it_came_in(self):
        def program():
            x = np.full(3, np.nan if ts.dist.rank() == 1 else 1.0, np.float32)
            return ts.jit(lambda x: ts.all_gather(x) + 1)(x)

        with ts.config.scope(numerics="raise"), pytest.raises(ts.NumericsError) as info:
            ts.dist.simulate(program, 3)
        assert info.value.__notes__ == ["raised on rank 1 of 3; the other ranks were stopped"]

    def test_a_mask_may_be_sent(self):
        def program():
            x = ts.where(ts.arange(3) > 0, 1.0, -float("inf"))
            return ts.all_reduce(x, op="max").tolist()

        with ts.config.scope(numerics="raise"):
            assert ts.dist.simulate(program, 2) == [[-np.inf, 1, 1]] * 2

    @needs_mpi
    @pytest.mark.row("DBG-02", "DBG-22")
    def test_under_mpirun_all_stop_and_the_report_names_the_rank(self, tmp_path):
        run = mpirun(4, "nan", tmp_path)
        print(f"all stopped after {run.seconds:.1f} s with status {run.status}")
        assert run.status != 0 and run.seconds < STOPPED_S and not run.results, run.text
        assert "rank 2 of 4 failed; stopping all ranks" in run.text
        assert "NumericsError: [E_NAN_INF] log: nan in f32[4, 4] at [1, 2]" in run.text
        assert "here rank 2 has a negative number" in run.text
        assert run.text.count("NumericsError") == 1, "others report what rank 2 made"


class TestLeaving:
    def test_an_exit_on_a_simulated_rank_ends_the_program_with_its_status(self):
        def program():
            if ts.dist.rank() == 1:
                sys.exit(3)
            ts.dist.barrier()

        with pytest.raises(SystemExit) as info:
            ts.dist.simulate(program, 3)
        assert info.value.code == 3

    @needs_mpi
    @pytest.mark.parametrize("program", ["leave_with_3", "leave_early_with_3"])
    def test_an_exit_on_one_rank_ends_all_with_its_status(self, program, tmp_path):
        run = mpirun(3, program, tmp_path, fresh=True)
        print(f"all stopped after {run.seconds:.1f} s")
        assert run.status == 3 and run.seconds < STOPPED_S and not run.results, run.text
        assert "rank 1 of 3 has left by sys.exit(3); stopping all ranks" in run.text

    @needs_mpi
    def test_an_exit_that_is_caught_or_is_0_ends_nothing(self, tmp_path):
        run = mpirun(3, "catch_an_exit", tmp_path, fresh=True)
        assert run.status == 0 and set(run.results.values()) == {"well"} and not run.text, run.text


class TestOutput:
    def test_simulated_ranks_print_or_only_the_first_does(self, capsys):
        def program():
            print("all", ts.dist.rank())
            with ts.dist.rank0_only():
                ts.dist.barrier()
                print("block", ts.dist.rank())
                print("error", ts.dist.rank(), file=sys.stderr)
                ts.dist.barrier()
            print("after", ts.dist.rank())

        stdout = sys.stdout
        ts.dist.simulate(program, 3)
        out, err = capsys.readouterr()
        assert sorted(out.splitlines()) == sorted(
            [f"{w} {r}" for w in ("all", "after") for r in range(3)] + ["block 0"])
        assert sorted(err.splitlines()) == [f"error {r}" for r in range(3)]
        assert sys.stdout is stdout

    @needs_mpi
    def test_under_mpirun_every_rank_prints(self, tmp_path):
        run = mpirun(3, "talk", tmp_path)
        assert run.status == 0, run.text
        for rank in range(3):
            for words in ("speaks", "writes", "warns"):
                assert f"rank {rank} {words}" in run.text
        assert run.text.count("in the block") == 1 and "rank 0 speaks in the block" in run.text

    @needs_mpi
    def test_only_rank_0_when_asked(self, tmp_path):
        run = mpirun(3, "talk", tmp_path, TESSERA_RANK_OUTPUT="first")
        assert run.status == 0 and run.text.count("rank 0 speaks") == 2, run.text
        assert not {f"rank {r} speaks" in run.text for r in (1, 2)} - {False}
        assert run.text.count(" warns") == 3

    @needs_mpi
    def test_a_file_for_each_rank_and_errors_on_the_terminal_too(self, tmp_path):
        logs, folder = tmp_path / "logs" / "today", tmp_path / "results"
        folder.mkdir()
        run = mpirun(3, "talk_and_fail", folder, fresh=True, TESSERA_RANK_LOGS=str(logs))
        assert run.status != 0 and not run.results and "speaks" not in run.text, run.text
        assert sorted(f.name for f in logs.iterdir()) == [f"rank-{r}.log" for r in range(3)]
        texts = [(logs / f"rank-{r}.log").read_text() for r in range(3)]
        for rank, text in enumerate(texts):
            for words in ("speaks", "writes", "warns"):
                assert f"rank {rank} {words}" in text
            assert f"rank {(rank + 1) % 3}" not in text.replace("rank 1 of 3", "")
        for text in (run.text, texts[1]):
            assert "rank 1 of 3 failed; stopping all ranks" in text
            assert "ValueError: broken on purpose" in text
