"""Steps of the benchmarks' mesh programs, planned with stand-ins: nothing is computed.

    planned_steps_table()      a row for each kind of collective: docs/internals/planned_steps.md
    differences(page)          what is planned otherwise than the page says, program by program

What decides collectives is seen on a GPU by its time alone, so the plans are recorded.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

import tessera as ts
from guide_library_tables import markdown
from tessera.bench.catalogue import MODELS
from tessera.bench.models import llama
from tessera.bench.models.record import StepModel
from tessera.bench.models.step import OPTIMIZER, training_step
from tessera.graph import tree
from tessera.mesh.layout import replicated
from tessera.mesh.parallel.forward_backward import Halves
from tessera.mesh.parallel.matching_layouts import split_over
from tessera.planning.planner import Planned, PlannedCollectives

S = ts.ShardSpec
WHOLE = S(replicate=True)
RANKS, FABRIC = 4, "8xh200"
HEAD = ("Program", "Collective", "Over", "Times", "MB", "ms", "Step, ms")
STEPS: dict[str, Callable[[], list[Planned]]] = {}


def step(name: str) -> Callable:
    """Registers what plans a program: one plan, or those of the parts that a step runs."""
    def register(plan: Callable[[], Planned | list[Planned]]) -> Callable:
        def plans() -> list[Planned]:
            made = plan()
            return made if isinstance(made, list) else [made]

        assert name not in STEPS
        STEPS[name] = plans
        return plan

    return register


@functools.cache
def benchmark(name: str) -> ModuleType:
    """A program of benchmarks/, which imports its neighbours by their names."""
    folder = str(Path(__file__).resolve().parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


def gpus(**axes: int) -> ts.dist.Mesh:
    count = functools.reduce(int.__mul__, axes.values())
    return ts.dist.mesh([f"cuda:{r}" for r in range(count)], tuple(axes), tuple(axes.values()),
                        topology=FABRIC)


# --- training steps -------------------------------------------------------------------------------
def stand_ins(model: StepModel, mesh: ts.dist.Mesh, layout: Callable[[str, tuple], Any]) -> Any:
    """The parameters of a model; layout(name, shape) of each."""
    def of(shapes: Any, name: str = "") -> Any:
        if isinstance(shapes, dict):
            return {k: of(s, k) for k, s in shapes.items()}
        if isinstance(shapes, list):
            return [of(s) for s in shapes]
        return ts.dist.stand_in(shapes, layout(name, shapes), mesh)

    return of(model.family.shapes(model))


def part_of(x: Any, mesh: ts.dist.Mesh) -> Any:
    """A state of the optimizer as ts.dist.zero and ts.dist.fsdp have it lie."""
    return ts.dist.stand_in(x.shape, split_over(x.layout.unmarked(), x.shape, "dp"), mesh)


def planned(model: StepModel, mesh: ts.dist.Mesh, layout: Callable[[str, tuple], Any], rows: Any,
            optimizer: Any = OPTIMIZER, parts: bool = False) -> Planned:
    """A training step with windows that lie as `rows`; parts: the states are split over dp."""
    params = stand_ins(model, mesh, layout)
    leaves, structure = tree.flatten(params)
    flat = dict(zip(tree.paths(structure), leaves, strict=True))
    held = {k: part_of(x, mesh) for k, x in flat.items()} if parts else flat
    state = {"step": ts.dist.stand_in((), WHOLE, mesh, "i64"), "m": dict(held), "v": dict(held),
             "master": {}}
    windows = [ts.dist.stand_in((model.B, model.T), rows, mesh, "i32") for _ in range(2)]
    run = training_step(model, optimizer, donate=("params", "state"))
    return ts.dist.plan_report(run, params, state, *windows)


def gpt2(**extents: int) -> StepModel:
    """GPT-2 350M of two layers."""
    return MODELS["gpt2-350m"].sized(layers=2, **extents)


def data_parallel(optimizer: Any = OPTIMIZER, fsdp: bool = False) -> Planned:
    mesh = gpus(dp=RANKS)

    def layout(name: str, shape: tuple) -> Any:
        part = split_over(replicated(mesh, len(shape)), shape, "dp")
        return replace(part, regather=("dp",)) if fsdp else WHOLE

    return planned(gpt2(B=16 * RANKS), mesh, layout, S(("row",), ("dp",)), optimizer,
                   fsdp or optimizer is not OPTIMIZER)


@step("mesh_step.py")
def _() -> Planned:
    return data_parallel()


@step("mesh_step.py --fsdp")
def _() -> Planned:
    return data_parallel(fsdp=True)


@step("mesh_step.py --zero 1")
def _() -> Planned:
    return data_parallel(ts.dist.zero(OPTIMIZER, 1, "dp"))


@step("mesh_step.py --zero 2")
def _() -> Planned:
    return data_parallel(ts.dist.zero(OPTIMIZER, 2, "dp"))


@step("mesh_step.py, ZeRO 3")
def _() -> Planned:
    return data_parallel(ts.dist.zero(OPTIMIZER, 3, "dp"), fsdp=True)


def split_matrices(axis: str) -> Callable[[str, tuple], Any]:
    """Of GPT-2's layers, as host_time.py splits them."""
    how = {n: S((k,), (axis,)) for k, names in benchmark("host_time").TP_SPLITS.items()
           for n in names}
    return lambda name, shape: how.get(name, WHOLE)


