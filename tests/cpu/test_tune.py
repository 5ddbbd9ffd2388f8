"""Tables of measured choices: what is looked up, what is not used, the command that writes them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import tessera as ts
from fake_gpu import Torch
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from tessera import bf16, config, stdlib
from tessera.__main__ import main
from tessera.errors import ArgumentError
from tessera.graph.cuda.passes import library_ops, place_blocks
from tessera.kernels import tuned_tables
from tessera.kernels.attention_plan import AttentionBlock, blocks_to_measure, tuned_attention
from tessera.kernels.cards import Card, card_at
from tessera.kernels.matmul_blocks import (
    BLOCK_US,
    FITTED_US,
    PAIRS_US,
    SMALL_US,
    TRANSPOSED_US,
    MatmulExtents,
)
from tessera.kernels.matmul_plan import plan_product, plans_to_measure, read_choice
from tessera.kernels.routine import find
from tessera.kernels.tuned_tables import (
    SHIPPED,
    TunedEntry,
    TunedTable,
    TunedTables,
    file_name,
    forget_tables,
    kernels_hash,
    tables_of,
    user_table,
)
from tessera.tile.kernel.kernel import Kernel
from tessera.tile.tuning.gpus import gpu as gpu_named
from tessera.tile.tuning.tuned_schedules import TuningCacheWarning
from tessera.tune import command, measure
from tessera.tune.tunable import TUNABLES, TuningProblem, tunable
from tolerance import assert_close

CARD = "NVIDIA H100 80GB HBM3"
H100 = Card(132, 3350, frozenset({"bf16", "f16", "fp8_e4m3"}))
CUBE = "bf16 nn 1536x1536x1536"


@pytest.fixture(autouse=True)
def own_cache(tmp_path):
    """A folder without tables, which are read anew."""
    with config.scope(cache_dir=tmp_path):
        forget_tables()
        yield
    forget_tables()


def table(us: dict[str, float], problem: str = CUBE, card: str = CARD, multiprocessors: int = 132,
          kernels: str = "") -> TunedTable:
    return TunedTable(card, multiprocessors, {"gemm": kernels or kernels_hash("gemm")},
                      {"gemm": {problem: TunedEntry("2026-11-26", us)}})


def planned(*tables: TunedTable, layout: str = "nn", N: int = 1536):
    card = replace(H100, tuned=TunedTables(tables) if tables else None)
    return plan_product(bf16, 1536, N, 1536, layout, card)


# What the model chooses for the cube.
MODEL = next(iter(plans_to_measure(bf16, 1536, 1536, 1536, "nn", H100, 1)))


# --- lookup ---------------------------------------------------------------------------------------
def test_the_model_decides_where_no_table_does():
    p = planned()
    assert f"{p.rows}x{p.columns}" == MODEL.split()[0] and "by the estimate" in p.why


def test_a_choice_that_was_measured_goes_before_the_models():
    p = planned(table({MODEL: 14.0, "64x128 parts=2 cluster=2": 11.5, "64x64": 13.0}))
    assert (p.rows, p.columns, p.parts, p.cluster, p.depth) == (64, 128, 2, 2, 768)
    assert "from the table, measured on NVIDIA H100 80GB HBM3 on 2026-11-26: 11.50 us beside " \
        "14.00 of the model's " + MODEL in p.why and "2 parts of K" in p.why
    assert not p.dependent and planned(table({MODEL: 14.0, "64x64": 9.9})).dependent


def test_an_entry_is_of_one_problem():
    quick = table({MODEL: 14.0, "64x64": 9.0})
    assert planned(quick).rows == 64
    for other in (planned(quick, layout="tn"), planned(quick, N=1600)):
        assert "by the estimate" in other.why
    card = replace(H100, tuned=TunedTables((quick,)))
    for how in ({"result_bits": 32}, {"free": False}):
        assert "table" not in plan_product(bf16, 1536, 1536, 1536, "nn", card, **how).why


def test_what_hardly_gains_is_left_to_the_model():
    assert "by the estimate" in planned(table({MODEL: 10.0, "64x64": 9.81})).why
    assert "table" in planned(table({MODEL: 10.0, "64x64": 9.79})).why


def test_an_entry_that_did_not_measure_the_models_choice_is_not_used():
    assert "by the estimate" in planned(table({"128x128": 14.0, "64x64": 9.0})).why


def test_an_entry_of_another_version_of_the_kernels_is_not_used():
    assert "by the estimate" in planned(table({MODEL: 14.0, "64x64": 9.0}, kernels="0" * 16)).why


def test_the_first_table_with_an_entry_decides():
    mine, theirs = table({MODEL: 9.0, "64x64": 14.0}), table({MODEL: 14.0, "64x64": 9.0})
    assert "by the estimate" in planned(mine, theirs).why
    assert "table" in planned(theirs, mine).why
    stale = table({MODEL: 9.0, "64x64": 14.0}, kernels="0" * 16)
    assert "table" in planned(stale, theirs).why


def test_tables_are_those_of_the_card(tmp_path):
    path = user_table(CARD)
    assert path == tmp_path / "tuned" / "nvidia_h100_80gb_hbm3.json"
    mine = table({MODEL: 14.0, "64x64": 9.0})
    mine.write(path)
    assert tables_of(CARD, 132).tables[0] == mine
    assert mine not in getattr(tables_of(CARD, 114), "tables", ())
    assert tables_of("NVIDIA H300", 132) is None
    with config.scope(tuned=False):
        assert tables_of(CARD, 132) is None
    forget_tables()
    table({MODEL: 14.0}, card="NVIDIA H300").write(path)  # a file that was copied
    assert all(t.card == CARD for t in getattr(tables_of(CARD, 132), "tables", ()))


@pytest.mark.parametrize("text, words", [
    ("{", "is no JSON"), ("[]", "got list"),
    ('{"schema": "tessera.tuned", "version": 2, "card": "", "multiprocessors": 1, "routines": {}}',
     "version 2"),
    ('{"schema": "tessera.tuned", "version": 1, "card": "", "multiprocessors": 1, "routines": '
     '{"gemm": {"kernels": "", "entries": {"a": {"date": "", "us": {"64x64": -1}}}}}}',
     "gemm, a: times are numbers above 0"),
    ('{"schema": "tessera.tuned", "version": 1, "card": "", "multiprocessors": 1, "routines": '
     '{"gemm": {"entries": {}}}}', "gemm: got"),
])
def test_a_damaged_file_is_a_warning(text, words):
    path = user_table("NVIDIA H300")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ArgumentError, match=words):
        TunedTable.read(path)
    with pytest.warns(TuningCacheWarning, match=words):
        assert tables_of("NVIDIA H300", 132) is None


def test_a_file_says_what_was_written(tmp_path):
    entries = {"b": TunedEntry("2026-11-26", {"64x64": 9.0, MODEL: 14.5}),
               "a": TunedEntry("2026-11-25", {MODEL: 3.0})}
    made = TunedTable(CARD, 132).with_entries("gemm", entries)
    made.write(tmp_path / "t.json")
    assert TunedTable.read(tmp_path / "t.json") == made
    lines = (tmp_path / "t.json").read_text().splitlines()
    assert [line for line in lines if '"b"' in line] == [
        '   "b": {"date": "2026-11-26", "us": {"64x64": 9.0, "' + MODEL + '": 14.5}}']
    less = made.with_entries("gemm", {"a": None})
    assert [*less.entries["gemm"]] == ["b"]
    old = replace(made, kernels={"gemm": "0" * 16})
    assert [*old.with_entries("gemm", {"c": entries["a"]}).entries["gemm"]] == ["c"]


def test_the_hash_is_of_what_kernels_compute(monkeypatch):
    def hashed() -> str:
        kernels_hash.cache_clear()
        return kernels_hash("gemm")

    first, tree = hashed(), stdlib.gemm.kernels["gemm_whole"].source.tree
    doc = tree.body[0].value
    monkeypatch.setattr(doc, "value", "Another docstring.")
    assert hashed() == first
    called = next(k for n, k in stdlib.gemm.fn.__globals__.items() if n == "product")
    monkeypatch.setattr(called.source.tree, "body", called.source.tree.body[:-1])
    assert hashed() != first
    monkeypatch.undo()
    assert hashed() == first


# --- choices --------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("extents", [(1536, 1536, 1536), (16, 8192, 8192), (768, 768, 32768),
                                     (1000, 1000, 1000)], ids=str)
def test_plans_begin_with_the_models_and_are_spelled(extents, layout):
    plans = plans_to_measure(bf16, *extents, layout, H100, 6)
    texts = [*plans]
    assert plans[texts[0]] == plan_product(bf16, *extents, layout, H100)
    assert 6 <= len(plans) <= 8 and any("cluster=2" in t for t in texts)
    for text, p in plans.items():
        b = read_choice(text, MatmulExtents(*extents, 16, 16))
        assert b.choice == text and (b.rows, b.columns, b.parts, b.depth, b.swapped, b.cluster) == (
            p.rows, p.columns, p.parts, p.depth, p.swapped, p.cluster)
        known = {**BLOCK_US, **PAIRS_US, **({**TRANSPOSED_US, **FITTED_US, **SMALL_US} if p.swapped
                                              else {})}
        assert p.cluster == 2 or (p.rows, p.columns) not in PAIRS_US
        assert ((p.columns, p.rows) if p.swapped else (p.rows, p.columns)) in known
        assert (p.parts - 1) * p.depth < extents[2]


@pytest.mark.parametrize("extents, layout, choice", [
    *(((2632, 9176, 4952), w, "240x128 swapped cluster=2") for w in ("nt", "nn", "tn", "tt")),
    ((4097, 4097, 4097), "nn", "208x128 swapped"), ((4096, 4096, 4096), "nt", "128x256 cluster=2"),
    ((6144, 6144, 6144), "tn", "128x256 cluster=2")], ids=str)
def test_columns_are_as_many_as_leave_less_of_the_last_wave_empty(extents, layout, choice):
    """2632 x 9176: 72 x 11 blocks of 128 x 240 are six for each of 132 multiprocessors."""
    assert next(iter(plans_to_measure(bf16, *extents, layout, H100, 2))) == choice


def test_what_is_no_choice_is_an_error():
    for text in ("128", "128x", "128x64 parts=2 swapped", "128x64 fast"):
        with pytest.raises(ArgumentError, match="no choice of blocks"):
            read_choice(text, MatmulExtents(64, 64, 64, 16, 16))


# --- the package's tables -------------------------------------------------------------------------
@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda p: p.stem)
@pytest.mark.row("STD-07")
def test_shipped_tables_are_of_these_kernels(path):
    found = TunedTable.read(path)
    assert path.name == file_name(found.card) and path.read_text() == found.text()
    for name, entries in found.entries.items():
        assert found.kernels[name] == kernels_hash(name), (
            f"the kernels of {name} are not those that were measured for {path.name}: run "
            f"`python -m tessera tune {name} --out tessera/kernels/tables` on that card, or take "
            "its entries out")
        problems = {TUNABLES[name].key(p, H100) for t in TUNABLES[name].types
                    for p in TUNABLES[name].problems(types=[t])}
        assert entries and set(entries) <= problems


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda p: p.stem)
@pytest.mark.row("STD-07")
def test_products_take_what_shipped_tables_say(path):
    """Where the model still makes a choice that was measured."""
    found = TunedTable.read(path)
    card = replace(H100, memory_gbps=gpu_named(found.card).memory_gbps,
                   tuned=TunedTables((found,)))
    taken, gemm = 0, TUNABLES["gemm"]
    for p in gemm.problems(types=["bf16"]):
        entry = found.entries["gemm"].get(gemm.key(p, card))
        plans = {} if entry is None else gemm.trials(p, card, 1)
        best = entry.best(next(iter(plans))) if plans else None
        if best is not None:
            assert f"from the table, measured on {found.card}" in plans[best].why
            taken += 1
    assert taken


# --- on a GPU -------------------------------------------------------------------------------------
def fresh(routine):
    kernels = {n: Kernel(k.fn, grid=k.grid) for n, k in routine.kernels.items()}
    return type(routine)(routine.fn, kernels, routine.record)


class FakeClock:
    """Times by choice; what is not told takes 10 us."""

    us: dict[str, float] = {}

    def __init__(self, on):
        pass

    def times(self, runs, guess_us):
        assert guess_us > 0
        return {name: self.us.get(name, 10.0) for name in runs}


@pytest.fixture
def clock(gpu, monkeypatch):
    monkeypatch.setattr(measure, "find", lambda name: fresh(find(name)))
    monkeypatch.setattr(command, "GraphClock", FakeClock)
    monkeypatch.setattr(FakeClock, "us", {})
    return FakeClock


ARGS = ["tune", "gemm", "--shapes", "40x80x2048", "--ways", "nt"]
KEY = "bf16 nt 40x80x2048"


def choices() -> list[str]:
    """Those that are measured, the model's first."""
    return [*plans_to_measure(bf16, 40, 80, 2048, "nt", card_at(0), command.CHOICES)]


