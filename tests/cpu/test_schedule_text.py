"""Schedule IR as text that reads back: the plans of lowered functions, and texts by hand."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from cpu.test_offload import WRAPS, arguments, graph_of
from lowering_cases import CASES, arrays
from tessera import Tensor, bf16, f32
from tessera.errors import GraphError
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.kernels.generate_kernels import source_of
from tessera.graph.schedule.ir import VERSION, GraphSchedule
from tessera.graph.schedule.schedule_text import callees, parse_schedule, print_schedule


def read_again(plan: GraphSchedule) -> GraphSchedule:
    text = print_schedule(plan)
    again = parse_schedule(text, callees(plan))
    assert text.startswith(f"schedule {plan.name!r} v{VERSION} target={plan.target!r}\n")
    assert again == plan and again.fates == plan.fates
    assert print_schedule(again) == text
    assert again.hash == plan.hash and str(again) == str(plan)  # lines and notes, too
    return again


@pytest.mark.parametrize("name", CASES)
def test_the_plan_of_every_case_reads_back(name, rng):
    """And decides the kernels: each is made of its group as it was read."""
    case = CASES[name]
    made = CudaProgram(ts.jit(case.fn).graph(*arrays(case, rng)))
    again = read_again(made.plan)
    groups = {g.name: g for g in again.groups}
    for launch in made.launches:
        if launch.group.kind != "launch":
            assert source_of(groups[launch.group.name]).text == launch.source.text


def test_copies_beside_kernels(rng):
    plan = CudaProgram(graph_of(WRAPS["offload"], *arguments(rng))).plan
    assert plan.transfers and any(b.kind == "host" for b in plan.buffers)
    again = read_again(plan)
    assert again.transfers == plan.transfers
    assert [str(t.where) for t in again.transfers] == [str(t.where) for t in plan.transfers]


def test_kernels_and_library_functions_are_given_to_the_reader():
    @ts.kernel
    def twice(x: Tensor["N", f32], y: Tensor["N", f32]):
        y[tile_n:tile_n + 16] = ts.tile.load(x[tile_n:tile_n + 16]) * 2.0  # noqa: F821

    def f(x):
        y = ts.zeros_like(x)
        twice(x, y)
        return ts.rfft(y)

    plan = CudaProgram(ts.jit(f).graph(Tensor[96, f32])).plan
    assert len(callees(plan)) >= 1
    again = read_again(plan)
    assert all(a is b for a, b in zip(callees(again), callees(plan), strict=True))
    with pytest.raises(GraphError, match=r"calls object 0 of the program, and the reader was given "
                                         r"0[\s\S]*kernels and libraries' functions have no text"):
        parse_schedule(print_schedule(plan))


def test_numbers_and_notes():
    """NaN, infinities, -0.0 and integers in a loop; why blocks were chosen."""
    def f(x):
        y = ts.where(x > -np.inf, x * np.nan, x / -0.0)
        return ts.where(ts.isnan(y), ts.maximum(x, np.inf), x)

    plan = CudaProgram(ts.jit(f).graph(Tensor[7, 5, f32])).plan
    args = [a for g in plan.groups for s in g.steps for a in s.args if not isinstance(a, str)]
    assert any(a != a for a in args) and np.inf in args
    read_again(plan)
    plan = CudaProgram(ts.jit(lambda x, w: x @ w).graph(Tensor[256, 128, bf16],
                                                        Tensor[128, 512, bf16])).plan
    assert plan.groups[0].schedule.notes
    assert read_again(plan).groups[0].schedule.notes == plan.groups[0].schedule.notes


GOOD = """schedule 'f' v1 target='sm_90a'
  buffer %v0: 'f32'[4, 3] {kind='input'}
  buffer %v2: 'f32'[4] {kind='result', ops=('%2',)}
  group g0 rows over (4, 3) grid (1,) {}
    schedule {m=4, n=16, warps=1, source='auto'}
    read %v0: 'f32'[4, 3] {}
    %v1: 'f32'[4, 3] = exp(%v0) {} of {ops=('%1',), flops=12.0} loc('a.py', 3, '{%x (', (), '', '')
    %v2: 'f32'[4] = reduce_sum(%v1) {axis=(1,)} of {ops=('%2',)}
    write %v2: 'f32'[4] {}
  fate '%1' 'g0'
  return %v2
"""


def test_a_text_by_hand():
    plan = parse_schedule(GOOD)
    assert print_schedule(plan) == GOOD
    (group,) = plan.groups
    assert (group.schedule.m, group.schedule.warps, group.schedule.source) == (4, 1, "auto")
    assert group.ops == ("%1", "%2") and str(group.where) == "a.py:3  {%x ("
    assert plan.buffer("v2").shape == (4,) and plan.results == ("v2",)


@pytest.mark.parametrize(("old", "new", "says"), [
    (" v1 ", " v2 ", "the schedule is of version 2, this Tessera reads up to version 1"),
    ("return %v2", "return %v3", "the function returns %v3, which is no buffer of the schedule"),
    ("read %v0", "read %v9", "g0 has %v9, which is no buffer"),
    ("{kind='input'}", "{kind='input', sort=1}", "line 2 is no Schedule IR"),
    ("{kind='input'}", "{kind='view', of='w'}", "v0 lies in %w, which is no buffer"),
    ("{axis=(1,)}", "{axis=__import__('os')}", "line 8 is no Schedule IR"),
    ("{axis=(1,)}", "{axis=1 + 1}", "line 8 is no Schedule IR"),
    ("m=4", "rows=4", r"line 5 is no Schedule IR[\s\S]*a schedule has no 'rows'"),
    ("  return %v2\n", "", "is no Schedule IR"),
    ("return %v2\n", "return %v2\nmore\n", "line 12 stands behind the end"),
    ("    read", "     read", "line 6 is no Schedule IR"),
    ("'f32'[4, 3] = exp", "'f33'[4, 3] = exp", "'f33'")])
def test_other_texts_are_refused(old, new, says):
    assert old in GOOD
    with pytest.raises(ts.TesseraError, match=says):
        parse_schedule(GOOD.replace(old, new, 1))
