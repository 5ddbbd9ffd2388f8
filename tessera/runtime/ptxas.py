"""PTX -> cubin with the toolkit's assembler, and what it reports: registers, spills, warnings.

No GPU and no driver is needed. `ptxas` is looked for on PATH, then in the pip wheels, then in a
toolkit's folder; the disassembler likewise.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ..errors import CompileError, UnsupportedTargetError
from ..lazy_dataclass import dataclass
from .target import Target

FIX_GPU = "pip install -e '.[cuda12]'   (in the checkout; cuda13 for a driver of CUDA 13)"
FIX_SASS = "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
TIMEOUT_S = 300
# PTX ISA of a CUDA 12 release where it is not 8.minor (PTX ISA 9.0, section 13, table of releases).
_ISA_OF_12 = {6: 5, 7: 6, 8: 7, 9: 8}


def find_tool(name: str) -> str | None:
    """Path of a program of the CUDA toolkit, or None. cu12 and cu13 wheels differ in layout."""
    if found := shutil.which(name):
        return found
    for folder in _tool_folders():
        if (folder / name).is_file():
            return str(folder / name)
    return None


def _tool_folders() -> Iterator[Path]:
    for site in map(Path, sys.path):
        for package in ("cu13", "cuda_nvcc", "cuda_cuobjdump", "cuda_nvdisasm"):
            yield site / "nvidia" / package / "bin"
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if root:
            yield Path(root) / "bin"


def find_ptxas() -> str | None:
    return find_tool("ptxas")


@dataclass(frozen=True)
class Assembler:
    """A ptxas, the CUDA release it belongs to and the newest PTX ISA it reads."""

    path: str
    release: str
    isa: tuple[int, int]


def assembler() -> Assembler:
    """The ptxas that is used. Raises UnsupportedTargetError with the command that installs one."""
    path = find_ptxas()
    if path is None:
        raise UnsupportedTargetError(
            "ptxas, the assembler of the CUDA toolkit, is not on PATH and in no wheel", hint=FIX_GPU
        )
    return _describe(path)


@cache
def _describe(path: str) -> Assembler:
    text = _call([path, "--version"]).stdout
    found = re.search(r"release (\d+)\.(\d+), V(\S+)", text)
    if not found:
        raise UnsupportedTargetError(
            f"{path} --version does not name a release: {text[:80]!r}", hint=FIX_GPU
        )
    major, minor = int(found[1]), int(found[2])
    isa = (9, minor) if major >= 13 else (8, _ISA_OF_12.get(minor, minor))
    return Assembler(path, found[3], isa)


def _call(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)


def lower_version(ptx: str, isa: tuple[int, int]) -> str:
    """PTX that declares at most `isa`.

    NVVM stamps its own release; an older assembler or driver refuses the stamp, although the code
    uses nothing newer. An instruction that it really lacks is still its error.
    """
    def stamp(found: re.Match[str]) -> str:
        return ".version {}.{}".format(*min((int(found[1]), int(found[2])), isa))

    return re.sub(r"^\.version (\d+)\.(\d+)", stamp, ptx, count=1, flags=re.M)


@dataclass(frozen=True)
class Resources:
    """What one kernel takes, as `ptxas -v` reports it."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int  # static; dynamic shared memory is chosen at launch
    barriers: int

    @property
    def spills(self) -> bool:
        return self.spill_store_bytes + self.spill_load_bytes > 0


@dataclass(frozen=True)
class Assembled:
    """A cubin, the resources of each kernel in it, and what the assembler had to say, as written.

    warnings: C7508 (setmaxnreg ignored) and C7510 to C7514 (wgmma serialised) mean correct but
    slow code. notes: C7517 and C7519, a wait or fence of wgmma that ptxas put in by itself.
    """

    cubin: bytes
    kernels: dict[str, Resources]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def resources(self) -> Resources:
        (only,) = self.kernels.values()
        return only


