"""The command from end to end through the real reader, offline: a hand-written cache of small random models."""

import sys

import hub_cache
import numpy as np
import pytest
import tiny_models

from qkgeom_jax import results
from qkgeom_jax.cli_checkpoints import checkpoints
from qkgeom_jax.series import CATALOGUE, PAPER_SERIES
from qkgeom_jax.series_results import LAYER_COLUMNS, METRICS_COLUMNS, SERIES_COLUMNS

FAMILIES = {"pythia": tiny_models.gpt_neox, "smollm2": tiny_models.llama, "gpt2": tiny_models.gpt2}
STEPS = {
    "pythia": (0, 1, 2, 4, 512, 1000),
    "smollm2": tuple(240_000 * n for n in range(1, 7)),
    "gpt2": (0, 10, 100, 1000, 20_000, 400_000),
}

pytestmark = pytest.mark.slow  # three architectures compile


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The paper's six series, each with six revisions; two of them with a fault."""
    for name in ("huggingface_hub", "tokenizers"):
        pytest.importorskip(name, reason="the extra `checkpoints` is not installed")
    folder = tmp_path_factory.mktemp("cache")
    for seed, name in enumerate(PAPER_SERIES):
        series = CATALOGUE[name]
        family = FAMILIES[series.family]
        path = tiny_models.walk(family, 6, seed)
        if name == "pythia-160m":
            path[2] = path[5]
        if name == "smollm2-360m":
            path[3] = tiny_models.walk(family, 1, seed=99)[0]
        for step, tensors in zip(STEPS[series.family], path, strict=True):
            words = series.family != "gpt2"  # its tokenizer is another repository's
            files = tiny_models.files(family, tensors, words=words)
            hub_cache.write_revision(folder, series.source, series.pattern.format(step), files)
    hub_cache.write_revision(folder, "openai-community/gpt2", "main", {"tokenizer.json": tiny_models.tokenizer()})
    return folder


