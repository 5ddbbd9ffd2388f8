"""The corpora on the GPU: right programs leave what they leave under the interpreter, and wrong
ones give its errors. Races are not looked for there: that is what the interpreter is for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from corpus import Program
from gpu_harness import require_gpu
from kernels.corpus import algorithms, read
from tessera import config
from tessera.runtime.device import device
from tessera.tile.kernel.kernel import Kernel

require_gpu()

OUTSIDE = [p for p in read("racy") if p.code == "E_BOUNDS"]


def name_of(program: Program) -> str:
    return program.name.replace(" ", "-")


def numbers(names: dict[str, Any]) -> dict[str, np.ndarray]:
    """The arrays that a program holds in the end."""
    arrays = {n: np.asarray(v) for n, v in names.items() if isinstance(v, np.ndarray | ts.Tensor)}
    return {n: v.astype(np.float64) for n, v in arrays.items() if v.dtype.kind in "fiubV"}


@pytest.mark.parametrize("program", read("correct"), ids=name_of)
def test_a_correct_program(program, pytestconfig, capsys):
    seed = pytestconfig.option.seed
    with config.scope(device="cpu"):
        wanted = program.run(seed)
    printed = capsys.readouterr().out
    with config.scope(device="cuda"):
        got = program.run(seed)
        device().synchronize()
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(printed.splitlines())
    kernels = [v for v in got.values() if isinstance(v, Kernel)]
    assert kernels and all(k.images for k in kernels)  # they ran on the GPU
    there, here = numbers(got), numbers(wanted)
    assert there.keys() == here.keys()
    for name, want in here.items():
        # sums in another order: results of 16 bits may round to a neighbour
        rtol = 2.0**-7 if np.asarray(wanted[name]).dtype.itemsize == 2 else 1e-4
        np.testing.assert_allclose(there[name], want, rtol=rtol, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("program", algorithms(), ids=name_of)
def test_an_algorithm(program, debug, pytestconfig, monkeypatch):
    """Each compares its results with NumPy's of f64 itself: its arrays lie on the host."""
    run = Kernel.run

    def run_there(kernel, launch, args, kwargs, stream=None, target=None, key=None):
        return run(kernel, launch, args, kwargs, stream, "cuda", key)

    monkeypatch.setattr(Kernel, "run", run_there)
    with config.scope(device="cpu", debug=debug):
        names = program.run(pytestconfig.option.seed)
        device().synchronize()
    kernels = [v for v in names.values() if isinstance(v, Kernel)]
    assert kernels and all(k.images for k in kernels)  # they ran on the GPU


def check(program: Program, seed: int) -> None:
    with config.scope(device="cuda", debug=True), pytest.raises(ts.TesseraError) as info:
        program.run(seed)
        device().synchronize()
    error = info.value
    assert error.code == program.code, str(error)
    assert error.where is not None and error.where.file == program.path, str(error)
    assert error.where.line == program.line, str(error)


@pytest.mark.row("DBG-11", "TILE-20")
@pytest.mark.parametrize("program", OUTSIDE, ids=name_of)
def test_an_index_outside(program, pytestconfig):
    """By a checked build, at the user's line."""
    check(program, pytestconfig.option.seed)


@pytest.mark.row("KERN-23")
@pytest.mark.parametrize("program", read("wrong"), ids=name_of)
def test_a_wrong_program(program, pytestconfig):
    check(program, pytestconfig.option.seed)
