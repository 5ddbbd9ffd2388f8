"""Tools for kernels: what they find, what they advise, and that the advice helps."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest

import tessera as ts
from kernels import seeds
from kernels.build import build
from tessera import config
from tessera.__main__ import main
from tessera.debug import inspect_command, inspection, kernel_lowering
from tessera.debug.inspect_page import page
from tessera.debug.resources import pressure_of
from tessera.debug.rooflines import amount
from tessera.debug.samples import missing_extents, sample_arguments, tensors_without_type
from tessera.errors import ArgumentError, UnsupportedTargetError
from tessera.runtime.ptxas import Resources
from tessera.runtime.target import parse_target
from tessera.tile.launch import levels as device_levels

TRANSPOSE = """@kernel
def transpose(A: Tensor["M", "N", f32], out: Tensor["M", "N", f32]):
    s = tile.alloc_shared({shape}, f32{options})
    t = tile.local_id()
    for r in range(32):
        s[r, t] = A[r, t]
    tile.barrier()
    for c in range(32):
        {store}
"""
GOOD, BAD = "out[c, t] = s[t, c]", "out[t, c] = s[c, t]"


def transpose(shape="(32, 32)", options="", store=GOOD):
    return build(TRANSPOSE.format(shape=shape, options=options, store=store))["transpose"]


def square(dtype=np.float32):
    return np.arange(1024, dtype=dtype).reshape(32, 32), np.zeros((32, 32), dtype)


# --- races ------------------------------------------------------------------------------------
class TestRaces:
    def test_all_of_them_with_both_lines_and_the_fix(self):
        k = build("""@kernel
def k(x: Tensor["n", f32], y: Tensor["n", f32]):
    s = tile.alloc_shared((128,), f32)
    r = tile.alloc_shared((128,), f32)
    t = tile.local_id()
    s[t] = x[t]
    r[t] = s[127 - t]
    y[t] = r[127 - t]
""")["k"]
        x, y = np.ones(128, np.float32), np.zeros(128, np.float32)
        report = ts.debug.race_check(k, x, y)
        assert report and (report.groups, report.lanes) == (1, 128) and not y.any()
        assert [(f.code, f.where.text, f.other.text) for f in report.findings] == [
            ("E_RACE", "r[t] = s[127 - t]", "s[t] = x[t]"),
            ("E_RACE", "y[t] = r[127 - t]", "r[t] = s[127 - t]")]
        first = report.findings[0]
        line = first.other.line
        assert first.fix == f"put ts.tile.barrier() between line {line} and line {line + 1}"
        c = first.conflict
        assert (c.space, c.memory, c.action, c.other_action) == ("shared", "s", "reads", "writes")
        assert c.group == c.other_group == 0
        assert c.index == (127 - c.lane,) == (c.other_lane,)
        assert str(report).startswith("races of k, 1 groups of 128 lanes: 2 found\n  E_RACE: race")

    def test_groups_that_meet(self):
        k = build("""@kernel
def k(x: Tensor["n", f32]):
    x[tile.local_id()] += 1.0
""")["k"]
        report = ts.debug.race_check(k, np.zeros(128, np.float32), groups=2)
        assert report and all("atomic_add" in f.fix for f in report.findings)
        assert all(f.conflict.group != f.conflict.other_group for f in report.findings)
        assert not ts.debug.race_check(k, np.zeros(128, np.float32), groups=1)

    def test_another_error_ends_the_run_and_is_shown(self):
        k = build("@kernel\ndef k(x: Tensor['n', f32]):\n    x[tile.local_id()] = 1.0\n")["k"]
        report = ts.debug.race_check(k, np.zeros(100, np.float32))
        (found,) = report.findings
        assert found.code == "E_BOUNDS" and found.conflict is None and "index 100" in found.message

    def test_nan_is_mentioned_and_no_race(self):
        k = build("@kernel\ndef k(x: Tensor['n', f32]):\n    x[0] = tile.sqrt(x[0])\n")["k"]
        with config.scope(numerics="raise"):
            report = ts.debug.race_check(k, np.full(1, -1.0, np.float32))
        assert not report and [op for op, _ in report.nan_sources] == ["sqrt"]
        assert "NaN out of numbers: sqrt at" in str(report)

    def test_arguments_of_all_kinds_stay_as_they_are(self):
        packed = ts.tensor(np.array([1.0, 2.0, 3.0], np.float32), "fp4_e2m1")
        strided = np.zeros((8, 2), np.float32)[:, 0]
        k = build("""@kernel