def entries(path=None):
    return TunedTable.read(path or user_table("fake")).entries["gemm"]


def test_a_tuned_product_is_the_same_product(clock, rng, capsys):
    """The command finds what its clock says is quick; the next call takes it and says so."""
    model, *others = choices()
    quick = next(t for t in others if "parts" in t and "cluster" not in t)
    clock.us = {quick: 7.5}
    assert main([*ARGS, "--types", "f16"]) == 0
    said = capsys.readouterr().out
    assert f"{model} 10.00 us, {quick} 7.50 us, 33.3% quicker" in said
    assert "in 1 another choice" in said and "left out" not in said
    assert entries()[KEY.replace("bf16", "f16")].us == {
        t: clock.us.get(t, 10.0) for t in (model, *others)}
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((40, 2048), (80, 2048)))
    gemm = fresh(stdlib.gemm)
    got = gemm(Torch(a), Torch(b), transpose_b=True)
    assert f"7.50 us beside 10.00 of the model's {model}" in gemm.inspect_ir("schedule")
    assert "parts of K" in gemm.inspect_ir("schedule")
    want = a.astype(np.float64) @ b.astype(np.float64).T
    assert_close(got.x, want, "f16", n=2048)
    with config.scope(tuned=False):
        gemm = fresh(stdlib.gemm)
        gemm(Torch(a), Torch(b), transpose_b=True)
        assert "by the estimate" in gemm.inspect_ir("schedule")


