"""Bit rot: whatever happens to a file, the result is right or the damage is said and made good."""

import itertools
import json
import shutil

import faulty
import pytest

from qkgeom_jax.cli import grid

pytestmark = pytest.mark.slow


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def delete(path):
    path.unlink()


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


ACTIONS = (truncate, flip, delete, zero)
ONE = {"inits": "independent"}


def files(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


@pytest.fixture(scope="module")
def once(corpus, tmp_path_factory):
    """One group of two epochs."""
    out = tmp_path_factory.mktemp("once") / "out"
    faulty.train(corpus, out, **ONE)
    return out


@pytest.fixture(scope="module")
def longer(corpus, once, tmp_path_factory):
    """The same, extended to three epochs without a disturbance."""
    out = tmp_path_factory.mktemp("longer") / "out"
    shutil.copytree(once, out)
    faulty.train(corpus, out, **ONE, epochs=3)
    return out


def verify(out, capsys):
    capsys.readouterr()
    status = grid(["--verify", str(out)])
    return status, capsys.readouterr().out


def checkpoint_cases(once, long):
    newest = once / "groups" / faulty.GROUPS[1] / "checkpoints/8"
    cases = list(itertools.product(files(newest), ACTIONS))
    # All of them, or a spread in which each action and both of Orbax's items occur.
    return cases if long else cases[:: len(cases) // 5 + 1]


def check_checkpoints(once, longer, corpus, tmp_path, capfd, long):
    found = 0
    for name, action in checkpoint_cases(once, long):
        out = tmp_path / "out"
        shutil.copytree(once, out)
        checkpoints = out / "groups" / faulty.GROUPS[1] / "checkpoints"
        action(checkpoints / "8" / name)
        reported = grid(["--verify", str(out)])
        faulty.train(corpus, out, **ONE, epochs=3)
        said = capfd.readouterr()
        # Where the step could be read all the same, its leaves had their digests: the result is right either way.
        faulty.assert_same(out, longer)
        quarantined = (checkpoints / "quarantine").exists()
        assert quarantined == ("the checkpoint of step 8 is damaged" in said.err) == (reported == 1), (name, action)
        found += quarantined
        shutil.rmtree(out)
    return found


def test_a_damaged_checkpoint_is_said_and_set_aside(once, longer, corpus, tmp_path, capfd):
    assert check_checkpoints(once, longer, corpus, tmp_path, capfd, long=False)


@pytest.mark.faults
def test_every_file_of_a_checkpoint_may_be_damaged(once, longer, corpus, tmp_path, capfd):
    assert check_checkpoints(once, longer, corpus, tmp_path, capfd, long=True)


def test_without_any_sound_checkpoint_the_group_starts_again(once, longer, corpus, tmp_path, capfd):
    out = tmp_path / "out"
    shutil.copytree(once, out)
    for record in (out / "groups").glob("*/checkpoints/*/record/*"):
        zero(record)
    faulty.train(corpus, out, **ONE, epochs=3)
    assert "step 8 is damaged" in (said := capfd.readouterr().err) and "step 4 is damaged" in said
    faulty.assert_same(out, longer)


def result_files(out):
    # A lock says who holds it; a figure may hold no bytes of the results alone.
    return [name for name in files(out) if "checkpoints" not in name.parts and name.name != "lock"]


def test_verify_finds_every_damaged_result(whole, tmp_path, capsys):
    assert verify(whole, capsys) == (0, f"{whole}: all is as it was written\n")
    out = tmp_path / "out"
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("checkpoints"))
    cases = list(itertools.product(result_files(out), ACTIONS))
    assert len(cases) > 100
    for name, action in cases:
        if action is delete and name.name in ("manifest.json", "status.json"):
            continue  # below
        before = (out / name).read_bytes()
        action(out / name)
        status, said = verify(out, capsys)
        assert status == 1 and f"{out / name} " in said, (name, action)
        (out / name).write_bytes(before)
    assert verify(out, capsys)[0] == 0


def test_verify_says_what_it_cannot_compare(whole, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    (out / "manifest.json").unlink()
    (out / "groups" / faulty.GROUPS[0] / "manifest.json").unlink()
    (out / "groups" / faulty.GROUPS[1] / "status.json").unlink()
    status, said = verify(out, capsys)
    assert status == 0 and "has tables without digests" in said
    assert f"{faulty.GROUPS[0]} has no digests" in said and f"{faulty.GROUPS[1]} is not finished" in said


def damage_cases(whole, long):
    group = faulty.GROUPS[1]
    names = [name for name in result_files(whole) if name.parts[0] != "groups" or group in name.parts]
    few = ("metrics.csv", "epoch_002.npz", "status.json", "table4.csv")
    return list(itertools.product(names, ACTIONS)) if long else [(name, flip) for name in names if name.name in few]


def check_results(whole, corpus, tmp_path, capfd, long):
    for name, action in damage_cases(whole, long):
        out = tmp_path / "out"
        shutil.copytree(whole, out)
        action(out / name)
        if name.as_posix() == "config.json" and action is not delete:
            with pytest.raises(SystemExit) as refused:  # what the folder's results mean is not known any more
                faulty.train(corpus, out)
            assert refused.value.code == 2
            assert "config.json is damaged" in (said := capfd.readouterr().err) or "another configuration" in said
        else:
            faulty.train(corpus, out)
            faulty.assert_same(out, whole)
            assert verify(out, capfd)[0] == 0, (name, action)
        shutil.rmtree(out)


def test_the_same_command_makes_damaged_results_again(whole, corpus, tmp_path, capfd):
    check_results(whole, corpus, tmp_path, capfd, long=False)


@pytest.mark.faults
def test_every_result_file_may_be_damaged(whole, corpus, tmp_path, capfd):
    check_results(whole, corpus, tmp_path, capfd, long=True)


@pytest.mark.parametrize("name", ["metrics.csv", "losses.csv", "config.json", "status.json"])
def test_tables_are_not_made_from_damaged_results(name, whole, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("checkpoints"))
    damaged = out / "groups" / faulty.GROUPS[0] / name
    damaged.write_text(damaged.read_text().replace("1", "2", 1))
    with pytest.raises(SystemExit) as refused:
        grid(["--figures", f"--out={out}"])
    assert refused.value.code == 2 and f"{damaged} is damaged" in capsys.readouterr().err


def test_checkpoints_of_another_version_are_read_and_said(once, longer, corpus, tmp_path, monkeypatch, capfd):
    """What was begun with another jax goes on, and the manifest and the report say so."""
    out = tmp_path / "out"
    from qkgeom_jax import group

    describe = group.describe_process
    monkeypatch.setattr(group, "describe_process", lambda: describe() | {"versions": describe()["versions"] | {"jax": "0.1"}})
    faulty.train(corpus, out, **ONE)
    monkeypatch.undo()
    faulty.train(corpus, out, **ONE, epochs=3)
    sentence = f"{faulty.GROUPS[1]} was begun with other versions than it ended with"
    assert any(sentence in warning for warning in json.loads((out / "manifest.json").read_text())["warnings"])
    report = (out / "report.md").read_text()
    assert sentence in report and "Extended: depth 1, independent, none: its schedule was made for 8 steps" in report
    assert (out / "metrics.csv").read_bytes() == (longer / "metrics.csv").read_bytes()
