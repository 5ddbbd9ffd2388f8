"""Rows CORE that need neither a GPU nor several processes."""

from __future__ import annotations

import ast
import builtins
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tessera as ts

ROOT = Path(__file__).resolve().parents[2]


def fresh(code: str, **env: str) -> subprocess.CompletedProcess:
    """Run code in a new interpreter that sees no GPU."""
    env = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "",
           **env}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env,
                          cwd="/")


def test_every_exported_name_exists_without_a_gpu():
    out = fresh("import tessera as ts\nfor n in ts.__all__: getattr(ts, n)\nprint(len(ts.__all__))")
    assert out.returncode == 0, out.stderr
    assert int(out.stdout) > 150 and len(set(ts.__all__)) == len(ts.__all__)


@pytest.mark.row("CORE-03")
def test_the_install_check_prints_the_version():
    out = fresh("import tessera; print(tessera.__version__)")
    assert out.returncode == 0 and out.stdout.strip() == ts.__version__


def test_requirements_resolve():
    lines = [line.split("#")[0].strip() for line in
             (ROOT / "requirements.txt").read_text().splitlines()]
    from packaging.requirements import Requirement

    names = {Requirement(line).name.lower() for line in lines if line}
    assert {"numpy", "numba", "ml-dtypes"} <= {n.replace("_", "-") for n in names}


class TestStarImport:
    def test_no_builtin_is_shadowed(self):
        space: dict = {}
        exec("from tessera import *", space)
        for name in dir(builtins):
            if name in space and not name.startswith("_"):
                assert space[name] is getattr(builtins, name), name
        exec("import builtins\nassert min is builtins.min and max([1, 2]) == 2", space)
        assert ts.max is not builtins.max and "max" not in ts.__all__

    def test_bare_names_of_the_seeds_that_exist_are_bound(self):
        space: dict = {}
        exec("from tessera import *", space)
        for name in ("jit", "Tensor", "gemm", "accum", "softmax_safe", "verify", "grad", "bf16",
                     "fp8_e4m3", "stochastic_round", "loss_scale", "sym", "effects", "pure"):
            assert space[name] is getattr(ts, name)


class TestTargets:
    """CORE-16, but for a graph on CUDA."""

    @pytest.mark.parametrize("target", ["amd", "intel", "tpu", "npu", "webgpu", "rocm", ""])
    def test_others_are_refused_by_name(self, target):
        for attempt in (lambda: ts.jit(target=target), lambda: ts.jit(abs, target=target)):
            with pytest.raises(ts.UnsupportedTargetError, match=repr(target)) as info:
                attempt()
            assert "cpu" in str(info.value) and info.value.code == "E_TARGET"

    def test_cpu_runs(self, rng):
        x = rng.standard_normal((3, 4)).astype(np.float32)

        @ts.jit(target="cpu")
        def f(x):
            return ts.sum(x * x)

        assert f(ts.tensor(x)).item() == pytest.approx(float((x.astype(np.float64) ** 2).sum()))

    def test_cuda_without_a_driver_says_what_is_missing(self):
        out = fresh("import tessera as ts\ntry:\n    ts.jit(lambda x: x, target='cuda')\n"
                    "except ts.UnsupportedTargetError as e: print(e)")
        assert out.returncode == 0, out.stderr
        assert "target 'cuda' cannot run here" in out.stdout and "doctor" in out.stdout


@pytest.mark.row("CORE-20")
def test_examples_are_plain_python_with_only_python_imports():
    files = sorted((ROOT / "examples").rglob("*.py"))
    assert files
    for file in files:
        tree = ast.parse(file.read_text(), str(file))
        assert not re.search(r"^\s*[%!]", file.read_text(), re.M), f"{file} needs a notebook"
        compile(tree, str(file), "exec")


@pytest.mark.row("CORE-10")
def test_examples_and_pages_speak_of_tiles_not_threads():
    pages = [*ROOT.glob("examples/*.py"), ROOT / "README.md"]
    assert len(pages) > 2
    for page in pages:
        for word in ("threadIdx", "blockIdx", "cuda.grid"):
            assert word not in page.read_text(), page
