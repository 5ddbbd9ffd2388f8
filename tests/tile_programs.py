"""Random kernels of tiles: elementwise chains, row and column statistics, scans, sorts, products,
gathers, loops and branches, on tensors whose edges lie inside of blocks.

    text, arguments = tile_program(rng)
    build(text, **TYPES)["k"](*arguments)       # arguments that begin with "y" are written

All values are small whole numbers, so that every sum is exact and each way to run a kernel leaves
the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

import tessera as ts
from tessera.tensor import Tensor

FLOATS, INTEGERS = ["f32", "bf16", "f16", "f64"], ["int32", "int8", "int64"]
TYPES = {name: getattr(ts, name) for name in FLOATS + INTEGERS}
LARGEST = 40


@dataclass(frozen=True)
class Held:
    """A tile by name. shape: "MN", "M" or "N".  most: no number is larger."""

    name: str
    shape: str
    kind: str  # f, i or b
    most: int


@dataclass
class _Writer:
    rng: np.random.Generator
    M: int
    N: int
    BM: int
    BN: int
    lines: list[str] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)

    def let(self, text: str, shape: str, kind: str, most: int) -> Held:
        made = Held(f"t{len(self.lines)}", shape, kind, most)
        self.lines.append(f"{made.name} = {text}")
        self.held.append(made)
        if kind != "b" and most > LARGEST:
            low, high = ("-3.0", "3.0") if kind == "f" else ("-3", "3")
            self.let(f"tile.minimum(tile.maximum({made.name}, {low}), {high})", shape, kind, 3)
        return self.held[-1]

    def pick(self, shape: str = "", kind: str = "") -> Held:
        found = [t for t in self.held if shape in ("", t.shape) and (
            t.kind in (kind or "fi")) and t.most <= LARGEST]
        if found:
            return found[int(self.rng.integers(len(found)))]
        if any(t.shape == shape for t in self.held):
            return self.cast(self.pick(shape), kind)
        x, along = self.pick("MN", kind), "row" if shape == "M" else "col"
        return self.let(f"tile.{along}_max({x.name})", shape, x.kind, x.most)

    def cast(self, x: Held, kind: str) -> Held:
        to = str(self.rng.choice(FLOATS[:3] if kind == "f" else INTEGERS[:1]))
        return self.let(f"tile.cast({x.name}, {to})", x.shape, kind, x.most)

    def whole(self, x: Held) -> str:
        """x as an operand of a tile of M by N."""
        return f"{x.name}[None, :]" if x.shape == "N" else (
            f"{x.name}[:, None]" if x.shape == "M" and self.rng.random() < 0.5 else x.name)

    def number(self, kind: str) -> str:
        n = int(self.rng.integers(-2, 4))
        return f"{n}.0" if kind == "f" else str(n)

    # --- steps ----------------------------------------------------------------------------------
    def binary(self) -> None:
        x = self.pick("MN")
        y = self.pick(str(self.rng.choice(["MN", "MN", "M", "N"])), x.kind)
        op = str(self.rng.choice(["+", "-", "*", "tile.maximum", "tile.minimum"]))
        a, b = (x.name, self.whole(y)) if self.rng.random() < 0.7 else (self.whole(y), x.name)
        most = {"*": x.most * y.most}.get(op, x.most + y.most)
        self.let(f"{op}({a}, {b})" if op[0] == "t" else f"{a} {op} {b}", "MN", x.kind, most)

    def with_number(self) -> None:
        x = self.pick()
        op = str(self.rng.choice(["+", "*", "-"]))
        self.let(f"{x.name} {op} {self.number(x.kind)}", x.shape, x.kind, 3 * x.most + 3)

    def unary(self) -> None:
        x = self.pick()
        text = str(self.rng.choice(["tile.abs({0})", "-{0}", "{0} * {0}"] + (
            ["tile.floor({0})", "tile.round({0})"] if x.kind == "f" else [])))
        self.let(text.format(x.name), x.shape, x.kind, x.most**2 if "*" in text else x.most)

    def choose(self) -> None:
        c, x = self.pick("MN"), self.pick("MN")
        y = self.pick("MN", x.kind)
        op = str(self.rng.choice(["<", ">", "==", "!=", ">=", "<="]))
        test = f"({c.name} {op} {self.number(c.kind)})"
        if self.rng.random() < 0.3:
            other = self.pick("MN", c.kind)
            test = f"({test} {self.rng.choice(['&', '|'])} ({other.name} > {c.name}))"
        self.let(f"tile.where({test}, {x.name}, {y.name})", "MN", x.kind, max(x.most, y.most))

    def convert(self) -> None:
        x = self.pick()
        to = str(self.rng.choice(FLOATS + INTEGERS))
        self.let(f"tile.cast({x.name}, {to})", x.shape, "f" if to in FLOATS else "i", x.most)

    def statistic(self) -> None:
        x = self.pick("MN")
        along, name = ("N", "col") if self.rng.random() < 0.4 else ("M", "row")
        how = str(self.rng.choice(["sum", "max", "min", "argmax", "argmin"]))
        if how[0] == "a":
            axis = {"row": 1, "col": 0}[name]
            self.let(f"tile.cast(tile.{how}({x.name}, axis={axis}), int32)", along, "i", LARGEST)
            return
        size = self.BN if name == "row" else self.BM
        made = f"tile.{name}_{how}({x.name})"
        self.let(made, along, x.kind, x.most * (size if how == "sum" else 1))

    def scalar(self) -> None:
        x, y = self.pick("MN"), self.pick()
        how = str(self.rng.choice(["max", "min"]))
        if y.kind != x.kind:
            y = self.cast(y, x.kind)
        self.let(f"{y.name} + tile.reduce_{how}({x.name})", y.shape, x.kind, x.most + y.most)

    def scan(self) -> None:
        x = self.pick("MN")
        axis, how = int(self.rng.integers(0, 2)), str(self.rng.choice(["cumsum", "cummax"]))
        size = (self.BM, self.BN)[axis] if how == "cumsum" else 1
        axis_text = f", axis={axis}" if how == "cumsum" else ""
        self.let(f"tile.{how}({x.name}{axis_text})", "MN", x.kind, x.most * size)

    def sort(self) -> None:
        x = self.pick("MN")
        text = str(self.rng.choice(["tile.sort({0})", "tile.sort({0}, descending=True)",
                                    "tile.cast(tile.argsort({0}), int32)"]))
        kind = "i" if "arg" in text else x.kind
        self.let(text.format(x.name), "MN", kind, self.BN if "arg" in text else x.most)

    def turn(self) -> None:
        x = self.pick("MN")
        self.let(f"tile.transpose(tile.transpose({x.name}) + {self.number(x.kind)})", "MN", x.kind,
                 x.most + 3)

    def product(self) -> None:
        x, y = self.pick("MN", "f"), self.pick("MN", "f")
        to = str(self.rng.choice(["bf16", "f16", "f32"]))
        a, b = (f"tile.cast(tile.minimum(tile.maximum({t.name}, -2.0), 2.0), {to})" for t in (x, y))
        self.let(f"tile.dot({a}, tile.transpose({b}))", "MM", "f", 10**6)
        square = self.held.pop() if self.held[-1].shape == "MM" else None
        found = [t for t in (*self.held, square) if t is not None and t.shape == "MM"]
        self.held = [t for t in self.held if t.shape != "MM"]
        how = str(self.rng.choice(["sum", "max"]))
        self.let(f"tile.row_{how}({found[-1].name})", "M", "f", 3 * self.BM)

    def loop(self) -> None:
        name = f"s{len(self.lines)}"
        self.lines += [f"{name} = tile.zeros(({self.BM},))",
                       f"for j{name} in range(0, {self.N}, {self.BN}):",
                       f"    {name} = {name} + tile.row_sum(tile.cast(tile.load("
                       f"B[m:m+{self.BM}, j{name}:j{name}+{self.BN}]), f32))"]
        self.let(f"{name} * 1.0", "M", "f", 3 * self.N)

    def branch(self) -> None:
        x = self.pick("MN")
        if x.kind == "i":
            x = self.let(f"tile.cast({x.name}, int32)", "MN", "i", x.most)
        name = f"b{len(self.lines)}"
        self.lines += [f"{name} = {x.name}", f"if m > {int(self.rng.integers(0, self.M))}:",
                       f"    {name} = {name} + {self.number(x.kind)}"]
        self.held.append(Held(name, "MN", x.kind, x.most + 3))

    def look_up(self) -> None:
        x = self.cast(self.pick("MN"), "i")
        self.let(f"tile.gather(V, ({x.name} + 64) % {self.N})", "MN", "f", 3)

    def inside(self) -> None:
        x = self.pick("MN")
        zero = "0.0" if x.kind == "f" else "0"
        self.let(f"tile.where(tile.inside({x.name}), {x.name}, {zero})", "MN", x.kind, x.most)


STEPS = ("binary binary binary with_number unary choose convert convert statistic statistic scalar "
         "scan sort turn product loop branch look_up inside").split()


def tile_program(rng: np.random.Generator) -> tuple[str, list[Any]]:
    """The source of a kernel `k` and its arguments, on the host."""
    BM, BN = int(rng.choice([8, 16, 32])), int(rng.choice([16, 32, 64]))
    M, N = int(rng.integers(1, 70)), int(rng.integers(1, 2 * BN + 2))
    w = _Writer(rng, M, N, BM, BN)
    types = {x: str(rng.choice(FLOATS + INTEGERS)) for x in "AB"}
    y_type = str(rng.choice(FLOATS + INTEGERS))
    for x, numeric in types.items():
        w.let(f"tile.load({x}[m:m+{BM}, n:n+{BN}])", "MN", "f" if numeric in FLOATS else "i", 2)
    w.let(f"tile.load(V[n:n+{BN}])", "N", "f", 2)
    for _ in range(int(rng.integers(2, 9))):
        getattr(w, str(rng.choice(STEPS)))()
    last = w.pick("MN")
    rows = [t for t in w.held if t.shape == "M" and t.most <= LARGEST]
    body = [f"m = tile.group_id(0) * {BM}", f"n = tile.group_id(1) * {BN}", *w.lines,
            f"y[m:m+{BM}, n:n+{BN}] = tile.cast({last.name}, {y_type})"]
    if rows and N <= BN:
        body.append(f"y_rows[m:m+{BM}] = tile.cast({rows[-1].name}, f32)")
    operands = ", ".join(f'{x}: Tensor["M", "N", {t}]' for x, t in types.items())
    head = [f"@kernel(grid=({-(-M // BM)}, {-(-N // BN)}))",
            f'def k({operands}, V: Tensor["N", f32], y: Tensor["M", "N", {y_type}], '
            'y_rows: Tensor["M", f32]):']
    text = "\n".join([*head, *(f"    {line}" for line in body)]) + "\n"
    given = [ts.tensor(rng.integers(-2, 3, (M, N)).astype(np.float64), t) for t in types.values()]
    return text, [*given, ts.tensor(rng.integers(-2, 3, N).astype(np.float64), "f32"),
                  ts.zeros((M, N), y_type), ts.zeros((M,), "f32")]


def copies(arguments: list[Any]) -> list[Tensor]:
    return [x.copy() for x in arguments]
