"""The checkpoints of one run: which are kept, which is taken, who may write."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, CheckpointError
from ..mesh.ranks.messages import raised_on_all, share
from ..mesh.world import transport
from .layout import MANIFEST, make_folder, sweep, sync_folder
from .read import Checkpoint, load
from .write import save

STEP_FOLDER = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class History:
    """The checkpoints of one run: folder/step-00000100, folder/step-00000200, ...

    keep: how many to keep; older ones go only after a newer one is committed
    how: how the caller's user asks for a certain step, for messages
    """

    folder: Path
    keep: int = 2
    how: str = "load(step={step})"

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        if self.keep < 2:
            raise ArgumentError(f"a history keeps at least 2 checkpoints, got keep={self.keep}",
                                hint="the newest may turn out damaged")

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, ascending."""
        return [step for step, done in self._found() if done]

    def _found(self) -> list[tuple[int, bool]]:
        if not self.folder.is_dir():
            return []
        matches = (STEP_FOLDER.fullmatch(name) for name in os.listdir(self.folder))
        steps = sorted(int(m[1]) for m in matches if m)
        return [(step, (self.path(step) / MANIFEST).is_file()) for step in steps]

    def save(self, step: int, tensors: Any, *, meta: Any = None) -> Path:
        """Save; then remove what is older than the last `keep`, never finished, or of a later step
        (a run continued from an earlier checkpoint leaves those behind)."""
        path = save(self.path(step), tensors, step=step, meta=meta)
        with raised_on_all(CheckpointError):
            if transport().rank == 0:
                self._tidy(path, step)
        return path

    def _tidy(self, path: Path, step: int) -> None:
        kept = [s for s in self.steps() if s <= step][-self.keep:]
        try:
            for found, _ in self._found():
                if found not in kept:
                    _remove(self.path(found))
        except OSError as err:
            raise CheckpointError(f"{path} is saved, but an older one cannot be removed: {err}",
                                  hint="see that the folder and all in it is yours") from err

    def load(self, step: int | None = None) -> Checkpoint:
        """The newest checkpoint, or that of a step.

        Raises CheckpointError; when the newest is damaged it names an older one that is whole. It
        is never taken unasked. On several ranks all of them call it, and all raise.
        """
        steps = share(self.steps())
        if not steps:
            raise CheckpointError(f"there is no checkpoint in {self.folder}",
                                  hint="name the folder that the run wrote to")
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.folder} has no checkpoint of step {step}",
                                  hint="it has those of step " + ", ".join(map(str, steps)))
        try:
            return load(self.path(steps[-1] if step is None else step))
        except CheckpointError as err:
            whole = self._newest_whole(steps[:-1] if step is None else
                                       [s for s in steps if s != step])
            if whole is None:
                raise CheckpointError(err.message, hint="no other checkpoint of this run is whole"
                                      ) from err
            raise CheckpointError(
                err.message,
                hint=f"the checkpoint of step {whole} is whole: {self.how.format(step=whole)}",
            ) from err

    def _newest_whole(self, steps: list[int]) -> int | None:
        for step in reversed(steps):
            try:
                load(self.path(step))
            except CheckpointError:
                continue
            return step
        return None

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        """Hold the folder for one writer; the system lets go of it even when the process is killed.
        Of several ranks, which all call it, rank 0 holds it for all.

        Raises CheckpointError, on every rank, when another process writes there.
        """
        with contextlib.ExitStack() as held:
            with raised_on_all(CheckpointError):
                if transport().rank == 0:
                    held.callback(os.close, self._lock())
            yield

    def _lock(self) -> int:
        try:
            make_folder(self.folder)
            handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as err:
            raise CheckpointError(f"cannot write to {self.folder}: {err.strerror}",
                                  hint="choose another folder") from err
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            os.close(handle)
            raise CheckpointError(f"another process writes to {self.folder}",
                                  hint="choose another folder, or wait until it has ended") from err
        return handle


def _remove(folder: Path) -> None:
    """The manifest first: what is left after a crash is an unfinished checkpoint, not a damaged
    one."""
    if (folder / MANIFEST).exists():
        os.unlink(folder / MANIFEST)
        sync_folder(folder)
    sweep(folder, ())
    with contextlib.suppress(OSError):  # something of the user's lies in it
        os.rmdir(folder)
