"""What touches Numba-CUDA: intrinsics, and Python -> PTX. No GPU is needed.

Numba-CUDA is in maintenance (NVIDIA/numba-cuda#902); what its successor must offer is what stands
here: a function of typed scalars compiled to PTX for a target, and intrinsics whose body is written
with `Builder`. Everything else of the CUDA target is data and text.

Importing this module imports Numba-CUDA (0.8 s), so others import it inside functions.
"""

from __future__ import annotations

import importlib.util
import keyword
import linecache
import time
import warnings
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from ...errors import (
    CompileError,
    DTypeError,
    TesseraError,
    UnsupportedTargetError,
    source_line,
)
from ...lazy_dataclass import dataclass
from ...runtime.ptxas import FIX_GPU
from ...runtime.target import Target
from .builder import Builder, Value
from .instruction import OTHERWISE, Instruction, InstructionForm, Kind, Operand
from .ptx_text import LineMap, entry_name, normalised_ptx, relocate

try:
    from llvmlite import ir
    from numba import cuda
    from numba.cuda import lowering, types
    from numba.cuda.debuginfo import CUDADIBuilder
    from numba.cuda.descriptor import cuda_target
    from numba.cuda.extending import intrinsic as numba_intrinsic
    from numba.cuda.np import linalg
    from numba.cuda.typing import signature as numba_signature

    from .numba_passes import COMPILED_FOR, compiling
except ImportError as _error:
    _missing = importlib.util.find_spec("numba_cuda") is None  # Numba's own numba.cuda is older
    raise UnsupportedTargetError(
        "kernels are compiled through Numba-CUDA, which "
        + ("is not installed" if _missing else f"does not import: {_error}"), hint=FIX_GPU
    ) from _error



def _refuse_blas() -> None:
    raise ImportError("no kernel calls BLAS")


# Numba's table of NumPy functions asks for SciPy's BLAS when it is loaded, which takes a fifth of
# the first compilation, for functions that no kernel can call.
_ensure_blas, linalg.ensure_blas = linalg.ensure_blas, _refuse_blas
try:
    from numba.cuda.np import arraymath
finally:
    linalg.ensure_blas = _ensure_blas
arraymath.ensure_blas = _ensure_blas

# `noduplicate` is LLVM's; llvmlite lists only the call attributes that Numba uses.
ir.instructions.CallInstrAttributes._known = frozenset(
    {*ir.instructions.CallInstrAttributes._known, "noduplicate"})

_LLVM = {"i16": ir.IntType(16), "i32": ir.IntType(32), "i64": ir.IntType(64),
         "f32": ir.FloatType(), "f64": ir.DoubleType(), "pred": ir.IntType(32)}
_NUMBA = {"i16": types.int16, "i32": types.int32, "i64": types.int64, "f32": types.float32,
          "f64": types.float64, "pred": types.int32}
_SHARED_SYMBOL = "tessera_shared"
SHARED_ALIGNMENT_BYTES = 1024  # of the 128-byte swizzle's pattern

# For emitted sources: Numba widens int arithmetic to 64 bits, `i32(a + b)` narrows it again.
i32, i64, f32, f64 = types.int32, types.int64, types.float32, types.float64


# --- intrinsics -----------------------------------------------------------------------------------