def test_each_choice_has_the_gpu_for_a_while_where_that_is_asked(clock, monkeypatch):
    quick = choices()[1]

    class InARow(FakeClock):
        us = {quick: 8.0}

        def __init__(self, on, settle_ms, window_ms, rounds):
            assert settle_ms + window_ms > 100 and rounds > 1

    monkeypatch.setattr(command, "SustainedClock", InARow)
    assert main([*ARGS, "--sustained"]) == 0 and entries()[KEY].us[quick] == 8.0
    assert main(ARGS) == 0 and entries() == {}


def test_what_is_not_quicker_is_not_written(clock):
    clock.us = {choices()[1]: 9.9}
    assert main(ARGS) == 0 and entries() == {}


def test_tuning_again_replaces_and_may_take_back(clock):
    clock.us = dict.fromkeys(choices()[1:], 7.0)
    assert main([*ARGS[:4], "40x80x1024", *ARGS[4:]]) == 0
    assert [*entries()] == ["bf16 nt 40x80x1024", KEY]
    clock.us = {}
    assert main(ARGS) == 0 and [*entries()] == ["bf16 nt 40x80x1024"]


def test_an_entry_for_the_model_goes_before_the_packages(clock, monkeypatch, tmp_path):
    monkeypatch.setattr(tuned_tables, "SHIPPED", tmp_path / "shipped")
    model, quick, *_ = choices()
    clock.us = {quick: 7.0}
    assert main([*ARGS, "--out", str(tmp_path / "shipped")]) == 0
    assert [*entries(tmp_path / "shipped" / "fake.json")] == [KEY]
    assert not user_table("fake").exists()
    clock.us = {}
    assert main(ARGS) == 0  # here the model's choice is as quick
    assert entries()[KEY].us[quick] == 10.0
    assert card_at(0).tuned.find("gemm", KEY, model) is None
    user_table("fake").unlink()
    forget_tables()
    assert card_at(0).tuned.find("gemm", KEY, model).choice == quick
    assert main([*ARGS, "--out", str(tmp_path / "shipped")]) == 0  # the package's own goes
    assert entries(tmp_path / "shipped" / "fake.json") == {}


