"""Imports only point down the floors of the house, lazy ones inside functions too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from import_scan import imports_of

PACKAGE = Path(__file__).resolve().parents[2] / "tessera"

# Lowest first; a file or folder may import what stands on its own floor only if it is the same one
# and everything below.
FLOORS: list[list[str]] = [
    ["import_time", "lazy_dataclass"],
    ["argument_kinds", "foreign", "launched"],
    ["errors"],
    ["call_errors", "hooks", "open_trace"],
    ["config"],
    ["numerics"],
    ["runtime"],
    ["dims", "tensor_operators", "wide_arrays"],
    ["complex_pair"],
    ["tensor"],
    ["tile"],
    ["kernels"],
    ["graph"],
    ["ad"],
    ["mesh"],
    ["planning"],
    ["checkpoints", "data", "dynamic_scale", "fp8_scaling", "optim", "state"],
    ["bundles", "optimizer_state"],
    ["debug"],
    ["array", "dist", "effects", "onnx", "shape", "stdlib"],
    ["doctor"],
    ["__init__"],
    ["bench", "tune"],
    ["__main__"],
]
# May name what stands above for a type checker alone: protocols say what higher floors do, the open
# trace is the graph's, and the parts of a complex tensor are tensors.
SPEAKS_OF_ALL = {"complex_pair", "hooks", "open_trace"}
FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names}


@dataclass(frozen=True)
class FloorImport:
    file: Path
    line: int
    importer: str  # the floor's name: numerics, tensor, ...
    imported: str

    def __str__(self) -> str:
        return (
            f"{self.file.relative_to(PACKAGE.parent)}:{self.line}: `{self.importer}` imports "
            f"`{self.imported}`, which stands {self.relation()}. Imports only point down: move the "
            f"shared piece to a lower floor, or add a hook that `{self.imported}` fills (hooks.py)."
        )

    def relation(self) -> str:
        above = FLOOR_OF[self.imported] - FLOOR_OF[self.importer]
        return "beside it" if above == 0 else f"{above} floor{'s' * (above > 1)} above it"

    def points_down(self) -> bool:
        if self.importer == self.imported:
            return True
        return FLOOR_OF[self.imported] < FLOOR_OF[self.importer]


def floor_name(dotted: Sequence[str], package: Path) -> str | None:
    """The floor a dotted name lies on: tessera.tile.ops -> tile; a name of the top: __init__."""
    if dotted[0] != package.name:
        return None
    if len(dotted) > 1:
        path = package / dotted[1]
        if path.is_dir() or path.with_suffix(".py").is_file():
            return dotted[1]
    return "__init__"


def find_imports(package: Path) -> Iterator[FloorImport]:
    for i in imports_of(package):
        if i.for_types and i.parts[1] in SPEAKS_OF_ALL:
            continue
        if imported := floor_name(i.dotted, package):
            yield FloorImport(i.file, i.line, i.parts[1], imported)


def test_every_module_has_a_floor():
    names = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    missing = sorted(names - FLOOR_OF.keys())
    assert not missing, f"{missing} stand on no floor: add them to FLOORS where they belong"


def test_imports_only_point_down():
    """At the least it sees config -> errors and __main__ -> the top, else it reads nothing."""
    found = [*find_imports(PACKAGE)]
    wrong = [str(i) for i in found if not i.points_down()]
    assert not wrong, "\n".join(["", *wrong])
    seen = {(i.importer, i.imported) for i in found}
    assert {("config", "errors"), ("__main__", "__init__"), ("doctor", "config")} <= seen


@pytest.mark.parametrize("file, statement, imported", [
    ("numerics/codec.py", "from tessera.graph.trace import x", "graph"),
    ("numerics/codec.py", "def f():\n    from tessera import debug", "debug"),
    ("numerics/codec.py", "from ..mesh import shard", "mesh"),
    ("numerics/__init__.py", "from ..mesh import shard", "mesh"),
    ("numerics/codec.py", "from .. import mesh", "mesh"),
    ("numerics/codec.py", "import tessera.debug.report as r", "debug"),
    ("numerics/codec.py", "import tessera as ts", "__init__"),
    ("numerics/codec.py", "from tessera import grad", "__init__"),
    ("numerics/codec.py", "importlib.import_module('tessera.tile.ops')", "tile"),
    ("numerics/codec.py", "if TYPE_CHECKING:\n    from tessera.tensor import T", "tensor"),
    ("ad/reverse.py", "from tessera.mesh import plan", "mesh"),
    ("mesh/plan.py", "from tessera.optim import AdamW", "optim"),
    ("graph/trace.py", "from tessera.debug import sentinel", "debug"),
    ("tensor.py", "from .graph import ops", "graph"),
    ("hooks.py", "if a:\n    from .graph import ops", "graph"),
])
def test_an_import_that_points_up_is_found(tmp_path, monkeypatch, file, statement, imported):
    package = make_package(tmp_path, monkeypatch)
    (package / file).write_text(statement)
    (found,) = [i for i in find_imports(package) if not i.points_down()]
    assert found.imported == imported
    line = len(statement.splitlines())
    assert str(found).startswith(f"tessera/{file}:{line}: `{found.importer}` imports")


@pytest.mark.parametrize("file, statement", [
    ("ad/reverse.py", "from tessera.graph import ops\nfrom . import rules\nimport numpy"),
    ("debug/report.py", "import tessera.ad.reverse, tessera.mesh"),
    ("numerics/__init__.py", "from .codec import encode\nfrom tessera.errors import DTypeError"),
    ("__main__.py", "import tessera\nfrom tessera import doctor"),
    ("hooks.py", "if TYPE_CHECKING:\n    from .graph.ir import Graph"),
    ("tile/ops.py", "f('tessera.debug')\nimport_module(name)"),
])
def test_an_import_that_points_down_or_stays_is_accepted(tmp_path, monkeypatch, file, statement):
    package = make_package(tmp_path, monkeypatch)
    (package / file).write_text(statement)
    assert [i for i in find_imports(package) if not i.points_down()] == []


def make_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "tessera"
    for name in FLOOR_OF:
        if name in ("numerics", "runtime", "tile", "kernels", "graph", "ad", "mesh", "debug"):
            (package / name).mkdir(parents=True)
            (package / name / "__init__.py").touch()
        else:
            package.mkdir(exist_ok=True)
            (package / f"{name}.py").touch()
    monkeypatch.setattr(f"{__name__}.PACKAGE", package)
    return package


def test_the_compiler_comes_first_in_a_process() -> None:
    """A launch imports it before anything has declared what the emitters emit."""
    subprocess.run([sys.executable, "-c", "import tessera.tile.cuda.compile"], check=True)
