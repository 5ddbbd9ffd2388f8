"""`python -m tessera doctor`: what is installed, what works, and what to install for the rest.

Each section is one record with a function that returns lines and does not raise for anything the
machine may lack: a package that is not there is `missing` and names the command that brings it, one
that is there and fails is `broken` and shows the first line of its error. The exit code looks at
the core sections only: a laptop without GPU and MPI is healthy.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from tessera import config
from tessera.errors import ArgumentError, TesseraError, did_you_mean
from tessera.lazy_dataclass import dataclass
from tessera.runtime.cache import need_private
from tessera.runtime.device import check, device, device_count, driver
from tessera.runtime.ptxas import FIX_GPU, find_ptxas

OK, MISSING, BROKEN = "ok", "missing", "broken"
LEAST_PYTHON = (3, 11)
PROBE_TIMEOUT_S = 60


@dataclass(frozen=True)
class CheckResult:
    """One finding; `fix` says what to do when the status is not ok."""

    name: str
    status: str
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Section:
    """A heading and its check. `core`: everything in it must be ok for the exit code to be 0."""

    title: str
    core: bool
    check: Callable[[], Iterator[CheckResult]]

    def __post_init__(self) -> None:
        if self.title in SECTIONS:
            raise ArgumentError(f"doctor section {self.title!r} is declared twice")
        SECTIONS[self.title] = self

    def lines(self) -> list[CheckResult]:
        """The findings; what a check did not foresee is a finding too."""
        found: list[CheckResult] = []
        try:
            found.extend(self.check())
        except Exception as error:  # any package may fail in any way, and the report must go on
            found.append(CheckResult("check", BROKEN, first_line(error)))
        return found


SECTIONS: dict[str, Section] = {}


def section(title: str, *, core: bool = False) -> Callable[[Callable[[], Iterator[CheckResult]]],
                                                           Section]:
    return lambda check: Section(title, core, check)


def first_line(error: BaseException) -> str:
    text = error.message if isinstance(error, TesseraError) else str(error)
    return f"{type(error).__name__}: {(text.strip().splitlines() or [''])[0]}"


def output(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)


# Extras are installed from the checkout: the name alone may be another project's in an index.
FIX_CORE = "pip install --force-reinstall "
FIX_MPI = "pip install -e '.[mpi]'   (in the checkout)"


def package(distribution: str, module: str, fix: str) -> CheckResult:
    """The version of an installed package whose module also imports."""
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return CheckResult(distribution, MISSING, "not installed", fix)
    try:
        importlib.import_module(module)
    except Exception as error:  # a wheel for another machine fails in its own way
        return CheckResult(distribution, BROKEN, f"{version}, {first_line(error)}", fix)
    return CheckResult(distribution, OK, version)


@section("Python", core=True)
def check_python() -> Iterator[CheckResult]:
    status = OK if sys.version_info >= LEAST_PYTHON else BROKEN
    yield CheckResult("python", status, f"{platform.python_version()} {sys.executable}",
                      "install Python {}.{} or newer".format(*LEAST_PYTHON))
    yield CheckResult("system", OK, f"{platform.system()} {platform.machine()}, "
                                    f"{config.available_cpus()} CPUs available")


CORE_PACKAGES = ("numpy", "numba", "ml_dtypes", "opt_einsum", "safetensors", "rich", "matplotlib",
                 "threadpoolctl")


@section("Core packages", core=True)
def check_core_packages() -> Iterator[CheckResult]:
    for name in CORE_PACKAGES:
        yield package(name, name, FIX_CORE + name)


@section("Settings", core=True)
def check_settings() -> Iterator[CheckResult]:
    changed = []
    for setting in config.SETTINGS.values():
        try:
            value = config.get(setting.name)
        except TesseraError as error:
            yield CheckResult(setting.env, BROKEN, error.message, error.hint or "")
        else:
            if os.environ.get(setting.env):
                changed.append(f"{setting.env}={value}")
    yield CheckResult("environment", OK, " ".join(changed) or "every setting has its default")
    for name in config.unknown_variables():
        known = [setting.env for setting in config.SETTINGS.values()]
        yield CheckResult(name, BROKEN, "no setting of this name", did_you_mean(name, known))


@section("CPU loops", core=True)
def check_cpu_loops() -> Iterator[CheckResult]:
    """Compiles sum_i i^2 and compares it with the closed form n (n - 1) (2n - 1) / 6."""
    try:
        import numba
    except ImportError as error:
        yield CheckResult("numba", MISSING, first_line(error), FIX_CORE + "numba")
        return

    def sum_of_squares(n: int) -> int:
        total = 0
        for i in range(n):
            total += i * i
        return total

    start = time.perf_counter()
    n, got = 1000, numba.njit(sum_of_squares)(1000)
    seconds = time.perf_counter() - start
    right = got == n * (n - 1) * (2 * n - 1) // 6
    yield CheckResult("numba.njit", OK if right else BROKEN,
                      f"compiled and ran a loop in {seconds:.1f} s" if right
                      else f"wrong sum {got}",
                      FIX_CORE + "numba")


def compile_small_kernel() -> str:
    """PTX of x[i] *= 2 for cc 9.0; needs numba-cuda and NVVM, no GPU and no driver."""
    from numba import cuda, float32, int32

    def double(x, n):  # type: ignore[no-untyped-def]  # a kernel body
        i = cuda.grid(1)
        if i < n:
            x[i] = x[i] * 2

    return str(cuda.compile_ptx(double, (float32[::1], int32), cc=(9, 0))[0])


@section("GPU compiler")
def check_gpu_compiler() -> Iterator[CheckResult]:
    found = package("numba-cuda", "numba.cuda", FIX_GPU)
    yield found
    if found.status == OK:
        try:
            ptx = compile_small_kernel()
        except Exception as error:  # a missing NVVM shows as one of several classes of numba-cuda
            yield CheckResult("NVVM", BROKEN, first_line(error), FIX_GPU)
        else:
            code = [line for line in ptx.splitlines() if line and not line.startswith("//")]
            yield CheckResult("NVVM", OK, f"cc 9.0: {code[0]} {code[1]}")
    yield check_ptxas()


def check_ptxas() -> CheckResult:
    path = find_ptxas()
    if path is None:
        return CheckResult("ptxas", MISSING, "not on PATH and in no wheel", FIX_GPU)
    out = output([path, "--version"])
    release = [line for line in out.stdout.splitlines() if "release" in line]
    if out.returncode or not release:
        return CheckResult("ptxas", BROKEN, f"{path} exits with {out.returncode}", FIX_GPU)
    return CheckResult("ptxas", OK, f"{release[0].split(', ', 1)[1]} {path}")


@section("GPU")
def check_gpu() -> Iterator[CheckResult]:
    try:
        library = driver()
        version = check(library.cuDriverGetVersion(), "ask for the driver's version")
    except TesseraError as error:
        yield CheckResult("driver", MISSING, error.message,
                          "install NVIDIA's driver; CPU and compile-only use need none")
        return
    yield CheckResult("driver", OK, f"supports CUDA {version // 1000}.{version % 1000 // 10}")
    count = device_count()
    yield CheckResult("devices", OK if count else MISSING, f"{count} visible",
                      "see CUDA_VISIBLE_DEVICES")
    for i in range(count):
        found = device(i)
        yield CheckResult(f"cuda:{i}", OK, f"{found.name}, cc {found.cc[0]}.{found.cc[1]}, "
                                           f"{found.total_bytes / 2**30:.0f} GiB")


# In a process of its own and without MPI_Init: a wrongly installed MPI may abort its process.
MPI_PROBE = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().strip().splitlines()[0])
"""


