"""Snippets of the source documents, run as printed. What they leave undefined is defined around
them; nothing inside them is changed."""

from __future__ import annotations

import linecache
import math
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tolerance import assert_close, f64

ROOT = Path(__file__).resolve().parents[2]
PREAMBLE = """\
import math
from math import sqrt
import tessera
import tessera as ts
from tessera import *
"""


def run(snippet: str, **names: object) -> dict:
    """The namespace after the preamble, then these names, then the snippet. The snippet does not
    inherit this file's postponed annotations: it evaluates its own, as in a script."""
    space: dict = {"__name__": "snippet"}
    exec(compile(PREAMBLE, "preamble", "exec", dont_inherit=True), space)
    space.update(names)
    exec(compile(snippet, "snippet.py", "exec", dont_inherit=True), space)
    return space


def annotations_of(space: dict) -> dict:
    """Those of the snippet's top level; Python 3.14 evaluates them on demand (PEP 649)."""
    return space["__annotations__"] if "__annotations__" in space else space["__annotate__"](1)


# --- policies ---------------------------------------------------------------------------------
POLICY = '''\
x: Tensor["B","D", fp8_e4m3 @accum(fp32) @stochastic_round]
'''


@pytest.mark.row("EX-01")
def test_policy_annotation():
    file = ROOT / "examples/numerics_policy.py"
    assert POLICY in file.read_text()
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=180,
                          env={"PYTHONPATH": str(ROOT), "PATH": ""})
    assert done.returncode == 0, done.stderr
    assert "fp8_e4m3 @accum(f32) @stochastic_round" in done.stdout


@pytest.mark.row("EX-01", "NUM-17")
def test_policy_annotation_is_readable():
    kind = annotations_of(run(POLICY))["x"]
    assert (kind.dtype, kind.policy.accum) == (ts.fp8_e4m3, ts.f32)
    assert kind.policy.rounding == "stochastic"


LOSS_SCALE = '''\
# Explicit precision control
x: Tensor["B", "D", fp8_e4m3 @accum(fp32) @loss_scale(128.0)]
'''


@pytest.mark.row("EX-34", "NUM-39")
def test_policy_annotation_with_loss_scale():
    kind = annotations_of(run(LOSS_SCALE))["x"]
    assert kind.dtype is ts.fp8_e4m3
    assert (kind.policy.accum, kind.policy.loss_scale) == (ts.f32, 128.0)
    assert [str(d) for d in kind.shape] == ["B", "D"]


# --- safe softmax -----------------------------------------------------------------------------
SOFTMAX_SAFE = '''\
y = softmax_safe(x)      # guaranteed not to overflow
'''


@pytest.mark.row("EX-02")
def test_softmax_safe(rng):
    x = np.float32([[1e38, -1e38, 3e38], [1000, 999, 998], [0, 0, 0]])
    y = run(SOFTMAX_SAFE, x=ts.tensor(x))["y"].numpy()
    assert np.isfinite(y).all()
    np.testing.assert_allclose(y.sum(-1), 1, atol=1e-6)


# --- mixed precision --------------------------------------------------------------------------
PROJ = '''\
@jit
def proj(x: Tensor["B","D", fp8_e4m3 @accum(fp32)],
         W: Tensor["D","K", bf16 @accum(fp32)]):
    return gemm(x, W)
'''


@pytest.mark.row("EX-03", "NUM-25")
def test_proj(rng):
    proj = run(PROJ)["proj"]
    x = ts.tensor(rng.standard_normal((8, 64)), ts.fp8_e4m3)
    W = ts.tensor(rng.standard_normal((64, 32)), ts.bf16)
    y = proj(x, W)
    want = f64(x) @ f64(W)
    assert y.dtype is ts.bf16 and y.policy.accum is ts.f32
    wide = want.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    assert np.mean(f64(y) != wide) < 0.01  # f32 accumulation, one rounding at the end
    assert_close(y.numpy(), want, dtype="bf16")


