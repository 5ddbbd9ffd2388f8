"""Derivatives: traps of other systems, effects, precision, jit and autodiff as decorators."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pytest

import tessera as ts
from derivatives import t64
from tessera.errors import ArgumentError, GradError
from tessera.graph.ir import Graph
from tessera.graph.op import Arg, GraphOp, sample
from tessera.graph.trace import apply
from tessera.tensor import Tensor
from tolerance import assert_close


# --- traps ------------------------------------------------------------------------------------
def test_ternary_on_the_same_array() -> None:
    """warp#1736: choosing between an array and a function of it lost the gradient."""
    f = lambda x: ts.sum(ts.where(x > 0.0, x, x * x))  # noqa: E731
    assert ts.grad(f)(t64([2.0, -3.0])).numpy().tolist() == [1.0, -6.0]
    g = lambda x: ts.sum(ts.where(x > 0.0, x, x))  # noqa: E731
    assert ts.grad(g)(t64([2.0, -3.0])).numpy().tolist() == [1.0, 1.0]
    assert ts.jvp(f, (t64([2.0, -3.0]),), (t64([1.0, 1.0]),))[1].item() == -5.0
    c = lambda x: ts.cond(ts.sum(x) > 0.0, lambda: ts.sum(x), lambda: ts.sum(x * x))  # noqa: E731
    assert ts.grad(c)(t64([-1.0, -2.0])).numpy().tolist() == [-2.0, -4.0]


def test_where_hides_a_nan_with_its_operand() -> None:
    """The double-where of the JAX FAQ: the branch not taken must see a safe operand."""
    safe = lambda x: ts.sum(ts.where(x > 0.0, ts.log(ts.where(x > 0.0, x, 1.0)), 0.0))  # noqa: E731
    assert ts.grad(safe)(t64([0.0, 2.0])).numpy().tolist() == [0.0, 0.5]
    chosen = lambda x: ts.sum(ts.where(x > 0.0, x, float("nan")))  # noqa: E731
    assert ts.grad(chosen)(t64([1.0, -1.0])).numpy().tolist() == [1.0, 0.0]


def test_max_with_ties_and_nan() -> None:
    """jax#13600: equal elements share, and a NaN is not an error."""
    g = ts.grad(lambda x: ts.max(x))(t64([1.0, 3.0, 3.0]))
    assert g.numpy().tolist() == [0.0, 0.5, 0.5]
    assert np.isnan(ts.max(t64([1.0, np.nan])).item())


def test_one_value_used_many_times() -> None:
    def f(x: Tensor) -> Tensor:
        y = x
        for _ in range(10):
            y = y + y
        return y

    assert ts.grad(f)(t64(1.0)).item() == 1024.0


def test_powers_at_zero() -> None:
    assert ts.grad(lambda x: x**2)(t64(0.0)).item() == 0.0
    assert ts.grad(ts.grad(lambda x: x**2))(t64(0.0)).item() == 2.0
    assert ts.grad(lambda x: x**3)(t64(-2.0)).item() == 12.0


@pytest.mark.row("AD-22")
def test_second_derivative_of_a_cube() -> None:
    for run in (ts.grad(ts.grad(lambda x: x**3)), ts.jit(ts.grad(ts.grad(lambda x: x * x * x)))):
        for x in (-2.0, 0.0, 0.5):
            assert run(t64(x)).item() == 6.0 * x


@pytest.mark.row("AD-09")
def test_reverse_mode_of_the_guide() -> None:
    for x in (3, 3.0, ts.tensor(3.0), np.float32(3.0)):
        value, pull = ts.vjp(lambda v: v * v + 2 * v, x)
        assert (value.item(), pull(1.0).item()) == (15.0, 8.0)


# --- precision --------------------------------------------------------------------------------
@pytest.mark.row("AD-17")
@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3"])
def test_4096_tiny_gradients_sum_exactly(name: str) -> None:
    """Each is 2^-12; bf16 sums would stop at 2^-4 and fp8 ones earlier."""
    w = ts.cast(ts.tensor(1.0), name)
    x = ts.tensor(np.full(4096, 2.0**-12, np.float32))
    g = ts.grad(lambda v: ts.sum(v * x))(w)
    assert str(g.dtype) == "f32" and g.item() == 1.0

    def many(v: Tensor) -> Tensor:
        total = ts.tensor(0.0)
        for _ in range(256):
            total = total + ts.cast(v, "f32") * 2.0**-12
        return total

    assert ts.grad(many)(w).item() == 2.0**-4


