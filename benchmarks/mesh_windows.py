"""Steps of GPT-2 on several GPUs that send from windows of NCCL, and from plain memory.

    mpirun -n 4 python benchmarks/mesh_windows.py --layers 24 --d 1024 --heads 16

Data parallel, and with parameters split (ts.dist.fsdp): rows of steps with each way in turn, in one
process, each from the same parameters, since matmuls draw less power on what has been trained on
one batch for long. Beside them rows of one GPU, while the others rest. Behind them what the host
takes for a step: its call, the launch of its graph in that, and of what nodes that consists.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import record
from gpt2_step import sized
from mesh_step import OurStep, meet

import tessera as ts
from tessera import config
from tessera.graph import tree
from tessera.runtime.device import device
from tessera.runtime.graphs import DeviceGraph

STEPS, WARM, HOST_STEPS = 12, 4, 12
NODES = {0: "kernel", 1: "copy", 2: "fill", 3: "host", 5: "empty", 6: "wait", 7: "event"}


class FreshStep:
    """A step whose rows begin from the same parameters."""

    def __init__(self, step: OurStep, rank: int):
        self.step, self.rank = step, rank
        self.given = [copied(x) for x in (step.params, step.state)]
        for _ in range(WARM):
            step.step().item()

    @property
    def runs(self) -> Any:
        """What its rank runs on its GPU."""
        traced = self.step.run._last
        return traced.executable if traced.layouts is None else traced.program.local(self.rank)

    def again(self) -> None:
        """From the first parameters on; graphs are recorded anew."""
        self.step.params, self.step.state = map(copied, self.given)
        graphs = self.runs._made_graphs
        graphs.forget()
        vars(graphs).pop("replayed", None)
        for _ in range(WARM):
            self.step.step().item()

    def row(self) -> tuple[float, float]:
        """Milliseconds of a step in a row of them, and the last loss."""
        begin = time.perf_counter()
        for _ in range(STEPS):
            value = self.step.step()
        loss = float(value.item())
        return 1e3 * (time.perf_counter() - begin) / STEPS, loss

    def host_us(self) -> dict[str, Any]:
        """Of a call whose loss is read before the next one, and of the launch of its graph."""
        calls, launches = list[float](), list[float]()
        launch: Callable[..., Any] = DeviceGraph.launch

        def timed(graph: DeviceGraph, stream: int) -> None:
            begin = time.perf_counter()
            launch(graph, stream)
            launches.append(time.perf_counter() - begin)

        with mock.patch.object(DeviceGraph, "launch", timed):
            for _ in range(HOST_STEPS):
                begin = time.perf_counter()
                value = self.step.step()
                calls.append(time.perf_counter() - begin)
                value.item()
        return {"call": spread(calls), "launch": spread(launches), "nodes": self.nodes()}

    def nodes(self) -> dict[str, int]:
        graph = ctypes.c_void_p(self.runs._made_graphs.graphs[-1].graph._graph)
        cuda, count, kind = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t(), ctypes.c_int()
        cuda.cuGraphGetNodes(graph, None, ctypes.byref(count))
        nodes = (ctypes.c_void_p * count.value)()
        cuda.cuGraphGetNodes(graph, nodes, ctypes.byref(count))
        found = Counter[str]()
        for node in nodes:
            cuda.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
            found[NODES.get(kind.value, str(kind.value))] += 1
        return dict(found)


def copied(state: Any) -> Any:
    return tree.map_tree(lambda x: x.copy(), state)


def spread(seconds: list[float]) -> list[float]:
    """The least and the median, in microseconds."""
    return [round(1e6 * f(seconds)) for f in (min, statistics.median)]


class Rows:
    """What was measured, by name."""

    def __init__(self, shown: bool):
        self.ms, self.losses, self.shown = defaultdict[str, list[float]](list), {}, shown

    def add(self, name: str, step: FreshStep, together: bool = True) -> None:
        step.again()
        if together:
            meet()
        ms, loss = step.row()
        self.ms[name].append(round(ms, 2))
        self.losses[name] = loss
        if self.shown:
            print(f"{name}: {self.ms[name]} ms, loss {loss:.5f}", flush=True)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--rounds", type=int, default=3)
    a, model = sized(flags, B=16)
    rank, ranks = ts.dist.rank(), ts.dist.world_size()
    mesh, rows = ts.dist.mesh([f"cuda:{r}" for r in range(ranks)], axes="dp"), Rows(rank == 0)
    lone = FreshStep(OurStep(None, model), rank) if rank == 0 else None
    host, sent = {}, {}
    for name in ("dp", "fsdp"):
        steps = {}
        for how in ("windows", "plain memory"):
            with config.scope(comm_timeout=0, comm_windows=how == "windows"):
                steps[f"{name}, {how}"] = FreshStep(
                    OurStep(mesh, model.sized(B=ranks * a.B), fsdp=name == "fsdp"), rank)
        for _ in range(a.rounds):
            if lone is not None:
                rows.add("one GPU", lone, together=False)
            meet()
            for way, step in steps.items():
                rows.add(way, step)
        for way, step in steps.items():
            step.again()
            host[way] = step.host_us()
            plan = step.step.run.plan
            sent[way] = {"bytes": plan.bytes, "in_windows": sum(c.by == "windows" for c in plan)}
        del step, steps
        gc.collect()
    if rank == 0:
        record.write("mesh_windows", {
            "device": f"{ranks} x {device().name}", "model": model.figures(), "ranks": ranks,
            "ms": rows.ms, "losses": rows.losses, "host_us": host, "sent": sent})


if __name__ == "__main__":
    main()
