"""What a run shows, a live line on a terminal and plain lines elsewhere; how Ctrl-C ends it; and
the loss curve."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LINE_EVERY_S = 5.0


class Progress:
    """Counts steps and tokens. `advance` after each step, `say` for a line, `aside` around work
    that is no training, which the rate leaves out like the first step, which compiles."""

    def __init__(self, steps: int, start: int, tokens_per_step: int):
        self.steps, self.start, self.tokens = steps, start, tokens_per_step
        self.started = time.perf_counter()
        self.mark, self.said = self.started, 0.0
        self.busy_s, self.timed = 0.0, 0
        self.live = _live_display(steps, start) if sys.stdout.isatty() else None

    def __enter__(self) -> Progress:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.live is not None:
            self.live.stop()

    @property
    def tokens_per_s(self) -> float:
        return self.timed * self.tokens / self.busy_s if self.busy_s else 0.0

    def advance(self, step: int, loss: float, norm: float) -> None:
        """One step is done."""
        now = time.perf_counter()
        if step > self.start + 1:
            self.busy_s += now - self.mark
            self.timed += 1
        self.mark = now
        left = (self.steps - step) * self.tokens / self.tokens_per_s if self.timed else None
        speed = f"{self.tokens_per_s:,.0f} tokens/s" if self.timed else "compiled"
        text = f"loss {loss:.4f}  |grad| {norm:.2f}  {speed}  {_clock(left)} left"
        if self.live is not None:
            self.live.update(self.live.task_ids[0], completed=step, text=text)
        elif now - self.said >= LINE_EVERY_S or step in (self.start + 1, self.steps):
            self.said = now
            show(f"step {step}/{self.steps}  {text}")

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self.mark += time.perf_counter() - before

    def say(self, line: str) -> None:
        if self.live is not None:
            self.live.console.print(line, markup=False, highlight=False)
        else:
            show(line)


def _live_display(steps: int, start: int) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as RichProgress

    text = TextColumn("{task.fields[text]}", markup=False)
    live = RichProgress(TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), text,
                        expand=True)
    live.add_task("train", total=steps, completed=start, text="compiling the first step")
    return live


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else \
        f"{minutes}:{rest:02d}"


@contextlib.contextmanager
def interruptible() -> Iterator[list[int]]:
    """The first Ctrl-C or SIGTERM is noted, and the loop ends after its step; the next one ends
    the program at once. SIGHUP is noted too, as often as it comes: of a terminal that is closed
    both the system and the shell send it. What is ignored, as under nohup, stays ignored."""
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        elif noted and noted[-1] != signal.SIGHUP:
            raise KeyboardInterrupt
        noted.append(number)

    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {s: signal.signal(s, note) for s in ends if signal.getsignal(s) != signal.SIG_IGN}
    try:
        yield noted
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def leave_terminal() -> None:
    """Nothing is read from or shown on a terminal that is gone, which would be errors; files and
    pipes stay."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        if stat.S_ISCHR(os.fstat(number).st_mode):
            os.dup2(nowhere, number)
    os.close(nowhere)


def show(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        leave_terminal()  # its signal is about to arrive


def draw_curve(file: Path, losses: list[float], held_out: list[tuple[int, float]]) -> None:
    """Loss per step, a running mean of it, and the held-out losses, as a PNG."""
    from matplotlib.figure import Figure

    mean, means = losses[0] if losses else 0.0, []
    for loss in losses:
        mean += 0.05 * (loss - mean)
        means.append(mean)
    figure = Figure(figsize=(8, 4.5), dpi=110, layout="tight")
    axes = figure.subplots()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="#b8c4d6", linewidth=0.8, label="batch")
    axes.plot(steps, means, color="#1f4e8c", linewidth=1.6, label="running mean")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="#c2501f", label="held-out")
    axes.set(xlabel="step", ylabel="loss in nats per byte", ylim=(0, None))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(file)


if __name__ == "__main__":  # progress.py result.json loss.png
    made = json.loads(Path(sys.argv[1]).read_text())
    draw_curve(Path(sys.argv[2]), made["losses"], made["held_out"])
