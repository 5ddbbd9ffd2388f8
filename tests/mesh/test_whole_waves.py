"""Matmuls of one wave of blocks wait until a message is over, and what needs them waits too."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

import pytest

import tessera as ts
from fake_driver import driver as driver
from fake_gpu import gpu as gpu
from fake_nccl import nccl as nccl
from lowering_cases import apart as apart
from mesh.test_gpu_overlap import layers
from mesh.test_gpu_programs import DEVICES, SPLIT, on_ranks, placed, values
from mesh.test_gpu_programs import gpus as gpus
from tessera.graph.cuda import lower
from tessera.graph.cuda.passes import whole_waves
from tessera.graph.cuda.program.run import CudaProgram
from tessera.mesh.sharding import partitioned_steps, sharded_graph
from tessera.mesh.sharding.localize import localize
from tolerance import assert_close

BF16 = "bf16 @accum(f32)"


def there(shape: tuple[int, ...], how: str) -> Any:
    mesh = ts.dist.mesh(DEVICES[:2], axes="x")
    return ts.dist.stand_ins(ts.Tensor[(*shape, ts.as_type(BF16))], lambda *_: SPLIT[how], mesh)


def blocks_of(f: Any, *args: Any) -> str:
    """The matmuls of a rank's program and its messages, s: w is one wave of a chip, m are more."""
    plan = CudaProgram(localize(f.traced(*args).program.made, 0), "sm_90a").plan
    return "".join("s" if s.kind == "exchange" else "w" if prod(s.grid) <= 132 else "m"
                   for s in plan.steps if s.kind in ("gemm", "exchange"))


def test_gradients_of_weights_wait_until_a_message_is_over(monkeypatch):
    """They are 128 blocks each, three to a bucket; what they are made of has more. NCCL's four
    blocks leave so many, and nothing waits."""
    monkeypatch.setattr(partitioned_steps, "GPU_BUCKET_BYTES", 20 << 20)
    args = ([there((1024, 4096), "whole"), there((4096, 1024), "whole")] * 4,
            there((1 << 15, 1024), "rows"))
    assert blocks_of(ts.jit(ts.grad(layers, argnums=0)), *args).lstrip("m") == "wmmwswmmwswmmwswmws"
    monkeypatch.setattr(sharded_graph, "send_by_few", lambda steps, mesh: list(steps))
    assert blocks_of(ts.jit(ts.grad(layers, argnums=0)), *args).lstrip("m") == "wmmwsmwmwsmwmwsmwws"
    monkeypatch.setattr(lower, "keep_waves_whole", lambda groups, *_: list(groups))
    assert blocks_of(ts.jit(ts.grad(layers, argnums=0)), *args).lstrip("m") == "wmmwswmmwswmmwswmws"


@pytest.fixture
def ordered(monkeypatch):
    """The order of groups, each given as name, kind, what it reads, and the flops of a message or
    of what runs beside it. A kind in capitals is a matmul of one wave."""
    monkeypatch.setattr(whole_waves, "FLOPS_PER_BYTE", 1.0)
    monkeypatch.setattr(whole_waves, "one_wave", lambda group, *_: group.wave)
    monkeypatch.setattr(whole_waves, "_flops", lambda group: group.flops)
    monkeypatch.setattr(whole_waves, "_bytes", lambda group: group.flops)
    monkeypatch.setattr(whole_waves, "_communication_blocks", lambda group: 24)

    def order(*given: tuple[str, str, str, float], batch: str = "") -> str:
        names = [name for name, *_ in given]
        before = [{names.index(r) for r in reads} for _, _, reads, _ in given]
        monkeypatch.setattr(whole_waves, "group_order", lambda *_: SimpleNamespace(before=before))
        groups = [SimpleNamespace(name=name, kind=kind.lower(), wave=kind.isupper(), anchor=kind,
                                  flops=flops, batch=0 if name in batch else None)
                  for name, kind, _, flops in given]
        return "".join(g.name for g in whole_waves.keep_waves_whole(groups, None, 132, 0))

    return order


def test_what_needs_one_that_waits_waits_behind_it(ordered):
    assert ordered(("s", "exchange", "", 5), ("a", "GEMM", "", 1), ("b", "loop", "a", 1),
                   ("c", "gemm", "", 2), ("d", "gemm", "c", 4), ("e", "gemm", "d", 1)) == "scdabe"


def test_those_of_a_launch_stay_together(ordered):
    assert ordered(("s", "exchange", "", 5), ("a", "GEMM", "", 1), ("b", "loop", "a", 1),
                   ("c", "loop", "", 1), ("d", "gemm", "", 4), batch="bc") == "sdabc"


def test_nothing_waits_behind_who_waits_for_the_message(ordered):
    """d reads what a view of it says, and would begin later."""
    assert ordered(("s", "exchange", "", 9), ("a", "GEMM", "", 1), ("v", "view", "s", 0),
                   ("c", "gemm", "", 1), ("d", "gemm", "v", 1), ("e", "GEMM", "", 1)) == "svcade"


def test_a_message_of_what_waits_is_sent_when_it_comes(ordered):
    assert ordered(("s", "exchange", "", 9), ("a", "GEMM", "", 1), ("c", "gemm", "", 1),
                   ("t", "exchange", "as", 1), ("d", "gemm", "", 1)) == "scatd"


@pytest.mark.parametrize("late", ["", "collectives"])
def test_values_are_right_and_messages_keep_their_order(gpus, nccl, rng, monkeypatch, late):
    """Two gradients to a bucket; each waits as long as it may."""
    X, *W = values(rng, (6, 8), *[(8, 8)] * 6)
    monkeypatch.setattr(partitioned_steps, "GPU_BUCKET_BYTES", 2 * 8 * 8 * 4)

    def update(ws: Any, x: Any) -> Any:
        return [w - 0.1 * g for w, g in zip(ws, ts.grad(layers, argnums=0)(ws, x), strict=True)]

    want = ts.jit(update)([ts.tensor(w) for w in W], ts.tensor(X))

    def program(mesh):
        gpus.driver.late = late
        f = ts.jit(update)
        ws, x = [placed(mesh, w, "whole") for w in W], placed(mesh, X, "rows")
        made = [[w.numpy() for w in f(ws, x)] for _ in range(3)]
        plan = f._last.program.local(ts.dist.rank()).program.plan
        return made, [(s.kind, s.writes[0].name) for s in plan.steps]

    (_, usual), _ = on_ranks(2, program)
    monkeypatch.setattr(whole_waves, "one_wave", lambda group, *_: group.space == (8, 8))
    monkeypatch.setattr(whole_waves, "FLOPS_PER_BYTE", 1e9)
    for made, order in on_ranks(2, program):
        assert order != usual and sorted(order) == sorted(usual)
        assert [s for s in order if s[0] == "exchange"] == [s for s in usual if s[0] == "exchange"]
        for found in made:
            for a, b in zip(found, want, strict=True):
                assert_close(a, b.numpy(), "f32", 48)
