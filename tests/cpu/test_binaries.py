"""Functions as files with machine code: made for named GPUs, none of which is here, and found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import CASES, arrays
from lowering_cases import apart as apart
from ptx_harness import require_compiler
from tessera import bundles
from tessera.bundles import BundleWarning
from tessera.errors import BundleError, UnsupportedTargetError
from tessera.graph.cuda.program.compile_ahead import compile_ahead, wanted_ahead
from tessera.graph.cuda.program.device import DeviceExecutable
from tessera.graph.cuda.program.run import CudaProgram
from tessera.kernels.cards import known_cards, planning_for
from tessera.runtime.target import parse_target
from tessera.tile.launch import machine_code
from tessera.tile.launch.machine_code import compiling_for
from tolerance import assert_close

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
TARGETS = ("sm_80", "sm_90a")


@pytest.fixture
def forgotten(monkeypatch):
    """What this process was given is nobody else's."""
    monkeypatch.setattr(machine_code, "GIVEN", {})
    monkeypatch.setattr(bundles, "GIVEN", machine_code.GIVEN)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A matmul, an attention and a softmax, for two generations."""
    require_compiler()

    @ts.jit
    def f(x, w):
        y = ts.attention(x, x, x, causal=True)
        return ts.softmax(ts.transpose(y, (0, 2, 1, 3)).reshape(64, 64) @ w)

    path = tmp_path_factory.mktemp("file") / "f.tsf"
    return ts.export(f, path, ts.Tensor[2, 2, 32, 32, ts.bf16], ts.Tensor[64, 48, ts.bf16],
                     targets=("cpu", *TARGETS))


@pytest.mark.row("DEP-01")
def test_a_file_has_graph_schedules_and_machine_code(file):
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        manifest = json.loads(archive.read("manifest.json"))
        assert {"graph.txt", *(f"schedules/{t}.txt" for t in ("cpu", *TARGETS))} <= {*names}
        for target in TARGETS:
            found = [n for n in names if n.startswith(f"binaries/{target}/")]
            kernels = archive.read(f"schedules/{target}.txt").decode().split("groups=")[1][0]
            assert len(found) >= int(kernels) and set(found) <= set(manifest["files"])
            for name in found:
                entry = machine_code.CacheEntry.from_bytes(archive.read(name), name.split("/")[2])
                assert entry.parts["cubin"].startswith(b"\x7fELF")
                assert f".target {target}" in entry.parts["ptx"].decode()
                assert entry.meta["target"] == target


@pytest.mark.row("DEP-02")
@pytest.mark.parametrize("here", [("sm_90a",), ("sm_80",), ("sm_86",), (), ("sm_80", "sm_90a")])
def test_the_loader_takes_the_variants_of_this_machines_gpus(file, forgotten, here, monkeypatch):
    monkeypatch.setattr(bundles, "local_targets", lambda: list(here))
    f = ts.load(file)
    assert set(f.variants) == set(TARGETS) and all(f.variants.values())
    assert f.chosen == tuple(t for t in here if t in TARGETS)
    assert {e.meta["target"] for e in machine_code.GIVEN.values()} == set(f.chosen)


def test_an_h100_is_a_gpu_of_sm_90a(driver, monkeypatch):
    """And so is an H200: what is asked for is that of the driver's compute capability."""
    assert bundles.local_targets() == ["sm_90a"]


@pytest.mark.row("DEP-01")
@pytest.mark.parametrize("target", TARGETS)
def test_another_process_compiles_nothing(file, target, tmp_path):
    """It has an empty cache, and no compiler that works."""
    code = f"""
from tessera import bundles, config
import tessera as ts
from tessera.graph.cuda.program.compile_ahead import compile_ahead, wanted_ahead
from tessera.graph.cuda.program.compile_program import CompiledBefore
from tessera.graph.cuda.program.run import CudaProgram
from tessera.runtime.target import parse_target
from tessera.tile.launch import machine_code
from tessera.tile.launch.compile_images import compile_images

target = parse_target({target!r})
bundles.local_targets = lambda: [{target!r}]
def refuse(*args):
    raise AssertionError("compiled")
machine_code.compile_request = machine_code.emit_request = refuse
f = ts.load({str(file)!r})
with machine_code.compiling_for(target):
    wanted = list(wanted_ahead(CudaProgram(f.traced(), target, on_host=())))
    assert compile_images(wanted) == 0
    images = [machine_code.image_for(w.function, w.request, w.loaded) for w in wanted]
assert CompiledBefore(f.traced(), target, ())._kept
print(sorted(i.code.name for i in images))
import sys
assert "numba" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True,
                          capture_output=True, env={
                              **os.environ, "PYTHONPATH": PATHS,
                              "TESSERA_CACHE_DIR": str(tmp_path / "empty")})
    assert done.returncode == 0, done.stderr
    assert "flash_attention" in done.stdout and "product" in done.stdout


@pytest.mark.row("DEP-01")
@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].axes < 3 and not CASES[n].draws])
def test_what_is_compiled_ahead_is_what_a_first_call_asks_for(name, gpu, apart, rng, monkeypatch):
    """Keys of all requests, of the fake compiler on the fake GPU and of the same graph without."""
    case = CASES[name]
    inputs = arrays(case, rng)
    graph = ts.jit(case.fn).graph(*inputs)
    executable = DeviceExecutable(graph)
    asked: list[str] = []
    compiler = machine_code.compile_request

    def noted(function, request, image=None):
        asked.append(request.portable_key(function))
        return compiler(function, request, image)

    monkeypatch.setattr(machine_code, "compile_request", noted)
    executable.run([x.array for x in inputs])
    with compiling_for(executable.program.target):
        wanted = list(wanted_ahead(CudaProgram(graph, executable.program.target, on_host=())))
    assert asked and set(asked) <= {w.request.portable_key(w.function) for w in wanted}


@pytest.mark.row("DEP-01")
def test_a_call_on_a_gpu_finds_all_its_kernels(file, gpu, apart, rng, monkeypatch):
    """On the fake GPU, which asks the file's code for each kernel and runs its own."""
    asked: list[bool] = []

    class Noted(dict):
        def get(self, key):
            asked.append(key in self)

    monkeypatch.setattr(machine_code, "GIVEN", Noted())
    monkeypatch.setattr(bundles, "GIVEN", machine_code.GIVEN)
    f = ts.load(file)
    assert f.chosen == ("sm_90a",) and len(machine_code.GIVEN) == f.variants["sm_90a"]
    x, w = (ts.tensor(rng.standard_normal(s).astype("f"), "bf16")
            for s in ((2, 2, 32, 32), (64, 48)))
    made = f(x.to("cuda"), w.to("cuda"))
    assert asked and all(asked) and made.device == "cuda:0"
    assert_close(made.numpy(), f(x, w).numpy(), "bf16", 64)


