"""Every TESSERA_* setting: one record each, read as `config.numerics`.

    from tessera import config
    config.numerics                          # the value now; a plain global once it is resolved
    with config.scope(numerics="raise"):     # inside the block only
        ...
    config.set(seed=3)                       # until set again

A setting is resolved at its first use, not at import: from the environment if its variable is set
(an empty one counts as unset), else from its default. Later changes of `os.environ` are not seen
before `config.reset()`.

Values belong to the process, not to a thread or a context: a scope entered by the main thread also
holds in the threads that simulate mesh ranks, which contextvars would not reach, and reading one
costs a global's lookup. Scopes of two threads may overlap and end in any order; for each name the
scope entered last and still open wins.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from tessera.errors import ArgumentError, did_you_mean
from tessera.launched import launched_here
from tessera.lazy_dataclass import dataclass


@dataclass(frozen=True)
class Kind:
    """What a setting accepts: words for the message, and text or value -> value (or ValueError).

    samples: texts with what they mean, two values at least   refused: one that it does not accept
    """

    accepts: str
    convert: Callable[[Any], Any]
    samples: tuple[tuple[str, Any], ...]
    refused: str | None = None


def one_of(*words: str) -> Kind:
    def convert(value: Any) -> str:
        if value not in words:
            raise ValueError
        return str(value)

    return Kind(" | ".join(words), convert, tuple(zip(words, words, strict=True)), "neither")


def integer(least: int, below: int | None = None) -> Kind:
    def convert(value: Any) -> int:
        if not isinstance(value, int | str) or isinstance(value, bool) or int(value) < least or \
                (below is not None and int(value) >= below):
            raise ValueError
        return int(value)

    return Kind(f"an integer >= {least}" + (f" and < 2^{below.bit_length() - 1}" if below else ""),
                convert, tuple((str(n), n) for n in (least, least + 3)), str(least - 1))


def _convert_device(value: Any) -> str:
    family, colon, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    if value in ("auto", "cpu", "gpu", "cuda") or (family == "cuda" and number.isdecimal()):
        return str(value)
    raise ValueError


def _convert_bool(value: Any) -> bool:
    word = str(value).lower() if isinstance(value, int | str) else ""
    if word not in _BOOLS:
        raise ValueError
    return _BOOLS[word]


def _convert_path(value: Any) -> Path:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ValueError
    try:
        return Path(value).expanduser()
    except RuntimeError as err:  # neither HOME nor an entry of this user among the system's
        raise ValueError from err


_BOOLS = {"1": True, "true": True, "yes": True, "on": True,
          "0": False, "false": False, "no": False, "off": False}
DEVICE = Kind("auto | cpu | gpu | cuda | cuda:N", _convert_device,
              (("auto", "auto"), ("cuda:1", "cuda:1")), "cuda:x")
BOOL = Kind("1 | 0 | true | false | yes | no | on | off", _convert_bool,
            (("On", True), ("0", False)), "maybe")
PATH = Kind("a path", _convert_path, (("here", Path("here")), ("/there", Path("/there"))))
FOLDER = Kind("a folder", lambda value: None if value is None else _convert_path(value),
              PATH.samples)
FABRIC = Kind("a fabric's name, or FILE.json", str, (("nvl72", "nvl72"), ("a.json", "a.json")))


def available_cpus() -> int:
    """The CPUs this process may run on (its affinity), not those of the machine."""
    if hasattr(os, "sched_getaffinity"):  # Linux; elsewhere Python has no affinity to ask for
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def profiler_attached() -> bool:
    """Whether a profiler asks this process for NVTX ranges (Nsight sets the variable), and there is
    a package that makes them."""
    return "NVTX_INJECTION64_PATH" in os.environ and any(
        importlib.util.find_spec(name) is not None for name in ("nvtx", "cupy"))


MOST_COMPILE_PROCESSES = 16  # the slowest kernel of a program takes as long as a share of so many


def compile_cpus() -> int:
    """The CPUs for compiling: those of this process, or its share where several were started."""
    tests = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "")
    beside = max(launched_here(), int(tests) if tests.isdigit() else 1, 1)
    share = (os.cpu_count() or 1) // beside
    return max(1, min(available_cpus(), share, MOST_COMPILE_PROCESSES))


SETTINGS: dict[str, Setting] = {}


@dataclass(frozen=True)
class Setting:
    """One setting; making the record registers it. `default` is a value or a function of none."""

    name: str
    env: str
    kind: Kind
    default: Any
    doc: str

    def __post_init__(self) -> None:
        if self.name in SETTINGS or any(s.env == self.env for s in SETTINGS.values()):
            raise ArgumentError(f"setting {self.name!r} ({self.env}) is declared twice")
        if self.name in globals():
            raise ArgumentError(f"setting {self.name!r} would hide tessera.config.{self.name}")
        SETTINGS[self.name] = self

    def convert(self, value: Any, spelled: str) -> Any:
        """`value` as this setting's type. `spelled` is what the user wrote, for the message."""
        try:
            return self.kind.convert(value)
        except ValueError:
            shown = repr(value)
            raise ArgumentError(
                f"{spelled}={shown if len(shown) < 80 else shown[:77] + '...'} is not accepted",
                hint=f"{spelled} is {self.kind.accepts}: {self.doc}",
                code="E_CONFIG",
            ) from None

    def resolve(self) -> Any:
        """The value from the environment, else the default."""
        if text := os.environ.get(self.env, "").strip():
            return self.convert(text, self.env)
        default = self.default() if callable(self.default) else self.default
        return self.convert(default, self.env)


