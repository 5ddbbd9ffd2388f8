"""The most memory that a program has in use: results in the place of operands, values that are used
up as soon as they can be, and no launch of many groups for whose sake more is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

import tessera as ts
from emulator import run as run_emulated
from lowered_functions import lowered, normal
from tessera import Tensor, tile
from tessera.bench.catalogue import MODELS
from tessera.bench.models.record import StepModel, shapes_of
from tessera.bench.models.step import first_state, training_step
from tessera.errors import GraphError
from tessera.graph import tree
from tessera.graph.cuda import CudaProgram, lower
from tessera.graph.cuda.kernels import column_passes
from tessera.graph.cuda.launch_forms import request_of
from tessera.graph.cuda.program.run import GroupLaunch, run_of
from tessera.graph.ir import value_bytes
from tessera.graph.schedule import part_overwrites, place_views
from tessera.graph.schedule.check_memory_plan import verify_plan
from tessera.graph.schedule.groups import FusionGroup
from tessera.graph.schedule.memory_plan import MemoryPlan, aligned_bytes
from tessera.kernels import row_blocks
from tessera.tile.launch.machine_code import emit_request
from tolerance import assert_close

MIB = 1 << 20


def written_over(made: CudaProgram) -> list[str]:
    """The kinds of the groups that write over an operand."""
    over = {b.name: b.over for b in made.plan.buffers if b.over}
    return [g.kind for g in made.plan.groups for w in g.writes
            if made.base(w.name) in over and over[w.name] in {made.base(r.name) for r in g.reads}]


def training(m: StepModel) -> CudaProgram:
    """A step of a model whose parameters and state are given up."""
    params = shapes_of(m, ts.zeros)
    state, ids = first_state(m, params), ts.zeros((m.B, m.T), dtype="int32")
    count = len(tree.flatten((params, state))[0])
    graph = training_step(m, donate=("params", "state")).graph(params, state, ids, ids)
    return CudaProgram(graph, "sm_90a", tuple(range(count)))


def small(name: str, **extents: int) -> StepModel:
    usual = {"B": 4, "T": 128, "layers": 4, "d": 64, "heads": 2, "vocabulary": 4096}
    return MODELS[name].sized(**{**usual, **extents})


def live_bytes(plan: MemoryPlan, groups: list[FusionGroup]) -> list[int]:
    """Of the arena, while each group runs."""
    first: dict[Any, int] = {}
    for i, g in enumerate(groups):
        for v in g.outputs:
            first.setdefault(plan.places[v].root, i)
    gone, found = set(plan.over.values()), [0] * len(groups)
    for v, begin in first.items():
        if plan.places[v].kind == "arena":
            for i in range(begin, plan.last_use[v] + (v not in gone)):
                found[i] += aligned_bytes(v, plan.target)
    return found


# --- in the place of an operand -----------------------------------------------------------------
def chain(x: Any, w: Any) -> Any:
    """A loop between two matmuls, which cannot take it in: its operand is read twice."""
    y = x @ w
    return ts.cast(ts.softmax(ts.abs(y)) @ w, "f32")  # without abs it is attention


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_rows_are_written_where_their_operand_lay(dtype: str, rng: np.random.Generator) -> None:
    x, w = normal(rng, 48, 32, dtype=dtype), normal(rng, 32, 32, dtype=dtype)
    made = lowered(chain, x, w)
    assert written_over(made) == ["rows"]
    one = -(-48 * 32 * w.dtype.bits // 8 // 256) * 256
    assert made.plan.temporary_bytes == one
    text = str(made.plan)
    (over,) = [b for b in made.plan.buffers if b.over]
    assert f"temporary at 0 over {over.over}\n" in text
    (got,) = made.run([x.array, w.array])
    a, b = (np.asarray(t.numpy(), np.float64) for t in (x, w))
    y = np.abs(a @ b)
    p = np.exp(y - y.max(-1, keepdims=True))
    want = (p / p.sum(-1, keepdims=True)) @ b
    assert_close(got, want, dtype, n=32, scale=float(np.abs(b).max()))


def test_the_interpreter_has_one_memory_for_both(rng: np.random.Generator) -> None:
    """So a kernel that read what it has written already would show."""
    x, w = normal(rng, 48, 32), normal(rng, 32, 32)
    made = lowered(chain, x, w)
    memory = made._host_memory([x.array, w.array])
    (over,) = [b for b in made.plan.buffers if b.over]
    assert np.shares_memory(memory[over.name], memory[over.over])


def twice(x: Any, w: Any) -> Any:  # the operand of the softmax is read again
    y = x @ w
    return (ts.softmax(y) @ w) + y


def narrower(x: Any, w: Any) -> Any:
    y = x @ w
    return ts.cast(ts.softmax(y), "bf16") @ ts.cast(w, "bf16")


def of_an_argument(x: Any, w: Any) -> Any:
    return ts.softmax(x) @ w


def a_result(x: Any, w: Any) -> Any:
    return ts.softmax(x @ w)


def of_a_part(x: Any, w: Any) -> Any:
    y = x @ w
    return ts.softmax(y[:16]) @ w


def other_rows(x: Any, w: Any) -> Any:
    """y is used for its sums alone."""
    y = x @ w
    return (ts.exp(x) + ts.max(y, axis=-1, keepdims=True) * ts.sum(x, axis=-1, keepdims=True)) @ w


# The scale is that of the terms that cancel: in other_rows a maximum of 20 times a sum of 32
# numbers of both signs, and 32 such products.
@pytest.mark.parametrize("fn, scale", [
    (twice, 32.0), (narrower, 32.0), (of_an_argument, 32.0), (a_result, 32.0), (of_a_part, 32.0),
    (other_rows, 20.0 * 32)])
def test_what_is_not_written_over(fn: Callable, scale: float, rng: np.random.Generator) -> None:
    x, w = normal(rng, 48, 32), normal(rng, 32, 32)
    made = lowered(fn, x, w)
    assert not written_over(made)
    (got,), want = made.run([x.array, w.array]), ts.jit(fn)(x, w)
    assert_close(got, want.array, "bf16" if fn is narrower else "f32", n=64, scale=scale)


def test_of_two_operands_one_is_written_over(rng: np.random.Generator) -> None:
    def fn(x: Any, w: Any) -> Any:
        a, b = x @ w, ts.exp(x) @ w
        return (ts.softmax(a) * b) @ w

    x, w = normal(rng, 48, 32), normal(rng, 32, 32)
    made = lowered(fn, x, w)
    assert written_over(made) == ["rows"]
    assert made.plan.temporary_bytes == 3 * 48 * 32 * 4  # exp(x), then a b or their result
    assert_close(made.run([x.array, w.array])[0], ts.jit(fn)(x, w).array, "f32", n=32, scale=64.0)


def test_of_a_batch_each_writes_over_its_own(rng: np.random.Generator) -> None:
    def both(xs: Any, w: Any) -> Any:
        return [ts.softmax(x @ w) @ w for x in xs]

    xs, w = [normal(rng, 32, 32) for _ in range(4)], normal(rng, 32, 32)
    made = lowered(both, xs, w)
    assert written_over(made) == ["rows"] * 4 and max(map(len, made.runs())) == 4
    assert made.plan.temporary_bytes == 4 * 32 * 32 * 4
    for got, want in zip(made.run([x.array for x in xs] + [w.array]), ts.jit(both)(xs, w),
                         strict=True):
        assert_close(got, want.array, "f32", n=32, scale=32.0)


def test_in_a_batch_no_operand_of_a_neighbour_is_written_over(rng: np.random.Generator) -> None:
    def fn(x: Any, w: Any, a: Any, b: Any) -> Any:
        y = x @ w
        return ts.softmax(y + a) @ w, ts.softmax(y + b) @ w

    xs = [normal(rng, 48, 32), normal(rng, 32, 32), normal(rng, 48, 32), normal(rng, 48, 32)]
    made = lowered(fn, *xs)
    assert [len(r) for r in made.runs()] == [1, 2, 1, 1] and not written_over(made)
    for got, want in zip(made.run([x.array for x in xs]), ts.jit(fn)(*xs), strict=True):
        assert_close(got, want.array, "f32", n=32, scale=32.0)


# --- the proof ----------------------------------------------------------------------------------
def test_the_proof_refuses_what_is_read_later(rng: np.random.Generator) -> None:
    low = lowered(twice, normal(rng, 48, 32), normal(rng, 32, 32)).lowered
    rows = next(g for g in low.groups if g.kind == "rows")
    x, y = rows.inputs[0], rows.outputs[0]
    low.memory.over[y] = x
    low.memory.places[y].offset = low.memory.places[x].offset
    with pytest.raises(GraphError, match="softmax|rows.*writes over what is still read"):
        verify_plan(low.graph, low.groups, low.memory)


def test_the_proof_refuses_kernels_that_cannot(rng: np.random.Generator) -> None:
    low = lowered(lambda x, w: (x @ w) @ w, normal(rng, 32, 32), normal(rng, 32, 32)).lowered
    first, second = (g for g in low.groups if g.kind == "gemm")
    x, y = first.outputs[0], second.outputs[0]
    place = low.memory.places[y]
    place.kind, place.offset, low.memory.over[y] = "arena", low.memory.places[x].offset, x
    with pytest.raises(GraphError, match="cannot write its result over an operand"):
        verify_plan(low.graph, low.groups, low.memory)


def test_the_proof_refuses_memory_that_is_not_read(rng: np.random.Generator) -> None:
    low = lowered(chain, normal(rng, 48, 32), normal(rng, 32, 32)).lowered
    (y,) = low.memory.over
    low.memory.over[y] = low.graph.inputs[0]
    with pytest.raises(GraphError, match="writes over memory that it does not read"):
        verify_plan(low.graph, low.groups, low.memory)


# --- the machine code ---------------------------------------------------------------------------
def emulate(made: CudaProgram, inputs: list[np.ndarray]) -> tuple[list[np.ndarray], int]:
    """Results, and how many kernels wrote over an operand: those in emulated instructions, one
    thread after another, all others under the interpreter."""
    memory, count = made._host_memory(inputs), 0
    types = {b.name: b.type for b in made.plan.buffers}
    over = {b.name for b in made.plan.buffers if b.over}
    for step in made.steps:
        assert isinstance(step, GroupLaunch)
        given = [run_of(memory[made.base(n)], types[n].dtype, shape, at)
                 for (n, shape), at in zip(step.arguments, step.offsets, strict=True)]
        if over.isdisjoint(o.name for o in step.group.writes):
            step.shared(*(ts.Tensor(a, types[n]) for a, (n, _) in
                          zip(given, step.arguments, strict=True)))
            continue
        request = request_of(step, made.target)
        emitted = emit_request(step.shared.function(), request).emitted
        names = [p.name for p in emitted.parameters if p.kind == "tensor"]
        dims = {p.name: prod(step.group.space) for p in emitted.parameters if p.kind == "dim"}
        run_emulated(emitted, request.lanes, step.group.grid, dict(zip(names, given, strict=True)),
                     dims, lockstep=False)
        count += 1
    return [memory[made.base(n)] for n in made.plan.results], count


@pytest.mark.parametrize("n", [64, 150, 128])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("passes", [False, True])
def test_threads_read_before_others_write(
        n: int, dtype: str, passes: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
        ) -> None:
    if passes:
        for name, value in (("LONGEST", 32), ("STEPS", {}), ("STEP", 64), ("PASS_WARPS", 2)):
            monkeypatch.setattr(row_blocks, name, value)
    y = ts.tensor(rng.integers(0, n, 3).astype(np.int32))

    def step(x: Any, w: Any) -> Any:
        logits, back = ts.vjp(lambda x: x @ w, x)
        d = ts.grad(lambda z: ts.cross_entropy(ts.cast(z, "f32"), y))(logits)
        return back(d)

    x, w = normal(rng, 3, 16, dtype=dtype), normal(rng, 16, n, dtype=dtype)
    made = lowered(step, x, w, target="sm_80")
    (got,), count = emulate(made, [x.array, w.array])
    assert count == 1
    a, b = (np.asarray(t.numpy(), np.float64) for t in (x, w))
    z = a @ b
    d = np.exp(z - z.max(-1, keepdims=True))
    d /= d.sum(-1, keepdims=True)
    d[np.arange(3), y.array] -= 1.0
    # what is rounded to bf16 is wrong by 2^-9 of the logits, which e^z makes relative
    assert_close(got.reshape(3, 16), d @ b.T / 3, dtype, n=n, scale=float(np.abs(z).max()))


# --- training steps -----------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["gpt2-124m", "llama"])
def test_the_gradient_of_logits_takes_their_place(name: str) -> None:
    m = small(name, kv_heads=2 if name == "llama" else 0, hidden=128)
    made = training(m)
    over = {b.name: b for b in made.plan.buffers if b.over}
    (d,) = (b for b in over.values() if prod(b.shape) == m.tokens * m.vocabulary)
    assert made.plan.region(d.over) == made.plan.region(d.name)
    live = live_bytes(made.lowered.memory, made.lowered.groups)
    assert made.plan.temporary_bytes == made.lowered.memory.arena_bytes <= 1.1 * max(live)


def test_operands_of_a_gradient_are_free_before_the_layers_below() -> None:
    """Of the vocabulary's weights the gradient is a matmul behind the loss: it does not wait for
    the optimizer, and keeps no logits for it."""
    made = training(small("gpt2-124m"))
    groups, plan = made.lowered.groups, made.lowered.memory
    wide = max((g for g in groups if g.kind == "rows"), key=lambda g: prod(g.space))
    begin = groups.index(wide)
    (y,) = plan.over.keys() & set(wide.outputs)
    end = plan.last_use[y]
    assert sum(g.kind in ("strips", "attention", "launch") for g in groups[begin:end + 1]) <= 1
    live = live_bytes(plan, groups)
    assert min(live[end + 1:end + 4]) < live[begin] - value_bytes(y) // 2


def test_batches_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of all layers' weight gradients are not kept for one sum of them."""
    m = small("gpt2-124m", B=8, T=512, layers=8, d=128, vocabulary=512)
    together = training(m)
    monkeypatch.setattr(lower, "batch_groups", lambda groups, *args: groups)
    alone = training(m)
    assert len(together.runs()) < 0.8 * len(alone.runs())
    most = [max(live_bytes(p.lowered.memory, p.lowered.groups)) for p in (together, alone)]
    assert most[0] <= most[1] + MIB


