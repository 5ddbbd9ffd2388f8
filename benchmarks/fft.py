"""Fourier transforms of 2^24 f32 points beside cuFFT, on one GPU.

    python benchmarks/fft.py            python benchmarks/fft.py compile PART PARTS

Ours is a jitted function of the real and imaginary parts of four arrays; cuFFT's, called by
PyTorch on four arrays of complex numbers, the same bytes, is a CUDA graph. So what a call costs the
host is not measured. Of each the result for the first is compared with f64. Times are medians of
rounds in which both run in turn, behind work that lets the host run ahead. Compiling many functions
takes a while: `compile` leaves those of one part on the disk.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
import torch
from torch import fft as cufft

import tessera as ts

POINTS = 1 << 24
MANY = 4  # arrays of a call
CALLS, ROUNDS, AHEAD_CYCLES = 2, 7, 4_000_000
# Ours on all arrays, cuFFT's on one of them, and on the first in f64.
Made = tuple[Callable[[], Any], Callable[[int], torch.Tensor], Callable[[], torch.Tensor]]


def joined(y: Any) -> torch.Tensor:
    """A result as one array of PyTorch's."""
    if isinstance(y, torch.Tensor):
        return y
    if isinstance(y, tuple):
        return torch.complex(*map(torch.from_dlpack, y))
    return torch.from_dlpack(y)


@functools.cache
def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))


def wide(z: torch.Tensor) -> torch.Tensor:
    return z.to(torch.complex128 if z.is_complex() else torch.float64)


# --- cases ----------------------------------------------------------------------------------------
def of_arrays(ours: Callable, theirs: Callable, xs: list[torch.Tensor], *more: Any) -> Made:
    """ours: of the parts of one of these, and more, which theirs knows."""
    parts = [[x.real.contiguous(), x.imag.contiguous()] if x.is_complex() else [x] for x in xs]
    fn = ts.jit(lambda parts, *more: [ours(*part, *more) for part in parts])
    there = [[ts.from_dlpack(p) for p in part] for part in parts]
    more = tuple(map(ts.from_dlpack, more))
    return lambda: fn(there, *more), lambda i: theirs(xs[i]), lambda: theirs(wide(xs[0]))


@functools.cache
def drawn_pairs() -> torch.Tensor:
    return torch.complex(*drawn(2, MANY, POINTS))


def pairs(*shape: int) -> list[torch.Tensor]:
    return [z.view(shape) for z in drawn_pairs()]


def lines(n: int) -> Made:
    return of_arrays(lambda re, im: ts.fft((re, im)), cufft.fft, pairs(POINTS // n, n))


def planes(n: int) -> Made:
    return of_arrays(lambda re, im: ts.fft2((re, im)), cufft.fft2, pairs(POINTS // n**2, n, n))


def volumes(n: int) -> Made:
    return of_arrays(lambda re, im: ts.fft(ts.fft2((re, im)), axis=-3),
                     lambda z: cufft.fftn(z, dim=(-3, -2, -1)), pairs(POINTS // n**3, n, n, n))


def columns(n: int) -> Made:
    return of_arrays(lambda re, im: ts.fft((re, im), axis=0), lambda z: cufft.fft(z, dim=0),
                     pairs(n, POINTS // n))


def reals(n: int) -> list[torch.Tensor]:
    return [x.view(POINTS // n, n) for x in drawn(2, MANY, POINTS)[0]]


def real(n: int) -> Made:
    return of_arrays(ts.rfft, cufft.rfft, reals(n))


def real_back(n: int) -> Made:
    return of_arrays(lambda re, im: ts.irfft((re, im)), cufft.irfft, [*map(cufft.rfft, reals(n))])


def convolution(n: int) -> Made:
    """Of real lines with one filter, whose transform is known."""
    h = cufft.rfft(drawn(n))

    def ours(x: Any, re: Any, im: Any) -> Any:
        a, b = ts.rfft(x)
        return ts.irfft((a * re - b * im, a * im + b * re))

    return of_arrays(ours, lambda x: cufft.irfft(cufft.rfft(x) * h), reals(n),
                     h.real.contiguous(), h.imag.contiguous())


REAL = (8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20)
CASES: dict[str, Callable[[], Made]] = {
    **{f"lines of 2^{a}": lambda a=a: lines(1 << a) for a in range(8, 21)},
    **{f"real lines of 2^{a}": lambda a=a: real(1 << a) for a in REAL},
    **{f"back to real lines of 2^{a}": lambda a=a: real_back(1 << a) for a in REAL},
    **{f"planes of 2^{a} x 2^{a}": lambda a=a: planes(1 << a) for a in (8, 9, 10, 11, 12)},
    **{f"volumes of 2^{a} x 2^{a} x 2^{a}": lambda a=a: volumes(1 << a) for a in (6, 7, 8)},
    **{f"columns of 2^{a}": lambda a=a: columns(1 << a) for a in (8, 10)},
    **{f"convolutions of 2^{a}": lambda a=a: convolution(1 << a) for a in (8, 12, 14)},
}


# --- measuring ------------------------------------------------------------------------------------
def in_turn(*runs: Callable[[], Any]) -> list[float]:
    """Microseconds of one array of a call of each."""
    times: list[list[float]] = [[] for _ in runs]
    for r in range(ROUNDS + 1):
        for run, found in zip(runs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(AHEAD_CYCLES)
            begin.record()
            for _ in range(CALLS):
                run()
            end.record()
            torch.cuda.synchronize()
            if r:  # the first warms up
                found.append(1e3 * begin.elapsed_time(end) / (CALLS * MANY))
    return [statistics.median(t) for t in times]


def captured(theirs: Callable[[int], Any]) -> Callable[[], None]:
    theirs(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(MANY):
            theirs(i)
    return graph.replay


def measured(ours: Callable, theirs: Callable, truth: Callable) -> dict[str, float]:
    want = truth()
    errors = [float((wide(joined(y)) - want).norm() / want.norm())
              for y in (ours()[0], theirs(0))]
    del want
    us = in_turn(ours, captured(theirs))
    return {"ours_us": round(us[0], 1), "cufft_us": round(us[1], 1),
            "ratio": round(us[1] / us[0], 3), "error": float(f"{errors[0]:.2g}"),
            "cufft_error": float(f"{errors[1]:.2g}")}


def main() -> None:
    if sys.argv[1:2] == ["compile"]:
        part, parts = map(int, sys.argv[2:])
        for case in list(CASES.values())[part::parts]:
            case()[0]()
        return torch.cuda.synchronize()
    source, target = drawn(MANY, 2, POINTS), torch.empty(MANY, 2, POINTS, device="cuda")
    (copy,) = in_turn(lambda: target.copy_(source))
    cases: dict[str, dict] = {}
    figures = {"device": torch.cuda.get_device_name(), "copy_us": round(copy, 1), "cases": cases}
    for name, case in CASES.items():
        cases[name] = measured(*case())
        print(name, json.dumps(cases[name]), flush=True)
        if out := os.environ.get("OUT"):
            text = json.dumps({**record.context(), **figures}, indent=2)
            (Path(out) / "fft.json").write_text(text + "\n")
    if not out:
        record.write("fft", figures, shown=False)


if __name__ == "__main__":
    main()
