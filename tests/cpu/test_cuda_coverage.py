"""Every op of the registry on GPUs: its samples, forward, vjp, jvp and vmap, lowered for sm_90a.

No GPU is needed: kernels run under the interpreter, and are compared with the op's NumPy meaning.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tessera as ts
from cpu.test_ops_registry import (
    BATCH,
    BATCHABLE,
    CASES,
    DERIVABLE,
    Derivable,
    Draws,
    outputs,
    refuses,
)
from guide_tables import ours
from tessera.errors import UnsupportedTargetError
from tessera.graph.cuda import CudaProgram
from tessera.graph.cuda.lower import lower
from tessera.graph.ir import Graph
from tessera.graph.op import GraphOp, Sample
from tessera.graph.trace import apply
from tessera.runtime.target import parse_target
from tolerance import assert_close

TARGET = parse_target("sm_90a")

# What has no lowering yet, and why. An op leaves this table when it has one; none may join it.
LIBRARY = "a library does it well: cuFFT, cuSOLVER, cuSPARSE"
CONTROL = "control flow runs on the host"
EFFECT = "an effect of the host"
MESH = "of a mesh: the programs of its ranks run it"
KERNEL = "no kernel yet"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("cholesky", "det", "eig", "eigh", "inv", "lu", "pinv", "qr", "slogdet",
                     "solve", "svd", "triangular_solve", "cofactor", "matrix_exp", "dct", "fft",
                     "rfft", "irfft"), LIBRARY),
    **dict.fromkeys(("scan", "cond", "while_loop"), CONTROL),
    **dict.fromkeys(("print", "move", "state", "verify_numerics", "check_fits"), EFFECT),
    **dict.fromkeys(("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast",
                     "permute", "reduce_scatter", "along_sequence", "constrain", "lie_as",
                     "replicated", "ring_attention", "ring_attention_back", "shard", "shard_like",
                     "zero_split"),
                    MESH),
    "product": "int64 matmuls accumulate in int32",
    **dict.fromkeys((
        "cast_stochastic",
        "csr_rows", "fold_in"), KERNEL),
}


# --- graphs of a sample -------------------------------------------------------------------------
def _traced(fn: Callable[..., Any], xs: list) -> Graph:
    """A function of no arguments is called once, and traced by that."""
    made = ts.jit(fn)
    if not xs:
        made()
    return made.graph(*xs)


def _forward(op: GraphOp, s: Sample, rng: np.random.Generator) -> tuple[Graph, list]:
    xs = [Draws(rng)(a) for a in s.args]
    return _traced(lambda *a: tuple(outputs(op, apply(op, *a, **s.attrs))), xs), xs


def _vjp(op: GraphOp, s: Sample, rng: np.random.Generator) -> tuple[Graph, list]:
    case = Derivable(op, s, rng)
    cotangents = [case.like(y) for y in case.fn(*case.xs)]
    n = len(case.xs)
    xs = [*case.xs, *cotangents]
    return _traced(lambda *a: ts.vjp(case.fn, *a[:n])[1](a[n:]), xs), xs


def _jvp(op: GraphOp, s: Sample, rng: np.random.Generator) -> tuple[Graph, list]:
    case = Derivable(op, s, rng)
    n = len(case.xs)
    xs = [*case.xs, *(case.like(x) for x in case.xs)]
    return _traced(lambda *a: ts.jvp(case.fn, a[:n], a[n:]), xs), xs


def _vmap(op: GraphOp, s: Sample, rng: np.random.Generator) -> tuple[Graph, list]:
    """Every operand with a batch axis but keys, of which there is one for all."""
    draws = Draws(rng)
    single = [refuses(op, i, a) for i, a in enumerate(s.args)]
    rows = [[draws(a)] if one else [draws(a) for _ in range(BATCH)]
            for a, one in zip(s.args, single, strict=True)]
    xs = [r[0] if one else ts.Tensor(np.stack([x.array for x in r]), r[0].type)
          for r, one in zip(rows, single, strict=True)]
    fn = lambda *a: tuple(outputs(op, apply(op, *a, **s.attrs)))  # noqa: E731
    axes = tuple(None if one else 0 for one in single)
    return _traced(lambda *a: ts.vmap(fn, in_axes=axes)(*a), xs), xs


WALKS = {"forward": (_forward, CASES), "vjp": (_vjp, DERIVABLE), "jvp": (_jvp, DERIVABLE),
         "vmap": (_vmap, [p for p in BATCHABLE if not all(a.draw == "key"
                                                          for a in p.values[1].args)])}


# --- what is lowered ----------------------------------------------------------------------------
def refused_by(graph: Graph) -> str:
    """The name of the op that has no form for GPUs; "" of a graph that is lowered."""
    try:
        lower(graph, TARGET)
    except UnsupportedTargetError as err:
        return re.match(r"\w+", err.message)[0]  # type: ignore[index]
    return ""


@pytest.mark.parametrize("mode", WALKS)
def test_every_op_is_lowered(mode: str, rng: np.random.Generator, capsys: Any) -> None:
    """N of M: the ops with all of their samples lowered. An op that is refused is in the table."""
    build, cases = WALKS[mode]
    total, missing, wrong = Counter[str](), Counter[str](), []
    for op, s in (p.values for p in cases if ours(p.values[0].shape)):
        total[op.name] += 1
        if name := refused_by(build(op, s, rng)[0]):
            missing[op.name] += 1
            wrong += [f"{op.name} {s.attrs}: {name}"] * (name not in REFUSED)
    with capsys.disabled():
        print(f"\n{mode}: {len(total) - len(missing)} of {len(total)} ops are lowered for {TARGET}")
    assert not wrong, "\n".join(wrong)


def test_the_table_holds_what_is_refused_alone(rng: np.random.Generator) -> None:
    """What has a form now leaves the table."""
    refused = {refused_by(build(op, s, rng)[0]) for build, cases in WALKS.values()
               for op, s in (p.values for p in cases if ours(p.values[0].shape))}
    assert set(REFUSED) <= refused, "these have a form now: take them out of the table"


# --- what it computes ---------------------------------------------------------------------------
@pytest.mark.parametrize(("op", "s"), CASES)
def test_kernels_compute_what_the_op_means(op: GraphOp, s: Sample, rng: Any) -> None:
    """The generated kernels under the interpreter, on memory filled with NaN first."""
    graph, xs = _forward(op, s, rng)
    if refused_by(graph) or op.effects:
        pytest.skip(REFUSED.get(op.name, "its results are drawn once"))
    want = outputs(op, op.ref(*[x.array for x in xs], **s.attrs))
    made = CudaProgram(graph, TARGET).run([x.array for x in xs])
    assert len(made) == len(want)
    for got, w in zip(made, want, strict=True):
        w = np.asarray(w)
        assert got.dtype == w.dtype and got.shape == w.shape
        assert_close(got, w, graph.outputs[0].aval.dtype.name, n=16)
