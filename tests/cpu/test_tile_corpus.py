"""Every wrong kernel gives its error, every racy one is caught, no correct one is accused."""

from __future__ import annotations

import pytest

import tessera as ts
from corpus import Program
from kernels.corpus import algorithms, read
from tessera import config

WRONG, RACY = read("wrong"), read("racy")
CORRECT, ALGORITHMS = read("correct"), algorithms()


def name_of(program: Program) -> str:
    return program.name.replace(" ", "-")


def error_of(program: Program, seed: int) -> ts.TesseraError:
    with config.scope(debug=True), pytest.raises(ts.TesseraError) as info:
        program.run(seed)
    return info.value


def check(program: Program, error: ts.TesseraError) -> None:
    text = str(error)
    assert error.code == program.code, text
    missing = [f for f in program.fragments if f not in text]
    assert not missing, f"{missing} not in:\n{text}"
    assert error.where is not None and error.where.file == program.path, text
    assert error.where.line == program.line, text
    assert error.where.text and error.where.text in text


@pytest.mark.parametrize("program", WRONG, ids=name_of)
def test_a_wrong_kernel(program, pytestconfig):
    check(program, error_of(program, pytestconfig.option.seed))


@pytest.mark.row("DBG-07", "DBG-11", "TILE-20")
@pytest.mark.parametrize("program", RACY, ids=name_of)
def test_a_racy_kernel(program, pytestconfig):
    check(program, error_of(program, pytestconfig.option.seed))


@pytest.mark.parametrize("program", CORRECT + ALGORITHMS, ids=name_of)
def test_a_correct_kernel(program, pytestconfig):
    with config.scope(debug=True):
        program.run(pytestconfig.option.seed)


@pytest.mark.parametrize("name", ["missing barrier in a reduction", "uninitialised shared memory"])
def test_without_debug_nothing_is_checked(name, pytestconfig):
    (program,) = [p for p in RACY if p.name == name]
    with config.scope(debug=False):
        program.run(pytestconfig.option.seed)


def test_the_corpora_are_large_and_without_repetition():
    assert len(WRONG) >= 40 and len(RACY) >= 20 and len(CORRECT) >= 30
    for programs in (WRONG, RACY, CORRECT + ALGORITHMS):
        assert len({p.name for p in programs}) == len(programs)