# One open scope: the values it gives by name, and the number of each choice. Compared by identity.
# `kept`: begun by a call that has not become a block; it holds until its names are set again.
@dataclass(eq=False)
class _Layer:
    values: dict[str, Any]
    numbers: dict[str, int]
    kept: bool = False


MOST_KEPT = 64  # a call that becomes a block does so at once: older ones are covered for good


# By setting: called with its value when one holds anew, and with None when it is to be resolved
# again. Upper floors put functions here, so that a mode is switched wherever it is set.
WATCHERS: dict[str, list[Callable[[Any], None]]] = {}

_lock = threading.RLock()
_base: dict[str, Any] = {}  # resolved or set outside of any scope
_layers: list[_Layer] = []  # open scopes, oldest first
_chosen: dict[str, bool] = {}  # names that set() gave a value
_count = itertools.count(1)  # of choices: of a scope that was entered, of a value that was set
_numbers: dict[str, int] = {}  # those made outside of any scope


def _setting(name: str) -> Setting:
    if name not in SETTINGS:
        raise ArgumentError(
            f"there is no setting {name!r}", hint=did_you_mean(name, sorted(SETTINGS))
        )
    return SETTINGS[name]


def _converted(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _setting(name).convert(value, name) for name, value in values.items()}


def _publish(name: str) -> Any:
    """Puts the value that holds now into this module's globals, where `config.name` finds it."""
    for layer in reversed(_layers):
        if name in layer.values:
            value = layer.values[name]
            break
    else:
        if name not in _base:
            _base[name] = SETTINGS[name].resolve()
        value = _base[name]
    globals()[name] = value
    _tell(name, value)
    return value


def _drop(name: str) -> None:
    """Forgets the value that holds: the next use publishes one again."""
    globals().pop(name, None)
    _tell(name, None)


def _tell(name: str, value: Any) -> None:
    for watch in WATCHERS.get(name, ()):
        watch(value)


def __getattr__(name: str) -> Any:
    """First use of a setting: resolves it. Afterwards the global of that name is found directly."""
    if name not in SETTINGS:
        hint = f"; settings: {', '.join(SETTINGS)}"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    with _lock:
        return _publish(name)


def get(name: str) -> Any:
    """The value of the setting `name`. Raises ArgumentError for an unknown name or a bad value."""
    return getattr(sys.modules[__name__], _setting(name).name)


