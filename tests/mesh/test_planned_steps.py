"""The collectives of the benchmarks' mesh programs are those that docs/internals/planned_steps.md
records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from guide import ACCEPT, ROOT, TABLE
from mesh.planned_steps import RANKS, STEPS, differences, table_of
from tessera.graph.cuda.lower import lower
from tessera.mesh.sharding.localize import localize
from tessera.planning import functions
from tessera.runtime.target import parse_target

PAGE = ROOT / "docs" / "internals" / "planned_steps.md"


@pytest.fixture(scope="module")
def plans():
    return {name: plan() for name, plan in STEPS.items()}


def test_steps_are_planned_as_recorded(plans):
    page, table = PAGE.read_text(), table_of(plans)
    if ACCEPT:
        page = TABLE.sub(lambda m: m[1] + table + m[4], page)
        PAGE.write_text(page)
    if changed := differences(page, plans):
        pytest.fail(f"{changed}\nTESSERA_ACCEPT=1 writes {PAGE.name} anew")
    assert table in page, f"{PAGE.name} has rows of other programs, or in another order"


def test_a_plan_that_changes_is_told_row_by_row(plans):
    """A program's other rows stand beside, and other programs are not named."""
    name = "tp_step.py"
    (plan,) = plans[name]
    more = [replace(e, count=15 * e.count) if e.op == "all_gather" else e for e in plan.exchanges]
    said = differences(table_of(plans), plans | {name: [replace(plan, exchanges=tuple(more))]})
    lines = said.splitlines()
    assert lines[0] == "tp_step.py is planned otherwise:"
    assert any(line.startswith("  - | tp_step.py | all_gather | tp | 18 |") for line in lines)
    assert any(line.startswith("  + | tp_step.py | all_gather | tp | 270 |") for line in lines)
    assert any(line.startswith("    | tp_step.py | reduce_scatter | tp | 18 |") for line in lines)
    assert "now 60 all_gather over tp" in said and "tessera/bench/models/llama.py:32" in said
    assert "mesh_step" not in said


def test_every_rank_launches_what_the_first_does(monkeypatch):
    """Parts of what is repeated, such as biases beside split matrices, are read where they lie."""
    seen = []
    plan = functions._plan_global
    monkeypatch.setattr(functions, "_plan_global", lambda name, traced, *more: (
        seen.append(traced.program), plan(name, traced, *more))[1])
    STEPS["host_time.py --mesh tp"]()
    first, *others = ([getattr(step, "kind", "copy") for step in lower(
        localize(seen[0].made, rank, wide_inside=True), parse_target("sm_90a")).plan.steps]
        for rank in range(RANKS))
    assert "move" not in first and others == [first] * (RANKS - 1)
