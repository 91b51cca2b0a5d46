"""What the user sees while a study trains: a bar on a terminal, one line an epoch elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from qkgeom_jax.command import say
from qkgeom_jax.config import Config
from qkgeom_jax.flags import Stream, printable


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(max(int(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"


def _losses(values: np.ndarray, alive: np.ndarray) -> str:
    return f"{values[alive].mean():.4f}" if alive.any() else "diverged"


class LineProgress:
    """One line an epoch on standard error, so that standard output stays free for results.

    Time left is estimated from the cost of the steps made by this process; a step's cost counts as its depth.
    """

    def __init__(self, groups: tuple[Config, ...]) -> None:
        self._groups = groups
        self._total = sum(self._work(group) for group in groups)
        self._done = 0.0
        self._made = 0.0
        self._start = time.monotonic()
        self._index = 0
        self._group: Config | None = None

    @staticmethod
    def _work(group: Config) -> float:
        return float(group.training.steps * group.model.depth)

    def _show(self, text: str) -> None:
        say(text)

    def _left(self) -> str:
        if self._made <= 0:
            return "?"
        elapsed = time.monotonic() - self._start
        return _duration(elapsed * (self._total - self._done) / self._made)

    def _rate(self) -> float:
        """Characters per second over all seeds since the group began, evaluation and compilation included."""
        config = self._group
        characters = self._group_steps * config.training.batch * config.model.context * len(config.seeds)
        return characters / max(time.monotonic() - self._group_start, 1e-9)

    def note(self, text: str) -> None:
        self._show(text)

    def phase(self, text: str) -> None:
        pass

    def skip(self, group: Config) -> None:
        self._index += 1
        self._done += self._work(group)
        self._show(f"[{self._index}/{len(self._groups)}] {group.name}: done already")

    def begin(self, group: Config) -> None:
        self._index += 1
        self._group, self._group_start, self._group_steps, self._first = group, time.monotonic(), 0, True
        self._show(f"[{self._index}/{len(self._groups)}] {group.name}: {len(group.seeds)} seeds, {group.training.steps} steps")

    def advance(self, steps: int) -> None:
        """The first call of a group says how many steps were restored."""
        work = float(steps * self._group.model.depth)
        self._done += work
        if self._first:
            self._first = False
            if steps:
                self._show(f"  going on from step {steps}")
        else:
            self._made += work
            self._group_steps += steps

    def epoch(self, epoch: int, step: int, train_loss: np.ndarray, val_loss: np.ndarray, alive: np.ndarray) -> None:
        self._show(
            f"  epoch {epoch}/{self._group.training.epochs}  step {step}  train {_losses(train_loss, alive)}  "
            f"val {_losses(val_loss, alive)}  {self._rate():,.0f} characters/s  {self._left()} left"
        )

    def __enter__(self) -> LineProgress:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class BarProgress(LineProgress):
    """A bar over the whole study with the group, its epoch and losses, the rate and the time left."""

    def __init__(self, groups: tuple[Config, ...]) -> None:
        from rich import progress
        from rich.console import Console

        super().__init__(groups)
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=24),
            progress.TaskProgressColumn(),
            progress.TextColumn("{task.fields[detail]}"),
            console=Console(file=Stream(sys.stderr)),
        )
        self._task = self._bar.add_task("starting", total=self._total, detail="")

    def _show(self, text: str) -> None:
        self._bar.console.print(printable(text), highlight=False, markup=False)

    def _refresh(self, **fields: Any) -> None:
        self._bar.update(self._task, completed=self._done, **fields)

    def begin(self, group: Config) -> None:
        super().begin(group)
        self._refresh(description=f"[{self._index}/{len(self._groups)}] {group.name}".replace("[", r"\["))

    def phase(self, text: str) -> None:
        rate = f"  {self._rate():,.0f} characters/s" if self._group_steps else ""
        self._refresh(detail=f"{text}{rate}  {self._left()} left")

    def advance(self, steps: int) -> None:
        super().advance(steps)
        self._refresh()

    def __enter__(self) -> BarProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()


def make_progress(groups: tuple[Config, ...]) -> LineProgress:
    """A bar where standard error is a terminal that can draw one."""
    from rich.console import Console

    console = Console(stderr=True)
    return BarProgress(groups) if console.is_terminal and not console.is_dumb_terminal else LineProgress(groups)
