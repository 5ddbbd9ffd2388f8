"""Formats and their names, policies as types, the string grammar, policy classes."""

from __future__ import annotations

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tessera.numerics as tn
from tessera.errors import DTypeError, PolicyError
from tessera.numerics import (
    accum,
    dtypes,
    loss_scale,
    per_channel,
    policy,
    rounding,
    saturate,
    scaled,
)
from tessera.numerics import device as on_device
from tessera.numerics import stochastic_round as stochastic

ACCUMS = [t for t in tn.all_dtypes() if not t.packed and t.kind != "bool"]

modifiers = {
    "accum": st.builds(accum, st.sampled_from(ACCUMS)),
    "rounding": st.one_of(st.just(stochastic), st.builds(rounding, st.sampled_from(
        ["nearest_even", "toward_zero", "stochastic"]))),
    "saturate": st.just(saturate),
    "loss_scale": st.builds(
        loss_scale, st.floats(0, exclude_min=True, allow_infinity=False, allow_nan=False)
    ),
    "scaled": st.just(scaled("amax")),
    "per_channel": st.builds(per_channel, st.integers(-5, 5)),
    "device": st.builds(on_device, st.from_regex(r"[a-z]\w*(:[0-9]+)?", fullmatch=True)),
}


@st.composite
def numeric_types(draw):
    t = tn.as_type(draw(st.sampled_from(tn.all_dtypes())))
    names = draw(st.lists(st.sampled_from(sorted(modifiers)), unique=True))
    for name in names:
        t = t @ draw(modifiers[name])
    return t


def policy_class(**changes):
    body = {
        "storage": tn.int8, "scale": tn.f32, "compute": tn.f32, "accumulate": tn.f64,
        "quantize": lambda self, x: (x, 1.0), "dequantize": lambda self, x, scale: x,
    } | changes
    return type("Quantized", (), {k: v for k, v in body.items() if v is not None})


# -- formats --


@pytest.mark.row("NUM-16")
def test_two_spellings_are_one_object():
    assert tn.f32 is tn.fp32 is tn.float32 and tn.f16 is tn.fp16 is tn.float16
    assert tn.f64 is tn.fp64 is tn.float64 and tn.bf16 is tn.bfloat16
    assert tn.fp8 is tn.fp8_e4m3 and tn.fp6 is tn.fp6_e3m2 and tn.fp4 is tn.fp4_e2m1
    assert (tn.i8, tn.i16, tn.i32, tn.i64) == (tn.int8, tn.int16, tn.int32, tn.int64)
    assert (tn.u8, tn.u16, tn.u32, tn.u64) == (tn.uint8, tn.uint16, tn.uint32, tn.uint64)
    for t in tn.all_dtypes():
        assert str(t) == repr(t) == t.name
        for name in (t.name, *t.aliases):
            assert tn.find_dtype(name) is t
            assert name == "bool" or getattr(tn, name) is t


def test_dtypes_survive_copies_and_pickles():
    for t in tn.all_dtypes():
        assert copy.deepcopy(t) is t and pickle.loads(pickle.dumps(t)) is t
    t = tn.fp8 @ accum(tn.f32) @ saturate
    assert pickle.loads(pickle.dumps(t)) == t and hash(copy.copy(t)) == hash(t)


def test_a_second_declaration_raises():
    with pytest.raises(DTypeError, match="'f32' is declared twice"):
        dtypes._add(tn.f32)
    with pytest.raises(PolicyError, match="'accum' is declared twice"):
        policy._register(policy._KINDS["accum"])


