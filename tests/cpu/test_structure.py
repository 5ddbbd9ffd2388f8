"""How modules hang together: circles of imports, lazy ones too, are few and have a reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from import_scan import imports_of, modules_of

PACKAGE = Path(__file__).resolve().parents[2] / "tessera"

# Modules that need each other, each circle with its reason. What is not here is an error; so is a
# circle that is here and is no longer one.
CIRCLES: dict[str, set[str]] = {
    "a dtype takes policies and equals other spellings, policies and text name dtypes":
        {"numerics.dtypes", "numerics.parse", "numerics.policy"},
    "a cache's type makes caches, and a cache has a type":
        {"state.kv_cache", "state.kv_type"},
    "a function of the IR prints itself":
        {"tile.ir.ir", "tile.ir.printing"},
}

# Modules that functions import when they run, though nothing forbids it at the top, and why.
LAZY: dict[str, set[str]] = {
    "it stands on Numba's compiler, which takes a second to import": {
        "tile.cuda.build", "tile.cuda.compile", "tile.cuda.emit.emitter",
        "tile.cuda.numba_gate"},
    "processes that compile are for what is on no disk yet": {
        "graph.cpu.compile_apart", "tile.cuda.compile_processes"},
    "the PTX records are many, and only compiling asks for one": {"tile.cuda.ptx"},
    "a program without a GPU needs none of it": {
        "graph.cuda", "graph.cuda.program.compile_ahead", "graph.cuda.program.compile_program",
        "graph.cuda.program.device", "graph.cuda.program.eager", "graph.cuda.levels",
        "runtime.device", "runtime.libcuda", "runtime.target", "tile.launch.levels"},
    "it stands on mpi4py or NCCL, which few need": {
        "mesh.ranks.mpi", "mesh.ranks.nccl", "mesh.ranks.communicator", "mesh.ranks.windows",
        "mesh.ranks.nccl_watch", "mesh.ranks.window_sums", "mesh.parallel.stage_wires"},
    "ranks that are processes are for programs that a launcher has started": {
        "mesh.ranks.processes", "mesh.ranks.tcp"},
    "loops for the CPU are loaded, or compiled, when the first one runs": {
        "graph.cpu.compile", "graph.cpu.disk", "graph.cpu.load"},
    "each emitter registers itself, when the first kernel is emitted": {"tile.cuda.emit"},
    "tuning and whole-array kernels are for those who ask for them": {
        "tile.kernel.autotune", "tile.kernel.whole_array"},
    "planning is for those who plan": {"planning.alpa", "planning.fabric",
                                     "planning.functions"},
    "it stands on PyTorch, which Tessera does not need": {
        "bench.torch_matmuls", "bench.torch_side"},
}

# Names that public classes of several modules have, with how many when it is more than two. The
# list is to shrink: a name here means different things in different rooms.
REPEATED = ""


def needed_by(package: Path) -> dict[str, set[str]]:
    """The modules that each module imports when it or one of its functions runs."""
    modules = {*modules_of(package)}
    found: dict[str, set[str]] = {name: set() for name in modules}
    for i in imports_of(package):
        name = None if i.for_types else i.among(modules)
        if name is not None and name != i.module:
            found[i.module].add(name)
    return found


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected components of more than one module (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(graph.get(name, ())):
            if other not in order:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == order[name]:
            at = stack.index(name)
            found.append(set(stack[at:]))
            del stack[at:]

    for name in graph:
        if name not in order:
            visit(name)
    return [c for c in found if len(c) > 1]


def without_package(names: set[str]) -> set[str]:
    return {n.partition(".")[2] for n in names}


def test_modules_that_need_each_other_are_few_and_have_a_reason():
    found = [without_package(c) for c in circles(needed_by(PACKAGE))]
    new = [sorted(c) for c in found if c not in CIRCLES.values()]
    gone = [why for why, names in CIRCLES.items() if names not in found]
    assert not new, f"these import each other, in functions too: {new}. Move what both need into " \
        "a module below, give it as an argument, or, with a reason, add them to CIRCLES"
    assert not gone, f"no circle any more, or another one: {gone}. Change CIRCLES"


def imports_in_functions(package: Path) -> Iterator[tuple[str, str]]:
    """(module, module of the package that one of its functions imports when it runs)"""
    modules = {*modules_of(package)} - {package.name}
    for i in imports_of(package):
        name = i.among(modules) if i.in_function else None
        if name is not None:
            yield i.module, name


def test_imports_in_functions_have_a_reason():
    reasons = set().union(*LAZY.values())
    found = {(a.partition(".")[2], b.partition(".")[2]) for a, b in imports_in_functions(PACKAGE)}
    plain = {(a, b) for a, b in found if not any({a, b} <= names for names in CIRCLES.values())}
    new = sorted((a, b) for a, b in plain if b not in reasons)
    assert not new, f"imported in a function: {new}. Import it at the top or, with a reason, add " \
        "it to LAZY"
    gone = reasons - {b for _, b in plain}
    assert not gone, f"no function imports {sorted(gone)} any more: take it from LAZY"


def test_an_import_in_a_function_is_found(tmp_path):
    package = tmp_path / "p"
    package.mkdir()
    for name, text in {"__init__": "", "a": "from . import b", "b": "", "c": "",
                       "d": "from . import b\ndef f():\n    from .c import x"}.items():
        (package / f"{name}.py").write_text(text)
    assert [*imports_in_functions(package)] == [("p.d", "p.c")]


@pytest.mark.parametrize("upper, expected", [
    ("from .lower import x", [{"p.a.lower", "p.a.upper"}]),
    ("def f():\n    from .lower import x", [{"p.a.lower", "p.a.upper"}]),
    ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .lower import x", []),
    ("import p.a", []),
])
def test_a_circle_is_found(tmp_path, upper, expected):
    package = tmp_path / "p"
    (package / "a").mkdir(parents=True)
    for name, text in {"__init__": "", "a/__init__": "", "a/lower": "from . import upper",
                       "a/upper": upper}.items():
        (package / f"{name}.py").write_text(text)
    assert circles(needed_by(package)) == expected


# --- names of classes ---------------------------------------------------------------------------
def public_classes(package: Path) -> dict[str, list[str]]:
    """The modules that have a public class of each name."""
    found: dict[str, list[str]] = {}
    for file in sorted(package.rglob("*.py")):
        for name in re.findall(r"^class ([A-Za-z]\w*)[(:]", file.read_text(), re.M):
            found.setdefault(name, []).append(str(file.relative_to(package)))
    return found


def test_a_new_class_has_a_name_of_its_own():
    known = {name: int(count or 2)
             for name, _, count in (word.partition("*") for word in REPEATED.split())}
    found = {name: files for name, files in public_classes(PACKAGE).items() if len(files) > 1}
    more = {name: files for name, files in found.items() if len(files) > known.get(name, 1)}
    fewer = {name for name, count in known.items() if len(found.get(name, [""])) < count}
    assert not more, f"public classes of one name: {more}. Give the new one a name that tells it " \
        "from the other"
    assert not fewer, f"less often now than REPEATED says: {sorted(fewer)}. Take it from there"


def test_two_classes_of_one_name_are_found(tmp_path):
    (tmp_path / "a.py").write_text("class Plan: pass\nclass _Own: pass")
    (tmp_path / "b.py").write_text("class Plan: pass\nclass _Own: pass\nclass Other: pass")
    assert public_classes(tmp_path) == {"Plan": ["a.py", "b.py"], "Other": ["b.py"]}


# --- what is written where it is not seen -------------------------------------------------------
# Functions that set fields of a frozen record beside its __init__ and __post_init__, and why.
SETS_FROZEN = {
    "graph/tree.py _from_fields": "a stand-in of the user's class, made without its __init__",
    "graph/ops/sparse.py _set": "what __post_init__ has checked, and matrices of stand-ins",
    "tile/ir/schedule.py _with": "Schedule(...) takes other names than its fields have",
}


def hidden_writes(package: Path) -> Iterator[str]:
    """Writes into a module's or a function's globals, and past a frozen record."""
    for file in sorted(package.rglob("*.py")):
        if not re.search(r"globals|object.__setattr__", text := file.read_text()):
            continue
        for function in (n for n in ast.walk(ast.parse(text))
                         if isinstance(n, ast.FunctionDef | ast.Module)):
            name = getattr(function, "name", "the module")
            for node in _own_calls(function):
                call = ast.unparse(node.func)
                into_globals = call == "globals().update" or call.endswith("__globals__.update")
                past = call == "object.__setattr__" and name not in ("__init__", "__post_init__")
                if into_globals or past:
                    yield f"{file.relative_to(package)} {name}"


def _own_calls(function: ast.AST) -> Iterator[ast.Call]:
    """Calls in a body, those of functions inside it left out."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Call):
            yield node
        if not isinstance(node, ast.FunctionDef):
            yield from _own_calls(node)