def assemble(ptx: str, target: Target, *, optimise: int = 3, lineinfo: bool = False) -> Assembled:
    """The cubin of `ptx` for `target`. Raises CompileError with ptxas's words and the PTX line."""
    tool = assembler()
    text = lower_version(ptx, tool.isa)
    with tempfile.TemporaryDirectory(prefix="tessera-") as folder:
        source, out = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(text)
        command = [tool.path, "-v", f"-arch={target}", f"-O{optimise}"]
        command += ["-lineinfo"] if lineinfo else []
        done = _call([*command, str(source), "-o", str(out)])
        if done.returncode or not out.is_file():
            raise _refusal(done, text, target, tool)
        said = _remarks(done.stderr)
        notes = tuple(line for line in said if _NOTE.search(line))
        warnings = tuple(line for line in said if line not in notes)
        return Assembled(out.read_bytes(), _kernels(done.stderr), warnings, notes)


def _refusal(done: subprocess.CompletedProcess[str], ptx: str, target: Target,
             tool: Assembler) -> CompileError:
    said = [line for line in (done.stderr + done.stdout).splitlines()
            if "rror" in line or "fatal" in line]
    message = said[0] if said else f"exit code {done.returncode}"
    found = re.search(r"line (\d+)", message)
    lines = ptx.splitlines()
    at = int(found[1]) if found else 0
    quoted = f": {lines[at - 1].strip()!r}" if 0 < at <= len(lines) else ""
    return CompileError(
        f"ptxas {tool.release} refuses the code for {target}: {message}{quoted}",
        hint="look at it with inspect_ir('ptx'); report it if the kernel is plain tile code",
    )


_USED = re.compile(r"Used (\d+) registers")
_BYTES = {
    "stack_bytes": r"(\d+) bytes stack frame", "spill_store_bytes": r"(\d+) bytes spill stores",
    "spill_load_bytes": r"(\d+) bytes spill loads", "shared_bytes": r"(\d+) bytes smem",
    "barriers": r"used (\d+) barriers",
}


def _kernels(report: str) -> dict[str, Resources]:
    """`Compiling entry function 'k' for 'sm_90a'`, then its properties, then `Used ...`."""
    kernels: dict[str, Resources] = {}
    for part in re.split(r"Compiling entry function ", report)[1:]:
        name = re.match(r"'([^']+)'", part)
        used = _USED.search(part)
        if not name or not used:
            continue
        numbers = {field: re.search(text, part) for field, text in _BYTES.items()}
        values = {field: int(found[1]) if found else 0 for field, found in numbers.items()}
        kernels[name[1]] = Resources(registers=int(used[1]), **values)
    return kernels


_NOTE = re.compile(r"\(C75(17|18|19)\)")


def _remarks(report: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in report.splitlines()
                 if "warning" in line.lower() or re.search(r"\bC7\d{3}\b", line))


def sass(cubin: bytes, lines: bool = False) -> str:
    """The machine code of a cubin as text, one instruction a line.

    lines: also `//## File "...", line 12` before the instructions of a source line.

    Raises UnsupportedTargetError with the command that installs the disassembler.
    """
    tool = find_tool("nvdisasm")
    if tool is None:
        raise UnsupportedTargetError("nvdisasm, the disassembler, is not installed", hint=FIX_SASS)
    with tempfile.TemporaryDirectory(prefix="tessera-") as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = _call([tool, "-c", "-ndf", *(["-g"] if lines else []), str(file)])
    if done.returncode:
        raise CompileError(f"nvdisasm fails: {done.stderr.strip()[:200]}", hint=FIX_SASS)
    return done.stdout


def sass_counts(listing: str) -> dict[str, int]:
    """How often each opcode occurs in a listing: {"HGMMA.64x256x16.F32.BF16": 4, ...}."""
    counts: dict[str, int] = {}
    for line in listing.splitlines():
        found = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.a-z]*)", line)
        if found:
            counts[found[1]] = counts.get(found[1], 0) + 1
    return counts
