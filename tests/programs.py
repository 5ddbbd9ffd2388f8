"""Random programs: compositions of the registry's ops and of public functions, over random types
with policies and shapes from no elements to beyond what is compiled as a loop.

    exact_program(rng)    every value is a small integer, so that each way to run it gives its bits
    rounded_program(rng)  of real numbers, by ops whose result IEEE 754 fixes: its bits too, with
                          every rounding to every type and policy
    smooth_program(rng)   differentiable; errors are bounded by the condition of each step

A program is a list of steps. It runs on its own types and, `wide`, in f64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import tessera as ts
from cpu.test_ops_registry import Draws, wide_attrs
from tessera.errors import TesseraError
from tessera.graph.op import DIFFERENTIABLE_DRAWS, OPS, Arg, GraphOp, Sample
from tessera.graph.trace import apply
from tessera.numerics import as_type
from tessera.tensor import Tensor

F32, F64 = as_type("f32"), as_type("f64")
SHAPES: list[tuple[int, ...]] = [
    (), (1,), (5,), (0,), (3, 5), (3, 1), (1, 5), (0, 4), (4, 0), (2, 3, 4), (2, 1, 4), (7, 33),
    (48, 48), (2, 40, 33), (2500,),
]
FLOATS = ["f32", "f64", "bf16", "f16", "fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp4_e2m1",
          "f32 @accum(f32)", "f32 @accum(f64)", "bf16 @accum(f32)", "bf16 @saturate",
          'f32 @rounding("toward_zero")', 'bf16 @rounding("toward_zero")', "fp8_e4m3 @saturate",
          "bf16 @loss_scale(8.0)", "f32 @saturate"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint32", "bool_", "int4"]
# A while_loop of other values than its samples' may never end.
PLAIN_OPS = [op for op in OPS.values() if op.samples and not op.effects
             and not op.name.startswith("mesh_") and op.name != "while_loop"]

# Of a mesh: a GPU leaves them to the host.
MESH_OPS = {op.name for op in PLAIN_OPS if op.name.startswith(("shard", "ring_")) or op.name in (
    "along_sequence", "constrain", "lie_as", "replicated", "zero_split")}


@dataclass
class Step:
    """results = fn(wide, *operands); operand j is fits[j](wide, value args[j]), or that value."""

    text: str
    fn: Callable[..., Any]
    args: tuple[int, ...]
    results: int = 1
    fits: tuple[Callable[[bool, Any], Any], ...] = ()

    def __call__(self, wide: bool, values: Sequence[Any],
                 change: Callable[[int, Any], Any] = lambda place, x: x) -> Any:
        """Of all values so far. change: what is put in place of operand `place`."""
        xs = [values[a] for a in self.args]
        if self.fits:
            xs = [fit(wide, x) for fit, x in zip(self.fits, xs, strict=True)]
        return self.fn(wide, *(change(j, x) for j, x in enumerate(xs)))


@dataclass
class Program:
    inputs: list[Tensor] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)  # of the run while it was made

    def __call__(self, *xs: Any) -> tuple[Tensor, ...]:
        values = self.run(xs)
        return tuple(values[i] for i in self.outputs)

    def run(self, xs: Sequence[Any], wide: bool = False,
            change: Callable[[int, int, Tensor], Tensor] = lambda step, place, x: x) -> list[Any]:
        """All values. change: what is put in place of an operand (place >= 0) or a result (-1)."""
        values = list(xs)
        for i, step in enumerate(self.steps):
            made = step(wide, values, lambda j, x, i=i: change(i, j, x))
            values += [change(i, -1, y) for y in (made if isinstance(made, tuple) else (made,))]
        return values

    @property
    def on_mesh(self) -> bool:
        return not MESH_OPS.isdisjoint(step.text.split()[0] for step in self.steps)

    @property
    def wide_inputs(self) -> list[Tensor]:
        return [widened(x) for x in self.inputs]

    def __str__(self) -> str:
        lines = [f"v{i} = input {x.type}{list(x.shape)}" for i, x in enumerate(self.inputs)]
        count = len(lines)
        for step in self.steps:
            names = ", ".join(f"v{count + i}" for i in range(step.results))
            lines.append(f"{names} = {step.text}({', '.join(f'v{a}' for a in step.args)})")
            count += step.results
        return "\n".join([*lines, f"return {self.outputs}, of {len(self.values)} values"])


def widened(x: Tensor) -> Tensor:
    """A float as f64; others as they are."""
    return Tensor(as_f64(x), F64) if x.dtype.kind == "float" else x


def as_f64(x: Any) -> np.ndarray:
    return np.asarray(x.numpy()).astype(np.float64)


def of_type(x: Any, numeric: str, wide: bool) -> Any:
    """x as a type; in f64 every float type is one."""
    return ts.cast(x, F64 if wide and as_type(numeric).dtype.kind == "float" else numeric)


# --- steps on values of their own types ---------------------------------------------------------
@dataclass(frozen=True)
class Names:
    """The public functions that typed steps choose among. kinds: of steps, as often as written."""

    kinds: tuple[str, ...]
    binary: tuple[str, ...]
    unary: tuple[str, ...]
    reductions: tuple[str, ...]


EXACT = Names(
    tuple("cast cast binary binary binary unary view view reduce product number choice join fill"
          .split()),
    tuple("add subtract multiply maximum minimum floor_divide remainder equal less not_equal "
          "greater_equal logical_and logical_xor bitwise_or".split()),
    tuple("negative abs sign relu square floor round logical_not isnan".split()),
    tuple("sum max min prod any all argmax mean".split()))
ROUNDED = Names(
    tuple("cast cast cast binary binary binary binary unary view reduce number choice join fill"
          .split()),
    tuple("add subtract multiply divide maximum minimum remainder floor_divide equal less "
          "not_equal logical_and bitwise_xor".split()),
    tuple("negative abs sign relu square sqrt floor ceil trunc round logical_not isnan isfinite"
          .split()),
    tuple("max min any all argmax argmin".split()))


def typed_step(rng: np.random.Generator, values: list[Tensor], names: Names = EXACT) -> Step:
    """A public function of one or two values, or a cast, a view, a reduction."""
    a, b = (int(i) for i in rng.integers(0, len(values), 2))
    kind = str(rng.choice(names.kinds))
    if kind in ("binary", "unary", "reduce"):
        return STEPS[kind](rng, values, a, b, names)
    return STEPS[kind](rng, values, a, b)


def _cast(rng: Any, values: list, a: int, b: int) -> Step:
    numeric = str(rng.choice(FLOATS + INTEGERS[: 7 if rng.random() < 0.5 else 0]))
    return Step(f"cast {numeric}", lambda wide, x: of_type(x, numeric, wide), (a,))


def _binary(rng: Any, values: list, a: int, b: int, names: Names) -> Step:
    name = str(rng.choice(names.binary))
    return Step(name, lambda wide, x, y: getattr(ts, name)(x, y), (a, b))


def _unary(rng: Any, values: list, a: int, b: int, names: Names) -> Step:
    name = str(rng.choice(names.unary))
    return Step(name, lambda wide, x: getattr(ts, name)(x), (a,))


def _number(rng: Any, values: list, a: int, b: int) -> Step:
    n = rng.choice([2, -1, 3, 0, 1])
    s = float(n) if rng.random() < 0.5 else int(n)
    name = str(rng.choice(["add", "multiply", "maximum", "subtract"]))
    return Step(f"{name} {s!r}", lambda wide, x: getattr(ts, name)(x, s), (a,))


def _choice(rng: Any, values: list, a: int, b: int) -> Step:
    c = int(rng.integers(0, len(values)))
    return Step("where", lambda wide, c, x, y: ts.where(c > 0, x, y), (c, a, b))


def _view(rng: Any, values: list, a: int, b: int) -> Step:
    x = values[a]
    axes = tuple(int(i) for i in rng.permutation(x.ndim))
    pick = int(rng.integers(0, 7))
    cut = int(rng.integers(0, max(1, x.shape[-1]))) if x.ndim else 0
    views: list[tuple[str, Callable[[Any], Any]]] = [
        ("transpose", lambda x: ts.transpose(x, axes)), ("ravel", lambda x: ts.reshape(x, (-1,))),
        ("flip", lambda x: ts.flip(x, -1)), (f"[..., {cut}:]", lambda x: x[..., cut:]),
        ("[..., ::2]", lambda x: x[..., ::2]), ("expand", lambda x: ts.expand_dims(x, 0)),
        ("stretch", lambda x: ts.broadcast_to(x, (2, *x.shape))),
    ]
    text, view = views[pick if x.ndim and 0 not in x.shape else 5]
    return Step(text, lambda wide, x: view(x), (a,))


def _reduce(rng: Any, values: list, a: int, b: int, names: Names) -> Step:
    x, name = values[a], str(rng.choice(names.reductions))
    axis = None if not x.ndim or rng.random() < 0.2 else int(rng.integers(-x.ndim, x.ndim))
    keep = bool(rng.random() < 0.6) and not name.startswith("arg")
    more = {"keepdims": True} if keep else {}
    return Step(f"{name} {axis} {keep}", lambda wide, x: getattr(ts, name)(x, axis=axis, **more),
                (a,))


def _fill(rng: Any, values: list, a: int, b: int) -> Step:
    """What is known while a program is compiled."""
    n = int(rng.integers(0, 3))
    return Step(f"full_like {n}", lambda wide, x: ts.full(x.shape, n, x.type), (a,))


def _product(rng: Any, values: list, a: int, b: int) -> Step:
    return Step("x @ y'", lambda wide, x, y: x @ ts.swapaxes(y, -1, -2), (a, b))


def _join(rng: Any, values: list, a: int, b: int) -> Step:
    axis = int(rng.integers(-2, 2))
    return Step(f"concatenate {axis}", lambda wide, x, y: ts.concatenate([x, y], axis), (a, b))


STEPS: dict[str, Callable[..., Step]] = {
    "cast": _cast, "binary": _binary, "unary": _unary, "number": _number, "choice": _choice,
    "view": _view, "reduce": _reduce, "product": _product, "join": _join,
    "fill": _fill,
}


# --- steps of the registry's ops ----------------------------------------------------------------
def registry_step(rng: np.random.Generator, values: list[Tensor], ops: Sequence[GraphOp],
                  fit: Callable[[np.random.Generator, Arg], Callable[[Any], Any] | None],
                  fresh: Callable[[np.random.Generator, Arg], Tensor]) -> Step:
    """An op on values where they can be made to fit a sample's operands, else on new constants.

    fit: how a value is brought into the range that an operand needs, None where it cannot be.
    """
    op: GraphOp = ops[int(rng.integers(len(ops)))]
    s: Sample = op.samples[int(rng.integers(len(op.samples)))]
    loose = op.loop is not None  # elementwise: any shapes
    args: list[int] = []
    takers: list[Callable[[bool, Sequence[Any]], Any]] = []
    fits: list[Callable[[bool, Any], Any]] = []
    for arg in s.args:
        bring = fit(rng, arg)
        near = [i for i, v in enumerate(values) if loose or tuple(v.shape) == arg.shape]
        if bring is None or not (near or rng.random() < 0.5) or not values:
            takers.append(_constant(fresh(rng, arg)))
            continue
        at = int(rng.choice(near)) if near else int(rng.integers(len(values)))
        place, shape = len(args), None if near else arg.shape
        args.append(at)
        takers.append(lambda wide, xs, place=place: xs[place])
        fits.append(lambda wide, x, shape=shape, bring=bring: bring(_shaped(x, shape), wide))

    def run(wide: bool, *xs: Any) -> Any:
        if op.graph_attrs:  # the types of the graphs it holds are fixed
            made = apply(op, *[take(False, xs) for take in takers], **s.attrs)
            outs = tuple(of_type(y, str(y.type), wide) for y in (made if op.multi else (made,)))
            return outs if op.multi else outs[0]
        attrs = wide_attrs(s.attrs, F64) if wide else s.attrs
        return apply(op, *[take(wide, xs) for take in takers], **attrs)

    return Step(f"{op.name} {s.attrs or ''}", run, tuple(args), fits=tuple(fits))


def _constant(x: Tensor) -> Callable[[bool, Sequence[Any]], Any]:
    far = widened(x)
    return lambda wide, xs: far if wide else x


def _shaped(x: Any, shape: tuple[int, ...] | None) -> Any:
    """x's elements, as often as needed, in another shape."""
    if shape is None:
        return x
    size, have = math.prod(shape), math.prod(x.shape)
    if not have:
        return ts.zeros(shape, x.type)
    flat = ts.reshape(x, (have,))
    if have < size:
        flat = ts.reshape(ts.broadcast_to(flat, (-(-size // have), have)), (-1,))
    return ts.reshape(flat[:size], shape)


# --- programs of small integers -----------------------------------------------------------------
LARGEST = 2.0**20


def exact_program(rng: np.random.Generator) -> Program:
    """Every value is an integer that its type and f32 hold, in f64 the same one."""
    made = Program()
    base = SHAPES[int(rng.integers(len(SHAPES)))]
    near = [base, base, base[-1:], (*base[:-1], 1)] if base else [base, (3,)]
    for _ in range(int(rng.integers(2, 5))):
        shape = near[int(rng.integers(len(near)))]
        numeric = str(rng.choice(FLOATS + INTEGERS))
        low = 0 if numeric.startswith(("u", "b")) else -4
        made.inputs.append(ts.tensor(rng.integers(low, 4 if low else 2, shape), numeric))
    made.values, far = list(made.inputs), made.wide_inputs
    for _ in range(int(rng.integers(3, 13))):
        for _ in range(12):
            step = typed_step(rng, made.values) if rng.random() < 0.65 else registry_step(
                rng, made.values, PLAIN_OPS, _fit_exact, _fresh_exact)
            if _append(made, far, step):
                break
    _choose_outputs(rng, made)
    return made


def _append(made: Program, far: list[Tensor], step: Step) -> bool:
    """Takes a step if its results are small integers in its own types and in f64."""
    found = []
    for wide, values in ((False, made.values), (True, far)):
        try:
            out = step(wide, values)
        except (TesseraError, OverflowError):
            return False
        found.append(out if isinstance(out, tuple) else (out,))
    near, wide_results = found
    if not all(map(_small, near, wide_results)):
        return False
    step.results = len(near)
    made.steps.append(step)
    made.values += near
    far += wide_results
    for i in range(len(made.values) - len(near), len(made.values)):
        if as_f64(made.values[i]).max(initial=0) > 4 or as_f64(made.values[i]).min(initial=0) < -4:
            _append(made, far, Step("modulo", _modulo, (i,)))
    return True


def _small(x: Tensor, far: Tensor) -> bool:
    a, b = as_f64(x), as_f64(far)
    return bool(a.shape == b.shape and a.size < 1 << 16 and x.ndim < 6 and np.isfinite(b).all()
                and (a == b).all() and (b == np.rint(b)).all() and (np.abs(b) < LARGEST).all())


def _modulo(wide: bool, x: Any) -> Any:
    if x.dtype.kind == "float":
        return ts.remainder(of_type(x, "f32", wide), 8.0) - 4.0
    return ts.remainder(ts.cast(x, "int32"), 4)


def _fit_exact(rng: np.random.Generator, arg: Arg) -> Callable[[Any, bool], Any] | None:
    kind, _, detail = arg.draw.partition(":")
    fits: dict[str, Callable[[Any, bool], Any]] = {
        "normal": lambda x, wide: of_type(x, "f32", wide),
        "positive": lambda x, wide: of_type(ts.abs(of_type(x, "f32", wide)) + 1.0, "f32", wide),
        "int": lambda x, wide: ts.cast(x, "int64"),
        "index": lambda x, wide: ts.remainder(ts.cast(x, "int64"), int(detail or 1)),
        "bool": lambda x, wide: ts.cast(x, "int64") > 0,
        "type": lambda x, wide: of_type(x, detail, False),
    }
    return fits.get(kind)


def _fresh_exact(rng: np.random.Generator, arg: Arg) -> Tensor:
    if arg.draw in DIFFERENTIABLE_DRAWS:
        low = 1 if arg.draw == "positive" else -3
        if arg.draw == "distinct":
            return ts.tensor(rng.permutation(math.prod(arg.shape)).reshape(arg.shape), "f32")
        return ts.tensor(rng.integers(low, 4, arg.shape), "f32")
    return Draws(rng)(arg)


def _choose_outputs(rng: np.random.Generator, made: Program) -> None:
    last = len(made.values) - 1
    first = max(0, len(made.inputs) - 1)
    more = rng.integers(first, last + 1, int(rng.integers(0, 3)))
    made.outputs = list(dict.fromkeys([last, *map(int, more)]))


# --- programs of rounded numbers ----------------------------------------------------------------
def rounded_program(rng: np.random.Generator) -> Program:
    """Real numbers of every size, infinities and NaN among them, rounded to types as they go."""
    made = Program()
    base = SHAPES[int(rng.integers(len(SHAPES)))]
    near = [base, base, base[-1:], (*base[:-1], 1)] if base else [base, (3,)]
    for _ in range(int(rng.integers(2, 5))):
        shape = near[int(rng.integers(len(near)))]
        x = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 13, shape)
        if rng.random() < 0.3:
            x = np.where(rng.random(shape) < 0.2, rng.choice([np.inf, np.nan, 0.0, -0.0]), x)
        made.inputs.append(ts.tensor(x, str(rng.choice(FLOATS + INTEGERS))))
    made.values = list(made.inputs)
    for _ in range(int(rng.integers(3, 13))):
        for _ in range(12):
            step = typed_step(rng, made.values, ROUNDED)
            try:
                y = step(False, made.values)
            except TesseraError:
                continue
            if y.size < 1 << 16 and y.ndim < 6:
                made.steps.append(step)
                made.values.append(y)
                break
    _choose_outputs(rng, made)
    return made


# --- differentiable programs --------------------------------------------------------------------
def _derivable(op: GraphOp) -> bool:
    """Whether one result follows smoothly from the operands, wherever they are."""
    return op.smooth and op.differentiable and not op.multi and op.vjp is not None and (
        not op.graph_attrs) and all(
        a.draw in (*SMOOTH_FITS, "int") or a.draw.split(":")[0] in ("index", "bool", "offsets")
        for s in op.samples for a in s.args)


# How any value is brought into the range of a draw, smoothly.
SMOOTH_FITS: dict[str, Callable[[Any, bool], Any]] = {
    "normal": lambda x, wide: 2.0 * ts.tanh(0.5 * x),
    "positive": lambda x, wide: 1.25 + 0.75 * ts.tanh(x),
    "unit": lambda x, wide: 0.75 * ts.tanh(x),
}
SMOOTH_OPS = [op for op in PLAIN_OPS if _derivable(op)]
SMOOTH_SHAPES = [(), (5,), (3, 5), (3, 1), (2, 3, 4), (40, 52), (1, 2100)]


def smooth_program(rng: np.random.Generator) -> Program:
    made = Program()
    base = SMOOTH_SHAPES[int(rng.integers(len(SMOOTH_SHAPES)))]
    near = [base, base, base[-1:], (*base[:-1], 1)] if base else [base, (3,)]
    for _ in range(int(rng.integers(1, 4))):
        shape = near[int(rng.integers(len(near)))]
        made.inputs.append(ts.tensor(rng.standard_normal(shape).astype(np.float32)))
    made.values = list(made.inputs)
    for _ in range(int(rng.integers(2, 8))):
        for _ in range(12):
            step = registry_step(rng, made.values, SMOOTH_OPS, _fit_smooth,
                                 lambda r, a: Draws(r)(a))
            if step.args and _append_smooth(made, step):
                break
    _choose_outputs(rng, made)
    return made


def _fit_smooth(rng: np.random.Generator, arg: Arg) -> Callable[[Any, bool], Any] | None:
    return SMOOTH_FITS.get(arg.draw)


def _append_smooth(made: Program, step: Step) -> bool:
    try:
        y = step(False, made.values)
    except TesseraError:
        return False
    x = as_f64(y)
    if y.type.dtype is not F32.dtype or not np.isfinite(x).all() or x.size > 1 << 14:
        return False
    if np.abs(x).max(initial=0) > 1e4 or y.ndim > 5:
        return False
    made.steps.append(step)
    made.values.append(y)
    return True


# --- bounds -------------------------------------------------------------------------------------
ULPS = 8.0  # of an op: compiled maths are within 6 (test_loops_maths.py), NumPy's within 4
SAFETY = 8.0  # of a sum of independent roundings, beyond its standard deviation


def error_bounds(program: Program, rng: np.random.Generator, eps: float, trials: int = 3
                 ) -> list[np.ndarray]:
    """Per output, how far two computations in a format of this eps may be apart.

    Each operand and each result of each step is off by a few ulp (a step that sums n terms: by
    sqrt(n) more, relative to each term). What that does to the outputs is measured in f64: the step
    alone is changed at random (its operands as it reads them: of elements that are equal, each by
    itself), and the changes of all steps add up as independent roundings do. Higham and Mary 2019,
    "A new approach to probabilistic rounding error analysis".
    """
    xs, h = program.wide_inputs, 2.0**-26
    plain = [as_f64(program.run(xs, True)[i]) for i in program.outputs]
    total = [np.zeros(y.shape) for y in plain]
    for k, step in enumerate(program.steps):
        for place in (*range(len(step.args)), -1):
            found = [np.zeros(y.shape) for y in plain]
            terms = 1.0
            for _ in range(trials):
                def change(i: int, j: int, x: Tensor, k: int = k, place: int = place) -> Tensor:
                    nonlocal terms
                    if (i, j) != (k, place) or x.dtype.kind != "float":
                        return x
                    terms = max(terms, float(x.size)) if j >= 0 else terms
                    return Tensor(np.asarray(x.array * (1 + h * rng.standard_normal(x.shape))),
                                  x.type)

                moved = program.run(xs, True, change)
                for total_of, i, y in zip(found, program.outputs, plain, strict=True):
                    total_of += ((as_f64(moved[i]) - y) / h) ** 2 / trials
            ulps = ULPS + math.sqrt(min(terms, 4096.0))
            for sum_of, one in zip(total, found, strict=True):
                sum_of += one * ulps**2
    return [SAFETY * eps * np.sqrt(t) + SAFETY * ULPS * eps * np.abs(y).max(initial=0) * 2.0**-2
            for t, y in zip(total, plain, strict=True)]
