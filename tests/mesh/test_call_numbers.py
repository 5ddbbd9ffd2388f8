"""Calls through NCCL, compared once, are numbered: what ranks mix up later is found."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from fake_nccl import nccl as nccl
from lowering_cases import apart as apart
from mesh import parallel
from mesh.launch import mpirun, needs_mpi
from mesh.test_gpu_programs import gpus as gpus
from tessera.graph.placed_leaves import FEW
from tessera.mesh.errors import DisagreementError, PolicyMismatch
from tessera.mesh.ranks import call_numbers
from tessera.mesh.ranks.call_numbers import KEPT, TOLD, CallSequence
from tessera.mesh.ranks.envelope import MessageLabel
from tessera.mesh.world import transport

PROGRAMS = Path(parallel.__file__)


@pytest.fixture(autouse=True)
def none_yet(monkeypatch):
    monkeypatch.setattr(call_numbers, "_sequences", {})
    monkeypatch.setattr(call_numbers, "_texts", {})
    monkeypatch.setattr(call_numbers, "_operands", {})


def sequence(index: int = 1) -> CallSequence:
    return CallSequence(SimpleNamespace(ranks=(0, 2), index=index, axis="dp"))


def told_of(other: CallSequence, last: int = TOLD) -> tuple:
    number, total = other.state
    told = [i % KEPT for i in range(max(0, number - last), number)]
    return number, total, [other.calls[i] for i in told], [other.given[i] for i in told]


def label(text: str) -> MessageLabel:
    return MessageLabel(text, None, text)


def test_what_is_the_same_is_no_error():
    mine, theirs = sequence(), sequence()
    for call in range(3 * KEPT):
        mine.add(call), theirs.add(call)
        if call % 997 == 0:
            assert mine.compare(told_of(theirs), False) is None
    mine.add(5)  # it is ahead
    assert mine.compare(told_of(theirs), False) is None and mine.waiting is None


def test_the_first_call_that_differs_is_shown_with_both_texts():
    mine, theirs = sequence(), sequence()
    same, one, other = (mine.number_of(label(f"{name}()")) for name in ("same", "one", "other"))
    for s, call in ((mine, one), (theirs, other)):
        for _ in range(7):
            s.add(same)
        s.add(call), s.add(same)
    error = mine.compare(told_of(theirs), False)
    assert isinstance(error, DisagreementError)
    assert "ranks 0 and 2 have made different calls over 'dp' through NCCL" in str(error)
    assert "in call 7:" in str(error) and "rank 0: other()" in str(error)
    assert "rank 2: one()" in str(error)


def test_a_call_that_is_told_no_more_is_found_by_the_sum():
    mine, theirs = sequence(), sequence()
    mine.add(1), theirs.add(2)
    for _ in range(TOLD):
        mine.add(3), theirs.add(3)
    assert "before call 1" in str(mine.compare(told_of(theirs), False))
    swapped = sequence()
    for call in (2, 1):
        swapped.add(call)
    ordered = sequence()
    for call in (1, 2):
        ordered.add(call)
    assert ordered.compare(told_of(swapped, last=0), False) is not None  # the order counts


def test_what_a_call_is_given_is_compared_but_for_roundings():
    mine, theirs = sequence(), sequence()
    call = mine.number_of(label("step()"), ["lr, f64[]", "x, f32[8]"])
    for given, other in ((((0.1,), (1.0, 2.0)), ((0.1 + 1e-9,), (1.0, 2.0))), ((), ()),
                         (((float("nan"),), ()), ((float("nan"),), (3.0,)))):
        mine.add(call, (given, {})), theirs.add(call, (other, {}))
    assert mine.compare(told_of(theirs), False) is None
    mine.add(call, (((0.1,), (1.0, 2.0)), {})), theirs.add(call, (((0.1,), (1.0, 2.5)), {}))
    error = mine.compare(told_of(theirs), False)
    assert isinstance(error, PolicyMismatch) and "ts.dist.share" in error.hint
    assert "ranks 0 and 2 give different values of what they hold alike, x, f32[8], in call 3 " \
        "through NCCL, step()" in error.message
    assert error.message.endswith("\n  rank 0: 1, 2.5\n  rank 2: 1, 2")


def test_who_is_behind_compares_later_and_at_the_end_counts_must_be_equal():
    mine, theirs = sequence(), sequence()
    mine.add(1)
    for call in (1, 2):
        theirs.add(call)
    told = told_of(theirs)
    assert mine.compare(told, False) is None and mine.waiting == told
    assert "rank 2: no call any more" in str(mine.compare(told, True))
    mine.add(9)
    assert "in call 1" in str(mine.compare(told, False))
    theirs = sequence()
    theirs.add(1)
    assert mine.compare(told_of(theirs), False) is None
    assert "rank 0: no call any more" in str(mine.compare(told_of(theirs), True))


def looked() -> str:
    """What this rank finds when all have told what they did."""
    ts.dist.barrier()
    call_numbers.tell(transport(), False)
    ts.dist.barrier()
    return str(call_numbers.look(transport(), False) or "")


def test_calls_from_different_lines_are_told_apart(gpu, nccl):
    """They are one call for NCCL, and each was compared when it was made first."""
    def program() -> tuple[str, str]:
        x = ts.ones((8,)).to("cuda")
        for _ in range(3):
            ts.dist.all_reduce(x)
        same = looked()
        if ts.dist.rank() == 0:
            ts.dist.all_reduce(x)  # one
        else:
            ts.dist.all_reduce(x * 2)  # other
        return same, looked()

    found = ts.dist.simulate(program, 2)
    assert [same for same, _ in found] == ["", ""]
    for _, error in found:
        assert "in call 3" in error and "all_reduce(x)  # one" in error
        assert "all_reduce(x * 2)  # other" in error


def test_a_compiled_function_and_a_call_by_hand_are_told_apart(gpus, nccl):
    def program(mesh) -> tuple[str, str]:
        f, y = ts.jit(lambda x: ts.sum(x)), ts.ones((1,)).to("cuda")
        x = ts.dist.tensor((4, 2), ts.ShardSpec(("row",), ("dp",)), mesh, init=1.0)
        f(x), ts.dist.all_reduce(y), f(x)
        same = looked()
        if ts.dist.rank() == 0:
            f(x)
        else:
            ts.dist.all_reduce(y)
        return same, looked()

    mesh = ts.dist.mesh(["cuda:0", "cuda:1"], axes="dp")
    found = ts.dist.simulate(lambda: program(mesh), mesh)
    assert [same for same, _ in found] == ["", ""]
    for _, error in found:
        assert "in call 3" in error and "<lambda>(program=" in error
        assert "all_reduce(f32[1]" in error


@pytest.mark.parametrize(("change", "says"), [
    (lambda r, i: (0.1 * (1 + (r and i > 1)), np.ones(4, "f")),
     "lr, f64[], in call 3 through NCCL, <lambda>("),
    (lambda r, i: (0.1, np.full(4, 1 + (r and i == 1), "f")), "mask, f32[4], in call 2 through ")])
@pytest.mark.parametrize("donate", [(), "p"])
def test_plain_operands_of_a_later_call_are_compared(gpus, nccl, change, says, donate):
    """Nothing is sent for it: it is told with the calls."""
    def program(mesh) -> tuple[str, int, str]:
        p = [ts.dist.tensor((4,), None, mesh, init=1.0) for _ in range(FEW)]
        x = ts.dist.tensor((6, 4), ts.ShardSpec(("row",), ("dp",)), mesh, init=1.0)
        step = ts.jit(lambda p, x, lr, mask: [
            w - lr * mask * ts.mean(x, axis=0) for w in p], donate=donate)
        p, same = step(p, x, *change(0, 0)), looked()
        before = sum(transport()._sent.values())
        for i in range(4):
            p = step(p, x, *change(ts.dist.rank(), i))
        return same, sum(transport()._sent.values()) - before, looked()

    mesh = ts.dist.mesh(["cuda:0", "cuda:1"], axes="dp")
    found = ts.dist.simulate(lambda: program(mesh), mesh)
    assert [same for same, *_ in found] == ["", ""]
    assert all(sent == 4 and says in error for _, sent, error in found), found


def test_batches_made_for_a_later_call_are_compared(gpus, nccl):
    """Of what lies on the host when it is made; nothing is sent for it either."""
    def program(mesh) -> tuple[str, int, str]:
        w = ts.dist.tensor((6, 4), ts.ShardSpec(("row",), ("dp",)), mesh, init=1.0)
        step, same = ts.jit(lambda w, x: w * ts.mean(w, axis=0) + x), ""
        for i in range(4):
            x = np.full(4, 1.0 + (i == 3 and ts.dist.rank()), np.float32)
            w, before = step(w, ts.dist.distribute(x, None, mesh=mesh)), transport()._sent.copy()
            same += looked() if i < 3 else ""
        return same, sum(transport()._sent.values()) - sum(before.values()), looked()

    mesh = ts.dist.mesh(["cuda:0", "cuda:1"], axes="dp")
    for same, sent, error in ts.dist.simulate(lambda: program(mesh), mesh):
        assert same == "" and sent == 0
        assert "alike, ts.dist.distribute of f32[4] as (-) at " in error
        assert "before call 3 through NCCL" in error and "  rank 1: 2, 2, 2, 2" in error


@pytest.mark.parametrize("differs", [False, True])
def test_what_an_update_apart_is_given_is_told_with_the_next_call(gpus, nccl, differs):
    """It sends nothing itself. A rank may make more such calls, as one that prints."""
    told = list[str]()

    def program(mesh, at_the_end=0.0) -> tuple[str, str]:
        w = ts.dist.tensor((4,), None, mesh, init=1.0)
        x = ts.dist.tensor((6, 4), ts.ShardSpec(("row",), ("dp",)), mesh, init=1.0)
        grads = ts.jit(lambda x, w: ts.mean(x, axis=0) * w)
        update = ts.jit(lambda w, g, lr: w - lr * g)
        for i in range(5):
            g = grads(x, w)
            w = update(w, g, 0.1 * (1 + (differs and i == 3 and ts.dist.rank())))
            if ts.dist.rank() == 0:
                (w * 3.0).numpy()
        found = looked()
        update(w, g, 0.1 + at_the_end * ts.dist.rank())
        told.append(looked())
        return found, told[-1]

    mesh = ts.dist.mesh(["cuda:0", "cuda:1"], axes="dp")
    with pytest.raises(PolicyMismatch, match=r"different values of what they hold alike, lr, f64"):
        ts.dist.simulate(lambda: program(mesh, 1.0), mesh)
    assert told == ["", ""]
    for found, behind in ts.dist.simulate(lambda: program(mesh), mesh):
        assert behind == "" and ("lr, f64[] of <lambda> at " in found) == differs
        assert all(part in found for part in (
            "w = update(w, g, ", "in 1 call of it, before call 4 through NCCL",
            "\n  rank 0: 0.1\n  rank 1: 0.2")) == differs


def test_nobody_is_asked_before_a_call(gpu, nccl):
    """The NCCL that pretends sends a message for each call; there is no other."""
    def program() -> int:
        x = ts.ones((8,)).to("cuda")
        ts.dist.all_reduce(x)
        before = sum(transport()._sent.values())
        for _ in range(20):
            ts.dist.all_reduce(x)
        return sum(transport()._sent.values()) - before

    assert ts.dist.simulate(program, 2) == [20, 20]


@needs_mpi
def test_ranks_of_mpirun_tell_each_other_from_a_thread(tmp_path):
    run = mpirun(3, "asides", tmp_path, battery=PROGRAMS)
    assert run.status == 0, run.text
    assert run.results == {r: str([[(r - 1) % 3, k] for k in range(20)]) for r in range(3)}
