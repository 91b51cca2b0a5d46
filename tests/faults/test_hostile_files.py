"""Files made to do harm: nothing in them is run, nothing is written elsewhere or allocated for them, one sentence is said."""

import contextlib
import io
import itertools
import json
import os
import pickle
import resource
import shutil
import signal
import struct
import zipfile
from pathlib import Path

import faulty
import numpy as np
import pretrained_models as models
import pytest

from qkgeom_jax import pretrained, reading, results, study
from qkgeom_jax.cli import grid
from qkgeom_jax.cli_checkpoints import checkpoints
from qkgeom_jax.cli_export import export
from qkgeom_jax.pretrained import CheckpointFormatError
from qkgeom_jax.pretrained.own import read_params

GIGABYTES = 10 << 30
HUGE = "9" * 5000
DEEP = "[" * 100_000
ESCAPES = "a\nb\x1b]0;title\x07\x1b[2J"


@contextlib.contextmanager
def little_memory(more=1 << 30):
    """What is allocated beyond a gigabyte more fails, and whatever blocks is ended."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)

    def blocked(*_):
        raise AssertionError("blocked")

    before = signal.signal(signal.SIGALRM, blocked)
    resource.setrlimit(resource.RLIMIT_AS, (held + more, limits[1]))
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def refusal(command, words, capfd):
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop, little_memory():
        command(words)
    said = capfd.readouterr()
    assert stop.value.code == 2 and said.out == "" and said.err.count("\n") == 1
    assert said.err[:-1].isprintable() and len(said.err) < 1500
    return said.err


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def header(text):
    """The start of a .npy file whose header is `text`."""
    text = text.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def npy(shape="(1310720000,)", descr="'<f8'", fortran="False"):
    return header(f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}") + bytes(16)


def saved(array):
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


ARRAYS = {  # each as the bytes of a .npy file
    "ten gigabytes": npy(),
    "an overflowing size": npy(f"({1 << 62}, {1 << 62})"),
    "a negative size": npy("(-2,)"),
    "two negative sizes": npy("(-1, -2)"),
    "a huge number": npy(f"({HUGE},)"),
    "no tuple": npy("2"),
    "code for a shape": npy("__import__('os').abort()"),
    "objects": npy("(2,)", "'|O'"),
    "objects inside": npy("(1,)", "[('a', '|O')]"),
    "no bytes each": npy("(5,)", "'|V0'"),
    "an unknown type": npy("(2,)", "'zzz'"),
    "deep nesting": header("(" * 5000),
    "version 9": b"\x93NUMPY\x09\x00" + npy()[8:],
    "a cut header": npy()[:40],
    "nothing": b"",
    "a cut zip": b"PK\x03\x04",
    "a pickle": pickle.dumps([1, 2]),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_a_hostile_npy_file(case, tmp_path, capfd):
    path = tmp_path / "ids.npy"
    path.write_bytes(ARRAYS[case])
    words = ["--model", str(models.make(tmp_path / "m", "gpt2")[0]), f"--token-ids={path}", f"--out={tmp_path / 'out'}"]
    assert f"{path} is no readable npy file" in refusal(checkpoints, words, capfd)
    assert not (tmp_path / "out").exists()


def test_a_pickled_npy_file_is_not_run(tmp_path, capfd):
    path = tmp_path / "ids.npy"
    path.write_bytes(saved(np.array([Evil(tmp_path / "harm")], object)))
    words = ["--model", str(models.make(tmp_path / "m", "gpt2")[0]), f"--token-ids={path}", f"--out={tmp_path / 'out'}"]
    assert "it holds Python objects" in refusal(checkpoints, words, capfd)
    path.write_bytes(pickle.dumps(Evil(tmp_path / "harm")))
    assert "is no readable npy file" in refusal(checkpoints, words, capfd)
    assert sorted(os.listdir(tmp_path)) == ["ids.npy", "m"]


def make_zip(path, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members:
            archive.writestr(name, data)


@pytest.mark.parametrize("case", ARRAYS)
def test_a_hostile_array_in_an_npz_file(case, tmp_path):
    make_zip(tmp_path / "a.npz", [("x.npy", ARRAYS[case])])
    with little_memory(), pytest.raises(ValueError, match="a.npz is no readable npz file") as refused:
        reading.read_npz(tmp_path / "a.npz")
    assert str(refused.value).isprintable()


def test_hostile_npz_files(tmp_path):
    sound = saved(np.arange(3.0))
    path = tmp_path / "a.npz"

    def refused(match):
        with little_memory(), pytest.raises(ValueError, match=f"{path} is no readable npz file.*{match}"):
            reading.read_npz(path)

    make_zip(path, [("x.npy", saved(np.array([Evil(tmp_path / "harm")], object)))])
    refused("Python objects")
    make_zip(path, [("x.npy", npy("(1250000,)")[:-16] + bytes(10_000_000))] * 1, zipfile.ZIP_DEFLATED)  # a bomb
    assert path.stat().st_size < 20_000
    refused("compressed")
    with pytest.warns(UserWarning, match="Duplicate"):
        make_zip(path, [("x.npy", sound), ("x.npy", sound)])
    refused("twice")

    # The directory claims ten gigabytes; an encrypted member; a directory that points outside the file.
    make_zip(path, [("x.npy", sound)])
    whole = path.read_bytes()
    at = whole.index(b"PK\x01\x02")
    for offset, value in ((20, struct.pack("<II", 0xFFFFFFF0, 0xFFFFFFF0)), (8, b"\x01\x00"), (42, b"\xf0\xff\xff\x00")):
        path.write_bytes(whole[: at + offset] + value + whole[at + offset + len(value) :])
        refused("")
    # Many members that are one and the same place: little in the file, much in memory.
    entry, end = whole[at : whole.index(b"PK\x05\x06")], whole[whole.index(b"PK\x05\x06") :]
    entries = b"".join(entry.replace(b"x.npy", f"{n:05}".encode()) for n in range(5000))
    counts = struct.pack("<HHII", 5000, 5000, len(entries), at)
    path.write_bytes(whole[:at] + entries + end[:8] + counts + end[20:])
    refused("")

    # A name that leaves the folder is only a name: nothing is unpacked.
    make_zip(path, [("../../outside.npy", sound), ("/etc/outside.npy", sound)])
    assert sorted(reading.read_npz(path)) == ["../../outside", "/etc/outside"]
    assert os.listdir(tmp_path) == ["a.npz"]


def test_parameters_that_are_not_what_the_configuration_says(whole, tmp_path, capfd):
    out = tmp_path / "out"
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("checkpoints", "figures"))
    path = out / "groups" / faulty.GROUPS[1] / "params/epoch_002.npz"
    words = [str(out), f"--group={faulty.GROUPS[1]}", "--epochs=2", f"--to={tmp_path / 'to'}"]
    for data in (
        saved(np.array([Evil(tmp_path / "harm")], object)), pickle.dumps(Evil(tmp_path / "harm")), b"", npy(), b"PK\x05\x06",
    ):  # fmt: skip
        path.write_bytes(data)
        assert f"{path} is no readable npz file" in refusal(export, words, capfd)
    path.unlink()
    os.mkfifo(path)
    assert f"{path} is no regular file" in refusal(export, words, capfd)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert f"{path} is no regular file" in refusal(export, words, capfd)
    with pytest.raises(CheckpointFormatError, match="is no regular file"):
        read_params(path, faulty.tiny.config())
    assert not (tmp_path / "harm").exists()


# --- Checkpoint folders


def folder(tmp_path, family="gpt2"):
    return models.make(tmp_path / "model", family)[0]


def refuse(path, match="."):
    with little_memory(), pytest.raises(CheckpointFormatError, match=match) as refused:
        pretrained.open_checkpoint(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (DEEP, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        (f'{{"model_type": "gpt2", "n_layer": {HUGE}}}', "not valid JSON"),
        ('{"model_type": "gpt2", "n_embd": 1e999}', "n_embd is inf"),
        (json.dumps(models.config("gpt2") | {"n_layer": 10**9}), "its configuration says 1000000000"),
        (json.dumps({"model_type": ESCAPES}), "is not supported"),
    ],
)  # fmt: skip
def test_a_hostile_config(text, match, tmp_path):
    path = folder(tmp_path)
    (path / "config.json").write_text(text)
    assert refuse(path, match).isprintable()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_files_that_are_none(name, tmp_path):
    """A link out of the folder is read as what it points at, and nothing of that is said; pipes and devices do not block."""
    path = folder(tmp_path)
    (tmp_path / "secret").write_text("password 12345678")
    (path / name).unlink()
    (path / name).symlink_to(tmp_path / "secret")
    assert "12345678" not in refuse(path, name) and (tmp_path / "secret").read_text() == "password 12345678"
    for target in ("/dev/zero", "loop", tmp_path / "pipe"):
        (path / name).unlink()
        (path / name).symlink_to(name if target == "loop" else target)
        if target == tmp_path / "pipe":
            os.mkfifo(target)
        refuse(path, "is no regular file|cannot be read|is missing|holds no weights")


def test_a_safetensors_file_that_claims_ten_gigabytes(tmp_path):
    path = folder(tmp_path)
    weights = path / "model.safetensors"
    length = int.from_bytes(weights.read_bytes()[:8], "little")
    names = json.loads(weights.read_bytes()[8 : 8 + length])
    for entry in names.values():
        if "shape" in entry:
            entry["shape"], entry["data_offsets"] = [GIGABYTES // 4], [0, GIGABYTES]
    text = json.dumps(names).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text)
    refuse(path, "is cut or damaged")
    # A file with a hole that is as large as it claims: its shapes are held against the configuration before it is read.
    with open(weights, "ab") as file:
        file.truncate(8 + len(text) + GIGABYTES)
    refuse(path, "overlaps another|has shape")


@pytest.mark.parametrize(
    "text", [DEEP, f'{{"a": {HUGE}}}', "{", '{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}']
)
def test_a_hostile_safetensors_header(text, tmp_path):
    path = folder(tmp_path)
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(8))
    refuse(path, "model.safetensors")


def test_tensor_names_with_escapes(tmp_path, capfd):
    text = json.dumps({ESCAPES: {"dtype": "nothing", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path = folder(tmp_path)
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert checkpoints([f"--model={path}", f"--out={tmp_path / 'out'}", "--tokens=64"]) == 1
    said = capfd.readouterr()
    assert (said.out + said.err).replace("\n", "").isprintable() and r"\x1b[2J" in said.err


def test_a_folder_whose_name_has_escapes(tmp_path, capfd):
    inside = tmp_path / "run" / ESCAPES.replace("/", "")
    shutil.copytree(folder(tmp_path), inside)
    assert checkpoints([f"--model={tmp_path / 'run'}", f"--out={tmp_path / 'out'}", "--tokens=64"]) == 1
    said = capfd.readouterr()
    assert (said.out + said.err).replace("\n", "").isprintable() and "has characters that no text has; rename it" in said.err
    os.rename(inside, os.fsencode(tmp_path / "run") + b"/step\xff")
    assert checkpoints([f"--model={tmp_path / 'run'}", f"--out={tmp_path / 'out'}", "--tokens=64"]) == 1
    assert r"the name 'step\udcff' has characters" in capfd.readouterr().err


def test_a_series_called_dot_dot_stays_in_its_place(tmp_path, monkeypatch, capfd):
    path = folder(tmp_path)
    (path / "model.safetensors").write_bytes(b"")
    (path / "below").mkdir()
    monkeypatch.chdir(path / "below")
    assert checkpoints(["--model=..", f"--out={tmp_path / 'out'}", "--tokens=64"]) == 1
    assert [p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out/revisions").rglob("*.json")] == [
        "revisions/model/model.json"
    ]


@pytest.mark.parametrize("steps", ["9" * 200, "1" + "0" * 19])
def test_steps_of_many_digits_are_none(steps, tmp_path):
    from qkgeom_jax.series import choose, in_order, parse_selection, step_of

    names = [f"step{steps}", "step1", "step2", "step4"]
    assert step_of(names[0]) is None and in_order(names) == [*names[1:], names[0]]
    assert choose(parse_selection("log:2"), names, "x") == ["step1", "step4"]


def test_a_bin_file_is_not_run(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed (extra: reference)")
    path = folder(tmp_path)
    (path / "model.safetensors").unlink()
    weights = path / "pytorch_model.bin"
    torch.save({"wte.weight": Evil(tmp_path / "harm")}, weights)
    refuse(path, "damaged, or holds more than tensors")
    weights.write_bytes(pickle.dumps(Evil(tmp_path / "harm")))
    refuse(path, "damaged, or holds more than tensors")
    assert not (tmp_path / "harm").exists()
    torch.save({"wte.weight": torch.zeros(4)}, weights)
    sound = weights.read_bytes()
    for place in range(0, len(sound), 23):
        weights.write_bytes(sound[:place] + bytes([sound[place] ^ 0x41]) + sound[place + 1 :])
        with contextlib.suppress(pytest.fail.Exception):  # a bit of padding does not matter
            refuse(path)
    weights.write_bytes(b"")
    refuse(path, "pytorch_model.bin")
    weights.unlink()
    weights.symlink_to("/dev/zero")
    refuse(path, "is no regular file")


def gguf_start(tensors, keys):
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys)


def gguf_key(name, kind, value):
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


GGUF = {
    "counts": gguf_start(1 << 60, 1 << 60) + bytes(64),
    "a long name": gguf_start(0, 1) + struct.pack("<Q", GIGABYTES) + bytes(64),
    "a long array": gguf_start(0, 1) + gguf_key("a", 9, struct.pack("<IQ", 4, GIGABYTES)) + bytes(64),
    "arrays in arrays": gguf_start(0, 1) + gguf_key("a", 9, struct.pack("<IQ", 9, 1) * 3000),
    "a large tensor": gguf_start(1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, GIGABYTES, 0, 0) + bytes(64),
    "text": b"GGUF but not really",
    "nothing": b"",
}


@pytest.mark.parametrize("case", GGUF)
def test_a_hostile_gguf_file(case, tmp_path):
    pytest.importorskip("gguf", reason="gguf is not installed (extra: gguf)")
    (tmp_path / "model.gguf").write_bytes(GGUF[case])
    refuse(tmp_path / "model.gguf", "model.gguf is no GGUF file, or damaged")


def tokenizer(**parts):
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": words} | parts)


SPLIT = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
HOSTILE_TOKENIZERS = [
    DEEP, f'{{"version": {HUGE}}}', '{"model": ' * 100_000, tokenizer(pre_tokenizer=SPLIT),
    tokenizer(model={"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}),
    tokenizer(added_tokens=[{"id": 2**40, "content": ESCAPES}]),
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE_TOKENIZERS, ids=range(len(HOSTILE_TOKENIZERS)))
def test_a_hostile_tokenizer_is_a_failure_of_the_revision(text, tmp_path, capfd):
    pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra: checkpoints)")
    path = folder(tmp_path)
    (path / "tokenizer.json").write_text(text)
    with little_memory():
        assert checkpoints([f"--model={path}", f"--out={tmp_path / 'out'}", "--tokens=64"]) == 1
    said = capfd.readouterr()
    assert "is no tokenizer" in said.err and (said.out + said.err).replace("\n", "").isprintable()


# --- TOML files and results folders

TOML = {
    "deep arrays": "width = " + "[" * 50_000,
    "deep tables": "a." * 10_000 + "b = 1",
    "deep inline tables": "a = " + "{a = " * 10_000,
    "a huge number": f"width = {HUGE}",
    "a huge year": "width = 99999-01-01",
    "a bomb of keys": "\n".join(f"[a{n}.b.c]" for n in range(4000)),
}


@pytest.mark.parametrize("case", TOML)
def test_a_hostile_toml_file(case, tmp_path, capfd):
    path = tmp_path / "study.toml"
    path.write_text(TOML[case])
    assert "study.toml" in refusal(grid, [f"--config={path}", f"--out={tmp_path / 'out'}"], capfd)
    assert os.listdir(tmp_path) == ["study.toml"]


def test_toml_files_that_are_none(tmp_path, capfd):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", tmp_path / "pipe", tmp_path):
        assert "a regular file of at most" in refusal(grid, [f"--config={path}"], capfd)
    with open(tmp_path / "large", "wb") as file:
        file.truncate(GIGABYTES)
    assert "a regular file of at most" in refusal(grid, [f"--config={tmp_path / 'large'}"], capfd)
    (tmp_path / "study.toml").write_text(f"{json.dumps(ESCAPES.replace(chr(7), ''))} = 1")
    assert "is no key" in refusal(grid, [f"--config={tmp_path / 'study.toml'}"], capfd)


VALUES = [None, [], {}, "", "x", -1, 0, 10**30, 1.5, True, [[1]], ESCAPES, "../../x", float("inf")]


def places(value, at=()):
    """The place of every value inside a JSON value."""
    yield at
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*at, key))


def changed(value, at, new):
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = changed(value[at[0]], at[1:], new)
    return copy


@pytest.fixture
def results_folder(whole, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("checkpoints", "figures", "tables"))
    return out


@pytest.mark.parametrize("name", ["config.json", "status.json"])
def test_any_value_in_a_group_s_files(name, results_folder, capfd):
    """--status says what is there, or one sentence with the file's name."""
    path = results_folder / "groups" / faulty.GROUPS[1] / name
    value = json.loads(path.read_text())
    refused = 0
    for at, new in itertools.product(places(value), VALUES):
        wrong = changed(value, at, new)
        if name == "status.json" and isinstance(wrong, dict) and new != float("inf"):
            wrong = results.seal(wrong)  # anybody can
        path.write_text(json.dumps(wrong))
        try:
            assert grid([f"--out={results_folder}", "--status"]) == 0
        except SystemExit as stop:
            assert stop.code == 2
            refused += 1
            said = capfd.readouterr().err
            assert said.count("\n") == 1 and faulty.GROUPS[1] in said, (at, new)
    said = capfd.readouterr()
    assert refused and (said.out + said.err).replace("\n", "").isprintable()


