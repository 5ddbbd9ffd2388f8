"""Choices that are measured on a GPU: the command, and the products that take what it found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import tessera as ts
from gpu_harness import require_gpu
from tessera import config, stdlib
from tessera.__main__ import main
from tessera.graph.cuda.passes import place_blocks
from tessera.kernels.cards import card_at
from tessera.kernels.matmul_plan import plans_to_measure, read_choice
from tessera.kernels.routine import find
from tessera.kernels.tuned_tables import (
    TunedTable,
    TunedTables,
    forget_tables,
    kernels_hash,
    user_table,
)
from tessera.numerics import bf16
from tessera.runtime.device import device
from tessera.tile.launch.compile_images import compile_images
from tessera.tile.launch.precompile import wanted_image
from tessera.tune.measure import launches_of
from tolerance import assert_close

require_gpu()
torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def own_cache(tmp_path):
    with config.scope(cache_dir=tmp_path):
        forget_tables()
        yield
    forget_tables()


@pytest.fixture
def hopper():
    if "bf16" not in card_at(0).formats:
        pytest.skip("products of this GPU have no choice")


@pytest.mark.alone
@pytest.mark.row("STD-07")
def test_tuning_writes_times_of_the_models_choice_and_of_others(hopper, capsys):
    """Only what gains 2 % is kept, so the table may be empty; what is said never is."""
    assert main(["tune", "gemm", "--shapes", "768x768x768", "--ways", "nn", "--choices", "4"]) == 0
    said = capsys.readouterr().out
    assert "1 of 1 problems measured" in said and "left out" not in said
    found = TunedTable.read(user_table(device().name))
    assert found.multiprocessors == device().multiprocessors
    assert found.kernels == {"gemm": kernels_hash("gemm")}
    for entry in found.entries["gemm"].values():
        assert all(1 < us < 100 for us in entry.us.values())


@pytest.mark.parametrize("way", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("extents", [(768, 768, 768), (16, 4096, 4096), (512, 512, 16384),
                                     (1000, 1000, 1000)], ids=str)
def test_every_choice_gives_the_product(extents, way, hopper):
    (M, N, K), gemm = extents, find("gemm")
    a = torch.randn((M, K) if way[0] == "n" else (K, M), device="cuda").bfloat16()
    b = torch.randn((K, N) if way[1] == "n" else (N, K), device="cuda").bfloat16()
    want = (a.T if way[0] == "t" else a).double() @ (b.T if way[1] == "t" else b).double()
    plans = plans_to_measure(bf16, M, N, K, way, card_at(0), 8)
    how = {"transpose_a": way[0] == "t", "transpose_b": way[1] == "t"}
    calls = {text: launches_of(gemm, (a, b), how, plan) for text, plan in plans.items()}
    compile_images([wanted_image(k, k.bind(args, constants))
                    for launches, _ in calls.values() for k, args, constants in launches])
    for text, (launches, out) in calls.items():
        out.fill_(float("nan"))
        for kernel, args, constants in launches:
            kernel(*args, **constants)
        assert (out.double() - want).norm() <= 2.0**-8 * want.norm(), text


@pytest.mark.parametrize("choice", ["128x256 cluster=2", "192x128 cluster=2", "64x128 cluster=2",
                                    "128x128 parts=3", "128x256 parts=2 cluster=2"])
@pytest.mark.parametrize("M", [1152, 1536])
def test_functions_in_blocks_that_a_table_chooses(choice, M, hopper, rng, monkeypatch):
    """Pairs of blocks too, of which the last may be alone; with a bias and without."""
    def measured(model, extents, dtype, layout, card, allowed):
        return replace(read_choice(choice, extents), tuned="it was said so")

    def card_beside(*_):
        return replace(card_at(0), tuned=TunedTables(()))

    monkeypatch.setattr(place_blocks, "tuned_blocks", measured)
    monkeypatch.setattr(place_blocks, "card_beside", card_beside)
    x, w, b = (rng.standard_normal(s).astype(np.float32) for s in ((M, 1024), (1024, 768), (768,)))
    x, w = (v.astype(bf16.numpy).astype(np.float32) for v in (x, w))
    dx, dw, db = (ts.tensor(v, t).to("cuda") for v, t in ((x, "bf16"), (w, "bf16"), (b, "f32")))
    want = x.astype(np.float64) @ w.astype(np.float64)
    for fn, args, expected in (
            (lambda x, w, b: ts.relu(ts.gemm(x, w, b)), (dx, dw, db), np.maximum(want + b, 0)),
            (lambda x, w: ts.cast(x @ w, "f32"), (dx, dw), want)):
        f = ts.jit(fn)
        assert_close(f(*args).numpy(), expected, "bf16", scale=1.0)
        assert any("it was said so" in n for m in f.schedule().matmuls for n in m.notes)


def test_a_shipped_table_is_taken():
    name, tuned = device().name, card_at(0).tuned
    if tuned is None:
        pytest.skip(f"the package has no table for {name}")
    problem, entry = next((p, e) for p, e in tuned.tables[-1].entries["gemm"].items()
                          if p.startswith("bf16") and "to" not in p and "_" not in p)
    _, way, extents = problem.split()
    M, N, K = map(int, extents.split("x"))
    a = torch.randn((M, K) if way[0] == "n" else (K, M), device="cuda").bfloat16()
    b = torch.randn((K, N) if way[1] == "n" else (N, K), device="cuda").bfloat16()
    stdlib.gemm(a, b, transpose_a=way[0] == "t", transpose_b=way[1] == "t")
    assert f"from the table, measured on {name} on {entry.date}" in \
        stdlib.gemm.inspect_ir("schedule")