def k(a: Tensor["n", ts.fp4_e2m1], b: Tensor["m", f32]):
    if tile.linear_id() < m:
        b[tile.linear_id()] = 7.0
    if tile.linear_id() < n:
        a[tile.linear_id()] = 4.0
""")["k"]
        ts.debug.race_check(k, packed, b=strided)
        assert packed.numpy().tolist() == [1, 2, 3] and not strided.any()

    @pytest.mark.parametrize("tool", ["race_check", "bank_conflicts", "coalescing", "roofline",
                                      "register_pressure"])
    def test_only_kernels_have_them(self, tool):
        with pytest.raises(ArgumentError, match="print is no kernel"):
            getattr(ts.debug, tool)(print, 3)


# --- patterns ---------------------------------------------------------------------------------
class TestPatterns:
    @pytest.mark.parametrize("shape, options, degree", [
        ("(32, 32)", "", 32), ("(32, 33)", "", 1), ("(32, 40)", "", 8),
        ("(32, 32)", ", swizzle='xor'", 1)])
    def test_bank_conflicts_of_a_column(self, shape, options, degree):
        a, out = square()
        report = ts.debug.bank_conflicts(transpose(shape, options), a, out, groups=1, lanes=32)
        assert report.degree == degree and bool(report) == (degree > 1)
        assert [(r.memory, r.write) for r in report.rows] == [("s", True), ("s", False)]
        assert [bool(r.fix) for r in report.rows] == [False, degree > 1]
        assert not out.any()

    def test_the_advice_helps(self):
        a, out = square()
        before = ts.debug.bank_conflicts(transpose(), a, out, groups=1, lanes=32)
        assert before.rows[1].fix == (
            's = ts.tile.alloc_shared((32, 32), f32, swizzle="xor"): no conflict')
        wide = np.zeros((32, 100), np.float32)
        k = transpose("(32, 100)")  # 25 chunks: no xor permutes them
        fix = ts.debug.bank_conflicts(k, wide, wide.copy(), groups=1, lanes=32).rows[1].fix
        assert "alloc_shared((32, 101), f32), the last column unused: no conflict" in fix
        k = transpose("(32, 101)")
        assert not ts.debug.bank_conflicts(k, wide, wide.copy(), groups=1, lanes=32)

    def test_a_stride_in_the_row_is_no_case_for_a_swizzle(self):
        k = build("""@kernel
def k(x: Tensor["n", f32]):
    s = tile.alloc_shared((1024,), f32)
    s[8 * tile.local_id()] = x[0]
""")["k"]
        (row,) = ts.debug.bank_conflicts(k, np.zeros(1, np.float32)).rows
        assert row.degree == 8 and "neighbouring elements" in row.fix and "swizzle" not in row.fix

    def test_coalescing_names_the_axis_to_swap(self):
        a, out = square()
        good = ts.debug.coalescing(transpose(), a, out, groups=1, lanes=32)
        assert good.efficiency == 1.0 and not good
        bad = ts.debug.coalescing(transpose(store=BAD), a, out, groups=1, lanes=32)
        row = next(r for r in bad.rows if r.write)
        assert (row.memory, row.efficiency, row.sectors // row.requests) == ("out", 1 / 8, 32)
        assert "walk down axis 0 of out: swap the axes of the loop" in row.fix
        assert bad and bad.efficiency == pytest.approx(2 / 9)
        assert row.where.text == BAD and "12%   writes  out  32 sectors" in str(bad)

    def test_a_factor_on_the_last_index(self):
        k = build("""@kernel
def k(x: Tensor["n", f32]):
    x[4 * tile.local_id()] = 1.0