def set(**values: Any) -> None:
    """Sets values until set again, or, of a name an open scope gives, until that scope ends."""
    converted = _converted(values)
    with _lock:
        _forget_kept(converted)
        for name, value in converted.items():
            holder = next((layer for layer in reversed(_layers) if name in layer.values), None)
            (holder.values if holder else _base)[name] = value
            (holder.numbers if holder else _numbers)[name] = next(_count)
            _chosen[name] = True
            _publish(name)


def chosen(name: str) -> bool:
    """Whether somebody chose the value that holds: by a variable, set() or a scope."""
    setting = _setting(name)
    scoped = any(name in layer.values for layer in _layers)
    return scoped or name in _chosen or bool(os.environ.get(setting.env, "").strip())


def choices(name: str) -> tuple[int, ...]:
    """Numbers of the choices of a setting that are open, the one that holds first. Each scope and
    each set() has a number of its own; 0 is the environment's or the default's."""
    with _lock:
        scoped = [layer.numbers[name] for layer in reversed(_layers) if name in layer.values]
        return (*scoped, _numbers.get(name, 0))


def unset(name: str) -> None:
    """Takes back what set() chose outside of scopes: the environment or the default holds."""
    with _lock:
        _forget_kept([name])
        _chosen.pop(_setting(name).name, None)
        _numbers[name] = next(_count)
        _base.pop(name, None)
        _drop(name)


def _forget_kept(names: Iterable[str]) -> None:
    """What calls without a block gave these names is over."""
    for layer in [x for x in _layers if x.kept]:
        for name in names:
            layer.values.pop(name, None)
        if not layer.values:
            _layers.remove(layer)


class Switch:
    """A call or a block: `Switch(numerics="raise")` holds until set again, and
    `with Switch(numerics="raise"):` until the block ends. Blocks of several threads may overlap."""

    def __init__(self, **values: Any):
        self._layer = _Layer(_converted(values), {n: next(_count) for n in values}, kept=True)
        with _lock:
            kept = [x for x in _layers if x.kept]
            if len(kept) >= MOST_KEPT:
                _layers.remove(kept[0])
            _layers.append(self._layer)
            for name in self._layer.values:
                _publish(name)

    def __enter__(self) -> Self:
        with _lock:
            self._layer.kept = False
            if self._layer not in _layers:  # somebody set its names meanwhile
                _layers.append(self._layer)
        return self

    def __exit__(self, *exc: object) -> None:
        with _lock:
            _layers.remove(self._layer)
            for name in self._layer.values:
                # Dropped, not resolved: a bad variable must not raise where a block ends.
                _drop(name)


@contextmanager
def scope(**values: Any) -> Iterator[None]:
    """Sets values for a block: `with config.scope(numerics="raise", seed=1):`."""
    with Switch(**values):
        yield


def reset() -> None:
    """Forgets what was set and resolved, so that the environment is read again.

    Raises ArgumentError inside a scope, whose end would bring values back.
    """
    with _lock:
        _forget_kept(SETTINGS)
        if _layers:
            raise ArgumentError("config.reset() inside a config.scope()", hint="leave it first")
        _base.clear()
        _chosen.clear()
        _numbers.update((name, next(_count)) for name in SETTINGS)
        for name in SETTINGS:
            _drop(name)


def unknown_variables() -> list[str]:
    """TESSERA_* variables of the environment that are no setting: most likely misspelled."""
    known = {setting.env for setting in SETTINGS.values()}
    return sorted(v for v in os.environ if v.startswith("TESSERA_") and v not in known)


def off_or_raise_in_debug() -> str:
    """TESSERA_DEBUG=1 is one switch for all checks; TESSERA_NUMERICS still decides for itself."""
    return "raise" if SETTINGS["debug"].resolve() else "off"


Setting("numerics", "TESSERA_NUMERICS", one_of("off", "flag", "raise"), off_or_raise_in_debug,
        "NaN/Inf sentinels")
Setting("debug", "TESSERA_DEBUG", BOOL, False, "tile kernels are checked while they run, slower")
Setting("device", "TESSERA_DEVICE", DEVICE, "auto",
        "auto: arrays decide where what is computed of them runs, new tensors lie in host memory; "
        "cuda, cuda:N: new tensors lie on that GPU, what is computed of host arrays runs there; "
        "gpu: as cuda, and as auto on a machine without one; cpu: on the host alone")
