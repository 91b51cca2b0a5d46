"""WikiText: the builder, the prepared folder, zips and raw files by hand, and a download that goes wrong."""

import contextlib
import dataclasses
import hashlib
import http.server
import io
import socket
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from qkgeom_jax.config import CorpusConfig
from qkgeom_jax.corpus import CorpusError, load_corpus, wikitext
from qkgeom_jax.corpus.download import download
from qkgeom_jax.corpus.wikitext import ARCHIVES, wikitext_source

SHARED = Path(__file__).parents[2] / "shared" / "corpus"
RAW = {
    "train": b" \n = Title = \n \n The first @-@ line , caf\xc3\xa9 . \n" * 3000 + b"\r no end",
    "validation": b"\n\n" + "žluťoučký 😀 \n".encode() * 500,
    "test": b"x" * 200_000,
}
NAMES = {"train": "wiki.train.raw", "validation": "wiki.valid.raw", "test": "wiki.test.raw"}
SUMS = {split: hashlib.sha256(text).hexdigest() for split, text in RAW.items()}


def raw_folder(folder, splits=RAW):
    folder.mkdir(parents=True)
    for split in splits:
        (folder / NAMES[split]).write_bytes(RAW[split])
    return folder


def zipped(splits=RAW, extra=(), folder="wikitext-2-raw", compression=zipfile.ZIP_DEFLATED):
    """A zip of the raw files, and of whatever (name, bytes) else."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compression) as file:
        for split in splits:
            file.writestr(f"{folder}/{NAMES[split]}", RAW[split])
        for name, text in extra:
            file.writestr(name, text)
    return data.getvalue()


def archive(data, url="http://127.0.0.1:9/wikitext-2-raw-v1.zip"):
    """Pins for `data`."""
    return dataclasses.replace(
        ARCHIVES["wikitext2"], url=url, size=len(data), sha256=hashlib.sha256(data).hexdigest()
    )  # fmt: skip


def load(data_dir, folder, name="wikitext2"):
    return load_corpus(CorpusConfig(corpus=name, data_dir=str(data_dir)), cache_dir=folder)


@contextlib.contextmanager
def no_network():
    def refuse(*_):
        raise AssertionError("the network was asked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", refuse)
        patch.setattr(socket.socket, "connect", refuse)
        yield


def leftovers(folder):
    """Whatever is neither a prepared folder nor a file of the token cache."""
    return [path for path in folder.rglob("*") if path.name.endswith((".tmp", ".zip")) or "incomplete" in path.name]


@pytest.mark.parametrize("nested", [False, True])
def test_raw_files_come_back_byte_for_byte(tmp_path, nested, capfd):
    raw_folder(tmp_path / "given" / "wikitext-2-raw" if nested else tmp_path / "given")
    with no_network():
        corpus = load(tmp_path / "given", tmp_path / "cache")
        texts = wikitext_source("wikitext2", str(tmp_path / "given"), tmp_path / "cache").read()
    assert texts.splits == RAW
    assert corpus.split_sha256 == SUMS
    assert corpus.notes[:2] == (
        "'wiki.valid.raw' differs from the published validation split",
        "'wiki.test.raw' differs from the published test split",
    )
    assert not leftovers(tmp_path / "cache")
    assert capfd.readouterr() == ("", "")
    assert "tensorflow" not in sys.modules


def test_the_published_files_go_through_the_builder(tmp_path):
    if not (SHARED / "wiki.valid.raw").exists():
        pytest.skip(f"{SHARED} is missing")
    valid, test = ((SHARED / name).read_bytes() for name in ("wiki.valid.raw", "wiki.test.raw"))
    for name, data in (("wiki.train.raw", valid), ("wiki.valid.raw", valid), ("wiki.test.raw", test)):
        (tmp_path / name).write_bytes(data)
    corpus = load(tmp_path, tmp_path / "cache")
    texts = wikitext_source("wikitext2", str(tmp_path), tmp_path / "cache").read()
    assert texts.splits == {"train": valid, "validation": valid, "test": test}
    assert corpus.characters == {"train": 1_144_748, "validation": 1_144_748, "test": 1_288_556}
    assert corpus.notes == ()


def test_splits_that_are_not_given_are_not_built(tmp_path):
    corpus = load(raw_folder(tmp_path / "given", ["train", "validation"]), tmp_path / "cache")
    assert sorted(corpus.tokens) == ["train", "validation"]
    for missing, name in (("train", "wiki.train.raw"), ("validation", "wiki.valid.raw")):
        folder = raw_folder(tmp_path / missing, [split for split in RAW if split != missing])
        with pytest.raises(CorpusError, match=f"has no {name}; to give it by hand: --data-dir"):
            load(folder, tmp_path / "cache")


def test_prepared_data_load_without_the_network(tmp_path):
    """Neither with the tokens in the cache, nor with the prepared folder alone."""
    data = zipped()
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "wikitext-2-raw-v1.zip").write_bytes(data)
    pins = archive(data)
    first = wikitext_source("wikitext2", str(tmp_path / "given"), tmp_path / "cache", archive=pins).read()
    with no_network():
        assert wikitext_source("wikitext2", None, tmp_path / "cache", archive=pins).read() == first
    assert first.splits == RAW and first.notes == ()
    with pytest.MonkeyPatch.context() as patch, no_network():
        patch.setitem(wikitext.ARCHIVES, "wikitext2", pins)
        corpus = load_corpus(CorpusConfig(corpus="wikitext2"), cache_dir=tmp_path / "cache")
        patch.setattr(wikitext, "_prepared", None)
        again = load_corpus(CorpusConfig(corpus="wikitext2"), cache_dir=tmp_path / "cache")
    assert corpus.split_sha256 == again.split_sha256 == SUMS


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "zero"])
def test_a_damaged_prepared_folder_is_built_again(tmp_path, damage):
    given = raw_folder(tmp_path / "given")

    def read():
        return wikitext_source("wikitext2", str(given), tmp_path / "cache").read().splits

    assert read() == RAW
    for path in sorted((tmp_path / "cache" / "tfds").rglob("*")):
        if not path.is_file() or path.name == "LICENSE":
            continue
        data = path.read_bytes()
        at = len(data) // 3
        path.unlink()
        if damage != "delete":
            path.write_bytes({
                "flip": data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :],
                "truncate": data[:at],
                "zero": bytes(len(data)),
            }[damage])  # fmt: skip
        assert read() == RAW
    assert not leftovers(tmp_path / "cache") and len(list((tmp_path / "cache" / "tfds").iterdir())) == 1


def test_without_a_usable_cache_folder(tmp_path):
    (tmp_path / "cache").touch()
    corpus = load(raw_folder(tmp_path / "given"), tmp_path / "cache")
    assert corpus.split_sha256 == SUMS
    assert "the text was encoded in memory" in corpus.notes[2]


@pytest.mark.slow
def test_a_killed_build_is_never_used(tmp_path):
    """Killed in the middle of preparing: the next process starts afresh and clears up."""
    given = raw_folder(tmp_path / "given")
    program = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from qkgeom_jax.corpus import wikitext_builder\n"
        "from qkgeom_jax.corpus.wikitext import wikitext_source\n"
        "builder = wikitext_builder.Wikitext\n"
        "whole = builder._generate_examples\n"
        "def half(self, split):\n"
        "    for number, record in whole(self, split):\n"
        "        yield number, record\n"
        "        if split == 'validation': os.kill(os.getpid(), 9)\n"
        "builder._generate_examples = half\n"
        "wikitext_source('wikitext2', sys.argv[2], __import__('pathlib').Path(sys.argv[3])).read()\n"
    )
    root, cache = Path(__file__).parents[1], tmp_path / "cache"
    done = subprocess.run([sys.executable, "-c", program, root, given, cache], timeout=60)
    assert done.returncode == -9 and leftovers(cache)
    assert load(given, cache).split_sha256 == SUMS
    assert not leftovers(cache)


@pytest.mark.parametrize(
    ("splits", "extra", "message"),
    [
        (["train", "validation"], [], "has 0 members wikitext-2-raw/wiki.test.raw, expected one"),
        (RAW, [("wikitext-2-raw/wiki.train.raw", b"x")], "has 2 members wikitext-2-raw/wiki.train.raw"),
        ([], [(f"../{name}", b"x") for name in NAMES.values()], "has 0 members"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_zips_with_other_members(tmp_path, splits, extra, message):
    data = zipped(splits, extra)
    (tmp_path / "file.zip").write_bytes(data)
    with pytest.raises(CorpusError, match=message):
        wikitext_source("wikitext2", str(tmp_path / "file.zip"), tmp_path / "cache", archive=archive(data)).read()
    assert not list((tmp_path / "cache" / "tfds").iterdir())


def patched(data, member, offset, value):
    """The zip with bytes of a member's central directory entry replaced."""
    name = f"wikitext-2-raw/{member}".encode()
    entry = data.rindex(name) - 46
    assert data[entry : entry + 4] == b"PK\x01\x02"
    return data[: entry + offset] + value + data[entry + offset + len(value) :]


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (24, (2**31).to_bytes(4, "little"), "claims 2147483648 bytes for wiki.train.raw: refused"),
        (24, (10).to_bytes(4, "little"), "no readable zip .Bad CRC-32"),
        (8, b"\x01\x00", "could not be prepared in .*encrypted"),
        (10, b"\x63\x00", "no readable zip .That compression method is not supported"),
        (16, b"abcd", "no readable zip .Bad CRC-32"),
        (42, (2**31).to_bytes(4, "little"), "no readable zip .Truncated file header"),
    ],
)
def test_zips_that_lie(tmp_path, offset, value, message):
    data = patched(zipped(), "wiki.train.raw", offset, value)
    (tmp_path / "file.zip").write_bytes(data)
    with pytest.raises(CorpusError, match=message) as error:
        wikitext_source("wikitext2", str(tmp_path / "file.zip"), tmp_path / "cache", archive=archive(data)).read()
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache" / "tfds").iterdir())


