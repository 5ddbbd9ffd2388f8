"""What is added in one place appears everywhere: its tests, its row in the guide, its benchmark and
its CUDA form. Each addition of tests/additions.py is made, looked at, and taken away."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import additions
import guide_tables
import tessera as ts
from benchmarks.library import entries
from kernels.build import build
from library_cases import calls_of, compiled_of
from mesh.programs import adjoint_cases
from registries import restored
from tessera import stdlib
from tessera.errors import UnsupportedTargetError
from tessera.mesh.collectives.replicated import NOWHERE, rule_of
from tessera.numerics import dtypes
from tessera.tile.ir.op_record import declare
from tile_cases import sample_cases


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    with restored():
        yield


def compiler() -> None:
    try:
        from tessera.runtime.ptxas import assembler
        assembler()
        from tessera.tile.cuda import numba_gate  # noqa: F401
    except UnsupportedTargetError as error:
        pytest.skip(str(error))


def row(table: str, name: str) -> str:
    """The row of a thing in a table of the guide; an error when it has none."""
    return next(line for line in (guide_tables.TABLES[table]() or "").splitlines() if name in line)


# --- a dtype --------------------------------------------------------------------------------------
DECODE = """
@kernel
def k(x: Tensor["n", "fp8_e3m4"], y: Tensor["n", f32]):
    y[tile_n:tile_n+64] = tile.cast(tile.load(x[tile_n:tile_n+64]), ts.f32)
"""
ENCODE = """
@kernel
def k(x: Tensor["n", f32], y: Tensor["n", "fp8_e3m4"]):
    y[tile_n:tile_n+64] = tile.cast(tile.load(x[tile_n:tile_n+64]), "fp8_e3m4")
