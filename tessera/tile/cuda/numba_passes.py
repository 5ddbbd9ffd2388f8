"""Numba's passes over emitted source: what they look for again each time is found once, and what
such source never holds is not looked for. The PTX is the same.

Emitted source is one function of scalars and intrinsics, without arrays, strings, exceptions and
generators. While nothing of ours is compiled (`COMPILED_FOR`) Numba does all as ever.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

from llvmlite import ir as llvm_ir
from numba.cuda import lowering
from numba.cuda.core import (
    analysis,
    base,
    byteflow,
    inline_closurecall,
    ir_utils,
    ssa,
    transforms,
)
from numba.cuda.core import ir as numba_ir
from numba.cuda.core.errors import CompilerError, LoweringError, new_error_context
from numba.cuda.core.postproc import PostProcessor, VariableLifetime
from numba.cuda.core.typed_passes import InlineOverloads, NopythonRewrites

from ...runtime.target import Target

COMPILED_FOR: ContextVar[Target | None] = ContextVar("target", default=None)


@contextmanager
def compiling(target: Target) -> Iterator[None]:
    """What is built inside is for a target."""
    token = COMPILED_FOR.set(target)
    try:
        yield
    finally:
        COMPILED_FOR.reset(token)


def _for_ours(place: Any, name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """Put `ours` in the place of a function while Numba compiles for us. Gives Numba's own."""
    numbas = getattr(place, name)

    def either(*args: Any, **options: Any) -> Any:
        return (numbas if COMPILED_FOR.get() is None else ours)(*args, **options)

    setattr(place, name, either)
    return numbas


# --- variables ------------------------------------------------------------------------------------


# Most of what a statement holds, besides variables and expressions.
NO_VARIABLES = frozenset({str, int, bool, type(None), numba_ir.Loc, numba_ir.Const,
                          numba_ir.Global, numba_ir.FreeVar, numba_ir.Arg})


def _collect_variables(values: Iterable[Any], found: list[Any]) -> None:
    for value in values:
        kind = type(value)
        if kind is numba_ir.Var:
            found.append(value)
        elif kind is numba_ir.Expr:
            _collect_variables(value._kws.values(), found)
        elif kind is tuple or kind is list:
            _collect_variables(value, found)
        elif kind is dict:
            _collect_variables(value.values(), found)
        elif kind not in NO_VARIABLES and isinstance(value, numba_ir.Inst):
            found += value.list_vars()


def list_variables(_: Any, value: Any) -> list[Any]:
    """Numba asks each statement for its variables in ten passes, a sixth of the time of an unrolled
    kernel's compilation. Here one list is filled, instead of one at each level joined to it."""
    found: list[Any] = []
    _collect_variables((value,), found)
    return found


def variables_of_statement(statement: Any) -> list[Any]:
    """An assignment's, of which Numba writes each field anew to see them."""
    if type(statement) is not numba_ir.Assign:
        return VARIABLES_OF_STATEMENT(statement)
    return list_variables(statement, (statement.target, statement.value))


LIST_VARIABLES = numba_ir.Inst._rec_list_vars
VARIABLES_OF_STATEMENT = ir_utils.compat_list_vars_stmt
numba_ir.Inst._rec_list_vars = list_variables
ir_utils.compat_list_vars_stmt = variables_of_statement


def uses_and_definitions(blocks: dict[int, Any]) -> Any:
    """The variables that each block defines, and those that it reads before. Numba lists those of
    an assignment twice."""
    uses: dict[int, set[str]] = {}
    definitions: dict[int, set[str]] = {}
    for offset, block in blocks.items():
        used, defined = uses[offset], definitions[offset] = set[str](), set[str]()
        for statement in block.body:
            if type(statement) is numba_ir.Assign:
                names = {v.name for v in list_variables(statement, statement.value)}
                target = statement.target.name
                if target not in names:
                    defined.add(target)
                names.add(target)
            else:
                names = {v.name for v in variables_of_statement(statement)}
            used |= names - defined
    return analysis._use_defs_result(usemap=uses, defmap=definitions)


USES_AND_DEFINITIONS = _for_ours(analysis, "compute_use_defs", uses_and_definitions)


def find_assigned_once(lower: Any) -> None:
    """Numba looks for each variable's assignments in all of its block: half of the time of an
    unrolled kernel's compilation. Here every block is gone through once."""
    blocks = lower.func_ir.blocks
    found, alloca = uses_and_definitions(blocks), analysis.must_use_alloca(blocks)
    defining = Counter(v for names in found.defmap.values() for v in names)
    assigned = Counter(a.target.name for b in blocks.values()
                       for a in b.find_insts(numba_ir.assign_types))
    used = {v for names in found.usemap.values() for v in names}  # behind the block of its value
    lower._singly_assigned_vars = {v for v, n in defining.items() if n == assigned[v] == 1
                                   and v not in used and v not in alloca}
    lower._blk_local_varmap = {}


