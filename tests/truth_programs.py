"""Random conditions with guarded reads, and what Python makes of them: an array that refuses every
index outside of it, evaluated for each lane alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.build import build

LENGTH = 37


class Strict:
    """A list of numbers without negative indices."""

    def __init__(self, numbers: np.ndarray):
        self.numbers = numbers.tolist()

    def __getitem__(self, i: int) -> float:
        if not 0 <= i < len(self.numbers):
            raise IndexError(i)
        return self.numbers[i]


@dataclass(frozen=True)
class Program:
    """A condition and a value over i, N, x (f32) and p (int32) as text."""

    condition: str
    value: str

    @property
    def source(self) -> str:
        return f"""@kernel
def k(x: Tensor["N", f32], p: Tensor["N", i32], o: Tensor["M", i32]):
    i = tile.linear_id()
    if i < M:
        n = 0
        if {self.condition}:
            n += 1
        while n < 5 and ({self.condition}):
            n += 2
        o[i] = n * 100 + ({self.value})
"""

    def python(self, x: np.ndarray, p: np.ndarray, lanes: int) -> list[int]:
        """What each lane leaves. Raises IndexError where a read is not guarded."""
        out = []
        for i in range(lanes):
            names = {"i": i, "N": len(x), "x": Strict(x), "p": Strict(p)}
            n = 1 if eval(self.condition, names) else 0
            while n < 5 and eval(self.condition, names):
                n += 2
            out.append(n * 100 + int(eval(self.value, names)))
        return out


def condition(rng: np.random.Generator, depth: int = 3) -> str:
    """Guards and reads, so mixed that about half of the programs guard all of their reads."""
    kind = int(rng.integers(0, 9 if depth else 5))
    shift = int(rng.integers(-2, 4))
    if kind <= 1:
        return f"i + {shift} < N"
    if kind == 2:
        return f"i < N and x[i] > {rng.choice([-0.5, 0.0, 0.5])}"
    if kind == 3:
        return "0 <= i - 3 < N > p[i - 3]"
    if kind == 4:
        return f"(x[i] if i < N else {rng.choice(['0.0', '1.0'])}) > 0.25"
    if kind == 5:
        return f"not ({condition(rng, depth - 1)})"
    first, second = condition(rng, depth - 1), condition(rng, depth - 1)
    if kind == 6:
        return f"({first}) or ({second})"
    if kind == 7:
        return f"i + {shift} < N and (({first}) or x[i] < 0.0)"
    return f"({first}) and ({second})"


def value(rng: np.random.Generator) -> str:
    """Numbers that `and` and `or` choose."""
    return str(rng.choice([
        "(i < N and p[i]) or 9", "p[i % N] or 7", "p[i % N] and i", "(i % 3) or (i % 5) or 11",
        "(p[i] or 3) if i < N else 8", "i % 2 and i % 3 and 5",
        "(p[p[i] % N] and 4) if i < N and p[i] > 0 else 2"]))


def inputs(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return (rng.standard_normal(LENGTH).astype(np.float32),
            rng.integers(-2, LENGTH, LENGTH).astype(np.int32))


def draw(rng: np.random.Generator) -> Program:
    return Program(condition(rng), value(rng))


def guarded(rng: np.random.Generator) -> tuple[Program, tuple, list[int]]:
    """A program whose reads are all guarded, its arguments, and what Python makes of them."""
    while True:
        program, (x, p) = draw(rng), inputs(rng)
        lanes = LENGTH + 8
        try:
            want = program.python(x, p, lanes)
        except IndexError:
            continue
        return program, (x, p, np.zeros(lanes, np.int32)), want


def kernel(program: Program):
    return build(program.source)["k"]