@pytest.mark.row("AD-18")
def test_loss_scale_multiplies_cotangents_and_is_removed() -> None:
    """2^-20 is below fp8_e5m2's smallest number: without a scale the cotangent is lost."""
    seen: list[float] = []

    @ts.custom_vjp
    def probe(x: Tensor) -> Tensor:
        return x

    probe.defvjp(lambda x: (x, None), lambda s, g: g)

    def loss(w: Tensor, kind: str) -> Tensor:
        return ts.sum(ts.cast(ts.cast(w, kind), "f32")) * 2.0**-20

    w = ts.tensor([1.0, 2.0])
    lost = ts.grad(lambda v: loss(v, "fp8_e5m2"))(w)
    kept = ts.grad(lambda v: loss(v, "fp8_e5m2 @loss_scale(1024.0)"))(w)
    assert lost.numpy().tolist() == [0.0, 0.0]
    assert kept.numpy().tolist() == [2.0**-20] * 2
    graph = ts.grad(lambda v: loss(v, "fp8_e5m2 @loss_scale(1024.0)")).graph(w)
    values = run_nodes(graph, w)
    seen = [float(np.max(a)) for op, a in values if op == "mul" and np.max(np.abs(a)) > 0]
    assert 2.0**-10 in seen, f"the stored cotangent is 1024 times larger: {seen}"


def run_nodes(graph: Graph, *args: Tensor) -> list[tuple[str, np.ndarray]]:
    """Every intermediate of a graph, by op: a probe."""
    from tessera import hooks
    from tessera.graph.interpret import interpret

    found: list[tuple[str, np.ndarray]] = []

    def observe(node: Any, inputs: tuple, outputs: tuple) -> None:
        found.extend((node.op.name, np.asarray(a, np.float64)) for a in outputs)

    hooks.nodes.append(observe)
    try:
        interpret(graph, [a.array for a in args])
    finally:
        hooks.nodes.remove(observe)
    return found


# --- effects ----------------------------------------------------------------------------------
COUNTED: list[float] = []


def _count(x: np.ndarray) -> np.ndarray:
    COUNTED.append(float(np.sum(x)))
    return x.copy()


TALLY = GraphOp(
    "test_tally",
    shape=lambda x: x,
    ref=_count,
    vjp=lambda g, y, x: (g,),
    jvp=lambda ts_, y, x: ts_[0],
    batch=lambda size, batched, x: (apply(TALLY, x), True),
    effects=frozenset({"state"}),
    samples=(sample((2,)), sample(Arg((3,)))),
    doc="x, and a count of the calls outside",
)


@pytest.mark.row("AD-14")
@pytest.mark.parametrize("kind", ["plain", "checkpoint", "scan", "cond", "custom_vjp",
                                  "checkpoint in scan", "scan in checkpoint", "cond in scan",
                                  "custom_vjp in checkpoint", "scan in cond in checkpoint"])
def test_state_changes_happen_once_in_a_gradient(kind: str) -> None:
    step = lambda x: ts.sin(apply(TALLY, x * x))  # noqa: E731
    special = ts.custom_vjp(step)
    special.defvjp(lambda x: (special(x), x), lambda x, g: g * ts.cos(x * x) * 2.0 * x)
    f: dict[str, Any] = {
        "plain": step,
        "checkpoint": ts.checkpoint(step),
        "scan": lambda x: ts.scan(lambda c, e: (c, step(e)), 0.0, ts.reshape(x, (1, 2)))[1],
        "cond": lambda x: ts.cond(ts.sum(x) > 0.0, step, lambda v: v, x),
        "custom_vjp": special,
        "checkpoint in scan": lambda x: ts.scan(
            lambda c, e: (c, ts.checkpoint(step)(e)), 0.0, ts.reshape(x, (1, 2)))[1],
    }
    row = lambda v: ts.reshape(v, (1, 2))  # noqa: E731
    f["scan in checkpoint"] = ts.checkpoint(f["scan"])
    f["cond in scan"] = lambda x: ts.scan(lambda c, e: (c, f["cond"](e)), 0.0, row(x))[1]
    f["custom_vjp in checkpoint"] = ts.checkpoint(special)
    f["scan in cond in checkpoint"] = ts.checkpoint(
        lambda x: ts.cond(ts.sum(x) > 0.0, f["scan"], lambda v: row(v), x))
    x = t64([1.0, 2.0])
    loss = lambda v: ts.sum(f[kind](v))  # noqa: E731
    for run in (ts.grad(loss), ts.jit(ts.grad(loss))):
        COUNTED.clear()
        g = run(x)
        assert COUNTED == [5.0], f"{len(COUNTED)} calls"
        assert_close(g.numpy(), np.cos([1.0, 4.0]) * [2.0, 4.0], n=2)