class LlvmBuilder:
    """The `Builder` of intrinsics, over llvmlite's."""

    def __init__(self, llvm: ir.IRBuilder):
        self._llvm = llvm
        self.add, self.sub, self.mul = llvm.add, llvm.sub, llvm.mul
        self.udiv, self.urem, self.sdiv = llvm.udiv, llvm.urem, llvm.sdiv
        self.and_, self.or_, self.xor = llvm.and_, llvm.or_, llvm.xor
        self.shl, self.lshr, self.ashr = llvm.shl, llvm.lshr, llvm.ashr
        self.fadd, self.fsub, self.fmul, self.fdiv = llvm.fadd, llvm.fsub, llvm.fmul, llvm.fdiv
        self.select = llvm.select

    def const(self, kind: str, value: float) -> Value:
        return ir.Constant(_LLVM[kind], value)

    def i32(self, value: int) -> Value:
        return ir.Constant(_LLVM["i32"], value)

    def undefined(self, kind: str) -> Value:
        """Any value: an accumulator whose first use overwrites it."""
        return ir.Constant(_LLVM[kind], ir.Undefined)

    def fneg(self, x: Value) -> Value:
        """-0 - x: NVVM's dialect for targets before sm_100 is LLVM 7, which has no fneg."""
        return self._llvm.fsub(ir.Constant(x.type, -0.0), x)

    def is_float(self, x: Value) -> bool:
        return isinstance(x.type, ir.FloatType | ir.DoubleType)

    def zero(self, x: Value) -> Value:
        return ir.Constant(x.type, 0)

    def compare(self, op: str, x: Value, y: Value, *, unsigned: bool = False) -> Value:
        """`op` is <, <=, ==, !=, >=, >; floats compare ordered (!= unordered), as in Python."""
        if self.is_float(x):
            function = self._llvm.fcmp_unordered if op == "!=" else self._llvm.fcmp_ordered
        else:
            function = self._llvm.icmp_unsigned if unsigned else self._llvm.icmp_signed
        return function(op, x, y)

    def true(self, x: Value) -> Value:
        """Whether an int is not 0, as a condition for `select`."""
        return self._llvm.icmp_signed("!=", x, ir.Constant(x.type, 0))

    def to_int(self, condition: Value) -> Value:
        return self._llvm.zext(condition, _LLVM["i32"])

    def zext(self, x: Value, kind: str) -> Value:
        return self._llvm.zext(x, _LLVM[kind])

    def sext(self, x: Value, kind: str) -> Value:
        return self._llvm.sext(x, _LLVM[kind])

    def trunc(self, x: Value, kind: str) -> Value:
        return self._llvm.trunc(x, _LLVM[kind])

    def bitcast(self, x: Value, kind: str) -> Value:
        return self._llvm.bitcast(x, _LLVM[kind])

    def like(self, x: Value, value: float) -> Value:
        """A constant of the type of x."""
        return ir.Constant(x.type, value)

    def bits(self, x: Value) -> int:
        """Width of a number."""
        if self.is_float(x):
            return 64 if isinstance(x.type, ir.DoubleType) else 32
        return x.type.width

    def library(self, name: str, *args: Value) -> Value:
        """A function of libdevice on numbers of one type: __nv_expf."""
        module = self._llvm.module
        if name not in module.globals:
            kind = ir.FunctionType(args[0].type, [x.type for x in args])
            ir.Function(module, kind, name)
        return self._llvm.call(module.globals[name], args)

    # --- arrays of a thread -----------------------------------------------------------------------
    def array(self, name: str, kind: str, count: int) -> Value:
        """Memory of `count` numbers private to a lane; one for each name in a kernel. Where all
        indices turn out to be constants it becomes registers."""
        made = vars(self._llvm.function).setdefault("tessera_arrays", {})
        if name not in made:
            with self._llvm.goto_entry_block():
                made[name] = self._llvm.alloca(ir.ArrayType(_LLVM[kind], count), name=name)
        return made[name]

    def read(self, array: Value, index: Value) -> Value:
        return self._llvm.load(self._llvm.gep(array, [self.i32(0), index], inbounds=True))

    def write(self, array: Value, index: Value, x: Value) -> None:
        self._llvm.store(x, self._llvm.gep(array, [self.i32(0), index], inbounds=True))

    # --- control --------------------------------------------------------------------------------
    def when(self, condition: Value) -> Any:
        """A context: what is built inside runs where the condition holds."""
        return self._llvm.if_then(condition)

    def until(self, first: Value, step: Callable[[Value], tuple[Value, Value]]) -> Value:
        """x = first; repeat (x, done) = step(x) until done; the last x."""
        llvm = self._llvm
        before, iteration = llvm.block, llvm.append_basic_block("iteration")
        after = llvm.append_basic_block("done")
        llvm.branch(iteration)
        llvm.position_at_end(iteration)
        x = llvm.phi(first.type)
        x.add_incoming(first, before)
        new, done = step(x)
        x.add_incoming(new, llvm.block)
        llvm.cbranch(done, after, iteration)
        llvm.position_at_end(after)
        return new

    def shared_base(self) -> Value:
        """32-bit shared-space address of the kernel's dynamic shared memory, 1024-byte aligned."""
        module = self._llvm.module
        if _SHARED_SYMBOL not in module.globals:
            made = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), 0), _SHARED_SYMBOL,
                                     addrspace=3)
            made.linkage, made.align = "external", SHARED_ALIGNMENT_BYTES
        return self._llvm.ptrtoint(module.globals[_SHARED_SYMBOL], _LLVM["i32"])

    def call(self, instruction: Instruction, *args: Value) -> Any:
        """One PTX statement: None, a value, or a list (a tuple result, or several results).

        On a target that lacks it, what is declared to do the same (instruction.otherwise).
        Raises UnsupportedTargetError where nothing is.
        """
        target = COMPILED_FOR.get()
        if target is not None and not target.runs(instruction.target):
            if instruction.name not in OTHERWISE:
                raise UnsupportedTargetError(
                    f"the instruction {instruction.mnemonics[0]} needs {instruction.target}, the "
                    f"kernel is compiled for {target}")
            return OTHERWISE[instruction.name](self, *args)
        given = [x for a in args for x in (a if isinstance(a, list) else [a])]
        out = [_LLVM[o.kind] for o in instruction.results for _ in range(o.registers)]
        result = ir.VoidType() if not out else out[0] if len(out) == 1 else \
            ir.LiteralStructType(out)
        text = instruction.assembly().replace('"', r"\22")  # llvmlite writes it as it is
        asm = ir.InlineAsm(
            ir.FunctionType(result, [x.type for x in given]), text, instruction.constraints(),
            side_effect=instruction.effect != "pure")
        attributes = ["convergent"] * (instruction.effect == "converge")
        attributes += ["noduplicate"] * instruction.single
        made = self._llvm.call(asm, given, attrs=tuple(attributes))
        if not out:
            return None
        parts = [made] if len(out) == 1 else \
            [self._llvm.extract_value(made, i) for i in range(len(out))]
        return _grouped(parts, instruction.results)