MIXED = '''\
# Basic types with accumulation policies
x1: ts.Tensor["B", "D", ts.fp8_e4m3 @accum(ts.f32)]
x2: ts.Tensor["B", "D", ts.bf16 @accum(ts.f32) @stochastic_round]
x3: ts.Tensor["B", "D", ts.fp6 @accum(ts.f32) @loss_scale(128.0)]

# Mixed precision computation
@ts.jit
def mixed_precision_gemm(
    A: ts.Tensor["M", "K", ts.fp8_e4m3 @accum(ts.f32)],
    B: ts.Tensor["K", "N", ts.fp8_e4m3 @accum(ts.f32)]
) -> ts.Tensor["M", "N", ts.f32]:
    """FP8 inputs, FP32 accumulation and output"""
    return ts.gemm(A, B)  # Automatic precision handling
'''


@pytest.mark.row("EX-16", "NUM-38")
def test_mixed_precision(rng):
    space = run(MIXED)
    kinds = annotations_of(space)
    assert kinds["x1"].policy.accum is ts.f32
    assert kinds["x2"].policy.rounding == "stochastic" and kinds["x2"].dtype is ts.bf16
    assert kinds["x3"].policy.loss_scale == 128.0 and kinds["x3"].dtype is ts.fp6_e3m2
    assert not {"x1", "x2", "x3"} & space.keys()
    made = ts.zeros_like_type(kinds["x3"], B=2, D=3)
    assert made.shape == (2, 3) and made.type == kinds["x3"].type


@pytest.mark.row("EX-16", "NUM-27")
def test_mixed_precision_gemm(rng):
    gemm, K = run(MIXED)["mixed_precision_gemm"], 96
    A = ts.tensor(rng.standard_normal((16, K)), ts.fp8_e4m3)
    B = ts.tensor(rng.standard_normal((K, 24)), ts.fp8_e4m3)
    y = gemm(A, B)
    assert y.type == ts.numerics.as_type(ts.f32)
    # fp8 inputs are rounded to f32 nowhere but in the sums: no fp8 rounding of the result
    assert np.abs(f64(y) - f64(A) @ f64(B)).max() < 1e-5 * K


STABLE = '''\
@ts.jit
def numerically_stable_softmax(x: ts.Tensor["B", "S", ts.bf16]) -> ts.Tensor["B", "S", ts.bf16]:
    """Numerically stable softmax with explicit precision control"""
    # Convert to FP32 for stability
    x_f32 = ts.cast(x, ts.f32)
    
    # Safe operations
    x_max = ts.max(x_f32, axis=-1, keepdims=True)
    exp_x = ts.exp(x_f32 - x_max)  # Prevent overflow
    sum_exp = ts.sum(exp_x, axis=-1, keepdims=True)
    
    # Safe division with epsilon
    softmax = exp_x / (sum_exp + 1e-10)
    
    # Cast back to BF16
    return ts.cast(softmax, ts.bf16)
'''  # noqa: W293


@pytest.mark.row("EX-17", "SAFE-09")
def test_numerically_stable_softmax(rng):
    fn = run(STABLE)["numerically_stable_softmax"]
    x = (rng.standard_normal((9, 40)) * 30).astype(ml_dtypes.bfloat16)
    y = fn(ts.tensor(x))
    assert y.dtype is ts.bf16
    e = np.exp(f64(x) - f64(x).max(-1, keepdims=True))
    want = e / (e.sum(-1, keepdims=True) + 1e-10)
    ulp = np.spacing(want.astype(ml_dtypes.bfloat16)).astype(np.float64)
    assert np.all(np.abs(f64(y) - want) <= ulp)
    text = fn.inspect_ir("graph")
    assert "source=bf16 to=f32" in text and "source=f32 to=bf16" in text


# --- a policy of one's own --------------------------------------------------------------------
QUANTIZED = '''\
# Define custom precision policy
@ts.precision_policy
class QuantizedPolicy:
    storage = ts.int8
    scale = ts.f32
    compute = ts.f32
    accumulate = ts.f32
    
    def quantize(self, x: ts.f32) -> ts.int8:
        scale = ts.max(ts.abs(x)) / 127.0
        return ts.round(x / scale).astype(ts.int8), scale
    
    def dequantize(self, x: ts.int8, scale: ts.f32) -> ts.f32:
        return x.astype(ts.f32) * scale

# Use custom policy
quantized_weight: ts.Tensor["D", "D", QuantizedPolicy]
'''  # noqa: W293


