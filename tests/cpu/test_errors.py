"""Every wrong program of the corpus gives its error: class code, words, line and source text."""

from __future__ import annotations

import inspect
import linecache

import pytest

import tessera as ts
from errors.corpus import PROGRAMS, Program
from tessera import errors

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


def test_hasattr_and_star_import_see_names_as_python_does():
    assert not hasattr(ts, "no_such_name") and not hasattr(ts.ones((2,)), "no_such_method")
    assert hasattr(ts, "softmax") and getattr(ts, "sofmax", None) is None
    with pytest.raises(ImportError):
        exec("from tessera import sofmax")