"""


def codes() -> ts.Tensor:
    """Every code of eight bits."""
    return ts.Tensor(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e3m4), ts.as_type(
        "fp8_e3m4"))


def test_a_dtype(rng):
    new = additions.add_dtype()
    assert ts.fp8_e3m4 is ts.numerics.fp8_e3m4 is new
    assert dtypes.dtype_of_numpy(ml_dtypes.float8_e3m4) is new
    assert "15.5" in row("formats", "fp8_e3m4") and "inf" in row("ranges", "`fp8_e3m4`")
    wide = codes().array.astype(np.float32)
    x = np.concatenate([wide, rng.standard_normal(1000).astype(np.float32) * 4])
    np.testing.assert_array_equal(ts.cast(codes(), ts.f32).numpy(), wide)
    for f in (lambda x: ts.cast(x, new), ts.jit(lambda x: ts.cast(x, new))):
        np.testing.assert_array_equal(f(x).numpy().astype("f4"),
                                      x.astype(ml_dtypes.float8_e3m4).astype("f4"))
    doubled = ts.jit(lambda a: a + a)(codes()).numpy().astype(np.float32)
    np.testing.assert_array_equal(doubled, (wide + wide).astype(ml_dtypes.float8_e3m4).astype("f4"))


def test_a_dtypes_form_in_loops(rng):
    """Every code decoded, and numbers encoded, by compiled loops, as ml_dtypes does."""
    from tessera.graph.cpu import LoopInput, LoopOp, LoopOutput, LoopProgram, compile_loops
    from tessera.graph.schedule.loop_ops import can_lower

    new = additions.add_dtype()
    same = (LoopOp("map", (0,), "f32", "{0}"),)
    wide, = compile_loops(LoopProgram((LoopInput("fp8_e3m4"),), same, (LoopOutput(1, "f32"),)))(
        codes().array)
    np.testing.assert_array_equal(wide, codes().array.astype(np.float32))
    x = np.concatenate([wide, np.nextafter(wide, 0), np.nextafter(wide, np.float32(99)),
                        (wide[:-1] + wide[1:]) / 2, rng.standard_normal(1000).astype("f4") * 8])
    rounded = LoopOp("round", (0,), "fp8_e3m4")
    narrow, again = compile_loops(LoopProgram((LoopInput("f32"),), (*same, rounded), (
        LoopOutput(1, "fp8_e3m4"), LoopOutput(2, "f32"))))(x)
    meant = x.astype(ml_dtypes.float8_e3m4)
    np.testing.assert_array_equal(narrow.view("u1"), meant.view("u1"))
    np.testing.assert_array_equal(again, meant.astype("f4"))
    (node,) = ts.jit(lambda x: ts.cast(x, new)).graph(ts.Tensor[64, ts.f32]).nodes
    assert can_lower(node)


def test_a_dtypes_form_in_kernels(rng):
    """Every code decoded, and numbers encoded, by what is emitted for a GPU, on NumPy."""
    from emulator import compare

    additions.add_dtype()
    x = np.concatenate([codes().array.astype(np.float32), rng.standard_normal(100).astype("f4")])
    compare(build(DECODE)["k"], codes(), np.zeros(256, np.float32), target="sm_90", exact=True)
    compare(build(ENCODE)["k"], x, ts.cast(np.zeros_like(x), "fp8_e3m4"), target="sm_90",
            exact=True)


def test_a_dtypes_cuda_form():
    compiler()
    additions.add_dtype()
    from tessera.graph.cuda import CudaProgram
    from tessera.graph.cuda.levels import compiled_of as compiled

    f = ts.jit(lambda a: ts.cast(ts.exp(ts.cast(a, ts.f32)), "fp8_e3m4"))
    program = CudaProgram(f.graph(ts.Tensor[64, ts.fp8_e3m4]), "sm_90a")
    assert program.launches
    for launch in program.launches:
        assert compiled(launch, program.target).built.resources.spill_store_bytes == 0


# --- a library kernel -----------------------------------------------------------------------------
def test_a_library_kernel(rng):
    new = additions.add_routine()
    assert stdlib.unit_rows is new and "unit_rows" in dir(stdlib)
    calls = calls_of(new)
    assert list(calls) == ["unit_rows", "unit_rows bf16"]
    for call in calls.values():
        call.check(rng)
        call.check(rng, new.record.variant)
    assert row("routines", "`unit_rows(x)`").count("[M, N]") == 1
    entry, = entries([new])
    assert entry in entries() and entry.title == "unit_rows f32[8192, 1024]"
    assert any(f[0] == "library" and f[1] == entry.title for f in guide_tables.figures())


def test_a_library_kernel_that_is_wrong_is_found(rng, monkeypatch):
    monkeypatch.setattr(additions, "unit_rows_f64", lambda x: x)
    new = additions.add_routine()
    with pytest.raises(AssertionError, match="elements are off"):
        calls_of(new)["unit_rows"].check(rng)


def test_a_library_kernels_cuda_form():
    compiler()
    new = additions.add_routine()
    (_, name, arguments, constants, _), = compiled_of(new)
    pressure = ts.debug.register_pressure(new.kernels[name], *arguments, target="sm_90a",
                                          **constants)
    assert not pressure.spills and pressure.occupancy.groups >= 1


# --- a collective ---------------------------------------------------------------------------------
def test_a_collective(rng):
    new = additions.add_collective()
    assert [c[0] for c in adjoint_cases()].count("mirror") == 1
    assert "itself" in row("collectives", "`ts.dist.mirror(x, axis)`")
    assert "reverse, forward" in row("ops", "`mirror`")
    arrays = [rng.standard_normal((3, 5)) for _ in range(3)]

    def program() -> tuple:
        x = ts.tensor(arrays[ts.dist.rank()])
        y, pull = ts.vjp(ts.dist.mirror, x)
        return y.numpy(), pull(y).numpy()

    got = ts.dist.simulate(program, 3)
    for (y, back), meant, x in zip(got, new.meaning(arrays), arrays, strict=True):
        np.testing.assert_array_equal(y, meant)
        np.testing.assert_array_equal(back, x)


def test_a_collectives_cost_and_replication():
    additions.add_collective()
    mesh = ts.dist.mesh(axes=("x",), shape=(4,))
    from tessera.planning.fabric import bus_factor, fabric

    took = fabric("pcie").time("mirror", 1e9, mesh)
    assert took.us == fabric("pcie").time("all_gather", 1e9, mesh).us
    assert bus_factor("mirror", 4) == 0.75

    def program() -> list:
        graph = ts.jit(ts.dist.mirror).graph(ts.ones(3))
        return [rule_of(n.op.name)(n, [NOWHERE]) for n in graph.nodes if n.op.name == "mirror"]

    assert ts.dist.simulate(program, 2) == [[[frozenset()]]] * 2


def test_a_collective_refuses_what_it_does_not_take():
    additions.add_collective()
    with pytest.raises(ts.ArgumentError, match="mirror takes no attributes; got op"):
        ts.dist.simulate(lambda: ts.dist.mirror(ts.ones(3), op="sum"), 2)
    with pytest.raises(AttributeError, match="did you mean 'barrier'"):
        _ = ts.dist.barier


# --- a tile op ------------------------------------------------------------------------------------
def test_a_tile_op(rng):
    new = additions.add_tile_op()
    assert ts.tile.log1p_exp is new
    assert "also where e^x overflows" in row("tile ops", "`log1p_exp(x)`")
    case, = sample_cases([new]).values()
    assert case.name == "sample_log1p_exp"
    x, out = case.args(rng)
    build(case.source)["k"](x, out)
    np.testing.assert_allclose(out, np.logaddexp(0, x.astype(np.float64)), rtol=1e-6)


def test_a_tile_ops_cuda_form(rng):
    from emulator import compare

    new = additions.add_tile_op()
    additions.emit_tile_op()
    case, = sample_cases([new]).values()
    kernel, args = build(case.source)["k"], case.args(rng)
    compare(kernel, *args, target="sm_90", rtol=1e-6)
    compiler()
    kernel.lower(*args)
    assert "log1p_exp(" in kernel.inspect_ir("target", target="sm_90a")
    assert "ex2.approx" in kernel.inspect_ir("ptx", target="sm_90a")


# --- an optimizer ---------------------------------------------------------------------------------
def test_an_optimizer():
    new = additions.add_optimizer()
    assert ts.optim.SignDescent is new
    assert "steps of one size" in row("optimizers", "SignDescent")
    w = {"w": ts.param(np.float32([1.0, -1.0]))}
    made, _ = new().update(w, {"w": ts.tensor(np.float32([3.0, -0.1]))}, new().init(w), 0.5)
    assert made["w"].tolist() == [0.5, -0.5]


# --- once -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("add", [additions.add_dtype, additions.add_routine,
                                 additions.add_collective, additions.add_tile_op,
                                 additions.add_optimizer])
def test_a_second_one_of_a_name_is_refused(add):
    add()
    with pytest.raises((ts.TesseraError, ValueError), match="twice|registered already"):
        add()


def test_a_tile_op_says_its_layouts_in_known_words():
    with pytest.raises(ValueError, match="layouts 'equal' is none of"):
        declare(rule=lambda types, attrs: types[0], name="equalled", layouts="equal")(lambda x: x)


def test_a_tile_op_of_another_family_has_its_layout_and_cost_from_its_record():
    """One layout for operand and result, special function units: both are words of the record."""
    from tessera.tile.cuda.lower.layout_relations import is_elementwise
    from tessera.tile.ir.ir import Op
    from tessera.tile.ir.op_record import OPS

    op = Op("glow", (), ())
    for layouts, same in (("same", True), ("any", False)):
        with restored():
            made = declare(rule=lambda types, attrs: types[0], name="glow", special=True,
                           layouts=layouts)(lambda x: x)
            assert is_elementwise(op) is same and OPS["glow"].special is made.special is True


def test_a_reduction_is_joined_by_the_op_that_its_record_names():
    """The body that joins partial results of maxima is that of `maximum`; and with another word in
    the record it is another's."""
    from tessera.tile.cuda.intrinsics.elementwise import BODIES
    from tessera.tile.cuda.intrinsics.reduce import combiner
    from tessera.tile.ir.op_record import OPS

    assert combiner("reduce_max", "f32") is BODIES["maximum", "f32"][1]
    declare(rule=OPS["reduce_max"].rule, name="reduce_least", layouts="reduced",
            joined_by="minimum")(lambda x, axis=None: x)
    assert combiner("reduce_least", "f32") is BODIES["minimum", "f32"][1]