def test_nothing_is_written_where_it_is_not_seen():
    found = set(hidden_writes(PACKAGE))
    assert found == set(SETS_FROZEN), "give the record a field or its maker an argument"


@pytest.mark.parametrize("text", [
    "globals().update({})", "def f(g):\n    g.__globals__.update({})",
    "def f(x):\n    object.__setattr__(x, 'a', 1)", "object.__setattr__(x, 'a', 1)"])
def test_a_hidden_write_is_found(tmp_path, text):
    (tmp_path / "a.py").write_text(text)
    assert len(list(hidden_writes(tmp_path))) == 1


# The rooms of a folder, lowest first: a module imports from its own room and those below it.
ROOMS: dict[str, list[str]] = {
    "tile": ["ir", "passes", "interpreter", "builder", "ops", "frontend", "cuda", "launch",
             "tuning", "kernel"],
    "tile.cuda": ["ptx", "intrinsics", "lower", "emit"],
}


def upward(folder: str, graph: dict[str, set[str]]) -> list[str]:
    """Imports between the rooms of a folder that point up."""
    floor = {f"{PACKAGE.name}.{folder}.{room}": n for n, room in enumerate(ROOMS[folder])}

    def at(module: str) -> int | None:
        return next((n for room, n in floor.items() if f"{module}.".startswith(f"{room}.")), None)

    return [f"{name} -> {other}" for name, others in graph.items() for other in sorted(others)
            if (mine := at(name)) is not None and (its := at(other)) is not None and its > mine]


