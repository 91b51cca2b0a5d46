"""Checkpoints of a training state: written by Orbax in the background, verified leaf by leaf on the way back.

Orbax checksums neither arrays nor JSON, casts dtypes silently and reports a failed background write late. Here a step
is one Orbax checkpoint with two items: `state`, a flat dictionary from leaf path to host array, and `record`, JSON with
the caller's record and every leaf's dtype, shape and sha256. What does not match on the way back is never returned.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from qkgeom_jax.results import seal

# The process lacks something; the checkpoint may be sound.
_NOT_DAMAGE = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is sound but not what was asked for; the message names the step.

    `errno` is the system's number of the error, 0 where it was none of the system's.
    """

    def __init__(self, message: str, errno: int = 0) -> None:
        super().__init__(message)
        self.errno = errno


class _Damaged(Exception):
    """What is wrong with a step on disk."""


class Checkpoints:
    """The newest `keep` steps of one training run in one folder. Close it, or the last save may be lost.

    For one run at a time, which holds a `qkgeom_jax.lock.Lock`. `warnings_` says which steps were found damaged.

    Args:
      folder: created where missing, made absolute; must be writable.
      keep: how many steps stay on disk; an older one is deleted once a newer one is complete.
      read_only: for `steps`, `verify` and `close` alone; writes nothing.

    Raises:
      ValueError: `keep` is not a whole number of at least 1.
      CheckpointError: the folder cannot be created or written.

    >>> folder, state = tempfile.mkdtemp(), {"weights": jnp.arange(3.0), "key": jax.random.key(7)}
    >>> with contextlib.closing(Checkpoints(folder)) as checkpoints:
    ...     checkpoints.save(10, state, {"epoch": 1})
    >>> with contextlib.closing(Checkpoints(folder)) as checkpoints:
    ...     step, restored, record = checkpoints.restore(jax.eval_shape(lambda: state))
    >>> step, restored["weights"].tolist(), record
    (10, [0.0, 1.0, 2.0], {'epoch': 1})
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2, read_only: bool = False) -> None:
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ValueError(f"keep is {keep!r}; allowed: a whole number of at least 1")
        self.folder = Path(folder).absolute()
        self.warnings_: list[str] = []
        self._doing = ""
        try:
            if not read_only:
                self._prepare_folder()
        except OSError as error:
            number, reason = _cause(error)
            raise CheckpointError(f"checkpoints cannot be written to {self.folder}: {reason}", number) from error
        # Imported here: it takes half a second, and whoever asks for `--help` need not wait.
        import orbax.checkpoint as ocp

        # What Orbax has to say comes back as an error; its log lines stay off the terminal.
        logging.getLogger("absl").addFilter(_not_from_orbax)
        self._ocp, self._keep = ocp, keep
        self._manager = self._open()

    @property
    def steps(self) -> list[int]:
        """The complete steps on disk, oldest first; one still being written is not among them."""
        # Orbax renames a step's folder into place when all of it is written, so a name is a promise.
        names = os.listdir(self.folder) if self.folder.is_dir() else ()
        return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))

    def save(self, step: int, state: Any, record: dict[str, Any]) -> None:
        """Copies `state`, which may then be donated, and returns while the copy is still being written.

        Args:
          step: greater than every step on disk.
          state: a pytree of arrays, typed PRNG keys among them; keys of dictionaries are strings.
          record: JSON values.

        Raises:
          ValueError: a step that is not newer than the last, or what would not come back as it is.
          CheckpointError: this save, or the one before it, failed; names its step and the last good one.
        """
        self.wait()
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(f"step is {step!r}; allowed: a whole number of at least 0")
        if self.steps and step <= self.steps[-1]:
            raise ValueError(f"step is {step}; it must be greater than the last saved step, {self.steps[-1]}")
        _require_json(record)
        arrays, leaves = _on_host(_leaves("state", state))
        item = seal({"step": step, "record": record, "leaves": leaves})
        ocp, size = self._ocp, sum(array.nbytes for array in arrays.values())
        self._doing = f"saving step {step} ({size / 1e6:.1f} MB) to {self.folder}"
        with self._failing():
            self._prepare_folder(size)
            if list(self._manager.all_steps()) != self.steps:  # after a failure or a quarantine
                self._manager.close()
                self._manager = self._open()
            args = ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), record=ocp.args.JsonSave(item))
            self._manager.save(step, args=args, force=True)

    def wait(self) -> None:
        """Returns when the last save is complete on disk; raises CheckpointError, once, when it failed."""
        with self._failing():
            self._manager.wait_until_finished()

    def restore(self, template: Any) -> tuple[int, Any, dict[str, Any]] | None:
        """The newest step that verifies, as (step, state, record), or None.

        One that does not verify is moved to `quarantine/`, said in `warnings_`, and the one before it is tried.

        Args:
          template: a pytree with the saved one's leaves, shapes and dtypes: arrays, or `jax.ShapeDtypeStruct`s. Where a
            leaf is committed to a sharding, so is the restored one; else it lies on the default device.

        Raises:
          CheckpointError: the step is sound but its leaves, shapes or dtypes are not the template's.
        """
        self.wait()
        wanted = _leaves("template", template)
        for step in reversed(self.steps):
            try:
                record, leaves, arrays = self._read(step, wanted)
            except _Damaged as damage:
                self._quarantine(step, str(damage))
                continue
            placed = [_place(path, arrays[path], leaves[path], leaf) for path, leaf in wanted.items()]
            return step, jax.tree.unflatten(jax.tree.structure(template), placed), record
        return None

    def verify(self) -> list[str]:
        """Reads every step and says what is wrong with it; moves nothing. Empty when all is well."""
        self.wait()
        problems = []
        for step in self.steps:
            try:
                self._read(step)
            except _Damaged as damage:
                problems.append(f"the checkpoint of step {step} in {self.folder} is damaged ({damage})")
        return problems

    def close(self) -> None:
        """Waits as `wait` does, then ends Orbax's threads. Closing twice does nothing."""
        try:
            self.wait()
        finally:
            self._doing = f"closing {self.folder}"
            with self._failing():
                self._manager.close()

    def _open(self) -> Any:
        ocp = self._ocp
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep, create=False, save_root_metadata=False,
            # Otherwise opening fails on the first step that has unreadable metadata.
            lightweight_initialize=True,
            # Otherwise a folder that cannot be created fails in the background and is waited for, 300 s, at exit; and a clock
            # that is set forward while a step is saved would end the wait for it.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False, timeout_secs=2**30),
        )  # fmt: skip
        manager = ocp.CheckpointManager(self.folder, options=options)
        # Signals are the caller's; on a preemption notice Orbax would ask for the times that it did not read.
        manager.reached_preemption = lambda step: False
        return manager

    def _read(self, step: int, wanted: dict[str, Any] | None = None) -> tuple[dict, dict, dict[str, np.ndarray]]:
        """Record, leaf descriptions and arrays of a step, all as they were saved; compared with `wanted` first."""
        ocp, folder = self._ocp, self.folder / str(step)
        try:
            if folder.is_symlink():
                raise _Damaged("a symbolic link")
            item = dict(self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"])
            if item != seal(item) or item["step"] != step:
                raise _Damaged("its record is not what was saved")
            leaves, arrays = item["leaves"], {}
            if wanted is not None:
                _require_fit(f"step {step} in {self.folder}", leaves, wanted)
            for path, leaf in leaves.items():
                # One at a time: when one of several concurrent reads fails, the others print tracebacks of their own.
                args = ocp.args.PyTreeRestore(
                    item={path: 0}, restore_args={path: ocp.RestoreArgs(restore_type=np.ndarray)}, partial_restore=True
                )
                arrays[path] = self._manager.restore(step, args=ocp.args.Composite(state=args))["state"][path]
                if _digest(arrays[path]) != leaf["sha256"]:
                    raise _Damaged(f"{path} is not what was saved")
            return item["record"], leaves, arrays
        except (_Damaged, CheckpointError, MemoryError):
            raise
        except Exception as error:
            number, reason = _cause(error)
            if number in _NOT_DAMAGE:
                raise CheckpointError(f"step {step} in {self.folder} cannot be read: {reason}", number) from error
            raise _Damaged(f"cannot be read: {reason}") from error

    def _quarantine(self, step: int, damage: str) -> None:
        """Moves a damaged step out of the way and says so."""
        target = self.folder / "quarantine" / f"{step}-{secrets.token_hex(4)}"
        if jax.process_index() == 0:
            target.parent.mkdir(exist_ok=True)
            os.replace(self.folder / str(step), target)
        self.warnings_.append(f"the checkpoint of step {step} is damaged ({damage}); moved to {target}")

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Any error as a CheckpointError of one sentence; nothing of a failed save stays on disk."""
        try:
            yield
        except Exception as error:
            self._remove_leftovers()
            free = shutil.disk_usage(self.folder).free if self.folder.is_dir() else 0
            good = f"the last good step is {self.steps[-1]}" if self.steps else "there is no good step"
            number, reason = _cause(error)
            raise CheckpointError(f"{self._doing} failed: {reason} ({free / 1e6:.1f} MB free); {good}", number) from error

    def _prepare_folder(self, size: int = 1) -> None:
        """Makes the folder, clears it of interrupted saves, and raises OSError when `size` bytes cannot be written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        with tempfile.TemporaryFile(dir=self.folder) as file:
            # A disk that is full is said here; in the background every array would print a traceback of its own.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, max(size, 1))
            file.write(b"0")

    def _remove_leftovers(self) -> None:
        if jax.process_index() == 0:
            for path in self.folder.glob("*.orbax-checkpoint-tmp*"):
                path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def _leaves(name: str, tree: Any) -> dict[str, Any]:
    """Leaf path -> array."""
    leaves: dict[str, Any] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        if not all(isinstance(getattr(key, "key", ""), str) for key in keys):
            raise ValueError(f"{name} has a dictionary key that is no string in {path}; allowed: strings")
        if not isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
            raise ValueError(f"{name} has {leaf!r} at {path}; allowed: arrays")
        if path in leaves:
            raise ValueError(f"{name} has two leaves named {path}; allowed: one")
        leaves[path] = leaf
    return leaves


def _on_host(leaves: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]:
    """Host copies, and their descriptions as JSON."""
    prng = {path for path, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)}
    data = {path: jax.random.key_data(leaf) if path in prng else leaf for path, leaf in leaves.items()}
    for path, array in data.items():
        if not getattr(array, "is_fully_addressable", True):
            data[path] = multihost_utils.process_allgather(array, tiled=True)
    # Copies also on the CPU, where views would do, but the caller may donate what they view.
    arrays = {path: np.array(array) for path, array in jax.device_get(data).items()}
    described = {
        path: {"dtype": str(leaf.dtype), "shape": list(leaf.shape), "sha256": _digest(arrays[path])}
        for path, leaf in leaves.items()
    }
    for path in prng:
        described[path]["generator"] = str(jax.random.key_impl(leaves[path]))
    return arrays, described