""")["k"]
        (row,) = ts.debug.coalescing(k, np.zeros(512, np.float32)).rows
        assert row.efficiency == 1 / 4 and "without a factor" in row.fix

    def test_without_arguments_the_last_checked_run_counts(self):
        k, (a, out) = transpose(), square()
        with pytest.raises(ArgumentError, match="has not run under the sanitizer"):
            ts.debug.bank_conflicts(k)
        k[1, 32](a, out)
        with pytest.raises(ArgumentError, match="give the arguments|has not run"):
            ts.debug.coalescing(k)
        with config.scope(debug=True):
            k[1, 32](a, out)
        assert ts.debug.bank_conflicts(k).degree == 32 and not ts.debug.coalescing(k)

    def test_an_error_of_the_call_is_an_error(self):
        k = build("@kernel\ndef k(x: Tensor['n', f32]):\n    x[tile.local_id()] = 1.0\n")["k"]
        with pytest.raises(ts.TesseraError, match="index 100 is outside"):
            ts.debug.coalescing(k, np.zeros(100, np.float32))

    def test_whole_tiles_are_not_counted_and_it_says_so(self):
        k = build("""@kernel
def k(A: Tensor["M", "N", f32]):
    A[0:8, 0:8] = tile.load(A[0:8, 0:8]) * 2.0
""")["k"]
        text = str(ts.debug.coalescing(k, np.zeros((8, 8), np.float32)))
        assert "no single lane accesses global memory; whole tiles" in text
        assert "no single lane accesses shared memory; whole tiles" in str(
            ts.debug.bank_conflicts(k, np.zeros((8, 8), np.float32)))


# --- roofline ---------------------------------------------------------------------------------
class TestRoofline:
    def test_bytes_are_those_that_must_move(self):
        n = 512
        a, b = np.zeros((2, n, n), np.float16)
        k = build("""@kernel
def k(A: Tensor["M", "K", f16], B: Tensor["K", "N", f16], C: Tensor["M", "N", f32]):
    acc = tile.zeros((64, 64))
    for k in range(0, K, 32):
        a = tile.load(A[tile_m:tile_m+64, k:k+32])
        acc = tile.dot(a, tile.load(B[k:k+32, tile_n:tile_n+64]), acc)
    C[tile_m:tile_m+64, tile_n:tile_n+64] = acc
""")["k"]
        r = ts.debug.roofline(k, a, b, np.zeros((n, n), np.float32))
        assert r.flops == pytest.approx(2 * n**3, rel=0.01)
        rows = {t.tensor: t for t in r.rows}
        assert rows["A"].least_bytes == 2 * n * n and rows["A"].asked_bytes == 8 * 2 * n * n
        assert rows["C"].least_bytes == rows["C"].asked_bytes == 4 * n * n
        assert r.bytes == 8 * n * n and r.gpu == "H200"
        assert r.intensity == r.flops / r.bytes

    def test_loops_of_single_threads_count_as_often_as_they_run(self):
        data = np.zeros(100_000, np.float32)
        r = ts.debug.roofline(seeds.cooperative_reduction, data)
        assert r.bytes == pytest.approx(data.nbytes, rel=0.01)
        assert r.flops == pytest.approx(data.size, rel=0.05)

    def test_the_ridge_separates_the_verdicts(self):
        x = np.zeros(4096, np.float32)
        for gpu in ("H200", "A100", "sm_75"):
            r = ts.debug.roofline(seeds.saxpy, x, x.copy(), 2.0, gpu=gpu)
            assert (r.intensity < r.ridge) == (r.bound == "memory")
            assert r.least_us == max(r.compute_us, r.memory_us)

    def test_loads_that_the_cache_cannot_keep_up_with(self):
        z = np.zeros((1024, 1024), np.float32)
        k = build("""@kernel
def k(A: Tensor["M", "N", f32], C: Tensor["M", "N", f32]):
    for i in range(0, 64):
        C[tile_m:tile_m+32, tile_n:tile_n+32] += tile.load(A[tile_m:tile_m+32, tile_n:tile_n+32])
