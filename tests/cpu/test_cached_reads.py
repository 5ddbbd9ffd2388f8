"""What a kernel reads from the second-level cache: results are made right before their readers, and
readers begin with what was written last."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

import tessera as ts
from emulator.block import Block
from emulator.memory import GlobalMemory
from tessera import Tensor
from tessera.graph import tree
from tessera.graph.cuda import CudaProgram, lower
from tessera.graph.cuda.launch_forms import request_of
from tessera.graph.cuda.passes import cached_reads
from tessera.graph.cuda.passes.streamed_results import stream_results
from tessera.graph.schedule import epilogues, order_for_cache
from tessera.graph.schedule.ir import ScheduledGroup, Transfer
from tessera.tile.launch.machine_code import emit_request
from tolerance import assert_close

BF16 = "bf16 @accum(f32)"


def train(ws: Any, x: Any) -> Any:
    def loss(ws: Any) -> Any:
        h = x
        for w in ws:
            h = ts.gelu(ts.cast(h, BF16) @ ts.cast(w, BF16))
        return ts.mean(ts.square(ts.cast(h, "f32")))

    value, grads = ts.value_and_grad(loss)(ws)
    return value, [w - 0.1 * g for w, g in zip(ws, grads, strict=True)]


def types(layers: int = 3, rows: int = 8192, width: int = 2048) -> Any:
    return [Tensor[width, width, "f32"]] * layers, Tensor[rows, width, "bf16"]


def program(*given: Any) -> CudaProgram:
    return CudaProgram(ts.jit(train).graph(*given), "sm_90a")


def distances(made: CudaProgram) -> list[int]:
    """Of each loop that reads what a matmul wrote, how many launches before it that was."""
    plan = made.plan
    writer = {plan.base(o.name): k for k, s in enumerate(plan.steps) if s.kind == "gemm"
              for o in s.writes}
    return [min(k - writer[b] for o in s.reads if (b := plan.base(o.name)) in writer)
            for k, s in enumerate(plan.steps) if s.kind == "loop" and not s.batch
            and any(plan.base(o.name) in writer for o in s.reads)]


def turned(s: ScheduledGroup) -> bool:
    return bool(dict(s.schedule.extra).get("LAST_FIRST"))


def test_what_is_read_next_is_made_last(monkeypatch):
    """The gradient of the activation stands behind that of the weight."""
    near = distances(program(*types()))
    monkeypatch.setattr(lower, "order_for_cache", lambda groups, target: groups)
    assert sum(near) < sum(distances(program(*types())))


def test_readers_go_the_other_way_and_matmuls_never():
    plan = program(*types()).plan
    found = [k for k, s in enumerate(plan.steps) if turned(s)]
    assert len(found) >= 5
    for k in found:
        s, before = plan.steps[k], plan.steps[k - 1]
        assert s.kind in cached_reads.FREE and not s.batch and not turned(before)
        assert {plan.base(o.name) for o in s.reads} & {plan.base(o.name) for o in before.writes}
        assert cached_reads.NOTE in s.schedule.notes
    assert not any(turned(s) for s in program(*types(3, 256, 256)).plan.steps)


@pytest.fixture
def anything_counts(monkeypatch):
    for module in (cached_reads, order_for_cache):
        monkeypatch.setattr(module, "LEAST_BYTES", 1)


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_the_results_are_the_same(layers, rng, anything_counts, monkeypatch):
    """In another order of the groups, by the kernels' meaning."""
    given = ([ts.tensor(rng.standard_normal((128, 128)).astype(np.float32) / 12)
              for _ in range(layers)],
             ts.tensor(rng.standard_normal((256, 128)).astype(np.float32), "bf16"))
    leaves = [x.array for x in tree.flatten(given)[0]]
    made = program(*given)
    assert any(turned(s) for s in made.plan.steps)
    found = [y.tobytes() for y in made.run(leaves)]
    monkeypatch.setattr(lower, "order_for_cache", lambda groups, target: groups)
    monkeypatch.setattr(lower, "turn_around", lambda plan: plan)
    assert found == [y.tobytes() for y in program(*given).run(leaves)]


@pytest.mark.parametrize("fn", [ts.gelu, lambda y: ts.softmax(y, axis=-1)])
def test_a_turned_kernel_begins_with_its_last_groups(fn, rng, anything_counts, monkeypatch):
    """In emulated instructions: the block that starts first writes the end of the result."""
    monkeypatch.setattr(epilogues, "_brief", lambda *given: False)  # a launch of its own
    x, w = (ts.cast(ts.tensor(rng.standard_normal(s).astype(np.float32) / 8), "bf16")
            for s in ((256, 128), (128, 128)))
    made = CudaProgram(ts.jit(lambda x, w: fn(fn(x @ w))).graph(x, w), "sm_90a")
    step = next(s for s in made.steps if turned(s.group))
    request, groups = request_of(step, made.target), prod(step.group.grid)
    emitted = emit_request(step.shared.function(), request).emitted
    (y, got), parameters = (np.zeros((256, 128), x.array.dtype) for _ in range(2)), \
        emitted.parameters
    y[...], got[...] = x.array, np.nan
    memory = GlobalMemory(dict(zip([p.name for p in parameters if p.kind == "tensor"], (y, got),
                                   strict=True)))
    written = []
    for number in range(groups):
        block = Block(request.lanes, number, memory, emitted.shared_bytes)
        block.blocks = groups
        block.run(emitted.source, emitted.name, [block.builder.register(
            memory.pointers[p.name] if p.kind == "tensor" else groups, p.abi)
            for p in parameters])
        memory.copy_back()
        written.append(np.flatnonzero(~np.isnan(got.reshape(-1).astype(np.float32))).min())
    assert groups > 1 and written == sorted(written, reverse=True) and written[-1] == 0
    assert written[0] == got.size - got.size // groups
    want = fn(fn(x)).array.astype(np.float32)
    assert_close(got.astype(np.float32), want, "bf16", 4)


@pytest.mark.parametrize("rows, way", [(16384, "plain"), (4096, "plain"), (16384, "read again")])
def test_results_that_the_cache_cannot_hold_leave_it_first(rows, way):
    """Not those that it can, nor what a kernel behind reads."""
    def fn(x: Any) -> Any:
        y = ts.softmax(x)
        return y if way == "plain" else (y, ts.sum(y, axis=0))

    made = CudaProgram(ts.jit(fn).graph(Tensor[rows, 4096, "bf16"]), "sm_90a")
    launch = made.launches[0]
    emitted = emit_request(launch.kernel.function(), request_of(launch, made.target))
    stores = [line for line in emitted.emitted.source.splitlines() if "use(tiles.store(" in line]
    assert stores and all(("'cs'" in s) == ((rows, way) == (16384, "plain")) for s in stores)


def test_a_result_that_is_copied_to_the_host_stays_for_the_copy(monkeypatch):
    monkeypatch.setattr(lower, "stream_results", lambda plan: plan)
    plan = CudaProgram(ts.jit(ts.softmax).graph(Tensor[16384, 4096, "bf16"]), "sm_90a").plan
    copy = Transfer("x0", "offload", plan.groups[0].writes[0].name, "h0", 1 << 27)
    for more, streamed in (((), True), ((copy,), None)):
        (made,) = stream_results(replace(plan, steps=(*plan.steps, *more))).groups
        assert dict(made.schedule.extra).get("STREAMED") == streamed
