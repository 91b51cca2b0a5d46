"""Folders that are in use, cannot be written, or are shared."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile

import faulty
import pytest

from qkgeom_jax.cli import grid

pytestmark = pytest.mark.slow


def refusal(capfd, given):
    capfd.readouterr()
    with pytest.raises(SystemExit) as refused:
        grid(given)
    assert refused.value.code == 2
    return capfd.readouterr().err.splitlines()[-1]


def test_the_second_process_on_a_group_is_told_of_the_first(whole, corpus, tmp_path, capfd):
    first = faulty.start("train:2:0:pause", corpus, tmp_path)
    assert first.stdout.readline() == "paused\n"
    message = refusal(capfd, faulty.arguments(corpus, tmp_path))
    assert f"is in use by process {first.pid} on " in message and " since 20" in message
    first.kill()
    first.communicate()
    # What it held does not block, and what it had done is gone on with.
    faulty.train(corpus, tmp_path)
    faulty.assert_same(tmp_path, whole)


def test_groups_train_in_parallel_processes_on_one_folder(whole, corpus, tmp_path):
    processes = [faulty.start("start:9:0:none", corpus, tmp_path, inits=init) for init in ("disjoint_support", "independent")]
    for process in processes:
        assert process.communicate(timeout=300)[0].count("report.md") == 1 and process.returncode == 0
    # Whoever came last has shown the groups of both.
    faulty.assert_same(tmp_path, whole)
    assert grid(["--verify", str(tmp_path)]) == 0


def test_a_file_where_the_folder_should_be(corpus, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("qkgeom_jax.corpus.load_corpus", None)  # refused before a corpus is read
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file/deeper/out"):
        assert f"{out} cannot be written: {tmp_path / 'file'} is no folder" in refusal(capfd, faulty.arguments(corpus, out))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_read_only_folder(corpus, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("qkgeom_jax.corpus.load_corpus", None)
    place = tmp_path / "place"
    place.mkdir()
    if subprocess.run(["mount", "--bind", str(place), str(place)], check=False, capture_output=True).returncode:
        pytest.skip("a read-only mount needs the right to mount")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(place)], check=True)
        assert "may not be written to" in refusal(capfd, faulty.arguments(corpus, place / "out"))
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_folder_without_permission(corpus):
    if os.getuid() != 0:
        pytest.skip("another uid is to be had as root alone")
    # It becomes another user once Python and the package are loaded, which that user may not be able to read.
    code = "import locale, os, sys; from qkgeom_jax.cli import grid; os.setuid(65534); grid(sys.argv[1:])"
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o555)
        command = [sys.executable, "-c", code, "--depths=1", f"--out={place}/out"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=faulty.HERE.parents[1])
        assert done.returncode == 2 and f"{place} may not be written to" in done.stderr
        assert not os.listdir(place)


def test_a_relative_path(corpus, tmp_path, monkeypatch, whole):
    monkeypatch.chdir(tmp_path)
    faulty.train(corpus, "here/../out")
    faulty.assert_same(tmp_path / "out", whole)


def test_a_results_folder_goes_elsewhere(corpus, tmp_path, whole, capfd):
    shutil.copytree(whole, tmp_path / "moved")
    faulty.train(corpus, tmp_path / "moved")
    assert capfd.readouterr().err.count("done already") == 2
    faulty.assert_same(tmp_path / "moved", whole)


@pytest.mark.faults
def test_a_paused_process_that_is_stopped_from_a_terminal(corpus, tmp_path, whole):
    """Suspended and woken again, as by Ctrl-Z and fg."""
    process = faulty.start("train:2:0:SIGTSTP", corpus, tmp_path)
    pid, status = os.waitpid(process.pid, os.WUNTRACED)
    assert pid == process.pid and os.WIFSTOPPED(status)
    os.kill(process.pid, signal.SIGCONT)
    assert process.communicate(timeout=300)[0].endswith("ended\n") and process.returncode == 0
    faulty.assert_same(tmp_path, whole)


