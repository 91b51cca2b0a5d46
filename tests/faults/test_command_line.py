"""Wrong words on a command line: each has its own sentence, exit status 2, no traceback, and nothing is written."""

import contextlib
import io
import itertools
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qkgeom_jax import cli, cli_export, flags
from qkgeom_jax.cli import grid, interventions
from qkgeom_jax.cli_checkpoints import checkpoints
from qkgeom_jax.config import PARTS
from qkgeom_jax.series import CATALOGUE

COMMANDS = {"grid": grid, "interventions": interventions, "checkpoints": checkpoints, "export": cli_export.export}
BIG, HUGE = "9" * 18, "9" * 5000
NO_TEXT = "is no text: it has a NUL character, or bytes that are not of the locale's encoding"


def refusal(command, words, capsys):
    with pytest.raises(SystemExit) as stop:
        COMMANDS[command](words)
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith(f"{command}.py: ") and said.err[:-1].isprintable() and len(said.err) < 1000
    return said.err


# What tests/test_flags.py and the tests of the other commands have is not repeated.
WRONG = {
    "grid": {
        ("--depths=4,six",): "'six' is not a whole number",
        ("--out", "a" * 300): "File name too long",
        ("--verify=" + "a/" * 3000,): "File name too long",
        (f"--depths={BIG}",): f"depth is {BIG}; allowed: a whole number of at most",
        ("--depths=1025",): "depth is 1025; allowed: a whole number of at most 1024",
        ("--inits=qk_identical,disjoint_suport",): "did you mean disjoint_support?",
        ("--inits=independent,independent",): "names a value twice",
        ("--seeds", ""): "argument --seeds: '' has an empty entry",
        ("--seeds=7,37,7",): "names a value twice",
        ("--seeds", "-1"): "argument --seeds: '-1'; allowed: whole numbers of at least 0",
        ("--seeds", HUGE): "is not a whole number",
        ("--keep-epochs=al",): "did you mean all?",
        ("--keep-epochs=",): "argument --keep-epochs: ''; allowed: ends, all",
        ("--dep", "4"): "--dep is no flag; did you mean --depths?",
        ("--dept=4",): "did you mean --depths?",
        ("--see=4",): "did you mean --seeds?",
        ("--pla",): "did you mean --plan?",
        ("--plan", "--plan"): "--plan is given twice",
        ("--out=a", "--out", "a"): "--out is given twice",
        ("--learning-rate", "-1"): "learning_rate is -1.0",
        ("--learning-rate", "-.5"): "learning_rate is -0.5",
        ("--learning-rate", "-inf"): "argument --learning-rate: '-inf' is not a finite number",
        ("--learning-rate", "-NaN"): "'-NaN' is not a finite number",
        ("--learning-rate", "1e-400"): "learning_rate is 0.0",
        ("--learning-rate", "1e39"): "a number that float32 can hold, at most 3.4e+38",
        ("--learning-rate", HUGE): "is not a finite number",
        ("--weight-decay", "1e300"): "weight_decay is 1e+300; allowed: a number that float32 can hold",
        ("--width", BIG, "--inits=independent"): f"width is {BIG}; allowed: a whole number of at most 2147483647",
        ("--width", HUGE): "is not a whole number",
        ("--width=1000000",): "width is 1000000; allowed: what needs no array of 4e+12 numbers",
        ("--batch=100000000",): "batch is 100000000; allowed: what needs no array of 1.6e+12 numbers",
        ("--width=66", "--heads=4"): "heads is 4; allowed: a divisor of the width, 66",
        ("--epochs=100000", "--steps-per-epoch=100000"): "epochs is 100000; allowed: at most 21474 with 100000 steps each",
        ("--probe-tokens=100000000",): "probe_tokens is 100000000; allowed: a whole number of at most 16777216",
        ("--data-dir=",): "data_dir is ''; allowed: a path",
        ("--out=",): "argument --out: '' names nothing; give a path",
        ("--config", ""): "argument --config: '' names nothing",
        ("--out", "--plan"): "argument --out: expected one argument",
        ("--status=1",): "argument --status: ignored explicit argument",
        ("--", "--depths=4"): "'--' is no argument",
        ("-4",): "'-4' is no argument",
        ("-x",): "'-x' is no argument",
        ("",): "'' is no argument",
        ("--=4",): "-- is no flag",
        ("--\x1b[31mred",): r"--\x1b[31mred is no flag",
        ("--depths=\x1b]0;title\x07",): r"is not a whole number",
        ("--out=a\0b",): rf"'--out=a\x00b' {NO_TEXT}",
        ("--corpus", "\0"): rf"'\x00' {NO_TEXT}",
        ("--config=a\0.toml",): NO_TEXT,
        ("--out=caf\udce9",): rf"'--out=caf\udce9' {NO_TEXT}",
        ("\ud800",): rf"'\ud800' {NO_TEXT}",
    },
    "interventions": {
        ("--interventions=freez_q",): "did you mean freeze_q?",
        ("--interventions=",): "has an empty entry",
        ("--interventions=none,none",): "names a value twice",
        ("--interventions=freeze_k@1",): "k_spectrum_clamp@DOSE",
        ("--interventions=k_spectrum_clamp@",): "intervention k_spectrum_clamp@: '' is no number",
        ("--interventions=k_spectrum_clamp@1e999",): "clamp_strength is inf",
        ("--interventions=k_spectrum_clamp@0.50",): "allowed: k_spectrum_clamp@0.5",
        ("--interventions=/no/such.py:arm",): "there is no file /no/such.py",
        ("--clamp-strengths=0.5,2",): "clamp_strength is 2.0; allowed: a number from 0 to 1",
        ("--clamp-strengths", "-1"): "clamp_strength is -1.0",
        ("--clamp-strengths=0.5,,1",): "has an empty entry",
        ("--contraction-factors=nan",): "'nan' is not a finite number",
        ("--contraction-rank=64",): "numbers below 64, the rank of W_K",
        ("--align-sign=0",): "align_sign is 0; allowed: 1, -1",
        ("--start-epoch=100000000",): "start_epoch is 100000000; allowed: a whole number of at most",
        ("--intervention=none",): "did you mean --interventions?",
    },
    "checkpoints": {
        ("--series=pythia-70",): "did you mean pythia-70m?",
        ("--series=pythia-70m,pythia-70m",): "names a value twice",
        ("--model=a,,b",): "has an empty entry",
        ("--model=~nobody-of-this-name/x/y",): "is neither a folder nor a file here",
        ("--revisions=log:²",): "allowed: log:N with N at least 2",
        (f"--revisions=log:{HUGE}",): "allowed: log:N with N at least 2",
        (f"--revisions=1..{HUGE}",): "allowed: two steps, the smaller first",
        ("--tokens", "-4"): "argument --tokens: '-4'; allowed: whole numbers of at least 2",
        ("--tokens=64", "--context=128"): "--tokens is 64, less than one window of 128",
        ("--text=",): "argument --text: '' names nothing",
        ("--text=~nobody-of-this-name/x",): "cannot be read: No such file or directory",
        ("--token-ids=",): "argument --token-ids: '' names nothing",
        ("--cache=",): "argument --cache: '' names nothing",
        ("--out=",): "argument --out: '' names nothing",
        ("--out=a\0b",): NO_TEXT,
        ("--model=\udcff/x",): NO_TEXT,
        ("--serie=pythia-70m",): "did you mean --series?",
    },
    "export": {
        (): "the following arguments are required: OUT, --to",
        ("", "--to=x"): "argument OUT: '' names nothing",
        ("results", "--to="): "argument --to: '' names nothing",
        ("results", "--to=x", "--to=y"): "--to is given twice",
        ("results", "--to=x", "--epochs", "-1"): "argument --epochs: '-1'",
        ("results", "--to=x", "--seed", HUGE): "is not a whole number",
        ("results", "more", "--to=x"): "'more' is no argument",
        ("results", "--to=x", "--group="): "argument --group: '' names nothing",
        ("results\0", "--to=x"): NO_TEXT,
        ("results", "--to=\udcff"): NO_TEXT,
    },
}
CASES = [(command, words) for command, table in WRONG.items() for words in table]


