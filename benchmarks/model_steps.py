"""Training steps of models as users write them, in turn with torch.compile.

    python benchmarks/model_steps.py [names]
    python benchmarks/model_steps.py --launches [names]

Each model of `step_models.py`, `vision_models.py`, `sequence_models.py` and `training_models.py`
is made ready in a process of its own, all side by side; then one is timed after the other. A step
is a loss, its gradient and AdamW: `ts.jit` with donated parameters, and `torch.compile` of the
loss, nothing set, with the fused AdamW. Printed are milliseconds of a call of both (medians of
rounds in turn), of the kernels alone, launches, both first losses, and the longest launches of
ours. Needs torch and a GPU.

--launches needs neither: the steps are compiled for an H100 or H200, and their launches printed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import numpy as np  # noqa: E402
import sequence_models  # noqa: E402
import step_models  # noqa: E402
import training_models  # noqa: E402
import vision_models  # noqa: E402
from step_models import Model  # noqa: E402

import tessera as ts  # noqa: E402

MODELS = (step_models.MODELS | vision_models.MODELS | sequence_models.MODELS
          | training_models.MODELS)
LR = 1e-4
ROUNDS, CALLS = 4, 10


def our_step(m: Model) -> tuple[Callable[..., Any], ts.optim.AdamW]:
    """(params, state, *data) -> params, state, loss."""
    opt, ours = ts.optim.AdamW(b1=0.9, b2=0.95, weight_decay=0.1), m.ours

    @ts.jit(donate=("p", "s"))
    def step(p: Any, s: Any, *data: Any) -> Any:
        loss, g = ts.value_and_grad(ours, argnums=0)(p, *data)
        p, s = opt.update(p, g, s, LR)
        return p, s, loss

    return step, opt


def our_call(m: Model) -> Callable[[], Any]:
    """What makes a step and returns its loss."""
    data = [ts.tensor(d).to("cuda") for d in m.data]
    if not m.params:
        ours = m.ours
        run = ts.jit(lambda *data: ours({}, *data))
        return lambda: run(*data)[0]
    step, opt = our_step(m)
    with ts.device("cuda"):
        p = {k: ts.param(v, "f64" if v.dtype == np.float64 else "f32")
             for k, v in m.params.items()}
        state: list[Any] = [p, opt.init(p)]

    def call() -> Any:
        state[0], state[1], loss = step(state[0], state[1], *data)
        return loss

    return call


def their_call(m: Model) -> Callable[[], Any]:
    import torch

    data = [torch.tensor(d, device="cuda") for d in m.data]
    loss = torch.compile(m.theirs)
    if not m.params:
        return lambda: loss({}, *data)[0]
    p = {k: torch.nn.Parameter(torch.tensor(v, device="cuda")) for k, v in m.params.items()}
    opt = torch.optim.AdamW(p.values(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def call() -> Any:
        opt.zero_grad(set_to_none=True)
        found = loss(p, *data)
        found.backward()
        opt.step()
        return found.detach()

    return call


def times(call: Callable[[], Any]) -> list[float]:
    """Milliseconds of a call, for each round."""
    import torch

    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / CALLS * 1e3)
    return found


def kernel_time(call: Callable[[], Any]) -> tuple[float, int]:
    """Milliseconds of torch's kernels, and their number."""
    import torch

    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as p:
        call()
        torch.cuda.synchronize()
    rows = [r for r in p.key_averages() if r.self_device_time_total]
    return sum(r.self_device_time_total for r in rows) / 1e3, sum(r.count for r in rows)


def timed(name: str, ours: Callable[[], Any], theirs: Callable[[], Any]) -> str:
    for call in (ours, theirs) * 3:
        call()
    a, b = list[float](), list[float]()
    for _ in range(2):
        a += times(ours)
        b += times(theirs)
    for _ in range(2):  # kernels are loaded between those of the first call
        with ts.debug.profile() as p:
            ours()
    launches, (kernels, count) = p.launches, kernel_time(theirs)
    us, them = np.median(a), np.median(b)
    lines = [f"{name}: {us:.3f} ms, torch.compile {them:.3f}, ratio {them / us:.2f}; kernels "
             f"{launches.us / 1e3:.3f} in {len(launches.records)} launches, {kernels:.3f} in "
             f"{count}"]
    for row in launches.by_launch()[:4]:
        lines.append(f"    {row.us:9.1f} us  {len(row.launches):3}  {row.name[:170]}")
    return "\n".join(lines)