@step("host_time.py --mesh tp")
def _() -> Planned:
    sized = benchmark("host_time").sized_for("tp", gpt2())
    return planned(sized, gpus(dp=RANKS), split_matrices("dp"), WHOLE)


@step("host_time.py --mesh tp, dp x tp")
def _() -> Planned:
    sized = benchmark("host_time").sized_for("tp", gpt2()).sized(B=32)
    return planned(sized, gpus(dp=2, tp=2), split_matrices("tp"), S(("row",), ("dp",)))


def decoder(layers: int, between: Any, rows: Any = WHOLE, **axes: int) -> Planned:
    """Of tp_step.py. between: how [B, T, d] lies between matmuls; None: as it comes."""
    program = benchmark("tp_step")
    model = MODELS["llama"].sized(**program.EXTENTS | {"layers": layers})
    if between is not None:
        loss = functools.partial(program.split_loss, part=between)
        model = replace(model, family=replace(model.family, loss=loss))
    return planned(model, gpus(**axes), lambda name, shape: program.SPLIT.get(name), rows)


@step("tp_step.py")
def _() -> Planned:
    return decoder(4, S((1,), ("tp",)), tp=RANKS)


@step("tp_step.py --whole, 2 layers")
def _() -> Planned:
    return decoder(2, None, tp=RANKS)


@step("tp_step.py, dp x tp, 2 layers")
def _() -> Planned:
    return decoder(2, S((0, 1), ("dp", "tp")), S(("row",), ("dp",)), dp=2, tp=2)


# --- matmuls, experts, stages, long sequences -----------------------------------------------------
def matmul(case: str) -> Planned:
    program, mesh = benchmark("tp_matmul"), gpus(tp=RANKS)
    left, right, out = program.CASES[case]
    x = ts.dist.stand_in((8192, 8192), left, mesh, program.KIND)
    w = ts.dist.stand_in((8192, 28672), right, mesh, program.KIND)
    return ts.dist.plan_report(lambda x, w: ts.shard(x @ w, out), x, w)


@step("tp_matmul.py, all_gather")
def _() -> Planned:
    return matmul("all_gather")


@step("tp_matmul.py, reduce_scatter")
def _() -> Planned:
    return matmul("reduce_scatter")


@step("tp_matmul.py, all_reduce")
def _() -> Planned:
    return matmul("all_reduce")


def of_bf16(mesh: ts.dist.Mesh, *operands: tuple[tuple, Any]) -> list[Any]:
    return [ts.dist.stand_in(shape, spec, mesh, llama.BF16) for shape, spec in operands]


@step("8 experts, 2 of a token, dp x ep")
def _() -> Planned:
    rows, experts = S(("row",), (("dp", "ep"),)), S(("row",), ("ep",))
    given = of_bf16(gpus(dp=2, ep=2), ((16384, 2048), rows), ((2048, 8), WHOLE),
                    ((8, 2048, 8192), experts), ((8, 8192, 2048), experts))

    def loss(x: Any, router: Any, w1: Any, w2: Any) -> Any:
        y, balance = ts.moe(x, router, (w1, w2), top_k=2, data="dp", balance=True)
        return ts.mean(ts.cast(x + y, "f32") ** 2) + 0.01 * balance

    return ts.dist.plan_report(ts.grad(loss, argnums=(0, 1, 2, 3)), *given)