@pytest.mark.row("AD-14")
@pytest.mark.parametrize("wrap", [lambda f: f, ts.checkpoint], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("compile_", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_what_is_printed_is_printed_once_in_a_gradient(wrap: Any, compile_: Any,
                                                       capsys: pytest.CaptureFixture) -> None:
    """Also where the body runs once more for the backward pass."""
    def loss(x: Tensor) -> Tensor:
        y = ts.sin(x * x)
        ts.debug.print("y is {y}", y=ts.sum(y))
        return ts.sum(y)

    g = compile_(ts.grad(wrap(loss)))(t64([1.0, 2.0]))
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("y is ")]
    assert len(printed) == 1, printed
    assert_close(g.numpy(), np.cos([1.0, 4.0]) * [2.0, 4.0], n=2)


@pytest.mark.row("AD-14")
def test_dropout_gradient_uses_the_forward_mask() -> None:
    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        y = ts.dropout(x, 0.25)
        return ts.sum(y), y

    x = ts.ones((400,))
    ts.random.seed(1)
    for run in (ts.grad(loss, has_aux=True), ts.jit(ts.grad(loss, has_aux=True))):
        g, y = run(x)
        np.testing.assert_array_equal(g.numpy(), y.numpy())
        assert 0 < np.count_nonzero(g.numpy()) < 400
    value, pull = ts.vjp(lambda v: ts.dropout(v, 0.25), x)
    for _ in range(2):
        np.testing.assert_array_equal(pull(ts.ones((400,))).numpy(), value.numpy())


# --- decorators -------------------------------------------------------------------------------
@pytest.mark.row("AD-02")
def test_autodiff_marks_and_keeps_the_value() -> None:
    @ts.autodiff
    def f(x: Tensor, n: int = 2) -> Tensor:
        """A power."""
        return ts.sum(x**n)

    x = ts.tensor([1.0, 2.0])
    assert f(x).item() == 5.0 and f.__doc__ == "A power." and f.__name__ == "f"
    assert f.grad(x).numpy().tolist() == [2.0, 4.0]
    assert f.value_and_grad(x)[0].item() == 5.0
    assert ts.grad(f)(x).numpy().tolist() == [2.0, 4.0]
    with pytest.raises(Exception, match="autodiff needs a function"):
        ts.autodiff(3)


@pytest.mark.row("AD-03")
def test_decorators_on_one_line() -> None:
    scope: dict[str, Any] = {"jit": ts.jit, "autodiff": ts.autodiff, "ts": ts}
    exec(textwrap.dedent('''
        @jit @autodiff
        def square(x: ts.Tensor["N", ts.f32]) -> ts.Tensor["N", ts.f32]:
            return x * x

        @autodiff @jit
        def cube(x, *, n: int = 3):
            return ts.sum(x ** n)

        @ts.jit(name="named") @ts.autodiff @ts.checkpoint
        def fourth(x):
            return ts.sum(x ** 4)
    '''), scope)
    x = ts.tensor([1.0, 2.0])
    assert isinstance(scope["square"], type(ts.jit(lambda x: x)))
    assert scope["square"](x).numpy().tolist() == [1.0, 4.0]
    assert scope["square"].specializations == 1
    assert scope["cube"](x, n=2).item() == 5.0
    assert scope["cube"].grad(x, n=2).numpy().tolist() == [2.0, 4.0]
    assert scope["fourth"].name == "named"
    assert scope["fourth"].grad(x).numpy().tolist() == [4.0, 32.0]
    assert ts.grad(scope["fourth"])(x).numpy().tolist() == [4.0, 32.0]
    with pytest.raises(TypeError):
        ts.jit @ 3


# --- jit --------------------------------------------------------------------------------------
@pytest.mark.row("AD-01")
def test_jit_equals_eager_and_traces_once(rng: np.random.Generator) -> None:
    calls: list[int] = []

    @ts.jit
    def f(x: Tensor, w: Tensor) -> Tensor:
        calls.append(1)
        return ts.tanh(x @ w) + 1.0

    a, b = (ts.tensor(rng.standard_normal((3, 3)).astype(np.float32)) for _ in range(2))
    assert_close(f(a, b).numpy(), f.fn(a, b).numpy(), n=3)
    calls.clear()
    f(b, a)
    assert not calls and f.specializations == 1
    f(a[:2], b)
    assert len(calls) == 1 and f.specializations == 2
    assert "matmul" in f.inspect_ir("graph")


@pytest.mark.row("AD-23")
def test_jit_of_derivatives(rng: np.random.Generator) -> None:
    x = t64(rng.standard_normal((4, 3)))
    f = lambda v: ts.sum(ts.remat(ts.tanh)(v) ** 3)  # noqa: E731
    for derived in (ts.grad(f), ts.vmap(ts.grad(f)), ts.vmap(f), ts.remat(f)):
        assert_close(ts.jit(derived)(x).numpy(), derived(x).numpy(), n=12)
        assert_close(ts.jit(ts.jit(derived))(x).numpy(), derived(x).numpy(), n=12)


# --- errors -----------------------------------------------------------------------------------
def test_errors_point_at_the_line_of_the_op() -> None:
    def loss(x: Tensor) -> Tensor:
        return ts.while_loop(lambda v: v < 3.0, lambda v: v + 1.0, x)  # the line to be named

    with pytest.raises(GradError, match="the line to be named"):
        ts.grad(loss)(t64(1.0))


def test_a_value_kept_from_a_trace_is_named() -> None:
    kept: list[Tensor] = []

    def leak(x: Tensor) -> Tensor:
        kept.append(x * 2.0)
        return ts.sum(x)

    ts.grad(leak)(t64([1.0]))
    with pytest.raises(Exception, match="outside its trace|after its trace"):
        kept[0] + 1.0
    with pytest.raises(Exception, match="after its trace"):
        ts.grad(lambda x: ts.sum(x * kept[0]))(t64([1.0]))


# --- which arguments --------------------------------------------------------------------------
class TestLostParams:
    """Arithmetic gives plain tensors; the gradient must not silently become that of argument 0."""

    @pytest.mark.parametrize("wrap", [lambda f: f, ts.jit], ids=["eager", "jit"])
    def test_a_step_that_forgets_the_mark_is_told(self, wrap):
        def loss(x, w):
            return ts.sum(x * w)

        step = wrap(lambda x, w: w - 0.1 * ts.grad(loss)(x, w))  # a new transform in each call
        x, w = ts.ones((3,)), ts.param([1.0, 2.0, 3.0])
        w = step(x, w)
        assert not w.is_param
        with pytest.raises(GradError, match="no argument is a ts.param any more, w was in an ear"
                           ) as info:
            step(x, w)
        assert "ts.param(w - lr * dw)" in info.value.hint and "wrt='w'" in info.value.hint
        assert step(x, ts.param(w)).shape == (3,)
        assert ts.grad(loss, argnums=0)(x, w).tolist() == w.tolist()

    def test_several_lost_params_are_named(self):
        def loss(w, b):
            return ts.sum(w * b)

        ts.grad(loss)(ts.param([1.0]), ts.param([2.0]))
        with pytest.raises(GradError, match="w and b were in an earlier call") as info:
            ts.grad(loss)(ts.tensor([1.0]), ts.tensor([2.0]))
        assert "wrt=('w', 'b')" in info.value.hint

    def test_argument_0_is_no_doubt_when_it_was_the_parameter(self):
        def loss(w, x):
            return ts.sum(w * x)

        assert ts.grad(loss)(ts.tensor([1.0]), ts.tensor([5.0])).tolist() == [5.0]
        assert ts.grad(loss)(ts.param([1.0]), ts.tensor([5.0])).tolist() == [5.0]
        assert ts.grad(loss)(ts.tensor([1.0]), ts.tensor([5.0])).tolist() == [5.0]

    def test_an_integer_argument_0_says_that_nothing_was_marked(self):
        f = ts.grad(lambda ids, w: ts.sum(ts.take(w, ids)))
        with pytest.raises(GradError, match="with respect to ids") as info:
            f(ts.tensor([0, 1]), ts.ones((3,)))
        assert "no argument is a ts.param, so it is argument 0" in info.value.hint


def test_a_compiled_function_tells_params_from_plain_tensors():
    """The fast path of jit looks at the mark: the signature of a call includes it."""
    def loss(x, w):
        return ts.sum(x * x * w)

    kind = ts.as_type("f32")  # one object: the fast path compares types by identity
    x, w = np.float32([1.0, 2.0]), np.float32([3.0, 5.0])
    f = ts.jit(lambda x, w: ts.grad(loss)(x, w))
    for _ in range(2):
        by_w = f(ts.tensor(x, kind), ts.param(w, kind))
        by_x = f(ts.param(x, kind), ts.tensor(w, kind))
        np.testing.assert_array_equal(by_w.numpy(), x * x)
        np.testing.assert_array_equal(by_x.numpy(), 2 * x * w)
    assert f.specializations == 2
    keep = ts.jit(lambda x: x)
    marks = [keep(make(x, kind)).is_param for make in (ts.param, ts.tensor, ts.param, ts.tensor)]
    assert marks == [True, False, True, False]


# --- one parameter at two places --------------------------------------------------------------
@pytest.mark.parametrize("wrap", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_a_param_at_two_places_of_a_tree_is_refused(wrap: Any) -> None:
    """Each place would get the gradient of its own use, and one step would make two tensors."""
    w = ts.param([[1.0, 2.0]])
    tied = {"embed": {"w": w}, "head": w, "bias": ts.param([0.0])}

    def loss(p: Any, x: Any) -> Any:
        return ts.sum((x @ p["embed"]["w"]) * (x @ p["head"])) + ts.sum(p["bias"])

    x = ts.ones((3, 1))
    with pytest.raises(ts.ArgumentError) as error:
        wrap(ts.value_and_grad(loss))(tied, x)
    assert "p.embed.w and p.head are the same ts.param" in error.value.message
    assert "once, as p.embed.w" in error.value.hint and "ts.param(w)" in error.value.hint

    apart = wrap(ts.grad(loss))(tied | {"head": ts.param(w)}, x)
    once = wrap(ts.grad(lambda p, x: loss(p | {"head": p["embed"]["w"]}, x)))(
        {"embed": {"w": w}, "bias": tied["bias"]}, x)
    assert once["embed"]["w"].tolist() == (apart["embed"]["w"] + apart["head"]).tolist()
    assert wrap(loss)(tied, x).item() == 15.0  # a value is one whatever stands where


@pytest.mark.parametrize("wrap", [lambda f: f, ts.jit], ids=["eager", "jit"])
def test_two_arguments_that_are_given_one_param_stay_two(wrap: Any) -> None:
    w = ts.param([2.0, 3.0])
    a, b = wrap(ts.grad(lambda a, b: ts.sum(a * a * b)))(w, w)
    assert a.tolist() == [8.0, 18.0] and b.tolist() == [4.0, 9.0]


def test_positions_from_the_end_leave_out_defaults_and_names() -> None:
    def scaled(w: Tensor, x: Tensor, k: float = 2.0) -> Tensor:
        return ts.sum(w * x * x) * k

    def named(w: Tensor, x: Tensor, *, train: bool = True, k: float = 2.0) -> Tensor:
        return ts.sum(w * x * x) * k

    def any_number(x: Tensor, *rest: Tensor, k: float = 2.0) -> Tensor:
        return ts.sum(x * rest[-1] ** 2) * k

    w, x = t64([1.0]), t64([3.0])
    for f in (scaled, named, any_number):
        for g in (ts.grad, ts.jacrev, ts.jacfwd):
            assert g(f, argnums=-1)(w, x).item() == 12.0
            assert g(f, argnums=-2)(w, x).item() == 18.0
    assert ts.grad(scaled, argnums=-1)(w, x, 1.0).item() == 9.0
    assert ts.grad(scaled, argnums=-1)(w, x=x).item() == 12.0
    assert ts.grad(scaled, argnums=2)(w, x).item() == 9.0
    with pytest.raises(ArgumentError, match="named has 2 positional") as error:
        ts.grad(named, argnums=3)(w, x)
    assert error.value.hint == "others by name: wrt='train'"
