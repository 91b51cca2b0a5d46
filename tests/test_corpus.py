"""Texts that the user names: what is read, what is refused, and how characters become tokens."""

import doctest
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import qkgeom_jax.corpus
from qkgeom_jax.config import CorpusConfig
from qkgeom_jax.corpus import CorpusError, load_corpus, require_windows
from qkgeom_jax.corpus import files, source, vocabulary

TEXT = "the quick brown fox jumps over the lazy dog.\n" * 40


def load(path, folder, minimum_count=5):
    return load_corpus(CorpusConfig(corpus=str(path), minimum_count=minimum_count), cache_dir=folder / "cache")


def decoded(corpus, split):
    return "".join(corpus.vocabulary[token] for token in corpus.tokens[split])


def write(folder, data, name="text.txt"):
    (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder / name


def test_doctests():
    assert doctest.testmod(qkgeom_jax.corpus).failed == 0


def test_a_file_is_cut_at_85_and_90_percent_of_its_characters(tmp_path):
    text = "aé€😀" * 250
    corpus = load(write(tmp_path, text), tmp_path)
    assert corpus.characters == {"train": 850, "validation": 100, "test": 50}
    assert decoded(corpus, "train") == text[:850]
    assert decoded(corpus, "test") == text[850:900]
    assert decoded(corpus, "validation") == text[900:]
    assert corpus.vocabulary == ("<unk>", "a", "é", "€", "😀")
    assert corpus.notes == ()


def test_a_folder_has_a_file_a_split(tmp_path):
    for name, text in (("Train.txt", "ab" * 9), ("my-valid.md", "ba" * 3), ("test.txt", "bbc"), (".train.swp", "x")):
        write(tmp_path, text, name)
    (tmp_path / "old-train").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    corpus = load(tmp_path, tmp_path)
    assert {split: decoded(corpus, split) for split in corpus.tokens} == {
        "train": "ab" * 9, "validation": "ba" * 3, "test": "bb<unk>",
    }  # fmt: skip
    assert corpus.unknown_share == {"train": 0, "validation": 0, "test": 1 / 3}
    assert any("33.3% of the test split" in note for note in corpus.notes)
    (tmp_path / "test.txt").unlink()
    assert sorted(load(tmp_path, tmp_path).tokens) == ["train", "validation"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], r"no file that matches \*train\*"),
        (["train.txt"], r"no file that matches \*valid\*"),
        (["train.txt", "train2.txt", "valid.txt"], r"several files that match \*train\*: 'train.txt', 'train2.txt'"),
        (["train.txt", "valid.txt", "test1", "test2"], r"several files that match \*test\*"),
        (["train-valid.txt"], r"'.*train-valid.txt' matches more than one"),
    ],
)
def test_folders_that_do_not_say_which_file_is_which(tmp_path, names, message):
    (tmp_path / "texts").mkdir()
    for name in names:
        write(tmp_path / "texts", TEXT, name)
    with pytest.raises(CorpusError, match=message):
        load(tmp_path / "texts", tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf", "nothing but a byte order mark"),
        (b"abc\xe9def", "not UTF-8: byte 0xe9 at byte offset 3"),
        (b"ab\xed\xa0\x80", "not UTF-8: byte 0xed at byte offset 2"),
        (b"abc\xf0\x9f\x98", "not UTF-8: byte 0xf0 at byte offset 3"),
        (b"a" * 30 + b"\x80" * 9, "not UTF-8: byte 0x80 at byte offset 30"),
        *((b"a" * n + "é😀".encode() + b"\x92z", f"byte 0x92 at byte offset {n + 6}") for n in range(7)),
        ("text".encode("utf-16"), "byte offset 0 .it begins like UTF-16"),
        (TEXT.encode() + b"\0" + TEXT.encode(), f"NUL byte at byte offset {len(TEXT)}"),
        (b"abcd", "at least 5 times .its most frequent occurs 1 times"),
    ],
)
@pytest.mark.parametrize("chunk", [4, 7, source.CHUNK])
def test_texts_that_are_refused(tmp_path, monkeypatch, data, message, chunk):
    monkeypatch.setattr(source, "CHUNK", chunk)
    with pytest.raises(CorpusError, match=message) as error:
        load(write(tmp_path, data), tmp_path)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "cache").exists()


def test_byte_order_mark_and_line_ends_do_not_change_the_tokens(tmp_path):
    plain = load(write(tmp_path, TEXT), tmp_path)
    assert plain.notes == ()
    for data in (b"\xef\xbb\xbf" + TEXT.encode(), TEXT.replace("\n", "\r\n").encode()):
        corpus = load(write(tmp_path, data, "other.txt"), tmp_path)
        assert corpus.sha256 == plain.sha256
        assert all(np.array_equal(corpus.tokens[split], plain.tokens[split]) for split in plain.tokens)
        assert len(corpus.notes) == 1 and "other.txt" in corpus.notes[0]
    lone = load(write(tmp_path, "a\rb" * 100), tmp_path)
    assert "\r" in lone.vocabulary and lone.notes == ()


def test_a_single_character_is_said(tmp_path):
    corpus = load(write(tmp_path, "a" * 1000), tmp_path)
    assert corpus.vocabulary == ("<unk>", "a")
    assert "one distinct character, 'a'" in corpus.notes[0]


def test_missing_paths_and_near_names(tmp_path):
    names = "builtin, wikitext103, wikitext2, wikipedia-intros"
    for name, near in (("wikitxt103", "wikitext103"), ("Builtin", "builtin"), ("wikipedia", "wikipedia-intros")):
        with pytest.raises(CorpusError, match=f"neither one of {names} nor an existing path; did you mean {near}"):
            load_corpus(CorpusConfig(corpus=name), cache_dir=tmp_path)
    for name in (str(tmp_path / "none.txt"), "a\0b", "x" * 5000):
        with pytest.raises(CorpusError, match="nor an existing path$"):
            load_corpus(CorpusConfig(corpus=name), cache_dir=tmp_path)


