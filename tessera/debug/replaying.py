"""Running again what a sentinel reported, from what it was given then."""

from __future__ import annotations

import os

from .. import config
from ..errors import ArgumentError, NumericsError, user_line
from ..lazy_dataclass import dataclass
from ..tensor import Tensor
from .findings import BadValue, Flags
from .recording import RecordedRun, replay_run


@dataclass(frozen=True, eq=False)
class Replay:
    """One more run of an op or kernel. inputs: what it was given, by name, "operand 0" of an op;
    results: what it gave, or wrote, by name, "result 0" of an op."""

    name: str
    inputs: dict[str, Tensor]
    results: dict[str, Tensor]

    def __str__(self) -> str:
        given = [f"  {n}: {t.type}{list(t.shape)}" for n, t in self.inputs.items()]
        made = [f"  -> {n}: {t.type}{list(t.shape)}" for n, t in self.results.items()]
        return "\n".join([self.name, *given, *made])


def replay(report: BadValue | NumericsError | Flags | str | os.PathLike) -> Replay | RecordedRun:
    """The op or kernel of a report run again under the interpreter, from what it was given then.
    Of a path: the call that `ts.debug.record` wrote there, made again, as a RecordedRun: `.same`
    says whether every byte of the results is that of the record, `.differing` which are not.

    report: ts.debug.flags(), its .first, or a NumericsError. Sentinels are off meanwhile; prints,
    breakpoints and the sanitizer of a kernel work. Writes nothing but copies of its own.
    Raises ArgumentError for a report without inputs: a kernel that was launched on a GPU in the
    mode "flag" keeps none.
    """
    if isinstance(report, str | os.PathLike):
        return replay_run(report)
    finding = report.first if isinstance(report, Flags) else \
        report.finding if isinstance(report, NumericsError) else report
    if not isinstance(finding, BadValue):
        raise ArgumentError("there is no finding to run again", where=user_line(),
                            hint="pass ts.debug.flags(), or a NumericsError of a sentinel")
    if finding.saved is None:
        raise ArgumentError(f"no inputs of {finding.op} were kept: launches on a GPU in the mode "
                            '"flag" keep none, nor do collectives', where=user_line(),
                            hint="run a kernel with TESSERA_NUMERICS=raise")
    saved = finding.saved.kept()
    with config.scope(numerics="off"):
        return Replay(saved.name, saved.inputs, saved.run(saved.inputs))


__all__ = ["Replay", "replay"]
