"""Every figure of a mesh of GPUs in one run: what is compared is compiled side by side, and then
timed one program after another, with nothing else on the GPUs.

    python benchmarks/mesh_all.py                       # on all GPUs of this host
    python benchmarks/mesh_all.py --ranks 2 --only dp ddp fsdp fsdp2

GPT-2 350M data parallel, with states and gradients split, with parameters split, DDP and FSDP2; a
decoder as Llama's tensor parallel, DTensor and async TP; then matmuls with their collectives, and
collectives alone. Each program writes its file of benchmarks/results/, one for each number of
GPUs. Printed are milliseconds of a step, weak scaling, host time, and PyTorch's time by ours.
--hold NAME: there is such a file while something is timed, so that others keep off the GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from record import mesh_file

from tessera.runtime.device import device_count

HERE = Path(__file__).parent
GPT2_350M = ("--layers", "24", "--d", "1024", "--heads", "16")


@dataclass(frozen=True)
class Program:
    """A command that waits for its start file, and the file of results that it writes."""

    command: tuple[str, ...]
    result: str


STEPS = {
    "dp": Program(("mesh_step.py", *GPT2_350M), "mesh_step"),
    "ddp": Program(("mesh_step.py", *GPT2_350M, "--torch", "ddp"), "mesh_step_ddp"),
    "zero2": Program(("mesh_step.py", *GPT2_350M, "--zero", "2", "--together"), "mesh_step_zero2"),
    "fsdp": Program(("mesh_step.py", *GPT2_350M, "--fsdp", "--together"), "mesh_step_fsdp"),
    "fsdp2": Program(("mesh_step.py", *GPT2_350M, "--torch", "fsdp2"), "mesh_step_fsdp2"),
    "tp": Program(("tp_step.py",), "tp_step"),
    "dtensor": Program(("tp_step.py", "--torch", "dtensor"), "tp_step_dtensor"),
    "async_tp": Program(("tp_step.py", "--torch", "async_tp"), "tp_step_async_tp"),
}
# What fits a GPU of 141 GB side by side: all five of GPT-2 do not.
SETS = (("dp", "ddp"), ("zero2", "fsdp", "fsdp2"), ("tp", "dtensor", "async_tp"))
ALONE = {"tp_matmul": Program(("tp_matmul.py",), "tp_matmul"),
         "collectives": Program(("collectives.py",), "collectives")}
PEERS = (("ddp", "dp"), ("ddp", "zero2"), ("fsdp2", "fsdp"), ("dtensor", "tp"), ("async_tp", "tp"))


class Running:
    """A program under mpirun, and what it printed."""

    def __init__(self, name: str, program: Program, ranks: int, folder: Path, port: int,
                 waits: bool = True):
        self.name, self.ranks, self.start = name, ranks, folder / name
        self.text = folder / f"{name}.out"
        flags = ("--start-file", str(self.start)) if waits else ()
        command = [str(shutil.which("mpirun")), "-n", str(ranks), sys.executable,
                   str(HERE / program.command[0]), *program.command[1:], *flags]
        env = {**os.environ, "MASTER_PORT": str(port), "OMPI_ALLOW_RUN_AS_ROOT": "1",
               "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_hwloc_base_binding_policy": "none"}
        self.process = subprocess.Popen(command, stdout=self.text.open("w"),
                                        stderr=subprocess.STDOUT, env=env)

    @property
    def ready(self) -> bool:
        """All its ranks wait, or it ended by a fault."""
        waiting = all(self.start.with_name(f"{self.name}.{r}").exists() for r in range(self.ranks))
        return waiting or self.process.poll() is not None

    def stop(self) -> None:
        self.process.terminate()  # mpirun ends its ranks
        self.process.wait()

    def end(self, seconds: float) -> bool:
        """Lets it begin and waits for its end: whether it ended well."""
        self.start.touch()
        try:
            ended = self.process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            self.stop()
            ended = False
        if not ended:
            print(f"{self.name} failed:\n{self.text.read_text()[-2000:]}", flush=True)
        return ended


def shown(name: str, result: Path) -> None:
    found = json.loads(result.read_text())
    steps = found.get("together", found)
    if "ms" in steps:
        print(f"{name}: {steps['ms']:.2f} ms, read {steps['read_ms']:.2f}, host "
              f"{steps['host_ms']:.3f}, first call {steps['first_call_s']:.1f} s")
    if found.get("alone"):
        print(f"  alone {found['alone']['ms']:.2f}, at once {found['at_once_ms']}, weak scaling "
              f"{found['weak_scaling']:.3f}, by the slowest at once "
              f"{found['weak_scaling_at_once']:.3f}, eager collectives "
              f"{steps['eager_collectives']}")
    sys.stdout.flush()


def run_set(names: Sequence[str], a: argparse.Namespace, folder: Path) -> None:
    begin = time.monotonic()
    running = [Running(n, STEPS[n], a.ranks, folder, a.port + list(STEPS).index(n)) for n in names]
    while not all(r.ready for r in running) and time.monotonic() - begin < a.compile_s:
        time.sleep(0.2)
    print(f"{', '.join(names)}: compiled in {time.monotonic() - begin:.0f} s", flush=True)
    late = [r for r in running if not r.ready]
    for r in late:  # it would disturb the others
        r.stop()
        print(f"{r.name} was not ready:\n{r.text.read_text()[-1000:]}", flush=True)
    held(a, True)
    for r in running:
        if r not in late and r.end(a.seconds):
            shown(r.name, mesh_file(STEPS[r.name].result, a.ranks))
    held(a, False)


def held(a: argparse.Namespace, timed: bool) -> None:
    """Others see that the GPUs are to be quiet, and get some seconds to end what they run."""
    if a.hold is None:
        return
    a.hold.touch() if timed else a.hold.unlink(missing_ok=True)
    busy = a.hold.with_name(a.hold.name + ".busy")
    begin = time.monotonic()
    while timed and busy.exists() and time.monotonic() - begin < 40:
        time.sleep(0.1)


def step_ms(result: Path) -> float:
    found = json.loads(result.read_text())
    return float(found.get("together", found)["ms"])


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--ranks", type=int, default=device_count())
    flags.add_argument("--only", nargs="*", default=[*STEPS, *ALONE])
    flags.add_argument("--compile-s", type=float, default=150)
    flags.add_argument("--seconds", type=float, default=60, help="of a program's timing")
    flags.add_argument("--port", type=int, default=29601)
    flags.add_argument("--hold", type=Path)
    a = flags.parse_args()
    before = {n: mesh_file(p.result, a.ranks) for n, p in STEPS.items()}
    old = {n: path.stat().st_mtime_ns if path.exists() else 0 for n, path in before.items()}
    sets = [[n for n in names if n in a.only] for names in SETS]
    with tempfile.TemporaryDirectory() as folder:
        for names in filter(None, sets):
            run_set(names, a, Path(folder))
        held(a, True)
        for name in (n for n in ALONE if n in a.only):
            one = Running(name, ALONE[name], a.ranks, Path(folder), a.port - 1, waits=False)
            one.end(a.seconds)
            print(f"{name}:\n{one.text.read_text()[-3000:]}", flush=True)
        held(a, False)
    new = [n for n in a.only if n in before and before[n].exists()
           and before[n].stat().st_mtime_ns != old[n]]
    for peer, ours in PEERS:
        if peer in new and ours in new:
            print(f"{peer} / {ours}: {step_ms(before[peer]) / step_ms(before[ours]):.3f}")


if __name__ == "__main__":
    main()