# --- kernels of users ---------------------------------------------------------------------------
@ts.kernel
def double_row(x: Tensor["M", "N"], row: ts.int32):
    x[row, :] = tile.load(x[row, :]) * 2.0


def doubled_row(x: ts.Tensor, row: int, later: Any = None) -> Any:
    """Of x + 1, and what reads that as it was, later."""
    y = x + 1.0
    old = y * 1.0  # the same value by another name
    double_row[1](y, row)
    return (y * 1.0, later(old, y)) if later else y


@pytest.mark.parametrize("read", [False, True], ids=["alone", "read later"])
def test_a_kernel_writes_where_its_argument_lies_unless_that_is_read_later(read, rng) -> None:
    x = normal(rng, 64, 64)
    later = (lambda old, y: old @ y) if read else (lambda old, y: y @ y)
    made = lowered(lambda x: doubled_row(x, 3, later), x)
    (launch,) = (g for g in made.plan.groups if g.kind == "launch")
    (before,), (after,) = ({made.base(o.name) for o in part} for part in (
        [o for o in launch.reads if o.shape == (64, 64)], launch.writes))
    assert (before == after) == (not read)
    y = x.array.astype(np.float64) + 1
    new = y.copy()
    new[3] *= 2
    got = made.run([x.array])
    assert_close(got[0], new, "f32")
    assert_close(got[1], (y if read else new) @ new, "f32", n=64, scale=64.0)


