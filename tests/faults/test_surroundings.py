"""Strange surroundings: locales, terminals, pipes and streams that are closed, clocks that jump, leftovers, damaged caches."""

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import faulty
import pytest
import tiny
from test_integrity import flip, truncate, zero

from qkgeom_jax import corpus as corpora
from qkgeom_jax import progress
from qkgeom_jax.config import CorpusConfig
from qkgeom_jax.corpus import cache

GRID = [sys.executable, str(faulty.HERE.parents[1] / "experiments/grid.py")]
PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TERM": "dumb", "NO_COLOR": "1"}


def start(words, *, shell="", **options):
    """The command as from a shell, with the shell's own redirections."""
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    # Unbuffered output would hide what goes wrong only when Python flushes at exit.
    options["env"] = {name: value for name, value in options.get("env", os.environ).items() if name != "PYTHONUNBUFFERED"}
    command = ["sh", "-c", f'exec "$@" {shell}', "sh", *GRID, *words]
    return subprocess.Popen(command, text=True, encoding="utf-8", **options)


def ended(process):
    """Exit status and what was said on standard error."""
    _, messages = process.communicate(timeout=300)
    return process.returncode, messages or ""


def closed_pipe():
    """The writing end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def into_closed_pipe(words, stream="stdout", **options):
    writer = closed_pipe()
    try:
        return ended(start(words, **{stream: writer}, **options))
    finally:
        os.close(writer)


# --- Locale, terminal, streams


def test_a_training_in_the_c_locale_whose_output_nobody_reads(whole, corpus, tmp_path):
    out = tmp_path / "out"
    status, said = into_closed_pipe(faulty.arguments(corpus, out), env=os.environ | PLAIN)
    assert status == 0, said
    assert "Traceback" not in said and "BrokenPipe" not in said and said.isascii() and "characters/s" in said
    faulty.assert_same(out, whole)


IN_PLACE_OF_STREAMS = """
import os, sys
from qkgeom_jax import command, flags
def work(stop):
    with open(sys.argv[1], "wb") as file:
        assert file.fileno() > 2
        command.say("a message")
        command.tell("a line")
        os.write(2, b"a message of another library")
    return 7
