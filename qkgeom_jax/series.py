"""Checkpoint series: the public ones by name, a user's own, and which of their revisions a command asks for."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# How many revisions are measured where none are named: evenly spaced in the logarithm of the step.
DEFAULT_REVISIONS = 12


@dataclass(frozen=True)
class Series:
    """Revisions of one model.

    Attributes:
      name: its name in results and figures.
      source: a repository of the hub, or a folder or file.
      family: its row of Table 6; None for that of the model's architecture, once a revision is opened.
      pattern: how a revision with step N is called, ``{}`` for N; empty where that is not known.
      steps: the steps that there are; empty where the repository or folder must be asked.
      tokens_per_step: tokens that training saw in one step, None where not known.
      tokenizer: the repository whose tokenizer.json serves where a revision has none.
      local: the source is a folder or file.
    """

    name: str
    source: str
    family: str | None = None
    pattern: str = ""
    steps: tuple[int, ...] = ()
    tokens_per_step: int | None = None
    tokenizer: str | None = None
    local: bool = False

    @property
    def revisions(self) -> tuple[str, ...]:
        """The names of all known revisions."""
        return tuple(self.pattern.format(step) for step in self.steps)


_PYTHIA_STEPS = (0, *(2**power for power in range(10)), *range(1000, 144000, 1000))
_GPT2_STEPS = (*range(0, 100, 10), *range(100, 2000, 50), *range(2000, 20000, 100), *range(20000, 401000, 1000))


def _pythia(size: str) -> Series:
    return Series(f"pythia-{size}", f"EleutherAI/pythia-{size}", "pythia", "step{}", _PYTHIA_STEPS, 2_097_152)


def _smollm2(size: str, tokens_per_step: int) -> Series:
    source = f"HuggingFaceTB/SmolLM2-{size.upper()}-intermediate-checkpoints"
    return Series(f"smollm2-{size}", source, "smollm2", "step-{}", (), tokens_per_step)


def _gpt2(name: str, source: str) -> Series:
    # 512 sequences of 1,024 tokens a step. The tokenizer is GPT-2's own.
    source = f"stanford-crfm/{source}"
    return Series(name, source, "gpt2", "checkpoint-{}", _GPT2_STEPS, 524_288, "openai-community/gpt2")


CATALOGUE = {
    series.name: series
    for series in (
        *map(_pythia, ("14m", "31m", "70m", "160m", "410m")),
        # Nothing before 250 billion tokens: these two cannot show an early regime. Tokens a step: stated for 135M, and
        # for 360M what "160,000 steps, about 250 billion tokens" comes to.
        _smollm2("135m", 1_048_576),
        _smollm2("360m", 1_572_864),
        _gpt2("gpt2-small", "alias-gpt2-small-x21"),
        _gpt2("gpt2-small-battlestar", "battlestar-gpt2-small-x49"),
        _gpt2("gpt2-small-caprica", "caprica-gpt2-small-x81"),
        _gpt2("gpt2-small-darkmatter", "darkmatter-gpt2-small-x343"),
        _gpt2("gpt2-small-expanse", "expanse-gpt2-small-x777"),
    )
}
# The six of the paper's Table 6, by its counts of models; it names no repositories.
PAPER_SERIES = ("pythia-70m", "pythia-160m", "pythia-410m", "smollm2-135m", "smollm2-360m", "gpt2-small")


def own_series(source: str) -> Series:
    """The series of `--model`: a folder or file where there is one of that name, else a repository of the hub.

    Raises:
      ValueError: it is neither; one sentence.
    """
    path = Path(os.path.expanduser(source))
    if path.exists():
        path = Path(os.path.normpath(path.absolute()))  # no series is called ".."
        return Series(path.name or "root", str(path), local=True)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", source):
        raise ValueError(f"--model {source!r} is neither a folder nor a file here, nor a repository as OWNER/NAME")
    return Series(source.rpartition("/")[2], source)


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdigit() and step_of(name) is not None


def step_of(revision: str) -> int | None:
    """The training step in a revision's name: the number after step, checkpoint, iter or epoch, or the only number.

    >>> [step_of(name) for name in ("step1000", "step-240000", "checkpoint-10", "step-001000-2BT", "0512", "main")]
    [1000, 240000, 10, 1000, 512, None]
    """
    named = re.findall(r"(?:step|checkpoint|ckpt|iter|iteration|epoch)[-_=]?(\d+)", revision.lower())
    numbers = named or re.findall(r"\d+", revision)
    return int(numbers[0]) if len(numbers) == 1 and len(numbers[0]) <= 15 else None  # a longer one is a date or a hash


@dataclass(frozen=True)
class Selection:
    """What `--revisions` asks for: names, a range of steps, all, or some that are log-spaced."""

    names: tuple[str, ...] = ()
    steps: tuple[int, int] | None = None
    count: int | None = None

    @property
    def needs_a_list(self) -> bool:
        """The revisions that there are must be known to answer it; plain numbers stand for steps."""
        return not self.names or any(_is_step(name) for name in self.names)


def parse_selection(text: str) -> Selection:
    """The argument type of `--revisions`: ``all``, ``log``, ``log:N``, ``FIRST..LAST`` (steps), or a list of names."""
    if text == "all":
        return Selection()
    if text == "log" or text.startswith("log:"):
        count = text[4:] or str(DEFAULT_REVISIONS)
        if not (count.isascii() and count.isdigit() and len(count) <= 9) or int(count) < 2 or text == "log:":
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: log:N with N at least 2")
        return Selection(count=int(count))
    if ".." in text:
        first, last = (step_of(part) for part in text.split("..", 1))
        if first is None or last is None or first > last:
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: two steps, the smaller first, as 1000..16000")
        return Selection(steps=(first, last))
    names = tuple(name.strip() for name in text.split(","))
    if "" in names:
        raise argparse.ArgumentTypeError(
            f"{text!r} has an empty entry; write the names with single commas between them"
        )
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names a revision twice")
    return Selection(names)


def in_order(revisions: Sequence[str]) -> list[str]:
    """By step; those without one behind, in the order given."""
    return sorted(revisions, key=lambda name: (step_of(name) is None, step_of(name) or 0))


def log_spaced(revisions: Sequence[str], count: int) -> list[str]:
    """At most `count` trained revisions, as evenly spaced in log(step) as there are, and the untrained one.

    >>> log_spaced([f"step{n}" for n in (0, 1, 2, 4, 8, 16, 32, 64, 1000)], 4)
    ['step0', 'step1', 'step8', 'step64', 'step1000']
    """
    stepped = [name for name in in_order(revisions) if step_of(name) is not None]
    trained = [name for name in stepped if step_of(name) > 0]
    untrained = [name for name in stepped if step_of(name) == 0]
    if len(trained) > count:
        logs = np.log([step_of(name) for name in trained])
        nearest = {int(np.abs(logs - place).argmin()) for place in np.linspace(logs[0], logs[-1], count)}
        trained = [trained[at] for at in sorted(nearest)]
    return untrained + trained


def choose(selection: Selection, available: Sequence[str], where: str) -> list[str]:
    """The revisions that a selection asks for.

    Args:
      selection: from `parse_selection`.
      available: the revisions that there are; may be empty where `selection.needs_a_list` is false.
      where: the series, for messages.

    Raises:
      ValueError: nothing fits.
    """
    if selection.names:
        steps = {step_of(name): name for name in available}
        # A plain number is a step, unless a revision bears that very name.
        return [
            name if name in available or not _is_step(name) else steps.get(int(name), name) for name in selection.names
        ]
    if selection.steps:
        first, last = selection.steps
        chosen = [name for name in in_order(available) if first <= (-1 if (s := step_of(name)) is None else s) <= last]
        if not chosen:
            raise ValueError(f"{where} has no revision with a step from {first} to {last}")
        return chosen
    if selection.count:
        chosen = log_spaced(available, selection.count)
        if not chosen:
            raise ValueError(f"{where} has no revision with a step in its name; name some with --revisions")
        return chosen
    return in_order(available)


def order_notes(revisions: Sequence[str]) -> dict[str, str]:
    """What is wrong with the order of a list of revisions, by revision; the list itself is the user's.

    >>> order_notes(["step1", "step9", "step4", "main"])
    {'step4': 'listed after step9', 'main': 'no step in its name'}
    """
    notes: dict[str, str] = {}
    largest: str | None = None
    stepped = any(step_of(name) is not None for name in revisions)
    for name in revisions:
        step = step_of(name)
        if step is None:
            if stepped:
                notes[name] = "no step in its name"
            continue
        if largest is not None and step == step_of(largest):
            notes[name] = f"the same step as {largest}"
        elif largest is not None and step < step_of(largest):
            notes[name] = f"listed after {largest}"
        else:
            largest = name
    return notes
