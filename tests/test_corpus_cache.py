"""The token cache: what is in it is right, or it is made again."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import qkgeom_jax
from qkgeom_jax.config import CorpusConfig
from qkgeom_jax.corpus import cache, load_corpus

TEXT = "the quick brown fox jumps over the lazy dog.\n" * 400


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def load(path, folder, minimum_count=5):
    return load_corpus(CorpusConfig(corpus=str(path), minimum_count=minimum_count), cache_dir=folder)


def equal(a, b):
    same = all(np.array_equal(a.tokens[split], b.tokens[split]) for split in a.tokens)
    return same and (a.vocabulary, a.sha256, a.unknown_share) == (b.vocabulary, b.sha256, b.unknown_share)


def files_in(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_second_load_maps_what_the_first_wrote(text, tmp_path):
    first = load(text, tmp_path / "cache")
    before = {path: path.stat().st_mtime_ns for path in files_in(tmp_path / "cache")}
    second = load(text, tmp_path / "cache")
    assert {path: path.stat().st_mtime_ns for path in files_in(tmp_path / "cache")} == before
    assert equal(first, second) and first.notes == second.notes == ()
    for array in second.tokens.values():
        assert not array.flags.writeable and not array.flags.owndata
    # A plain .npy, for whoever wants to look.
    train = next((tmp_path / "cache").rglob("*.train.npy"))
    assert np.array_equal(np.load(train, allow_pickle=False), first.tokens["train"])


def test_the_key_is_the_content(text, tmp_path):
    folder = tmp_path / "cache"
    first = load(text, folder)
    copy = tmp_path / "copy.txt"
    copy.write_text(TEXT)
    count = len(files_in(folder))
    assert equal(load(copy, folder), first) and len(files_in(folder)) == count
    assert load(text, folder, minimum_count=500).vocabulary != first.vocabulary
    stamp = copy.stat()
    copy.write_text(TEXT.replace("quick", "thick"))
    os.utime(copy, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    changed = load(copy, folder)
    assert changed.sha256 != first.sha256
    assert not np.array_equal(changed.tokens["train"], first.tokens["train"])


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "zero", "delete", "folder", "other"])
def test_damage_is_noticed_and_mended(text, tmp_path, damage):
    folder = tmp_path / "cache"
    fresh = load(text, folder)
    whole = files_in(folder)
    assert len(whole) == 4
    for path, data in whole.items():
        path.unlink()
        if damage == "folder":
            path.mkdir()
            (path / "x").touch()
        elif damage != "delete":
            middle = len(data) // 2
            flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            path.write_bytes({
                "flip": flipped, "truncate": data[:middle], "empty": b"", "zero": bytes(len(data)),
                "other": b'{"digest": [], "record": 1}',
            }[damage])  # fmt: skip
        again = load(text, folder)
        assert equal(again, fresh)
        if damage == "folder":
            assert "the text was encoded in memory" in again.notes[0]
            (path / "x").unlink(), path.rmdir(), path.write_bytes(data)
        else:
            assert again.notes == () and files_in(folder) == whole


def test_a_header_is_compared_never_parsed(text, tmp_path):
    folder = tmp_path / "cache"
    fresh = load(text, folder)
    path = next(folder.rglob("*.train.npy"))
    good = path.read_bytes()
    size = str(fresh.characters["train"]).encode()
    for bad in (good.replace(b"'|u1'", b"'|O' "), good.replace(size, b"9" * len(size)), good.replace(b"|u1", b"<u2")):
        assert bad != good
        path.write_bytes(bad)
        assert equal(load(text, folder), fresh) and path.read_bytes() == good


@pytest.mark.parametrize("place", ["file", "text.txt/below"])
def test_without_a_usable_folder_the_text_is_encoded_in_memory(text, tmp_path, place):
    (tmp_path / "file").touch()
    corpus = load(text, tmp_path / place)
    assert equal(corpus, load(text, tmp_path / "cache"))
    assert "the text was encoded in memory" in corpus.notes[0] and place in corpus.notes[0]
    assert not any(array.flags.writeable for array in corpus.tokens.values())


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can take another uid")
def test_a_folder_that_may_not_be_written():
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        text = Path(name, "text.txt")
        text.write_text(TEXT)
        os.seteuid(65534)
        try:
            corpus = load(text, Path(name, "cache"))
        finally:
            os.seteuid(0)
        assert "(Permission denied): the text was encoded in memory" in corpus.notes[0]
        assert not Path(name, "cache").exists()


def test_a_full_disk_leaves_nothing_half_written(text, tmp_path):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        corpus = load(text, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in corpus.notes[0]
    # Whole files may stand; a temporary one, or a record that names missing files, may not.
    assert {path.suffix for path in files_in(tmp_path / "cache")} <= {".npy"}
    assert equal(load(text, tmp_path / "cache"), corpus)


def test_a_killed_process_leaves_nothing_for_good(text, tmp_path):
    folder = tmp_path / "cache"
    load(text, folder)
    array = next(folder.rglob("*.train.npy"))
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as alive:
        name = cache._temporary_prefix(array).replace(str(os.getpid()), "{}") + "x.tmp"
        old, used = (array.with_name(name.format(pid)) for pid in (ended.pid, alive.pid))
        old.write_text("x"), used.write_text("x")
        array.unlink()
        load(text, folder)
        assert not old.exists() and used.exists()
        alive.communicate(b"\n")


def test_processes_at_once(text, tmp_path):
    program = (
        "import sys\nfrom qkgeom_jax.corpus import load_corpus\nfrom qkgeom_jax.config import CorpusConfig\n"
        "c = load_corpus(CorpusConfig(corpus=sys.argv[1]), cache_dir=sys.argv[2])\n"
        "print(c.sha256, int(c.tokens['train'].sum()), c.notes)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(qkgeom_jax.__file__).parents[1])}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, text, tmp_path / "cache"], env=environment, stdout=subprocess.PIPE
        )
        for _ in range(4)
    ]
    said = {process.communicate(timeout=60)[0] for process in started}
    corpus = load(text, tmp_path / "cache")
    assert said == {f"{corpus.sha256} {int(corpus.tokens['train'].sum())} ()\n".encode()}
    assert len(files_in(tmp_path / "cache")) == 4


def test_the_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_folder() == tmp_path / "qkgeom_jax"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.default_folder() == tmp_path / ".cache" / "qkgeom_jax"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a uid without a home
    assert cache.default_folder() is None


def test_no_folder_at_all(monkeypatch, text, tmp_path):
    monkeypatch.setattr("qkgeom_jax.corpus.default_folder", lambda: None)
    corpus = load_corpus(CorpusConfig(corpus=str(text)))
    assert corpus.notes == ("no cache folder: the text was encoded in memory",)
    assert equal(corpus, load(text, tmp_path))