@pytest.mark.parametrize("folder", ROOMS)
def test_imports_between_rooms_point_down(folder: str) -> None:
    wrong = upward(folder, needed_by(PACKAGE))
    assert not wrong, "\n".join([f"rooms of {folder}, lowest first: {ROOMS[folder]}", *wrong])


def test_an_import_to_a_room_above_is_found() -> None:
    assert upward("tile", {"tessera.tile.ir.ir": {"tessera.tile.cuda.ptx.mma"},
                           "tessera.tile.cuda.compile": {"tessera.tile.ir.types"}}) == [
        "tessera.tile.ir.ir -> tessera.tile.cuda.ptx.mma"]


def test_no_file_stands_beside_the_rooms() -> None:
    assert [p.name for p in (PACKAGE / "tile").glob("*.py")] == ["__init__.py"]
    assert {p.name for p in (PACKAGE / "tile").iterdir() if any(p.glob("*.py"))} == set(
        ROOMS["tile"])


# --- files that are named -----------------------------------------------------------------------
# Of the user, in an example.
NOT_OURS = {"file.py", "json.py", "model.py"}


def named_files(package: Path) -> Iterator[tuple[str, str]]:
    """(where, the end of a path) of each Python file that a comment or a docstring names."""
    for file in sorted(package.rglob("*.py")):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            for name in re.findall(r"(?<![\w/.-])((?:\w+/)*[a-z_]+\.py)\b", line):
                yield f"{file.relative_to(package)}:{number}", name


def test_files_that_the_code_names_exist() -> None:
    root = PACKAGE.parent
    files = [f"/{p.relative_to(root)}" for folder in ("tessera", "tests", "benchmarks", "examples")
             for p in (root / folder).rglob("*.py")]
    gone = [f"{where} names {name}" for where, name in named_files(PACKAGE)
            if name not in NOT_OURS and not any(f.endswith(f"/{name}") for f in files)]
    assert not gone, "\n".join(["", *gone])