@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
def test_a_kernel_writes_over_an_argument_that_is_given_up(donated, rng) -> None:
    x = normal(rng, 32, 16)

    def f(x):
        x = x * 1.0
        double_row[1](x, 5)
        return x

    made = lowered(f, x, donated=donated)
    (launch,) = (g for g in made.plan.groups if g.kind == "launch")
    where = made.base(launch.writes[0].name)
    assert (where == made.lowered.inputs[0]) == bool(donated)
    before = x.array.copy()
    want = before.copy()
    want[5] *= 2
    assert (made.run([x.array])[0] == want).all() and (x.array == before).all()


# --- in the place of a part ---------------------------------------------------------------------
def heads_of(x: Any, w: Any) -> list:
    """Queries, keys and values side by side, a head after another.   x: [B, T, d]"""
    B, T, _ = x.shape
    parts = ts.reshape(x @ w, (B, T, 2, 3, 64))
    return [ts.swapaxes(parts[:, :, :, i], 1, 2) for i in range(3)]


def rotated_heads(x: Any, w: Any, g: Any) -> Any:
    """Values stay where they are, and with them the memory of all three."""
    def rotated(w: Any) -> Any:
        q, k, v = heads_of(x, w)
        return ts.attention(ts.rotary_embedding(q), ts.rotary_embedding(k), v, causal=True)

    y, back = ts.vjp(rotated, w)
    return y, back(g)


