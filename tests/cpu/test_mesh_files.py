"""Files of figures of meshes: one for each number of GPUs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_gpus_leave_the_file_of_four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = loaded("record")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    for ranks in (4, 2):
        record.write("mesh_step", {"ms": 10 * ranks}, shown=False, ranks=ranks)
    found = {p.name: json.loads(p.read_text())["ms"] for p in tmp_path.iterdir()}
    assert found == {"mesh_step_4gpus.json": 40, "mesh_step_2gpus.json": 20}
    assert record.mesh_file("mesh_step", 2).exists()


@pytest.mark.parametrize("name", ["mesh_step", "tp_step", "tp_matmul", "collectives"])
def test_programs_of_meshes_write_by_the_number_of_gpus(name: str) -> None:
    text = (BENCHMARKS / f"{name}.py").read_text()
    call = text[text.index("record.write("):]
    assert "ranks=" in call[:call.index("\n\n")]
