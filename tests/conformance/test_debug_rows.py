"""Rows DBG that are commands or about kernels; the others are shown in test_sentinels and
test_debug_tools, those that need the compiler for GPUs in tests/golden/test_kernel_inspect."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from kernels import seeds
from kernels.build import build
from tessera import config
from tessera.__main__ import main

STORED = {"device": "cpu", "steps": 100, "gemm": {"time_us": 100.0, "speed_tflops": 50.0},
          "runs": [{"latency_ms": 2.0}, {"latency_ms": 3.0}]}


def changed(**figures):
    new = json.loads(json.dumps(STORED))
    new["gemm"].update(figures)
    return new


@pytest.mark.row("DBG-20")
class TestCompare:
    def compare(self, tmp_path, new, *options):
        for name, data in (("old", STORED), ("new", new)):
            (tmp_path / f"{name}.json").write_text(json.dumps(data))
        return main(["compare", str(tmp_path / "old.json"), str(tmp_path / "new.json"), *options])

    @pytest.mark.parametrize("new, code", [
        (STORED, 0),
        (changed(time_us=109.0), 0),
        (changed(time_us=111.0), 1),
        (changed(time_us=50.0), 0),
        (changed(speed_tflops=46.0), 0),
        (changed(speed_tflops=45.0), 1),
        (changed(speed_tflops=90.0), 0),
        ({**STORED, "runs": [{"latency_ms": 2.0}, {"latency_ms": 9.0}]}, 1),
        ({**STORED, "steps": 1}, 0),
        ({"other_ms": 1.0}, 1),
    ])
    def test_beyond_the_margin_it_fails(self, tmp_path, capsys, new, code):
        assert self.compare(tmp_path, new) == code
        out = capsys.readouterr().out
        assert ("SLOWER" in out or "no figure" in out) == bool(code)

    @pytest.mark.parametrize("name, slow", [
        ("GB/s", 50.0), ("TFLOP/s", 50.0), ("softmax, us", 200.0), ("us", 200.0)])
    def test_a_unit_may_be_all_of_a_name_or_stand_behind_words(self, tmp_path, name, slow):
        files = [tmp_path / "a.json", tmp_path / "b.json"]
        for file, value in zip(files, (100.0, slow), strict=True):
            file.write_text(json.dumps({"rows": {name: value, "of memcpy": value, "stages": 3}}))
        assert main(["compare", str(files[0]), str(files[0])]) == 0
        assert main(["compare", str(files[0]), str(files[1])]) == 1
        assert main(["compare", str(files[1]), str(files[0])]) == 0

    def test_the_margin_is_chosen(self, tmp_path, capsys):
        assert self.compare(tmp_path, changed(time_us=140.0), "--margin", "0.5") == 0
        assert self.compare(tmp_path, changed(time_us=160.0), "--margin", "0.5") == 1
        assert "gemm.time_us: 100 -> 160  (+60.0% time)" in capsys.readouterr().out

    def test_files_that_hold_nothing(self, tmp_path, capsys):
        assert self.compare(tmp_path, {"steps": 3}) == 1
        assert "holds no figure" in capsys.readouterr().err


# --- kernels ----------------------------------------------------------------------------------
REDUCTION = """@kernel
def total(x: Tensor["n", f32], out: Tensor[1, f32]):
    s = tile.alloc_shared((128,), f32)
    t = tile.local_id()
    s[t] = x[t] if t < n else 0.0
    tile.barrier()
    stride = 64
    while stride > 0:
        if t < stride:
            s[t] += s[t + stride]
        {barrier}
        stride //= 2
    if t == 0:
        out[0] = s[0]
"""


def total(barrier):
    return build(REDUCTION.format(barrier=barrier))["total"]


@pytest.mark.row("DBG-07")
class TestRaceCheck:
    def gemm_arguments(self):
        a, b = (np.ones(s, ml_dtypes.bfloat16) for s in ((64, 128), (128, 64)))
        return a, b, np.zeros((64, 64), np.float32)

    def test_the_double_buffered_gemm_of_the_seed_and_its_correction(self):
        report = ts.debug.race_check(seeds.double_buffered_gemm, *self.gemm_arguments())
        assert {f.conflict.memory for f in report.findings} == {"smem_a", "smem_b"}
        for f in report.findings:  # a write after a read: the copy meets the product
            assert (f.conflict.action, f.conflict.other_action) == ("writes", "reads")
            assert "cp_async" in f.where.text and "ts.tile.mma" in f.other.text
            assert "before the loop comes back" in f.fix
        assert not ts.debug.race_check(seeds.corrected_gemm, *self.gemm_arguments())

    def test_a_missing_barrier_in_a_reduction(self):
        x = np.ones(100, np.float32)
        report = ts.debug.race_check(total("pass"), x, np.zeros(1, np.float32))
        assert report.findings
        c = report.findings[0].conflict
        assert c.memory == "s" and c.lane != c.other_lane and 0 <= c.index[0] < 128
        assert not ts.debug.race_check(total("tile.barrier()"), x, np.zeros(1, np.float32))


@pytest.mark.row("DBG-08", "TILE-16", "TILE-30")
def test_bank_conflicts_of_rows_and_columns():
    source = """@kernel
