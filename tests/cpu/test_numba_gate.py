"""What Numba is asked while it compiles emitted source, and how often."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest

from ptx_harness import require_compiler
from tessera.errors import CompileError
from tessera.runtime.target import parse_target

HEAD = """from tessera.tile.cuda.numba_gate import i32, i64
from tessera.tile.cuda import use
from tessera.tile.cuda.ptx import memory
st = use(memory.st('global', 'b32', cache='wb'))
"""
SUMS = HEAD + """
def kernel(p, n):
    a = i32(n + 1)
    b = i32(a + 2)
    st(p, i32(b + a))
    st(p + 4, i32(b + 7))
"""


@pytest.fixture
def compiled() -> Any:
    require_compiler()
    from tessera.tile.cuda.numba_gate import compile_source

    def run(source: str, target: str = "sm_80") -> str:
        return compile_source(source, "<sums>", "kernel", ["i64", "i32"], parse_target(target),
                              threads=32, lineinfo=False).text

    return run


def test_a_call_of_the_same_types_is_asked_once(compiled: Any, monkeypatch: Any) -> None:
    from tessera.tile.cuda import numba_gate

    context = numba_gate.cuda_target.typing_context
    asked: list[tuple] = []
    ask = type(context).resolve_function_type.__get__(context)

    def counted(function: Any, args: tuple, kws: Any) -> Any:
        asked.append((str(function), args))
        return ask(function, args, kws)

    monkeypatch.setattr(context, "resolve_function_type", counted)
    plain, every = compiled(SUMS), len(asked)
    asked.clear()
    monkeypatch.setattr(context, "resolve_function_type", numba_gate._asked_once(counted))
    assert compiled(SUMS) == plain
    assert len(set(asked)) == len(asked) < every
    asked.clear()
    assert compiled(SUMS) == plain and not asked
    compiled(SUMS, "sm_90a")  # another target's instructions may have other definitions
    assert asked


def test_the_lowering_of_operators_asks_once_too(compiled: Any, monkeypatch: Any) -> None:
    from tessera.tile.cuda import numba_gate

    function, asked = numba_gate.types.Function, []
    ask = numba_gate.TYPED_CALL

    def counted(self: Any, context: Any, args: tuple, kws: Any) -> Any:
        asked.append((id(self), args))
        return ask(self, context, args, kws)

    def typed(self: Any, context: Any, args: tuple, kws: Any) -> Any:
        return once(self, (context, args), kws)

    once = numba_gate._asked_once(lambda self, given, kws: counted(self, *given, kws))
    monkeypatch.setattr(function, "get_call_type", counted)
    plain, every = compiled(SUMS), len(asked)
    asked.clear()
    monkeypatch.setattr(function, "get_call_type", typed)
    assert compiled(SUMS) == plain
    assert 0 < len(asked) < every
    asked.clear()
    monkeypatch.setattr(function, "get_call_type", numba_gate._typed_call)
    assert compiled(SUMS) == plain


def test_places_are_described_once_a_line(compiled: Any, monkeypatch: Any) -> None:
    """Line information is that of Numba, which describes each instruction's place anew."""
    from tessera.runtime.target import parse_target
    from tessera.tile.cuda import numba_gate

    described: list[int] = []
    builder = numba_gate.CUDADIBuilder
    describe = builder._di_location
    monkeypatch.setattr(builder, "_di_location", lambda self, line: (
        described.append(line), describe(self, line))[1])

    def run(mark: Any) -> tuple[str, int]:
        described.clear()
        monkeypatch.setattr(builder, "mark_location", mark)
        text = numba_gate.compile_source(BRANCHES, "<sums>", "kernel", ["i64", "i32"],
                                         parse_target("sm_80"), threads=32).text
        return text, len(described)

    (numbas, every), (ours, few) = run(numba_gate.LOCATE), run(numba_gate._locate)
    assert ours == numbas and ".loc" in ours and few < every / 2