FIND_ASSIGNED_ONCE = lowering.CUDALower._find_singly_assigned_variable
lowering.CUDALower._find_singly_assigned_variable = find_assigned_once


def process(processor: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
    """Behind seven passes Numba finds where every variable lives. It is read where variables are
    deleted, in front of the lowering, and found when it is read."""
    made = processor.func_ir
    if made.is_generator:
        return PROCESS(processor, emit_dels, extend_lifetimes)
    made.blocks = transforms.canonicalize_cfg(made.blocks)
    made.variable_lifetime = VariableLifetime(made.blocks)
    made.generator_info = None
    if emit_dels:
        processor._insert_var_dels(extend_lifetimes=extend_lifetimes)


PROCESS = _for_ours(PostProcessor, "run", process)


def names_of(block: Any) -> set[str]:
    """Of all variables that a block defines or reads."""
    return {v.name for statement in block.body for v in variables_of_statement(statement)}


def assign_once(blocks: dict[int, Any]) -> dict[int, Any]:
    """For each variable that is assigned twice Numba writes all blocks anew, two times: in kernels
    of many variables most of the pass. Here those that name it: the names that are added in its
    place are assigned once."""
    if not blocks:
        return {}
    cfg = ssa.compute_cfg_from_blocks(blocks)
    frontiers, cache = ssa._iterated_domfronts(cfg), ssa._CacheListVars()
    named = {label: names_of(block) for label, block in blocks.items()}
    for name in ssa._find_defs_violators(blocks, cfg):
        touched = {label: blocks[label] for label in blocks if name in named[label]}
        fresh, definitions = ssa._fresh_vars(touched, name)
        added: dict[int, list[Any]] = defaultdict(list)
        where = ssa._compute_phi_locations(frontiers, definitions)
        states = {**ssa._make_states(blocks), "varname": name, "defmap": definitions, "cfg": cfg,
                  "phimap": added, "phi_locations": where}
        blocks = {**blocks, **ssa._run_block_rewrite(fresh, states, ssa._FixSSAVars(cache))}
        for label, phis in added.items():
            block = blocks[label].copy()
            block.body = phis + block.body
            blocks[label] = block
    if ssa.compute_cfg_from_blocks(blocks) != cfg:
        raise CompilerError("CFG mutated in SSA pass")
    return blocks


ASSIGN_ONCE = _for_ours(ssa, "_run_ssa", assign_once)


# --- what emitted source does not hold ------------------------------------------------------------


def nothing_found(*_: Any) -> bool:
    """Of arrays of constants, of strings, of functions that Numba opens where they are called."""
    return False


MATCH_ARRAY = _for_ours(inline_closurecall.RewriteArrayOfConsts, "match", nothing_found)
REWRITE = _for_ours(NopythonRewrites, "run_pass", nothing_found)
OPEN_CALLS = _for_ours(InlineOverloads, "run_pass", nothing_found)


def advance(flow: Any, runner: Any, state: Any) -> Any:
    """Whether an exception is handled at an instruction: asked of a function that handles none."""
    if flow._bytecode.exception_entries:
        return ADVANCE(flow, runner, state)
    return state.advance_pc()


ADVANCE = _for_ours(byteflow.Flow, "_run_handle_exception", advance)


# --- lowering -------------------------------------------------------------------------------------


def lower_block(lower: Any, block: Any) -> None:
    """Numba prepares what it says of an error at each statement; here when there is one."""
    lower.pre_block(block)
    for statement in block.body:
        lower.loc = statement.loc
        try:
            lower.lower_inst(statement)
        except Exception:
            with new_error_context('lowering "{inst}" at {loc}', inst=statement, loc=lower.loc,
                                   errcls_=partial(LoweringError, loc=lower.loc)):
                raise
    lower.post_block(block)


def _without_texts(function: Any) -> FunctionType:
    """The same code, in which str() writes nothing: each statement is written for a dump that
    nobody asked for, a twentieth of the time of a compilation."""
    names = {**function.__globals__, "str": lambda _: ""}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


LOWER_BLOCK = _for_ours(lowering.BaseLower, "lower_block", lower_block)
LOWER_INST = _for_ours(lowering.Lower, "lower_inst", _without_texts(lowering.Lower.lower_inst))
SIZES: dict[str, int] = {}


def size_of(context: Any, kind: Any) -> int:
    """Bytes of a type of LLVM. Numba writes a module for each variable, which LLVM parses."""
    if isinstance(kind, llvm_ir.IdentifiedStructType):  # of its name alone nothing follows
        return SIZE_OF(context, kind)
    if (name := str(kind)) not in SIZES:
        SIZES[name] = SIZE_OF(context, kind)
    return SIZES[name]


SIZE_OF = _for_ours(base.BaseContext, "get_abi_sizeof", size_of)
HAS_LOC = base._has_loc  # whether a function takes a `loc`, for which its signature is parsed
base._has_loc = lru_cache(4096)(HAS_LOC)
