"""One record per PTX instruction: its text, operands, effects and the oldest target that has it.

    Instruction("lg2", "d:f32 <- x:f32", "lg2.approx.ftz.f32 $d, $x;", isa="9.7.3 lg2")

The operands read `results <- arguments`. A name that stands on both sides is one register, read and
written. `x:i32*4` is a tuple of four registers and expands to `{r0, r1, r2, r3}`; `$x.2` is one of
them. A `pred` is an int of 0 or 1 outside and a predicate register in the text.

Records are data: nothing here imports Numba. `use` of the package makes the intrinsic of a record.
Those with compile-time parameters (a vector width, the n of wgmma) are made by a `family` function;
it names samples, and tests compile every record and every sample.

`isa` cites the PTX ISA (release 9.0): section and instruction.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import field, fields
from typing import Any, Literal

from ...errors import ArgumentError
from ...lazy_dataclass import dataclass
from ...runtime.target import Target, parse_target

Kind = Literal["i16", "i32", "i64", "f32", "f64", "pred"]
# Inline-assembly constraint of each kind. A predicate travels as an int.
CONSTRAINT: dict[str, str] = {"i16": "h", "i32": "r", "i64": "l", "f32": "f", "f64": "d",
                              "pred": "r"}

# What the compiler must not do with a statement of each class:
#   pure      nothing is forbidden: it may move, merge with an equal one, or vanish unused
#   volatile  executed as often as written, in order among such statements (clocks)
#   memory    also ordered with every access to memory
#   converge  also never moved under a condition: other lanes take part
Effect = Literal["pure", "volatile", "memory", "converge"]

_OPERAND = re.compile(r"(\w+)(?::(\w+)(?:\*(\d+))?)?$")
_PLACE = re.compile(r"\$(\w+?)(?:\.(\d+))?(?!\w)")


def kind_bytes(kind: str) -> int:
    """Bytes of a number in a register of a kind, or of a reduction's tag: 8 of f64, i64, u64."""
    return 8 if kind[-2:] == "64" else 4


@dataclass(frozen=True)
class Operand:
    """`count` registers of a kind as a tuple, or one scalar when `count` is 0."""

    name: str
    kind: Kind
    count: int = 0

    @property
    def registers(self) -> int:
        return self.count or 1

    def __str__(self) -> str:
        return f"{self.name}:{self.kind}" + (f"*{self.count}" if self.count else "")


def parse_operands(text: str) -> tuple[tuple[Operand, ...], tuple[Operand, ...]]:
    """(results, arguments) of `d:f32*4 <- a:i32*4, c:f32*4`; no arrow: arguments only."""
    left, arrow, right = text.partition("<-")
    if not arrow:
        left, right = "", text
    results = _operand_list(left, {})
    return results, _operand_list(right, {o.name: o for o in results})


def _operand_list(text: str, known: dict[str, Operand]) -> tuple[Operand, ...]:
    found = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        match = _OPERAND.match(item)
        if match and match[2] is None and match[1] in known:
            found.append(known[match[1]])
        elif match and match[2] in CONSTRAINT:
            found.append(Operand(match[1], match[2], int(match[3] or 0)))  # type: ignore[arg-type]
        else:
            raise ArgumentError(f"{item!r} is not an operand", hint="write x:i32 or x:f32*4")
    return tuple(found)


@dataclass(frozen=True)
class InstructionForm:
    """An intrinsic for given arguments: what they are converted to, what comes out, and the body.

    body(builder, *values) returns nothing, one result or a list of results; `builder` is a
    Builder (builder.py), and a tuple is a list of values.
    """

    args: tuple[Operand, ...]
    results: tuple[Operand, ...]
    body: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Operation:
    """An intrinsic that is arithmetic around instructions.

    rule(*operands) gives its InstructionForm.
    """

    name: str
    arity: int
    rule: Callable[..., InstructionForm]


INSTRUCTIONS: dict[str, Instruction] = {}


class DeclaredTwice(ArgumentError):
    """A second record of a name."""

    def __init__(self, first: Instruction, second: Instruction):
        super().__init__(f"PTX instruction {first.name!r} is declared twice")
        self.first, self.equal = first, first.facts() == second.facts()


