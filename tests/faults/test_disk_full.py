"""A full disk: one line that says what was last saved, exit status 1, and the same command goes on once there is space."""

import contextlib
import resource
import shutil
import subprocess

import faulty
import pytest

from qkgeom_jax.cli import grid

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def files_of_at_most(size):
    """As a file system that is full at that size: EFBIG for ENOSPC."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of two megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip("a file system of its own needs the right to mount")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def said_by(corpus, out, capfd, **changes):
    """The last line of a command that ends with status 1."""
    capfd.readouterr()
    assert grid(faulty.arguments(corpus, out, **changes)) == 1
    messages = capfd.readouterr().err
    assert "Traceback" not in messages
    return messages.splitlines()[-1]


def test_a_disk_that_is_full_while_saving(whole, corpus, small_disk, tmp_path, capfd):
    out = small_disk / "out"
    faulty.train(corpus, out, inits="disjoint_support")
    before = faulty.contents(out / "groups")
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 16384))
    last = said_by(corpus, out, capfd)
    assert "No space left on device" in last and last.endswith("free some space, then the same command goes on")
    assert faulty.GROUPS[1] in last and ("MB free); the last good step is " in last or "there is no good step" in last)
    assert faulty.contents(out / "groups").items() >= before.items()
    (small_disk / "filler").unlink()
    faulty.train(corpus, out)
    faulty.assert_same(out, whole)
    assert faulty.leftovers(out) == []


def test_a_checkpoint_that_cannot_be_written(whole, corpus, tmp_path, capfd, monkeypatch):
    """The second of three saves fails: the first stays, and is named."""
    from qkgeom_jax.checkpoint import Checkpoints

    save = Checkpoints.save

    def save_or_fail(self, step, *rest):
        self.wait()
        with files_of_at_most(2000) if step == 4 else contextlib.nullcontext():
            save(self, step, *rest)

    monkeypatch.setattr(Checkpoints, "save", save_or_fail)
    last = said_by(corpus, tmp_path, capfd)
    assert f"{faulty.GROUPS[0]}: saving step 4 (" in last and "MB free); the last good step is 0; free some space" in last
    monkeypatch.undo()
    faulty.train(corpus, tmp_path)
    faulty.assert_same(tmp_path, whole)
    assert faulty.leftovers(tmp_path) == []


def test_tables_and_figures_that_cannot_be_written(whole, corpus, tmp_path, capfd):
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    before = faulty.contents(out)
    with files_of_at_most(16384):  # a figure is larger
        last = said_by(corpus, out, capfd)
    assert last.startswith("grid.py: ") and "figure" in last and "File too large; free some space" in last
    assert faulty.contents(out) == before
    assert grid(["--verify", str(out)]) == 0 and "has tables without digests" in capfd.readouterr().out
    faulty.train(corpus, out)
    faulty.assert_same(out, whole)
    assert grid(["--verify", str(out)]) == 0 and "without digests" not in capfd.readouterr().out


def test_a_folder_that_cannot_be_begun(corpus, small_disk, capfd):
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    assert "No space left on device; free some space" in said_by(corpus, small_disk / "out", capfd)
    (small_disk / "filler").unlink()
    faulty.train(corpus, small_disk / "out", inits="independent")
