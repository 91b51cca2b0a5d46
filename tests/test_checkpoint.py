"""Checkpoints come back bit for bit, or not at all and with a sentence that says so."""

import contextlib
import errno
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

from qkgeom_jax.checkpoint import CheckpointError, Checkpoints

PROJECT = Path(__file__).parents[1]


class Moments(NamedTuple):
    count: jax.Array
    mean: dict[str, jax.Array]


def make_state(value, size=30):
    """One state for each `value`, different from the next in every leaf but `zeros`."""
    normal = np.random.default_rng(value).normal(size=(4, size, size)).astype(np.float32)
    return {
        "params": {"kernel": jnp.asarray(normal), "half": jnp.full((3,), 1 / (1 + value), jnp.bfloat16)},
        "opt_state": (Moments(jnp.int32(value), {"kernel": jnp.asarray(-normal)}), [jnp.zeros((2, 2))]),
        "keys": jax.vmap(jax.random.key)(jnp.arange(4) + value),
        "key": jax.random.key(value, impl="rbg"),
        "alive": jnp.arange(4) != value,
        "step": jnp.int32(2**24 + 1 + value),  # float32 would lose the unit
    }


def make_one(value, size=30):
    return {"kernel": make_state(value, size)["params"]["kernel"]}


def bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), bits(jax.random.key_data(leaf))
    array = np.asarray(leaf)
    return str(array.dtype), array.shape, array.tobytes()


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert jax.tree.map(bits, got) == jax.tree.map(bits, want)


@contextlib.contextmanager
def largest_file(size):
    """Every write beyond `size` bytes of a file fails, as on a full disk but with another error number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def mounted(folder, *arguments):
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", *arguments, folder], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def run(script, *arguments, **environment):
    """A fresh process; it must end by itself and in silence."""
    prelude = "import sys\nfrom tests.test_checkpoint import *\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(PROJECT), **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.fixture
def opened(tmp_path):
    """Opens checkpoints that are closed at the end, whatever became of them."""
    all_opened = []

    def open_(folder=tmp_path / "checkpoints", keep=2):
        all_opened.append(Checkpoints(folder, keep))
        return all_opened[-1]

    yield open_
    for checkpoints in all_opened:
        with contextlib.suppress(CheckpointError):
            checkpoints.close()


def test_round_trip_in_another_opening(opened):
    record = {"epoch": 3, "loss": 0.1 + 0.2, "seeds": [7, 37], "diverged": {"7": 412}, "name": "é", "none": None}
    first = opened()
    first.save(10, make_state(1), record)
    first.close()
    second = opened()
    step, state, restored = second.restore(make_state(0))
    assert step == 10
    assert_same(state, make_state(1))
    assert restored == record
    assert second.warnings_ == [] and second.verify() == []
    # As uncommitted as a fresh state, or the next jitted call would compile anew.
    assert not any(leaf.committed for leaf in jax.tree.leaves(state))


def test_restores_from_abstract_template_and_after_a_move(opened, tmp_path):
    with contextlib.closing(Checkpoints(tmp_path / "here")) as checkpoints:
        checkpoints.save(1, make_state(1), {})
    moved = shutil.move(tmp_path / "here", tmp_path / "there")
    _, state, _ = opened(moved).restore(jax.eval_shape(lambda: make_state(0)))
    assert_same(state, make_state(1))


def test_an_empty_folder_has_nothing_to_restore(opened):
    assert opened().restore(make_state(0)) is None
    assert opened().steps == [] and opened().verify() == []


def test_keeps_the_newest_and_orders_by_step_not_by_time(opened, tmp_path):
    checkpoints = opened()
    for step in (9, 10, 11):
        checkpoints.save(step, make_state(step), {})
    checkpoints.wait()
    assert checkpoints.steps == [10, 11]
    os.utime(tmp_path / "checkpoints" / "10", (2e9, 2e9))
    assert opened().restore(make_state(0))[0] == 11


def test_a_step_that_is_not_newer_is_refused(opened):
    checkpoints = opened()
    checkpoints.save(10, make_state(1), {})
    for step in (10, 9):
        with pytest.raises(ValueError, match=rf"step is {step}; .*last saved step, 10"):
            checkpoints.save(step, make_state(2), {})
    for step in (-1, 11.0, True, None):
        with pytest.raises(ValueError, match="step is .*whole number"):
            checkpoints.save(step, make_state(2), {})
    assert_same(checkpoints.restore(make_state(0))[1], make_state(1))


def test_state_may_be_donated_or_deleted_when_save_returns(opened, tmp_path):
    """Each step's content is the closed form, though its buffers were reused while it was being written."""
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    checkpoints = opened(keep=6)
    state = {"big": jnp.zeros((500, 1000)), "count": jnp.int32(0)}
    for step in range(6):
        checkpoints.save(step, state, {})
        before = state
        state = advance(state)
        assert before["big"].is_deleted()
    checkpoints.wait()
    template = jax.eval_shape(lambda: state)
    for step in range(5, -1, -1):
        got, restored, _ = checkpoints.restore(template)
        assert (got, int(restored["count"])) == (step, step)
        np.testing.assert_array_equal(restored["big"], np.full((500, 1000), step, np.float32))
        shutil.rmtree(tmp_path / "checkpoints" / str(step))


