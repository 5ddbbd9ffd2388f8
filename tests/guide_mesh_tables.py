"""Tables of documentation with figures of meshes of GPUs, made from benchmarks/results."""

from __future__ import annotations

import json
import os
from pathlib import Path

from guide_library_tables import markdown
from mesh.planned_steps import planned_steps_table

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
EXCHANGES = RESULTS / "collectives_4gpus.json"
HOST_TIMES = RESULTS / "host_time.json", RESULTS / "host_time_mesh.json"
WAYS = ("dp", "fsdp", "tp")


def exchanges_table() -> str | None:
    """Of benchmarks/collectives.py; None while nothing is measured."""
    if not EXCHANGES.exists():
        return None
    file = json.loads(EXCHANGES.read_text())
    found: dict[tuple[str, str], dict[str, dict]] = {}
    for row in file["rows"]:
        found.setdefault((row["size"], row["op"]), {})[row["call"]] = row
    rows = [(size, f"`{op}`", *(f"{call['us']:.0f} ({call['bus_gbps']:.0f})" if "KiB" not in size
                                else f"{call['us']:.0f}" for call in calls.values()),
             f"{calls['torch']['us'] / calls['ours']['us']:.2f}")
            for (size, op), calls in found.items()]
    names = {"ours": "our tensors", "ours, torch array": "ours, of torch's arrays",
             "torch": "`torch.distributed`"}
    return (f"{file['device']}, NCCL {file['nccl']}, torch {file['torch']}, {file['date']}, commit "
            f"{file['commit']}, `{file['command']}`.\n\n" + markdown(
                ("Bytes", "", *(names[n] for n in next(iter(found.values()))), "Ratio"), rows))


# Of benchmarks/mesh_step.py and tp_step.py: what is split, our file, PyTorch's and how it does it.
GPUS = 4  # of those that are shown
MESH_STEPS = (("windows", "mesh_step", "mesh_step_ddp", "DDP"),
              ("windows, parameters", "mesh_step_fsdp", "mesh_step_fsdp2", "FSDP2"),
              ("matmuls", "tp_step", "tp_step_dtensor", "DTensor"),
              ("matmuls", "tp_step", "tp_step_async_tp", "async TP"))


def mesh_steps_table() -> str | None:
    """Steps on several GPUs, in a row and with each loss read; None while none is measured."""
    rows, files = [], []
    for split, mine, theirs, way in MESH_STEPS:
        paths = [RESULTS / f"{name}_{GPUS}gpus.json" for name in (mine, theirs)]
        if not all(path.exists() for path in paths):
            continue
        ours, other = (json.loads(path.read_text()) for path in paths)
        files += [ours, other]
        together = ours.get("together", ours)
        m = ours["model"]
        both = [_times(together), _times(other)]
        rows.append((f"{m['layers']} layers of {m['d']}, {m['B']} x {m['T']}", split, way,
                     *(cell for pair in zip(*both, strict=True) for cell in _beside(*pair))))
    if not rows:
        return None
    when = dict.fromkeys(f"{f['device']}, {f['date']}, commit {f['commit']}, `{f['command']}`"
                         for f in files)
    return markdown(("Model", "Split", "PyTorch's way", "in a row: ours", "PyTorch", "Ratio",
                     "read: ours", "PyTorch", "Ratio"), rows) + "\n" + "; ".join(when) + "."


def _times(figures: dict) -> tuple[float | None, float]:
    """Of a step in a row of them, None where only steps whose loss was read were timed; of such."""
    return (figures["ms"], figures["read_ms"]) if "read_ms" in figures else (None, figures["ms"])


def _beside(ours: float | None, other: float | None) -> tuple[str, str, str]:
    cells = tuple("" if ms is None else f"{ms:.1f}" for ms in (ours, other))
    return (*cells, f"{other / ours:.2f}" if ours and other else "")


def host_times_table() -> str | None:
    """Of benchmarks/host_time.py; None while nothing is measured."""
    if not HOST_TIMES[0].exists():
        return None
    files = [json.loads(path.read_text()) for path in HOST_TIMES if path.exists()]
    one = files[0]
    rows = [(f"`{name}`", f"{us:.1f}") for name, us in one["us_per_call"].items()]
    for file in files:
        step, where = file.get("step"), "one GPU" if file is one else f"a mesh of {file['ranks']}"
        for way in (w for w in WAYS if w in file):
            rows.append((f"a step of `{file['model']}` with {file[way]['leaves']} tensors, "
                         f"{where}, {way}, {file['device']}, commit {file['commit']}; loss read "
                         "each step, of six", ", ".join(f"{file[way][k]}" for k in (
                             "read_median_us", "row_median_us"))))
        if step is None:
            continue
        if file.get("simulated"):
            where += (f" of simulated GPUs, on {file['device']}, Python {file['python']}, commit "
                      f"{file['commit']}, `{file['command']}`")
            if before := file.get("before"):  # the same of an earlier commit, put beside by hand
                where += f"; {before['commit']} took {before['step']['least_us']} at least"
        rows.append((f"a step of `{file['model']}` with {step['leaves']} tensors, {where}",
                     f"{step['least_us']}, median {step['median_us']}"))
    return (f"{one['device']}, Python {one['python']}, {one['date']}, commit {one['commit']}, "
            f"`{one['command']}`.\n\n" + markdown(("Call", "us"), rows))


def accepted_plans() -> str | None:
    """Written anew with TESSERA_ACCEPT=1; compared by tests/mesh/test_planned_steps.py."""
    return planned_steps_table() if os.environ.get("TESSERA_ACCEPT") == "1" else None


MESHES = {"planned steps": accepted_plans, "exchanges": exchanges_table,
          "mesh steps": mesh_steps_table, "host_times": host_times_table}
