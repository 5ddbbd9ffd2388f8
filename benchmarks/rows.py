"""Rows of every length, forward and backward, beside torch.compile, PyTorch's kernels and a copy.

    python benchmarks/memory_bound.py rows            2^26 elements of bf16 in rows of 64 to 131072
    python benchmarks/memory_bound.py rows 1024 "softmax,top 8"         some lengths, some cases
    python benchmarks/memory_bound.py orders        sorts and the largest of rows of four lengths
    python benchmarks/memory_bound.py compile rows  fills both compilers' caches, measures nothing

What PyTorch compiles is what a user would write, for fixed shapes. Both compilers run in
several processes, which then measure one after another. Times are medians of rounds in
which all run in turn, ten calls at a time behind work that lets the host run ahead. Rates are of
the bytes that must move. Errors are Frobenius norms against f64.
"""

from __future__ import annotations

import argparse
import os
import statistics
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import side_processes
import torch
import torch._functorch.config
import torch.nn.functional as F
from gpu_timing import AHEAD_CYCLES, as_torch, distance, in_turn

import tessera as ts
from tessera import stdlib

ELEMENTS, LENGTHS = 1 << 26, (64, 256, 1024, 4096, 16384, 65536, 131072)
ORDER_LENGTHS = (64, 1024, 16384, 131072)  # compiling networks takes both sides long
CALLS, PROCESSES = 10, 16
Tensors = tuple[torch.Tensor, ...]
torch._functorch.config.donated_buffer = False  # backward passes are run again and again


@dataclass(frozen=True)
class Case:
    """moves: how often all elements are read or written.  inputs: x rows, w and b weights, l
    labels, y rows of what a gradient begins with.  torchs: the function itself, forward.  calls:
    in a round."""

    name: str
    moves: int
    inputs: str
    ours: Callable[..., Any]
    torchs: Callable[..., torch.Tensor]
    calls: int = CALLS

    def arrays(self, N: int) -> Tensors:
        generator = torch.Generator("cuda").manual_seed(N)
        M = ELEMENTS // N

        def drawn(kind: str) -> torch.Tensor:
            if kind == "l":
                return torch.randint(0, N, (M,), device="cuda", dtype=torch.int32,
                                     generator=generator)
            shape = (N,) if kind in "wb" else (M, N)
            return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

        return tuple(map(drawn, self.inputs))

    @property
    def backward(self) -> bool:
        return "gradient" in self.name

    def jitted(self) -> Callable[..., Any]:
        fn = self.ours
        return fn if fn in (stdlib.stable_softmax, stdlib.efficient_layernorm) else ts.jit(fn)


# --- the cases --------------------------------------------------------------------------------
def _narrow(x: Any) -> Any:
    return ts.cast(x, "bf16")


def _norm_gradients(norm: Callable[..., Any]) -> Callable[..., Any]:
    def gradients(*xs: Any) -> Any:
        first, *weights = ts.vjp(norm, *xs[:-1])[1](xs[-1])
        return _narrow(first), *weights

    return gradients


def _gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dy: _narrow(ts.vjp(fn, x)[1](dy))


def _loss(x: Any, labels: Any) -> Any:
    return ts.cross_entropy(ts.cast(x, "f32"), labels)


def _loss_and_gradient(x: Any, labels: Any) -> Any:
    value, pull = ts.vjp(lambda x: _loss(x, labels), x)
    return _narrow(pull(ts.ones(()))), value


def _layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def _rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], w, 1e-6)


def _torch_loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x if x.dtype is torch.float64 else x.float(), labels.long())


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def _log_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(x, -1)


CASES = {c.name: c for c in (
    Case("softmax", 2, "x", ts.softmax, _softmax),
    Case("softmax, stdlib", 2, "x", stdlib.stable_softmax, _softmax),
    Case("log softmax", 2, "x", ts.log_softmax, _log_softmax),
    Case("layer norm", 2, "xwb", ts.layernorm, _layer_norm),
    Case("layer norm, stdlib", 2, "xwb", stdlib.efficient_layernorm, _layer_norm),
    Case("rms norm", 2, "xw", ts.rmsnorm, _rms_norm),
    Case("cross entropy", 1, "xl", _loss, _torch_loss),
    Case("softmax's gradient", 3, "xy", _gradient(ts.softmax), _softmax),
    Case("log softmax's gradient", 3, "xy", _gradient(ts.log_softmax), _log_softmax),
    Case("layer norm's gradient", 3, "xwby", _norm_gradients(ts.layernorm), _layer_norm),
    Case("rms norm's gradient", 3, "xwy", _norm_gradients(ts.rmsnorm), _rms_norm),
    Case("cross entropy and its gradient", 2, "xl", _loss_and_gradient, _torch_loss),
)}
OTHERS = {c.name: c for c in (
    Case("sum", 1, "x", lambda x: ts.sum(x, axis=-1), lambda x: x.sum(-1)),
    Case("sum of columns", 1, "x", lambda x: ts.sum(x, axis=0), lambda x: x.sum(0)),
    Case("largest", 1, "x", lambda x: ts.max(x, axis=-1), lambda x: x.amax(-1)),
    Case("transpose", 2, "x", ts.transpose, lambda x: x.t().contiguous()),
    Case("cumulative sum", 2, "x", lambda x: ts.cumsum(x, axis=-1), lambda x: x.cumsum(-1)),
)}
ORDERS = {c.name: c for c in (
    Case("sort", 2, "x", lambda x: ts.sort(x, axis=-1), lambda x: x.sort(-1).values, 3),
    Case("argsort", 5, "x", ts.argsort, lambda x: x.argsort(stable=True), 3),
    Case("top 8", 1, "x", lambda x: ts.top_k(x, 8), lambda x: x.topk(8).values, 3),
    Case("top 50", 1, "x", lambda x: ts.top_k(x, 50), lambda x: x.topk(50).values, 3),
)}