def test_integer_ranges_and_compute_types():
    for t in tn.all_dtypes():
        if t.kind in ("int", "uint"):
            info = ml_dtypes.iinfo(t.numpy)
            assert (t.min, t.max) == (info.min, info.max)
            assert t.compute is t
        elif t.kind == "float":
            assert t.compute is (tn.f64 if t is tn.f64 else tn.f32)
    assert {t.name for t in tn.all_dtypes() if t.packed} >= {
        "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "fp4_e3m0", "int4"}


def test_a_format_of_a_width_that_cannot_be_stored_is_refused():
    before = tn.dtype_names()
    with pytest.raises(DTypeError, match="int2 has 2 bits; elements are stored in one of 4, 6, 8"):
        dtypes._int("int2", "int", 2, ml_dtypes.int2, "i2")
    assert tn.dtype_names() == before


def test_unknown_names_get_the_nearest():
    with pytest.raises(DTypeError, match="unknown dtype 'fp8_e4m4'") as info:
        tn.find_dtype("fp8_e4m4")
    assert info.value.hint == "did you mean 'fp8_e4m3'?"


def test_the_table_shows_every_format():
    lines = tn.dtype_table().splitlines()
    assert len(lines) == 2 + len(tn.all_dtypes()) and len({len(line) for line in lines}) == 1
    cells = {row[0]: row for row in ([c.strip() for c in line.split("|")[1:-1]] for line in lines)}
    assert cells["fp8_e4m3"] == [
        "fp8_e4m3", "8", "4", "3", "7", "448", "0.015625", "0.001953125", "NaN", "fp8"]
    assert cells["fp4_e3m0"][5:9] == ["16", "0.25", "none", "none"]
    assert cells["int4"][5] == "7"


# -- policies as types --


@pytest.mark.row("NUM-18")
def test_postfix_modifiers_compose_left_to_right():
    t = tn.fp8_e4m3 @ accum(tn.fp32) @ stochastic
    assert t.dtype is tn.fp8_e4m3 and t.name == "fp8_e4m3"
    assert t.policy == tn.Policy(accum=tn.f32, rounding="stochastic")
    assert str(t) == repr(t) == "fp8_e4m3 @accum(f32) @stochastic_round"
    assert (tn.bf16 @ accum(tn.f32) @ accum(tn.f64)).accum is tn.f64  # the last one counts


def test_three_parts_are_readable():
    t = tn.fp8_e4m3 @ accum(tn.fp32) @ loss_scale(128.0) @ saturate
    assert (t.policy.accum, t.policy.loss_scale, t.policy.saturate) == (tn.f32, 128.0, True)


@pytest.mark.row("NUM-19")
def test_effective_accumulate_type():
    assert (tn.bf16 @ accum(tn.bf16)).accum is tn.bf16
    assert (tn.bf16 @ accum("f32")).accum is tn.f32
    expected = {"f64": "f64", "int64": "int64", "uint64": "uint64", "uint32": "uint32"}
    for t in tn.all_dtypes():
        default = "f32" if t.kind == "float" else "int32"
        assert tn.as_type(t).accum.name == expected.get(t.name, default)


@pytest.mark.row("NUM-18", "NUM-24")
@given(t=numeric_types())
def test_text_round_trips_through_the_parser_and_through_python(t):
    assert tn.parse(str(t)) == t
    assert tn.parse(str(t).replace(" ", "")) == t
    assert tn.parse(str(t).replace("@", " \t@ ").replace("(", " ( ")) == t
    assert tn.parse(str(t).replace('"', "")) == t
    assert tn.parse_policy(str(t.policy)) == t.policy
    assert tn.as_type(eval(repr(t), vars(tn) | {t.dtype.name: t.dtype})) == t


@pytest.mark.row("NUM-24")
def test_strings_of_the_seeds():
    assert tn.parse("fp6 @accum(fp32)") == tn.fp6_e3m2 @ accum(tn.f32)
    assert tn.parse("bf16 @accum(f32)") == tn.bf16 @ accum(tn.fp32)
    assert tn.parse("fp8_e4m3") == tn.as_type(tn.fp8_e4m3)
    assert tn.parse("int8@per_channel(0)@scaled('amax')").policy == tn.Policy(
        per_channel=0, scaled="amax")


MALFORMED = [
    ("", 0, "expected a dtype name"),
    ("@accum(f32)", 0, "expected a dtype name"),
    ("fp9 @accum(f32)", 0, "unknown dtype 'fp9'"),
    ("fp8 accum(f32)", 4, "expected '@' but found 'a'"),
    ("fp8 @", 5, "expected a modifier name"),
    ("fp8 @acum(f32)", 5, "unknown modifier 'acum'"),
    ("fp8 @accum", 10, "@accum needs an argument"),
    ("fp8 @accum()", 11, "expected the argument of @accum"),
    ("fp8 @accum(f32", 14, r"expected '\)'"),
    ("fp8 @accum(f33)", 11, "unknown dtype 'f33'"),
    ("fp8 @accum(fp4)", 11, "@accum cannot keep sums in fp4_e2m1"),
    ("fp8 @saturate(1)", 13, "@saturate takes no argument"),
    ("fp8 @loss_scale(two)", 16, "@loss_scale needs a number; got 'two'"),
    ("fp8 @loss_scale(-2)", 16, "finite number > 0; got -2.0"),
    ("fp8 @per_channel(0.5)", 17, "@per_channel needs a number; got '0.5'"),
    ("fp8 @scaled(max)", 12, "@scaled got 'max'"),
    ('fp8 @scaled("amax)', 12, "expected the argument of @scaled"),
    ("fp8 @rounding(up)", 14, "@rounding got 'up'"),
    ("fp8 @saturate @saturate", 15, "@saturate contradicts or repeats @saturate"),
    ("fp8 @stochastic_round @rounding(toward_zero)", 23, "contradicts or repeats @stochastic"),
    ("fp8 @saturate;", 13, "expected '@' but found ';'"),
]


@pytest.mark.row("NUM-24")
@pytest.mark.parametrize(("text", "at", "message"), MALFORMED)
def test_malformed_strings_point_at_the_place(text, at, message):
    with pytest.raises(PolicyError, match=message) as info:
        tn.parse(text)
    first, shown, caret = info.value.message.split("\n")
    assert first.endswith(f"at position {at}")
    assert shown == "  " + text
    assert caret == "  " + " " * at + "^"


@given(text=st.text("fp8@accum(32)_e4m '\"\n\t\u00e9", max_size=25))
def test_any_text_parses_or_raises_a_policy_error(text):
    try:
        t = tn.parse(text)
    except PolicyError as error:
        assert " at position " in error.message
    else:
        assert tn.parse(str(t)) == t


def test_what_is_not_a_modifier_is_refused():
    with pytest.raises(PolicyError, match=r"@accum needs an argument: @accum\(f32\)"):
        _ = tn.fp8 @ accum
    with pytest.raises(PolicyError, match="f32 is not a policy modifier") as info:
        _ = tn.fp8 @ tn.f32
    assert "@stochastic_round" in info.value.hint
    with pytest.raises(TypeError):
        _ = tn.fp8 @ object()

    class Device:
        def __rmatmul__(self, left):
            return left, "mine"

    assert tn.fp8 @ Device() == (tn.fp8, "mine")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: accum(tn.bool_), "cannot keep sums in bool_"),
        (lambda: accum("f33"), "unknown dtype 'f33'"),
        (lambda: loss_scale(0), "> 0; got 0"),
        (lambda: loss_scale(float("nan")), "> 0; got nan"),
        (lambda: loss_scale("2"), "> 0; got '2'"),
        (lambda: loss_scale(True), "> 0; got True"),
        (lambda: per_channel(0.0), "axis number such as 0 or -1; got 0.0"),
        (lambda: scaled("mean"), "@scaled got 'mean'"),
        (lambda: rounding("up"), "@rounding got 'up'"),
        (lambda: on_device("a b"), "@device needs a name such as 'cpu'"),
    ],
)
def test_bad_arguments_are_named(build, message):
    with pytest.raises(PolicyError, match=message):
        build()