def test_a_bomb_stops_at_what_it_claims(tmp_path):
    """A member that unpacks to far more than its header says is cut there and then fails its checksum."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("wikitext-2-raw/wiki.train.raw", bytes(1 << 22))
        for split in ("validation", "test"):
            file.writestr(f"wikitext-2-raw/{NAMES[split]}", RAW[split])
    bomb = patched(data.getvalue(), "wiki.train.raw", 24, (1000).to_bytes(4, "little"))
    (tmp_path / "file.zip").write_bytes(bomb)
    with pytest.raises(CorpusError, match="no readable zip .Bad CRC-32"):
        wikitext_source("wikitext2", str(tmp_path / "file.zip"), tmp_path / "cache", archive=archive(bomb)).read()


def test_members_that_would_leave_the_folder_are_left_alone(tmp_path):
    link = zipfile.ZipInfo("wikitext-2-raw/link")
    link.external_attr = 0o120777 << 16
    extra = [("../../evil", b"x"), ("/tmp/qkgeom-evil", b"x"), (link, b"/etc/passwd")]
    data = zipped(extra=extra)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file.zip").write_bytes(data)
    source = wikitext_source("wikitext2", str(tmp_path / "a" / "file.zip"), tmp_path / "a" / "c", archive=archive(data))
    assert source.read().splits == RAW
    assert not [path for path in tmp_path.rglob("*") if path.name in ("evil", "link") or path.is_symlink()]
    assert not Path("/tmp/qkgeom-evil").exists()


def test_data_dirs_that_hold_nothing_usable(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "none.zip").touch()
    (tmp_path / "other.zip").write_bytes(zipped())
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    raw_folder(tmp_path / "hole")
    (tmp_path / "hole" / "wiki.test.raw").write_bytes(b"")
    for name, message in (
        ("empty", "has neither wikitext-2-raw-v1.zip nor wiki.train.raw"),
        ("missing", "cannot be read: No such file"),
        ("loop", "cannot be read: Too many levels"),
        ("none.zip", "is empty"),
        ("hole", "wiki.test.raw' is empty"),
        ("other.zip", "is not the published wikitext-2-raw-v1.zip: it has .* bytes with sha256 .*, expected 4721645 "
                      f"bytes with sha256 {ARCHIVES['wikitext2'].sha256}"),
    ):  # fmt: skip
        with pytest.raises(CorpusError, match=message) as error:
            load(tmp_path / name, tmp_path / "cache")
        assert "to give it by hand: --data-dir" in str(error.value)
    assert not (tmp_path / "cache").exists()


def test_raw_files_are_checked_like_any_text(tmp_path):
    given = raw_folder(tmp_path / "given")
    (given / "wiki.valid.raw").write_bytes(b"\xef\xbb\xbfok\r\n")
    assert "line ends CR LF were read as LF" in load(given, tmp_path / "cache").notes[-3]
    (given / "wiki.valid.raw").write_bytes(b"ab\xff")
    with pytest.raises(CorpusError, match="not UTF-8: byte 0xff at byte offset 2"):
        load(given, tmp_path / "cache")


GOOD = zipped()


class Handler(http.server.BaseHTTPRequestHandler):
    """A server with every fault that a mirror has had."""

    agents: list = []

    def do_GET(self):
        self.agents.append(self.headers["User-Agent"])
        kind = self.path.split("/")[1]
        if kind == "silent":
            self.server.released.wait(20)
            return
        if kind == "missing":
            return self.send_error(404)
        if kind == "moved":
            self.send_response(302)
            self.send_header("Location", self.path.replace("moved", "good"))
            self.end_headers()
            return None
        page = b"<!DOCTYPE html><html>Please log in</html>"
        body = {
            "html": page, "wrong": GOOD[:-1] + b"!", "short": GOOD[:-9], "long": GOOD * 3, "empty": b"",
        }.get(kind, GOOD)  # fmt: skip
        self.send_response(200)
        if kind != "stream":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body[: len(body) // 2] if kind in ("cut", "stall") else body)
            if kind == "stall":
                self.wfile.flush()
                self.server.released.wait(20)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.released = threading.Event()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.released.set()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("kind", ["good", "moved", "stream"])
def test_a_download_that_works(tmp_path, server, kind):
    said = []
    pins = archive(GOOD, f"{server}/{kind}/wikitext-2-raw-v1.zip")
    source = wikitext_source("wikitext2", None, tmp_path, archive=pins, progress=said.append)
    assert source.read().splits == RAW
    assert not leftovers(tmp_path)
    assert "urllib" not in Handler.agents[-1]
    with no_network():
        assert source.read().splits == RAW


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "answered 404 .Not Found."),
        ("html", "sent a web page, not the file"),
        ("wrong", f"sent {len(GOOD)} bytes with sha256 .{{64}}; expected {len(GOOD)} bytes with sha256 .{{64}}"),
        ("short", f"sent {len(GOOD) - 9} bytes"),
        ("cut", f"sent {len(GOOD) // 2} bytes with sha256"),
        ("long", "sent at least [0-9]* bytes"),
        ("empty", "sent 0 bytes with sha256 e3b0c4"),
        ("silent", "sent nothing for 0.5 seconds"),
        ("stall", "sent nothing for 0.5 seconds"),
    ],
)
def test_a_download_that_fails(tmp_path, server, kind, message):
    pins = archive(GOOD, f"{server}/{kind}/wikitext-2-raw-v1.zip")
    with pytest.raises(CorpusError, match=message) as error:
        wikitext_source("wikitext2", None, tmp_path, archive=pins, timeout=0.5).read()
    text = str(error.value)
    assert text.startswith("corpus wikitext2: http") and "--data-dir with wikitext-2-raw-v1.zip" in text
    assert "\n" not in text
    assert not list((tmp_path / "tfds").iterdir())


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/a.zip", "http://[::1/a.zip", "nonsense", "ftp://127.0.0.1:9/a"])
def test_no_server(tmp_path, url):
    with pytest.raises(CorpusError, match="cannot be reached|could not be fetched"):
        download(url, tmp_path / "file", size=1, sha256="", timeout=2)
    assert not list(tmp_path.iterdir())


def test_a_name_that_never_resolves_is_given_up(tmp_path, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait(20) and [])
    with pytest.raises(CorpusError, match="sent nothing for 0.2 seconds"):
        download("http://mirror.example/a.zip", tmp_path / "file", size=1, sha256="", timeout=0.2)
    release.set()


def test_a_raw_file_that_changes_while_it_is_read(tmp_path):
    given = raw_folder(tmp_path / "given")
    source = wikitext_source("wikitext2", str(given), tmp_path / "cache")
    (given / "wiki.valid.raw").write_bytes(b"something else")
    with pytest.raises(CorpusError, match="it changed while it was read"):
        source.read()
    assert not list((tmp_path / "cache" / "tfds").iterdir())


def test_the_pins():
    assert ARCHIVES["wikitext103"].size == 191_984_949
    assert ARCHIVES["wikitext103"].file == "wikitext-103-raw-v1.zip"
    assert all(len(pins.sha256) == 64 and pins.url.startswith("https://") for pins in ARCHIVES.values())
    notes = SHARED / "NOTES.md"
    if notes.exists():
        text = notes.read_text(encoding="utf-8")
        assert all(published in text for published in wikitext._PUBLISHED.values())
