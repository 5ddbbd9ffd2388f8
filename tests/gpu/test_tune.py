"""Choices that are measured on a GPU: the command, and the products that take what it found."""

from __future__ import annotations

import pytest

from gpu_harness import require_gpu
from tessera import config, stdlib
from tessera.__main__ import main
from tessera.kernels.matmul_plan import card_at, plans_to_measure
from tessera.kernels.routine import find
from tessera.kernels.tuned_tables import TunedTable, forget_tables, kernels_hash, user_table
from tessera.numerics import bf16
from tessera.runtime.device import device
from tessera.tile.launch.compile_images import compile_images
from tessera.tile.launch.precompile import wanted_image
from tessera.tune.measure import launches_of

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