def test_results_of_odd_rows_are_tried_transposed():
    texts = {N: [*plans_to_measure(bf16, 4096, N, 4096, "nn", H100, 12)] for N in (4096, 4097)}
    assert any("swapped" in t and "x256" not in t for t in texts[4097])
    assert not any(t.startswith("128x") and "swapped" in t for t in texts[4096])
    assert any(t.startswith("128x") and "swapped" in t for t in texts[4097])


def test_a_choice_with_wrong_results_is_left_out(clock, monkeypatch, capsys):
    results = iter([1.0, 1.0, np.nan] + [1.0] * 20)
    monkeypatch.setattr(measure.Measurement, "_result", lambda *a: np.full(4, next(results)))
    main(ARGS)
    assert "left out: its result is off by inf of the model's" in capsys.readouterr().out


def test_operands_are_normal_numbers_that_repeat(gpu, monkeypatch):
    from tessera.numerics import decode
    from tessera.runtime import normal_numbers
    from tessera.runtime.device import device

    monkeypatch.setattr(normal_numbers, "DRAWN", 1000)
    a, b = measure.Operands(device()).of(tunable("gemm"), TuningProblem("bf16", "nt", (70, 30, 50)))
    assert (a.shape, b.shape) == ((70, 50), (30, 50))
    codes = np.empty(3500, np.uint16)
    a.owner.held[0, "bf16"].read(codes)
    x = np.asarray(decode(codes.view(bf16.numpy), bf16), np.float64)
    np.testing.assert_array_equal(x[:1000], x[1000:2000])
    np.testing.assert_array_equal(x[:500], x[3000:])
    assert 0.8 < x[:1000].std() < 1.2 and abs(x[:1000].mean()) < 0.2