@section("MPI")
def check_mpi() -> Iterator[CheckResult]:
    found = package("mpi4py", "mpi4py", FIX_MPI)
    yield found
    if found.status == OK:
        out = output([sys.executable, "-c", MPI_PROBE])
        if out.returncode == 0:
            yield CheckResult("library", OK, " ".join(out.stdout.split()))
        else:
            last = (out.stderr.strip().splitlines() or [f"exit code {out.returncode}"])[-1]
            yield CheckResult("library", BROKEN, last, FIX_MPI)
    beside = Path(sys.executable).parent / "mpirun"  # the wheel's, when its venv is not activated
    path = str(beside) if beside.is_file() else shutil.which("mpirun")
    yield CheckResult("mpirun", OK, path) if path else CheckResult("mpirun", MISSING, "not on PATH",
                                                                   FIX_MPI)


@section("NCCL")
def check_nccl() -> Iterator[CheckResult]:
    """The wheel's version; NCCL itself loads only where a driver is."""
    for cuda in ("cu12", "cu13"):
        try:
            version = metadata.version(f"nvidia-nccl-{cuda}")
        except metadata.PackageNotFoundError:
            continue
        yield CheckResult(f"nvidia-nccl-{cuda}", OK, version)
        cupy = f"cupy-cuda{cuda[2:]}x"
        yield package(cupy, "cupy", FIX_GPU)
        return
    yield CheckResult("nccl", MISSING, "not installed", FIX_GPU)


@section("Cache", core=True)
def check_cache() -> Iterator[CheckResult]:
    folder: Path = config.cache_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"tessera")
        for kind in folder.iterdir():
            if kind.is_dir():
                need_private(kind.lstat(), kind)
    except OSError as error:
        yield CheckResult("cache_dir", BROKEN, f"{folder}: {first_line(error)}",
                          "make it writable, or set TESSERA_CACHE_DIR to a folder that is")
        return
    except ArgumentError as error:
        yield CheckResult("cache_dir", BROKEN, error.message, error.hint or "")
        return
    free_bytes = shutil.disk_usage(folder).free
    yield CheckResult("cache_dir", OK, f"{folder} writable, {free_bytes / 2**30:.0f} GiB free")


@dataclass(frozen=True)
class DoctorReport:
    """The findings by section title, in the order of the report."""

    sections: dict[str, list[CheckResult]]

    @property
    def core_works(self) -> bool:
        return all(line.status == OK for title, lines in self.sections.items()
                   if SECTIONS[title].core for line in lines)

    def to_json(self) -> str:
        sections = {title: [asdict(line) for line in lines]
                    for title, lines in self.sections.items()}
        return json.dumps({"core_works": self.core_works, "sections": sections}, indent=2)

    def to_text(self) -> str:
        out = []
        for title, lines in self.sections.items():
            out.append(title)
            for line in lines:
                out.append(f"  {line.status:8s} {line.name:20s} {line.detail}".rstrip())
                if line.status != OK and line.fix:
                    out.append(f"  {'':8s} {'':20s} -> {line.fix}")
        verdict = "the core works" if self.core_works else "the core does not work: see above"
        return "\n".join([*out, "", verdict])


def examine() -> DoctorReport:
    return DoctorReport({title: section.lines() for title, section in SECTIONS.items()})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same findings for a program")


def run(args: argparse.Namespace) -> int:
    report = examine()
    print(report.to_json() if args.json else report.to_text())
    return 0 if report.core_works else 1
