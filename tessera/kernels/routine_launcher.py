"""What a routine's function launches its kernels with."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ..errors import ArgumentError, user_line
from ..tile.ir.schedule import ALIASES, Schedule
from ..tile.kernel.kernel import Kernel


class RoutineLauncher:
    """What a routine's function launches with: `run("softmax", x, y)`.

    trial: the plan that is tried, where choices are measured; else the routine makes its own.
    """

    trial: Any = None

    def __init__(self, routine: Any, groups: Any = None, lanes: int | None = None,
                 stream: Any = None, target: str | None = None):
        self.routine, self.given = routine, routine._schedule
        self.options = {"groups": groups, "lanes": lanes, "stream": stream, "target": target}

    def size(self, name: str, default: int) -> int:
        """A block size of the schedule: "m", "n" or "k"; `default` when it does not say."""
        if self.given is None:
            return default
        chosen = getattr(self.given, ALIASES[name])
        return default if chosen is None else int(chosen)

    @property
    def has_sizes(self) -> bool:
        """Whether the schedule chooses a block."""
        return self.given is not None and any(
            getattr(self.given, ALIASES[name]) is not None for name in ("m", "n", "k"))

    def extra(self, name: str) -> Any:
        """A parameter of the schedule in capitals; None when it does not say."""
        return dict(self.given.extra).get(name) if self.given is not None else None

    def run(self, name: str, *args: Any, warps: int | None = None,
            knobs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """A launch. warps: of a group, where neither a schedule nor the call says.  knobs: of the
        schedule, where none is given."""
        kernel, options = self.kernel(name, knobs), self.options | {"lanes": self.lanes(warps)}
        if not any(v is not None for v in options.values()):
            return kernel(*args, **kwargs)
        return kernel.launch(*args, **options, **kwargs)

    def kernel(self, name: str, knobs: dict[str, Any] | None) -> Kernel:
        kernel = self.routine.kernels[name]
        return _tuned(kernel, **knobs) if knobs and self.given is None else kernel

    def lanes(self, warps: int | None) -> int | None:
        given = self.options["lanes"]
        return 32 * warps if warps and given is None and self.given is None else given

    def note(self, *why: str) -> None:
        """Why the call is launched as it is, for the notes of its schedule."""
        self.routine.notes = why

    def fail(self, message: str, hint: str | None = None, kind: type = ArgumentError) -> Any:
        raise kind(f"{self.routine.__name__}: {message}", hint=hint, where=user_line())


@lru_cache(maxsize=64)
def _tuned(kernel: Kernel, **knobs: Any) -> Kernel:
    return kernel.with_schedule(Schedule(**knobs))


class LaunchRecorder(RoutineLauncher):
    """Writes down what a routine's function would launch."""

    def __init__(self, routine: Any, trial: Any = None):
        super().__init__(routine)
        self.trial = trial
        self.launches: list[tuple[str, tuple, dict[str, Any]]] = []

    def run(self, name: str, *args: Any, warps: int | None = None,
            knobs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        self.launches.append((name, args, kwargs))


__all__ = ["LaunchRecorder", "RoutineLauncher"]
