"""`def small_attention(Q, K, V): ...` under @ts.kernel.schedule: a schedule for a kernel that the
standard library has (Q24)."""

from __future__ import annotations

import ast
from typing import Any

from tessera.errors import UnsupportedTargetError, user_line
from tessera.tile.interpreter.launch import Config
from tessera.tile.ir.schedule import Schedule
from tessera.tile.kernel.decorator import Kernel

# Filled by the standard library: name -> kernel. What a body of ... stands for is the first.
LIBRARY: dict[str, Any] = {}
BODY = "flash_attention_2"


class DelegatedKernel(Kernel):
    """A schedule, and the library's kernel run with it."""

    @property
    def implementation(self) -> Any:
        """The library's kernel with this schedule. Raises UnsupportedTargetError without one."""
        if BODY not in LIBRARY:
            raise UnsupportedTargetError(
                f"the body of {self.__name__} is ..., which stands for {BODY}, and the standard "
                "library has no such kernel", where=user_line(),
                hint="write the kernel's body, or import tessera.stdlib")
        return LIBRARY[BODY].with_schedule(self.schedule)

    def with_schedule(self, schedule: Schedule) -> DelegatedKernel:
        """The same with another schedule."""
        super().with_schedule(schedule)  # checks it
        return DelegatedKernel(self.fn, schedule=schedule)

    def run(self, config: Config, args: tuple, kwargs: dict[str, Any], stream: Any = None,
            target: str | None = None) -> Any:
        self._arguments(args, kwargs)  # the names of this function are the ones to be given
        kernel = self.implementation
        if config == Config() and stream is None and target is None:
            return kernel(*args, **kwargs)
        return kernel.launch(*args, groups=config.groups, lanes=config.lanes, stream=stream,
                             target=target, **kwargs)

    def inspect_ir(self, level: str = "tile", *, target: str | None = None, **sizes: int) -> str:
        if level == "schedule":
            return self.schedule.explained()
        return self.implementation.inspect_ir(level, target=target, **sizes)


def attach(fn: Any, schedule: Schedule) -> Kernel:
    """A kernel with a schedule; one of the library's when its body is only `...`."""
    made = Kernel(fn, schedule=schedule)
    body = [s for s in made.source.tree.body if not _is_text(s)]
    if len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(
            body[0].value, ast.Constant) and body[0].value.value is ...:
        return DelegatedKernel(fn, schedule=schedule)
    return made


def _is_text(s: ast.stmt) -> bool:
    return isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) and isinstance(
        s.value.value, str)


__all__ = ["BODY", "LIBRARY", "DelegatedKernel", "attach"]
