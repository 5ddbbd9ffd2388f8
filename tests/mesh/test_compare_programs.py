"""Ranks compare the program that they are about to run, and at first what they give it."""

from __future__ import annotations

import linecache
import re
import warnings

import numpy as np
import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from fake_nccl import nccl as nccl
from lowering_cases import apart as apart
from mesh.test_gpu_programs import gpus as gpus
from tessera.mesh.sharding import compare_programs

ROWS, COLUMNS = ts.ShardSpec(("row",), ("dp",)), ts.ShardSpec(("col",), ("tp",))


def simulated(program, mesh):
    return ts.dist.simulate(lambda: program(ts.dist.rank()), mesh)


def refused(program, mesh, kind=ts.dist.PolicyMismatch) -> ts.dist.MeshError:
    with pytest.raises(kind) as info:
        simulated(program, mesh)
    assert type(info.value) is kind and info.value.hint
    return info.value


# --- programs -------------------------------------------------------------------------------------
def branch(x):
    y = x * 2.0
    if ts.dist.rank() == 1:
        y = y + 1.0
    return ts.sum(y)


def prints(x):
    total = ts.sum(x)
    if ts.dist.rank() == 1:
        ts.debug.print("{}", total)
    return total * 2.0


def longer(x):
    return (ts.sum(x), ts.max(x)) if ts.dist.rank() == 1 else ts.sum(x)


@pytest.mark.parametrize(("f", "one", "others"), [
    (branch, "y = y . 1.0", r"return ts.sum\(y\)"),
    (prints, r'ts.debug.print\("{}", total\)', r"return total \* 2.0"),
    (longer, "return .ts.sum", "")])
def test_the_first_line_in_which_programs_differ_is_shown(f, one, others):
    mesh = ts.dist.mesh(axes="dp", shape=3)
    step = ts.jit(f)

    def program(rank):
        return step(ts.dist.tensor((6, 4), ROWS, mesh, init=1.0))

    error = refused(program, mesh, ts.dist.DisagreementError)
    assert f"have traced {f.__name__} differently:\n" in error.message
    assert re.search(rf"\n  rank 1: .*test_compare_programs.py:\d+  .*{one}", error.message)
    assert re.search(rf"\n  ranks 0, 2: .*{others}", error.message)
    assert "return step(" in str(error.where) and "depends on the rank" in error.hint


def test_a_batch_of_other_extents_on_one_rank_is_named():
    """The call traced before on other ranks has another line, which is no difference."""
    mesh, step = ts.dist.mesh(axes="dp", shape=3), ts.jit(lambda w, x, lr: ts.sum(x @ w) * lr)

    def program(rank):
        w = ts.dist.tensor((4, 2), None, mesh, init=1.0)
        step(w, ts.dist.tensor((6, 4), ROWS, mesh, init=1.0), 0.1)
        batch = np.ones((9 if rank == 1 else 6, 4), np.float32)
        step(w, ts.dist.distribute(batch, ROWS, mesh=mesh), 0.1)

    said = str(refused(program, mesh, ts.dist.DisagreementError))
    assert "give <lambda> operands of different shapes or types" in said
    assert "  ranks 0, 2: x, f32[6, 4]" in said and "  rank 1: x, f32[9, 4]" in said


def test_a_tensor_on_meshes_of_other_extents_is_refused_where_it_is_made():
    def program(rank):
        ts.dist.tensor((4, 4), ROWS, ts.dist.mesh(axes=("dp", "tp"), shape=shapes[rank]), init=1.0)

    shapes = [(1, 2), (2, 1)]
    said = str(refused(program, ts.dist.mesh(axes="dp", shape=2)))
    assert "(dp, -) on mesh(dp=1, tp=2)" in said and "(dp, -) on mesh(dp=2, tp=1)" in said


