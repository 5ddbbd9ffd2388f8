"""The products of a step alone: which there are, what they compute, how long they take under load.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpu.test_bench import small
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from tessera.__main__ import main
from tessera.bench import command, measure, step_matmuls
from tessera.bench.catalogue import MODELS
from tessera.bench.report import products_text
from tessera.bench.step_matmuls import (
    MatmulMemory,
    MatmulRun,
    compile_runs,
    matmuls_of,
    measure_matmuls,
    row,
    step_program,
)
from tessera.errors import DeviceError, UnsupportedTargetError
from tessera.graph.schedule import epilogues
from tessera.numerics import decode
from tessera.runtime import energy, sustained
from tessera.runtime.device import device
from tessera.runtime.energy import EnergyMeter
from tessera.runtime.sustained import SustainedClock, SustainedLoad
from tolerance import assert_close


# --- which there are --------------------------------------------------------------------------
def test_products_are_those_of_the_model() -> None:
    """Each kind once, as often as the layers have it; a sum in parts with what adds the parts."""
    found = matmuls_of(step_program(MODELS["gpt2-350m"].sized(layers=2)))
    titles = {p.title: (p.count, p.how, len(p.launches)) for p in found}
    assert titles["nn 16384x4096x1024 + f32[4096]"] == (2, "128x256 cluster=2", 1)
    assert titles["nt 16384x50304x1024"][0] == 1
    assert titles["tn 1024x1024x16384"] == (
        2, "128x256 parts=4 cluster=2 (added by 21 ops)", 2)  # the optimizer's among them
    assert len(found) == 15 and sum(p.count for p in found) == 3 + 2 * 12
    d, tokens = 1024, 16384
    assert sum(p.count * p.flops for p in found) == pytest.approx(
        6 * tokens * (2 * 12 * d * d + 50304 * d), rel=0.01)  # and biases, elementwise


def test_products_into_the_same_sums_are_one() -> None:
    found = matmuls_of(step_program(MODELS["llama"].sized(layers=1)))
    (two, three) = [p for p in found if len(p.pairs) > 1]
    assert two.title == "ntnt 8192x2048x8192 + 8192" and len(three.pairs) == 3


# --- what they compute ------------------------------------------------------------------------
def held(memory: MatmulMemory, copy: int, o: Any) -> np.ndarray:
    """What lies in the memory of an operand, in f64."""
    codes = np.empty(o.shape, o.type.dtype.numpy)
    memory.buffers[copy][o.name].read(codes.reshape(-1))
    return np.asarray(decode(codes, o.type.dtype), np.float64)


def test_a_call_is_the_product_of_the_next_copy(gpu: Any, apart: Any, monkeypatch: Any) -> None:
    model = small("llama").sized(B=1, layers=1)
    monkeypatch.setattr(epilogues, "_brief", lambda *given: False)  # or an update is in it
    products = matmuls_of(step_program(model))
    p = next(p for p in products if p.group.attr("layout") == "tn")
    monkeypatch.setattr(step_matmuls, "CACHES", 0)
    memory = MatmulMemory(p, device())
    assert memory.copies == 1
    memory.buffers.append(MatmulMemory(p, device()).buffers[0])
    memory.copies = 2
    run = MatmulRun(p, memory, device())
    compile_runs([run], device())
    (pair,), out = p.pairs, p.launches[-1].group.writes[0]
    M, N, K = pair.extents
    a, b = held(memory, 1, pair.a), held(memory, 1, pair.b)
    run(5)
    before = held(memory, 1, out)
    run(5)
    want = a.reshape(K, M).T @ b.reshape(K, N)
    assert_close(held(memory, 1, out).reshape(M, N), want, "bf16", n=K, scale=4.0)
    assert not np.array_equal(before, held(memory, 1, out))


class OneCall:
    """A clock that calls each once."""

    def loads(self, runs: dict[str, Any], guess_us: float) -> dict[str, SustainedLoad]:
        for run in runs.values():
            run(5)
        return {name: SustainedLoad(100.0, 0.01, 500.0) for name in runs}


class Peer:
    def __init__(self, product: Any, ours: MatmulRun):
        self.calls = 0

    def __call__(self, stream: int) -> None:
        self.calls += 1

    def distance(self) -> float:
        return 1e-3

    def kernels(self) -> str:
        assert self.calls == 1  # a profiler comes last
        return "nvjet"


def test_a_row_for_each_product(gpu: Any, apart: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(step_matmuls, "CACHES", 0)
    told: list[str] = []
    model = small("gpt2-124m").sized(B=1, layers=1, vocabulary=40)
    rows = measure_matmuls(model, OneCall(), Peer, told.append)  # type: ignore[arg-type]
    assert len(rows) == len(told) == 15
    assert all(t.endswith(": ours 100.0 us, cuBLAS 100.0 us") for t in told)
    assert rows[0]["ours"] == {"us": 100.0, "spread": 0.01, "tflops": 0.0, "watts": 500, "mj": 50.0}
    assert all(r["off"] == 1e-3 and r["kernels"] == "nvjet" and r["cuBLAS"] for r in rows)
    alone = measure_matmuls(model, OneCall(), None, told.append)  # type: ignore[arg-type]
    assert all("cuBLAS" not in r and "off" not in r for r in alone)


def test_rows_and_their_text() -> None:
    p = SimpleNamespace(title="nn 4x4x4", how="128x256", count=24, flops=2e11)
    made = row(p, {"ours": SustainedLoad(200.0, 0.0, 700.0),
                   "cuBLAS": SustainedLoad(190.0, 0.0, None)})
    assert made["ours"]["tflops"] == 1000.0 and made["ours"]["mj"] == 140.0
    assert "watts" not in made["cuBLAS"]
    lines = [line.split() for line in products_text("m", [made]).splitlines()]
    assert lines[1][-5:] == ["190.0", "-", "-", "0.950", "+0.24"]
    assert lines[2] == ["all,", "ms", "a", "step", "24", "4.80", "4.56", "0.950", "+0.24"]
    alone = products_text("m", [{k: v for k, v in made.items() if k != "cuBLAS"}])
    assert "cuBLAS" not in alone and len(alone.splitlines()) == 3


# --- under load -------------------------------------------------------------------------------
class Card:
    """A driver whose graphs take a time each; its energy is 500 W while they run."""

    def __init__(self, ms: dict[str, float]):
        self.ms, self.now, self.seen = ms, 0.0, list[str]()
        self.asked, self.events = 0, {}  # type: ignore[var-annotated]

    def cuEventCreate(self, flags: int) -> tuple:
        self.events[len(self.events) + 1] = 0.0
        return 0, len(self.events)

    def cuEventRecord(self, event: int, stream: int) -> tuple:
        self.events[event] = self.now
        return (0,)

    def cuEventSynchronize(self, event: int) -> tuple:
        return (0,)

    def cuEventQuery(self, event: int) -> tuple:
        self.asked += 1
        return (0 if self.asked % 6 == 0 else 600,)

    def cuEventElapsedTime(self, begin: int, end: int) -> tuple:
        return 0, self.events[end] - self.events[begin]


@pytest.fixture
def card(driver: Any, monkeypatch: Any) -> Card:
    made = Card({"slow": 20.0, "quick": 10.0})
    clock = iter(np.arange(0, 100, 0.01))

    class Graph:
        def __init__(self, name: str):
            self.name = name

        @staticmethod
        def record(on: Any, stream: int, steps: list) -> Graph:
            return Graph(steps[0]())

        def launch(self, stream: int) -> None:
            made.seen.append(self.name)
            made.now += made.ms[self.name]

    class Meter:
        def __init__(self, on: Any):
            self.count = 0.0

        def joules(self) -> float:
            self.count += 5.0
            return self.count

    monkeypatch.setattr(sustained, "driver", lambda: made)
    monkeypatch.setattr(sustained, "DeviceGraph", Graph)
    monkeypatch.setattr(sustained, "EnergyMeter", Meter)
    monkeypatch.setattr(sustained, "METERED_S", 0.01)
    monkeypatch.setattr(sustained, "time", SimpleNamespace(
        perf_counter=lambda: next(clock), sleep=lambda s: None))
    return made


def test_each_has_the_gpu_for_a_while_in_turn(card: Card) -> None:
    """What settles does not count, and the order is there and back."""
    clock = SustainedClock(device(), settle_ms=60, window_ms=100, rounds=2)
    loads = clock.loads({"slow": lambda stream: "slow", "quick": lambda stream: "quick"}, 1000.0)
    whiles = [*["slow"] * 8, *["quick"] * 16, *["quick"] * 16, *["slow"] * 8]
    assert card.seen == [*["slow"] * 2, *["quick"] * 2, *whiles]  # first each once, and once more
    assert loads["slow"].us == 20e3 / 8 and loads["quick"].us == 10e3 / 8  # 8 calls in a graph
    assert loads["slow"].watts == pytest.approx(500.0)
    assert loads["slow"].joules == pytest.approx(500 * 2.5e-3)
    assert clock.times({"quick": lambda stream: "quick"}, 1000.0) == {"quick": 1250.0}


def test_without_a_counter_there_is_no_energy(card: Card, monkeypatch: Any) -> None:
    def missing(on: Any) -> None:
        raise UnsupportedTargetError("NVML is missing: no such file")

    monkeypatch.setattr(sustained, "EnergyMeter", missing)
    clock = SustainedClock(device(), rounds=1)
    assert clock.no_energy.startswith("NVML is missing")
    (load,) = clock.loads({"slow": lambda stream: "slow"}, 1000.0).values()
    assert load.watts is None and load.joules is None and load.us == 2500.0


class Nvml:
    def __init__(self, status: int = 0):
        self.status, self.name = status, b""

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        self.name = name
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, counted: Any) -> int:
        ctypes.cast(counted, ctypes.POINTER(ctypes.c_ulonglong))[0] = 12_500
        return self.status


def test_energy_is_that_of_the_gpu_by_its_uuid(driver: Any, monkeypatch: Any) -> None:
    made = Nvml()
    monkeypatch.setattr(energy, "nvml", lambda: made)
    monkeypatch.setattr(energy, "gpu_id", lambda index: bytes(range(16)))
    assert EnergyMeter(device()).joules() == 12.5
    assert made.name == b"GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    made.status = 3
    with pytest.raises(DeviceError, match="read the energy counter: NVML answers 3"):
        EnergyMeter(device())


# --- the command ------------------------------------------------------------------------------
@pytest.fixture
def with_gpu(monkeypatch: Any) -> list:
    """A GPU by name, and processes that measure nothing: their command lines."""
    asked: list = []

    def run(argv: list[str], env: dict[str, str]) -> Any:
        asked.append(argv)
        load = {"us": 1.0, "spread": 0.0, "tflops": 1.0}
        Path(argv[argv.index("--to") + 1]).write_text(json.dumps({"products": [
            {"product": "nn 4x4x4", "how": "64x64", "count": 2, "ours": load}]}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(command, "has_gpu", lambda: True)
    monkeypatch.setattr(command, "device", lambda: SimpleNamespace(name="NVIDIA H200"))
    monkeypatch.setattr(measure, "find_spec", lambda name: object())
    monkeypatch.setattr(command, "subprocess", SimpleNamespace(run=run))
    return asked


def test_the_command_writes_a_table(with_gpu: list, tmp_path: Path, capsys: Any) -> None:
    assert main(["bench", "step", "llama", "--products", "--ours", "--out", str(tmp_path)]) == 0
    (argv,) = with_gpu
    assert argv[argv.index("--part") + 1] == "products" and "--ours" in argv
    assert json.loads((tmp_path / "products_llama.json").read_text())["products"][0]["count"] == 2
    assert "nn 4x4x4" in capsys.readouterr().out


def test_products_are_no_losses(with_gpu: list, capsys: Any) -> None:
    assert main(["bench", "step", "llama", "--products", "--losses", "2"]) == 1
    assert "--products measures matmuls alone" in capsys.readouterr().err and not with_gpu
