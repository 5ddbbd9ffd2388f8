"""The checkpoints of one run: which are kept, which is taken, who may write."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, CheckpointError
from ..lazy_dataclass import dataclass
from ..mesh.ranks.messages import raised_on_all, share, together
from ..mesh.world import patience, transport
from .layout import MANIFEST, close_folder, make_folder, need_step, open_folder, sweep
from .locking import Claim, claim_of, claimed, could_write, writing
from .read import Checkpoint, load
from .write import save_to

STEP_FOLDER = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")


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
        if not isinstance(self.folder, str | os.PathLike):
            raise ArgumentError(f"a history lies in a folder, got {self.folder!r}")
        object.__setattr__(self, "folder", Path(self.folder))
        if self.keep < 2:
            raise ArgumentError(f"a history keeps at least 2 checkpoints, got keep={self.keep}",
                                hint="the newest may turn out damaged")

    def path(self, step: int) -> Path:
        need_step(step)
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, ascending."""
        return [step for step, done in self._found() if done]

    def _found(self) -> list[tuple[int, bool]]:
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):  # another rank may remove it meanwhile
            return []
        matches = map(STEP_FOLDER.fullmatch, names)
        steps = sorted(int(m[1]) for m in matches if m)
        return [(step, (self.path(step) / MANIFEST).is_file()) for step in steps]

    @together("History.save")
    @patience(first=True)  # a disk takes longer than ranks that compute
    def save(self, step: int, tensors: Any, *, meta: Any = None) -> Path:
        """Save; then remove what is older than the last `keep`, never finished, or of a later step
        (a run continued from an earlier checkpoint leaves those behind).

        The folder is held meanwhile, when no claim holds it already. Links are never followed: one
        in the place of a checkpoint is refused, and removed, not emptied, when its time has come.
        Raises CheckpointError, on every rank, when it cannot be written, another process writes
        there, or a checkpoint of a later step would go that this claim has not gone back from.
        """
        path = self.path(step)
        with contextlib.ExitStack() as held:
            with raised_on_all(CheckpointError):
                if transport().rank == 0:
                    self._need_newest(step, self._hold(held))
            save_to(path, tensors, step, meta, links=False)
            with raised_on_all(CheckpointError):
                if transport().rank == 0:
                    self._tidy(path, step)
        return path

    def _hold(self, held: contextlib.ExitStack) -> Claim:
        """The folder, for one save."""
        with could_write(self.folder):
            make_folder(self.folder)
            handle = open_folder(self.folder)
            held.callback(close_folder, handle)
            return held.enter_context(writing(handle, self.folder))

    def _need_newest(self, step: int, claim: Claim) -> None:
        """Raise CheckpointError when later checkpoints would go that nobody went back from: another
        process may have written them since this one has read."""
        later = [s for s in self.steps() if s > step]
        if later and (claim.loaded is None or claim.loaded > step):
            raise CheckpointError(
                f"{self.folder} has a checkpoint of step {later[-1]}, which saving step {step} "
                "would remove",
                hint="to go on from an earlier step claim the folder, then load: with "
                "history.claim(): saved = history.load(step); a new run takes another folder")

    def _tidy(self, path: Path, step: int) -> None:
        kept = [s for s in self.steps() if s <= step][-self.keep:]
        try:
            for found, _ in self._found():
                if found not in kept:
                    _remove(self.path(found))
        except CheckpointError as err:
            raise CheckpointError(f"{path} is saved, but an older one cannot be removed: "
                                  f"{err.message}", hint=err.hint) from err
        except OSError as err:
            raise CheckpointError(f"{path} is saved, but an older one cannot be removed: {err}",
                                  hint="see that the folder and all in it is yours") from err

    @together("History.load")
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
            return self._loaded(steps[-1] if step is None else step)
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

    def _loaded(self, step: int) -> Checkpoint:
        saved = load(self.path(step))
        claim = claim_of(self.folder)
        if claim is not None:
            claim.loaded = step
        return saved

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
        Of several ranks, which all call it, rank 0 holds it for all. Who continues a run claims it
        before loading: what was loaded earlier may be out of date.

        Raises CheckpointError, on every rank, when another process writes there; it says which.
        """
        with contextlib.ExitStack() as held:
            self._claim(held)
            yield

    @together("History.claim")
    def _claim(self, held: contextlib.ExitStack) -> None:
        with raised_on_all(CheckpointError):
            if transport().rank == 0:
                held.enter_context(claimed(self.folder))


def _remove(path: Path) -> None:
    """The manifest first: what is left after a crash is an unfinished checkpoint, not a damaged
    one. Of a link only the link."""
    if path.is_symlink():
        os.unlink(path)
        return
    folder = open_folder(path, links=False)
    try:
        with writing(folder, path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(MANIFEST, dir_fd=folder)
                os.fsync(folder)
            sweep(folder, ())
    finally:
        close_folder(folder)
    with contextlib.suppress(OSError):  # something of the user's lies in it
        os.rmdir(path)
