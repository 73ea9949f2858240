"""Live progress of one run or of several side by side: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

#: seconds between two plain lines of a run
PLAIN_EVERY = 5.0


class Board:
    """A line per run with loss, tokens per second and time left.

    Parameters
    ----------
    names : list of str
        The runs.
    console : rich.console.Console
        Where to draw; plain lines when it is no terminal.
    """

    def __init__(self, names: list[str], console: Console):
        self.console = console
        self.plain = not console.is_terminal
        self.started = time.monotonic()
        self.printed: dict[str, tuple[float, str]] = {}
        self.first: dict[str, tuple[float, float]] = {}  # a resumed run does not begin at zero
        self.width = max(map(len, names))
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
        )
        self.tasks = {name: self.progress.add_task(name, total=1.0, text="starting") for name in names}

    def __enter__(self) -> Board:
        """Start drawing."""
        if not self.plain:
            self.progress.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop drawing; the last state of the lines stays on the screen."""
        if not self.plain:
            self.progress.stop()

    def update(self, name: str, fraction: float, step: int, loss: float, tokens_per_second: float) -> None:
        """Show where run `name` is: the fraction done, the step, its loss and its speed."""
        text = f"step {step}  loss {loss:.3f}  {tokens_per_second / 1000:.1f}k tokens/s"
        self._show(name, fraction, "training", text)

    def phase(self, name: str, text: str, fraction: float | None = None) -> None:
        """Show what run `name` does when it is not training."""
        self._show(name, fraction, text.split(" ")[0], text)

    def _show(self, name: str, fraction: float | None, phase: str, text: str) -> None:
        if not self.plain:
            self.progress.update(self.tasks[name], completed=fraction, text=text)
            return
        now = time.monotonic()
        last, last_phase = self.printed.get(name, (-PLAIN_EVERY, ""))
        if phase == last_phase and now - last < PLAIN_EVERY and fraction != 1.0:
            return
        self.printed[name] = (now, phase)
        elapsed = now - self.started
        begin, begun = self.first.setdefault(name, (now, fraction or 0.0))
        left = ""
        if fraction is not None and begun < fraction < 1.0:
            left = f"  {(now - begin) * (1.0 - fraction) / (fraction - begun):.0f}s left"
        done = f"{100 * fraction:3.0f}%" if fraction is not None else "    "
        self.console.print(f"{name:<{self.width}}  {done}  {text}  {elapsed:.0f}s{left}", markup=False, highlight=False)