OP_MODULE = '''"""Softsign."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import numpy as np

from .. import functions as F
from .elementwise_record import elementwise, public_unary

SOFTSIGN = elementwise(
    "softsign", lambda x: x / (1 + np.abs(x)), "{0} / (1 + abs({0}))",
    lambda y, x: (lambda: (1.0 - F.abs(y)) ** 2,), doc="x / (1 + |x|)")

softsign = public_unary("softsign", SOFTSIGN, "x / (1 + |x|)")
'''
TILE_OP_MODULE = '''"""Softsign."""

from __future__ import annotations

import numpy as np

from tessera.tile.builder import edge_rules, rules
from tessera.tile.ir.op_record import declare


@declare(rule=rules.floats, edges=edge_rules.elementwise,
         samples=(lambda rng: (rng.standard_normal((13, 7)),),))
def softsign(x):
    """x / (1 + |x|)."""
    return x / (1 + np.abs(x))
'''
REGISTERED_MODULE = '''"""Says that it was loaded."""

from tessera.tile.ir import op_record

op_record.loaded = [*getattr(op_record, "loaded", []), __name__.split(".")[-2]]
'''
OP_PROGRAM = """import tessera as ts
import tessera.tile.cuda.ptx
from tessera.tile.ir import op_record
print(ts.jit(ts.softsign)(ts.tensor([-1.0, 3.0])).tolist(), ts.softsign.__module__,
      op_record.OPS["softsign"].name, op_record.loaded)
"""


def test_a_module_in_a_folder_of_records_is_loaded(tmp_path):
    """In a copy of the package: a new file of ops is one file, and its op a name of ts."""
    package = Path(ts.__file__).parent
    shutil.copytree(package, tmp_path / "tessera", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tessera/graph/ops/softsign.py").write_text(OP_MODULE)
    (tmp_path / "tessera/tile/ops/softsign.py").write_text(TILE_OP_MODULE)
    for folder in ("tile/frontend/constructs", "tile/cuda/ptx"):
        (tmp_path / "tessera" / folder / "new.py").write_text(REGISTERED_MODULE)
    done = subprocess.run([sys.executable, "-c", OP_PROGRAM], cwd=tmp_path, text=True,
                          env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True)
    assert (done.stdout, done.stderr) == (
        "[-0.5, 0.75] tessera.graph.ops.softsign softsign ['constructs', 'ptx']\n", "")
