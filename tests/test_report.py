"""report.py: one call makes everything, the same bytes each time, from any part of a study."""

import errno
import os
import re
import shutil

import pytest
from synthetic_study import write_study

from qkgeom_jax import figures, report, results

TABLES = ("table3", "table4", "table4_signs", "table4_slopes", "figure3")
FILES = {
    "runs.csv", "losses.csv", "metrics.csv", "report.md", "tables/trajectories.csv",
    *(f"tables/{name}.{kind}" for name in TABLES for kind in ("csv", "md")),
    *(f"figures/figure{number}.{kind}" for number in (1, 2, 3) for kind in ("png", "pdf")),
}  # fmt: skip


def outputs(out):
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and "groups" not in path.relative_to(out).parts
    }


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are made but not rendered: test_figures.py does that."""
    monkeypatch.setattr(figures, "save", lambda figure, path: None)


def test_everything_is_written_and_equal_groups_give_equal_bytes(tmp_path, monkeypatch):
    first = write_study(tmp_path / "a", depths=(1, 2), seeds=(7, 37), epochs=3)
    assert report.write_all(first) == first / "report.md"
    made = outputs(first)
    assert set(made) == FILES

    second = tmp_path / "b"
    for group in sorted((first / "groups").iterdir(), reverse=True):  # another order on the disk
        shutil.copytree(group, second / "groups" / group.name)
    monkeypatch.setattr(figures, "save", lambda figure, path: None)  # test_figures.py compares their bytes
    report.write_all(second)
    assert outputs(second) == {name: data for name, data in made.items() if not name.startswith("figures/")}

    text = made["report.md"].decode()
    for target in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert target in made
    assert len(re.findall(r"!\[", text)) == 3
    for name in TABLES:
        assert made[f"tables/{name}.md"].decode().strip() in text
    assert "nan" not in text.lower()
    assert str(tmp_path) not in text
    assert len(made["tables/trajectories.csv"].splitlines()) == 1 + 4 * 3 * (1 + 2)


@pytest.mark.parametrize(
    "part",
    [
        {"depths": (1,), "inits": ("independent",), "seeds": (7,), "epochs": 1},
        {"depths": (2,), "inits": ("qk_identical",), "seeds": (7, 9), "epochs": 2},
        {"depths": (8,), "inits": ("disjoint_support",), "seeds": (7,), "epochs": 3},
        {"depths": (1, 2), "seeds": (7,), "epochs": 2, "interventions": ("freeze_q",)},
        {"depths": (1,), "inits": ("independent",), "statuses": {"depth1-independent-none": "failed"}},
        {"depths": ()},
    ],
)
def test_any_part_of_a_study_ends_with_all_files(tmp_path, part, monkeypatch):
    def save(figure, path):
        results.write_bytes(f"{path}.png", b"")
        results.write_bytes(f"{path}.pdf", b"")

    monkeypatch.setattr(figures, "save", save)
    out = tmp_path / "out"
    out.mkdir()
    write_study(out, **part)
    report.write_all(out)
    assert set(outputs(out)) == FILES
    assert "nan" not in (out / "report.md").read_text(encoding="utf-8").lower()


def remarks(out):
    report.write_all(out)
    text = (out / "report.md").read_text(encoding="utf-8")
    return text[text.index("## Remarks") : text.index("## Tables")]


def test_what_was_run_and_honest_remarks(tmp_path, undrawn):
    write_study(
        tmp_path, depths=(1, 2), inits=("independent", "qk_identical"), seeds=(7, 37), epochs=4, steps_per_epoch=40,
        diverged={"depth2-independent-none": {37: 77}},
        statuses={"depth1-qk_identical-none": "partial", "depth2-qk_identical-none": "failed"},
    )  # fmt: skip
    results.write_json(tmp_path / "config.json", {"preset": "paper", "depths": [1, 2]})
    results.write_json(
        tmp_path / "manifest.json",
        {
            "corpus": {"name": "some-text", "sha256": "ab" * 32},
            "versions": {"jax": "0.10.2", "numpy": "2.4.6"},
            "seconds": 12.5,
            "warnings": ["resumed under jax 0.12.0,\nstarted under 0.10.2"],
        },
    )
    text = remarks(tmp_path)
    assert "Too short for the claims**: runs of 160 steps" in text
    assert "preset `paper` is not calibrated" in text
    assert "- Left out, diverged: depth 2, independent, none, seed 37, at step 77." in text
    assert "- Left out, not finished: depth 1, qk_identical, none (partial, 4 of 4 epochs)." in text
    assert "- Left out, not finished: depth 2, qk_identical, none (failed, 4 of 4 epochs)." in text
    assert "- resumed under jax 0.12.0, started under 0.10.2\n" in text
    assert "this study on builtin: losses are not comparable" in text
    whole = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "- Preset: paper\n" in whole and "- Versions: jax 0.10.2, numpy 2.4.6\n" in whole
    assert f"- Corpus: name some-text, sha256 {'ab' * 32}\n" in whole
    assert "4 epochs of 40 steps" in whole and "12.5" not in whole


def test_a_long_study_is_not_called_short(tmp_path, undrawn):
    write_study(tmp_path, depths=(1,), inits=("independent",), epochs=8, steps_per_epoch=125)
    assert "Too short" not in remarks(tmp_path)
    write_study(tmp_path, depths=(2,), inits=("independent",), epochs=9, steps_per_epoch=125)
    assert "their slopes are not comparable" in remarks(tmp_path)


def test_a_missing_folder_is_not_made(tmp_path):
    with pytest.raises(ValueError, match="no folder"):
        report.write_all(tmp_path / "typo")
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize(
    ("content", "message"), [("{", "manifest.json is no JSON file"), ("[1]", "manifest.json holds a list")]
)
def test_a_damaged_manifest_is_named(tmp_path, content, message):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        report.write_all(tmp_path)


def test_a_full_disk_is_not_hidden_and_keeps_the_old_report(tmp_path, undrawn, monkeypatch):
    write_study(tmp_path, depths=(1,), inits=("independent",), epochs=2)
    report.write_all(tmp_path)
    before = outputs(tmp_path)
    sync = os.fsync
    calls = []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        report.write_all(tmp_path)
    assert outputs(tmp_path) == before