@dataclass(frozen=True, eq=False)  # compared by identity: a record is one object
class Instruction:
    """A PTX statement, or a short fixed sequence of them; making the record registers it.

    `single`: the compiler must not copy the statement (unroll a loop around it); its registers are
    bound to one place in the pipeline.
    `outermost`: what it declares belongs to the kernel and not to the statement.
    """

    name: str
    operands: str
    text: str
    isa: str
    effect: Effect = "memory"
    cc: str = "75"
    single: bool = False
    outermost: bool = False
    results: tuple[Operand, ...] = field(init=False, repr=False)
    args: tuple[Operand, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        results, args = parse_operands(self.operands)
        object.__setattr__(self, "results", results)
        object.__setattr__(self, "args", args)
        used = {match[1] for match in _PLACE.finditer(self.text)}
        names = {o.name for o in (*results, *args)}
        silent = {o.name for o in results if o in args}  # only passes through the statement
        if not used <= names or names - used - silent:
            raise ArgumentError(
                f"{self.name}: text and operands differ: {sorted(used ^ names)}",
                hint=f"operands: {self.operands}",
            )
        first = INSTRUCTIONS.setdefault(self.name, self)
        if first is not self:
            raise DeclaredTwice(first, self)

    def facts(self) -> tuple:
        return tuple(getattr(self, f.name) for f in fields(self))

    @property
    def target(self) -> Target:
        return parse_target(self.cc)

    @property
    def mnemonics(self) -> list[str]:
        """The opcodes of the text in order, without guards, labels and declarations."""
        return mnemonics(self.text)

    def tied(self, operand: Operand) -> bool:
        """Whether an argument is the register of a result."""
        return operand in self.results

    def constraints(self) -> str:
        """LLVM's constraint string. A sequence writes results before it has read everything."""
        several = self.text.count(";") > 1 or any(o.kind == "pred" for o in self.results)
        out, first, at = [], {}, 0
        for o in self.results:
            first[o.name] = at
            early = "&" if several and o not in self.args else ""
            out += [f"={early}{CONSTRAINT[o.kind]}"] * o.registers
            at += o.registers
        for o in self.args:
            tied = [str(first[o.name] + i) for i in range(o.registers)] if self.tied(o) else []
            out += tied or [CONSTRAINT[o.kind]] * o.registers
        if self.effect in ("memory", "converge"):
            out.append("~{memory}")
        return ",".join(out)

    def assembly(self) -> str:
        """The text with LLVM's `$0`, `$1`, ... in place of the names."""
        places: dict[str, list[str]] = {}
        at = 0
        for o in self.results:
            places[o.name] = [f"${at + i}" for i in range(o.registers)]
            at += o.registers
        for o in self.args:
            if not self.tied(o):
                places[o.name] = [f"${at + i}" for i in range(o.registers)]
            at += o.registers
        return self._with_predicates(places)

    def _with_predicates(self, places: dict[str, list[str]]) -> str:
        before, after = [], []
        tuples = {o.name for o in (*self.results, *self.args) if o.count}
        for o in dict.fromkeys((*self.results, *self.args)):
            if o.kind == "pred":
                (slot,), register = places[o.name], f"pred_{o.name}"
                before.append(f".reg .pred {register};")
                if o in self.args:
                    before.append(f"setp.ne.b32 {register}, {slot}, 0;")
                if o in self.results:
                    after.append(f"selp.b32 {slot}, 1, 0, {register};")
                places[o.name] = [register]

        def place(match: re.Match[str]) -> str:
            slots = places[match[1]]
            if match[2] is not None:
                return slots[int(match[2])]
            return "{" + ", ".join(slots) + "}" if match[1] in tuples else slots[0]

        body = _PLACE.sub(place, self.text.strip())
        if before or ".reg" in body and not self.outermost:
            return "\n".join(["{", *before, body, *after, "}"])
        return body


def mnemonics(text: str) -> list[str]:
    """The PTX opcodes that occur in a text: `ld.global.v4.b32`, ..."""
    found = []
    for statement in re.split(r"[;\n{}]", text):
        match = re.match(r"\s*(?:@!?\S+\s+)?([a-z][a-z0-9_]*(?:[.:]{1,2}[a-zA-Z0-9_]+)*)(?=\s|$)",
                         statement)
        if match:
            found.append(match[1])
    return found


@dataclass(frozen=True)
class Family:
    """A function that makes records from compile-time parameters, and parameters to test."""

    make: Callable[..., Instruction]
    samples: tuple[dict[str, Any], ...]


FAMILIES: dict[str, Family] = {}


def family(*samples: dict[str, Any]) -> Callable[[Callable[..., Instruction]],
                                                 Callable[..., Instruction]]:
    """Declares a family. The same parameters, however spelled, give the same record: also those
    that `make` fills in itself (b="" for b=a), which it is only seen to do by the record's name.
    """
    def declare(make: Callable[..., Instruction]) -> Callable[..., Instruction]:
        signature = inspect.signature(make)
        made: dict[tuple, Instruction] = {}

        @functools.wraps(make)
        @functools.cache  # of each spelling
        def cached(*args: Any, **options: Any) -> Instruction:
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            key = tuple(bound.arguments.values())
            if key not in made:
                try:
                    made[key] = make(*bound.args, **bound.kwargs)
                except DeclaredTwice as again:
                    if not again.equal:
                        raise
                    made[key] = again.first
            return made[key]

        if make.__name__ in FAMILIES:
            raise ArgumentError(f"PTX family {make.__name__!r} is declared twice")
        FAMILIES[make.__name__] = Family(cached, samples)
        return cached

    return declare


def samples() -> Iterator[Instruction]:
    """Every plain record and every sample of every family."""
    plain = list(INSTRUCTIONS.values())
    seen = set()
    for made in [*plain, *(f.make(**s) for f in FAMILIES.values() for s in f.samples)]:
        if made.name not in seen:
            seen.add(made.name)
            yield made


# Name of an instruction -> f(builder, *args): the same on targets that lack it.
OTHERWISE: dict[str, Callable[..., Any]] = {}


def otherwise(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declares what older targets do in place of instructions: f(builder, *args)."""
    def declare(f: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            if name in OTHERWISE:
                raise ArgumentError(f"what stands for {name!r} is declared twice")
            OTHERWISE[name] = f
        return f

    return declare


def one_of(what: str, value: Any, known: Any) -> Any:
    """`value`, or an ArgumentError that lists what a family accepts."""
    if value not in known:
        raise ArgumentError(f"{what}={value!r} is not one of {', '.join(map(str, known))}")
    return value
