"""Rows of the package as a whole: what it needs, targets it compiles for, seeds, chapters."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import guide
import tessera as ts
from conformance.test_core_rows import fresh
from kernels.build import build
from ptx_harness import require_compiler
from tessera import config
from tessera.__main__ import COMMANDS, run_command
from tessera.errors import UnsupportedTargetError
from tessera.runtime.generations import GENERATIONS
from tessera.runtime.target import parse_target, target_of_device
from tessera.tile.cuda import emit
from tessera.tile.ir.op_record import OPS
from tessera.tile.launch import machine_code
from tessera.tile.launch.machine_code import IMAGES
from tessera.tile.tuning.tuned_schedules import TunedSchedule, TuningCache
from tolerance import assert_close

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.mark.row("CORE-01")
def test_importing_needs_no_gpu_no_mpi_and_less_than_two_seconds():
    """Of processor time, whatever else the machine does."""
    code = ("import sys, time; import tessera as ts; print(time.process_time());"
            "print([m for m in ('cuda', 'cupy', 'mpi4py', 'numba', 'torch') if m in sys.modules]);"
            "print(all(getattr(ts, n) is not None for n in ts.__all__))")
    out = fresh(code)
    assert out.returncode == 0, out.stderr
    seconds, loaded, names = out.stdout.splitlines()
    assert float(seconds) < 2 and loaded == "[]" and names == "True"


@pytest.mark.row("CARD-03")
@pytest.mark.parametrize("name", ["tile", "numerics", "kernels", "graph", "ad", "mesh", "debug"])
def test_the_rooms_are_packages(name):
    found = importlib.import_module(f"tessera.{name}")
    assert Path(found.__file__).name == "__init__.py" and found.__doc__
    assert (ROOT / "tests").is_dir() and (ROOT / "examples").is_dir()


@pytest.mark.row("CORE-24")
def test_every_example_runs_or_belongs_to_one_that_does():
    """Those with a number run in cpu/test_examples.py, train.py in cpu/test_train.py."""
    files = {p.stem: p.read_text() for p in (ROOT / "examples").glob("*.py")}
    programs = {name for name, text in files.items() if '__name__ == "__main__"' in text}
    assert {name for name in programs if not re.match(r"\d\d_", name)} == {
        "numerics_policy", "progress", "train"}
    for name in files.keys() - programs:
        used = re.compile(rf"^\s*(from|import) (examples\.)?{name}\b", re.M)
        assert any(used.search(files[p]) for p in programs), name
    done = subprocess.run([sys.executable, ROOT / "examples/numerics_policy.py"],
                          env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0 and "stochastic" in done.stdout, done.stderr


# --- safety, seeds, NumPy ---------------------------------------------------------------------
@pytest.mark.row("SAFE-08")
@pytest.mark.parametrize("run", [lambda f: f, ts.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_attention_of_huge_logits_and_of_rows_that_see_nothing(run, dtype, rng):
    """Logits of +-1e4 pick the largest; a row without keys is zero; gradients are numbers."""
    q, k, v = (ts.tensor(rng.standard_normal((1, 2, 8, 16)), dtype) for _ in range(3))
    mask = np.ones((8, 8), bool)
    mask[3] = False

    def attend(q, k, v):
        return ts.attention(q, k, v, mask=ts.tensor(mask), scale=1e4)

    y = run(attend)(q, k, v)
    logits = 1e4 * np.einsum("bhqd,bhkd->bhqk", *(np.asarray(t, np.float64) for t in (q, k)))
    assert np.abs(logits).max() > 1e4
    want = np.take_along_axis(np.asarray(v, np.float64), logits.argmax(-1)[..., None], 2)
    want[:, :, 3] = 0
    assert_close(np.asarray(y, np.float64), want, dtype, n=16)
    for g in run(ts.grad(lambda *x: ts.sum(ts.cast(attend(*x), "f32")), argnums=(0, 1, 2)))(
            q, k, v):
        assert np.isfinite(np.asarray(g, np.float64)).all()


@pytest.mark.row("RT-08")
def test_one_seed_derives_every_stream():
    """Of a tensor in parts each rank draws its own; what all ranks hold is the same on each."""
    mesh, ones = ts.dist.mesh(axes="dp", shape=3), np.ones((6, 40), np.float32)
    drop = ts.jit(lambda x: ts.dropout(x, 0.5))

    def program(seed, spec):
        ts.random.seed(seed)
        y = drop(ts.dist.distribute(ones, spec, mesh=mesh))
        return ts.normal((4,)).numpy(), y.local.numpy(), y.numpy()

    def runs(seed, spec):
        return ts.dist.simulate(lambda: program(seed, spec), mesh)

    rows = ts.ShardSpec(("row",), ("dp",))
    parts, same = runs(7, rows), runs(7, None)
    for again, first in zip(runs(7, rows), parts, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(again, first, strict=True))
    assert not np.array_equal(runs(8, rows)[0][2], parts[0][2])
    assert not np.array_equal(parts[0][1], parts[1][1])
    ts.random.seed(7)
    whole = drop(ts.tensor(ones)).numpy()
    for rank in range(3):
        assert np.array_equal(parts[rank][2], whole) and np.array_equal(same[rank][1], whole)
        assert np.array_equal(parts[rank][0], parts[0][0])


@pytest.mark.row("RT-12")
def test_tensors_and_arrays_stand_for_each_other(rng):
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((5, 6), (6, 3)))
    t = ts.tensor(a)
    assert np.array_equal(np.asarray(t), a) and np.asarray(t).dtype == np.float32
    assert np.array_equal(ts.tensor(np.asarray(t)).numpy(), a)
    for x, y in ((a, b), (t, b), (a, ts.tensor(b))):
        assert_close(ts.gemm(x, y).numpy(), a.astype(np.float64) @ b, n=6)
    for made in (np.exp(t), np.add(a, t), a * t):
        assert isinstance(made, ts.Tensor)
    assert_close(np.exp(t).numpy(), np.exp(a.astype(np.float64)), n=1)
    assert np.array_equal((a * t).numpy(), a * a)


# Passes put other ops in their place.
REPLACED = {"matmul_codes_stacked", "one_along", "piece_ends", "ring_load"}


# --- targets ----------------------------------------------------------------------------------
@ts.kernel
def product(a: ts.Tensor["M", "K", ts.f16], b: ts.Tensor["K", "N", ts.f16],
            c: ts.Tensor["M", "N", ts.f32]):
    acc = ts.tile.zeros((64, 64), ts.f32)
    for k in ts.tile.range(0, K, 32):
        acc = ts.tile.dot(ts.tile.load(a[tile_m:tile_m+64, k:k+32]),
                          ts.tile.load(b[k:k+32, tile_n:tile_n+64]), acc)
    c[tile_m:tile_m+64, tile_n:tile_n+64] = acc


def ptx(kernel, *args, target):
    require_compiler()
    kernel.lower(*args)
    return kernel.inspect_ir("ptx", target=target)


@pytest.mark.row("SYS-01", "SYS-10", "SYS-13", "CORE-17")
@pytest.mark.parametrize("target", list(GENERATIONS))
def test_a_matmul_for_every_generation(target):
    """Tensor cores on each; loads by cp.async from 8.0 on; none for an older chip's."""
    a, c = np.zeros((128, 128), np.float16), np.zeros((128, 128), np.float32)
    text = ptx(product, a, a, c, target=target)
    assert text.startswith(".version") and f".target {target}\n" in text
    assert "mma.sync" in text or "wgmma" in text
    assert ("cp.async" in text) == (parse_target(target).cc >= (8, 0))