@pytest.mark.parametrize("spec", [ROWS, None])
def test_arguments_in_another_order_are_refused(spec):
    """Of one type and shape they would be added to each other: a dict that was filled from a set
    has an order of its own in each process."""
    mesh = ts.dist.mesh(axes="dp", shape=2)
    total = ts.jit(lambda p, x: (ts.sum(x), {k: ts.sum(v) for k, v in p.items()}))

    def program(rank):
        p = {k: ts.dist.tensor((6, 4), spec, mesh, init=lambda i, j: i + j)
             for k in (("q", "k") if rank else ("k", "q"))}
        return total(p, ts.dist.tensor((6, 4), ROWS, mesh))

    error = refused(program, mesh, ts.dist.DisagreementError)
    assert re.search(r"give .*its arguments in different orders:\n  rank 0: operand 0 is p.k\n"
                     r"  rank 1: operand 0 is p.q", error.message)
    assert "sorted(names)" in error.hint and "total(p, " in error.where.text


@pytest.mark.parametrize("change", [lambda: ts.random.seed(12345), lambda: ts.random.normal((2,))])
def test_draws_that_differ_are_refused(change):
    mesh = ts.dist.mesh(axes="dp", shape=2)
    noisy = ts.jit(lambda x: ts.sum(x) + ts.random.normal((3,)))

    def program(rank, jit):
        if rank:
            change()
        if jit:
            return noisy(ts.dist.tensor((6, 4), ROWS, mesh, init=1.0))
        return ts.dist.tensor((6, 4), ROWS, mesh, init="normal")

    error = refused(lambda rank: program(rank, jit=True), mesh)
    assert re.search("the (seed|step) of its random draws:\n  rank 0: ", error.message)
    error = refused(lambda rank: program(rank, jit=False), mesh)
    assert re.search(r"rank 0: .*init=normal of seed \d+, step \d+ of ts.random", error.message)


@pytest.mark.parametrize("given", [lambda r: {"init": float(r)},
                                   lambda r: {"init": "normal", "seed": r}])
def test_numbers_and_seeds_of_a_tensor_are_those_of_all(given):
    mesh = ts.dist.mesh(axes="dp", shape=2)
    error = refused(lambda rank: ts.dist.tensor((6, 4), ROWS, mesh, **given(rank)), mesh)
    assert "number and seed must be the same" in error.hint and "from_local" in error.hint


def test_constants_that_differ_are_shown_with_the_line_that_has_them():
    mesh = ts.dist.mesh(axes="dp", shape=3)
    step = ts.jit(lambda x: ts.sum(x * (3.0 + (ts.dist.rank() == 2))))
    error = refused(lambda rank: step(ts.dist.tensor((6, 4), ROWS, mesh, init=1.0)), mesh,
                    ts.dist.DisagreementError)
    assert re.search(r"\n  ranks 0, 1: .*3\.0\n  rank 2: .*4\.0\n  in .*ts.sum\(x \* ",
                     error.message)


# --- values ---------------------------------------------------------------------------------------
def loss(w, x, scale=1.0):
    return ts.mean(ts.square(x @ w)) * scale


def weights(rank, shape=(4, 3)):
    """Of a generator whose seed is not the same on all ranks."""
    return np.random.default_rng(rank).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("kind", ["f32", "bf16", "int8", "fp4_e2m1"])
def test_parameters_drawn_by_each_rank_are_refused(kind):
    mesh = ts.dist.mesh(axes="dp", shape=3)
    step = ts.jit(lambda w, x: loss(ts.cast(w, "f32"), x))

    def program(rank):
        given = ts.tensor(np.rint(3 * weights(int(rank == 2))), kind)
        w = ts.dist.distribute(given, None, mesh=mesh)
        return step(w, ts.dist.tensor((6, 4), ROWS, mesh, init=1.0))

    error = refused(program, mesh)
    assert f"the ranks along 'dp' give <lambda> different values of what they hold alike, " \
        f"w, {kind}[4, 3] of (-, -):" in error.message
    assert re.search(r"\n  ranks 0, 1: .*, \.\.\.\n  rank 2: .*, \.\.\.$", error.message)
    assert "seed" in error.hint and "return step(" in str(error.where)