def _builder(llvm: ir.IRBuilder) -> Builder:
    return LlvmBuilder(llvm)


def _grouped(parts: list[Value], results: Sequence[Operand]) -> Any:
    """Flat registers -> one item per result."""
    grouped, at = [], 0
    for o in results:
        grouped.append(parts[at:at + o.count] if o.count else parts[at])
        at += o.registers
    return grouped[0] if len(grouped) == 1 else grouped


def make_intrinsic(name: str, arity: int, rule: Callable[..., InstructionForm]) -> Any:
    """An intrinsic callable from kernels. rule(*operands) sees what each argument is."""
    def typed(*given: Any) -> Any:
        form = rule(*[_operand(name, i, t) for i, t in enumerate(given)])
        for wanted, t in zip(form.args, given, strict=True):
            _check(name, wanted, t)

        def codegen(context: Any, llvm: Any, sig: Any, values: Any) -> Any:
            converted = [_converted(context, llvm, v, t, wanted)
                         for v, t, wanted in zip(values, sig.args, form.args, strict=True)]
            return _packed(context, llvm, form, sig, form.body(_builder(llvm), *converted))

        return numba_signature(_result_type(form.results), *given), codegen

    # Numba reads the arity off the function.
    name = f"{name}_" if keyword.iskeyword(name) else name  # the op `not`
    parameters = ", ".join(f"a{i}" for i in range(arity))
    namespace: dict[str, Any] = {"typed": typed}
    exec(f"def {name}(context, {parameters}):\n    return typed({parameters})", namespace)
    return numba_intrinsic(namespace[name])


def instruction_intrinsic(instruction: Instruction) -> Any:
    form = InstructionForm(instruction.args, instruction.results,
                           lambda builder, *values: builder.call(instruction, *values))
    return make_intrinsic(instruction.name, len(form.args), lambda *_: form)


