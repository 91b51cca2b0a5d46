"""Command-line flags and TOML files to configurations: argument types, flags made from the dataclasses, messages."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import math
import os
import re
import stat
import sys
import tomllib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from qkgeom_jax.config import (
    INITIALIZATIONS, INTERVENTIONS, PARTS, PRESETS, Config, did_you_mean, override, shown, split_dose,
)  # fmt: skip

# Set by the grid (--depths, --inits) or found in the corpus.
NOT_FLAGS = {"depth", "init", "vocabulary"}
# More than any configuration needs; the parser's time may grow with the square.
LARGEST_TOML = 1 << 16
_NEGATIVE = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)


def printable(text: str) -> str:
    """What may go to a terminal: control characters, such as an escape sequence in a file's name, are written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Stream:
    """A standard stream whose reader may go, as `head` or a terminal does: what follows goes nowhere, the work goes on."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, text: str) -> None:
        self._try(self._file.write, text)

    def flush(self) -> None:
        self._try(self._file.flush)

    def _try(self, write: Callable[..., Any], *arguments: Any) -> None:
        try:
            write(*arguments)
        except OSError as error:
            # Python would complain again about what it still holds when it flushes at exit.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._file.fileno())
            if error.errno not in (errno.EPIPE, errno.EIO) and self._file is not sys.stderr:
                raise OSError(error.errno, error.strerror, "standard output") from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Parser(argparse.ArgumentParser):
    """Refuses abbreviations and repeated flags, and says what is wrong in one line with exit status 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def has(self, name: str) -> bool:
        """Whether there is a flag of that name."""
        return any(action.dest == name for action in self._actions)

    def type_of(self, name: str) -> Callable[[str], Any]:
        """How the flag of that name reads its text."""
        return next(action.type for action in self._actions if action.dest == name) or str

    def error(self, message: str) -> NoReturn:
        # A value of thousands of characters would bury what is said about it.
        short = re.sub(r"(\S{100})\S{300,}(\S{100})", r"\1...\2", " ".join(message.split()))
        self.exit(2, f"{self.prog}: {printable(short)}\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        if message:
            print(message, end="", file=Stream(file or sys.stderr), flush=True)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        for word in words:
            if "\0" in word or not _is_text(word):
                self.error(f"{word!r} is no text: it has a NUL character, or bytes that are not of the locale's encoding")
        known = {flag for action in self._actions for flag in action.option_strings}
        given = [word.split("=", 1)[0] for word in words if word.startswith("--") and len(word) > 2]
        for flag in given:
            if flag not in known:
                self.error(f"{flag} is no flag{did_you_mean(flag, known, '; see --help')}")
            if given.count(flag) > 1:
                self.error(f"{flag} is given twice; give it once")
        # A value that begins with a minus would be taken for a flag and answered with "expected one argument".
        joined: list[str] = []
        for word in words:
            before = joined[-1] if joined else ""
            if before in known and before.startswith("--") and _NEGATIVE.match(word):
                joined[-1] = f"{before}={word}"
            else:
                joined.append(word)
        namespace, rest = super().parse_known_args(joined, namespace)
        if rest:
            self.error(f"{rest[0]!r} is no argument of this command; see --help")
        return namespace


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def place(text: str) -> str:
    """The name of a file or folder. An empty one is what an unset variable of a shell leaves."""
    if not text:
        raise argparse.ArgumentTypeError("'' names nothing; give a path")
    try:
        os.lstat(os.path.expanduser(text))
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise argparse.ArgumentTypeError(f"{text!r}: {error.strerror}") from None
    return text


def whole(text: str) -> int:
    """A whole number in plain digits."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or "_" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def true_or_false(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: true, false")
    return text == "true"


def listed(kind: Callable[[str], Any]) -> Callable[[str], tuple]:
    """A comma-separated list without empty or repeated entries."""

    def parse(text: str) -> tuple:
        entries = text.split(",")
        if "" in (entry.strip() for entry in entries):
            raise argparse.ArgumentTypeError(f"{text!r} has an empty entry; write the values with single commas between them")
        values = tuple(kind(entry.strip()) for entry in entries)
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{text!r} names a value twice")
        return values

    return parse


def one_of(allowed: Sequence[str]) -> Callable[[str], str]:
    """One of some names; a wrong one is answered with the nearest."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: {', '.join(allowed)}{did_you_mean(text, allowed)}")
        return text

    return parse