@pytest.fixture(scope="module")
def measured(cache, tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # as HF_HUB_OFFLINE=1 at the start
        assert checkpoints(arguments(cache, out)) == 0
    return out


def arguments(cache, out, *more):
    return [f"--cache={cache}", f"--out={out}", "--tokens=256", "--context=32", *more]


def rows(out, name="series.csv"):
    columns = SERIES_COLUMNS if name == "series.csv" else METRICS_COLUMNS
    return [dict(cells) for _, cells in results._read_rows(out / name, columns)]


def test_six_series_of_three_families_give_a_full_table_6(measured):
    table = [dict(cells) for _, cells in results._read_rows(measured / "tables/table6.csv", ["family", "models"])]
    assert [(row["family"], row["models"]) for row in table] == [
        ("Pythia", "3"), ("SmolLM2", "2"), ("GPT-2", "1"), ("All fitted series", "6"),
    ]  # fmt: skip
    assert all(cell != "" for row in table for cell in row.values())
    for kind in ("png", "pdf"):
        assert (measured / f"figures/figure5.{kind}").stat().st_size > 10_000
    assert len(rows(measured)) == 36 and {row["status"] for row in rows(measured)} == {"done"}


def test_every_layer_has_every_metric_that_is_defined(measured):
    found = rows(measured, "metrics.csv")
    assert len(found) == 36 * tiny_models.LAYERS
    for row in found:
        empty = {name for name in LAYER_COLUMNS if row[name] == ""}
        # Columns of W_Q and W_K pair one to one only where there are as many key heads as query heads.
        grouped = {"cosine_similarity", "column_alignment", "column_alignment_signed"}
        assert empty <= (grouped if row["family"] == "smollm2" else set()), (row["series"], empty)
    first = found[0]
    widths = {"pythia": 8, "smollm2": 4, "gpt2": 8}
    for row in found:
        contrast = float(row["participation_ratio_q"]) - float(row["participation_ratio_k"])
        if row["family"] != "smollm2":
            assert float(row["contrast_normalised"]) == pytest.approx(contrast / widths[row["family"]], abs=1e-6)
    assert 1 <= float(first["participation_ratio_q"]) <= 8


def test_commits_and_digests_stand_in_the_results(measured):
    for row in rows(measured):
        assert row["commit"] == hub_cache.commit(CATALOGUE[row["series"]].source, row["revision"])
        assert len(row["weights_sha256"]) == 64
        assert float(row["loss"]) == pytest.approx(np.log(tiny_models.VOCABULARY), rel=0.5)
        assert row["tokens_seen"] == str(int(row["step"]) * CATALOGUE[row["series"]].tokens_per_step)


def test_wrong_revisions_are_found(measured):
    flags = {(row["series"], row["revision"]): row["flags"] for row in rows(measured) if row["flags"]}
    # Random weights predict nothing, which is said of the last revision of each series.
    untrained = {key for key, text in flags.items() if text.startswith("its loss of") and "equal probabilities" in text}
    assert len(untrained) == 6 and {revision for _, revision in untrained} == {"step1000", "step-1440000", "checkpoint-400000"}
    assert set(flags) - untrained == {("pythia-160m", "step2"), ("smollm2-360m", "step-960000")}
    assert flags["pythia-160m", "step2"] == "holds the weights of the last revision, step1000"
    assert "do not follow from their neighbours" in flags["smollm2-360m", "step-960000"]
    table = (measured / "tables/table6.md").read_text()
    assert "step2 (holds the weights of the last revision, step1000)" in table and "step-960000 (weights do not" in table


def test_the_cache_is_read_in_parts_to_the_same_bytes(measured, cache, tmp_path):
    out = tmp_path / "out"
    given = ("--offline", "--series=gpt2-small", "--revisions=checkpoint-100,checkpoint-10")
    assert checkpoints(arguments(cache, out, *given)) == 0
    own = [row for row in rows(measured, "metrics.csv") if row["revision"] in ("checkpoint-10", "checkpoint-100")]
    assert rows(out, "metrics.csv") == own
    assert rows(out)[0]["flags"] == "listed after checkpoint-100"


def resident_megabytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_twenty_revisions_take_no_more_memory_than_five(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_models, "VOCABULARY", 20_000)  # 4 MB a revision
    monkeypatch.setattr(tiny_models, "WIDTH", 48)
    for step, tensors in enumerate(tiny_models.walk(tiny_models.gpt2, 20, 0)):
        folder = tmp_path / "run" / f"step{step}"
        folder.mkdir(parents=True)
        for name, data in tiny_models.files(tiny_models.gpt2, tensors).items():
            (folder / name).write_bytes(data)
    seen = []
    monkeypatch.setattr("qkgeom_jax.command.say", lambda text: seen.append(resident_megabytes()))
    assert checkpoints([f"--model={tmp_path / 'run'}", f"--out={tmp_path / 'out'}", "--tokens=256", "--context=32"]) == 0
    assert seen[18] - seen[4] < 25, seen  # fourteen revisions kept would be 55


def test_a_cut_file_and_a_missing_revision_are_recorded(cache, tmp_path):
    series = CATALOGUE["smollm2-135m"]
    path = tiny_models.walk(tiny_models.llama, 3, 0)
    for step, tensors in enumerate(path):
        files = tiny_models.files(tiny_models.llama, tensors)
        if step == 1:
            files["model.safetensors"] = files["model.safetensors"][:-100]
        hub_cache.write_revision(tmp_path / "cache", series.source, f"step-{step}", files)
    out = tmp_path / "out"
    given = arguments(
        tmp_path / "cache", out, "--offline", "--series=smollm2-135m", "--revisions=step-0,step-1,step-2,step-3"
    )
    assert checkpoints(given) == 1
    found = {row["revision"]: row for row in rows(out)}
    assert {name for name, row in found.items() if row["status"] == "done"} == {"step-0", "step-2"}
    assert "not in the cache" in found["step-3"]["error"]
    assert "model.safetensors" in found["step-1"]["error"] and not list(out.rglob("*.error.txt"))
