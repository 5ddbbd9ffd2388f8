"""The numbered examples run under the interpreter and judge themselves against NumPy in f64."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from tessera.tile.kernel.kernel import Kernel

ROOT = Path(__file__).resolve().parents[2]
LADDER = sorted((ROOT / "examples").glob("[0-9][0-9]_*.py"))
KERNELS = [(path.stem, name) for path in LADDER
           for name in re.findall(r"^@ts\.kernel.*\ndef (\w+)", path.read_text(), re.M)]
LINES = {"softmax": 15, "rms_norm": 15, "gemm_nt": 15, "gemm_nn": 15, "attention": 35}


def agree(printed: str) -> None:
    verdicts = re.findall(r"error \d\.\de[+-]\d\d  (\w+)$", printed, re.M)
    assert verdicts and set(verdicts) == {"ok"}


@pytest.fixture
def run(monkeypatch, capsys, pytestconfig):
    """What an example prints that runs as a program, in this process: a new one would spend its
    time on imports."""
    def printed(path: Path) -> str:
        monkeypatch.syspath_prepend(path.parent)
        monkeypatch.setattr(sys, "argv", [str(path), "--seed", str(pytestconfig.option.seed)])
        capsys.readouterr()
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return printed


def test_the_ladder_is_complete():
    assert [p.stem for p in LADDER] == [
        "01_copy", "02_reduction", "03_softmax", "04_gemm", "05_attention", "06_autotuned",
        "07_low_precision", "08_debugging_a_race", "09_patterns"]
    assert len(KERNELS) > 12


@pytest.mark.row("CORE-24")
@pytest.mark.parametrize("debug", [False, True], ids=["plain", "checked"])
@pytest.mark.parametrize("path", LADDER, ids=lambda p: p.stem)
def test_an_example_runs(path, debug, run):
    with ts.config.scope(debug=debug):
        agree(run(path))


@pytest.mark.row("CORE-24")
def test_an_example_is_a_program():
    done = subprocess.run([sys.executable, str(LADDER[2])], env=os.environ | {"PYTHONPATH": str(
        ROOT)}, cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    agree(done.stdout)


def test_the_race_is_reported_with_both_lines(run):
    text = (ROOT / "examples/08_debugging_a_race.py").read_text()
    copy, dot = (text[:text.index(s)].count("\n") + 1
                 for s in ("ts.tile.cp_async(", "acc = ts.tile.dot("))
    out = run(ROOT / "examples/08_debugging_a_race.py")
    assert f":{copy}  ts.tile.cp_async(panel, A[0:64, k:k+BK])" in out
    assert f":{dot}  acc = ts.tile.dot(panel, panel.T, acc)" in out
    assert f"behind line {dot}, before the loop comes back to line {copy}" in out


@pytest.mark.parametrize("module, name", KERNELS, ids=[name for _, name in KERNELS])
def test_kernels_can_be_imported(module, name):
    kernel = getattr(importlib.import_module(f"examples.{module}"), name)
    assert isinstance(kernel, Kernel) and kernel.__name__ == name
    if name in LINES:
        assert 0 < len(kernel.source.lines) <= LINES[name]  # the decorator counts too


@pytest.mark.parametrize("got", [1.0, np.nan])
def test_the_check_of_the_examples_can_fail(got, capsys):
    check = importlib.import_module("examples.arrays").check
    check("equal", ts.ones(3), np.ones(3), 0.0)
    with pytest.raises(SystemExit, match="above 0.1"):
        check("not equal", np.float32([got, 1.0]), np.array([2.0, 1.0]), 0.1)
    assert capsys.readouterr().out.split()[-1] == "WRONG"