@pytest.mark.parametrize("text", [DEEP, f'{{"model": {HUGE}}}', '{"a":' * 100_000, "\0", "NaN", "[]", "3"])
@pytest.mark.parametrize(
    "name", ["config.json", *(f"groups/{faulty.GROUPS[1]}/{name}" for name in ("config.json", "status.json"))]
)
def test_hostile_json_in_a_results_folder(name, text, results_folder, corpus, capfd):
    (results_folder / name).write_text(text)
    if name == "config.json":
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            grid(faulty.arguments(corpus, results_folder))
        assert stop.value.code == 2
        said = capfd.readouterr().err
        assert "config.json is damaged" in said.splitlines()[-1]
    else:
        assert faulty.GROUPS[1] in refusal(grid, [f"--out={results_folder}", "--status"], capfd)


@pytest.mark.parametrize("cell", [HUGE, "9" * 30, "1e3", "", "0x1", "=cmd|'/c calc'!A0", ESCAPES, "1" * 200_000])
def test_a_hostile_csv(cell, results_folder, capfd):
    path = results_folder / "groups" / faulty.GROUPS[1] / "losses.csv"
    first, *rows = path.read_text().splitlines()
    quoted = '"' + cell.replace('"', '""') + '"'
    path.write_text("\n".join([first, *rows[:-1], quoted + rows[-1][rows[-1].index(",") :]]) + "\n")
    assert "losses.csv" in refusal(grid, [f"--out={results_folder}", "--status"], capfd)


