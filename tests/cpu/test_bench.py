"""`python -m tessera bench step`: arithmetic, models, classes of kernels, the command itself."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import guide_tables
import tessera as ts
from cpu.test_lowering_profile import clock as clock
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowering_cases import apart as apart
from tessera.__main__ import main
from tessera.bench import command, measure
from tessera.bench.catalogue import FAMILIES, MODELS
from tessera.bench.differences import (
    TrainingTrace,
    compared,
    differences,
    first_step_text,
    losses_text,
    offsets_text,
    traced,
)
from tessera.bench.figures import distance, rate, slope, spread, table
from tessera.bench.kernel_classes import CLASSES, of_groups, of_torch, parts_of_matmuls
from tessera.bench.models.gpt2 import BF16, SPELLINGS, Spelling, linear
from tessera.bench.models.record import StepModel, batch, shapes_of, weights
from tessera.bench.models.step import first_state, training_step
from tessera.bench.our_step import OurStep
from tessera.bench.report import step_text
from tessera.graph import tree
from tessera.graph.cuda.levels import program_of
from tolerance import assert_close

EXTENTS: dict[str, dict[str, int]] = {
    "gpt2-124m": {"B": 2, "T": 16, "layers": 2, "d": 32, "heads": 2, "vocabulary": 80},
    "llama": {"B": 2, "T": 16, "layers": 2, "d": 64, "heads": 4, "kv_heads": 2, "hidden": 96,
              "vocabulary": 80},
    "train.py": {"B": 2, "T": 16, "layers": 2, "d": 32, "heads": 2},
    "gpt2-350m-fp8": {"B": 2, "T": 64, "layers": 2, "d": 64, "heads": 2, "vocabulary": 96}}


def small(name: str) -> StepModel:
    return MODELS[name].sized(**EXTENTS[name])


# --- arithmetic -------------------------------------------------------------------------------
def test_rates_are_of_the_median() -> None:
    made = rate(2e12, 8192, [10.0, 8.0, 50.0], 1e15)
    assert made == {"step_ms": 10.0, "least_ms": 8.0, "most_ms": 50.0, "tokens_per_s": 819200.0,
                    "mfu": 0.2}
    assert spread({"a": 10.0, "b": 10.3}) == {"a": 0.0, "b": 0.03}


def test_distances_are_those_of_f64(rng: np.random.Generator) -> None:
    x, y = (rng.standard_normal((3, 700_001)).astype(np.float32) for _ in range(2))
    wide = [t.astype(np.float64).reshape(-1) for t in (x, y)]
    off = np.linalg.norm(wide[0] - wide[1]) / np.linalg.norm(wide[1])
    assert distance(x, y) == pytest.approx(off, rel=1e-9)
    assert slope(1.5 * y, y) == pytest.approx(1.5, rel=1e-6)
    assert math.isnan(distance(x, 0 * y)) and math.isnan(slope(x, 0 * y))


def test_columns_are_aligned() -> None:
    assert table(("a", "long"), [("name", 1), ("b", 23)]) == (
        "a     long\nname     1\nb       23")


@pytest.mark.parametrize("name, millions, flops", [
    # parameters as their papers have them, with our vocabularies; 6 N_matrices + attention's
    ("gpt2-124m", 124.475904, 6 * (12 * 12 * 768**2 + 50304 * 768) + 6 * 12 * 1024 * 768),
    ("gpt2-350m", 354.871296, 6 * (24 * 12 * 1024**2 + 50304 * 1024) + 6 * 24 * 1024 * 1024),
    ("llama", 973.146112 + 32768 * 2048 / 1e6,
     6 * (16 * 60_817_408 + 32768 * 2048) + 6 * 16 * 2048 * 2048),
    ("train.py", 100.942848, 6 * (8 * 12 * 1024**2 + 256 * 1024) + 6 * 8 * 1024 * 1024)])
def test_models_have_the_size_that_they_say(name: str, millions: float, flops: int) -> None:
    m = MODELS[name]
    sizes = tree.flatten(shapes_of(m, lambda s: np.prod(s, dtype=np.int64)))[0]
    assert sum(map(int, sizes)) / 1e6 == pytest.approx(millions, rel=1e-12)
    assert m.flops == flops * m.B * m.T


# --- models -----------------------------------------------------------------------------------
def test_weights_and_batches_are_those_of_their_seed() -> None:
    m = small("llama")
    one, two, other = weights(m), weights(m), weights(m, 1)
    for a, b, c in zip(*(tree.flatten(w)[0] for w in (one, two, other)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.ndim == 1 or (a.dtype == np.float32 and not np.array_equal(a, c)
                               and abs(float(a.std()) - 0.02) < 0.005)
    x, y = batch(m)
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    norms = weights(small("gpt2-124m"))["layers"][0]
    assert (norms["g1"] == 1).all() and not norms["b1"].any() and not norms["qkv_b"].any()


def test_the_loss_of_the_byte_model_is_that_of_the_example(monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    transformer = __import__("transformer")
    m = small("train.py")
    c = transformer.Config(d=m.d, layers=m.layers, heads=m.heads, T=m.T, B=m.B, dtype="bf16")
    params, (x, y) = tree.map_tree(ts.tensor, weights(m)), map(ts.tensor, batch(m))
    (run,) = transformer.stages_of(c)
    want = ts.value_and_grad(lambda p: transformer.loss_of(run(p, x), y))(params)
    got = ts.value_and_grad(lambda p: m.loss(p, x, y))(params)
    assert got[1].keys() == want[1].keys() == transformer.init_params(c).keys()
    for a, b in zip(tree.flatten(got)[0], tree.flatten(want)[0], strict=True):
        assert_close(a.array, b.array.astype(np.float64), "bf16", n=m.d,
                     scale=float(np.abs(b.array).max()))


def _llama(p: Any, x: np.ndarray, y: np.ndarray, m: StepModel) -> float:
    """The loss in f64."""
    B, T, D = m.B, m.T, m.d // m.heads

    def norm(t: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return t / np.sqrt((t * t).mean(-1, keepdims=True) + 1e-6) * gain

    angle = np.arange(T)[:, None] * 500000.0 ** (-np.arange(D // 2) / (D // 2))
    c, s = np.cos(angle), np.sin(angle)

    def heads(t: np.ndarray, turned: bool) -> np.ndarray:
        t = t.reshape(B, T, -1, D).transpose(0, 2, 1, 3)
        a, b = t[..., :D // 2], t[..., D // 2:]
        t = np.concatenate([a * c - b * s, b * c + a * s], -1) if turned else t
        return np.repeat(t, m.heads // t.shape[1], axis=1)

    h = p["table"][x].astype(np.float64)
    for w in p["layers"]:
        a = norm(h, w["norm1"])
        q, k, v = (heads(a @ w[n], n != "v") for n in "qkv")
        scores = np.where(np.tril(np.ones((T, T), bool)), q @ k.swapaxes(-1, -2) / D**0.5, -np.inf)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        o = (e / e.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(B, T, m.d)
        h = h + o @ w["out"]
        a = norm(h, w["norm2"])
        gate = a @ w["gate"]
        h = h + (gate / (1 + np.exp(-gate)) * (a @ w["up"])) @ w["down"]
    z = norm(h, p["norm"]) @ p["table"].T
    z = z - z.max(-1, keepdims=True)
    z = z - np.log(np.exp(z).sum(-1, keepdims=True))
    return -float(np.take_along_axis(z, y[..., None], -1).mean())


def test_the_llama_against_f64() -> None:
    m = small("llama")
    p, (x, y) = weights(m), batch(m)
    p = tree.map_tree(lambda w: w * (8 if w.ndim > 1 else 1), p)  # so that attention matters
    got = m.loss(tree.map_tree(ts.tensor, p), ts.tensor(x), ts.tensor(y))
    assert float(got) == pytest.approx(_llama(p, x, y, m), rel=2e-3)
    wrong = dict(p, layers=[{**w, "k": w["k"][:, ::-1]} for w in p["layers"]])
    assert float(got) != pytest.approx(_llama(wrong, x, y, m), rel=2e-3)


def test_spellings_compute_the_same() -> None:
    """From the same weights; without biases too, since they begin as zeros."""
    m = small("gpt2-124m")
    x, y = map(ts.tensor, batch(m))
    start, found = weights(m), {}
    for name, how in SPELLINGS.items():
        p = start if how.qkv != "three" else dict(start, layers=[
            {**w, **dict(zip("qkv", np.split(w["qkv"], 3, -1), strict=True)),
             **dict(zip(("q_b", "k_b", "v_b"), np.split(w["qkv_b"], 3), strict=True))}
            for w in start["layers"]])
        found[name] = float(m.sized(spelling=how).loss(  # type: ignore[arg-type]
            tree.map_tree(ts.tensor, p), x, y))
    assert len(found) == 6 and max(found.values()) - min(found.values()) < 1e-4, found


@pytest.mark.parametrize("name", [n for n, how in SPELLINGS.items() if how.biases])
def test_biases_that_are_small_beside_a_product_count(name: str, rng: np.random.Generator) -> None:
    """As those of the first steps are: one added to a rounded product would be lost."""
    how = SPELLINGS[name]
    x, w = rng.standard_normal((2, 64, 64)), 0.1 * rng.standard_normal((64, 256))
    p = {n: ts.tensor(v.astype(np.float32))
         for n, v in {"x": x, "w": w, "w_b": np.full(256, 3e-4)}.items()}
    y, plain = (np.asarray(ts.cast(f(p["x"]), "f32"), np.float64) for f in (
        lambda x: linear(x, p, "w", how), lambda x: ts.cast(x, BF16) @ ts.cast(p["w"], BF16)))
    added = (y - plain).mean() / 3e-4
    assert added < 0.7 if how.product == "einsum" else added == pytest.approx(1, abs=0.1)


# --- classes of kernels -----------------------------------------------------------------------
@pytest.mark.parametrize("kernel, name", [
    ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNN", "matmul"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matmul"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_128x128x64", "attention"),
    ("void flash_bwd_dot_do_o_kernel<Flash_bwd_kernel_traits<64, 128>>", "attention"),
    ("triton_red_fused__log_softmax__to_copy_nll_loss_forward_8", "loss"),
    ("triton_per_fused__to_copy_add_native_layer_norm_native_layer_norm_backward_12", "norm"),
    ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "norm"),
    ("triton_poi_fused_gelu_gelu_backward_5", "elementwise"),
    ("triton_poi_fused_embedding_dense_backward_40", "embedding"),
    ("triton_red_fused_sum_17", "other"),
    ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "optimizer"),
    ("Memcpy DtoH (Device -> Pageable)", "copies"), ("Memset (Device)", "copies"),
    ("void at::native::vectorized_elementwise_kernel<4, FillFunctor<float>>", "elementwise")])
def test_kernels_of_pytorch_have_a_class(kernel: str, name: str) -> None:
    assert of_torch(kernel) == name


@functools.cache
def launches(model: StepModel) -> tuple[Counter, Any]:
    """(class, part, form) -> launches of a step on sm_90a, and the plan of it."""
    params = shapes_of(model, ts.zeros)
    x = ts.zeros((model.B, model.T), "int32")
    args = params, first_state(model, params), x, x
    step = training_step(model)
    plan = step.schedule(*args, target="sm_90a")
    program = program_of(step.traced(*args).graph, "sm_90a").plan
    groups: dict[str, list] = {}
    for g in program.groups:
        groups.setdefault(g.batch or g.name, []).append(g)
    parts = parts_of_matmuls(program.groups)
    return Counter((of_groups(groups[x.group], x.work.kind, parts), x.work.part, x.form)
                   for x in plan.launches), plan


def narrow(name: str) -> StepModel:
    return MODELS[name].sized(B=2, T=128, layers=2, d=256, heads=4, vocabulary=512)


@pytest.mark.parametrize("name", ["gpt2-350m-fp8", "gpt2-350m-fp8-current"])
def test_products_of_fp8_layers_are_wgmma_of_codes(name: str) -> None:
    """Four weights a layer, three products each; of the rest of the model none is of f32."""
    model = narrow(name)
    plan = launches(model)[1]
    found = Counter((x.operands[0].split()[0], x.operands[1].split()[0], x.form)
                    for x in plan.matmuls if x.work.kind == "matmul")
    fp8 = {k: n for k, n in found.items() if k[0].startswith("fp8")}
    assert fp8 == {("fp8_e4m3", "fp8_e4m3", "wgmma"): 8, ("fp8_e5m2", "fp8_e4m3", "wgmma"): 8,
                   ("fp8_e4m3", "fp8_e5m2", "wgmma"): 8}
    assert {k for k in found if k not in fp8} == {("bf16", "bf16", "wgmma")}
    assert model.plain.spelling == Spelling() and not model.plain.fp8


def test_delayed_scales_cost_fewer_launches_and_bytes() -> None:
    """Scales that are known do not wait for a reduction; those are one launch for all layers."""
    plans = {}
    for name in ("gpt2-350m-fp8", "gpt2-350m-fp8-current"):
        plans[name] = launches(narrow(name))[1]
    delayed, current = plans.values()
    assert len(delayed.launches) < len(current.launches)
    assert sum(x.work.bytes for x in delayed.launches) < sum(
        x.work.bytes for x in current.launches)


def by_class(found: Counter) -> Counter:
    total: Counter = Counter()
    for (name, _, _), n in found.items():
        total[name] += n
    return total


def test_launches_of_a_step_have_a_class() -> None:
    """By the lines of the model: what is said of a line is what the launch is for."""
    one, two = (by_class(launches(MODELS["gpt2-124m-b8"].sized(layers=n))[0]) for n in (1, 2))
    assert set(one) == set(CLASSES) - {"copies"}
    layer = two - one
    assert layer["attention"] == 3  # forward, two backward: the one of queries makes sums of dO O
    assert layer["loss"] == layer["embedding"] == 0
    assert layer["norm"] >= 4 and layer["elementwise"] >= 2 and layer["matmul"] >= 12
    assert one["embedding"] >= 2  # rows of the table, and their gradient


def differ(a: Counter, b: Counter) -> set[str]:
    """The classes of which two spellings have other launches."""
    return {name for name, _, _ in (a - b) + (b - a)}


def test_spellings_are_the_same_launches() -> None:
    """No copies, every matmul by wgmma, and what differs is what was written differently."""
    model = MODELS["gpt2-124m-b8"].sized(layers=1)
    found, plans = {}, {}
    for name, how in SPELLINGS.items():
        found[name], plans[name] = launches(
            model.sized(spelling=how))  # type: ignore[arg-type]
    first, flat, einsum, slices, three, bare = SPELLINGS
    for name, plan in plans.items():
        assert not plan.copies, name
        assert {x.form for x in plan.matmuls} == {"wgmma"}, name
    for name in (flat, einsum, slices):
        assert found[name] == found[first], name
    # matmuls by three weights are one. Their casts and updates have other places, and are launched
    # together with others
    assert differ(found[three], found[first]) <= {"elementwise", "optimizer", "other"}
    # biases have gradients, which are sums, rounded as biases are, and updates; a norm's sums that
    # were launched together with other norms' have a launch of their own beside them
    more = {k: n for k, n in (found[first] - found[bare]).items() if k[0] == "norm"}
    assert more == {("norm", "backward", "threads"): 1}
    assert differ(found[bare], found[first]) - {"norm"} <= {"other", "elementwise", "optimizer"}


def test_a_llama_lowers_to_the_kernels_of_the_library() -> None:
    """No copies, every matmul by wgmma, attention by the kernels for shared heads. The
    gradients of the weights of queries, keys and values are one matmul; that of what these read, or
    gate and up, is one kernel."""
    model = MODELS["llama"].sized(layers=1)
    _, plan = launches(model)
    assert {x.form for x in plan.matmuls} == {"wgmma"} and len(plan.matmuls) == 22
    shared = [x for x in plan.matmuls if x.work.kind == "attention"]
    assert [x.work.part for x in shared] == ["forward", "backward", "backward"]
    assert all("bf16[128, 2048, 64] bf16[32, 2048, 64] bf16[32, 2048, 64]" in x.work.shapes
               for x in shared)
    assert not plan.copies
    loops = [x for x in plan.launches if x.where and "rotary" in x.where.text]
    assert len(loops) == 4  # of queries and keys, forward and backward
    angles = 2 * 4 * 2048 * 32  # all else is read once and written once
    assert {x.work.read_bytes - x.work.written_bytes for x in loops} == {angles}


def test_a_byte_level_model_copies_nothing() -> None:
    """Its projections are cut along an axis behind the heads. Values, widened in front of the cut
    and rounded behind it, are read as the product wrote them."""
    _, plan = launches(MODELS["train.py"].sized(layers=1))
    assert not plan.copies
    rows = "bf16[8, 1024, "
    assert not [x for x in plan.launches if x.work.kind == "elementwise" and x.work.read_bytes ==
                x.work.written_bytes and x.work.shapes.startswith(rows) and "cast" in x.work.name]


def test_a_whole_measurement_of_ours(gpu: Any, clock: Any, apart: Any) -> None:
    """On a fake GPU with a clock: every figure of the report, and a class for each launch."""
    told: list[str] = []
    model = small("gpt2-124m").sized(B=1, layers=1, vocabulary=40)
    made = measure.measure(model, [measure.OURS], 1, 2, True, told.append)
    ours = made["sides"]["tessera"]
    assert made["model"]["d"] == 32 and made["rounds"] == 2 and len(told) == 2
    assert ours["loss_last"] < ours["loss_first"]
    assert ours["least_ms"] <= ours["step_ms"] <= ours["most_ms"]
    assert ours["tokens_per_s"] == pytest.approx(16e3 / ours["step_ms"], rel=1e-2)
    assert set(ours["classes"]) >= set(CLASSES) - {"copies"}
    assert ours["gpu_us"] == pytest.approx(sum(c["us"] for c in ours["classes"].values()), abs=1)
    assert sum(ours["launches"].values()) == sum(
        c["launches"] for n, c in ours["classes"].items() if n != "copies")
    assert "GPU ms (launches)" in step_text("gpt2", made)


# --- differences ------------------------------------------------------------------------------
def test_fp8_is_measured_beside_bf16(gpu: Any, clock: Any, apart: Any) -> None:
    model = small("gpt2-350m-fp8").sized(B=1, T=32, layers=1, vocabulary=40)
    names = command.names_of(model, ours=True)
    assert names == [measure.OURS, measure.PLAIN]
    assert command.names_of(model, ours=False) == [*names, measure.COMPILED]
    sides = measure.measure(model, names, 1, 1, False, lambda text: None)["sides"]
    fp8, plain = sides.values()
    assert fp8["loss_first"] != plain["loss_first"]
    assert fp8["loss_last"] < fp8["loss_first"]
    assert fp8["loss_last"] == pytest.approx(plain["loss_last"], rel=1e-2)


def test_a_trace_has_the_gradients_and_changes_of_the_first_step() -> None:
    m = small("train.py").sized(clip=0)
    start = weights(m)
    leaves, structure = tree.flatten(start)
    before = dict(zip(tree.paths(structure), leaves, strict=True))
    made = traced(OurStep(m, start, batch(m), "cpu"), before, 3)
    params, (x, y) = tree.map_tree(ts.tensor, start), map(ts.tensor, batch(m))
    value, grads = ts.value_and_grad(lambda p: m.loss(p, x, y))(params)
    assert len(made.losses) == 3 and made.losses[2] < made.losses[0]
    assert made.losses[0] == pytest.approx(float(value), rel=1e-5)
    flat, names = tree.flatten(grads)
    for path, g in zip(tree.paths(names), flat, strict=True):
        assert distance(made.grads[path], g.array) < 1e-2, path
        decay = 0.1 * before[path] if before[path].ndim > 1 and "embed" not in path else 0
        g = made.grads[path]
        want = -3e-4 * (g / (np.abs(g) + 1e-8) + decay)
        assert distance(made.changes[path], want) < 1e-2, path


def test_differences_are_those_of_the_reference() -> None:
    g, w = np.array([3.0, 4.0], np.float32), np.array([1.0, 0.0], np.float32)
    names = ["table", *(f"layers.{i}.w" for i in range(3))]

    def trace(by: float) -> TrainingTrace:
        return TrainingTrace([2.0, 1.0 + by], {n: g * np.float32(1 + by) for n in names},
                             dict.fromkeys(names, w + np.float32(2 * by)))

    made = compared({"torch f32": trace(0), "torch bf16": trace(0.5), "ours": trace(0.25)})
    row = made["first_step"][1]
    assert row["parameter"] == "layers.0.w" and row["gradient_norm"] == 5.0
    assert row["ours"] == pytest.approx({"gradient": 0.25, "gradient_slope": 1.25,
                                         "update": 0.5**0.5, "update_slope": 1.5})
    assert row["torch bf16"]["gradient"] == pytest.approx(0.5)
    text = losses_text(made)
    assert "+2.5e-01" in text and "1.25000" in text and len(text.splitlines()) == 3
    made["losses"]["ours, order 2"] = [2.0, 0.5]
    assert losses_text(made) == text  # the table of steps has the first order
    assert [line.split() for line in offsets_text(made).splitlines()[1:]] == [
        ["torch", "bf16", "+2.5e-01", "3.5e-01", "5.0e-01"],
        ["ours", "+1.2e-01", "1.8e-01", "2.5e-01"],
        ["ours,", "order", "2", "-2.5e-01", "3.5e-01", "5.0e-01"]]
    text = first_step_text(made)
    assert "layers.1.w" not in text and "layers.2.w" in text
    assert "update of ours: median 0.7071, worst 0.7071 of table" in text
    assert "layers.1.w" in first_step_text(made, everything=True)
    json.dumps(made)


def test_pytorch_computes_the_same_models() -> None:
    """Where it is installed: losses and gradients of each family, ours and PyTorch's in bf16,
    against PyTorch in f32.

    Of fp8 models too, whose gradients keep three bits or two."""
    pytest.importorskip("torch")
    from tessera.bench.torch_side import TorchStep

    for name in EXTENTS:
        made = differences(small(name), 2, TorchStep, "cpu", orders=2)
        for a, b in zip(made["losses"]["ours"], made["losses"]["torch f32"], strict=True):
            assert a == pytest.approx(b, abs=2e-3), name
        for a, b in zip(made["losses"]["ours, order 2"], made["losses"]["ours"], strict=True):
            assert a == pytest.approx(b, abs=2e-3), name
        allowed = 0.35 if name.endswith("fp8") else 0.03
        assert all(r["ours"]["gradient"] < allowed for r in made["first_step"]
                   if r["gradient_norm"] > 1e-4), name


def test_other_orders_of_the_rows_are_the_same_step() -> None:
    """With a second side of ours where PyTorch would stand."""
    given = []

    class OtherStep(OurStep):
        def __init__(self, model: Any, weights: Any, batch: Any, compiled: bool, half: str,
                     where: str):
            super().__init__(model, weights, batch, where)
            given.append((half, batch[0]))

    model = small("gpt2-124m").sized(B=3)
    losses = differences(model, 2, OtherStep, "cpu", orders=3)["losses"]
    assert [half for half, _ in given] == ["float32"] + 3 * ["bfloat16"]
    first, *others = (x for half, x in given if half == "bfloat16")
    for x in others:
        assert not np.array_equal(x, first)
        assert np.array_equal(np.sort(x, axis=None), np.sort(first, axis=None))
    assert len(losses) == 7
    for run in losses.values():
        assert run == pytest.approx(losses["ours"], abs=2e-3)


# --- the command ------------------------------------------------------------------------------
FIGURES = {"model": {"B": 8}, "steps": 5, "rounds": 5, "gpu": "NVIDIA H200", "sides": {
    "tessera": {"step_ms": 10.0, "tokens_per_s": 819200.0, "mfu": 0.5, "peak_mib": 900,
                "first_step_s": 4.25, "loss_first": 10.5, "loss_last": 9.5, "gpu_us": 9500.0,
                "classes": {"matmul": {"us": 9000.0, "launches": 73},
                            "copies": {"us": 500.0, "launches": 1}}},
    "torch.compile": {"step_ms": 12.0, "tokens_per_s": 682666.7, "mfu": 0.4, "peak_mib": 1000,
                      "first_step_s": 12.5, "loss_first": 10.5, "loss_last": 9.5,
                      "gpu_us": 11500.0, "classes": {"matmul": {"us": 9000.0, "launches": 73},
                                                     "loss": {"us": 2500.0, "launches": 3}}}}}


def test_the_text_of_a_step() -> None:
    lines = [line.split() for line in step_text("gpt2", FIGURES).splitlines()]
    assert lines[0] == ["gpt2", "tessera", "torch.compile", "ours", "/", "torch.compile"]
    assert ["tokens/s", "819,200", "682,667", "1.200"] in lines
    assert ["peak", "memory,", "MiB", "900", "1,000", "0.900"] in lines
    assert ["first", "step,", "s", "4.2", "12.5", "0.340"] in lines
    assert ["last", "loss", "9.50000", "9.50000"] in lines
    assert ["matmul", "9.00", "(73)", "9.00", "(73)"] in lines
    assert ["loss", "-", "2.50", "(3)"] in lines
    assert ["all", "9.50", "(74)", "11.50", "(76)"] in lines
    assert not any(line[:1] == ["embedding"] for line in lines)


def test_the_page_shows_what_was_measured(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(guide_tables, "RESULTS", tmp_path)
    assert guide_tables.steps_table() is None
    context = {"device": "a GPU", "date": "2026-01-02", "commit": "abc", "command": "python x"}
    figures = {**FIGURES, **context, "name": "llama", "model": {"B": 8, "T": 1024}}
    (tmp_path / "step_llama.json").write_text(json.dumps(figures))
    text = guide_tables.steps_table()
    assert text is not None and "llama: a GPU, 2026-01-02, commit abc, `python x`." in text
    assert "| llama, B 8, T 1024 | tessera | 819,200 |  | 0.500 | 0.9 | 4.2 |  |" in text
    assert "|  | torch.compile | 682,667 | 1.20 | 0.400 | 1.0 | 12.5 |  |" in text
    assert "| loss |  | 2.50 (3) |" in text


@pytest.fixture
def with_gpu(monkeypatch: Any) -> list:
    """A GPU by name, PyTorch by name, and processes that measure nothing: their command lines."""
    asked: list = []

    def run(argv: list[str], env: dict[str, str]) -> Any:
        asked.append((argv, env))
        kind = argv[argv.index("--part") + 1]
        figures: Any = {"seconds": 1.5} if kind.startswith("start") else json.loads(
            json.dumps(FIGURES))
        Path(argv[argv.index("--to") + 1]).write_text(json.dumps(figures))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(command, "has_gpu", lambda: True)
    monkeypatch.setattr(command, "device", lambda: SimpleNamespace(name="NVIDIA H200"))
    monkeypatch.setattr(measure, "find_spec", lambda name: object())
    monkeypatch.setattr(command, "subprocess", SimpleNamespace(run=run))
    return asked


def test_the_command_measures_each_side_and_writes(with_gpu: list, tmp_path: Path, capsys: Any,
                                                   monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/tessera/__main__.py", "bench", "step", "gpt2-350m"])
    assert main(["bench", "step", "gpt2-350m", "--steps", "3", "--out", str(tmp_path)]) == 0
    assert [argv[argv.index("--part") + 1] for argv, _ in with_gpu] == [
        "step", "start tessera", "start torch.compile"]
    assert all("--steps=3" in argv and argv[5] == "gpt2-350m" for argv, _ in with_gpu)
    caches = [{env[name] for name in command.CACHES} for _, env in with_gpu]
    assert caches[0] == caches[1] == caches[2] and len(caches[0]) == 3
    written = json.loads((tmp_path / "step_gpt2-350m.json").read_text())
    assert written["device"] == "NVIDIA H200" and written["name"] == "gpt2-350m"
    assert written["command"] == "python -m tessera bench step gpt2-350m"
    assert {"date", "commit", "python"} <= written.keys()
    assert written["sides"]["tessera"]["start_from_disk_s"] == 1.5
    assert "first step from the disk, s" in capsys.readouterr().out


def test_ours_alone_needs_no_pytorch(with_gpu: list, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(measure, "find_spec", lambda name: None)
    assert main(["bench", "step", "--ours", "llama", "--out", str(tmp_path)]) == 0
    assert [argv[argv.index("--part") + 1] for argv, _ in with_gpu] == ["step", "start tessera"]
    assert all("--ours" in argv for argv, _ in with_gpu)


@pytest.mark.parametrize("words, message", [
    (["gpt2-350"], "there is no model 'gpt2-350'"), (["--steps", "0"], "--steps is 0"),
    (["--losses", "-1"], "--losses is -1"),
    (["--losses", "3", "--ours"], "--losses compares with PyTorch"),
    (["llama", "--spellings"], "llama has one spelling")])
def test_wrong_words_are_refused(with_gpu: list, words: list[str], message: str,
                                 capsys: Any) -> None:
    assert main(["bench", "step", *words]) == 1
    assert message in capsys.readouterr().err and not with_gpu


def test_what_is_missing_is_said(with_gpu: list, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(measure, "find_spec", lambda name: None)
    assert main(["bench", "step"]) == 1
    told = capsys.readouterr().err
    assert "PyTorch, which is not installed here" in told and "--ours for our side alone" in told
    monkeypatch.setattr(command, "has_gpu", lambda: False)
    assert main(["bench", "step", "--ours"]) == 1
    assert "measured on a GPU, and there is none here" in capsys.readouterr().err
    assert not with_gpu


def test_every_family_has_models() -> None:
    assert {m.family for m in MODELS.values()} == set(FAMILIES)