BRANCHES = HEAD + """
def kernel(p, n):
    total, last = i32(0), i32(n)
    for k in range(n):
        once = i32(k * 3)
        twice = i32(once + 1)
        twice = i32(twice + last)
        if twice > 7:
            last = i32(twice - once)
        total = i32(total + last)
    st(p, total)
    st(p + 4, last)
"""


def test_variables_assigned_once_are_those_that_numba_finds(compiled: Any, monkeypatch: Any
                                                            ) -> None:
    """Over loops and branches, whose variables are read in other blocks."""
    from tessera.tile.cuda import numba_passes

    seen: list[tuple[set, set]] = []

    def both(lower: Any) -> None:
        numba_passes.FIND_ASSIGNED_ONCE(lower)
        numbas = lower._singly_assigned_vars
        numba_passes.find_assigned_once(lower)
        seen.append((numbas, lower._singly_assigned_vars))

    monkeypatch.setattr(numba_passes.lowering.CUDALower, "_find_singly_assigned_variable", both)
    for source in (SUMS, BRANCHES):
        compiled(source)
    assert len(seen) >= 2 and all(numbas == ours for numbas, ours in seen)
    assert any(numbas for numbas, _ in seen)


def test_variables_of_a_statement_are_those_that_numba_finds(compiled: Any, monkeypatch: Any
                                                             ) -> None:
    """In the code's order, each as often as it stands there."""
    from tessera.tile.cuda import numba_passes

    seen: list[tuple[list, list]] = []

    def names(found: Any) -> list[str]:
        return [v.name for v in found]

    def nested(statement: Any, value: Any) -> list:
        seen.append((names(numba_passes.list_variables(statement, value)),
                     names(numba_passes.LIST_VARIABLES(statement, value))))
        return numba_passes.LIST_VARIABLES(statement, value)

    def of_statement(statement: Any) -> list:
        seen.append((names(numba_passes.variables_of_statement(statement)),
                     names(numba_passes.VARIABLES_OF_STATEMENT(statement))))
        return numba_passes.VARIABLES_OF_STATEMENT(statement)

    monkeypatch.setattr(numba_passes.numba_ir.Inst, "_rec_list_vars", nested)
    monkeypatch.setattr(numba_passes.ir_utils, "compat_list_vars_stmt", of_statement)
    for source in (SUMS, BRANCHES):
        compiled(source)
    assert any(len(ours) > 2 for ours, _ in seen) and all(a == b for a, b in seen)


def test_what_blocks_read_and_define_is_what_numba_finds(compiled: Any, monkeypatch: Any) -> None:
    from tessera.tile.cuda import numba_passes

    seen: list[tuple[Any, Any]] = []

    def both(blocks: Any) -> Any:
        seen.append((numba_passes.USES_AND_DEFINITIONS(blocks),
                     numba_passes.uses_and_definitions(blocks)))
        return seen[-1][0]

    monkeypatch.setattr(numba_passes.analysis, "compute_use_defs", both)
    compiled(BRANCHES)
    assert seen and all(numbas == ours for numbas, ours in seen)
    assert any(len(numbas.usemap) > 2 and any(numbas.usemap.values()) for numbas, _ in seen)


def test_the_line_of_a_definition_is_the_one_that_numba_finds(compiled: Any) -> None:
    from tessera.tile.cuda import numba_gate

    @pytest.mark.usefixtures()
    def decorated() -> None: ...

    compiled(BRANCHES)
    space: dict[str, Any] = {}
    exec(compile(BRANCHES, "<sums>", "exec"), space)
    for function in (space["kernel"], decorated, numba_gate.compile_source):
        assert numba_gate._line_of_def(function) == numba_gate.LINE_OF_DEF(function) is not None