@pytest.mark.parametrize("change", [lambda w: w[::-1].copy(), lambda w: w * 1.01, lambda w: -w])
def test_another_order_size_or_sign_is_seen(change):
    mesh = ts.dist.mesh(axes="dp", shape=2)
    w = weights(0, (40, 30))

    def program(rank):
        given = ts.dist.distribute(change(w) if rank else w, None, mesh=mesh)
        return ts.jit(loss)(given, ts.dist.tensor((6, 40), ROWS, mesh, init=1.0))

    refused(program, mesh)


def test_what_differs_by_roundings_is_let_through():
    """Machines of two kinds may round what each computes for itself in two ways."""
    mesh = ts.dist.mesh(axes="dp", shape=2)
    w = weights(0, (70, 90))

    def program(rank):
        given = ts.dist.distribute(np.nextafter(w, np.float32(2 * rank - 1)), None, mesh=mesh)
        return float(ts.jit(loss)(given, ts.dist.tensor((6, 70), ROWS, mesh, init=1.0)))

    assert simulated(program, mesh)[0] > 0


def test_plain_tensors_and_numbers_count_too():
    mesh = ts.dist.mesh(axes="dp", shape=2)

    def program(rank, given):
        w, x = ts.dist.tensor((4, 3), None, mesh, init=1.0), ts.dist.tensor((6, 4), ROWS, mesh,
                                                                             init=1.0)
        return ts.jit(lambda w, x, a: loss(w + a, x))(w, x, given(rank))

    for given, says in (
            (lambda r: 0.1 * (r + 1), r" a, f64\[\]:\n  rank 0: 0.1\n  rank 1: 0.2"),
            (lambda r: ts.tensor(weights(r)), r" a, f32\[4, 3\]:\n")):
        assert re.search(says, refused(lambda r, g=given: program(r, g), mesh).message)