def test_attention_takes_the_block_that_was_measured(clock, rng, capsys):
    clock.us = {"64x96": 7.5}
    assert main(["tune", "flash_attention_2", "--shapes", "4x70x32", "--types", "f16"]) == 0
    said = capsys.readouterr().out
    assert "2 of 2 problems measured, in 2 another" in said and "left out" not in said
    found = TunedTable.read(user_table("fake")).entries["flash_attention_2"]
    assert [*found] == ["f16 causal 4x70x32", "f16 full 4x70x32"]
    q, k, v = (rng.standard_normal((2, 2, 70, 32)).astype(np.float16) for _ in range(3))
    attention = fresh(stdlib.flash_attention_2)
    for causal in (False, True):
        got = attention(Torch(q), Torch(k), Torch(v), causal=causal)
        assert "blocks of 64 queries and 96 keys: from the table" in attention.inspect_ir(
            "schedule")
        wide = (x.astype(np.float64) for x in (q, k, v))
        assert_close(got.x, attention.record.reference(*wide, causal=causal), "f16", n=70)
    attention(*(Torch(x[:, :, :40]) for x in (q, k, v)))  # other extents
    assert "what registers and shared memory hold" in attention.inspect_ir("schedule")
    attention(Torch(q), Torch(k), Torch(v), window=9)
    assert "table" not in attention.inspect_ir("schedule")
    attention(*(Torch(x[:, :, :n]) for x, n in ((q, 1), (k, 70), (v, 70))))  # of one query
    assert "blocks of" not in attention.inspect_ir("schedule")


