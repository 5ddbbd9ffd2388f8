"""Kernels lowered to the warp-specialised form, and run on the machine that knows it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera import bf16
from tessera.runtime.generations import GENERATIONS
from tessera.tile.cuda.lower.warp_specialised import (
    Refusal,
    WarpSpecialisedProgram,
    lower_warp_specialised,
)
from tessera.tile.cuda.lower.warp_specialised.machine import run_program
from tessera.tile.interpreter.launch import _environment


@dataclass(frozen=True)
class Known:
    """Everything divisible and aligned, unless a test says otherwise."""

    divisible: frozenset[str] = frozenset(
        ["M", "N", "K", "S", "D", "B", "H", "G", "E"])
    aligned: frozenset[str] = frozenset("ABCQKVXWYR") | {"bias"}
    shared: bool = False


def lowered(kernel, *args, facts=None, schedule=None, **kwargs) -> WarpSpecialisedProgram | Refusal:
    function = kernel.lower(*args, **kwargs)
    return lower_warp_specialised(function, schedule, facts or Known(), GENERATIONS["sm_90a"])


def program(kernel, *args, **kwargs) -> WarpSpecialisedProgram:
    made = lowered(kernel, *args, **kwargs)
    assert isinstance(made, WarpSpecialisedProgram), made
    return made


def run(kernel, made: WarpSpecialisedProgram, axes, *args, blocks=2, **kwargs) -> None:
    """The lowered program on these arguments, in place."""
    bound = kernel.bind(args, kwargs)
    env, _ = _environment(made.function, bound)
    with np.errstate(all="ignore"):
        run_program(made, axes, env, blocks)
    bound.write_back()


def distance(x, y) -> float:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def random(rng, *shape):
    return rng.standard_normal(shape).astype(bf16.numpy)


def poisoned(*shape):
    return np.full(shape, np.nan, bf16.numpy)


def compared(kernel, axes, args, out, schedule=None, blocks=2, **kwargs) -> WarpSpecialisedProgram:
    """Interprets the kernel and its lowered program: equal up to the rounding of the result."""
    want, got = [a.copy() for a in args], [a.copy() for a in args]
    scalars = kwargs.pop("scalars", ())
    kernel[axes, 32](*want, *scalars, **kwargs)
    made = program(kernel, *got, *scalars, schedule=schedule, **kwargs)
    run(kernel, made, axes, *got, *scalars, blocks=blocks, **kwargs)
    assert not np.isnan(np.asarray(want[out], np.float32)).any()
    assert distance(got[out], want[out]) < 4e-3
    return made