def rotated_and_read(x: Any, w: Any, g: Any) -> Any:
    """Queries as they were are read behind the rotation, keys are not."""
    q, k, v = heads_of(x, w)
    y = ts.attention(ts.rotary_embedding(q), ts.rotary_embedding(k), v, causal=True)
    return y, ts.attention(q, y, v) + g


def in_place(made: CudaProgram) -> list[bool]:
    """Of each rotation of an activation by itself, whether it lies in the matmul's result."""
    whole = next(s.writes[0].name for s in made.plan.groups if s.kind == "gemm")
    loops = [s for s in made.plan.groups if s.kind == "loop" and len(s.writes) == 2
             and any(made.base(o.name) == whole for o in s.reads)]
    return [all(made.base(o.name) == whole for o in s.writes) for s in loops]


def heads_given(rng: np.random.Generator) -> list[ts.Tensor]:
    return [normal(rng, *shape, dtype="bf16")
            for shape in ((2, 256, 128), (128, 384), (2, 2, 256, 64))]


@pytest.mark.parametrize("fn, want", [(rotated_heads, [True, True]),
                                      (rotated_and_read, [False, True])])
def test_parts_that_nothing_else_reads_are_written_over(fn: Callable, want: list,
                                                        rng: np.random.Generator) -> None:
    xs = heads_given(rng)
    made = lowered(fn, *xs)
    assert in_place(made) == want
    for got, right in zip(made.run([x.array for x in xs]), ts.jit(fn)(*xs), strict=True):
        assert_close(got, np.asarray(right.array, np.float64), "bf16", n=512)