def column(A: Tensor["M", "N", f32], out: Tensor["M", "N", f32]):
    s = tile.alloc_shared((32, 32), f32, swizzle={})
    t = tile.local_id()
    for r in range(32):
        s[r, t] = A[r, t]
    tile.barrier()
    for c in range(32):
        out[c, t] = s[t, c]
"""
    a = np.zeros((32, 32), np.float32)
    degrees = [ts.debug.bank_conflicts(build(source.format(swizzle))["column"], a, a.copy(),
                                       groups=1, lanes=32).degree for swizzle in ("None", "'xor'")]
    assert degrees == [32, 1]
    rows = np.zeros((256, 128), ml_dtypes.bfloat16)
    assert ts.debug.bank_conflicts(seeds.optimized_memory_access, rows, rows.copy()).degree == 1


@pytest.mark.row("DBG-10")
def test_roofline_verdicts():
    x = np.zeros(1 << 20, np.float32)
    saxpy = ts.debug.roofline(seeds.saxpy, x, x.copy(), 2.0)
    assert saxpy.bound == "memory" and saxpy.intensity == 2 / 12
    assert (saxpy.flops, saxpy.bytes) == (2 * x.size, 12 * x.size)
    product = build("""@kernel
def gemm(A: Tensor["M", "K", bf16], B: Tensor["K", "N", bf16], C: Tensor["M", "N", bf16]):
    acc = tile.zeros((128, 128))
    for k in range(0, K, 64):
        a = tile.load(A[tile_m:tile_m+128, k:k+64])
        acc = tile.dot(a, tile.load(B[k:k+64, tile_n:tile_n+128]), acc)
    C[tile_m:tile_m+128, tile_n:tile_n+128] = acc
""")["gemm"]
    n = 4096
    a, b, c = (np.zeros((n, n), ml_dtypes.bfloat16) for _ in range(3))
    gemm = ts.debug.roofline(product, a, b, c)
    assert gemm.bound == "compute" and gemm.flops == pytest.approx(2 * n**3, rel=0.01)
    assert gemm.bytes == 3 * 2 * n * n


@pytest.mark.row("DBG-11")
def test_an_element_outside_names_tensor_index_and_extent():
    k = build("""@kernel
def k(A: Tensor["N", f32]):
    A[N] = 1.0
""")["k"]
    with ts.debug.bounds(), pytest.raises(IndexError) as info:
        k(np.zeros(7, np.float32))
    assert "index 7 is outside of 'A': axis 0 has extent 7" in str(info.value)
    assert info.value.where.text == "A[N] = 1.0"


ALL_THREE = """
import numpy as np, tessera as ts
from tessera import Tensor, f32
@ts.kernel
def race(x: Tensor["n", f32]):
    x[0] = 1.0 * ts.tile.local_id()
@ts.kernel
def nan(x: Tensor["n", f32]):
    x[0] = ts.tile.log(x[0] - 1.0)
x = np.zeros(4, np.float32)
for program in (lambda: race(x), lambda: nan(np.zeros(1, np.float32)),
                lambda: ts.log(ts.tensor([-1.0]))):
    try:
        program()
        print("passes")
    except ts.TesseraError as error:
        print(error.code)
print(ts.config.debug)
"""


@pytest.mark.row("DBG-12")
@pytest.mark.parametrize("env, head, want", [
    ({}, "", ["passes", "passes", "passes", "False"]),
    ({"TESSERA_DEBUG": "1"}, "", ["E_RACE", "E_NAN_INF", "E_NAN_INF", "True"]),
    ({}, "import tessera; tessera.debug.enable()",
     ["E_RACE", "E_NAN_INF", "E_NAN_INF", "True"]),
    ({"TESSERA_DEBUG": "1"}, "import tessera; tessera.debug.enable(False)",
     ["passes", "passes", "passes", "False"]),
])
def test_one_switch_turns_on_bounds_races_and_sentinels(env, head, want, tmp_path, request):
    """Bounds: compiled kernels are built with checks when `config.debug` is on; the interpreter
    tests each element access always."""
    file = tmp_path / "program.py"
    file.write_text(head + ALL_THREE)
    plain = {k: v for k, v in os.environ.items() if not k.startswith("TESSERA_")}
    plain["PYTHONPATH"] = str(request.config.rootpath)
    out = subprocess.run([sys.executable, str(file)], env=plain | env, capture_output=True,
                         text=True)
    assert out.stdout.split() == want, out.stderr


@pytest.mark.row("DBG-12")
def test_the_switch_reaches_what_runs_on_a_device():
    from tessera.tile.launch import first_call

    with ts.debug.enable():
        assert config.debug and first_call.settings.debug is True
    assert first_call.settings is config
