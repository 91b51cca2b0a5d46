"""One holder at a time; the operating system, not the file, says who."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from qkgeom_jax.lock import Lock, LockedError

HOLD = """
import subprocess, sys
from qkgeom_jax.lock import Lock
lock = Lock(sys.argv[1])
child = subprocess.Popen(["sleep", "60"])  # it must not keep the lock when its parent is gone
print(child.pid, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def other_process(path):
    """A process that holds the lock, and the pid of its child."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child = int(holder.stdout.readline())
    try:
        yield holder
    finally:
        holder.kill()
        os.kill(child, signal.SIGKILL)
        holder.communicate()


def test_the_second_is_refused_and_told_who_holds_it(tmp_path):
    with other_process(tmp_path / "lock") as holder:
        for _ in range(2):  # a refusal leaves no trace
            with pytest.raises(LockedError) as refused:
                Lock(tmp_path / "lock")
    said = str(refused.value)
    assert said.startswith(f"{tmp_path} is in use by process {holder.pid} on {socket.gethostname()} since ")
    assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+00:00; ", said) and "\n" not in said


def test_kill_9_releases_and_the_left_over_file_does_not_block(tmp_path):
    with other_process(tmp_path / "lock") as holder:
        holder.kill()
        holder.wait()
        assert json.loads((tmp_path / "lock").read_text())["pid"] == holder.pid
        with Lock(tmp_path / "lock"), pytest.raises(LockedError, match=f"process {os.getpid()} on"):
            Lock(tmp_path / "lock")


def test_in_one_process_too_and_released_by_with_and_by_name(tmp_path):
    with Lock(tmp_path / "lock"), pytest.raises(LockedError):
        Lock(tmp_path / "lock")
    lock = Lock(tmp_path / "lock")
    lock.release()
    lock.release()
    with pytest.raises(RuntimeError, match="crash"), Lock(tmp_path / "lock"):
        raise RuntimeError("crash")
    with Lock(str(tmp_path / "lock")), Lock(tmp_path / "another"):
        pass


@pytest.mark.parametrize("text", ["", "garbage", "[1]", '{"pid": 1}', "x" * 100_000])
def test_a_lock_file_with_any_text(tmp_path, text):
    (tmp_path / "lock").write_text(text)
    with Lock(tmp_path / "lock"):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
        (tmp_path / "lock").write_text(text)  # the holder's name got lost: still locked, only less said
        with pytest.raises(LockedError, match="in use by another process"):
            Lock(tmp_path / "lock")


def test_a_link_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="lock"):
        Lock(tmp_path / "lock")
    assert (tmp_path / "precious").read_text() == "mine"


def test_where_no_file_can_be(tmp_path):
    with pytest.raises(FileNotFoundError):
        Lock(tmp_path / "nowhere" / "lock")
    with pytest.raises(IsADirectoryError):
        Lock(tmp_path)
