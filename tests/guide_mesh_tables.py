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
    """Steps on several GPUs; None while none is measured."""
    rows, files = [], []
    for split, mine, theirs, way in MESH_STEPS:
        paths = [RESULTS / f"{name}.json" for name in (mine, theirs)]
        if not all(path.exists() for path in paths):
            continue
        ours, other = (json.loads(path.read_text()) for path in paths)
        files += [ours, other]
        together = ours.get("together", ours)
        m = ours["model"]
        rows.append((f"{m['layers']} layers of {m['d']}, {m['B']} x {m['T']}", split,
                     f"{together['ms']:.1f}", f"{other['ms']:.1f}, {way}",
                     f"{other['ms'] / together['ms']:.2f}",
                     f"{together['predicted_ms']:.1f}" if together["predicted_ms"] else ""))
    if not rows:
        return None
    when = dict.fromkeys(f"{f['device']}, {f['date']}, commit {f['commit']}, `{f['command']}`"
                         for f in files)
    return markdown(("Model", "Split", "ours, ms", "PyTorch, ms", "Ratio",
                     "Predicted, ms"), rows) + "\n" + "; ".join(when) + "."


MESHES = {"exchanges": exchanges_table, "mesh steps": mesh_steps_table}
