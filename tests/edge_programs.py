"""Random kernels whose boxes reach beyond their tensors, and what each leaves, in fp64 NumPy.

The oracle knows nothing of edges as intervals: beside every array it keeps which elements exist. An
element computed from others exists where all of them do; reductions take what exists; control flow
takes what it took. A step draws its line of the kernel and its meaning together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernels.build import build
from tessera import config
from tessera.errors import TesseraError

Shape = tuple[int, int]


@dataclass
class V:
    """The elements of a tile, and which of them exist."""

    value: np.ndarray
    there: np.ndarray

    def map(self, f: Callable) -> V:
        with np.errstate(all="ignore"):
            return V(f(self.value), self.there)

    def only(self, other: float) -> np.ndarray:
        return np.where(self.there, self.value, other)


@dataclass
class Run:
    """One group: where its rows begin, the arguments, and the tile so far."""

    row: int
    args: dict[str, Any]
    t: V = field(default_factory=lambda: V(np.zeros((1, 1)), np.zeros((1, 1), bool)))


UNARY = [
    ("tile.exp(t * 0.25)", lambda v: np.exp(v * 0.25)),
    ("t * 0.5 + 1.0", lambda v: v * 0.5 + 1.0),
    ("tile.abs(t)", np.abs),
    ("tile.maximum(t, -0.25)", lambda v: np.maximum(v, -0.25)),
    ("tile.tanh(t)", np.tanh),
    ("-t", np.negative),
    ("1.5 - t", lambda v: 1.5 - v),
    ("half(t)", lambda v: v * 0.5),
    ("tile.minimum(tile.maximum(t, -4.0), 4.0)", lambda v: np.clip(v, -4.0, 4.0)),
]
LOW, HIGH = -4.0, 4.0
CLAMP = "t = tile.minimum(tile.maximum(t, -4.0), 4.0)"


class Program:
    """A drawn kernel: text, arguments and meaning."""

    def __init__(self, rng: np.random.Generator, length: int | None = None):
        self.rng = rng
        self.rows, self.cols = int(rng.choice([4, 8])), int(rng.choice([16, 32]))
        self.M, self.N = int(rng.integers(1, 2 * self.rows + 3)), int(rng.integers(1, 56))
        self.shape: Shape = (self.rows, self.cols)
        self.lines: list[str] = []
        self.steps: list[Callable[[Run], None]] = []
        self.buffers = 0
        self.args = self.arguments()
        self.start()
        for _ in range(length or int(rng.integers(2, 7))):
            name = str(rng.choice(STEPS))
            getattr(self, name)()
        if self.shape != (self.rows, self.cols):
            self.transpose()
        self.end()

    def arguments(self) -> dict[str, Any]:
        rng, M, N = self.rng, self.M, self.N
        def floats(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        return {"x": floats(M, N), "y": floats(M, N), "w": floats(32, 32) * np.float32(0.2),
                "at": rng.integers(0, M, M).astype(np.int32),
                "f": int(rng.integers(0, 2)), "n": int(rng.integers(0, 4)),
                "c": int(rng.integers(-9, N + 3))}

    # --- drawing ------------------------------------------------------------------------------
    def pick(self, *items: Any) -> Any:
        return items[int(self.rng.integers(len(items)))]

    def add(self, lines: str, step: Callable[[Run], None]) -> None:
        self.lines += lines.splitlines()
        self.steps.append(step)

    def change(self, lines: str, f: Callable[[V], V]) -> None:
        """Lines that assign t, and t after them."""
        def step(r: Run) -> None:
            r.t = f(r.t)

        self.add(lines, step)

    def unary(self) -> tuple[str, Callable]:
        return self.pick(*UNARY)

    def buffer(self) -> str:
        self.buffers += 1
        a, b = self.shape
        name = f"s{self.buffers}"
        self.lines.append(f"{name} = tile.alloc_shared(({a}, {b}), f32)")
        return name

    # --- beginnings ---------------------------------------------------------------------------
    def start(self) -> None:
        kind = self.pick("box", "box", "box", "box", "copied", "total", "gathered", "filled")
        getattr(self, "start_" + kind)()

    def box(self, rows: int = 0) -> tuple[str, Callable[[Run], V]]:
        """(slice, the elements of that box of the array `name`)"""
        lo = self.pick("0", "0", "3", "-3", "c", f"{self.N // 2}")
        R, C = self.rows, self.cols
        first = "tile_m" if not rows else f"tile_m - {rows}"
        text = f"[{first}:{first} + {R}, {lo}:{lo} + {C}]"

        def read(r: Run, name: str = "x") -> V:
            at = r.args["c"] if lo == "c" else int(lo)
            return box_of(r.args[name], r.row - rows, at, R, C)

        return text, read

    def start_box(self) -> None:
        text, read = self.box(self.pick(0, 0, 0, 2))
        self.add(f"t = tile.load(x{text})", lambda r: setattr(r, "t", read(r)))

    def start_filled(self) -> None:
        text, read = self.box()
        fill = self.pick(0, 0.5, -1.0)

        def step(r: Run) -> None:
            found = read(r)
            r.t = V(found.only(fill), np.ones_like(found.there))

        self.add(f"t = tile.load(x{text}, fill={fill})", step)

    def start_copied(self) -> None:
        text, read = self.box()
        name = self.buffer()
        self.add(f"tile.cp_async({name}, x{text})\ntile.cp_wait_group(0)\ntile.barrier()\n"
                 f"t = tile.load({name})", lambda r: setattr(r, "t", read(r)))

    def start_total(self) -> None:
        """A loop adds up blocks of columns."""
        R, C = self.rows, self.cols
        def step(r: Run) -> None:
            parts = [box_of(r.args["x"], r.row, k, R, C) for k in range(0, self.N, C)]
            rows = parts[0].there.any(axis=1)[:, None] & np.ones(C, bool)
            r.t = V(np.sum([p.only(0.0) for p in parts], axis=0), rows)

        self.add(f"t = tile.zeros(({R}, {C}))\nfor k in tile.range(0, x.shape[1], {C}):\n"
                 f"    t = t + tile.load(x[tile_m:tile_m + {R}, k:k + {C}])", step)

    def start_gathered(self) -> None:
        R, C = self.rows, self.cols
        def step(r: Run) -> None:
            rows = np.arange(r.row, r.row + R)
            there = rows < self.M
            at = r.args["at"][np.where(there, rows, 0)]
            found = box_of(r.args["x"], 0, 0, self.M, C)
            r.t = V(found.value[at], found.there[at] & there[:, None])

        self.add(f"t = tile.gather(x[:, 0:{C}], tile.load(at[tile_m:tile_m + {R}]))", step)

    # --- steps --------------------------------------------------------------------------------
    def elementwise(self) -> None:
        text, f = self.unary()
        self.change(f"t = {text}", lambda t: t.map(f))

    def branch(self) -> None:
        (a, f), (b, g) = self.unary(), self.unary()
        both = self.pick(True, False)
        text = f"if f > 0:\n    t = {a}" + (f"\nelse:\n    t = {b}" if both else "")
        self.add(text, lambda r: setattr(r, "t", r.t.map(f) if r.args["f"] > 0 else
                                         r.t.map(g) if both else r.t))

    def ternary(self) -> None:
        a, f = self.unary()
        self.add(f"t = {a} if f > 0 else t",
                 lambda r: setattr(r, "t", r.t.map(f) if r.args["f"] > 0 else r.t))

    def loop(self) -> None:
        a, f = self.unary()
        i = f"i{len(self.lines)}"
        text = self.pick(f"for {i} in range(n):\n    t = {a}",
                         f"{i} = n\nwhile {i} > 0:\n    t = {a}\n    {i} -= 1",
                         f"for {i} in range(n):\n    if {i} > 1:\n        break\n    t = {a}")

        def step(r: Run) -> None:
            for _ in range(min(r.args["n"], 2) if "break" in text else r.args["n"]):
                r.t = r.t.map(f)

        self.add(text, step)

    def statistic(self) -> None:
        kind, f, e = self.pick(*ROWS)
        self.change(f"t = t - tile.{kind}(t)[:, None]\n{CLAMP}", lambda t: V(np.clip(
            t.value - f(t.only(e), t.there)[:, None], LOW, HIGH), t.there))

    def softmax(self) -> None:
        def meaning(t: V) -> V:
            top = np.where(t.there.any(1), t.only(-np.inf).max(1), 0)
            p = np.exp(t.only(-np.inf) - top[:, None])
            with np.errstate(all="ignore"):
                return V(p / p.sum(1)[:, None], t.there)

        self.change("e = tile.exp(t - tile.row_max(t)[:, None])\nt = e / tile.row_sum(e)", meaning)

    def grouped(self) -> None:
        """A maximum of rows through a reshape."""
        a, b = self.shape
        self.change(f"u = tile.reshape(t, ({a}, {b // 4}, 4))\n"
                    "t = t - tile.reduce_max(tile.reduce_max(u, axis=2), axis=1)[:, None]\n"
                    f"{CLAMP}",
                    lambda t: V(np.clip(t.value - t.only(-np.inf).max(1)[:, None], LOW, HIGH),
                                t.there))

    def reshaped(self) -> None:
        a, b = self.shape
        text, f = self.unary()
        shape = self.pick((b, a), (a * b,), (a, 1, b), (2, a // 2, b), (a, b // 2, 2))
        self.change(f"t = tile.reshape(t, {shape})\nt = {text}\nt = tile.reshape(t, ({a}, {b}))",
                    lambda t: t.map(f))

    def transpose(self) -> None:
        self.shape = self.shape[::-1]
        self.change("t = t.T", lambda t: V(t.value.T, t.there.T))

    def sort(self) -> None:
        down = self.pick(True, False)
        def meaning(t: V) -> V:
            value, there = np.zeros_like(t.value), np.zeros_like(t.there)
            for i, (row, on) in enumerate(zip(t.value, t.there, strict=True)):
                found = np.sort(row[on])[::-1 if down else 1]
                value[i, :len(found)], there[i, :len(found)] = found, True
            return V(value, there)

        self.change(f"t = tile.sort(t, descending={down})", meaning)

    def scan(self) -> None:
        axis = self.pick(0, 1)
        self.change(f"t = tile.cumsum(t, {axis}) * 0.1",
                    lambda t: V(np.cumsum(t.only(0.0), axis=axis) * 0.1, t.there))

    def shared(self) -> None:
        name = self.buffer()
        if self.pick(True, False):
            self.add(f"{name}[:, :] = t\ntile.barrier()\nt = tile.load({name})", lambda r: None)
            return
        self.shape = self.shape[::-1]
        self.change(f"{name}[:, :] = t\ntile.barrier()\nt = tile.load({name}.T)",
                    lambda t: V(t.value.T, t.there.T))

    def shared_branch(self) -> None:
        """A branch writes shared memory anew."""
        text, f = self.unary()
        name = self.buffer()
        self.add(f"{name}[:, :] = t\ntile.barrier()\nif f > 0:\n    {name}[:, :] = {text}\n"
                 f"tile.barrier()\nt = tile.load({name})",
                 lambda r: setattr(r, "t", r.t.map(f) if r.args["f"] > 0 else r.t))

    def shared_slices(self) -> None:
        """Row sums over slices of what is in shared memory."""
        name = self.buffer()
        a, b = self.shape
        j, size = f"j{len(self.lines)}", self.pick(4, 8) if b >= 8 else 4
        self.change(f"{name}[:, :] = t\ntile.barrier()\nu = tile.zeros(({a},))\n"
                    f"for {j} in range(0, {b}, {size}):\n"
                    f"    u += tile.row_sum(tile.load({name}[:, {j}:{j} + {size}]))\n"
                    f"t = t + u[:, None]\n{CLAMP}",
                    lambda t: V(np.clip(t.value + t.only(0.0).sum(1)[:, None], LOW, HIGH),
                                t.there))

    def shared_total(self) -> None:
        name = self.buffer()
        self.add(f"{name}[:, :] = 0.0\ntile.barrier()\ntile.atomic_add({name}[:, :], t)\n"
                 f"tile.barrier()\nt = tile.load({name})", lambda r: None)

    def inside(self) -> None:
        fill = self.pick(0.0, 0.5)
        self.change(f"t = tile.where(tile.inside(t), t, {fill})",
                    lambda t: V(t.only(fill), np.ones_like(t.there)))

    def chosen(self) -> None:
        """Where another tensor says so, whose box may be another."""
        if self.shape != (self.rows, self.cols):
            return
        text, read = self.box()

        def step(r: Run) -> None:
            y = read(r, "y")
            r.t = V(np.where(y.value > 0.25, r.t.value, 0.75), r.t.there & y.there)

        self.add(f"t = tile.where(tile.load(y{text}) > 0.25, t, 0.75)", step)

    def dot(self) -> None:
        if not self.so_far().there.any():
            return  # a row of nothing has a product, 0: here no element tells which rows exist
        a, b = self.shape
        self.change(f"t = tile.dot(t, tile.load(w[0:{b}, 0:{b}]), precision=\"f32\")\n{CLAMP}",
                    lambda t: self.product(t))

    def product(self, t: V) -> V:
        b = self.args_of_dot(t)
        rows = t.there.any(axis=1)[:, None] & np.ones(t.value.shape[1], bool)
        return V(np.clip(t.only(0.0) @ b, LOW, HIGH), rows)

    def args_of_dot(self, t: V) -> np.ndarray:
        n = t.value.shape[1]
        return self.args["w"].astype(np.float64)[:n, :n]

    def so_far(self) -> V:
        """The tile of the first group, as the steps that are drawn leave it."""
        r = Run(0, self.args)
        with np.errstate(all="ignore"):
            for step in self.steps:
                step(r)
        return r.t

    # --- ends ---------------------------------------------------------------------------------
    def end(self) -> None:
        self.kind = self.pick("rows", "rows", "tile", "columns", "number", "mean", "argmax")
        R, C = self.rows, self.cols
        if self.kind == "rows":
            self.stat = self.pick(*ROWS)
            self.lines.append(f"o[tile_m:tile_m + {R}] = tile.{self.stat[0]}(t)")
        elif self.kind == "mean":
            self.lines.append(f"o[tile_m:tile_m + {R}] = tile.row_mean(t)")
        elif self.kind == "argmax":
            self.lines.append(f"o[tile_m:tile_m + {R}] = tile.cast(tile.row_argmax(t), f32)")
        else:
            self.lines.append(f"z[tile_m:tile_m + {R}, 0:{C}] = t")
        if self.kind == "columns":
            self.lines.append(f"tile.atomic_add(p[0:{C}], tile.col_sum(t))")
        if self.kind == "number":
            self.lines.append(f"q[tile_m // {R}] = tile.reduce_sum(t)")

    @property
    def source(self) -> str:
        body = "\n".join("    " + line for line in self.lines)
        return (f'def half(a):\n    return a * 0.5\n\n@ts.kernel\n'
                f'def k(x: Tensor["M", "N", f32], y: Tensor["M", "N", f32], '
                f'w: Tensor[32, 32, f32], at: Tensor["M", ts.int32], o: Tensor["M", f32], '
                f'z: Tensor["M", {self.cols}, f32], p: Tensor[{self.cols}, f32], '
                f'q: Tensor["Q", f32], f: ts.int32, n: ts.int32, c: ts.int32):\n'
                f'{body}\n')

    def kernel(self) -> Any:
        return build(self.source)["k"]

    def outputs(self) -> dict[str, np.ndarray]:
        groups = -(-self.M // self.rows)
        nan = np.float32(np.nan)
        return {"o": np.full(self.M, nan), "z": np.full((self.M, self.cols), nan),
                "p": np.zeros(self.cols, np.float32), "q": np.full(groups, nan)}

    def call(self) -> tuple[Any, ...]:
        """Fresh arguments, in order."""
        a, out = self.args, self.outputs()
        return (a["x"].copy(), a["y"].copy(), a["w"].copy(), a["at"].copy(), *out.values(), a["f"],
                a["n"], a["c"])

    # --- the oracle ---------------------------------------------------------------------------
    def check(self, o: np.ndarray, z: np.ndarray, p: np.ndarray, q: np.ndarray) -> None:
        """Asserts what the kernel left; else the error has the kernel and its numbers."""
        try:
            self._check(o, z, p, q)
        except AssertionError as error:
            sizes = {n: v if isinstance(v, int) else v.shape for n, v in self.args.items()}
            raise AssertionError(f"{error}\n{self.source}\n{sizes}\n{o}\n{z}") from error

    def _check(self, o: np.ndarray, z: np.ndarray, p: np.ndarray, q: np.ndarray) -> None:
        args = {k: v.astype(np.float64) if isinstance(v, np.ndarray) and v.dtype.kind == "f" else v
                for k, v in self.args.items()}
        columns = np.zeros(self.cols)
        for g in range(-(-self.M // self.rows)):
            r = Run(g * self.rows, args)
            with np.errstate(all="ignore"):
                for step in self.steps:
                    step(r)
            n = min(self.rows, self.M - r.row)
            t = V(r.t.value[:n], r.t.there[:n])
            if self.kind == "number":
                near(q[g], r.t.only(0.0).sum(), "q")
            if self.kind in ("columns", "number", "tile"):
                near(z[r.row:r.row + n][t.there], t.value[t.there], "z")
            elif t.there.any():
                self.check_rows(o[r.row:r.row + n], t)
            columns += r.t.only(0.0).sum(0)
        if self.kind == "columns":
            near(p, columns, "p")

    def check_rows(self, o: np.ndarray, t: V) -> None:
        on = t.there.any(axis=1)
        if self.kind == "mean":
            near(o[on], t.only(0.0).sum(1)[on] / t.there.sum(1)[on], "o")
        elif self.kind == "argmax":
            at = o[on].astype(int)
            assert t.there[on][np.arange(len(at)), at].all(), "argmax of what does not exist"
            near(t.value[on][np.arange(len(at)), at], t.only(-np.inf).max(1)[on], "o")
        else:
            _, f, e = self.stat
            near(o[on], f(t.only(e), t.there)[on], "o")


ROWS = [("row_sum", lambda v, on: v.sum(1), 0.0),
        ("row_max", lambda v, on: v.max(1), -np.inf),
        ("row_min", lambda v, on: v.min(1), np.inf)]
STEPS = ["elementwise", "elementwise", "branch", "branch", "ternary", "loop", "loop", "statistic",
         "softmax", "grouped", "reshaped", "transpose", "sort", "scan", "shared", "shared_branch",
         "shared_slices", "shared_total", "inside", "chosen", "dot"]


def box_of(x: np.ndarray, row: int, col: int, rows: int, cols: int) -> V:
    """A box of a matrix, 0 where there is none."""
    r, c = np.arange(row, row + rows)[:, None], np.arange(col, col + cols)[None, :]
    there = (r >= 0) & (r < x.shape[0]) & (c >= 0) & (c < x.shape[1])
    value = x[np.clip(r, 0, x.shape[0] - 1), np.clip(c, 0, x.shape[1] - 1)]
    return V(np.where(there, value, 0.0), there)


def near(got: Any, wanted: Any, what: str) -> None:
    """Within what some dozens of f32 operations on numbers of this size may differ."""
    np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-3, err_msg=what)


def accepted(seed: int) -> Iterator[Program | None]:
    """Programs without end; None for each that is refused because nothing tells its edges."""
    for i in itertools.count():
        program = Program(np.random.default_rng([seed, i]))
        try:
            with config.scope(device="cpu"):
                program.kernel().bind(program.call(), {})
                trial = program.kernel()
                trial.specialise(bound := trial.bind(program.call(), {}), trial.choose(bound),
                                 False)
        except TesseraError as error:
            if error.code != "E_EDGE":
                raise AssertionError(f"{error}\n{program.source}") from error
            yield None
        else:
            yield program


__all__ = ["Program", "accepted"]
