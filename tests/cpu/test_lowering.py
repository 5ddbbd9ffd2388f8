"""Graph functions as tile kernels: the interpreter runs what would run on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

import tessera as ts
from fake_gpu import driver as driver
from fake_gpu import gpu as gpu
from lowered_functions import lowered
from lowering_cases import CASES, arrays, check, expected, recurrent
from lowering_cases import apart as apart
from tessera import Tensor, bf16, f32
from tessera.errors import UnsupportedTargetError
from tessera.graph.cuda import CudaProgram, program_of
from tessera.graph.cuda.program.device import DeviceExecutable
from tessera.graph.cuda.target import CUDA
from tessera.graph.op import OPS
from tessera.graph.schedule.ir import ByteRange, aligned
from tessera.graph.trace import apply
from tolerance import assert_close


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_compute_what_the_graph_means(name, rng):
    case = CASES[name]
    inputs = arrays(case, rng)
    made = lowered(case.fn, *inputs)
    check(case, made.run([x.array for x in inputs]), inputs)
    if case.kinds:
        assert [g.kind for g in made.plan.groups] == case.kinds.split()


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].axes < 3])
def test_through_the_driver(name, rng, gpu, apart):
    """Memory on the device, arguments of the launches, results copied back: on a fake driver."""
    case = CASES[name]
    inputs = arrays(case, rng)
    executable = DeviceExecutable(ts.jit(case.fn).graph(*inputs))
    for _ in range(2):  # the second call runs in the same memory
        check(case, executable.run([x.array for x in inputs]), inputs)


def test_target_cuda_runs_where_there_is_a_gpu(gpu, rng, apart):
    @ts.jit(target="cuda")
    def f(x, w):
        return ts.softmax(x @ w)

    x, w = (ts.tensor(rng.standard_normal(s).astype(np.float32)) for s in ((20, 30), (30, 40)))
    assert_close(f(x, w).array, ts.softmax(x @ w).array, "f32", n=40)
    text = f.inspect_ir("schedule")
    assert "gemm over [20, 40]" in text and "rows over [20, 40]" in text


def test_captured_tensors_are_read_at_each_call(gpu, apart):
    table = ts.ones(5)
    f = ts.jit(lambda x: x + table, target="cuda")
    assert f(ts.zeros(5)).tolist() == [1.0] * 5
    table[0] = 7.0
    assert f(ts.zeros(5)).tolist() == [7.0, 1.0, 1.0, 1.0, 1.0]


def test_without_a_gpu_the_target_is_refused(no_gpu):
    with pytest.raises(UnsupportedTargetError, match="'cuda' cannot run here") as info:
        ts.jit(lambda x: x, target="cuda")
    assert "doctor" in info.value.hint


# --- what has no kernel -------------------------------------------------------------------------
def test_an_op_without_a_kernel_is_an_error_at_its_line():
    with pytest.raises(UnsupportedTargetError, match="has no kernel for GPUs") as info:
        lowered(lambda x: apply(OPS["add"], x, x), ts.cast(ts.ones((8,)), "fp4_e2m1"))
    assert info.value.where.file.endswith("test_lowering.py")
    assert info.value.message.startswith("add(fp4_e2m1[8]")
    assert 'target="cpu"' in info.value.hint


def test_effects_are_refused():
    def f(x):
        apply(OPS["barrier"], axis=None, mesh=None)
        return x * 2.0

    with pytest.raises(UnsupportedTargetError, match="has no form for GPUs"):
        lowered(f, ts.ones(3))


def test_symbolic_extents_are_refused():
    graph = ts.jit(lambda x: ts.exp(x).T).graph(Tensor["n", 4, f32])
    with pytest.raises(UnsupportedTargetError, match="symbolic"):
        CudaProgram(graph)


# --- plans ------------------------------------------------------------------------------------
def test_temporaries_share_places():
    """A chain of five products needs two at a time, whatever its length."""
    def chain(x, w):
        for _ in range(5):
            x = ts.softmax(ts.sin(x @ w))
        return x

    plan = lowered(chain, ts.ones((64, 64)), ts.ones((64, 64))).plan
    temporary = [b for b in plan.buffers if b.kind == "temporary"]
    assert len(temporary) == 9 and len({b.offset for b in temporary}) == 2
    assert plan.temporary_bytes == 2 * aligned(temporary[0]) < plan.unshared_bytes
    assert aligned(temporary[0]) % CUDA.align_bytes == 0


def test_no_two_live_values_share_a_place(rng):
    """Each value is read only while its place is its own: checked over the order of the groups."""
    for name in ("heads", "sums", "feed forward", "gradient", "softmax of columns"):
        case = CASES[name]
        plan = lowered(case.fn, *arrays(case, rng)).plan
        kinds = {b.name: b.kind for b in plan.buffers}
        holds: dict[str, ByteRange] = {}  # what lies in the block, and where
        for g in plan.groups:
            for r in g.reads:
                read = plan.base(r.name)
                assert kinds[read] != "temporary" or read in holds, (name, g.name)
            for w in g.writes:
                if kinds[w.name] == "temporary":
                    own = plan.region(w.name)
                    holds = {n: at for n, at in holds.items() if not at.meets(own)}
                    holds[w.name] = own


def test_the_hash_follows_what_decides_the_kernels():
    def hash_of(scale, extent):
        return lowered(lambda x: ts.exp(x) * scale, ts.ones(extent)).plan.hash

    assert hash_of(2.0, 8) == hash_of(2.0, 8)
    assert len({hash_of(2.0, 8), hash_of(3.0, 8), hash_of(2.0, 9)}) == 3


def test_blocks_follow_the_target():
    """Less shared memory: fewer keys and fewer stages."""
    types = (Tensor[4096, 4096, bf16],) * 2
    graph = ts.jit(lambda a, b: a @ b).graph(*types)
    stages = {t: CudaProgram(graph, t).plan.groups[0].schedule.value("stages_")
              for t in ("sm_90a", "sm_89")}
    assert stages["sm_90a"] == 4 and 2 <= stages["sm_89"] < 4


PAIRS = "blocks of rows in pairs, which bring their columns for each other"


@pytest.mark.parametrize("target, fn, block, why", [
    ("sm_90a", lambda a, b: a @ b, (128, 256), [PAIRS]),
    ("sm_90a", lambda a, b: ts.relu(a @ b), (128, 256), [PAIRS]),
    ("sm_90a", lambda a, b: ts.gelu(a @ b), (128, 256),
     [PAIRS, "the last groups start first, because what they read was written last"]),
    ("sm_90a", lambda a, b: a @ b + a, (128, 128),
     ["blocks of 128 x 128, because what follows reads a tile of the same extents", PAIRS]),
    ("sm_89", lambda a, b: a @ b.T, (128, 128),
     ["b is read transposed, as it lies", "128 columns, because two stages of 256 do not fit"]),
    ("sm_90a", lambda a, b: a.T, None,
     ["a copy, because a result is in row-major order"])])
def test_the_schedule_says_why_a_kernel_has_its_form(target, fn, block, why):
    graph = ts.jit(fn).graph(*(Tensor[4096, 4096, bf16],) * 2)
    plan = CudaProgram(graph, target).plan
    found = [line for line in str(plan).splitlines() if " note: " in line]
    notes = [line.split(" note: ")[1] for line in found if "operands of bf16, sums" not in line]
    assert len(notes) == len(why) and all(map(str.startswith, notes, why)), notes
    s = plan.groups[0].schedule
    assert block in (None, (s.m, s.n))


def test_equal_groups_share_a_kernel():
    one, two = (lowered(lambda x: ts.exp(x) + 1.0, ts.ones((64, 64))) for _ in range(2))
    assert one.launches[0].shared is two.launches[0].shared


def test_kernels_of_functions_are_not_the_users_last(rng):
    """ts.inspect_ir without a function means what the user compiled."""
    f = ts.jit(lambda x: ts.exp(x) * 2.0)
    f(ts.ones(5))
    program_of(f.graph()).run([np.ones(5, np.float32)])
    assert ts.inspect_ir("graph") == f.inspect_ir("graph")


# --- special values -----------------------------------------------------------------------------
def test_special_values_as_in_the_graph():
    x = np.array([[np.inf, -np.inf, np.nan, 0.0, -0.0, 1e38, -1e38, 1e-42]], np.float32)
    for fn in (lambda x: ts.exp(x - x), lambda x: x / ts.sum(x, axis=-1, keepdims=True),
               lambda x: ts.maximum(x, 0.0) + ts.sign(x), lambda x: ts.isfinite(x),
               lambda x: (x - x) / (x - x), lambda x: ts.max(x, axis=-1)):
        want = ts.jit(fn)(ts.tensor(x)).array
        (got,) = lowered(fn, ts.tensor(x)).run([x])
        np.testing.assert_array_equal(got, want)


def test_a_sum_over_columns_and_what_reads_it_in_one_function():
    """On the CPU too: the sum leaves its loop before the loop that reads it."""
    x = ts.random.normal((200, 300))
    with ts.config.scope(loop_min_elements=0):
        f = ts.jit(lambda x: ts.softmax(x, axis=0))
        assert_close(f(x).array, ts.softmax(x, axis=0).array, "f32", n=200)
        assert len([line for line in f.inspect_ir("schedule").splitlines() if "loop" in line]) == 2


def test_the_oracle_is_the_node_by_node_graph(rng):
    """`expected` must not run fused loops, or two errors could agree."""
    case = CASES["chain of five"]
    (x,) = arrays(case, rng)
    (got,) = expected(case, [x])
    want = np.tanh(np.exp(x.array * np.float32(0.5)) + np.float32(1.0)) - x.array
    np.testing.assert_array_equal(got.array, want)


# --- groups that are alike ----------------------------------------------------------------------
@pytest.mark.parametrize("one, two, alike", [
    (lambda x, y: x - ts.exp(y), lambda x, y: y - ts.exp(x), True),
    (lambda x, y: x - ts.exp(y), lambda x, y: ts.exp(y) - x, False),
    (lambda x, y: x - x * y, lambda x, y: x - y * y, False),
    (lambda x, y: x * y + 2.0, lambda x, y: x * y + 3.0, False),
    (lambda x, y: ts.softmax(x) + y, lambda x, y: ts.softmax(x + y), False),
    (lambda x, y: ts.exp(ts.relu(x)), lambda x, y: ts.exp(ts.relu(y)), True),
    (lambda x, y: ts.take(x, ts.cast(y[0], "int32")),
     lambda x, y: ts.take(y, ts.cast(x[0], "int32")), False),  # an index outside names its line
])
def test_groups_share_a_kernel_when_names_alone_differ(one, two, alike):
    last = [lowered(f, ts.ones((64, 64)), ts.ones((64, 64))).launches[-1].shared
            for f in (one, two)]
    assert (last[0] is last[1]) == alike


def test_layers_share_their_kernels(rng):
    def layers(x, ws):
        for w in ws:
            x = ts.softmax(ts.gelu(x @ w)) + x
        return x

    x, *ws = (ts.tensor(rng.standard_normal((16, 16)).astype(np.float32)) for _ in range(5))
    made = lowered(layers, x, ws)
    texts = {launch.source.text for launch in made.launches}
    assert len(texts) == len(made.launches) == 8
    assert len({id(launch.shared) for launch in made.launches}) == 2
    for launch in made.launches:  # what is shown has the names of its own ops
        names = {o.name for o in launch.group.writes}
        assert names <= {s.name for s in launch.group.steps}
        assert all(capital in str(launch.kernel.function()) for capital in
                   (n.upper() for n in names))
    (got,) = made.run([t.array for t in (x, *ws)])
    assert_close(got, ts.jit(layers)(x, ws).array, "f32", 64)


def test_other_types_and_numbers_are_other_kernels():
    def kernels(*fns):
        return len({id(launch.shared) for f in fns for launch in
                    lowered(f, ts.ones(300), ts.ones(300)).launches})

    assert kernels(lambda x, y: x * y, lambda a, b: a * b) == 1
    assert kernels(lambda x, y: x * y, lambda x, y: x - y) == 2
    assert kernels(lambda x, y: x - y, lambda x, y: y - x) == 1  # with its arguments exchanged
    assert kernels(lambda x, y: x * x - y, lambda x, y: x - y * y) == 2
    x, y = (ts.tensor(np.arange(n, n + 300, dtype=np.float32) ** 2) for n in (1, 2))
    for f in (lambda x, y: x - y, lambda x, y: y - x):
        (got,) = lowered(f, x, y).run([x.array, y.array])
        np.testing.assert_array_equal(got, f(x.array, y.array))
    assert kernels(lambda x, y: x * 2.0, lambda x, y: x * 3.0) == 2
    assert kernels(lambda x, y: ts.cast(x, "bf16"), lambda x, y: ts.cast(x, "f16")) == 2


def test_iterations_of_a_loop_share_their_kernels(rng):
    xs = ts.tensor(rng.standard_normal((30, 4, 8)).astype(np.float32))
    w = ts.tensor(rng.standard_normal((8, 8)).astype(np.float32))
    made = lowered(lambda w, xs: recurrent(w, xs, ts.zeros((4, 8)))[0], w, xs)
    assert len({launch.shared for launch in made.launches}) < 20 < 30 < len(made.launches)


def test_the_sign_of_zeros_and_of_nan():
    """That of -0 is 0, as NumPy has it, on every target."""
    x = np.array([-0.0, 0.0, np.nan, -2.0, 3.0, np.inf], np.float32)
    (got,) = CudaProgram(ts.jit(ts.sign).graph(ts.tensor(x)), "sm_90a").run([x])
    for y in (got, ts.sign(ts.tensor(x)).numpy(), ts.jit(ts.sign)(ts.tensor(x)).numpy()):
        assert np.array_equal(y, np.sign(x), equal_nan=True) and not np.signbit(y[0])