def _operand(name: str, position: int, t: Any) -> Operand:
    """What a Numba type is in our terms."""
    element = t.dtype if isinstance(t, types.UniTuple) else t
    count = t.count if isinstance(t, types.UniTuple) else 0
    if isinstance(element, types.Boolean):
        return Operand(f"a{position}", "i32", count)
    if isinstance(element, types.Integer):
        kind: Kind = "i64" if element.bitwidth > 32 else "i16" if element.bitwidth == 16 else "i32"
        return Operand(f"a{position}", kind, count)
    if isinstance(element, types.Float) and element.bitwidth >= 32:
        return Operand(f"a{position}", "f64" if element.bitwidth == 64 else "f32", count)
    raise DTypeError(f"argument {position} of {name} is a {t}",
                     hint="ints, floats, bools and uniform tuples of them are accepted")


def _check(name: str, wanted: Operand, given: Any) -> None:
    """Numba would convert a float to an int silently; a wrong register must be an error."""
    have = _operand(name, 0, given)
    if wanted.count != have.count or (wanted.kind[0] == "f") != (have.kind[0] == "f"):
        raise DTypeError(f"{name} takes {wanted}, and is given a {given}",
                         hint="emit a conversion, or a tuple of that length")


def _type_of(o: Operand) -> Any:
    return types.UniTuple(_NUMBA[o.kind], o.count) if o.count else _NUMBA[o.kind]


def _result_type(results: Sequence[Operand]) -> Any:
    made = [_type_of(o) for o in results]
    return types.none if not made else made[0] if len(made) == 1 else types.Tuple(made)


def _converted(context: Any, llvm: Any, value: Any, have: Any, wanted: Operand) -> Any:
    value = context.cast(llvm, value, have, _type_of(wanted))
    if not wanted.count:
        return value
    return [llvm.extract_value(value, i) for i in range(wanted.count)]


def _packed(context: Any, llvm: Any, form: InstructionForm, sig: Any, made: Any) -> Any:
    if not form.results:
        return context.get_dummy_value()
    if len(form.results) == 1:
        return _packed_one(llvm, form.results[0], made)
    parts = [_packed_one(llvm, o, m) for o, m in zip(form.results, made, strict=True)]
    return context.make_tuple(llvm, sig.return_type, parts)


def _packed_one(llvm: Any, operand: Operand, made: Any) -> Any:
    if not operand.count:
        return made
    out = ir.Constant(ir.ArrayType(_LLVM[operand.kind], operand.count), ir.Undefined)
    for i, value in enumerate(made):
        out = llvm.insert_value(out, value, i)
    return out


# --- Python -> PTX --------------------------------------------------------------------------------