def test_the_proof_refuses_a_part_that_is_read_later(monkeypatch: pytest.MonkeyPatch,
                                                     rng: np.random.Generator) -> None:
    monkeypatch.setattr(part_overwrites, "are_disjoint", lambda a, b: True)
    with pytest.raises(GraphError, match="writes over what .* reads"):
        lowered(rotated_and_read, *heads_given(rng))


def test_the_proof_refuses_a_loop_that_writes_elsewhere(monkeypatch: pytest.MonkeyPatch,
                                                        rng: np.random.Generator) -> None:
    """Than where it reads."""
    found = part_overwrites.find_part_overwrites

    def shifted(*args: Any) -> dict:
        places = found(*args)
        half = min(places, key=lambda v: (prod(v.aval.shape), places[v][1].offset))
        owner, lies = places[half]
        return places | {half: (owner, replace(lies, offset=lies.offset + 8))}

    monkeypatch.setattr(place_views, "find_part_overwrites", shifted)
    with pytest.raises(GraphError, match="cannot write its result over a part"):
        lowered(rotated_heads, *heads_given(rng))


def test_a_result_over_numbers_of_another_type(rng):
    """Packed bits become floats where they lie, while another part of them is still read."""
    def halves(q, w):
        h = (q @ q) & 15
        scaled = ts.tanh(ts.cast(h[:32], "f32")) * 0.5
        return scaled @ w + ts.cast(h[32:], "f32") @ w

    q, w = ts.tensor(rng.integers(0, 5, (64, 64)).astype(np.int32)), normal(rng, 64, 8)
    made = lowered(halves, q, w)
    types = {b.name: b.type for b in made.plan.buffers}
    assert any(b.of and types[b.of] != b.type for b in made.plan.buffers)
    np.testing.assert_allclose(made.run([q.array, w.array])[0], halves(q, w).numpy(), rtol=1e-5,
                               atol=1e-4)


def test_nothing_is_written_over_what_is_broadcast(monkeypatch, rng):
    """Numbers of columns are read as a view in which each stands in all rows."""
    monkeypatch.setattr(column_passes, "SMALL", 64)

    def slope(x, w, c):
        def normed(x):
            d = x - ts.mean(x, axis=0, keepdims=True)
            q = ts.mean(d * d, axis=0, keepdims=True)
            return d / ts.sqrt(q * q + 1.0)
        return ts.grad(lambda x: ts.sum(ts.cast(normed(x) @ w, "f32") * c))(x)

    x, w = normal(rng, 100, 64, dtype="bf16"), normal(rng, 64, 48, dtype="bf16")
    c = normal(rng, 100, 48)
    program = CudaProgram(ts.jit(slope).graph(x, w, c), "sm_90a")
    (got,), want = program.run([x.array, w.array, c.array]), ts.jit(slope)(x, w, c)
    assert_close(got, np.asarray(ts.cast(want, "f64").array), "bf16", n=512)