def test_blocks_that_are_repeated_over_one_axis_are_compared_along_it():
    """A batch is split over dp: those of tp who share rows must have the same ones."""
    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))

    def program(rank, seed):
        step = ts.jit(loss)
        w = ts.dist.tensor((4, 6), COLUMNS, mesh, init="normal", seed=1)
        return step(w, ts.dist.distribute(weights(seed(rank), (8, 4)), ROWS, mesh=mesh)).numpy()

    by_rows = simulated(lambda rank: program(rank, lambda r: r // 2), mesh)  # each its own half
    assert len({float(y) for y in by_rows}) == 1
    error = refused(lambda rank: program(rank, lambda r: int(r == 3)), mesh)
    assert "the ranks along 'tp'" in error.message and " x, f32[4, 4] of (dp, -)" in \
        error.message


@pytest.mark.parametrize(("value", "says"), [
    (lambda r, i: 1.0 + (r and i), r"a, f64\[\]:\n  rank 0: 1\n  rank 1: 2$"),
    (lambda r, i: -1.0 if r and i else 1.0, r"a, f64\[\]:\n  rank 0: 1\n  rank 1: -1$"),
    (lambda r, i: np.int32(3 + (r and i)), r"a, int64\[\]:\n  rank 0: 3\n  rank 1: 4$"),
    (lambda r, i: weights(r * i), r"a, f32\[4, 3\]:\n  rank 0: .*\n  rank 1: "),
    (lambda r, i: ts.tensor(weights(r * i), "bf16"), r"a, bf16\[4, 3\]:\n  rank 0: 0.125977, "),
    (lambda r, i: ts.tensor(np.full((4, 4), 1 + r * i), "int4"), r"a, int4\[4, 4\]:\n")])
def test_plain_operands_are_looked_at_in_each_call(value, says):
    mesh = ts.dist.mesh(axes="dp", shape=2)

    def program(rank, change=1):
        add = ts.jit(lambda x, a: ts.sum(x) + ts.sum(ts.cast(a, "f32")))
        x = ts.dist.tensor((6, 4), ROWS, mesh, init=1.0)
        return [float(add(x, value(rank, i))) for i in (0, 0, change)]

    first, second = simulated(lambda rank: program(rank, 0), mesh)
    assert first == second
    assert re.search("alike, " + says, refused(program, mesh).message)


@pytest.mark.parametrize(("update", "says"), [
    (ts.jit(lambda w, g, lr: w - lr * g), r"lr, f64\[\] of <lambda> at .*w = update\(.*"),
    (lambda w, g, lr: w - lr * g, r"operand 0, f32\[\] of mul")])
def test_what_an_update_apart_was_given_is_compared_by_the_next_exchange(update, says):
    """It exchanges nothing. A rank may make more such calls, as one that prints."""
    mesh = ts.dist.mesh(axes="dp", shape=3)
    grads = ts.jit(lambda w, x: ts.grad(loss, argnums=0)(w, x))

    def program(rank, differs=False):
        w = ts.dist.tensor((4, 3), None, mesh, init=1.0)
        x = ts.dist.tensor((6, 4), ROWS, mesh, init=1.0)
        for i in range(4):
            w = update(w, grads(w, x), 0.1 * (1 + (differs and rank == 1 and i > 1)))
            if rank == 0:
                assert (w * (i + 3.0)).numpy().shape == (4, 3)
        return float(ts.sum(grads(w, x)))

    assert len({*simulated(program, mesh)}) == 1
    error = refused(lambda rank: program(rank, True), mesh)
    assert re.search(f"alike, {says}, in 1 call of it, before <lambda>:\n"
                     "  ranks 0, 2: 0.1\n  rank 1: 0.2$", error.message)


def test_what_a_program_was_given_that_exchanges_nothing_is_compared_at_the_end():
    """A batch that nobody has split: there are as many models as ranks, and no call in which ranks
    meet. A rank may make calls of its own."""
    mesh = ts.dist.mesh(axes="dp", shape=3)

    def program(rank, seed):
        step = ts.jit(lambda w, x: w - 0.1 * ts.grad(loss, argnums=0)(w, x))
        x, w = ts.dist.distribute(weights(seed(rank)), None, mesh=mesh), ts.ones((3, 2))
        w = step(ts.dist.distribute(w, None, mesh=mesh), x)
        return float(ts.sum(w)) if rank == 0 else 0.0

    assert simulated(lambda rank: program(rank, lambda r: 3), mesh)[0] > 0
    error = refused(lambda rank: program(rank, lambda r: r), mesh)
    assert "alike, x, f32[4, 3] of (-, -) of <lambda> at " in error.message
    assert "and exchanged nothing from there on:\n  rank 0: " in error.message
    assert "from_local" in error.hint


def test_distributed_operands_are_looked_at_in_the_first_call_only():
    mesh = ts.dist.mesh(axes="dp", shape=2)

    def program(rank):
        step = ts.jit(loss)
        w, x = ts.dist.tensor((4, 3), None, mesh, init=1.0), ts.dist.tensor((6, 4), ROWS, mesh,
                                                                             init=1.0)
        first = float(step(w, x))
        w.local.array[...] = 1.0 + rank
        return first, float(step(w, x))

    assert simulated(program, mesh) == [(16.0, 40.0)] * 2  # half of it from either


WRITES = {
    "the operand": lambda w, step, x: step(w, x),
    "what follows from it": lambda w, step, x: step(w * 2.0, x)}


@pytest.mark.parametrize("given", WRITES)
@pytest.mark.parametrize("rank_writes", [lambda r: r == 1, lambda r: True])
def test_what_a_rank_wrote_where_others_hold_the_same_is_compared(given, rank_writes):
    """A write into x.local. All may write the same, and each into its own part."""
    mesh, seen = ts.dist.mesh(axes="dp", shape=3), WRITES[given]

    def program(rank, value):
        step = ts.jit(loss)
        w, x = ts.dist.tensor((4, 3), None, mesh, init=1.0), ts.dist.tensor((6, 4), ROWS, mesh,
                                                                             init=1.0)
        first = float(seen(w, step, x))
        x.local[0] = 1.0 + rank
        if rank_writes(rank):
            w.local[2, 1] = value(rank)
        return first, float(seen(w, step, x)), float(seen(w, step, x))

    error = refused(lambda rank: program(rank, lambda r: 4.0 + r), mesh)
    assert "different values of what they hold alike, " in error.message
    assert "f32[4, 3] of (-, -)" in error.message
    assert re.search("rank 1: (from element 7 on |1, 1, )(5|10), ", error.message), error.message
    if rank_writes(0):
        made = simulated(lambda rank: program(rank, lambda r: 4.0), mesh)
        assert len({*made}) == 1 and made[0][0] != made[0][1] == made[0][2]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int32", "fp4_e2m1"])
def test_a_program_that_runs_alone_is_told_of_parts_that_no_longer_agree(dtype):
    """There x.local is the part of rank 0; under a launcher each rank would have written its own.
    What no other rank holds it may write."""
    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))
    step = ts.jit(lambda w: ts.sum(ts.cast(w, "f32")))
    w = ts.dist.tensor((4, 4), COLUMNS, mesh, dtype, init=1.0)
    w[...] = ts.tensor(np.full((4, 4), 2.0), dtype)
    assert float(step(w)) == 32
    for part in w.parts.values():
        part[...] = 3
    assert float(step(w)) == 48
    w.local[3, 1] = 1
    with pytest.raises(ts.dist.PolicyMismatch) as info:
        step(w)
    assert "<lambda> is given different values of what the ranks along 'dp' hold alike, w, " \
        in info.value.message
    assert "\n  rank 0: from element 7 on 1\n  rank 2: from element 7 on 3" in info.value.message
    assert "write x[...] = values" in info.value.hint
    w.local[0] = 2
    with pytest.raises(ts.dist.PolicyMismatch, match="cast is given different values"):
        ts.cast(w, "f64")
    own = ts.dist.tensor((4, 4), ts.ShardSpec((0, 1), ("dp", "tp")), mesh, init=1.0)
    own.local[0] = 5.0
    assert float(ts.jit(ts.sum)(own)) == 24