def test_blocks_of_attention_fit():
    """Of an H100: 64 KiB of registers, 227 KiB of shared memory."""
    for D in (64, 128, 256):
        model, *others = blocks_to_measure(AttentionBlock(128, 64), D, 227 << 10)
        assert model.choice == "128x64" and model not in others and len(others) > 2
        for b in others:
            assert (b.rows + 4 * b.keys) * D * 2 <= 227 << 10
            warpgroups = b.rows // 64
            assert warpgroups * 128 * (D // 2 + 3 * b.keys // 4) < 0.8 * (1 << 16)
    with pytest.raises(ArgumentError, match="is no block of attention"):
        tuned_attention(AttentionBlock(128, 64), "p", TunedTables((TunedTable(
            CARD, 132, {"flash_attention_2": kernels_hash("flash_attention_2")},
            {"flash_attention_2": {"p": TunedEntry("", {"128x64": 2.0, "wide": 1.0})}}),)))


# --- tables of several GPUs -----------------------------------------------------------------------
def test_tables_of_several_gpus_become_one(tmp_path, capsys, monkeypatch):
    """Of a card each; what a later file says goes before. No GPU is asked for."""
    monkeypatch.setattr(command, "has_gpu", lambda: pytest.fail("asked"))
    parts = {"a": table({MODEL: 14.0, "64x64": 9.0}), "b": table({MODEL: 3.0}, "bf16 nt 64x64x64"),
             "c": table({MODEL: 15.0, "64x64": 8.0}), "d": table({MODEL: 7.0}, card="another")}
    for name, part in parts.items():
        part.write(tmp_path / f"{name}.json")
    files = [str(tmp_path / f"{name}.json") for name in parts]
    assert main(["tune", "--merge", *files, "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.count("1 entries written") == 4
    assert entries(tmp_path / "out" / file_name(CARD)) == {
        "bf16 nt 64x64x64": parts["b"].entries["gemm"]["bf16 nt 64x64x64"],
        CUBE: parts["c"].entries["gemm"][CUBE]}
    assert entries(tmp_path / "out" / "another.json")[CUBE].us == {MODEL: 7.0}
    assert main(["tune", "--merge", files[0]]) == 0
    assert tables_of(CARD, 132).find("gemm", CUBE, MODEL).choice == "64x64"


def test_entries_of_other_kernels_are_not_merged(tmp_path, capsys):
    table({MODEL: 14.0}, kernels="0" * 16).write(tmp_path / "old.json")
    assert main(["tune", "--merge", str(tmp_path / "old.json")]) == 1
    assert "was measured with other kernels of gemm than these" in capsys.readouterr().err
    assert not user_table(CARD).exists()


# --- what is said ---------------------------------------------------------------------------------
@pytest.mark.parametrize("args, words", [
    (["conv"], "there is nothing to tune named 'conv'"),
    (["conv"], "hint: known: gemm, flash_attention_2"),
    (["gem"], "did you mean 'gemm'?"),
    (["gemm", "--shapes", "12x3"], "'12x3' is no shape of gemm"),
    (["gemm", "--types", "f64"], "gemm is not tuned for the type 'f64'"),
    (["gemm", "--ways", "xx"], "gemm is not tuned for the way 'xx'"),
    (["gemm", "--choices", "1"], "--choices is 1"),
    (["gemm"], "there is none here"),
    (["--merge", "none.json"], "there is no file none.json"),
])
def test_what_is_wrong_is_said(args, words, capsys, monkeypatch):
    monkeypatch.setattr(command, "has_gpu", lambda: False)
    assert main(["tune", *args]) == 1
    assert words in capsys.readouterr().err


def test_a_file_of_another_card_is_not_overwritten(clock, capsys):
    table({MODEL: 1.0}).write(user_table("fake"))
    assert main(["tune", "gemm", "--shapes", "40x80x256"]) == 1
    assert f"is of {CARD} with 132" in capsys.readouterr().err


def test_time_that_is_over_begins_no_problem(clock, capsys):
    assert main(["tune", "gemm", "--shapes", "40x80x256", "--seconds", "0"]) == 0
    assert "0 of 4 problems measured" in capsys.readouterr().out


def test_every_tunable_is_a_routine():
    for name, t in TUNABLES.items():
        assert find(name) and t.problems() and t.flops(t.problems()[0]) > 0


# --- in compiled functions ------------------------------------------------------------------------
def product(us: dict[str, float] | None, monkeypatch, key: str, behind):
    """The launch of a product with what follows it."""
    found = None if us is None else TunedTables((table(us, key),))
    monkeypatch.setattr(library_ops, "card_for", lambda chip: replace(H100, tuned=found))
    x, w, b = (ts.zeros(s, dtype=t) for s, t in (((2048, 1024), "bf16"), ((1024, 768), "bf16"),
                                                 ((768,), "f32")))
    plan = ts.jit(behind).schedule(x, w, b, target="sm_90a")
    (launch,) = plan.matmuls
    return launch


def products(x, w):
    """Rounded to bf16, as these operands have it."""
    return ts.cast(x, "bf16 @accum(f32)") @ ts.cast(w, "bf16 @accum(f32)")


BEHIND = {"wide": (lambda x, w, b: ts.relu(ts.gemm(x, w, b)), " to 32 bits"),
          "rounded": (lambda x, w, b: ts.cast(ts.relu(ts.gemm(x, w, b)), "bf16"), ""),
          "rounded first": (lambda x, w, b: ts.cast(products(x, w), "f32") * 0.3 + b, ""),
          "both": (lambda x, w, b: [f(ts.gemm(x, w, b)) for f in (
              ts.relu, lambda y: ts.cast(y, "bf16"))], " to 32 bits")}


@pytest.mark.parametrize("name", BEHIND)
def test_functions_take_the_quickest_that_a_fused_product_may_have(name, monkeypatch):
    """Not a block of its transpose, nor one of 160 columns; of results as they leave."""
    behind, bits = BEHIND[name]
    plain = product(None, monkeypatch, "", behind)
    extents = MatmulExtents(2048, 768, 1024, 16, 32)
    model = place_blocks.or_transposed(
        library_ops.choose_blocks(extents, library_ops.BLOCKS, True, H100), extents, "nn", H100,
        32 if bits else 16).choice
    us = {"192x160": 9.0, "128x128 swapped": 8.0, "64x64": 11.0, "128x64 cluster=2": 10.5,
          model: 14.0}
    launch = product(us, monkeypatch, "bf16 nn 2048x768x1024" + bits, behind)
    said = "blocks of 128 x 64: from the table, measured on NVIDIA H100 80GB HBM3 on 2026-11-26"
    assert any(said in n and f"the model's {model}" in n for n in launch.notes)
    assert launch.notes != plain.notes and any("in pairs" in n for n in launch.notes)
    other = "" if bits else " to 32 bits"
    for key in ("bf16 nt 2048x768x1024" + bits, "bf16 nn 2048x768x1024" + other):
        assert product(us, monkeypatch, key, behind).notes == plain.notes