""")["k"]
        r = ts.debug.roofline(k, z, z.copy())
        assert "64 times over" in r.fix and "sums kept in registers" in r.fix

    @pytest.mark.parametrize("x, text", [(0, "0 B"), (999, "999 B"), (1e6, "1 MB"),
                                         (1234567, "1.23 MB"), (999.7e6, "1 GB"),
                                         (5e12, "5 TB"), (5e16, "50 PB")])
    def test_amounts(self, x, text):
        assert amount(x, "B") == text


# --- resources --------------------------------------------------------------------------------
def fake_built(target="sm_90a", dynamic=0, warnings=(), **figures):
    figures = dict(registers=40, spill_store_bytes=0, spill_load_bytes=0, stack_bytes=0,
                   shared_bytes=0, barriers=1) | figures
    return SimpleNamespace(resources=Resources(**figures), target=parse_target(target),
                           kernel=SimpleNamespace(shared_bytes=dynamic), warnings=warnings)


class TestPressure:
    def test_shared_memory_is_static_and_dynamic(self):
        p = pressure_of("k", fake_built(shared_bytes=1000, dynamic=50000), 128)
        assert p.shared_bytes == 51000 and p.occupancy.limit == "shared memory"
        assert not p and not p.spills
        assert "shared     51000 of 232448 bytes a group" in str(p)

    def test_spills_are_to_be_mended(self):
        p = pressure_of("k", fake_built(registers=255, spill_store_bytes=8, spill_load_bytes=12),
                        256)
        assert p and p.spills and "smaller block" in p.fix
        assert "spills     8 bytes stored, 12 loaded" in str(p)

    def test_few_groups_are_mentioned(self):
        p = pressure_of("k", fake_built(registers=255), 256, ("matmul by mma.sync",))
        assert not p and p.occupancy.groups == 1 and p.fix.startswith("unless its loop")
        assert "note: matmul by mma.sync" in str(p)
        assert pressure_of("k", fake_built(), 128).fix == ""

    def test_without_the_compiler_it_says_what_to_install(self, monkeypatch):
        def refuse(*args):
            raise UnsupportedTargetError("no Numba-CUDA", hint="pip install it")

        monkeypatch.setattr(device_levels, "compiled_for", refuse)
        x = np.zeros(8, np.float32)
        with pytest.raises(UnsupportedTargetError, match="pip install it"):
            ts.debug.register_pressure(seeds.saxpy, x, x, 1.0)
        low = ts.debug.lowering(seeds.saxpy, x, x, 1.0)
        assert low.sections["ptx"].missing == "no Numba-CUDA; pip install it"
        assert "target: no Numba-CUDA" in str(low) and low.sections["tile"].text


# --- levels -----------------------------------------------------------------------------------
PTX = """.version 8.0
.visible .entry saxpy(
	.param .u64 p
)
{
	.loc	1 2 0
	mov.u32 %r1, 0;
	.loc	2 LINE 1
	add.f32 %f1, %f2, %f3;
	.loc	3 7 1, function_name $L, inlined_at 1 4 2
	mul.f32 %f1, %f2, %f3;
}
	.file	1 "/cache/saxpy.py"
	.file	2 "FILE"
	.file	3 "/tessera/intrinsics.py"
