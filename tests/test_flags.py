import argparse

import pytest

from qkgeom_jax import flags
from qkgeom_jax.cli import _make_parser, grid
from qkgeom_jax.config import INITIALIZATIONS, PRESETS, Config, from_dict, override


def refused(argv, capsys):
    """The one line that a command prints when it refuses its arguments."""
    with pytest.raises(SystemExit) as stop:
        grid(argv)
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.out == "" and captured.err.count("\n") == 1
    return captured.err


WRONG = {
    "--depths=0": "whole numbers of at least 1",
    "--depths=-4": "whole numbers of at least 1",
    "--depths -4": "whole numbers of at least 1",
    "--depths=4,,8": "empty entry",
    "--depths=4,4": "names a value twice",
    "--depths=four": "not a whole number",
    "--depths=１": "not a whole number",
    "--depths": "expected one argument",
    "--depths=4 --depths=6": "--depths is given twice",
    "--depth=4": "--depth is no flag; did you mean --depths?",
    "--zzz=1": "--zzz is no flag; see --help",
    "4": "'4' is no argument",
    "--inits=independant": "did you mean independent?",
    "--inits=xavier": "allowed: qk_identical, disjoint_support, independent",
    "--seeds=": "empty entry",
    "--seeds=-1": "at least 0",
    "--seeds=1.5": "not a whole number",
    "--seeds=99999999999": "whole numbers from 0 to 2147483647",
    "--preset=laptopp": "did you mean laptop?",
    "--learning-rate=0": "learning_rate is 0.0",
    "--learning-rate=-1": "learning_rate is -1.0",
    "--learning-rate=nan": "not a finite number",
    "--learning-rate=inf": "not a finite number",
    "--learning-rate=1_0": "not a finite number",
    "--learning-rate=1e-5": "final_learning_rate is 0.0001; allowed: a finite number of at least 0",
    "--weight-decay=-0.1": "weight_decay is -0.1",
    "--beta-2=1": "below 1",
    "--gradient-clip=0": "gradient_clip is 0.0",
    "--width=10 --heads=3": "heads is 3; allowed: a divisor of the width, 10",
    "--width=0": "width is 0",
    "--width=9 --heads=1": "an even number with init disjoint_support",
    "--context=1": "context is 1",
    "--batch=0": "batch is 0",
    "--epochs=0": "epochs is 0",
    "--steps-per-epoch=1e3": "not a whole number",
    "--compute-dtype=float16": "allowed: float32, bfloat16",
    "--rematerialise=yes": "allowed: true, false",
    "--minimum-count=0": "minimum_count is 0",
    "--plan --status": "not allowed with",
    "--config=/no/such.toml": "No such file",
    "--corpus=": "corpus is ''",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_argument_is_refused_in_one_line(line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refused(line.split(), capsys)
    expected = WRONG[line]
    if line == "--learning-rate=1e-5":
        expected = "final_learning_rate is 0.0001; allowed: at most the learning rate, 1e-05"
    assert message.startswith("grid.py: ") and expected in message
    assert not list(tmp_path.iterdir()), "nothing is written"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("width = 'wide'", "width is 'wide' in the TOML file"),
        ("width = true", "width is True"),
        ("widht = 3", "widht is no key; did you mean width?"),
        ("depths = [4, 4]", "names a value twice"),
        ("preset = 'huge'", "allowed: quick, laptop, paper"),
        ("seeds = []", "empty entry"),
        ("width =", "is no TOML file"),
        ("learning_rate = nan", "learning_rate is nan"),
    ],
)
def test_a_wrong_toml_file_is_refused(text, expected, capsys, tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(text)
    assert expected in refused([f"--config={path}"], capsys)


def test_a_toml_file_that_is_not_utf_8_is_refused(capsys, tmp_path):
    path = tmp_path / "study.toml"
    path.write_bytes(b"width = 3 # \xff")
    assert "is no TOML file" in refused([f"--config={path}"], capsys)


def test_flags_win_over_toml_and_toml_over_the_preset(tmp_path):
    resolved = flags.resolve("laptop", {"width": 192, "heads": 3, "learning_rate": 1}, {"width": 64, "heads": 1})
    assert (resolved.model.width, resolved.model.heads, resolved.model.context) == (64, 1, 128)
    assert resolved.optimizer.learning_rate == 1


def test_every_number_of_the_configuration_has_a_flag():
    given = {action.dest for action in _make_parser("grid.py", "")._actions}
    missing = set(flags.config_fields()) - given
    assert not missing and {"width", "heads", "context", "batch", "epochs", "weight_decay", "beta_2", "data_dir"} <= given


def test_help_names_every_preset_and_initialisation(capsys):
    with pytest.raises(SystemExit) as stop:
        grid(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and all(name in text for name in (*PRESETS, *INITIALIZATIONS))


def test_a_configuration_survives_its_dictionary():
    config = override(PRESETS["laptop"], depth=6, init="qk_identical", seeds=(1, 2), decay_steps=7)
    assert from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="no field"):
        override(config, withd=3)


def test_derived_values():
    config = override(Config(), epochs=3, steps_per_epoch=50, chunk=30)
    assert config.training.steps == 150 and config.training.chunk_steps == 25
    assert config.warmup_steps == 15 and config.decay_steps == 150
    assert override(config, steps_per_epoch=7, chunk=5).training.chunk_steps == 1
    assert override(config, warmup_steps=0).warmup_steps == 0
    assert config.name == "depth4-independent-none"


@pytest.mark.parametrize("text", ["", "-", "--", "4x", "0x4", "+4", " 4", "٤", "1" * 19])
def test_whole_takes_plain_digits_only(text):
    with pytest.raises(argparse.ArgumentTypeError):
        flags.whole(text)