@ts.kernel
def staged(x: ts.Tensor["M", 64, ts.f32], y: ts.Tensor["M", 64, ts.f32]):
    s = ts.tile.alloc_shared((16, 64), ts.f32)
    ts.tile.cp_async(s, x[tile_m:tile_m+16, 0:64])
    ts.tile.barrier()
    y[tile_m:tile_m+16, 0:64] = ts.tile.load(s)


@pytest.mark.row("SYS-11")
@pytest.mark.parametrize("target", ["sm_80", "sm_86"])
def test_asynchronous_copies_of_ampere(target):
    """Asked for, and in the pipeline of a matmul; the page says what of Ampere is not used."""
    x, h = np.zeros((32, 64), np.float32), np.zeros((128, 128), np.float16)
    for text in (ptx(staged, x, x, target=target),
                 ptx(product, h, h, np.zeros((128, 128), np.float32), target=target)):
        assert re.search(r"cp\.async\.c[ag]\.shared\.global", text) and "cp.async.bulk" not in text
    assert "Structured sparsity" in (DOCS / "reference/status.md").read_text()


@pytest.mark.row("SYS-12")
def test_which_features_of_a_chip_kernels_use_is_reported():
    """Of kernels that are compiled here; tests/gpu has those that are launched."""
    h, c = np.zeros((128, 128), np.float16), np.zeros((128, 128), np.float32)
    for target, uses, lacks in (
            ("sm_80", {"mma.sync", "cp.async", "ldmatrix"}, {"wgmma", "TMA", "setmaxnreg"}),
            ("sm_90a", {"wgmma", "TMA"}, {"mma.sync"})):
        text = ptx(product, h, h, c, target=target)
        report = ts.arch_report(product, target=target)
        (found,) = report.kernels
        assert (found.name, found.target) == ("product", target)
        assert uses <= found.features and not lacks & found.features
        assert ("cp.async.bulk.tensor" in text) == ("TMA" in found.features)
        assert ("clusters" in found.features) == (found.clusters > 1)
        assert {f for f, n in report.used[target].items() if n} == found.features
        assert str(report).startswith(f"{target}: 1 kernel; ") and f"product ({target})" in \
            str(report)
    assert "TMA" in ts.arch_report(ts.kernel(product.fn)).kernels[0].features  # never called


