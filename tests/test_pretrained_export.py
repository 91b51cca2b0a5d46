"""Epochs of our own training as folders: their metrics are the grid's, and transformers gives their logits."""

import functools
import io
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

import tiny
from qkgeom_jax import cli_export, evaluate, model, pretrained, results
from qkgeom_jax.config import override
from qkgeom_jax.corpus import load_corpus
from qkgeom_jax.group import write_params
from qkgeom_jax.initializers import make_params

ROOT = Path(__file__).parents[1]
GROUP = "depth2-independent-none"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study's folder as a grid leaves it: two epochs kept of two seeds, and its parameters and corpus."""
    home = tmp_path_factory.mktemp("study")
    (home / "text.txt").write_text(tiny.text(), encoding="utf-8")
    config = tiny.config(corpus=str(home / "text.txt"), minimum_count=1)
    corpus = load_corpus(config.corpus, cache_dir=home / "cache")
    config = override(config, vocabulary=len(corpus.vocabulary))
    group = home / "out/groups" / GROUP
    results.write_json(group / "config.json", config.to_dict())
    results.write_json(home / "out/manifest.json", {"corpus": {"sha256": corpus.sha256}})
    stacks = {}
    for epoch in (0, 2):
        keys = jax.random.split(jax.random.key(epoch), 2)
        stacks[epoch] = jax.vmap(functools.partial(make_params, config=config.model))(keys)
        write_params(group / f"params/epoch_{epoch:03d}.npz", stacks[epoch])
    return home / "out", config, corpus, stacks


@pytest.fixture(scope="module")
def exported(study, tmp_path_factory):
    to = tmp_path_factory.mktemp("series")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(to / "cache"))
        assert cli_export.export([str(study[0]), "--seed", "5", "--to", str(to / "a")]) == 0
    return to / "a"