def test_digests_of_files_outside_the_folder(results_folder, tmp_path, capfd):
    """What is damaged is moved aside: a manifest must not name a file elsewhere."""
    out, precious = results_folder, tmp_path / "precious"
    precious.write_text("mine")
    path = out / "groups" / faulty.GROUPS[1] / "manifest.json"
    sound = json.loads(path.read_text())
    for name in ("../../../precious", str(precious), "params/../../../../precious"):
        path.write_text(json.dumps(results.seal(sound | {"digests": sound["digests"] | {name: "0" * 64}})))
        assert grid(["--verify", str(out)]) == 1
        assert "manifest.json is damaged: its digests are not of files beside it" in capfd.readouterr().out
        assert study._take_away_damaged(path.parent) == ["manifest.json is damaged"]
        assert precious.read_text() == "mine" and not path.exists()


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
def test_what_lies_at_a_temporary_name_is_not_written_through(kind, tmp_path):
    precious, temporary = tmp_path / "precious", tmp_path / "out/.a.csv.tmp"
    (tmp_path / "out").mkdir()
    if kind == "pipe":
        os.mkfifo(temporary)
    else:
        temporary.symlink_to(precious)
    if kind == "link":
        precious.write_text("mine")
    with little_memory():
        results.write_text(tmp_path / "out/a.csv", "new")
    assert (tmp_path / "out/a.csv").read_text() == "new" and not (tmp_path / "out/a.csv").is_symlink()
    assert os.listdir(tmp_path / "out") == ["a.csv"]
    assert precious.read_text() == "mine" if kind == "link" else not precious.exists()


def test_group_folders_with_escapes_in_their_names(results_folder, capfd):
    shutil.move(results_folder / "groups" / faulty.GROUPS[1], results_folder / "groups" / ESCAPES)
    assert grid([f"--out={results_folder}", "--status"]) == 0
    assert grid(["--verify", str(results_folder)]) == 1
    said = capfd.readouterr()
    assert (said.out + said.err).replace("\n", "").isprintable() and r"\x1b[2J" in said.out


@pytest.mark.parametrize("name", ["\x1b[2J.txt", "a\nb.txt"])
def test_a_corpus_whose_name_has_escapes(name, tmp_path, capfd):
    (tmp_path / name).write_text("x")
    with pytest.raises(SystemExit) as stop:
        grid([f"--corpus={tmp_path / name}", f"--out={tmp_path / 'out'}"])
    assert stop.value.code == 2 and capfd.readouterr().err.replace("\n", "").isprintable()
    assert not (tmp_path / "out").exists()