def at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = whole(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: whole numbers of at least {least}")
        return value

    return parse


def _kind(annotation: str) -> Callable[[str], Any]:
    """The argument type of a dataclass field, from its annotation."""
    plain = annotation.removesuffix(" | None")
    return {"int": whole, "float": number, "bool": true_or_false, "str": str}[plain]


def config_fields(without: Collection[str] = ()) -> dict[str, dataclasses.Field]:
    """Every field that has a flag and a TOML key, by name; those of some parts left out."""
    return {
        field.name: field
        for part, kind in PARTS.items()
        for field in dataclasses.fields(kind)
        if part not in without and field.name not in NOT_FLAGS
    }


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_config_flags(parser: Parser, without: Collection[str] = ()) -> None:
    """A flag for each field, those of some parts left out; the default is the preset's, so none is set here."""
    group = parser.add_argument_group("numbers of the configuration (default: those of the preset)")
    for name, field in config_fields(without).items():
        group.add_argument(
            flag(name), type=_kind(field.type), default=argparse.SUPPRESS, metavar="VALUE", help=field.metadata["help"]
        )


def read_toml(path: str, known: Sequence[str]) -> dict[str, Any]:
    """The flat table of a TOML file.

    Raises:
      ValueError: unreadable, not TOML, or with an unknown key; one sentence.
    """
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST_TOML:
            raise ValueError(f"a regular file of at most {LARGEST_TOML} bytes is expected")
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # a number of more digits than Python reads is a plain ValueError
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"--config {path} is no TOML file: {reason}") from None
    for name in values:
        if name not in known:
            hint = did_you_mean(name, known, f"; allowed: {', '.join(known)}")
            raise ValueError(f"--config {path}: {name} is no key{hint}")
    return values


def resolve(preset: str, toml: dict[str, Any], flags: dict[str, Any]) -> Config:
    """The preset, overridden by a TOML file's values, overridden by flags.

    Raises:
      ValueError: a value that is out of range or of the wrong kind.
    """
    fields = config_fields()
    types = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
    for name in toml.keys() & fields.keys():
        expected = types[fields[name].type.removesuffix(" | None")]
        if not isinstance(toml[name], expected) or (isinstance(toml[name], bool) and bool not in expected):
            raise ValueError(f"{name} is {shown(toml[name])} in the TOML file; allowed: {expected[-1].__name__} values")
    values = {name: value for name, value in (toml | flags).items() if name in (*fields, "seeds")}
    if "seeds" in values:
        values["seeds"] = tuple(values["seeds"])
    return override(PRESETS[preset], **values)


def _arm(text: str) -> str:
    """An arm: one of the paper's, one with a dose, or FILE.py:name; what else is wrong with it, `Config` says."""
    if ":" not in text and split_dose(text)[0] not in INTERVENTIONS:
        allowed = f"all, {', '.join(INTERVENTIONS)}, FILE.py:name"
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: {allowed}{did_you_mean(text, ('all', *INTERVENTIONS))}")
    return text


def arms(text: str) -> tuple[str, ...]:
    """A list of arms; ``all`` stands for the paper's."""
    names = listed(lambda entry: entry if entry == "all" else _arm(entry))(text)
    return tuple(dict.fromkeys(name for entry in names for name in (INTERVENTIONS if entry == "all" else (entry,))))


DEPTHS = listed(at_least(1))
DOSE_LIST = listed(number)
INITS = listed(one_of(INITIALIZATIONS))
SEEDS = listed(at_least(0))