def test_a_rank_is_told_that_others_have_not_computed_with_their_parts():
    """An op on a split tensor that one rank makes, which nobody exchanges anything for: at its
    line. Of what it holds whole a rank may compute what it likes."""
    mesh = ts.dist.mesh(axes="dp", shape=3)

    def program(rank, split):
        x, w = ts.dist.tensor((6, 4), ROWS, mesh, init=1.0), ts.dist.tensor((4, 3), None, mesh,
                                                                           init=1.0)
        if rank == 1:
            (x if split else w) * 2.0  # alone
        return float(ts.sum(x @ w))

    with pytest.warns(ts.dist.RankAloneWarning, match="^mul.. on a tensor that is split over dp, "
                      "made by rank 1 and not by ranks 0, 2: its result") as told:
        assert simulated(lambda rank: program(rank, True), mesh) == [72.0] * 3
    (one,) = [w for w in told if w.category is ts.dist.RankAloneWarning]
    assert one.filename == __file__ and "# alone" in linecache.getline(__file__, one.lineno)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert simulated(lambda rank: program(rank, False), mesh) == [72.0] * 3


BATCHES = {
    "distribute": lambda x, mesh: ts.dist.distribute(x(ts.dist.rank() // 2), ROWS, mesh=mesh),
    "from_local": lambda x, mesh: ts.dist.from_local(x(ts.dist.rank() // 2)[:4], ROWS, mesh)}


@pytest.mark.parametrize("made", BATCHES)
def test_batches_of_later_calls_are_compared_along_the_axes_that_repeat_them(made, monkeypatch):
    """Rows over dp, of which the ranks of tp have the same. Ranks tell in the headers that go
    anyway; where a rank makes a tensor of its own it costs one message more, and is no error."""
    mesh = ts.dist.mesh(axes=("dp", "tp"), shape=(2, 2))
    told = []
    monkeypatch.setattr(compare_programs, "_tell", lambda *args, tell=compare_programs._tell: (
        told.append(args), tell(*args))[1])

    def program(rank, differs=(), own=None):
        step, w = ts.jit(loss), ts.dist.tensor((4, 6), COLUMNS, mesh, init="normal", seed=1)
        for i in range(3):
            if rank == own:
                assert ts.dist.distribute(weights(i), None, mesh=mesh).local.shape == (4, 3)
            x = BATCHES[made](lambda row, i=i: weights(9 * i + row + 4 * ((rank, i) in differs),
                                                       (8, 4)), mesh)
            value = step(w, x)
        return float(value)

    assert len({*simulated(program, mesh)}) == 1
    assert len(told) == 4 * 3
    assert len({*simulated(lambda rank: program(rank, own=1), mesh)}) == 1
    error = refused(lambda rank: program(rank, [(3, 2)]), mesh)
    assert re.search(rf"alike, ts.dist.{made} of f32\[8, 4\] as \(dp, -\) at .*{made}.*, "
                     r"in 1 call of it, before loss:\n  ranks 0, 1: none\n  rank 2: .*\n  rank 3: ",
                     error.message)


@pytest.mark.parametrize("how", ["an average of one rank", "a cast of one rank", "compiled"])
@pytest.mark.parametrize("between", [0, 2])
def test_what_a_rank_computes_alone_is_seen_where_it_is_read(how, between):
    """Calls that send nothing are counted, and operands looked at once where ranks made others:
    in the next call, and in the next one of each other program, as of an evaluation."""
    mesh = ts.dist.mesh(axes="dp", shape=3)
    train, evaluate = ts.jit(loss), ts.jit(lambda w, x: ts.max(x @ w))
    mean = ts.jit(lambda a, w: 0.9 * a + 0.1 * w)

    def program(rank, differs=True):
        w, average = (ts.dist.tensor((4, 3), None, mesh, init=v) for v in (1.01, 1.02))
        x = ts.dist.tensor((6, 4), ROWS, mesh, init=1.0)
        first = float(train(w, x)), float(evaluate(average, x))
        if rank == 1 and differs:
            average = {"an average of one rank": lambda: 0.9 * average + 0.1 * w,
                       "a cast of one rank": lambda: ts.cast(ts.cast(average, "bf16"), "f32"),
                       "compiled": lambda: mean(average, w)}[how]()
        elif rank == 1:
            assert (average * 2.0).numpy().shape == (4, 3)
        for _ in range(between):
            train(w, x)
        return first, float(evaluate(average, x))

    assert len({*simulated(lambda rank: program(rank, False), mesh)}) == 1
    error = refused(program, mesh)
    assert "give <lambda> different values of what they hold alike, w, f32[4, 3]" in error.message
    assert "  ranks 0, 2: 1.02, " in error.message and "  rank 1: " in error.message


def test_every_call_compares_what_ranks_hold_alike_where_that_is_asked_for():
    mesh = ts.dist.mesh(axes="dp", shape=2)

    def program(rank):
        step, w = ts.jit(loss), ts.dist.tensor((4, 3), None, mesh, init=1.01)
        x = ts.dist.tensor((6, 4), ROWS, mesh, init=1.0)
        step(w, x)
        if rank == 1:
            w = ts.cast(ts.cast(w, "bf16"), "f32")
        return step(w, x)

    with ts.config.scope(comm_check="each"):
        assert "alike, w, f32[4, 3] of (-, -):\n  rank 0: 1.01, " in refused(program, mesh).message


@pytest.mark.parametrize("route", ["nccl", "host"])
def test_parts_on_gpus_are_compared(gpus, request, route):
    if route == "nccl":
        request.getfixturevalue("nccl")
    mesh = ts.dist.mesh(["cuda:0", "cuda:1"], axes="dp")

    def program(rank, seed):
        step = ts.jit(loss)
        w = ts.dist.distribute(weights(seed(rank)), None, mesh=mesh)
        assert w.local.device == "cuda:0"
        return float(step(w, ts.dist.tensor((6, 4), ROWS, mesh, init=1.0)))

    same = simulated(lambda rank: program(rank, lambda r: 7), mesh)
    assert same[0] == same[1] > 0
    error = refused(lambda rank: program(rank, lambda r: r), mesh)
    assert " w, f32[4, 3] of (-, -):\n  rank 0: " in error.message
    assert f"{weights(1).ravel()[0]:.6g}" in error.message