# --- measuring --------------------------------------------------------------------------------
def torch_run(case: Case, fn: Callable[..., torch.Tensor], xs: Tensors) -> Callable[[], Any]:
    """A call of PyTorch's side. A gradient alone is that of a forward pass made before, which has
    left statistics; we take them anew."""
    if not case.backward:
        return lambda: fn(*xs)
    *operands, last = xs
    given = [x.detach().requires_grad_() for x in operands]
    if case.inputs[-1] == "l":
        return lambda: torch.autograd.grad(fn(*given, last), given)
    y = fn(*given)
    return lambda: torch.autograd.grad(y, given, last, retain_graph=True)


@dataclass(frozen=True)
class Measurement:
    """A case for rows of N: ours, PyTorch's, and what torch.compile makes of that."""

    case: Case
    N: int
    ours: Callable[..., Any]
    compiled: Callable[..., torch.Tensor]

    @classmethod
    def of(cls, case: Case, N: int) -> Measurement:
        fn = case.torchs  # a copy, so that lengths do not share what PyTorch knows of a function
        copy = types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__)
        return cls(case, N, case.jitted(), torch.compile(copy, dynamic=False))

    def runs(self, xs: Tensors) -> dict[str, Callable[[], Any]]:
        given = [ts.from_dlpack(x) for x in xs]
        return {"tessera": lambda: self.ours(*given),
                "PyTorch": torch_run(self.case, self.case.torchs, xs),
                "torch.compile": torch_run(self.case, self.compiled, xs)}

    def compile(self) -> None:
        for run in self.runs(self.case.arrays(self.N)).values():
            run()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def figures(self) -> dict[str, Any]:
        xs = self.case.arrays(self.N)
        runs = self.runs(xs)
        off = errors(self.case, xs, runs)
        out = torch.empty_like(xs[0])
        times = in_turn({**runs, "copy": lambda: out.copy_(xs[0])}, self.case.calls,
                        ahead_cycles=AHEAD_CYCLES)
        rates = {name: (2 if name == "copy" else self.case.moves) * 2 * ELEMENTS / us / 1e3
                 for name, us in times.items()}
        ours = rates["tessera"]
        beside = {name: round(ours / r, 3) for name, r in rates.items() if name != "tessera"}
        torch.cuda.empty_cache()
        return {"us": round(times["tessera"], 1), "GB/s": round(ours),
                **{f"of {k}": v for k, v in beside.items()},
                "error": float(f"{off['tessera']:.2g}"),
                "torch's error": float(f"{off['torch.compile']:.2g}")}


def errors(case: Case, xs: Tensors, runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Of the first result of each: the norm of the difference by that of the result."""
    wide = tuple(x.double() if x.is_floating_point() else x for x in xs)
    want = _first(torch_run(case, case.torchs, wide)())
    return {name: distance(_first(run()), want) for name, run in runs.items()}


def _first(made: Any) -> torch.Tensor:
    return as_torch(made[0] if isinstance(made, tuple | list) else made)


# --- processes --------------------------------------------------------------------------------
def chosen(asked: list[str]) -> list[tuple[Case, int]]:
    lengths = tuple(int(n) for n in asked[0].split(",")) if asked else LENGTHS
    known, names = {**CASES, **OTHERS, **ORDERS}, asked[1].split(",") if asked[1:] else list(CASES)
    return [(known[name], N) for N in lengths for name in names]


def prepared(name: str, N: int) -> tuple[Measurement]:
    one = Measurement.of({**CASES, **OTHERS, **ORDERS}[name], N)
    one.compile()
    return (one,)


def measured(asked: list[str], compiled_alone: bool = False
             ) -> Iterator[tuple[str, dict[str, Any]]]:
    """asked: lengths and names, or less. compiled_alone: nothing is measured."""
    cases = [[case.name, N] for case, N in chosen(asked)]
    parts, ratios = max(1, min(PROCESSES, len(os.sched_getaffinity(0)) - 2)), list[float]()
    for (name, N), found in side_processes.results(__file__, cases, parts, not compiled_alone):
        ratios.append(found["of torch.compile"])
        yield f"{name}, {N}", found
    if ratios:
        yield "all of torch.compile", {"geometric mean": round(statistics.geometric_mean(ratios),
                                                               3), "least": min(ratios)}


def orders() -> list[str]:
    return [",".join(map(str, ORDER_LENGTHS)), ",".join(ORDERS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    side_processes.flag(parser)
    side_processes.work(parser.parse_args().work, prepared, Measurement.figures)


if __name__ == "__main__":
    main()
