"""Any words on the command line: a status and one line, never a traceback, and nothing written by what is refused."""

import os
import subprocess
import sys

import faulty
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qkgeom_jax import cli, cli_checkpoints, cli_export

COMMANDS = {
    "grid": cli.grid,
    "interventions": cli.interventions,
    "checkpoints": cli_checkpoints.checkpoints,
    "export": cli_export.export,
}
FLAGS = [
    "--depths", "--inits", "--seeds", "--preset", "--out", "--config", "--keep-epochs", "--plan", "--status", "--figures",
    "--verify", "--fresh", "--width", "--heads", "--context", "--learning-rate", "--corpus", "--data-dir", "--batch",
    "--interventions", "--clamp-strengths", "--contraction-factors", "--contraction-rank", "--period", "--series", "--model",
    "--revisions", "--text", "--token-ids", "--tokens", "--cache", "--offline", "--to", "--group", "--seed", "--epochs",
    "--compute-dtype", "--rematerialise", "--help", "-h", "--", "--dep", "--no-such", "-x",
]  # fmt: skip
VALUES = [
    "", " ", "0", "1", "4", "-4", "4,6", "4,,8", "4,4", "1e999", "nan", "-inf", "0x4", "10000000000000000000", "9" * 400, "é",
    "independent", "independant", "quick", "laptopp", "all", "none", "freeze_q", "none,x.py:arm", "k_spectrum_clamp@0.5", "@",
    "k_spectrum_clamp@", "a:b:c", "main", "0..9", "log:3", "log:0", "9..0", "true", "builtin", "/", "/dev/null", "..", "out",
    "a/../b", "\udcff", "x\ny", "\x1b[31m", "%s", "{}", "*", "~", "a\x00b", "pythia-70m", "http://127.0.0.1:9/x", "no/such",
]  # fmt: skip
WORDS = st.one_of(
    st.sampled_from(FLAGS),
    st.sampled_from(VALUES),
    st.builds("{}={}".format, st.sampled_from(FLAGS), st.sampled_from(VALUES)),
    st.text(max_size=8),
)


class _Ready(Exception):
    """The words were sound: work would begin."""


def _begin(*_, **__):
    raise _Ready


@pytest.fixture
def bounded(monkeypatch, tmp_path):
    """A command ends where it would read a corpus, ask the hub or begin to write."""
    monkeypatch.setattr(cli, "_with_corpus", _begin)
    monkeypatch.setattr("qkgeom_jax.series_study.prepare", _begin)
    monkeypatch.setattr("qkgeom_jax.series_study.print_plan", _begin)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


@pytest.mark.parametrize("name", COMMANDS)
@settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(WORDS, max_size=6))
def test_no_words_end_in_a_traceback(name, bounded, capsys, words):
    try:
        status = COMMANDS[name](words)
    except _Ready:
        return
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr().err
    if status == 2:
        assert said.count("\n") == 1 and said[:-1].isprintable(), said
    else:
        assert status == 0, (status, said)
    assert not os.listdir(bounded)


@pytest.mark.parametrize("script", ["grid", "interventions", "checkpoints", "export"])
def test_bytes_that_are_no_text(script, tmp_path):
    path = faulty.HERE.parents[1] / "experiments" / f"{script}.py"
    command = [sys.executable.encode(), str(path).encode(), b"--o\xffut=\xff\xfe"]
    done = subprocess.run(command, check=False, capture_output=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"Traceback" not in done.stderr
    assert not os.listdir(tmp_path)


def test_a_context_longer_than_the_corpus(corpus, tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        cli.grid(faulty.arguments(corpus, tmp_path / "out", context=5000))
    assert refused.value.code == 2 and "5001" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--width=1000000000000", "width is 1000000000000; allowed: a whole number of at most 2147483647"),
        ("--width=100000000 --heads=1", "width is too large: an array would have"),
        ("--batch=2000000000", "batch, context or probe is too large: an array would have"),
        ("--probe-tokens=2000000000 --depths=1000", "batch, context or probe is too large"),
        ("--epochs=100000 --steps-per-epoch=100000", "epochs is 100000; allowed: at most 2147483647 steps in all"),
        ("--depths=1000000000", "width is too large"),
    ],
)
def test_numbers_that_would_end_the_process(words, expected, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as refused:
        cli.grid(words.split())
    assert refused.value.code == 2 and expected in capsys.readouterr().err
    assert not os.listdir(tmp_path)