def _asked_once(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Numba tries the definitions of a function at each of its calls, a fifth of the time of a
    compilation. What it finds for the same types is the same, for one target."""
    known: dict[tuple[Target, int, tuple], tuple[Any, Any]] = {}

    def resolve(function: Any, args: tuple, kws: Any) -> Any:
        target = COMPILED_FOR.get()
        if target is None or kws:
            return ask(function, args, kws)
        key = target, id(function), args
        if key not in known:
            found = ask(function, args, kws)
            if found is None:
                return None
            known[key] = function, found  # the function lives as long as its number is in use
        return known[key][1]

    return resolve


cuda_target.typing_context.resolve_function_type = _asked_once(
    cuda_target.typing_context.resolve_function_type)


def _typed_call(function: Any, context: Any, args: tuple, kws: Any) -> Any:
    """The lowering of operators asks functions themselves, up to four times each: a tenth of the
    time of a compilation."""
    return _typed_once(function, (context, args), kws)


def _ask_function(function: Any, context_and_args: tuple, kws: Any) -> Any:
    return TYPED_CALL(function, *context_and_args, kws)


_typed_once = _asked_once(_ask_function)
TYPED_CALL = types.Function.get_call_type
types.Function.get_call_type = _typed_call


def _locate(builder: Any, llvm: Any, line: int) -> None:
    """Numba describes the place of each instruction anew, to find that it is the one before."""
    scope = builder.subprograms[-1]
    before, at, place = vars(builder).get("last_place", (None, 0, None))
    if before is not scope or at != line:
        place = builder._di_location(line)
        builder.last_place = scope, line, place
    llvm.debug_metadata = place


LOCATE = CUDADIBuilder.mark_location
CUDADIBuilder.mark_location = _locate


def _unmarked(builder: Any, *args: Any, **options: Any) -> None:
    """Which value a variable has is for debuggers, for which nothing is built here: the PTX is the
    same without. NVVM 13 refuses some kernels with it, "Symbol name with unsupported characters".
    """


CUDADIBuilder.update_variable = _unmarked


def _line_of_def(function: FunctionType) -> int | None:
    """Numba parses the source for it."""
    code = function.__code__
    if linecache.getline(code.co_filename, code.co_firstlineno).startswith("def "):
        return code.co_firstlineno
    return LINE_OF_DEF(function)


LINE_OF_DEF = lowering.get_func_def_lineno
lowering.get_func_def_lineno = _line_of_def


@dataclass(frozen=True)
class Ptx:
    """A compiled kernel: its text, its symbol, the target and what it took."""

    text: str
    name: str
    target: Target
    seconds: float


def compile_kernel(
    kernel: FunctionType,
    parameters: Sequence[Kind],
    target: Target,
    *,
    threads: int,
    min_blocks: int = 1,
    lineinfo: bool = True,
    lines: LineMap | None = None,
) -> Ptx:
    """PTX of a Python function of scalars (pointers are i64), for blocks of `threads` lanes.

    lines: emitted line -> (user's file, line), put into the line information.
    Raises CompileError at the emitted line that Numba refuses.
    """
    start = time.perf_counter()
    cc = (target.major, target.minor, target.suffix) if target.suffix else target.cc
    try:
        with warnings.catch_warnings(), compiling(target):
            warnings.simplefilter("ignore")  # Numba's advice is about its own launcher
            text, _ = cuda.compile_ptx(
                kernel, tuple(_NUMBA[p] for p in parameters), cc=cc, lineinfo=lineinfo,
                launch_bounds=(threads, min_blocks))
    except Exception as error:  # typing, lowering and NVVM errors share no class
        raise _compile_error(error, kernel, target, lines or {}) from error
    text = normalised_ptx(text, kernel.__name__)
    if lines:
        text = relocate(text, kernel.__code__.co_filename, lines)
    return Ptx(text, entry_name(text), target, time.perf_counter() - start)


def compile_source(source: str, file: str, name: str, parameters: Sequence[Kind], target: Target,
                   **options: Any) -> Ptx:
    """As compile_kernel, of the function `name` in emitted source that bears the name `file`."""
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": "tessera_emitted", "__file__": file}
    exec(compile(source, file, "exec"), namespace)
    return compile_kernel(namespace[name], parameters, target, **options)


def _compile_error(error: Exception, kernel: FunctionType, target: Target,
                   lines: LineMap) -> Exception:
    """NVVM that is missing, else what was said about the emitted line, at the user's."""
    text = error.message if isinstance(error, TesseraError) else str(error).strip()
    if "NVVM" in text and "found" in text:
        return UnsupportedTargetError("NVVM, the compiler behind Numba-CUDA, is not installed",
                                      hint=FIX_GPU)
    file = kernel.__code__.co_filename
    line = _line_of(error, file)
    where = f"{file}:{line}: `{linecache.getline(file, line).strip()}`: " if line else f"{file}: "
    hint = error.hint if isinstance(error, TesseraError) else None
    origin = source_line(*lines[line]) if line in lines else None
    if isinstance(error, UnsupportedTargetError):
        return UnsupportedTargetError(
            f"{kernel.__name__}: {text}", where=origin,
            hint=hint or "compile it for a newer target, or run it under the interpreter")
    return CompileError(f"{kernel.__name__} for {target}: {where}{_essence(text)}",
                        hint=hint or "look at the emitted source with inspect_ir('target')",
                        where=origin)


def _line_of(error: BaseException, file: str) -> int:
    """The line of `file` that Numba was at: it keeps it in the objects that it works on."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        for name in ("self", "inst", "expr", "value", "loc"):
            held = trace.tb_frame.f_locals.get(name)
            at: Any = held if name == "loc" else getattr(held, "loc", None)
            if getattr(at, "filename", None) == file:
                line = at.line
        trace = trace.tb_next
    return line or getattr(getattr(error, "loc", None), "line", 0)


def _essence(text: str) -> str:
    """The lines of a Numba error that say something, without its advice."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("During:", "File ", "<source", "---"))]
    return " ".join(kept)[:800]