@pytest.mark.row("DEP-02")
def test_products_are_compiled_for_each_card_that_is_known():
    """An H200 and an H100 have other tables, so other blocks: both find theirs."""
    require_compiler()
    target = parse_target("sm_90a")
    graph = ts.jit(lambda x, w: x @ w).graph(ts.Tensor[16, 4096, ts.bf16],
                                             ts.Tensor[4096, 14336, ts.bf16])
    made, plans = compile_ahead(graph, target), []
    cards = known_cards(target)
    assert len(cards) == 2
    for card in cards:
        with compiling_for(target), planning_for(card):
            wanted = wanted_ahead(CudaProgram(graph, target, on_host=()))
            plans.append({w.request.portable_key(w.function) for w in wanted})
    assert plans[0] != plans[1] and plans[0] | plans[1] == set(made)


# --- errors ---------------------------------------------------------------------------------------
def test_code_of_another_version_is_compiled_again_and_said(file, forgotten, monkeypatch):
    monkeypatch.setattr(bundles, "local_targets", lambda: ["sm_90a"])
    monkeypatch.setattr(bundles, "compiler_hash", lambda: "of another version")
    with pytest.warns(BundleWarning, match="was made by another version of Tessera") as told:
        f = ts.load(file)
    assert told[0].filename == __file__
    assert f.chosen == () and f.variants and not machine_code.GIVEN


def test_damaged_code_is_refused(file, forgotten, tmp_path, monkeypatch):
    """By the digest of the file, and where somebody has written that too, by the entry's own."""
    with zipfile.ZipFile(file) as archive:
        files = {n: archive.read(n) for n in archive.namelist()}
    name = next(n for n in files if n.startswith("binaries/sm_90a/"))
    files[name] = files[name][:-1] + bytes([files[name][-1] ^ 1])
    manifest = json.loads(files.pop("manifest.json"))

    def written():
        with zipfile.ZipFile(tmp_path / "g.tsf", "w") as archive:
            for n, data in files.items():
                archive.writestr(n, data)
            archive.writestr("manifest.json", json.dumps(manifest))
        return tmp_path / "g.tsf"

    monkeypatch.setattr(bundles, "local_targets", lambda: ["sm_90a"])
    with pytest.raises(BundleError, match=f"is damaged: {name}"):
        ts.load(written())
    manifest["files"][name] = bundles._digest(files[name])
    with pytest.raises(BundleError, match="the machine code .* for sm_90a is no entry that"):
        ts.load(written())


def test_unknown_targets_are_refused(tmp_path):
    with pytest.raises(UnsupportedTargetError, match="there is no target 'sm_1'[\\s\\S]*sm_90a"):
        ts.export(lambda x: x + 1.0, tmp_path / "f.tsf", ts.ones(4), targets=("sm_1",))
    assert not os.listdir(tmp_path)


def test_of_distributed_arguments_there_are_schedules_alone(tmp_path):
    mesh = ts.dist.mesh(axes="dp", shape=2)
    x = ts.dist.distribute(np.ones((4, 3), "f"), ts.ShardSpec(("row",), ("dp",)), mesh=mesh)
    f = ts.load(ts.export(lambda x: x * 2.0, tmp_path / "f.tsf", x, targets=("sm_90a",)))
    assert list(f.schedules) == ["sm_90a"] and f.variants == {} and f.chosen == ()
