"""Sentinels on a GPU: what kernels count there, whom it is blamed on; training is silent."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from sentinel_cases import (
    CASES,
    INJECTED,
    QUIET,
    casts,
    check_blamed,
    check_injected,
    check_quiet,
    clamps,
    logs,
)
from tessera import Tensor, f16, f32, fp8_e4m3

tile = ts.tile
require_gpu()


pytestmark = pytest.mark.usefixtures("no_findings")


@ts.kernel
def products(a: Tensor["M", "K", f16], b: Tensor["K", "N", f16], c: Tensor["M", "N", f16]):
    total = tile.full((64, 64), 0.0, f32)
    for k in range(0, K, 64):  # noqa: F821
        total = tile.dot(tile.load(a[tile_m:tile_m + 64, k:k + 64]),  # noqa: F821
                         tile.load(b[k:k + 64, tile_n:tile_n + 64]), total)  # noqa: F821
    c[tile_m:tile_m + 64, tile_n:tile_n + 64] = tile.cast(total, f16)  # noqa: F821


def device(x, numeric=None):
    """On the GPU."""
    x = ts.tensor(np.asarray(x)) if numeric is None else ts.tensor(np.asarray(x), numeric)
    return ts.jit(lambda x: x, target="cuda")(x)


def ones(n, **elements):
    x = np.ones(n, np.float32)
    for at, value in elements.items():
        x[int(at[1:])] = value
    return x


# --- kernels --------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [32, 37, 5000])
def test_a_kernel_counts_elements_once(n):
    x, y = device(ones(n, _21=-1.0, _30=0.0, _3=-4.0)), device(np.zeros(n, np.float32))
    with ts.debug.numerics("flag"):
        for _ in range(2):
            logs[-(-n // 16)](x, y)
        found = ts.debug.flags()
    assert (found.nan, found.inf) == (4, 2)
    assert found.first.index == (3,) and "# stored" in found.first.where.text
    logs[-(-n // 16)](x, y)
    assert not ts.debug.flags()


def test_raise_names_the_op_of_the_kernel():
    x, y = device(ones(64, _21=-1.0)), device(np.zeros(64, np.float32))
    with ts.debug.numerics("raise"):
        for _ in range(2):
            with pytest.raises(ts.NumericsError, match="log in kernel logs: nan") as e:
                logs[4](x, y)
            assert "# stored" in e.value.where.text
        logs[4](device(ones(64)), y)


def test_a_cast_that_overflows():
    x = device(ones(64, _5=40000.0, _6=-40000.0))
    with ts.debug.numerics("flag"):
        casts[4](x, device(np.zeros(64, np.float16)))
        found = ts.debug.flags()
        assert found.overflow == 2 and found.first.kind == "inf" and found.first.index == (5,)
        assert "# stored" in found.first.where.text
        clamps[4](x, device(np.zeros(64, np.float32), fp8_e4m3))
        found = ts.debug.flags()
        assert found.overflow == 2 and found.first is None  # a policy, counted


@pytest.mark.parametrize("to", ["int8", "uint8", "int4", "int32", "fp4_e2m1"])
def test_functions_count_what_saturates(to, rng):
    """As many elements as on the CPU; a NaN that becomes 0 is blamed."""
    x = (rng.standard_normal((64, 128)) * 1.2 * float(ts.as_type(to).dtype.max)).astype(np.float32)
    f = ts.jit(lambda x: ts.cast(x * 1.5, to))
    counts = []
    for on in ("cpu", "cuda"):
        with ts.debug.numerics("flag"):
            f(ts.tensor(x).to(on))
            found = ts.debug.flags()
            assert found.first is None
            counts.append(found.overflow)
    assert counts[0] == counts[1] > 0
    x[5, 7] = np.nan
    with ts.debug.numerics("raise"), pytest.raises(ts.NumericsError, match="nan"):
        f(ts.tensor(x).to("cuda"))


def test_a_warp_specialised_matmul_counts_in_its_epilogue():
    a = np.ones((256, 256), np.float16)
    a[100, 3] = 60000.0
    b, c = np.ones((256, 256), np.float16), np.zeros((256, 256), np.float16)
    b[3] = 2.0
    with ts.debug.numerics("flag"):
        products(device(a), device(b), device(c))
        found = ts.debug.flags()
    assert found.overflow == 256 and found.first.index == (100, 0)


# --- graph functions ------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CASES)
def test_a_bad_value_is_blamed_as_on_the_cpu(name, rng):
    check_blamed(name, rng, operands=False)


@pytest.mark.row("DBG-02")
@pytest.mark.parametrize("at", [(0, 0), (13, 7), (63, 95)])
@pytest.mark.parametrize("name", INJECTED)
def test_a_chosen_step_and_element_is_blamed(name, at, rng):
    check_injected(name, "cuda", rng, at)


@pytest.mark.parametrize("name", QUIET)
def test_what_is_meant_is_silent(name, rng):
    check_quiet(name, rng)


@pytest.mark.parametrize("at", [(0, 0), (13, 7), (63, 95)])
@pytest.mark.parametrize("step", [1, 3])
def test_step_and_element(step, at):
    f = ts.jit(lambda x: ts.sum(ts.log(x) * 2.0, axis=-1), target="cuda", capture_graph=True)
    with ts.debug.numerics("raise"):
        for i in range(5):
            x = ts.ones((64, 96))
            if i == step:
                x[at] = -1.0
                with pytest.raises(ts.NumericsError, match="log: nan") as e:
                    f(x)
                assert f"at {list(at)}" in str(e.value) and "call " in str(e.value)
            else:
                f(x)


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3 @loss_scale(1024)"])
def test_training_is_silent(dtype, tmp_path, capsys, monkeypatch):
    """examples/train.py, masked and dropped out: 200 steps."""
    monkeypatch.syspath_prepend(str(Path(ts.__file__).parents[1] / "examples"))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    train, text = importlib.import_module("train"), tmp_path / "text.txt"
    text.write_bytes(b"tile tensor graph mesh policy kernel " * 4000)
    flags = ["--d", "64", "--layers", "2", "--heads", "2", "--T", "64", "--B", "8", "--sample",
             "0", "--data", str(text), "--target", "cuda", "--numerics", "raise"]
    assert train.main([*flags, "--steps", "200", "--dropout", "0.1", "--dtype", dtype, "--out",
                       str(tmp_path / "a")]) == 0, capsys.readouterr().err
    assert train.main([*flags, "--steps", "5", "--lr", "1e38", "--clip", "1e30", "--warmup", "0",
                       "--out", str(tmp_path / "b")]) == 1
    assert "E_NAN_INF" in capsys.readouterr().err
