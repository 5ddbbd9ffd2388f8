"""Object code of x86-64 linked into this process: sections copied, addresses written into them.

    placed = LinkedCode(code)        # an ELF relocatable file
    placed.address("symbol")

Loops are compiled for the large code model, so whatever they refer to is a word of 64 bits
(R_X86_64_64), and external functions may lie anywhere. LLVM's linker does the same, but its library
costs a process 45 MB and 0.12 s (Python 3.11, llvmlite 0.50, 2026-11-27), each of 72 ranks as well.
Tool Interface Standard, ELF 1.2; System V ABI, AMD64 supplement, 4.4.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from functools import cache, cached_property
from typing import NamedTuple

from ...errors import CompileError

RELOCATABLE, X86_64 = 1, 62  # e_type, e_machine
SYMTAB, RELA, NOBITS = 2, 4, 8  # sh_type
ALLOC = 2  # sh_flags
UNDEFINED, ABSOLUTE = 0, 0xfff1  # st_shndx
WORD = 1  # R_X86_64_64: symbol + addend
UNWINDING = ".eh_frame"  # read by exceptions alone, and loops raise none
READ_EXECUTE = mmap.PROT_READ | mmap.PROT_EXEC


class ObjectSection(NamedTuple):
    """Elf64_Shdr."""

    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry_size: int


class ObjectSymbol(NamedTuple):
    """Elf64_Sym."""

    name: int
    info: int
    other: int
    section: int
    value: int
    size: int


class LinkedCode:
    """The code and constants of an object file, in memory that is executed and not written.

    Raises CompileError for what is no such file of x86-64, another kind of relocation, and
    functions that this process does not have.
    """

    def __init__(self, code: bytes):
        kind, machine = struct.unpack_from("<HH", code, 16) if len(code) >= 64 else (0, 0)
        if code[:5] != b"\x7fELF\x02" or (kind, machine) != (RELOCATABLE, X86_64):
            raise CompileError("compiled loops are no object code of x86-64")
        self.code = code
        where, = struct.unpack_from("<Q", code, 40)
        size, count, names = struct.unpack_from("<HHH", code, 58)
        self.sections = [ObjectSection(*struct.unpack_from("<IIQQQQIIQQ", code, where + i * size))
                         for i in range(count)]
        self.names = self.sections[names]
        self.bases, extent = self._bases()
        self.memory = mmap.mmap(-1, max(extent, 1))
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._copy()
        self._relocate()
        _protect(self.start, extent)

    def address(self, name: str) -> int:
        """Where a symbol that is defined here lies."""
        for symbol in self.symbols:
            if symbol.section != UNDEFINED and self._text(self._strings, symbol.name) == name:
                return self._value(symbol)
        raise CompileError(f"compiled loops have no symbol {name}")

    def _bases(self) -> tuple[dict[int, int], int]:
        """Of each section that is placed, its offset in the memory; and how long that is."""
        bases, end = {}, 0
        for i, s in enumerate(self.sections):
            if s.flags & ALLOC and s.size and self._text(self.names, s.name) != UNWINDING:
                bases[i] = -(-end // max(s.align, 1)) * max(s.align, 1)
                end = bases[i] + s.size
        return bases, end

    def _copy(self) -> None:
        for i, base in self.bases.items():
            s = self.sections[i]
            if s.kind != NOBITS:
                self.memory[base:base + s.size] = self.code[s.offset:s.offset + s.size]

    def _relocate(self) -> None:
        for s in self.sections:
            if s.kind != RELA or s.info not in self.bases:
                continue
            for at in range(s.offset, s.offset + s.size, 24):  # Elf64_Rela
                offset, info, addend = struct.unpack_from("<QQq", self.code, at)
                if info & 0xffffffff != WORD:
                    raise CompileError(
                        f"compiled loops have a relocation {info & 0xffffffff} of x86-64; "
                        f"those of the large code model are {WORD}")
                value = self._value(self.symbols[info >> 32]) + addend
                struct.pack_into("<Q", self.memory, self.bases[s.info] + offset, value % 2**64)

    def _value(self, symbol: ObjectSymbol) -> int:
        if symbol.section == UNDEFINED:
            return _external(self._text(self._strings, symbol.name))
        if symbol.section == ABSOLUTE:
            return symbol.value
        return self.start + self.bases[symbol.section] + symbol.value

    @cached_property
    def _table(self) -> ObjectSection:
        return next(s for s in self.sections if s.kind == SYMTAB)

    @cached_property
    def symbols(self) -> list[ObjectSymbol]:
        first, size = self._table.offset, self._table.size
        return [ObjectSymbol(*struct.unpack_from("<IBBHQQ", self.code, at))
                for at in range(first, first + size, 24)]

    @property
    def _strings(self) -> ObjectSection:
        return self.sections[self._table.link]

    def _text(self, strings: ObjectSection, offset: int) -> str:
        begin = strings.offset + offset
        return self.code[begin:self.code.index(b"\0", begin)].decode()


@cache
def _external(name: str) -> int:
    """A function of the C library or its maths, which Python has loaded."""
    try:
        return ctypes.cast(getattr(_process(), name), ctypes.c_void_p).value or 0
    except AttributeError:
        raise CompileError(f"compiled loops call {name}, which this process does not have",
                           hint="it belongs to libc or libm") from None


@cache
def _process() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _protect(start: int, extent: int) -> None:
    pages = -(-max(extent, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    if _process().mprotect(ctypes.c_void_p(start), ctypes.c_size_t(pages), READ_EXECUTE):
        raise CompileError(f"memory cannot be made executable: errno {ctypes.get_errno()}",
                           hint="a rule of this machine forbids it to Python, as SELinux can")


__all__ = ["LinkedCode"]
