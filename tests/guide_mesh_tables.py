"""Tables of documentation with figures of meshes of GPUs, made from benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path

from guide_library_tables import markdown

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
EXCHANGES = RESULTS / "collectives.json"


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
MESH_STEPS = (("windows", "mesh_step", "mesh_step_ddp", "DDP"),
              ("windows, parameters", "mesh_step_fsdp", "mesh_step_fsdp2", "FSDP2"),
              ("matmuls", "tp_step", "tp_step_dtensor", "DTensor"),
              ("matmuls", "tp_step", "tp_step_async_tp", "async TP"))


def mesh_steps_table() -> str | None:
    """Steps on several GPUs, in a row and with each loss read; None while none is measured."""
    rows, files = [], []
    for split, mine, theirs, way in MESH_STEPS:
        paths = [RESULTS / f"{name}.json" for name in (mine, theirs)]
        if not all(path.exists() for path in paths):
            continue
        ours, other = (json.loads(path.read_text()) for path in paths)
        files += [ours, other]
        together = ours.get("together", ours)
        m, predicted = ours["model"], together["predicted_ms"]
        both = [_times(together), _times(other)]
        rows.append((f"{m['layers']} layers of {m['d']}, {m['B']} x {m['T']}", split, way,
                     *(cell for pair in zip(*both, strict=True) for cell in _beside(*pair)),
                     f"{predicted:.1f}" if predicted else ""))
    if not rows:
        return None
    when = dict.fromkeys(f"{f['device']}, {f['date']}, commit {f['commit']}, `{f['command']}`"
                         for f in files)
    return markdown(("Model", "Split", "PyTorch's way", "in a row: ours", "PyTorch", "Ratio",
                     "read: ours", "PyTorch", "Ratio", "Predicted"), rows
                    ) + "\n" + "; ".join(when) + "."


def _times(figures: dict) -> tuple[float | None, float]:
    """Of a step in a row of them, None where only steps whose loss was read were timed; of such."""
    return (figures["ms"], figures["read_ms"]) if "read_ms" in figures else (None, figures["ms"])


def _beside(ours: float | None, other: float | None) -> tuple[str, str, str]:
    cells = tuple("" if ms is None else f"{ms:.1f}" for ms in (ours, other))
    return (*cells, f"{other / ours:.2f}" if ours and other else "")


MESHES = {"exchanges": exchanges_table, "mesh steps": mesh_steps_table}