@pytest.mark.row("EX-18", "NUM-31", "NUM-32", "NUM-35", "NUM-36")
def test_quantized_policy(rng):
    policy = run(QUANTIZED)["QuantizedPolicy"]
    x = rng.standard_normal((6, 6)).astype(np.float32)
    w = ts.tensor(x, policy)
    codes, scale = policy().quantize(ts.tensor(x))
    np.testing.assert_array_equal(w.array, codes.numpy())
    assert w.array.dtype.itemsize == 1 and w.scale.dtype is ts.f32
    assert w.scale.item() == scale.item()
    assert np.abs(w.numpy() - x).max() <= scale.item() / 2 * (1 + 1e-6)
    w[...] = 2 * x  # assignment goes through quantize too
    np.testing.assert_array_equal(w.array, policy().quantize(ts.tensor(2 * x))[0].numpy())
    zero = ts.tensor(np.zeros((3, 3), np.float32), policy)
    assert zero.scale.item() == 1.0
    np.testing.assert_array_equal(zero.numpy(), 0)


@pytest.mark.row("EX-18", "NUM-30", "NUM-33", "NUM-34", "NUM-37")
def test_quantized_policy_in_a_type(rng):
    space = run(QUANTIZED)
    policy, kind = space["QuantizedPolicy"], annotations_of(space)["quantized_weight"]
    assert kind.dtype is ts.int8 and kind.policy.custom is policy

    @ts.jit
    def f(x: ts.Tensor["B", "D"], w: ts.Tensor["D", "D", policy]):
        return x @ w

    f.fn.__annotations__ = {"x": ts.Tensor["B", "D"], "w": kind}
    x = ts.tensor(rng.standard_normal((2, 4)).astype("f4"))
    w = ts.tensor(rng.standard_normal((4, 4)).astype("f4"), policy)
    y = f(x, w)
    assert y.dtype is ts.f32
    assert_close(y.numpy(), f64(x) @ f64(w), n=4)
    text = f.inspect_ir("graph")
    assert "source=int8 to=f32" in text and "accum=f32" in text
    with pytest.raises(ts.ShapeError, match="D = 4"):
        f(x, ts.tensor(np.ones((4, 5), "f4"), policy))
    wide = ts.numerics.as_type(policy)
    assert wide.accum is ts.f32
    body = {k: v for k, v in vars(policy).items() if k in (
        "storage", "scale", "compute", "accumulate", "quantize", "dequantize")}
    for name in body:
        part = {k: v for k, v in body.items() if k != name}
        with pytest.raises(ts.PolicyError, match=name):
            ts.precision_policy(type("Partial", (), part))


# --- derivatives ------------------------------------------------------------------------------
LOSS = '''\
@ts.jit
@ts.autodiff
def loss_function(x, W, b, y_true):
    """Automatic differentiation example"""
    # Forward pass
    y_pred = ts.matmul(x, W) + b
    y_pred = ts.relu(y_pred)
    loss = ts.mse(y_pred, y_true)
    return loss

# Compute gradients
grad_fn = ts.grad(loss_function)
grad_W, grad_b = grad_fn(x, W, b, y_true)
'''


@pytest.mark.row("EX-19", "AD-04")
def test_loss_function(rng):
    x, y = rng.standard_normal((5, 3)), rng.standard_normal((5, 4))
    W, b = rng.standard_normal((3, 4)), rng.standard_normal(4)
    wide = [ts.tensor(v, ts.f64) for v in (x, y)]
    space = run(LOSS, x=wide[0], y_true=wide[1], W=ts.param(W, ts.f64), b=ts.param(b, ts.f64))

    def loss(W, b):
        return np.mean((np.maximum(x @ W + b, 0) - y) ** 2)

    for got, at in [(space["grad_W"], 0), (space["grad_b"], 1)]:
        values = [W, b]
        want = np.zeros_like(values[at])
        for i in np.ndindex(want.shape):
            step = np.zeros_like(want)
            step[i] = 1e-6
            ahead, behind = (loss(*[v + s * step if k == at else v for k, v in enumerate(values)])
                             for s in (1, -1))
            want[i] = (ahead - behind) / 2e-6
        np.testing.assert_allclose(got.numpy(), want, atol=1e-8)
    assert_close(space["loss_function"](*wide[:1], W, b, wide[1]).numpy(), loss(W, b))