sys.exit(command.run(flags.Parser(prog="x"), work))
"""


def test_files_do_not_get_the_numbers_of_streams_that_are_closed(tmp_path):
    """The first files that are opened would, and with them whatever is said."""
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", IN_PLACE_OF_STREAMS, str(tmp_path / "file")]
    assert subprocess.run(command, check=False, cwd=faulty.HERE.parents[1]).returncode == 7
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.faults
def test_a_training_without_standard_streams(whole, corpus, tmp_path):
    out = tmp_path / "out"
    surroundings = {name: value for name, value in os.environ.items() if name not in ("HOME", "TERM", "LANG", "LC_ALL")}
    assert ended(start(faulty.arguments(corpus, out), shell="<&- >&- 2>&-", env=surroundings))[0] == 0
    faulty.assert_same(out, whole)
    assert faulty.leftovers(out) == []


@pytest.mark.faults
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_training_whose_reader_has_gone(stream, whole, corpus, tmp_path):
    assert into_closed_pipe(faulty.arguments(corpus, tmp_path), stream)[0] == 0
    faulty.assert_same(tmp_path, whole)


@pytest.mark.parametrize("words", [["--help"], ["--status"], ["--verify"]])
def test_output_that_nobody_reads(words, whole):
    """As `| head -1`, once it has its line: nothing is lost, so the status is what it would be."""
    more = [] if words == ["--help"] else [f"--out={whole}"]
    assert into_closed_pipe([*words, *more]) == (0, "")


@pytest.mark.faults
def test_a_plan_that_nobody_reads(corpus, tmp_path):
    status, said = into_closed_pipe(faulty.arguments(corpus, tmp_path / "out", "--plan"))
    assert status == 0 and "Traceback" not in said and not (tmp_path / "out").exists()


def test_streams_that_are_closed_at_the_start(whole):
    assert ended(start(["--status", f"--out={whole}"], shell=">&-")) == (0, "")
    assert ended(start(["--depths=0"], shell="2>&-")) == (2, "")
    assert ended(start(["--depths=0"], shell=">&- 2>&- <&-"))[0] == 2
    assert into_closed_pipe(["--depths=0"], "stderr")[0] == 2


def test_a_standard_output_on_a_full_disk(whole):
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    for words in (["--status", f"--out={whole}"], ["--help"]):
        status, said = ended(start(words, shell=">/dev/full"))
        assert status == 1 and "No space left on device" in said and "Traceback" not in said and said.count("\n") == 1


def test_names_that_the_locale_cannot_write(tmp_path):
    place = os.fsencode(tmp_path) + "/prägung".encode()
    os.mkdir(place)
    for words in (["--status", b"--out=" + place], [b"--config=" + place + b"/x.toml"], [b"--depths=" + "４".encode()]):
        status, said = ended(start(words, env=os.environ | PLAIN))
        assert status == 2 and said.isascii() and said.count("\n") == 1 and "Traceback" not in said


def terminal(monkeypatch, encoding="utf-8", **variables):
    """A terminal as standard error: the end that a user would look at."""
    for name in ("TERM", "NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    master, slave = pty.openpty()
    file = open(slave, "w", encoding=encoding, errors="backslashreplace", buffering=1)
    monkeypatch.setattr(sys, "stderr", file)
    return master, file


@contextlib.contextmanager
def watched(master, file):
    """Collects what a terminal shows, which holds only so much by itself, until it is closed."""
    seen = bytearray()

    def read():
        with contextlib.suppress(OSError):  # as a read ends once nobody has the other end
            while piece := os.read(master, 1 << 16):
                seen.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    yield seen
    file.close()
    reader.join()
    os.close(master)


def train_a_little(shown, groups):
    import numpy as np

    with shown:
        for group in groups:
            shown.begin(group)
            shown.advance(0)
            shown.phase("training")
            shown.advance(4)
            shown.epoch(1, 4, np.ones(2), np.ones(2), np.array([True, False]))
            shown.note("\x1b[2Jnote [bold]")


@pytest.mark.parametrize(
    ("variables", "encoding", "bar"),
    [
        ({"TERM": "xterm"}, "utf-8", True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "utf-8", True),
        ({"TERM": "xterm"}, "ascii", True),
        ({"TERM": "dumb"}, "utf-8", False),
        ({"TERM": "no-such-terminal", "COLUMNS": "1"}, "utf-8", True),
    ],
)
def test_any_terminal(variables, encoding, bar, monkeypatch):
    groups = (tiny.config(depth=1), tiny.config(depth=2))
    master, file = terminal(monkeypatch, encoding, **variables)
    shown = progress.make_progress(groups)
    assert isinstance(shown, progress.BarProgress) == bar
    with watched(master, file) as seen:
        train_a_little(shown, groups)
    plain = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", seen)
    assert rb"\x1b[2Jnote" in re.sub(rb"\s", b"", plain) and b"\x1b[2Jnote" not in seen
    coloured = b"\x1b[3" in seen
    assert coloured if variables == {"TERM": "xterm"} else not coloured
    assert encoding != "ascii" or seen.isascii()
    assert bar or b"\x1b" not in seen


def test_a_terminal_that_goes_away(monkeypatch):
    """Without the signal that usually comes with it, as under nohup: the training goes on."""
    groups = (tiny.config(depth=1),)
    master, file = terminal(monkeypatch, TERM="xterm")
    shown = progress.make_progress(groups)
    with shown:
        shown.begin(groups[0])
        os.close(master)
        shown.note("nobody reads this")
        train_a_little(progress.LineProgress(groups), groups)
        shown._bar.refresh()
    file.close()


# --- Clocks and leftovers


def make_leftovers(out):
    """What killed processes may leave, and checkpoints whose times say nothing."""
    group = out / "groups" / faulty.GROUPS[1]
    for name in ("5.orbax-checkpoint-tmp-1700000000", "12.orbax-checkpoint-tmp"):
        (group / "checkpoints" / name / "state").mkdir(parents=True)
        (group / "checkpoints" / name / "state/half").write_bytes(b"half")
    for name in ("losses.csv", "metrics.csv", "config.json", "status.json", "heads.npz", "manifest.json"):
        (group / f".{name}.tmp").write_bytes(b"half of something")
    for step, years in {"4": 10, "8": -10}.items():
        path, when = group / "checkpoints" / step, time.time() + years * 365 * 86400
        for inside in (*path.rglob("*"), path):
            os.utime(inside, (when, when))
    for name in ("config.json", "manifest.json", "report.md", "runs.csv", "tables/table3.csv", "figures/figure1.png"):
        (out / name).parent.joinpath(f".{Path(name).name}.tmp").write_bytes(b"half of something")


def test_leftovers_and_times_of_files_change_nothing(whole, corpus, tmp_path, capfd):
    plain, out = tmp_path / "plain", tmp_path / "out"
    shutil.copytree(whole, plain)
    shutil.copytree(whole, out)
    faulty.train(corpus, plain, inits="independent", epochs=3)
    make_leftovers(out)
    capfd.readouterr()
    faulty.train(corpus, out, inits="independent", epochs=3)
    assert capfd.readouterr().err.count("going on from step 8") == 1
    faulty.assert_same(out, plain)
    assert faulty.leftovers(out) == []


def test_a_clock_that_jumps(whole, corpus, tmp_path, monkeypatch, capfd):
    """A day back and ten years forth, over and over."""
    clock, calls = time.time, iter(range(10**9))
    jumps = (0, -86400, 10 * 365 * 86400)
    monkeypatch.setattr(time, "time", lambda: clock() + jumps[next(calls) % 3])
    faulty.train(corpus, tmp_path)
    said = capfd.readouterr().err
    left = re.findall(r"(\S+) left", said)
    assert next(calls) > 3 and len(left) == 6 and all(re.fullmatch(r"\?|(\d+h)?\d\dm|\d+m\d\ds", text) for text in left)
    assert left[-1] == "0m00s"
    faulty.assert_same(tmp_path, whole)
    for group in faulty.GROUPS:
        seconds = json.loads((tmp_path / "groups" / group / "manifest.json").read_text())["seconds"]
        assert all(0 <= value < 3600 for value in seconds.values())


# --- Caches


@pytest.fixture
def known_corpus(monkeypatch):
    """A corpus that is found by its fingerprint, as the built-in one, in place of that."""
    text = tiny.text().encode()
    texts = corpora.Texts({"train": text, "validation": text[:200], "test": text[:100]}, ("a note",))
    monkeypatch.setattr(corpora, "builtin_source", lambda: corpora.Source("builtin", lambda: texts, "f" * 64))


def delete(path):
    path.unlink()


def nest(path):
    path.write_text("[" * 100_000)


def forge(path):
    """Another record with its right digest."""
    cache.write_record(path, {"sha256": 1, "notes": 2, "vocabulary": 3, "splits": 4})


@pytest.mark.parametrize("action", [truncate, flip, zero, delete, nest, forge], ids=lambda action: action.__name__)
def test_any_damaged_file_of_a_corpus_cache(action, known_corpus, tmp_path):
    def load():
        return corpora.load_corpus(CorpusConfig(), cache_dir=tmp_path)

    def facts(found):
        return (found.sha256, found.vocabulary, found.notes, {split: ids.tobytes() for split, ids in found.tokens.items()})

    first = facts(load())
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(files) == 5
    for path, content in files.items():
        action(path)
        assert facts(load()) == first, path
        assert facts(load()) == first and path.read_bytes() == content


def compiled(tmp_path):
    """A compile cache of its own, with what the tests have compiled so far."""
    place = tmp_path / "compiled"
    shutil.copytree(os.environ["JAX_COMPILATION_CACHE_DIR"], place)
    return place, sorted(path for path in place.rglob("*") if path.is_file() and path.stat().st_size)


@pytest.mark.faults  # everything compiles anew
@pytest.mark.parametrize("action", [truncate, zero], ids=lambda action: action.__name__)
def test_a_damaged_compile_cache(action, whole, corpus, tmp_path):
    place, files = compiled(tmp_path)
    assert any(path.name.endswith("-cache") for path in files)
    for path in files:
        action(path)
    surroundings = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(place)}
    process = start(faulty.arguments(corpus, tmp_path / "out", inits="independent"), env=surroundings)
    status, said = ended(process)
    assert status == 0, said
    ours, theirs = (root / "groups" / faulty.GROUPS[1] for root in (tmp_path / "out", whole))
    for name in ("metrics.csv", "losses.csv", "heads.npz"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
