"""Collectives that run beside kernels: who waits for them, by the bytes that both touch."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace

import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from fake_nccl import nccl as nccl
from lowering_cases import apart as apart
from mesh.test_gpu_programs import DEVICES, on_ranks, placed, values
from mesh.test_gpu_programs import gpus as gpus
from tessera.graph.cuda.passes.overlap import Overlap, overlapped
from tessera.graph.cuda.program.run import CudaProgram
from tessera.graph.schedule.ir import ByteRange
from tessera.mesh.sharding import partitioned_steps
from tessera.mesh.sharding.localize import localize
from tolerance import assert_close


def step(reads: str, writes: str) -> SimpleNamespace:
    def operand(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, layout="all of its buffer")

    return SimpleNamespace(reads=[*map(operand, reads)], writes=[*map(operand, writes)])


def found(*steps: tuple[str, str], beside: tuple[int, ...], alone: tuple[int, ...] = ()):
    """Of steps that read and write buffers of a byte; capital letters lie where small ones do."""
    return overlapped([step(*s) for s in steps], beside, alone,
                      lambda name: ByteRange("m", ord(name.lower()), ord(name.lower()) + 1))


def test_who_reads_what_comes_waits():
    assert found(("a", "b"), ("x", "y"), ("b", "c"), beside=(0,)) == Overlap({0: 0}, {2: 0})


def test_who_writes_where_something_leaves_or_comes_waits():
    assert found(("a", "b"), ("x", "y"), ("x", "A"), beside=(0,)).awaited == {2: 0}
    assert found(("a", "b"), ("x", "y"), ("x", "B"), beside=(0,)).awaited == {2: 0}


def test_who_reads_what_leaves_does_not_wait_and_the_end_does():
    assert found(("a", "b"), ("a", "y"), beside=(0,)).awaited == {2: 0}


def test_to_wait_for_one_is_to_wait_for_those_before():
    made = found(("a", "b"), ("c", "d"), ("x", "y"), ("d", "e"), ("b", "f"), beside=(0, 1))
    assert made == Overlap({0: 0, 1: 1}, {3: 1})


def test_nothing_runs_beside_what_is_waited_for_at_once():
    assert found(("a", "b"), ("b", "c"), ("c", "d"), beside=(0,)) is None
    assert found(("a", "b"), beside=()) is None


def test_a_loop_that_sends_waits_for_all():
    assert found(("a", "b"), ("x", "y"), ("x", "z"), beside=(0,), alone=(2,)).awaited == {2: 0}


@pytest.mark.parametrize("late", ["", "collectives"])
@pytest.mark.parametrize("n", [2, 3])
def test_values_are_right_whenever_a_collective_is_done(gpus, nccl, rng, n, late):
    """A chain of layers with the gradients of earlier ones under way."""
    X, *W = values(rng, (6, 8), *[(8, 8)] * 3)

    def loss(ws, x):
        for w in ws:
            x = ts.gelu(x @ w)
        return ts.mean(ts.square(x))

    def update(ws, x):
        with ts.overlap():
            grads = ts.grad(loss, argnums=0)(ws, x)
            return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)]

    want = ts.jit(update)([ts.tensor(w) for w in W], ts.tensor(X))

    def program(mesh):
        gpus.driver.late = late
        f = ts.jit(update)
        ws, x = [placed(mesh, w, "whole") for w in W], placed(mesh, X, "rows")
        found = [[w.numpy() for w in f(ws, x)] for _ in range(3)]
        (space,) = {f._last.program.local(ts.dist.rank())._workspace}
        return found, [t.what.part for t in space.timed], len({t.stream for t in space.timed})

    for found, parts, streams in on_ranks(n, program):
        for made in found:
            for a, b in zip(made, want, strict=True):
                assert_close(a, b.numpy(), "f32", 48)
        assert streams == 2 and parts.count("exchange") == 3 and "wait" in parts


def test_what_is_sent_early_is_not_launched_with_what_is_sent_late(gpus, nccl, rng):
    """Sums of biases are alike, and would be one launch behind the last layer."""
    X, *W = values(rng, (6, 8), *[(8, 8)] * 4)
    B = values(rng, *[(8,)] * 4)

    def loss(params, x):
        for w, b in params:
            x = ts.gelu(x @ w + b)
        return ts.mean(ts.square(x))

    def program(mesh):
        with ts.overlap():
            f = ts.jit(lambda params, x: ts.grad(loss, argnums=0)(params, x))
        with ts.overlap():
            f([(placed(mesh, w, "whole"), placed(mesh, b[None], "whole"))
               for w, b in zip(W, B, strict=True)], placed(mesh, X, "rows"))
        plan = f._last.program.local(ts.dist.rank()).program.plan
        return [s.kind for s in plan.steps]

    for kinds in on_ranks(2, program):
        first = kinds.index("exchange")
        assert kinds[first:].count("gemm") >= 4


def test_what_is_sent_waits_for_no_other_layer(monkeypatch):
    """Sums of biases, which one launch could make for all layers, stay with the collective of
    their layer."""
    monkeypatch.setattr(partitioned_steps, "GPU_BUCKET_BYTES", 1 << 14)
    mesh = ts.dist.mesh(DEVICES[:2], axes="x")
    kind = "bf16 @accum(f32)"

    def loss(ws, bs, x):
        for w, b in zip(ws, bs, strict=True):
            y = ts.cast(x, kind) @ ts.cast(w, kind) + ts.cast(b, kind)
            q, k, v = (y[:, :, i:i + 64].reshape(8, 128, 1, 64).transpose(0, 2, 1, 3)
                       for i in (0, 64, 128))
            y = ts.attention(q, k, v, causal=True).transpose(0, 2, 1, 3).reshape(8, 128, 64)
            x = x + ts.cast(y, "f32")
        return ts.mean(ts.square(x))

    def there(shape, spec):
        return ts.dist.stand_ins(ts.Tensor[(*shape, ts.f32)], lambda *_: spec, mesh)

    whole, rows = ts.ShardSpec(replicate=True), ts.ShardSpec(("row",), ("x",))
    ws, bs = [there((64, 192), whole)] * 5, [there((192,), whole)] * 5
    f = ts.jit(ts.grad(loss, argnums=(0, 1)))
    made = f.traced(ws, bs, there((8, 128, 64), rows)).program.made
    kinds = [s.kind for s in CudaProgram(localize(made, 0), "sm_90a").plan.steps]
    first, *_ = (k for k, kind in enumerate(kinds) if kind == "exchange")
    between = [kind for kind in kinds[first:] if kind in ("exchange", "gemm")]
    assert between.count("exchange") >= 5 and ["exchange"] * 3 not in [
        between[i:i + 3] for i in range(len(between) - 4)], kinds


def layers(ws, x):
    for w in ws:
        x = ts.gelu(x @ w)
    return ts.mean(ts.square(x))


def programs_of(gpus, rng, monkeypatch, step) -> list[tuple]:
    """What each of two ranks runs, and the parts of a call in order. step(ws, x): each gradient
    is a bucket."""
    X, *W = values(rng, (6, 8), *[(8, 8)] * 4)
    monkeypatch.setattr(partitioned_steps, "GPU_BUCKET_BYTES", 8 * 8 * 4)
    want = ts.jit(step)([ts.tensor(w) for w in W], ts.tensor(X))

    def program(mesh):
        gpus.driver.late = "collectives"
        f = ts.jit(step)
        ws, x = [placed(mesh, w, "whole") for w in W], placed(mesh, X, "rows")
        found = [[w.numpy() for w in f(ws, x)] for _ in range(3)]
        local = f._last.program.local(ts.dist.rank())
        return found[-1], local.program, [t.what.part for t in local._workspace.timed]

    made = on_ranks(2, program)
    for found, *_ in made:
        for a, b in zip(found, want, strict=True):
            assert_close(a, b.numpy(), "f32", 48)
    return [(program, parts) for _, program, parts in made]


def test_gradients_are_sent_while_the_backward_pass_goes_on(gpus, nccl, rng, monkeypatch):
    """Though the caller reads them at its end."""
    for _, parts in programs_of(gpus, rng, monkeypatch, ts.grad(layers, argnums=0)):
        sent = [i for i, part in enumerate(parts) if part == "exchange"]
        assert len(sent) == 4 and all("kernel" in parts[a:b] for a, b in zip(
            sent, sent[1:], strict=False))


def test_what_came_first_is_used_first(gpus, nccl, rng, monkeypatch):
    """The optimizer begins with the last layer, whose gradient is there, and does what it does to
    others in launches of their own, while the gradient of the first is on its way."""
    def update(ws, x):
        return [w - 0.1 * g for w, g in zip(ws, ts.grad(layers, argnums=0)(ws, x), strict=True)]

    for program, _ in programs_of(gpus, rng, monkeypatch, update):
        plan = program.plan
        sent = [k for k, s in enumerate(plan.steps) if s.kind == "exchange"]
        made = overlapped(plan.steps, sent, (), plan.region)
        behind = [run for run in program.runs() if run.start > sent[-1]]
        assert [max(made.awaited.get(k, -1) for k in run) for run in behind] == [0, 1, 2, 3]


def test_parameters_of_a_bucket_are_gathered_together_and_their_gradients_reduced(gpus, nccl, rng):
    """Of layers with weights and vectors of two types."""
    X, *W = values(rng, (128, 16), *[(16, 16)] * 3)
    B = values(rng, *[(16,)] * 3)
    kind = "bf16 @accum(f32)"

    def loss(params, x):
        for w, b in params:
            x = ts.gelu(ts.cast(x, kind) @ ts.cast(w, kind) + ts.cast(b, kind))
            x = ts.cast(x, "f32") * b
        return ts.mean(ts.square(x))

    want = ts.grad(loss, argnums=0)([(ts.tensor(w), ts.tensor(b)) for w, b in zip(
        W, B, strict=True)], ts.tensor(X))

    def program(mesh):
        params = ts.dist.fsdp([(ts.tensor(w), ts.tensor(b)) for w, b in zip(W, B, strict=True)],
                              "x", mesh)
        f, x = ts.jit(ts.grad(loss, argnums=0)), placed(mesh, X, "rows")
        found = [[g.numpy() for pair in f(params, x) for g in pair] for _ in range(3)]
        plan = f._last.program.local(ts.dist.rank()).program.plan
        return found[-1], [s.steps[0].op for s in plan.steps if s.kind == "exchange"]

    for found, sent in on_ranks(2, program):
        for made, g in zip(found, [g for pair in want for g in pair], strict=True):
            assert_close(made, g.numpy(), "bf16", 128)
        assert sent.count("mesh_rank_blocks") == 1, sent  # of 14
        assert sent.count("mesh_scattered_sums") <= 4, sent  # of 9, of two types


def test_tiles_are_given_out_where_there_are_more_than_multiprocessors():
    """Of the matmuls that run while gradients are sent; a counter is cleared for each of them."""
    mesh, kind = ts.dist.mesh(DEVICES[:2], axes="x"), "bf16 @accum(f32)"

    def there(shape, spec):
        return ts.dist.stand_ins(ts.Tensor[(*shape, ts.as_type(kind))], lambda *_: spec, mesh)

    whole, rows = ts.ShardSpec(replicate=True), ts.ShardSpec(("row",), ("x",))
    f = ts.jit(ts.grad(layers, argnums=0))
    made = f.traced([there((1024, 4096), whole), there((4096, 1024), whole)] * 8,
                    there((1 << 15, 1024), rows)).program.made
    steps = CudaProgram(localize(made, 0), "sm_90a").plan.steps
    first = next(k for k, s in enumerate(steps) if s.kind == "exchange")
    tiles = {(prod(s.grid) > 132, dict(s.schedule.extra).get("TILES"))
             for s in steps[first:-1] if s.kind == "gemm"}
    assert tiles == {(True, "dynamic"), (False, None)}


def test_what_waits_for_more_does_not_wait_for_something_long(monkeypatch):
    """Gradients of layers that fill no bucket are sent behind the last of them, not with that of
    the table, which is longer than a bucket and is made at the end."""
    monkeypatch.setattr(partitioned_steps, "GPU_BUCKET_BYTES", 1 << 20)
    mesh = ts.dist.mesh(DEVICES[:2], axes="x")

    def made(rows: int) -> str:
        params = [ts.dist.stand_in(shape, whole, mesh) for shape in
                  ((rows, 256), *[(256, 256)] * 3)]
        tokens = ts.dist.stand_in((4096,), ts.ShardSpec(("row",), ("x",)), mesh, "int32")
        steps = ts.jit(ts.grad(loss, argnums=0)).traced(params, tokens).program.made.steps
        return "".join(letter(s) for s in steps if letter(s))

    def loss(params, tokens):
        return layers(params[1:], ts.embedding(params[0], tokens))

    def letter(step) -> str:
        if hasattr(step, "node"):
            return {"matmul": "m", "segment_sum": "t"}.get(step.node.op.name, "")
        return str(len(getattr(step, "moves", (step,))))

    whole = ts.ShardSpec(replicate=True)
    assert made(512).endswith("mt4")  # half a bucket, with the rest in one message
    assert made(2048).endswith("m3t1")