def test_the_ptx_is_the_one_of_numba_alone(compiled: Any, monkeypatch: Any) -> None:
    from tessera.tile.cuda import numba_gate
    from tessera.tile.cuda import numba_passes as ours

    quick = compiled(BRANCHES)
    for module, name, numbas in (
            (ours.numba_ir.Inst, "_rec_list_vars", ours.LIST_VARIABLES),
            (ours.ir_utils, "compat_list_vars_stmt", ours.VARIABLES_OF_STATEMENT),
            (ours.analysis, "compute_use_defs", ours.USES_AND_DEFINITIONS),
            (ours.PostProcessor, "run", ours.PROCESS),
            (ours.inline_closurecall.RewriteArrayOfConsts, "match", ours.MATCH_ARRAY),
            (ours.NopythonRewrites, "run_pass", ours.REWRITE),
            (ours.InlineOverloads, "run_pass", ours.OPEN_CALLS),
            (ours.byteflow.Flow, "_run_handle_exception", ours.ADVANCE),
            (ours.lowering.BaseLower, "lower_block", ours.LOWER_BLOCK),
            (ours.lowering.Lower, "lower_inst", ours.LOWER_INST),
            (ours.ssa, "_run_ssa", ours.ASSIGN_ONCE),
            (ours.base.BaseContext, "get_abi_sizeof", ours.SIZE_OF),
            (ours.base, "_has_loc", ours.HAS_LOC),
            (numba_gate.lowering, "get_func_def_lineno", numba_gate.LINE_OF_DEF)):
        assert getattr(module, name) is not numbas
        monkeypatch.setattr(module, name, numbas)
    assert compiled(BRANCHES) == quick


def test_a_statement_that_cannot_be_lowered_is_told_as_by_numba(compiled: Any, monkeypatch: Any
                                                                ) -> None:
    from tessera.tile.cuda import numba_passes as ours

    def refuse(lower: Any, kind: Any, statement: Any) -> None:
        raise NotImplementedError("not this one")

    def told() -> str:
        with pytest.raises(CompileError) as info:
            compiled(SUMS)
        return str(info.value)

    monkeypatch.setattr(ours.lowering.CUDALower, "lower_assign", refuse)
    text = told()
    monkeypatch.setattr(ours.lowering.BaseLower, "lower_block", ours.LOWER_BLOCK)
    monkeypatch.setattr(ours.lowering.Lower, "lower_inst", ours.LOWER_INST)
    assert text.partition("at tests")[0] == told().partition("at tests")[0]
    assert "not this one" in text and "<sums>:6" in text, text


def test_what_no_definition_takes_is_refused_each_time(compiled: Any) -> None:
    wrong = SUMS.replace("i32(b + 7)", "i32(b + '7')")
    for _ in range(2):
        with pytest.raises(CompileError, match="No implementation|Invalid use|add"):
            compiled(wrong)
    assert "st.global" in compiled(SUMS)


GATE = """
import importlib.util, sys
import tessera.errors
sys.modules["numba.cuda"] = None                  # it does not import
if {missing}:
    importlib.util.find_spec = lambda name: None  # and is not there
try:
    import tessera.tile.cuda.numba_gate
except tessera.errors.UnsupportedTargetError as error:
    print(error.message, "|", error.hint)
"""


@pytest.mark.parametrize("missing, words", [
    (True, "through Numba-CUDA, which is not installed |"),
    (False, "through Numba-CUDA, which does not import: ")])
def test_without_numba_cuda_it_says_whether_it_is_missing_or_broken(missing, words):
    if importlib.util.find_spec("numba_cuda") is None and not missing:
        pytest.skip("Numba-CUDA is not installed")
    done = subprocess.run([sys.executable, "-c", GATE.format(missing=missing)], text=True,
                          capture_output=True, check=True)
    assert words in done.stdout and "pip install -e '.[cuda12]'" in done.stdout, done.stdout


def test_the_first_compilation_loads_no_scipy() -> None:
    """Numba's table of NumPy functions asked for its BLAS, which no kernel calls."""
    text = "; ".join((
        "import sys, tessera.tile.cuda.numba_gate as gate",
        "from numba.cuda.np import arraymath, linalg",
        "from numba.cuda.descriptor import cuda_target",
        "cuda_target.target_context.refresh()",
        "assert 'scipy.linalg' not in sys.modules",
        "assert arraymath.ensure_blas is linalg.ensure_blas is gate._ensure_blas"))
    subprocess.run([sys.executable, "-c", text], check=True)
