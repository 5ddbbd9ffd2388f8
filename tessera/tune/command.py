"""`python -m tessera tune`: measures choices of blocks on this GPU; what beats the model's is kept.

    python -m tessera tune                                       every routine, its usual shapes
    python -m tessera tune gemm --shapes 1536x1536x1536 --ways nn tn
    python -m tessera tune gemm --shapes cubes rows --types f16
    python -m tessera tune gemm --shapes training --sustained    at the clock of steps in a row
    python -m tessera tune gemm --out tessera/kernels/tables     for the package
    python -m tessera tune --merge a/*.json b/*.json             of several GPUs side by side
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import ArgumentError, UnsupportedTargetError
from ..kernels.cards import Card, card_at
from ..kernels.tuned_tables import (
    MARGIN,
    TunedEntry,
    TunedTable,
    TunedTables,
    file_name,
    forget_tables,
    kernels_hash,
    shipped_table,
    user_table,
)
from ..runtime.device import Device, device, has_gpu
from ..runtime.sustained import SustainedClock
from . import routines as routines  # they register themselves
from .measure import GraphClock, Measured, Measurement
from .tunable import TUNABLES, Tunable, TuningProblem, tunable

INTERMIXED = True
BATCH = 40  # problems whose kernels are compiled together
CHOICES = 8
SETTLE_MS, WINDOW_MS, SUSTAINED_ROUNDS = 45, 90, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("routines", nargs="*", metavar="NAME",
                        help="all, or some of: " + ", ".join(TUNABLES))
    parser.add_argument("--shapes", nargs="+", default=[], metavar="SHAPE",
                        help="such as 1536x1536x1536, or a group; else all groups: " + "; ".join(
                            f"{t.name} ({t.extents}): {', '.join(t.shapes)}"
                            for t in TUNABLES.values()))
    parser.add_argument("--types", nargs="+", default=[], metavar="TYPE",
                        help="of operands; else the first of: " + "; ".join(
                            f"{t.name}: {', '.join(t.types)}" for t in TUNABLES.values()))
    parser.add_argument("--ways", nargs="+", default=[], metavar="WAY",
                        help="else all: " + "; ".join(
                            f"{t.name}: {', '.join(t.ways)}" for t in TUNABLES.values()))
    parser.add_argument("--choices", type=int, default=CHOICES, metavar="N",
                        help=f"how many of the model's best are measured ({CHOICES})")
    parser.add_argument("--sustained", action="store_true",
                        help="each choice has the GPU for a tenth of a second, so that its power "
                             "decides the clock, as in a training step; else all take turns within "
                             "milliseconds")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="S",
                        help="no problem is begun after as many")
    parser.add_argument("--out", metavar="FOLDER",
                        help="for the table; else `tuned` below TESSERA_CACHE_DIR")
    parser.add_argument("--merge", nargs="+", default=[], metavar="FILE",
                        help="tables whose entries go into that of their GPU, those of a later "
                             "file before others; nothing is measured")


def run(args: argparse.Namespace) -> int:
    if args.merge:
        return merge(args.merge, args.out)
    chosen = [tunable(name) for name in args.routines or TUNABLES]
    work = [(t, t.problems(args.shapes, args.types, args.ways)) for t in chosen]
    if args.choices < 2:
        raise ArgumentError(f"--choices is {args.choices}", hint="at least 2, of which one is the "
                            "model's")
    if not has_gpu():
        raise UnsupportedTargetError("choices are measured on a GPU, and there is none here",
                                     hint="python -m tessera doctor says what is missing")
    on, end = device(), time.monotonic() + args.seconds
    path = _path(on.name, args.out)
    # What is wrong with the file is said before anything is measured.
    _table(path, on.name, on.multiprocessors).write(path)
    clock = (SustainedClock(on, SETTLE_MS, WINDOW_MS, SUSTAINED_ROUNDS) if args.sustained
             else GraphClock(on))
    for t, problems in work:
        measurement = Measurement(t, card_at(on.index), on, clock, args.choices)
        for found in tune(measurement, problems, end, path):
            table = _table(path, on.name, on.multiprocessors)
            table.with_entries(t.name, found).write(path)
    forget_tables()
    print(f"written to {path}")
    return 0


def merge(files: Sequence[str], out: str | None) -> int:
    """The entries of tables, each in that of its GPU. No GPU is needed."""
    for file in files:
        if not Path(file).exists():
            raise ArgumentError(f"there is no file {file}", hint="tables that `tune --out` wrote")
        found = TunedTable.read(Path(file))
        path = _path(found.card, out)
        table = _table(path, found.card, found.multiprocessors)
        for name, entries in found.entries.items():
            if found.kernels[name] != kernels_hash(name):
                raise ArgumentError(f"{file} was measured with other kernels of {name} than these",
                                    hint="tune again with these")
            table = table.with_entries(name, entries)
        table.write(path)
        print(f"{file}: {sum(map(len, found.entries.values()))} entries written to {path}")
    forget_tables()
    return 0


def _path(card: str, out: str | None) -> Path:
    return Path(out) / file_name(card) if out else user_table(card)


def _table(path: Path, card: str, multiprocessors: int) -> TunedTable:
    """What the file holds, of this card; a file of another is an error, for it would be lost."""
    if not path.exists():
        return TunedTable(card, multiprocessors)
    found = TunedTable.read(path)
    if (found.card, found.multiprocessors) != (card, multiprocessors):
        raise ArgumentError(f"{path} is of {found.card} with {found.multiprocessors} "
                            f"multiprocessors, this is {card} with {multiprocessors}",
                            hint="--out names another folder")
    return found


def tune(m: Measurement, problems: Sequence[TuningProblem], end: float, path: Path
         ) -> Iterator[dict[str, TunedEntry | None]]:
    """The entries of each problem that is measured, as time allows; None where none is needed.
    path: of the table that gets them."""
    t, card, on, done, gained = m.tunable, m.card, m.device, 0, 0
    for measured in _measured(m, problems, end):
        key, needed = t.key(measured.problem, card), decides(t, measured, card, on, path)
        yield {key: TunedEntry(today(), measured.us) if needed else None}
        print(line(measured), flush=True)
        done, gained = done + 1, gained + needed
    print(f"{t.name}: {done} of {len(problems)} problems measured, in {gained} another choice than "
          f"the model's is at least {MARGIN:.0%} quicker", flush=True)


def _measured(m: Measurement, problems: Sequence[TuningProblem], end: float) -> Iterator[Measured]:
    for i in range(0, len(problems), BATCH):
        batch = problems[i:i + BATCH]
        begun = time.monotonic()
        if begun > end:
            return
        count = m.compile(batch)
        print(f"{m.tunable.name}: {count} kernels of {len(batch)} problems compiled in "
              f"{time.monotonic() - begun:.0f} s", flush=True)
        for p in batch:
            if time.monotonic() > end:
                return
            yield m.measure(p)


def decides(t: Tunable, m: Measured, card: Card, on: Device, path: Path) -> bool:
    """Whether an entry is needed: it chooses otherwise than the model, or than the package's table,
    where that is another one."""
    shipped, key = shipped_table(on.name), t.key(m.problem, card)
    other = shipped.exists() and shipped.resolve() != path.resolve()
    theirs = TunedTables((TunedTable.read(shipped),) if other else ())
    return bool(m.us) and (TunedEntry("", m.us).best(m.model) is not None
                           or theirs.find(t.name, key, m.model) is not None)


def line(m: Measured) -> str:
    """Of a problem: the model's choice, the quickest, and what was left out."""
    if not m.us:
        return f"{m.problem}: not measured: {m.left_out.get(m.model, 'nothing ran')}"
    best = min(m.us, key=m.us.__getitem__)
    text = f"{m.problem}: {m.model} {m.us[m.model]:.2f} us"
    if best != m.model:
        text += f", {best} {m.us[best]:.2f} us, {m.us[m.model] / m.us[best] - 1:.1%} quicker"
    return text + "".join(f"; {t} left out: {why}" for t, why in m.left_out.items())


def today() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


__all__ = ["add_arguments", "run"]
