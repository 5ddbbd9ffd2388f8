"""What a data parallel step takes beside the same step on one GPU, and where: kernel by kernel.

    mpirun -n 4 python benchmarks/mesh_profile.py --layers 24 --d 1024 --heads 16

Three programs on each rank, of the model of mesh_step.py: the step of one GPU, on all of them at
once; that of the mesh with nothing sent, so that no rank waits for another; that of the mesh. First
their times, in turn: of steps in a row, and of one GPU while the others rest. Then a step of each
as CUPTI sees it, by PyTorch's profiler, on rank 0: kernels by name, what lies between them, and
what those that run beside NCCL lose.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import record
import torch
from gpt2_step import sized
from mesh_step import OurStep, meet

import tessera as ts
from tessera.mesh.ranks.communicator import Communicator
from tessera.runtime.device import device

STEPS, PROFILED = 10, 4
Event = dict[str, Any]


def row_ms(made: OurStep) -> float:
    """Of a step in a row of them."""
    made.step().item()
    begin = time.perf_counter()
    for _ in range(STEPS):
        value = made.step()
    value.item()
    return 1e3 * (time.perf_counter() - begin) / STEPS


def of_all_ranks(ms: float) -> list[float]:
    return [round(float(x), 2) for x in
            ts.dist.all_gather(ts.tensor(np.array([ms], np.float32))).numpy()]


@contextmanager
def nothing_sent(step: OurStep, rank: int) -> Iterator[None]:
    """The program is recorded anew without its collectives, and behind the block with them."""
    graphs = step.run._last.program.local(rank)._made_graphs
    graphs.forget()
    with mock.patch.object(Communicator, "all_reduce", lambda *given: None):
        yield
    graphs.forget()


# --- profiles -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class StepProfile:
    """One step: its kernels in order, and those of NCCL."""

    kernels: Sequence[Event]
    sent: Sequence[Event]

    @property
    def figures(self) -> dict[str, float]:
        events = sorted((*self.kernels, *self.sent), key=lambda e: e["ts"])
        end = max(e["ts"] + e["dur"] for e in events)
        return {"span_ms": round((end - events[0]["ts"]) / 1e3, 2),
                "kernels": len(self.kernels), "kernels_ms": _ms(self.kernels),
                "between_ms": round(_between(self.kernels) / 1e3, 2),
                "nccl": len(self.sent), "nccl_ms": _ms(self.sent),
                "behind_the_last_kernel_ms": round(
                    (end - max(e["ts"] + e["dur"] for e in self.kernels)) / 1e3, 2)}

    def by_name(self) -> dict[str, list[float]]:
        found = defaultdict[str, list[float]](list)
        for e in self.kernels:
            found[e["name"]].append(e["dur"])
        return found

    def beside_nccl(self, e: Event) -> bool:
        return any(s["ts"] < e["ts"] + e["dur"] and e["ts"] < s["ts"] + s["dur"]
                   for s in self.sent)


def _ms(events: Sequence[Event]) -> float:
    return round(sum(e["dur"] for e in events) / 1e3, 2)


def _between(kernels: Sequence[Event]) -> float:
    """Microseconds in which none of them runs."""
    found, end = 0.0, kernels[0]["ts"]
    for e in kernels:
        found += max(e["ts"] - end, 0.0)
        end = max(end, e["ts"] + e["dur"])
    return found


def profile(step: Callable[[], ts.Tensor]) -> StepProfile:
    """The last of some steps but one, so that others stand around it."""
    step().item()
    meet()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            value = step()
        value.item()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        found = json.loads(path.read_text())["traceEvents"]
    events = sorted((e for e in found if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")),
                    key=lambda e: e["ts"])
    return one_of(events[:-1])  # the loss that is read stands behind the last step


def one_of(events: Sequence[Event]) -> StepProfile:
    """The last of some steps but one. What was under way when they began stands in front."""
    kernels = [e for e in events if not e["name"].startswith("nccl")]
    names = [e["name"] for e in kernels]
    each = next(n for n in range(len(names) // (PROFILED + 1), len(names) // 2 + 1)
                if names[-n:] == names[-2 * n:-n])
    begin, end = kernels[-2 * each]["ts"], kernels[-each]["ts"]
    return StepProfile(kernels[-2 * each:-each], [
        e for e in events if e["name"].startswith("nccl") and begin <= e["ts"] < end])


def table(made: dict[str, StepProfile]) -> list[dict[str, Any]]:
    """Milliseconds and launches of each kernel in each program."""
    by = {name: p.by_name() for name, p in made.items()}
    names = dict.fromkeys(n for found in by.values() for n in found)
    rows = [{"kernel": n[:60]} | {name: [round(sum(found[n]) / 1e3, 3), len(found[n])]
                                  for name, found in by.items()} for n in names]
    return sorted(rows, key=lambda r: -r["mesh"][0])


def lost(alone: StepProfile, mesh: StepProfile) -> dict[str, Any]:
    """What kernels of the mesh take more than the same with nothing sent: beside NCCL, and not."""
    pairs = list(zip(alone.kernels, mesh.kernels, strict=True))
    assert all(a["name"] == b["name"] for a, b in pairs)
    found: dict[bool, dict[str, float]] = {True: defaultdict(float), False: defaultdict(float)}
    for a, b in pairs:
        found[mesh.beside_nccl(b)][b["name"][:60]] += (b["dur"] - a["dur"]) / 1e3
    return {name: {"ms": round(sum(found[k].values()), 2), "most": {
        n: round(ms, 2) for n, ms in sorted(found[k].items(), key=lambda x: -x[1])[:6]}}
        for name, k in (("beside NCCL", True), ("elsewhere", False))}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--rounds", type=int, default=3)
    a, model = sized(flags, B=16)
    rank, ranks = ts.dist.rank(), ts.dist.world_size()
    torch.cuda.set_device(rank)
    if rank:
        meet()
    alone = OurStep(None, model)
    row_ms(alone)
    if not rank:
        meet()
    mesh = ts.dist.mesh([f"cuda:{r}" for r in range(ranks)], axes="dp")
    both = OurStep(mesh, model.sized(B=ranks * a.B))
    row_ms(both)
    times = defaultdict[str, list[Any]](list)
    for _ in range(a.rounds):
        meet()
        one = row_ms(alone) if rank == 0 else 0.0
        times["one GPU, the others rest"].append(of_all_ranks(one)[0])
        meet()
        times["one GPU, all at once"].append(of_all_ranks(row_ms(alone)))
        with nothing_sent(both, rank):
            meet()
            times["mesh, nothing sent"].append(of_all_ranks(row_ms(both)))
        meet()
        times["mesh"].append(of_all_ranks(row_ms(both)))
    made = {"one GPU": profile(alone.step)}
    with nothing_sent(both, rank):
        made["nothing sent"] = profile(both.step)
    made["mesh"] = profile(both.step)
    if rank == 0:
        record.write("mesh_profile", {
            "device": f"{ranks} x {device().name}", "model": model.figures(), "ranks": ranks,
            "ms": times, "steps": {name: p.figures for name, p in made.items()},
            "lost": lost(made["nothing sent"], made["mesh"]), "kernels": table(made)})


if __name__ == "__main__":
    main()