CUSTOM_GELU = '''\
@ts.custom_vjp
def custom_gelu(x):
    """GELU with custom backward pass"""
    return 0.5 * x * (1 + ts.tanh(0.79788456 * (x + 0.044715 * x**3)))

def custom_gelu_fwd(x):
    y = custom_gelu(x)
    return y, (x, y)  # Save for backward

def custom_gelu_bwd(saved, grad_output):
    x, y = saved
    # Custom gradient computation
    cdf = 0.5 * (1 + ts.tanh(0.79788456 * (x + 0.044715 * x**3)))
    pdf = ts.exp(-0.5 * x**2) / ts.sqrt(2 * ts.pi)
    grad_input = grad_output * (cdf + x * pdf)
    return grad_input

custom_gelu.defvjp(custom_gelu_fwd, custom_gelu_bwd)
'''


@pytest.mark.row("EX-20")
def test_custom_gelu():
    fn = run(CUSTOM_GELU)["custom_gelu"]
    x = np.linspace(-4, 4, 801)
    u = np.tanh(0.79788456 * (x + 0.044715 * x**3))
    assert_close(fn(ts.tensor(x, ts.f64)).numpy(), 0.5 * x * (1 + u), dtype="f64", n=8)
    g = ts.grad(lambda v: ts.sum(fn(v)))(ts.tensor(x, ts.f64)).numpy()
    rule = 0.5 * (1 + u) + x * np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
    true = 0.5 * (1 + u) + 0.5 * x * (1 - u * u) * 0.79788456 * (1 + 3 * 0.044715 * x**2)
    np.testing.assert_allclose(g, rule, atol=1e-12)
    assert 5e-4 < np.abs(rule - true).max() < 1e-3  # so the rule is what was used


VERIFIED = '''
@verify.numerics(stable=True, bounded=[-100,100])
def attention_scores(Q, K):
    return tile.dot(Q, K.T) / sqrt(d)
'''


@pytest.mark.row("EX-07")
def test_verified_attention_scores(rng):
    fn = run(VERIFIED, d=64)["attention_scores"]
    q, k = (rng.normal(size=(5, 64)).astype(np.float32) for _ in range(2))
    want = q.astype(np.float64) @ k.T.astype(np.float64) / 8.0
    assert_close(fn(ts.tensor(q), ts.tensor(k)).numpy(), want, n=64, scale=8.0)
    with pytest.raises(ts.NumericsError) as error:
        fn(ts.tensor(q * 1e3), ts.tensor(k * 1e3))
    assert "100" in str(error.value)


# --- schedules --------------------------------------------------------------------------------
INHERITANCE = """\
# Define base schedule
base_schedule = Schedule(
    block=(128, 128),
    warps=8,
    stages=3
)

# Variations inherit and override
@kernel.schedule(base_schedule.with_block(64, 64))
def small_attention(Q, K, V): ...

@kernel.schedule(base_schedule.with_warps(4))
def memory_limited_attention(Q, K, V): ...
"""


@pytest.mark.row("EX-28")
def test_schedule_inheritance():
    linecache.cache["snippet.py"] = (len(INHERITANCE), None, INHERITANCE.splitlines(True),
                                     "snippet.py")
    space = run(INHERITANCE)
    small, limited = space["small_attention"].schedule, space["memory_limited_attention"].schedule
    assert (small.block, small.warps, small.stages) == ((64, 64), 8, 3)
    assert (limited.block, limited.warps, limited.stages) == ((128, 128), 4, 3)
    assert small.parent is limited.parent is space["base_schedule"]


# --- patterns ---------------------------------------------------------------------------------
@pytest.mark.row("EX-24")
def test_the_chapter_on_patterns_and_its_kernels():
    guide = (ROOT / "docs/guide/programming_model.md").read_text()
    chapter = guide.partition("\n## Advanced Patterns")[2]
    assert "`examples/09_patterns.py`" in chapter
    for word in ("**pipeline**", "**split-K**", "**persistent**", "**fused epilogue**"):
        assert word in chapter
    done = subprocess.run([sys.executable, str(ROOT / "examples/09_patterns.py")], text=True,
                          capture_output=True, timeout=180,
                          env={"PYTHONPATH": str(ROOT), "PATH": "", "TESSERA_DEBUG": "1"})
    assert done.returncode == 0, done.stderr
    verdicts = [line.split() for line in done.stdout.splitlines()]
    assert [v[0] for v in verdicts] == ["pipelined", "split_k", "persistent", "fused"]
    assert {v[-1] for v in verdicts} == {"ok"}