"""


@pytest.fixture
def compiled(monkeypatch):
    """Stands for what the compiler makes of saxpy; the line `y[i] = ...` is its line 3 and 4."""
    file, line = seeds.__file__, seeds.saxpy.source.first + 7
    users = {3: (file, line), 4: (file, line)}
    built = fake_built()
    built.file, built.ptx = "/cache/saxpy.py", PTX.replace("FILE", file).replace("LINE", f"{line}")
    built.kernel.cubin = b""
    made = SimpleNamespace(
        built=built, source='"""saxpy"""\nuse = 1\ny = add(x)\nz = mul(y)\n', threads=128,
        notes=("a note",), emitted=SimpleNamespace(lines=users))
    sass = '//## File "/cache/saxpy.py", line 3\n        /*0010*/   FFMA R1 ;\n'
    monkeypatch.setattr(device_levels, "compiled_for", lambda *args: made)
    monkeypatch.setattr(kernel_lowering, "sass", lambda cubin, lines: "\t.target\tsm_90a\n" + sass)
    return f"tests/kernels/seeds.py:{line}"


class TestLevels:
    @pytest.fixture(autouse=True)
    def here(self, monkeypatch, request):
        monkeypatch.chdir(request.config.rootpath)

    def test_every_level_is_linked_to_the_line(self, compiled):
        x = np.zeros(8, np.float32)
        low = ts.debug.lowering(seeds.saxpy, x, x, 1.0)
        assert list(low.sections) == ["source", "schedule", "tile", "target", "ptx", "sass"]
        became = low.of(compiled)
        assert became["source"] == ("y[i] = alpha * x[i] + y[i]",)
        assert len(became["tile"]) == 5 and became["target"] == ("y = add(x)", "z = mul(y)")
        assert [x for x in became["ptx"] if not x.startswith(".")] == [
            "add.f32 %f1, %f2, %f3;", "mul.f32 %f1, %f2, %f3;"]
        assert became["sass"] == ("/*0010*/   FFMA R1 ;",)
        assert all(len(s.lines) == len(s.links) for s in low.sections.values())
        assert low.sections["target"].lines[0] == "# a note"

    def test_as_text_each_line_with_what_it_became(self, compiled):
        text = str(ts.debug.lowering(seeds.saxpy))
        assert f"{compiled}  y[i] = alpha * x[i] + y[i]\n  tile     %x_1" in text
        assert "\n  target   y = add(x)\n           z = mul(y)\n  ptx      4 lines\n" in text

    def test_compiled_functions_have_four_levels(self):
        @ts.jit
        def f(x):
            return ts.exp(x) * 2.0

        low = ts.debug.lowering(f, ts.ones(8))
        assert list(low.sections) == ["graph", "schedule", "tile", "target"]
        assert all(s.text for s in low.sections.values())
        (link,) = {x for x in low.sections["graph"].links if x}
        assert "return ts.exp(x) * 2.0" in low.of(link)["graph"][0]
        assert any("exp(" in text for text in low.of(link)["tile"])

    def test_of_anything_else(self):
        with pytest.raises(ArgumentError, match="neither a kernel nor compiled"):
            ts.debug.lowering(len)


# --- samples ----------------------------------------------------------------------------------
class TestSamples:
    def test_from_the_annotations(self):
        given = sample_arguments(seeds.saxpy, {"n": 100}, {})
        assert given["x"].shape == (100,) and given["x"].numpy().std() > 0.5
        assert given["alpha"] == 1.0
        assert not np.array_equal(given["x"].numpy(), given["y"].numpy())
        assert sample_arguments(seeds.saxpy, {"n": 3}, {"alpha": 2.5})["alpha"] == 2.5
        given = sample_arguments(seeds.flash_attention, {"B": 2, "H": 3, "S": 64, "D": 32}, {})
        assert given["Q"].shape == (6, 64, 32) and str(given["Q"].dtype) == "bf16"
        assert "is_causal" not in given

    def test_what_is_missing_is_named(self):
        assert missing_extents(seeds.gemm, {"K": 3}) == ("M", "N")
        with pytest.raises(ArgumentError, match="needs the extents M, N") as info:
            sample_arguments(seeds.gemm, {"K": 3}, {})
        assert info.value.hint == "--size M=1024 N=1024"
        with pytest.raises(ArgumentError, match="has no parameter 'beta'"):
            sample_arguments(seeds.saxpy, {"n": 3}, {"beta": 1})
        k = build("@kernel\ndef k(x):\n    x[0] = 1.0\n")["k"]
        with pytest.raises(ArgumentError, match="no value can be made for the parameter x"):
            sample_arguments(k, {}, {})

    def test_a_type_is_given_where_the_annotation_has_none(self):
        source = "@kernel\ndef k(x: Tensor['N']):\n    x[0] = 1.0\n"
        k = build(source)["k"]
        assert tensors_without_type(k) == ("x",)
        with pytest.raises(ArgumentError, match="the annotation of x names no type") as info:
            sample_arguments(k, {"N": 4}, {})
        assert info.value.hint == "--set x=f32, or another type"
        given = sample_arguments(k, {"N": 4}, {"x": "bf16"})["x"]
        assert given.shape == (4,) and given.dtype == "bf16" and given.numpy().any()


# --- the command ------------------------------------------------------------------------------
FILE = """import tessera as ts
from tessera import Tensor, f32
from helper import twice

@ts.kernel
def double(x: Tensor["N", f32]):
    i = ts.tile.linear_id()
    if i < N:
        x[i] = twice(x[i])