def test_data_dir_is_refused_where_it_means_nothing(tmp_path):
    with pytest.raises(CorpusError, match="data_dir is only for wikitext103 and wikitext2"):
        load_corpus(CorpusConfig(corpus="builtin", data_dir=str(tmp_path)), cache_dir=tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_special_files_do_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    for name, message in (
        ("pipe", "no regular file"),
        ("/dev/zero", "no regular file"),
        ("loop", "cannot be read: Too many levels of symbolic links"),
        ("gone", "cannot be read: No such file"),
    ):
        with pytest.raises(CorpusError, match=message):
            load(tmp_path / name, tmp_path)
    (tmp_path / "texts").mkdir()
    write(tmp_path / "texts", TEXT, "valid.txt")
    os.mkfifo(tmp_path / "texts" / "train.txt")
    with pytest.raises(CorpusError, match="train.txt' is no regular file"):
        load(tmp_path / "texts", tmp_path)


def test_a_file_that_claims_ten_gigabytes_is_refused(tmp_path):
    with (tmp_path / "text.txt").open("wb") as file:
        file.truncate(10 << 30)
    with pytest.raises(CorpusError, match="has 10737418240 bytes; at most 4294967296"):
        load(tmp_path / "text.txt", tmp_path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can take another uid")
def test_unreadable_files_under_another_uid():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        write(folder, TEXT, "text.txt").chmod(0o000)
        (folder / "closed").mkdir(mode=0o000)
        os.seteuid(65534)
        try:
            with pytest.raises(CorpusError, match="text.txt' cannot be read: Permission denied"):
                load(folder / "text.txt", folder)
            with pytest.raises(CorpusError, match="closed' cannot be listed: Permission denied"):
                load(folder / "closed", folder)
        finally:
            os.seteuid(0)


def test_windows_need_one_token_more_than_the_context(tmp_path):
    corpus = load(write(tmp_path, "ab" * 50), tmp_path)
    require_windows(corpus, 9)
    with pytest.raises(CorpusError, match="validation split of .* has 10 characters; a window of context 10 needs at "
                                          "least 11"):  # fmt: skip
        require_windows(corpus, 10)
    with pytest.raises(CorpusError, match="train split of .* has 85 characters"):
        require_windows(corpus, 85)


@pytest.mark.parametrize("chunk", [4, 5, 6, 1000])
def test_encoding_agrees_with_a_plain_loop(monkeypatch, chunk):
    monkeypatch.setattr(source, "CHUNK", chunk)
    rng = np.random.default_rng(0)
    alphabet = ["a", "\n", "é", "ß", "€", "한", "😀", "\U0010ffff"]
    train = "".join(rng.choice(alphabet, 90, p=np.arange(1, 9) / 36))
    other = "".join(rng.choice([*alphabet, "z", "Ω"], 60))
    counts = Counter(train)
    for least in (1, 7, 14):
        got = vocabulary.make_vocabulary(train.encode(), least)
        assert got == ("<unk>", *sorted(c for c in counts if counts[c] >= least))
        ids = {character: index for index, character in enumerate(got)}
        tokens = np.concatenate(list(vocabulary.encoded_chunks(other.encode(), got)))
        assert tokens.tolist() == [ids.get(character, 0) for character in other]


@pytest.mark.parametrize(("distinct", "dtype"), [(255, np.uint8), (256, np.uint16), (65535, np.uint16)])
def test_the_smallest_dtype_that_holds_every_id(tmp_path, distinct, dtype):
    text = "".join(chr(0x10000 + i) for i in range(distinct))
    write(tmp_path, text, "train"), write(tmp_path, text[::-1], "valid")
    corpus = load(tmp_path, tmp_path, minimum_count=1)
    assert len(corpus.vocabulary) == distinct + 1
    assert corpus.tokens["train"].dtype == dtype
    assert np.array_equal(corpus.tokens["validation"], np.arange(distinct, 0, -1))


def test_too_many_characters(tmp_path):
    write(tmp_path, "".join(chr(0x10000 + i) for i in range(65536)))
    write(tmp_path, "".join(chr(0x10000 + i) for i in range(65536)), "train"), write(tmp_path, TEXT, "valid")
    with pytest.raises(CorpusError, match="65536 characters .* give a larger --minimum-count"):
        load(tmp_path, tmp_path, minimum_count=1)


def test_byte_offsets_of_characters():
    text = "aé€😀" * 3
    for number in range(len(text) + 1):
        assert files.byte_offset(text.encode(), number) == len(text[:number].encode())
    assert files.count_characters(text.encode()) == len(text)


def test_a_bare_process_in_the_c_locale(tmp_path):
    """Reads UTF-8 all the same, and loads neither jax nor the library that only WikiText needs."""
    path = write(tmp_path, "né €😀 " * 50, "t\u00e9xt.txt")
    program = (
        "import sys\nfrom qkgeom_jax.corpus import load_corpus\nfrom qkgeom_jax.config import CorpusConfig\n"
        "print(load_corpus(CorpusConfig(corpus=sys.argv[1]), cache_dir=sys.argv[2]).sha256)\n"
        "assert not {'jax', 'tensorflow', 'tensorflow_datasets'} & set(sys.modules)"
    )
    root = str(Path(qkgeom_jax.__file__).parents[1])
    settings = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "PYTHONPATH": root, "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program, path, tmp_path / "other"], env=settings, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().strip() == load(path, tmp_path).sha256