def test_another_template_is_refused_and_nothing_is_quarantined(opened):
    checkpoints = opened()
    checkpoints.save(1, make_state(1), {})
    good = make_state(0)
    for change, said in [
        ({"step": jnp.float32(0)}, r"step is int32\[\] there and float32\[\] in the template"),
        ({"step": jnp.zeros(1, jnp.int32)}, r"step is int32\[\] there and int32\[1\]"),
        ({"keys": jnp.zeros((4, 2), jnp.uint32)}, r"keys is key<fry>\[4\] there and uint32\[4, 2\]"),
        ({"key": jax.random.key(0)}, r"key is key<rbg>\[\] there and key<fry>\[\]"),
        ({"extra": jnp.zeros(1)}, r"extra is missing there and float32\[1\]"),
        ({"opt_state": (good["opt_state"][0],)}, r"opt_state/1/0 is float32\[2, 2\] there and missing"),
    ]:
        with pytest.raises(CheckpointError, match=rf"step 1 in .* does not fit: {said}"):
            checkpoints.restore({**good, **change})
    assert checkpoints.restore(good)[0] == 1 and checkpoints.warnings_ == []


def test_a_dtype_that_jax_would_cast_is_refused(opened):
    checkpoints = opened()
    checkpoints.save(1, {"wide": np.arange(3.0)}, {})
    with pytest.raises(CheckpointError, match="wide is float64, which JAX would cast to float32 here"):
        checkpoints.restore({"wide": np.zeros(3)})


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"layers": {0: np.zeros(1)}}, "dictionary key that is no string in layers/0"),
        ({"rate": 0.1}, "state has 0.1 at rate; allowed: arrays"),
        ({"a": {"b": np.zeros(1)}, "a/b": np.zeros(1)}, "two leaves named a/b"),
    ],
)
def test_a_state_that_would_come_back_otherwise_is_refused(opened, state, said):
    with pytest.raises(ValueError, match=said):
        opened().save(1, state, {})


@pytest.mark.parametrize("record", [{"loss": float("nan")}, {7: 1}, {"pair": (1, 2)}, {"x": np.float32(1)}, [1], None])
def test_a_record_that_would_come_back_otherwise_is_refused(opened, record):
    with pytest.raises(ValueError, match="record is .*; allowed: a dictionary of JSON values"):
        opened().save(1, make_state(1), record)


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, None])
def test_keep_is_checked(tmp_path, keep):
    with pytest.raises(ValueError, match="keep is .*at least 1"):
        Checkpoints(tmp_path / "new", keep)
    assert not (tmp_path / "new").exists()


