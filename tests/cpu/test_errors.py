"""Every wrong program of the corpus gives its error: class code, words, line and source text."""

from __future__ import annotations

import functools
import inspect
import linecache
import pickle
import re
from types import FunctionType
from typing import Any

import pytest

import guide_api
import tessera as ts
from corpus import Program
from errors.corpus import PROGRAMS
from tessera import errors
from tessera.graph.decorator import Decorator

FILE = "/programs/wrong.py"


def run(program: Program) -> ts.TesseraError:
    """The error of a program, executed as the file FILE."""
    source = program.source
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    try:
        with pytest.raises(ts.TesseraError) as info:
            exec(compile(source, FILE, "exec"), {"__name__": "wrong", "__file__": FILE})
        return info.value
    finally:
        del linecache.cache[FILE]


@pytest.mark.row("SHAPE-05")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name.replace(" ", "-"))
def test_a_wrong_program(program, fresh_config):
    error = run(program)
    text = str(error)
    assert error.code == program.code, text
    missing = [f for f in program.fragments if f not in text]
    assert not missing, f"{missing} not in:\n{text}"
    assert error.where is not None and error.where.file == FILE, text
    assert error.where.line == program.line, text
    assert f"at {FILE}:{program.line}  {error.where.text}" in text and error.where.text


def test_the_corpus_is_large_and_without_repetition():
    assert len(PROGRAMS) >= 100
    assert len({p.name for p in PROGRAMS}) == len(PROGRAMS)
    assert len({p.code for p in PROGRAMS}) >= 14


@pytest.mark.row("DBG-21")
def test_every_error_class_has_a_stable_code_and_a_hint():
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass)
               if issubclass(c, errors.TesseraError)]
    assert len(classes) > 15
    assert {c.__name__ for c in classes} <= set(errors.__all__)  # and so names of ts
    codes = {c.default_code for c in classes}
    assert len(codes) == len(classes) and all(c.startswith("E_") for c in codes)
    for c in classes:
        made = c("what", hint="do this")
        assert made.code == c.default_code and made.hint == "do this"
        assert made.where.file == __file__ and "made = c(" in made.where.text
        assert str(made).startswith(f"[{made.code}] what\n  at ")
    for kind in ("ShapeError", "DTypeError", "PrivilegeError", "OutOfMemoryError",
                 "NumericsError"):
        assert getattr(ts, kind) in classes


@pytest.mark.parametrize("error, builtin", [
    (ts.ShapeError, ValueError), (ts.DTypeError, TypeError), (ts.AxisError, IndexError),
    (ts.ArgumentError, TypeError), (ts.NumericsError, FloatingPointError),
    (ts.OutOfMemoryError, MemoryError), (errors.UnknownNameError, AttributeError),
    (ts.PrivilegeError, PermissionError),
])
def test_errors_are_what_python_users_catch(error, builtin):
    assert issubclass(error, builtin)


def test_a_context_manager_of_ours_does_not_hide_the_line():
    with pytest.raises(ts.ArgumentError) as info:
        with ts.config.scope(no_such_thing=1):
            pass
    assert info.value.where.file == __file__


def test_the_words_of_other_libraries_lead_to_names_that_exist():
    from tessera import foreign
    from tessera.graph.operand import PUBLIC

    x = ts.ones((2, 2))
    for words, owner in ((foreign.FUNCTIONS, ts), (foreign.METHODS, x),
                         (foreign.RANDOM, ts.random), (foreign.OPTIM, ts.optim),
                         (foreign.TILE, ts.tile), (foreign.DIST, ts.dist)):
        for word, instead in words.items():
            assert not hasattr(owner, word), f"{word} exists: no other word is needed"
            with pytest.raises(ts.UnknownNameError) as info:
                getattr(owner, word)
            assert info.value.hint == f"here that is {instead}"
            for path in re.findall(r"\bts\.([\w.]+)", instead):
                assert functools.reduce(getattr, path.split("."), ts) is not None
            for name in re.findall(r"\bx\.(\w+)", instead):
                assert hasattr(x, name), instead
    parameters = {p for f in PUBLIC.values() for p in inspect.signature(f).parameters}
    for word, ours in foreign.KEYWORDS.items():
        assert set(ours) & parameters, f"{word}=: no function has {ours}"


def test_a_guess_is_near_or_is_not_made():
    for word, near in (("sofmax", "softmax"), ("reshap", "reshape"), ("mattmul", "matmul")):
        with pytest.raises(ts.UnknownNameError) as info:
            getattr(ts, word)
        assert info.value.hint == f"did you mean {near!r}?"
    for word in ("quiver", "qqq", "load_state_dict"):
        with pytest.raises(ts.UnknownNameError) as info:
            getattr(ts, word)
        assert info.value.hint is None, info.value.hint


def offered() -> list[tuple[str, Any]]:
    """The functions of ts and of its modules, and the decorators, as users write them."""
    found = [(f"ts.{n}", getattr(ts, n)) for n in guide_api.names_of(ts)]
    for module in ("dist", "debug", "mesh", *guide_api.OTHERS):
        inside = getattr(ts, module)
        found += [(f"ts.{module}.{n}", getattr(inside, n)) for n in guide_api.names_of(inside)]
    return [(name, f) for name, f in found if isinstance(f, FunctionType | Decorator)
            and f.__module__.startswith("tessera.")]


@pytest.mark.parametrize("name", dict(offered()))
def test_a_keyword_that_does_not_exist_is_an_error_of_the_line(name):
    f = dict(offered())[name]
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(f).parameters.values()):
        pytest.skip("it takes any keyword: a setting, an argument of another function")
    with pytest.raises(ts.ArgumentError, match="unexpected keyword argument 'quiver'") as info:
        f(quiver=1)
    assert info.value.where.text == "f(quiver=1)"
    for parameter in inspect.signature(f).parameters:
        assert parameter in info.value.hint


@pytest.mark.parametrize("f", [ts.grad, ts.scan, ts.dist.all_reduce, ts.debug.profile])
def test_functions_with_such_errors_are_pickled_by_name(f):
    assert pickle.loads(pickle.dumps(f)) is f


def test_what_a_function_raises_itself_stays():
    def body(carry, x):
        return len(3), x

    with pytest.raises(TypeError, match="has no len") as info:
        ts.scan(body, 0.0, ts.ones((3,)))
    assert not isinstance(info.value, ts.TesseraError)


def test_hints_show_calls_without_annotations():
    with pytest.raises(ts.ArgumentError) as info:
        ts.jit(lambda x: x)(1, 2)
    assert info.value.hint == "<lambda>(x)"
    for call in (lambda: ts.softmax(), lambda: ts.grad(signed)(1.0, 2.0)):
        with pytest.raises(ts.ArgumentError) as info:
            call()
        assert info.value.hint in ("ts.softmax(x, axis=-1)", "grad(signed)(x)")


def signed(x: ts.Tensor) -> ts.Tensor:
    return x


def test_hasattr_and_star_import_see_names_as_python_does():
    assert not hasattr(ts, "no_such_name") and not hasattr(ts.ones((2,)), "no_such_method")
    assert hasattr(ts, "softmax") and getattr(ts, "sofmax", None) is None
    with pytest.raises(ImportError):
        exec("from tessera import sofmax")