def made_ready(name: str, end: Connection) -> None:
    """A process: compiles, says so, waits, measures, says what."""
    try:
        start = time.time()
        m = MODELS[name]()
        ours, theirs = our_call(m), their_call(m)
        a = float(ours())
        between = time.time()
        b = float(theirs())
        bad = "" if abs(a - b) <= m.tolerance * max(1.0, abs(b)) else "  LOSSES DIFFER"
        end.send(f"{name} ready: {between - start:.1f} s, torch.compile {time.time() - between:.1f}"
                 f"; first losses {a:.5f} {b:.5f}{bad}")
        end.recv()
        end.send(timed(name, ours, theirs))
    except Exception:
        end.send(f"{name} failed\n{traceback.format_exc()}")


def answer(name: str, end: Connection) -> str:
    try:
        return end.recv()
    except EOFError:
        return f"{name}: its process died"


def measure(names: list[str], patience_s: float) -> None:
    spawn = multiprocessing.get_context("spawn")
    ends, children = {}, {}
    for name in names:
        ends[name], there = spawn.Pipe()
        children[name] = spawn.Process(target=made_ready, args=(name, there), daemon=True)
        children[name].start()
    limit = time.time() + patience_s
    for name in names:
        said = ends[name].poll(max(0.0, limit - time.time()))
        text = answer(name, ends[name]) if said else f"{name} is not ready"
        print(text, flush=True)
        if " ready: " not in text:  # one that still compiles would run kernels beside the timed
            children[name].kill()
            del ends[name]
    for name, end in ends.items():
        end.send("go")
        print(answer(name, end) if end.poll(60) else f"{name}: no answer", flush=True)
    for child in children.values():
        child.kill()


def program_of(m: Model) -> Any:
    """The step lowered for an H100 or H200; compiles its kernels."""
    from tessera.graph.cuda.program.compile_ahead import wanted_ahead
    from tessera.graph.cuda.program.run import CudaProgram
    from tessera.kernels.cards import known_cards, planning_for
    from tessera.runtime.target import parse_target
    from tessera.tile.launch.compile_images import compile_images
    from tessera.tile.launch.machine_code import compiling_for

    target = parse_target("sm_90a")
    data = [ts.tensor(d) for d in m.data]
    if m.params:
        step, opt = our_step(m)
        p = {k: ts.param(v, "f64" if v.dtype == np.float64 else "f32")
             for k, v in m.params.items()}
        traced = step.traced(p, opt.init(p), *data)
    else:
        ours = m.ours
        traced = ts.jit(lambda *data: ours({}, *data)).traced(*data)
    card = next(c for c in known_cards(target) if c.tuned is not None)
    with compiling_for(target), planning_for(card):
        program = CudaProgram(traced.graph, target, traced.donated, on_host=())
        compile_images(list(wanted_ahead(program)))
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *MODELS])
    parser.add_argument("--launches", action="store_true")
    parser.add_argument("--patience", type=float, default=300, help="seconds to wait for models")
    given = parser.parse_args()
    names = given.names or list(MODELS)
    if not given.launches:
        return measure(names, given.patience)
    from tessera.graph.cuda.launch_plan import plan_of
    from tessera.tile.tuning.gpus import gpu

    for name in names:
        start = time.time()
        program = program_of(MODELS[name]())
        plan = plan_of(program)
        print(f"{name}: compiled in {time.time() - start:.1f} s", *plan.summary(), sep="\n    ")
        on = gpu(plan.target)
        for x in plan.launches:
            print(f"    {x.work.least_us(on):8.1f} us  {x.form:8} {x.work.part:8} {x.group} "
                  f"{x.work.name[:60]}  {x.work.shapes[:150]}  {str(x.where)[-60:]}", flush=True)


if __name__ == "__main__":
    main()