@step("a stage of two decoder layers, tp 2: forward, backward")
def _() -> list[Planned]:
    """The halves of a microbatch as ts.pipeline compiles them, on the ranks of the stage."""
    program, mesh = benchmark("tp_step"), gpus(tp=2)
    model = MODELS["llama"].sized(**program.EXTENTS)
    layers = stand_ins(model, mesh, lambda name, shape: program.SPLIT.get(name))["layers"][:2]
    x = ts.dist.stand_in((1, model.T, model.d), WHOLE, mesh)

    def stage(layers: Any, x: Any) -> Any:
        for w in layers:
            x = llama.layer(x, w, model)
        return x

    halves = Halves(stage, layers, x)
    given = [*tree.flatten(layers)[0], x]
    lie = halves.forward.traced(*given).program.made.results
    made = [ts.dist.stand_in(v.aval.shape, at, mesh, v.aval.type)
            for v, at in zip(halves.kept.forward.outputs, lie, strict=True)]
    back = [*(given[i] for i in halves.kept.inputs), *(made[i] for i in halves.kept.outputs), x]
    return [ts.dist.plan_report(f, *own)
            for f, own in ((halves.forward, given), (halves.backward, back))]


@step("ring attention and its gradient, sp 4")
def _() -> Planned:
    heads = S((2,), ("sp",))
    given = of_bf16(gpus(sp=RANKS), *(((1, h, 32768, 128), heads) for h in (32, 8, 8)))

    def loss(q: Any, k: Any, v: Any) -> Any:
        return ts.sum(ts.cast(ts.ring_attention(q, k, v, zigzag=True), "f32"))

    return ts.dist.plan_report(ts.grad(loss, argnums=(0, 1, 2)), *given)


# --- the table ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Row:
    """Of a program: all its collectives, and then those of a kind over some axes."""

    program: str
    op: str
    axes: str
    times: int
    mb: float
    ms: float
    step_ms: float | None = None

    def cells(self) -> tuple[str, ...]:
        whole = "" if self.step_ms is None else short(self.step_ms)
        return (self.program, self.op, self.axes, str(self.times), short(self.mb), short(self.ms),
                whole)


def short(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else "<0.001" if 0 < x < 1e-3 else f"{x:.3g}"


def rows_of(name: str, plans: list[Planned]) -> Iterator[Row]:
    found = [e for p in plans for e in p.exchanges]
    yield _row(name, "all", "", found, sum(p.step_us for p in plans) / 1e3)
    for op, axes in sorted({(e.op, e.axes) for e in found}):
        yield _row(name, op, ", ".join(axes), [e for e in found if (e.op, e.axes) == (op, axes)])


def _row(name: str, op: str, axes: str, found: list[PlannedCollectives], step: float | None = None
         ) -> Row:
    return Row(name, op, axes, sum(int(e.count) for e in found),
               sum(e.count * e.bytes for e in found) / 1e6, sum(e.total_us for e in found) / 1e3,
               step)


def table_of(plans: dict[str, list[Planned]]) -> str:
    return markdown(HEAD, [row.cells() for name, made in plans.items()
                           for row in rows_of(name, made)])


def planned_steps_table() -> str:
    return table_of({name: plan() for name, plan in STEPS.items()})


def differences(page: str, plans: dict[str, list[Planned]]) -> str:
    """Of the programs whose rows are others than the page's: the old ones behind -, the new ones
    behind +, and which lines the collectives come from that take longest. Empty where none is."""
    recorded = [line for line in page.splitlines() if line.startswith("| ")]
    said = []
    for name, made in plans.items():
        old = [line for line in recorded if line.startswith(f"| {name} |")]
        new = table_of({name: made}).splitlines()[2:]
        if old == new:
            continue
        said += [f"{name} is planned otherwise:", f"  {'|'.join(HEAD)}"]
        for a, b in zip_longest(old, new):
            said += [f"    {a}"] if a == b else [f"  {sign} {line}" for sign, line in (
                ("-", a), ("+", b)) if line is not None]
        longest = sorted((e for p in made for e in p.exchanges), key=lambda e: -e.total_us)[:6]
        said += [f"  now {int(e.count)} {e.op} over {', '.join(e.axes)}, {e.total_us / 1e3:.3g} ms:"
                 f" {e.why} ({_line(e)})" for e in longest]
    return "\n".join(said)


def _line(e: PlannedCollectives) -> str:
    return "the result" if e.where is None else str(e.where).partition("  ")[0]