def test_a_folder_a_step_with_probe_and_record(exported, study):
    config = study[1]
    assert sorted(path.name for path in exported.iterdir()) == [
        "export.json",
        "probe-tokens.npy",
        "step-000000",
        "step-000008",
    ]
    assert sorted(path.name for path in (exported / "step-000008").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    record = results.read_json(exported / "export.json")
    assert (record["group"], record["seed"]) == (GROUP, 5)
    assert record["config"] == config.to_dict()


def test_metrics_are_the_grid_s_at_the_same_epoch(exported, study):
    _, config, corpus, stacks = study
    probes = evaluate.make_probes(corpus.tokens["train"], corpus.tokens["validation"], config)
    ids = np.load(exported / "probe-tokens.npy")
    np.testing.assert_array_equal(ids, probes.geometry[:, :-1])
    params = jax.tree.map(lambda x: x[1], stacks[2])
    grid = jax.jit(functools.partial(evaluate.measure, config=config))(params, probes)
    checkpoint = pretrained.open_checkpoint(exported / "step-000008")
    ours = pretrained.measure(checkpoint, ids, spectrum_sequences=config.evaluation.spectrum_sequences)
    for name in results.METRIC_COLUMNS:
        np.testing.assert_allclose(
            [row[name] for row in ours.rows], grid.layers[name], rtol=1e-4, atol=1e-5, err_msg=name
        )
    for name in grid.heads:
        np.testing.assert_allclose(ours.heads[name], grid.heads[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_the_forward_pass_is_the_trainer_s(exported, study):
    _, config, _, stacks = study
    ids = np.load(exported / "probe-tokens.npy")[:3]
    for epoch, name in ((0, "step-000000"), (2, "step-000008")):
        params = jax.tree.map(lambda x: x[1], stacks[epoch])
        with jax.default_matmul_precision("highest"):
            expected, _ = model.apply(params, ids, config.model)
        checkpoint = pretrained.open_checkpoint(exported / name)
        np.testing.assert_allclose(pretrained.apply(checkpoint, ids), expected, atol=1e-5)


def test_the_parameters_of_a_group_open_without_an_export(exported, study, tmp_path):
    out, config, _, _ = study
    group = out / "groups" / GROUP
    direct = pretrained.open_checkpoint(group / "params/epoch_002.npz", seed=5)
    assert direct.weights_sha256() == pretrained.open_checkpoint(exported / "step-000008").weights_sha256()
    newest, first = (
        pretrained.open_checkpoint(group),
        pretrained.open_checkpoint(group / "params/epoch_002.npz", seed=3),
    )
    assert newest.weights_sha256() == first.weights_sha256() != direct.weights_sha256()
    with pytest.raises(pretrained.CheckpointFormatError, match="seeds 3, 5, not 4"):
        pretrained.open_checkpoint(group, seed=4)
    with pytest.raises(pretrained.CheckpointFormatError, match="has no seeds"):
        pretrained.open_checkpoint(exported / "step-000008", seed=5)
    results.write_json(tmp_path / "config.json", config.to_dict())
    array = io.BytesIO()
    np.save(array, np.zeros(3))
    for content in (b"PK", b"", b"PK\x03\x04" + bytes(60), array.getvalue()):
        results.write_bytes(tmp_path / "params/epoch_001.npz", content)
        with pytest.raises(pretrained.CheckpointFormatError, match="epoch_001.npz is no readable npz"):
            pretrained.open_checkpoint(tmp_path)


def test_transformers_loads_it_and_gives_the_same_logits(exported):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch", reason="torch is not installed (extra: reference)")
        transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: reference)")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(exported / "step-000008", dtype=torch.float32)
    ids = np.load(exported / "probe-tokens.npy")
    with torch.no_grad():
        theirs = loaded.eval()(torch.tensor(ids, dtype=torch.long)).logits.numpy()
    ours = pretrained.apply(pretrained.open_checkpoint(exported / "step-000008"), ids)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_the_tokenizer_gives_the_trainer_s_ids(exported, study):
    pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra: checkpoints)")
    corpus = study[2]
    tokenizer = pretrained.open_checkpoint(exported / "step-000008").tokenizer()
    text = tiny.text()
    ids = tokenizer.encode(text[: corpus.characters["train"]], add_special_tokens=False).ids
    np.testing.assert_array_equal(ids, corpus.tokens["train"])
    assert tokenizer.encode("\N{SNOWMAN}").ids == [0]


def test_the_same_export_twice_gives_the_same_bytes_and_another_is_refused(
    exported, study, capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = {path: path.read_bytes() for path in exported.rglob("*") if path.is_file()}
    assert cli_export.export([str(study[0]), "--seed=5", f"--to={exported}", "--epochs=2"]) == 0
    assert before == {path: path.read_bytes() for path in exported.rglob("*") if path.is_file()}
    assert capsys.readouterr().out == f"{exported / 'step-000008'}\n"
    with pytest.raises(SystemExit, match="2"):
        cli_export.export([str(study[0]), "--seed=3", f"--to={exported}"])
    assert "holds the export of another run" in capsys.readouterr().err


def test_a_lost_corpus_costs_the_tokenizer_alone(study, tmp_path, capsys):
    out, config, _, _ = study
    values = config.to_dict()
    values["corpus"]["corpus"] = str(tmp_path / "gone.txt")
    group = tmp_path / "out/groups" / GROUP
    results.write_json(group / "config.json", values)
    results.write_bytes(group / "params/epoch_002.npz", (out / "groups" / GROUP / "params/epoch_002.npz").read_bytes())
    assert cli_export.export([str(tmp_path / "out"), f"--to={tmp_path / 'to'}"]) == 0
    assert "no tokenizer.json and no probe-tokens.npy" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "to").rglob("*") if path.is_file()) == [
        "config.json", "export.json", "model.safetensors",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--seed=4"], "seed is 4; depth2-independent-none has 3, 5"),
        (["--epochs=1"], "epoch 1 of depth2-independent-none was not kept (kept: 0, 2); train with --keep-epochs all"),
        (
            ["--group=depth2-independent-non"],
            "has no group 'depth2-independent-non'; did you mean depth2-independent-none?",
        ),
        (["--epochs=1,,2"], "empty entry"),
        (["--epoch=1"], "--epoch is no flag; did you mean --epochs?"),
    ],
)
def test_bad_arguments_are_answered_in_one_line(study, tmp_path, capsys, words, match):
    with pytest.raises(SystemExit, match="2"):
        cli_export.export([str(study[0]), f"--to={tmp_path / 'to'}", *words])
    error = capsys.readouterr().err
    assert match in error and error.count("\n") == 1
    assert not (tmp_path / "to").exists()


def test_a_folder_without_groups_and_a_place_that_cannot_be_written(study, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli_export.export([str(tmp_path), f"--to={tmp_path / 'to'}"])
    assert "holds no groups of a study" in capsys.readouterr().err
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        cli_export.export([str(study[0]), f"--to={tmp_path / 'file'}"])
    assert "cannot be written" in capsys.readouterr().err


def test_a_diverged_seed_is_refused(study, tmp_path, capsys):
    out, config, _, stacks = study
    group = tmp_path / "out/groups" / GROUP
    results.write_json(group / "config.json", config.to_dict())
    broken = jax.tree.map(lambda x: x.at[1].set(np.nan), stacks[2])
    write_params(group / "params/epoch_002.npz", broken)
    with pytest.raises(SystemExit, match="2"):
        cli_export.export([str(tmp_path / "out"), "--seed=5", f"--to={tmp_path / 'to'}"])
    assert "seed 5 diverged" in capsys.readouterr().err


def test_the_script_runs_from_a_source_tree(study, tmp_path):
    words = [sys.executable, str(ROOT / "experiments/export.py"), str(study[0]), "--group", GROUP, "--seed", "3",
             "--epochs", "0,2", "--to", str(tmp_path / "to")]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