def _flip(data):
    changed = bytearray(data)
    changed[len(data) // 2] ^= 0x10
    return bytes(changed)


CORRUPTIONS = {
    "truncate": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flip": lambda path: path.write_bytes(_flip(path.read_bytes())),
    "zero": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "delete": lambda path: path.unlink(),
}


def test_no_damaged_file_is_ever_restored_silently(tmp_path, capfd):
    """Every file of the newest step, damaged in every way: the right arrays, or the older step and a sentence."""
    def make(value):
        state = make_state(value)
        return {name: state[name] for name in ("params", "keys", "step")}

    good = tmp_path / "good"
    with contextlib.closing(Checkpoints(good)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make(step), {"step": step})
    files = sorted(path.relative_to(good) for path in (good / "2").rglob("*") if path.is_file())
    assert len(files) > 8
    template, said, sound = make(0), [], 0
    for file in files:
        for way, corrupt in CORRUPTIONS.items():
            folder = shutil.copytree(good, tmp_path / "damaged")
            corrupt(folder / file)
            with contextlib.closing(Checkpoints(folder)) as checkpoints:
                step, state, record = checkpoints.restore(template)
                assert_same(state, make(step))
                assert record == {"step": step}, (file, way)
                if step == 2:
                    assert checkpoints.warnings_ == [], (file, way)
                    sound += 1
                else:
                    (warning,) = checkpoints.warnings_
                    assert warning.startswith("the checkpoint of step 2 is damaged (") and "\n" not in warning
                    assert checkpoints.steps == [1]
                    assert len(list((folder / "quarantine").iterdir())) == 1
                    said.append(warning)
            shutil.rmtree(folder)
    assert len(said) + sound == len(files) * len(CORRUPTIONS)
    # The digests were needed: Orbax read these without complaint.
    assert any("is not what was saved" in warning for warning in said)
    assert capfd.readouterr() == ("", "")


def test_sound_files_in_the_wrong_place_are_noticed(opened, tmp_path):
    checkpoints = opened()
    for step in (1, 2):
        checkpoints.save(step, make_state(step), {"loss": step})
    checkpoints.wait()
    folder = tmp_path / "checkpoints"
    # The arrays of another step.
    shutil.copytree(folder / "2", folder / "3")
    shutil.rmtree(folder / "2" / "state")
    shutil.copytree(folder / "1" / "state", folder / "2" / "state")
    # Another step's folder under a new name; a link; a file; an unfinished folder.
    (folder / "4").symlink_to(folder / "1")
    (folder / "5").write_text("")
    (folder / "6").mkdir()
    # The record edited by hand, as valid JSON.
    shutil.copytree(folder / "1", folder / "7")
    record = json.loads((folder / "7" / "record" / "metadata").read_text())
    (folder / "7" / "record" / "metadata").write_text(json.dumps({**record, "step": 7}))
    assert len(checkpoints.verify()) == 6 and checkpoints.steps == [1, 2, 3, 4, 5, 6, 7]
    step, state, record = checkpoints.restore(make_state(0))
    assert (step, record) == (1, {"loss": 1})
    assert_same(state, make_state(1))
    assert [warning.split()[4] for warning in checkpoints.warnings_] == ["7", "6", "5", "4", "3", "2"]
    # The steps that went are free again.
    checkpoints.save(2, make_state(22), {})
    assert_same(checkpoints.restore(make_state(0))[1], make_state(22))


def test_nothing_sound_is_none(opened, tmp_path):
    checkpoints = opened()
    checkpoints.save(1, make_state(1), {})
    checkpoints.wait()
    shutil.rmtree(tmp_path / "checkpoints" / "1" / "record")
    assert checkpoints.restore(make_state(0)) is None
    assert len(checkpoints.warnings_) == 1 and checkpoints.steps == []


def test_what_this_process_may_not_read_is_not_called_damaged(opened, monkeypatch):
    checkpoints = opened()
    checkpoints.save(1, make_state(1), {})
    checkpoints.wait()

    def restore(*_, **__):
        raise OSError(errno.EACCES, "denied")

    monkeypatch.setattr(checkpoints._manager, "restore", restore)
    with pytest.raises(CheckpointError, match="step 1 in .* cannot be read: Permission denied"):
        checkpoints.restore(make_state(0))
    assert checkpoints.steps == [1] and checkpoints.warnings_ == []


def test_leftovers_of_a_killed_save_do_not_block(opened, tmp_path):
    folder = tmp_path / "checkpoints"
    (folder / "5.orbax-checkpoint-tmp-1700000000" / "state").mkdir(parents=True)
    (folder / "6.orbax-checkpoint-tmp" / "state.orbax-checkpoint-tmp").mkdir(parents=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    (folder / "7.orbax-checkpoint-tmp").symlink_to(outside)
    checkpoints = opened()
    assert list(folder.iterdir()) == [] and (outside / "file").read_text() == "mine"
    checkpoints.save(5, make_state(5), {})
    assert checkpoints.restore(make_state(0))[0] == 5


@pytest.mark.parametrize("surface", ["save", "wait", "close"])
def test_a_failed_background_save_is_said_with_the_last_good_step(opened, monkeypatch, surface, capfd):
    checkpoints = opened()
    checkpoints.save(1, make_one(1), {})
    checkpoints.wait()
    with largest_file(100_000), monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_prepare_folder", lambda size: None)  # the disk fills up after it was probed
        checkpoints.save(2, make_one(2, size=300), {})
        time.sleep(0.5)
        assert checkpoints.steps == [1]
        with pytest.raises(CheckpointError) as failure:
            {"save": lambda: checkpoints.save(3, make_one(3), {}), "wait": checkpoints.wait,
             "close": checkpoints.close}[surface]()  # fmt: skip
    said = str(failure.value)
    assert said.startswith("saving step 2 (1.4 MB) to") and "failed: File too large (" in said
    assert said.endswith("the last good step is 1") and "\n" not in said
    assert [path.name for path in checkpoints.folder.iterdir()] == ["1"]
    checkpoints.close()  # said once
    # Another opening goes on.
    again = opened()
    again.save(2, make_one(2), {})
    assert_same(again.restore(make_one(0))[1], make_one(2))
    assert capfd.readouterr() == ("", "")


def test_the_same_checkpoints_go_on_after_a_failed_save(opened):
    checkpoints = opened()
    with largest_file(100_000), pytest.raises(CheckpointError, match="step 1 .*File too large.*there is no good step"):
        checkpoints.save(1, make_state(1, size=300), {})
    checkpoints.wait()
    checkpoints.save(1, make_state(1, size=300), {})
    checkpoints.save(2, make_state(2, size=300), {})
    assert_same(checkpoints.restore(make_state(0, size=300))[1], make_state(2, size=300))


def test_a_full_disk(opened, tmp_path):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        checkpoints = opened(tmp_path / "disk" / "checkpoints")
        checkpoints.save(1, make_state(1), {})
        checkpoints.wait()
        with pytest.raises(CheckpointError, match=r"step 2 \(11.5 MB\).*No space left on device \(\d.* good step is 1"):
            checkpoints.save(2, make_state(2, size=600), {})
        # Not one byte left: opening says so too; then space is freed and all goes on.
        with open(tmp_path / "disk" / "filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
            while filler.write(bytes(4096)):
                pass
        with pytest.raises(CheckpointError, match="No space left on device"):
            checkpoints.save(3, make_state(3), {})
        with pytest.raises(CheckpointError, match="cannot be written to .*: No space left on device"):
            opened(tmp_path / "disk" / "checkpoints")
        (tmp_path / "disk" / "filler").unlink()
        checkpoints.save(3, make_state(3), {})
        assert_same(checkpoints.restore(make_state(0))[1], make_state(3))
        assert checkpoints.steps == [1, 3] and checkpoints.verify() == []
        checkpoints.close()


def test_a_folder_that_cannot_be_written_is_refused_before_orbax_sees_it(tmp_path):
    (tmp_path / "file").write_text("")
    for folder, said in [(tmp_path / "file", "File exists"), (tmp_path / "file" / "below", "Not a directory")]:
        with pytest.raises(CheckpointError, match=f"cannot be written to .*: {said}"):
            Checkpoints(folder)
    with mounted(tmp_path / "locked", "-t", "tmpfs", "-o", "ro", "tmpfs"):
        with pytest.raises(CheckpointError, match="cannot be written to .*: Read-only file system"):
            Checkpoints(tmp_path / "locked")


def test_a_relative_folder_survives_a_change_of_directory(opened, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoints = opened("relative")
    monkeypatch.chdir("/")
    checkpoints.save(1, make_state(1), {})
    checkpoints.wait()
    assert (tmp_path / "relative" / "1").is_dir()


def test_a_folder_that_vanished_is_made_again(opened, tmp_path):
    checkpoints = opened()
    checkpoints.save(1, make_state(1), {})
    checkpoints.wait()
    shutil.rmtree(tmp_path / "checkpoints")
    assert checkpoints.steps == []
    checkpoints.save(2, make_state(2), {})
    assert_same(checkpoints.restore(make_state(0))[1], make_state(2))


def test_an_error_while_closing_is_not_swallowed(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(1), {})
    close = checkpoints._manager.close

    def fail():
        close()
        raise RuntimeError("the last file")

    monkeypatch.setattr(checkpoints._manager, "close", fail)
    with pytest.raises(CheckpointError, match=r"closing .* failed: the last file .*the last good step is 1"):
        checkpoints.close()


def test_a_preemption_notice_does_not_disturb_a_save(opened, monkeypatch):
    with contextlib.closing(opened()) as checkpoints:
        checkpoints.save(1, make_one(1), {})
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: True)
    checkpoints = opened()
    checkpoints.save(2, make_one(2), {})
    assert_same(checkpoints.restore(make_one(0))[1], make_one(2))


def test_hostile_metadata_does_not_block(opened, tmp_path):
    """Files that are valid but not what Orbax writes: it may be read or set aside, and the run goes on."""
    for text in ("[]", "null", '{"commit_timestamp_nsecs": 1e40}', '{"item_handlers": 3}', "[" * 10**5, "\xff"):
        with contextlib.closing(Checkpoints(tmp_path / "checkpoints")) as checkpoints:
            checkpoints.save(1, make_one(1), {})
            checkpoints.wait()
        (tmp_path / "checkpoints" / "1" / "_CHECKPOINT_METADATA").write_text(text, encoding="latin-1")
        with contextlib.closing(Checkpoints(tmp_path / "checkpoints")) as checkpoints:
            restored = checkpoints.restore(make_one(0))
            assert checkpoints.warnings_ if restored is None else assert_same(restored[1], make_one(1)) is None
            checkpoints.save(2, make_one(2), {})
            assert_same(checkpoints.restore(make_one(0))[1], make_one(2))
        shutil.rmtree(tmp_path / "checkpoints")


def test_killed_between_return_and_commit(opened, tmp_path):
    """`kill -9` right after `save` returned: the step before is whole, and the same step can be saved again."""
    script = """
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, make_state(1), {})
checkpoints.wait()
checkpoints.save(2, make_state(2, size=800), {})
os.kill(os.getpid(), 9)
"""
    ended = run(script, tmp_path / "checkpoints")
    assert ended.returncode == -9 and ended.stderr == ""
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if "tmp" in path.name]  # it was in the middle
    checkpoints = opened()
    assert checkpoints.steps == [1]
    assert_same(checkpoints.restore(make_state(0))[1], make_state(1))
    checkpoints.save(2, make_state(2), {})
    assert_same(checkpoints.restore(make_state(0))[1], make_state(2))


def test_four_devices_to_one(opened, tmp_path):
    script = """
assert "orbax" not in sys.modules
from jax.sharding import AxisType, NamedSharding, PartitionSpec
mesh = jax.make_mesh((4,), ("seed",), axis_types=(AxisType.Auto,))
shard = NamedSharding(mesh, PartitionSpec("seed"))
same = NamedSharding(mesh, PartitionSpec())
place = lambda x: jax.device_put(x, shard if x.ndim and x.shape[0] == 4 else same)
state = jax.tree.map(place, make_state(1))
with contextlib.closing(Checkpoints(sys.argv[1])) as checkpoints:
    checkpoints.save(1, state, {})
    got = checkpoints.restore(jax.tree.map(place, make_state(0)))[1]
assert_same(got, state)
assert jax.tree.map(lambda x: x.sharding, got) == jax.tree.map(lambda x: x.sharding, state)
assert len(got["params"]["kernel"].sharding.device_set) == len(got["keys"].sharding.device_set) == 4
"""
    folder = tmp_path / "checkpoints"
    ended = run(script, folder, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert jax.device_count() == 1
    assert_same(opened(folder).restore(make_state(0))[1], make_state(1))


@pytest.mark.slow
def test_a_folder_that_becomes_read_only_does_not_hang_the_exit(tmp_path):
    """Orbax alone waits 300 s at exit here."""
    script = """
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, make_state(1), {})
checkpoints.wait()
checkpoints._prepare_folder = lambda size: None  # the folder turns read-only after it was probed
subprocess.run(["mount", "-o", "remount,ro", sys.argv[2]], check=True)
checkpoints.save(2, make_state(2), {})
"""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "tmpfs"):
        ended = run(script, tmp_path / "disk" / "checkpoints", tmp_path / "disk")
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert "saving step 2 " in last and "Read-only file system" in last and last.endswith("the last good step is 1")


@pytest.mark.slow
@pytest.mark.parametrize("service", ["1", "0"])
def test_two_processes_save_one_state(opened, tmp_path, service):
    """Global arrays over two processes of two devices, with JAX's preemption service on or off; one process reads."""
    script = """
from jax.sharding import AxisType, NamedSharding, PartitionSpec
jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, int(sys.argv[3]))
mesh = jax.make_mesh((4,), ("seed",), axis_types=(AxisType.Auto,))
shard = NamedSharding(mesh, PartitionSpec("seed"))
value = np.arange(8, dtype=np.float32)
state = {"x": jax.make_array_from_callback((8,), shard, lambda index: value[index])}
template = {"x": jax.make_array_from_callback((8,), shard, lambda index: 0 * value[index])}
with contextlib.closing(Checkpoints(sys.argv[1])) as checkpoints:
    checkpoints.save(1, state, {})
    checkpoints.save(2, {"x": state["x"] + 1}, {})
    step, got, _ = checkpoints.restore(template)
assert step == 2 and got["x"].sharding == shard
assert all((np.asarray(part.data) == value[part.index] + 1).all() for part in got["x"].addressable_shards)
"""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    environment = {
        **os.environ, "PYTHONPATH": str(PROJECT), "JAX_ENABLE_PREEMPTION_SERVICE": service,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }  # fmt: skip
    prelude = "import sys\nfrom tests.test_checkpoint import *\n"
    command = [sys.executable, "-c", prelude + script, str(tmp_path / "checkpoints"), str(port)]
    both = [subprocess.Popen([*command, str(i)], env=environment, stderr=subprocess.PIPE, text=True) for i in (0, 1)]
    try:
        said = [process.communicate(timeout=120)[1] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], said
    step, state, _ = opened().restore({"x": jnp.zeros(8)})
    assert step == 2
    np.testing.assert_array_equal(state["x"], np.arange(8) + 1)