Setting("determinism", "TESSERA_DETERMINISM", one_of("strict", "default", "fast"), "default",
        "on GPUs. default: compiled functions are reproducible bit for bit; fast: they need not, "
        "and maths of f32 is approximate; strict: unordered sums of kernels are errors too")
Setting("cache_dir", "TESSERA_CACHE_DIR", PATH, "~/.cache/tessera", "compiled kernels, tuning")
Setting("tuned", "TESSERA_TUNED", BOOL, True,
        "blocks that were measured to be quicker on such a GPU go before those of the estimate")
Setting("num_threads", "TESSERA_NUM_THREADS", integer(1), available_cpus, "threads of a CPU loop")
Setting("compile_processes", "TESSERA_COMPILE_PROCESSES", integer(1), compile_cpus,
        "processes that compile kernels of a function for a GPU side by side; 1: this one does")
Setting("compile_progress", "TESSERA_COMPILE_PROGRESS", BOOL, True,
        "a line on stderr when compiling for a GPU takes longer than two seconds")
Setting("loop_min_elements", "TESSERA_LOOP_MIN_ELEMENTS", integer(0), 2048,
        "smaller fused groups run through NumPy: compiling them would not pay; those of a loop's "
        "body count once for each iteration, with 64 elements or more")
Setting("poison", "TESSERA_POISON", BOOL, False,
        "compiled graphs fill memory that nothing may read any more with NaN: it checks the plans")
Setting("cuda_graphs", "TESSERA_CUDA_GRAPHS", BOOL, True,
        "compiled functions on a GPU are launched as CUDA graphs from their second call on, where "
        "they can be")
Setting("nvtx", "TESSERA_NVTX", BOOL, profiler_attached,
        "NVTX ranges around the launches of compiled functions, with the user's line, and around "
        "those of ts.debug.range")
Setting("f64_arrays", "TESSERA_F64_ARRAYS", one_of("warn", "f32", "keep"), "warn",
        "f64 arrays of no stated type: a warning where they make f64 of narrower floats, once per "
        "line; f32 as they enter; or f64 without a word")
Setting("seed", "TESSERA_SEED", integer(0, below=1 << 64), 0,
        "seed of each random stream that is given no key")
Setting("comm_timeout", "TESSERA_COMM_TIMEOUT", integer(0), 45,
        "seconds a rank of a mesh waits for another before all stop; 0 waits forever")
Setting("comm", "TESSERA_COMM", one_of("auto", "nccl", "mpi"), "auto",
        "what moves arrays between GPUs: NCCL where each rank has one of its own, or what is said")
Setting("comm_windows", "TESSERA_COMM_WINDOWS", BOOL, True,
        "what programs send between GPUs lies in memory that NCCL opens for all ranks, where it "
        "has windows (2.27) and all send from the same places: its kernels take less of a GPU")
Setting("comm_check", "TESSERA_COMM_CHECK", one_of("once", "each"), "once",
        "how often ranks compare what goes through NCCL, and what compiled functions are given of "
        "which ranks hold the same: when a function is compiled, and a collective on arrays first "
        "made with these shapes and types; or at every call")
Setting("fabric", "TESSERA_FABRIC", FABRIC, "",
        "what joins the ranks, for plans and for what is chosen by them: a declared fabric, or "
        "what `python -m tessera fabric` measured; by the mesh's devices where it is not said")
Setting("rank_output", "TESSERA_RANK_OUTPUT", one_of("all", "first"), "all",
        "under mpirun, the ranks whose prints are shown: all, or rank 0 alone")
Setting("rank_logs", "TESSERA_RANK_LOGS", FOLDER, None,
        "under mpirun, where each rank writes its output: DIR/rank-N.log instead of the terminal")

__all__ = ["Switch", "choices", "chosen", "get", "reset", "scope", "set", "unknown_variables",
           "unset"]
