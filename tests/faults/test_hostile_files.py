"""Files from strangers: nothing is executed or allocated that they do not hold, and one sentence says what is wrong."""

import io
import os
import pickle
import shutil
import zipfile

import faulty
import numpy as np
import pytest

from qkgeom_jax import flags, results
from qkgeom_jax.cli import grid
from qkgeom_jax.cli_checkpoints import checkpoints
from qkgeom_jax.command import say


class Trap:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def npy(array, **changes):
    """The bytes of an array, with another header than it has."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(array) | changes)
    return stream.getvalue() + array.tobytes()


def raw_npy(header):
    content = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(content).to_bytes(2, "little") + content


def hostile_arrays(trap):
    numbers = np.arange(8)
    stream = io.BytesIO()
    np.save(stream, np.array([Trap(trap)], dtype=object), allow_pickle=True)
    return {
        "a pickle": stream.getvalue(),
        "a bare pickle": pickle.dumps(Trap(trap)),
        "ten gigabytes": npy(numbers, shape=(10 * 2**30 // 8,)),
        "more than a size can say": npy(numbers, shape=(2**62, 2**62)),
        "a negative size": npy(numbers, shape=(-1, -8)),
        "objects": npy(numbers, descr="|O"),
        "code": raw_npy("__import__('os').abort()"),
        "depth": raw_npy("(" * 110),
        "nothing": b"",
        "half": npy(numbers)[:140],
    }


def zipped(members, compression=zipfile.ZIP_STORED):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def test_arrays_of_strangers(tmp_path):
    trap = tmp_path / "trap"
    for what, content in hostile_arrays(trap).items():
        (tmp_path / "a.npy").write_bytes(content)
        with pytest.raises(ValueError, match="a.npy is no npy file"):
            results.read_array(tmp_path / "a.npy")
        (tmp_path / "a.npz").write_bytes(zipped({"x.npy": content}))
        with pytest.raises(ValueError, match="a.npz is no readable npz file"):
            results.read_npz(tmp_path / "a.npz")
        assert not trap.exists(), what


def test_sound_arrays_come_back(tmp_path):
    plain = np.arange(6.0).reshape(2, 3)
    arrays = {"a/b": plain, "f": np.asfortranarray(plain), "empty": np.zeros((0, 3))}
    results.write_npz(tmp_path / "a.npz", arrays)
    for name, array in results.read_npz(tmp_path / "a.npz").items():
        np.testing.assert_array_equal(array, arrays[name])
        assert array.dtype == arrays[name].dtype and array.shape == arrays[name].shape
    np.save(tmp_path / "a.npy", arrays["f"])
    np.testing.assert_array_equal(results.read_array(tmp_path / "a.npy"), arrays["f"])


def test_archives_of_strangers(tmp_path):
    path = tmp_path / "deeper/a.npz"
    path.parent.mkdir()
    sound = npy(np.zeros(1 << 20))
    path.write_bytes(zipped({"x.npy": sound}, zipfile.ZIP_DEFLATED))  # where a bomb would be
    with pytest.raises(ValueError, match="compressed"):
        results.read_npz(path)
    once = zipped({"x.npy": sound})
    directory = once.index(b"PK\x01\x02")
    end = once.index(b"PK\x05\x06")
    entry = once[directory:end]
    copies = once[:directory] + entry * 50 + once[end : end + 8] + (50).to_bytes(2, "little") * 2
    copies += (50 * len(entry)).to_bytes(4, "little") + directory.to_bytes(4, "little") + b"\x00\x00"
    path.write_bytes(copies)  # fifty members that are one and the same piece of the file
    with pytest.raises(ValueError, match="claim more than it holds"):
        results.read_npz(path)
    path.write_bytes(zipped({"../../x.npy": npy(np.arange(3)), "/x.npy": npy(np.arange(3))}))
    assert set(results.read_npz(path)) == {"../../x", "/x"}  # names, never places
    assert [p.name for p in tmp_path.iterdir()] == ["deeper"]


@pytest.mark.parametrize("what", hostile_arrays("trap"))
def test_token_ids_of_a_stranger(what, tmp_path, capsys):
    trap = tmp_path / "trap"
    (tmp_path / "ids.npy").write_bytes(hostile_arrays(trap)[what])
    given = [f"--model={tmp_path}", f"--token-ids={tmp_path / 'ids.npy'}", f"--out={tmp_path / 'out'}"]
    with pytest.raises(SystemExit) as refused:
        checkpoints(given)
    assert refused.value.code == 2 and "ids.npy is no npy file" in capsys.readouterr().err
    assert not trap.exists() and not (tmp_path / "out").exists()


DEEP = 100_000
TOML = {
    "depth": "a = " + "[" * DEEP,
    "tables": "[" + "a." * 5000 + "a]\nb = 1",
    "digits": f"width = {'9' * 10_000}",
    "a number of many digits": "width = 99999999999999999999",
    "a date": "width = 1979-05-27",
    "an escape": '"\\u001b[31m" = 1',
    "not a list": "seeds = {a = 1}",
    "nan": "seeds = [nan]",
}


@pytest.mark.parametrize("what", TOML)
def test_toml_of_a_stranger(what, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text(TOML[what])
    with pytest.raises(SystemExit) as refused:
        grid(["--config=s.toml"])
    said = capsys.readouterr().err
    assert refused.value.code == 2 and said.count("\n") == 1 and "\x1b" not in said
    assert os.listdir(tmp_path) == ["s.toml"]


JSON = {
    "depth": "[" * DEEP,
    "digits": "9" * 10_000,
    "a list": "[]",
    "text": '"x"',
    "null": "null",
    "a wrong kind": '{"status": 3, "epochs_done": "x", "diverged": []}',
    "infinity": '{"status": "done", "epochs_done": 1e999, "diverged": {}}',
    "bytes": "\udcff",
}


@pytest.mark.parametrize("what", JSON)
@pytest.mark.parametrize("place", ["config", "manifest", "GROUP/config", "GROUP/status", "GROUP/manifest"])
def test_json_of_a_stranger(what, place, whole, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("checkpoints", "*.png", "*.pdf"))
    path = out / f"{place.replace('GROUP', f'groups/{faulty.GROUPS[0]}')}.json"
    path.write_text(JSON[what], errors="surrogateescape")
    for mode in ("--verify", "--status", "--figures"):
        try:
            status = grid([mode, f"--out={out}"])
        except SystemExit as refused:
            status = refused.code
        said = capsys.readouterr()
        assert status in (0, 1, 2) and said.err.count("\n") == (status == 2), (mode, status, said)
        # An object without a seal may be from before there were seals, which is said.
        assert mode != "--verify" or status == 1 or "digests" in said.out, "damage was not seen"


def test_tables_of_a_stranger(whole, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("checkpoints", "*.png", "*.pdf", "manifest.json"))
    path = out / "groups" / faulty.GROUPS[0] / "metrics.csv"
    header, *rows = path.read_text().splitlines()
    for content in ("", '"' * 200_000, "=1+1," * 50, "\x00", f"{'9' * 10_000}{rows[0][1:]}"):
        path.write_text(f"{header}\n{content}" if content else "")
        with pytest.raises(SystemExit) as refused:
            grid(["--figures", f"--out={out}"])
        assert refused.value.code == 2 and "metrics.csv" in capsys.readouterr().err


def test_links_out_of_a_results_folder_are_not_written_through(corpus, tmp_path):
    """Writers put a new file in the link's place; the lock is never opened through one."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    out = tmp_path / "out"
    group = out / "groups" / faulty.GROUPS[1]
    (group / "params").mkdir(parents=True)
    for name in ("metrics.csv", "config.json", "params/epoch_000.npz"):
        (group / name).symlink_to(precious)
    (out / "report.md").symlink_to(precious)
    faulty.train(corpus, out, inits="independent")
    assert precious.read_text() == "mine" and not (group / "metrics.csv").is_symlink()
    (group / "lock").unlink()
    (group / "lock").symlink_to(precious)
    faulty.train(corpus, out, inits="independent", status=1)
    assert precious.read_text() == "mine"


def test_names_do_not_command_the_terminal(capsys):
    say("a\x1b[31mb\rc\udcff\nd")
    assert capsys.readouterr().err == "a\\x1b[31mb\\rc\\udcff\\nd\n"
    assert flags.printable("é 漢") == "é 漢"