# -- as_type --


def test_as_type_accepts_what_numpy_and_python_call_types():
    for t in tn.all_dtypes():
        if t not in (tn.tf32, tn.fp4_e3m0):  # they have no NumPy type of their own
            assert tn.as_type(t.numpy) == tn.as_type(t.numpy.type) == tn.as_type(t)
            assert tn.dtype_of_numpy(t.numpy) is t
        assert tn.as_type(t.name) == tn.as_type(t) == tn.NumericType(t)
        assert tn.as_dtype(tn.as_type(t) @ saturate) is t
    assert [tn.as_dtype(p) for p in (float, int, bool)] == [tn.f32, tn.int64, tn.bool_]
    t = tn.bf16 @ saturate
    assert tn.as_type(t) is t


@pytest.mark.parametrize("x", [3, None, list, complex, [tn.f32], policy_class()])
def test_as_type_says_what_is_accepted(x):
    with pytest.raises(DTypeError, match="is not a numeric type") as info:
        tn.as_type(x)
    assert "a class decorated with @precision_policy" in info.value.hint


def test_as_type_refuses_numpy_types_without_a_format():
    for x in (np.complex64, np.dtype(object), np.dtype("U3")):
        with pytest.raises(DTypeError, match="has no Tessera dtype"):
            tn.as_type(x)


# -- policy classes --


@pytest.mark.row("NUM-30", "NUM-34")
def test_a_policy_class_is_a_numeric_type():
    cls = tn.precision_policy(policy_class())
    t = tn.as_type(cls)
    assert t.dtype is tn.int8 and t.accum is tn.f64 and t.policy.custom is cls
    assert str(t) == "Quantized" and tn.parse("Quantized") == t
    more = cls @ saturate @ accum(tn.f32)
    assert str(more) == "Quantized @accum(f32) @saturate" and tn.parse(str(more)) == more
    assert tn.is_custom_policy(cls) and not tn.is_custom_policy(tn.f32)


@pytest.mark.row("NUM-30")
@pytest.mark.parametrize(
    "missing", ["storage", "scale", "compute", "accumulate", "quantize", "dequantize"]
)
def test_a_missing_part_of_a_policy_class_is_named(missing):
    with pytest.raises(PolicyError, match=f"Quantized has no (attribute|method) '{missing}'"):
        tn.precision_policy(policy_class(**{missing: None}))


def test_other_mistakes_in_a_policy_class():
    with pytest.raises(PolicyError, match="Quantized.storage must be a dtype; got 'int8'"):
        tn.precision_policy(policy_class(storage="int8"))
    with pytest.raises(PolicyError, match="has no method 'quantize'"):
        tn.precision_policy(policy_class(quantize=3))
    with pytest.raises(PolicyError, match="decorates a class"):
        tn.precision_policy(lambda x: x)


def test_a_redefined_class_takes_the_name_and_the_old_one_keeps_working():
    old = tn.precision_policy(policy_class())
    assert tn.parse("Quantized").policy.custom is old
    new = tn.precision_policy(policy_class())
    assert tn.parse("Quantized").policy.custom is new
    assert tn.as_type(old).policy.custom is old
