"""What a donated tensor on a GPU has in place of its memory: the call that used it up."""

from __future__ import annotations

from tessera.errors import ArgumentError, SourceLine, short_path, user_line
from tessera.lazy_dataclass import dataclass
from tessera.tensor import Tensor


@dataclass(frozen=True, slots=True)
class UsedBy:
    """The call that used a donated tensor up: its line, and the function."""

    where: SourceLine | None
    function: str

    def __str__(self) -> str:
        at = f" at {short_path(self.where.file)}:{self.where.line}" if self.where else ""
        return f"donated to {self.function}{at}"

    def error(self, x: Tensor) -> ArgumentError:
        """Of what asks for the memory."""
        return ArgumentError(
            f"a {x.type}{list(x.shape)} is used after it was {self}: its memory is a result's now",
            where=user_line(), hint="use what the call returned; or leave the argument out of "
            "donate=, or donate a copy: x.copy()")

    def text(self, x: Tensor) -> str:
        """The repr of such a tensor."""
        return f"Tensor{list(x.shape)} {x.type}, {self}"


__all__ = ["UsedBy"]