@pytest.mark.parametrize(("command", "words"), CASES, ids=[f"{c} {ascii(' '.join(w))[:60]}" for c, w in CASES])
def test_a_wrong_word_has_its_sentence(command, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert WRONG[command][words] in refusal(command, list(words), capsys)
    assert os.listdir(tmp_path) == []


LISTS = {
    "grid": ["--depths", "--inits", "--seeds"],
    "interventions": ["--interventions", "--clamp-strengths", "--contraction-factors"],
    "checkpoints": ["--series", "--model", "--revisions"],
    "export": ["--epochs"],
}


@pytest.mark.parametrize(("command", "flag"), [(command, flag) for command, names in LISTS.items() for flag in names])
def test_every_list_refuses_empty_entries(command, flag, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = ["results", "--to=x"] if command == "export" else []
    for text in ("", ",", "1,,2", "1, ,2", ",1", "1,"):
        message = refusal(command, [*more, f"{flag}={text}"], capsys)
        assert f"argument {flag}: " in message and "has an empty entry" in message
    assert os.listdir(tmp_path) == []


def test_a_context_longer_than_the_corpus(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [f"--corpus={corpus}", "--context=5000", "--out=here"]
    with pytest.raises(SystemExit) as stop:
        grid(words)
    assert stop.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "a window of context 5000 needs at least 5001: give a longer text or a smaller --context" in message
    assert os.listdir(tmp_path) == []


def test_a_whole_number_of_too_many_digits_in_a_toml_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text, expected in {
        f"width = {HUGE}": "study.toml is no TOML file: Exceeds the limit (4300 digits)",
        f"width = 0x{'f' * 5000}": "width is a number of thousands of digits; allowed: a whole number of at most",
        f"learning_rate = {'9' * 400}": "a number that float32 can hold",
        f"corpus = 0x{'f' * 5000}": "corpus is a number of thousands of digits in the TOML file",
        f"seeds = [0x{'f' * 5000}]": "study.toml",
        "learning_rate = 1e999": "learning_rate is inf",
        "width = 1979-05-27": "width is datetime.date(1979, 5, 27) in the TOML file",
    }.items():
        (tmp_path / "study.toml").write_text(text)
        assert expected in refusal("grid", ["--config=study.toml"], capsys)
    assert os.listdir(tmp_path) == ["study.toml"]


# Words that may stand on any command line, and some that never may.
FLAGS = sorted({
    *map(flags.flag, flags.config_fields()), "--depths", "--inits", "--seeds", "--preset", "--out", "--config", "--plan",
    "--status", "--figures", "--verify", "--fresh", "--keep-epochs", "--interventions", "--clamp-strengths",
    "--contraction-factors", "--series", "--model", "--revisions", "--text", "--token-ids", "--tokens", "--cache",
    "--offline", "--to", "--group", "--seed", "--help", "-h", "--dep", "--", "-", "--no-such",
})  # fmt: skip
VALUES = [
    "", "0", "1", "2", "4", "-4", "4,6", "4,,6", "4,4", "1e3", "0.5", "-0.5", "nan", "inf", "-inf", "1e400", BIG, HUGE,
    "true", "false", "quick", "laptop", "paper", "builtin", "independent", "qk_identical,independent", "none", "all",
    "freeze_q", "k_spectrum_clamp@0.5", "x.py:y", "ends", "float32", "bfloat16", ".", "..", "/", "out", "out/deeper",
    "/dev/null", "~", "~nobody-of-this-name", "a\0b", "\udcff", "\x1b[2J", "log:3", "1..9", "step1", "main", "²", "١",
    "pythia-70m", "gpt2-small,pythia-14m", "owner/name", "depth4-independent-none", "a" * 300, "=", ",", "@", ":", "%s", "{}",
]  # fmt: skip
WORDS = st.one_of(
    st.sampled_from(FLAGS),
    st.sampled_from(VALUES),
    st.builds("{}={}".format, st.sampled_from(FLAGS), st.sampled_from(VALUES)),
    st.text(max_size=8),
)


class Reached(Exception):
    """The arguments were good: what would read a corpus, train or ask a hub is not begun."""


@pytest.fixture
def arguments_alone(tmp_path, monkeypatch):
    """Every command ends with `Reached` after its arguments; the working folder is empty."""
    from qkgeom_jax import corpus, series_study, study
    from qkgeom_jax.corpus import builtin
    from qkgeom_jax.pretrained import export  # now, or it would keep what stands for load_corpus below

    def reached(*_, **__):
        raise Reached

    monkeypatch.setattr(study, "run", reached)
    monkeypatch.setattr(corpus, "load_corpus", reached)
    monkeypatch.setattr(export, "load_corpus", reached)
    texts = corpus.Texts({"validation": b"to be or not to be"})
    monkeypatch.setattr(builtin, "builtin_source", lambda: corpus.Source("builtin", lambda: texts))
    monkeypatch.setattr(series_study, "prepare", reached)
    monkeypatch.setattr(series_study, "print_plan", reached)
    monkeypatch.setattr(series_study.SeriesStudy, "open", reached)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def end_of(command, words):
    """The exit status, or "reached", and what was said; whatever else is raised is a traceback for the user."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            return COMMANDS[command](words), out.getvalue(), err.getvalue()
        except SystemExit as stop:
            return stop.code, out.getvalue(), err.getvalue()
        except Reached:
            return "reached", out.getvalue(), err.getvalue()


def check(command, words, ends):
    status, out, err = end_of(command, words)
    ends.add(status)
    if status == 0:
        assert out.startswith("usage: "), words
    elif status == 2:
        assert err.count("\n") == 1 and err[:-1].isprintable() and out == "", words
    else:
        assert status == "reached", words
    assert os.listdir() == [], words


def fuzz(command, examples, ends):
    @settings(max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(WORDS, max_size=6))
    def any_words(words):
        # The words of an export that could be done stand first, or hardly any would get beyond the parser.
        check(command, ["out", "--to=to", *words] if command == "export" else words, ends)

    any_words()


@pytest.mark.parametrize("command", COMMANDS)
def test_no_words_lead_to_a_traceback(command, arguments_alone):
    ends = set()
    fuzz(command, 150, ends)
    assert ends >= {0, 2} and ("reached" in ends or command == "export")


@pytest.mark.faults
@pytest.mark.parametrize("command", COMMANDS)
def test_no_words_lead_to_a_traceback_in_many_tries(command, arguments_alone):
    fuzz(command, 5000, set())


def check_pairs(command, pairs):
    """One flag at a time gets further than many."""
    ends = set()
    for flag, value in pairs:
        check(command, [*(["out", "--to=to"] if command == "export" else []), f"{flag}={value}"], ends)
    assert 2 in ends


@pytest.mark.parametrize("command", COMMANDS)
def test_many_flags_with_many_values(command, arguments_alone):
    check_pairs(command, list(itertools.product(FLAGS, VALUES))[::7])


@pytest.mark.faults
@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_with_every_value(command, arguments_alone):
    check_pairs(command, itertools.product(FLAGS, VALUES))


def test_the_lists_above_know_every_flag():
    made = (cli._make_parser("grid.py", ""), cli._make_parser("interventions.py", ""))
    known = {flag for parser in made for action in parser._actions for flag in action.option_strings}
    assert known <= {*FLAGS, "--help", "-h"} and set(PARTS) and set(CATALOGUE) >= {"pythia-70m", "gpt2-small"}