@ts.kernel
def rows(x: Tensor["M", "D", f32], factor=2.0):
    x[tile_m:tile_m+1, 0:D] = ts.tile.load(x[tile_m:tile_m+1, 0:D]) * factor

@ts.kernel
def copy(x: Tensor["N"], y: Tensor["N"]):
    y[tile_n:tile_n+64] = ts.tile.load(x[tile_n:tile_n+64])

number = 3
"""


@pytest.fixture
def files(tmp_path, monkeypatch, compiled):
    monkeypatch.syspath_prepend(tmp_path)  # and takes away what the command adds
    (tmp_path / "helper.py").write_text("def twice(x):\n    return 2.0 * x\n")
    (tmp_path / "json.py").write_text(FILE)
    (tmp_path / "one.py").write_text(FILE[:FILE.index("@ts.kernel\ndef rows")])
    (tmp_path / "none.py").write_text("x = 1\n")
    return tmp_path


class TestInspect:
    def run(self, capsys, *words):
        code = main(["inspect", *map(str, words)])
        out = capsys.readouterr()
        return code, out.out, out.err

    def test_all_levels_and_figures(self, files, capsys):
        import json

        code, out, err = self.run(capsys, f"{files}/json.py::double", "--size", "N=256")
        assert (code, err) == (0, "") and json.dumps(1) == "1"  # theirs did not take its place
        for text in ("double  ", "N=256", "resources of double for sm_90a", "registers  40 of 255",
                     "bound by memory", "coalescing of double: 100%", "--- Source ---",
                     "--- Schedule ---", "tile.func @double", "--- Target source ---",
                     ".version 8.0", "FFMA"):
            assert text in out, text

    def test_without_extents_it_says_which(self, files, capsys):
        code, out, _ = self.run(capsys, f"{files}/one.py")
        assert code == 0 and "roofline: give the extents: --size N=1024" in out
        code, out, err = self.run(capsys, f"{files}/json.py::rows")
        assert code == 1 and "needs the extent 'D'" in err and "--size M=1024 D=1024" in err
        code, out, _ = self.run(capsys, f"{files}/json.py::rows", "--size", "D=8")
        assert code == 0 and "tile<1x8 x f32>" in out

    def test_values_of_parameters(self, files, capsys):
        code, out, _ = self.run(capsys, f"{files}/json.py::rows", "--size", "M=4", "D=8", "--set",
                                "factor=5.0", "--only", "tile")
        assert code == 0 and "mul(%t_1, 5.0:f32)" in out and "--- Source" not in out

    def test_types_of_tensors(self, files, capsys):
        code, _, err = self.run(capsys, f"{files}/json.py::copy")
        assert code == 1 and "--size N=1024 --set x=f32 y=f32" in err
        code, out, _ = self.run(capsys, f"{files}/json.py::copy", "--size", "N=100", "--set",
                                "x=bf16", "y=f32", "--only", "tile")
        assert code == 0 and "tensor<N x bf16>" in out and "tensor<N x f32>" in out

    @pytest.mark.parametrize("what, words", [
        ("missing.py::k", ["there is no file", "FILE::KERNEL"]),
        ("json.py::doubel", ["has no kernel 'doubel'", "did you mean 'double'?"]),
        ("json.py::number", ["'number' in", "is no kernel"]),
        ("json.py", ["has several kernels", "known: copy, double, rows"]),
        ("none.py", ["has no kernel", "@ts.kernel"]),
        ("one.py --target sm_99", ["there is no target 'sm_99'", "sm_90a"]),
    ])
    def test_mistakes(self, files, capsys, what, words):
        code, out, err = self.run(capsys, *f"{files}/{what}".split())
        assert code == 1 and not out and all(w in err for w in words), err

    @pytest.mark.parametrize("option", [["--size", "N"], ["--size", "N=x"], ["--size", "N=-1"],
                                        ["--size", "3=4"], ["--set", "a b=3"]])
    def test_options_that_are_no_pairs(self, files, capsys, option):
        code, _, err = self.run(capsys, f"{files}/one.py", *option)
        assert code == 1 and "is not NAME=VALUE" in err

    def test_a_file_of_a_package_is_imported_as_such(self, files, capsys):
        folder = files / "pack"
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        (folder / "half.py").write_text("FACTOR = 0.5\n")
        (folder / "kernels.py").write_text(
            "import tessera as ts\nfrom .half import FACTOR\n@ts.kernel\n"
            "def k(x: ts.Tensor['N', ts.f32]):\n    x[0] = FACTOR\n")
        assert inspect_command.load_kernel(str(folder / "kernels.py")).__module__ == "pack.kernels"


@dataclass
class Reader(HTMLParser):
    """Checks that tags are closed in order; notes ids, links and what is fetched."""

    open: list = field(default_factory=list)
    ids: list = field(default_factory=list)
    links: list = field(default_factory=list)
    classes: set = field(default_factory=set)

    def __post_init__(self):
        super().__init__()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        assert tag not in ("script", "link", "img", "iframe") and "src" not in attrs
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.links += [attrs["href"]] if "href" in attrs else []
        self.classes |= set(attrs.get("class", "").split())
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


class TestPage:
    def test_one_page_that_needs_nothing_else(self, files, capsys):
        target = files / "page.html"
        assert main(["inspect", f"{files}/one.py", "--size", "N=64", "--html", str(target)]) == 0
        text = target.read_text()
        reader = Reader()
        reader.feed(text)
        assert not reader.open and len(set(reader.ids)) == len(reader.ids)
        assert all(x[0] == "#" and x[1:] in reader.ids for x in reader.links)
        assert "http" not in text and "@import" not in text and "url(" not in text
        assert "prefers-color-scheme: dark" in text
        assert {"figures", "source", "schedule", "tile", "target", "ptx", "sass"} <= set(reader.ids)

    def test_lines_of_one_origin_share_a_class_with_a_rule(self, compiled, request, monkeypatch):
        monkeypatch.chdir(request.config.rootpath)
        found = inspection.inspect_kernel(seeds.saxpy, None, {"n": 64}, {})
        text = page(found)
        (line,) = [x for x in text.splitlines() if "FFMA" in x]
        number = line.split('class="u')[1].split('"')[0]
        assert f"body:has(.u{number}:hover) .u{number} {{" in text
        marked = [x for x in text.splitlines() if f'class="u{number}"' in x]
        assert any("y[i] = alpha * x[i] + y[i]" in x for x in marked)
        assert sum("load_element" in x for x in marked) == 2
        assert f'href="#tile-u{number}"' in text and f'id="tile-u{number}"' in text

    def test_text_is_escaped_and_gaps_explained(self, monkeypatch):
        def refuse(*args):
            raise UnsupportedTargetError("no <compiler>")

        monkeypatch.setattr(device_levels, "compiled_for", refuse)
        text = page(inspection.inspect_kernel(seeds.saxpy, "sm_80", {}, {}))
        assert "tile&lt;" in text or "tensor&lt;n x f32&gt;" in text
        assert "not available: no &lt;compiler&gt;" in text and "<compiler>" not in text


# --- switches ---------------------------------------------------------------------------------
class TestSwitches:
    def test_a_call_holds_and_a_block_gives_back(self, fresh_config):
        assert (config.debug, config.numerics) == (False, "off")
        with ts.debug.enable():
            assert (config.debug, config.numerics) == (True, "raise")
            with ts.debug.enable(False):
                assert (config.debug, config.numerics) == (False, "off")
            assert (config.debug, config.numerics) == (True, "raise")
        assert not config.chosen("debug") and not config.chosen("numerics")
        ts.debug.bounds()
        assert (config.debug, config.numerics) == (True, "off")
        with ts.debug.bounds(False):
            assert config.debug is False
        assert config.debug is True

    @pytest.mark.parametrize("env, numerics", [
        ({}, "off"), ({"TESSERA_DEBUG": "1"}, "raise"), ({"TESSERA_DEBUG": "0"}, "off"),
        ({"TESSERA_DEBUG": "1", "TESSERA_NUMERICS": "flag"}, "flag")])
    def test_the_variable_is_the_same_switch(self, fresh_config, env, numerics):
        for name, value in env.items():
            fresh_config.setenv(name, value)
        assert config.numerics == numerics and config.debug == (env.get("TESSERA_DEBUG") == "1")