@pytest.mark.row("SYS-08")
def test_what_the_page_says_of_the_memory_of_large_models():
    """Of an optimizer's own state, not of what is written there."""
    params = {"w": ts.param(np.ones((64, 32)), "bf16")}
    grads = ts.grad(lambda p: ts.sum(ts.square(ts.cast(p["w"], "f32"))))(params)
    state = ts.optim.AdamW().init(params)
    held = [x.nbytes / (64 * 32) for x in (params["w"], grads["w"], *(
        state[k]["w"] for k in ("m", "v", "master")))]
    text = (DOCS / "guide/installing.md").read_text()
    said = re.search(r"takes (\d+) bytes for each bf16 parameter: (\d+) for itself, (\d+) for its "
                     r"gradient, (\d+) for moments and master copy. So 80 GB hold (\d+) billion",
                     text)
    assert [*map(int, said.groups())] == [
        sum(held), held[0], held[1], sum(held[2:]), 80 // sum(held)]


@pytest.mark.row("RT-10")
def test_binaries_and_schedules_are_kept_by_hash(tmp_path, capsys):
    """Put, get, list; what two kernels have alike is kept once, and found by another process."""
    require_compiler()
    h, c = np.zeros((128, 128), np.float16), np.zeros((128, 128), np.float32)

    def compiled(target):
        kernel = ts.kernel(product.fn)
        kernel.lower(h, h, c)
        kernel.inspect_ir("ptx", target=target)

    with config.scope(cache_dir=tmp_path):
        for target in ("sm_80", "sm_90a", "sm_80"):
            compiled(target)
        names = IMAGES.names()
        assert len(names) == 2 and all(re.fullmatch("[0-9a-f]{64}", n) for n in names)
        found = {e.meta["target"]: e for e in map(IMAGES.read, names)}
        assert found.keys() == {"sm_80", "sm_90a"}
        assert all(e.meta["name"] == "product" and e.parts["cubin"][:4] == b"\x7fELF"
                   for e in found.values())
        with pytest.MonkeyPatch.context() as patch:  # nothing is compiled again
            patch.setattr(machine_code, "to_entry", lambda made: pytest.fail("compiled again"))
            compiled("sm_80")
        assert IMAGES.read("0" * 64) is None
        tuned = TuningCache.of(None)
        tuned.store(TunedSchedule({"kernel": "product", "hash": "1", "shapes": {}, "types": {},
                                   "constants": {}, "space": "s", "arch": "sm_90a", "gpu": "H200",
                                   "metric": "ms", "bench": "b", "user": ""},
                                  ts.Schedule(stages=3), 0.5))
        assert [t.schedule.stages for t in tuned.entries()] == [3]
        assert run_command(COMMANDS["cache"], ["--list"]) == 0
        text = capsys.readouterr().out
        assert re.search(r"images +2 entries", text) and re.search(r"tuned +1 entries", text)
        assert text.count("product for sm_") == 2 and "product on H200: " in text
        assert run_command(COMMANDS["cache"], ["--clear"]) == 0
        assert IMAGES.names() == [] and len(tuned.entries()) == 1


@pytest.mark.row("SYS-01", "SYS-09")
def test_volta_is_refused_with_what_there_is_instead():
    with pytest.raises(UnsupportedTargetError, match="there is no target 'sm_70'") as e:
        parse_target("sm_70")
    assert "sm_75" in e.value.hint and "sm_120" in e.value.hint
    with pytest.raises(UnsupportedTargetError, match="compute capability 7.0") as e:
        target_of_device((7, 0))
    assert "7.5 (Turing) and newer" in e.value.hint
    assert "Volta" in (DOCS / "reference/status.md").read_text()


@pytest.mark.row("SYS-10", "SYS-13")
def test_narrow_types_where_the_chip_has_no_unit_for_them():
    """bf16 by f32 on Turing; fp8 on Ada by its own tensor cores."""
    made = build("""@kernel
def k(a: Tensor[64, 64, {0}], b: Tensor[64, 64, {0}], c: Tensor[64, 64, f32]):
    c[0:64, 0:64] = tile.dot(tile.load(a[0:64, 0:64]), tile.load(b[0:64, 0:64]))
""".format("bf16"))["k"]
    a, c = np.zeros((64, 64), ml_dtypes.bfloat16), np.zeros((64, 64), np.float32)
    old, new = (ptx(made, a, a, c, target=t) for t in ("sm_75", "sm_80"))
    assert "mma.sync" not in old and "fma.rn.f32" in old
    assert re.search(r"mma\.sync.*\.bf16", new)


@pytest.mark.row("RT-01", "DOC-09")
@pytest.mark.parametrize("name", ["tileir", "cutlass", "cute", "mlir"])
def test_other_ways_to_nvidia_gpus_are_refused_and_the_page_says_so(name):
    with pytest.raises(UnsupportedTargetError, match=repr(name)):
        ts.jit(lambda x: x, target=name)
    text = (DOCS / "reference/status.md").read_text()
    assert "PTX" in text and all(w in text for w in ("Tile IR", "CuTe", "CUTLASS"))


@pytest.mark.row("CARD-04")
def test_tile_ops_are_intrinsics_of_numba_cuda():
    """Every op that is none of others is emitted; one over a warp's lanes is shuffles."""
    for module in pkgutil.walk_packages(emit.__path__, f"{emit.__name__}."):
        importlib.import_module(module.name)
    own = {name for name, op in OPS.items() if op.rule is not None and op.lower is None}
    assert len(own) > 100 and {n for n in own if "emit" not in OPS[n].cuda} == REPLACED
    k = build("""@kernel
def k(x: Tensor["n", f32]):
    i = tile.linear_id()
    x[i] = tile.warp_sum(x[i])
""")["k"]
    x = np.zeros(128, np.float32)
    assert "shfl.sync" in ptx(k, x, target="sm_80")
    source = k.inspect_ir("target", target="sm_80")
    assert source.count("def k(") == 1 and "from tessera.tile.cuda.intrinsics import" in source


# --- chapters of the guide --------------------------------------------------------------------
# Row -> pages, words that they explain, names that their examples use.
CHAPTERS = {
    "DOC-01": (["guide/programming_model"], ["tile", "group", "mesh", "rank"],
               ["@ts.kernel", "ts.dist.mesh"]),
    "DOC-02": (["guide/kernels"], ["register", "shared", "HBM", "NVLink", "**order.**", "barrier"],
               ["alloc_shared", "barrier()"]),
    "DOC-03": (["guide/kernels", "guide/tuning"], ["pipeline", "asynchronous copies", "stages"],
               ["cp_async", "barrier()"]),
    "DOC-04": (["guide/debugging", "reference/errors"], ["sentinel", "hint", "trace", "NaN"],
               ["ts.debug."]),
    "DOC-05": (["reference/numerics", "guide/programming_model"], [
        "stored", "accumul", "stochastic", "saturate", "loss_scale"], [
        "stochastic_round", "accum("]),
    "DOC-07": (["guide/kernels", "guide/tuning", "internals/tile"], ["layout", "swizzle", "ring"],
               ["swizzle=", "stages"]),
    "DOC-08": (["guide/stdlib", "reference/ops"], ["gemm", "spmm", "ts.fft", "ts.uniform"],
               ["stdlib"]),
    "DOC-10": (["guide/deployment"], ["workflow", "best practices", "server", "laptop"],
               ["ts.export", "ts.load"]),
}


@pytest.mark.row("DOC-01", "DOC-02", "DOC-03", "DOC-04", "DOC-05", "DOC-07", "DOC-08",
                 "DOC-10")
@pytest.mark.parametrize("row", CHAPTERS)
def test_a_chapter(row):
    """That its examples run and print what it shows is tested in cpu/test_docs.py."""
    pages, words, names = CHAPTERS[row]
    texts = [(DOCS / f"{page}.md").read_text() for page in pages]
    index = (DOCS / "index.md").read_text()
    assert all(f"({page}.md)" in index for page in pages)
    used = "".join(b.text for text in texts for b in guide.blocks_of(text) if b.runs)
    whole = "\n".join(texts).lower()
    assert not [w for w in words if w.lower() not in whole]
    assert not [n for n in names if n not in used]