def _place(path: str, array: np.ndarray, described: dict[str, Any], leaf: Any) -> jax.Array:
    """A verified host array as a device array like `leaf`."""
    # Where the template was never committed to a device, the state must not be either: jit would compile again.
    sharding = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
    placed = jax.device_put(array, sharding)
    if placed.dtype != array.dtype:
        raise CheckpointError(f"{path} is {array.dtype}, which JAX would cast to {placed.dtype} here")
    return jax.random.wrap_key_data(placed, impl=described["generator"]) if "generator" in described else placed


def _require_fit(name: str, leaves: dict[str, Any], wanted: dict[str, Any]) -> None:
    """A sound step of another configuration is a mistake of the caller's, not damage."""
    had = {path: f"{leaf['dtype']}{leaf['shape']}" for path, leaf in leaves.items()}
    want = {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in wanted.items()}
    for path in sorted(had.keys() | want.keys()):
        if (there := had.get(path, "missing")) != (here := want.get(path, "missing")):
            raise CheckpointError(f"{name} does not fit: {path} is {there} there and {here} in the template")


def _require_json(record: Any) -> None:
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        if isinstance(record, dict) and json.loads(json.dumps(record, allow_nan=False)) == record:
            return
    raise ValueError(f"record is {str(record)[:200]}; allowed: a dictionary of JSON values with finite numbers")


def _digest(array: np.ndarray) -> str:
    """sha256 over dtype, shape and bytes."""
    digest = hashlib.sha256(f"{array.dtype} {array.shape} ".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return digest.hexdigest()


def _cause(error: Exception) -> tuple[int, str]:
    """The system's error number or 0, and what went wrong without the paths and settings wrapped around it."""
    found = re.search(r"os_error_code='(\d+)'", str(error))  # how TensorStore reports it
    number = int(found[1]) if found else getattr(error, "errno", None) or 0
    text = os.strerror(number) if number else str(error).partition(" [tensorstore_spec")[0].strip()
    return number, text.splitlines()[0][:200] if text else type(error).__name__
