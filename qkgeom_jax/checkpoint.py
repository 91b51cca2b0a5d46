"""Checkpoints of a training state: written by Orbax in the background, verified leaf by leaf on the way back.

Orbax checksums neither arrays nor JSON, casts dtypes silently and reports a failed background write late. Here a step is
one Orbax checkpoint with two items: `state`, a flat dictionary from leaf path to host array, and `record`, JSON with the
caller's record and every leaf's shape, dtype and sha256. What does not match on the way back is never returned.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

QUARANTINE = "quarantine"
_STEP_NAME = re.compile(r"0|[1-9][0-9]*")
_LEFTOVERS = "*.orbax-checkpoint-tmp*"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or does not fit; the message names the step and the last good one."""


class _Damaged(Exception):
    """What is wrong with a step on disk."""


class Checkpoints:
    """The newest `keep` steps of one training run in one folder.

    Not for two processes at once: hold a `qkgeom_jax.lock.Lock` on the folder's owner first.

    Args:
      folder: created where missing, made absolute; probed for writing before Orbax sees it.
      keep: how many steps stay on disk; an older one is deleted once a newer one is complete.

    Attributes:
      warnings_: sentences for the user about steps that were found damaged and where they went.

    Raises:
      ValueError: `keep` is not a whole number of at least 1.
      CheckpointError: the folder cannot be created or written.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ValueError(f"keep is {keep!r}; allowed: a whole number of at least 1")
        self.folder = Path(folder).absolute()
        self.warnings_: list[str] = []
        self._pending: tuple[int, int] | None = None  # step and bytes of the save in the background
        _probe(self.folder)
        _hush()
        # Half a second that a user of the metrics, or of `--help`, need not wait.
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self._sweep()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=False, save_root_metadata=False)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    @property
    def steps(self) -> list[int]:
        """The complete steps on disk, oldest first; one still being written is not among them."""
        # Orbax renames a step's folder into place when all of it is written, so a name is a promise.
        names = (path.name for path in self.folder.iterdir())
        return sorted(int(name) for name in names if _STEP_NAME.fullmatch(name))

    def save(self, step: int, state: Any, record: dict[str, Any]) -> None:
        """Copies `state` to the host and starts writing it; returns while the disk is still at work.

        The state may be donated or deleted as soon as this returns.

        Args:
          step: greater than every step saved before.
          state: a pytree of arrays; dictionary keys must be strings. Typed PRNG keys are welcome.
          record: JSON values that come back as they are.

        Raises:
          ValueError: an argument that could not be restored as it is, or a step that is not newer than the last.
          CheckpointError: this save, or the one before it, failed.
        """
        self.wait()
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(f"step is {step!r}; allowed: a whole number of at least 0")
        if self.steps and step <= self.steps[-1]:
            raise ValueError(f"step is {step}; it must be greater than the last saved step, {self.steps[-1]}")
        _require_json(record)
        leaves = _leaves(state, "state")
        arrays = _to_host(leaves)
        described = {path: _describe(leaf, arrays[path]) for path, leaf in leaves.items()}
        item = _sealed({"step": step, "record": record, "leaves": described})
        self._pending = step, sum(array.nbytes for array in arrays.values())
        args = self._ocp.args.Composite(
            state=self._ocp.args.PyTreeSave(arrays), record=self._ocp.args.JsonSave(item)
        )
        try:
            saved = self._manager.save(step, args=args, force=True)
        except Exception as error:
            raise self._failure(error) from error
        if not saved:
            raise self._failure(RuntimeError("Orbax declined to save it"))

    def wait(self) -> None:
        """Returns when the last save is complete on disk.

        Raises:
          CheckpointError: it failed; the message names its step and the last good one. Said once.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure(error) from error
        self._pending = None

    def restore(self, template: Any) -> tuple[int, Any, dict[str, Any]] | None:
        """The newest step that verifies, or None.

        A step that does not verify is moved to `quarantine/`, said in `warnings_`, and the one before is tried.

        Args:
          template: a pytree with the saved one's structure, shapes and dtypes: arrays, or `jax.ShapeDtypeStruct`s. A
            leaf that has a sharding decides where the restored one lies; else it lies on the default device.

        Returns:
          (step, state, record).

        Raises:
          ValueError: the template has a leaf that is no array.
          CheckpointError: the step is sound but has other leaves, shapes or dtypes than the template.
        """
        self.wait()
        wanted = _leaves(template, "template")
        for step in reversed(self.steps):
            try:
                item = self._read_record(step)
                self._require_fit(step, item["leaves"], wanted)
                arrays = self._read_arrays(step, item["leaves"])
            except _Damaged as damage:
                self._quarantine(step, str(damage))
                continue
            placed = [_place(arrays[path], leaf, item["leaves"][path]) for path, leaf in wanted.items()]
            return step, jax.tree.unflatten(jax.tree.structure(template), placed), item["record"]
        return None

    def verify(self) -> list[str]:
        """Reads every step and says what is wrong with it; moves nothing. Empty when all is well."""
        self.wait()
        problems = []
        for step in self.steps:
            try:
                self._read_arrays(step, self._read_record(step)["leaves"])
            except _Damaged as damage:
                problems.append(f"checkpoint {self.folder / str(step)}: {damage}")
        return problems

    def close(self) -> None:
        """Waits for the last save and ends Orbax's threads. Closing twice does nothing.

        Raises:
          CheckpointError: the last save failed.
        """
        try:
            self.wait()
        finally:
            self._manager.close()

    def _read_record(self, step: int) -> dict[str, Any]:
        """The step's JSON item, if it is what `save` wrote."""
        args = self._ocp.args.Composite(record=self._ocp.args.JsonRestore())
        try:
            item = dict(self._manager.restore(step, args=args)["record"])
        except Exception as error:
            raise _Damaged(f"its record cannot be read ({_first_line(error)})") from error
        if item != _sealed({key: value for key, value in item.items() if key != "sha256"}) or item.get("step") != step:
            raise _Damaged("its record is not what was saved")
        return item

    def _read_arrays(self, step: int, leaves: dict[str, Any]) -> dict[str, np.ndarray]:
        """The step's host arrays, every one with the digest in `leaves`."""
        as_numpy = {path: self._ocp.RestoreArgs(restore_type=np.ndarray) for path in leaves}
        args = self._ocp.args.Composite(state=self._ocp.args.PyTreeRestore(restore_args=as_numpy))
        try:
            arrays = self._manager.restore(step, args=args)["state"]
        except Exception as error:
            raise _Damaged(f"its arrays cannot be read ({_first_line(error)})") from error
        if set(arrays) != set(leaves):
            raise _Damaged("arrays are missing or added")
        for path, array in arrays.items():
            if _digest(array) != leaves[path]["sha256"]:
                raise _Damaged(f"{path} is not what was saved")
        return arrays

    def _require_fit(self, step: int, leaves: dict[str, Any], wanted: dict[str, Any]) -> None:
        """A sound step of another configuration is the caller's mistake, not damage."""
        for path in sorted(set(leaves) ^ set(wanted)):
            where = "the checkpoint" if path in leaves else "the template"
            raise CheckpointError(f"step {step} in {self.folder} does not fit: only {where} has {path}")
        for path, leaf in wanted.items():
            had, want = _form(leaves[path]["dtype"], leaves[path]["shape"]), _form(leaf.dtype, leaf.shape)
            if had != want:
                raise CheckpointError(f"step {step} in {self.folder} does not fit: {path} is {had}, not {want}")

    def _quarantine(self, step: int, damage: str) -> None:
        """Moves a damaged step out of Orbax's sight and says so."""
        folder = self.folder / QUARANTINE
        folder.mkdir(exist_ok=True)
        target = next(p for n in range(10**6) if not os.path.lexists(p := folder / (f"{step}-{n}" if n else f"{step}")))
        os.replace(self.folder / str(step), target)
        self._manager.reload()
        self.warnings_.append(f"checkpoint of step {step} is damaged: {damage}; moved to {target}")

    def _failure(self, error: Exception) -> CheckpointError:
        """The failed save as one error; afterwards the folder is as if it had never been tried."""
        (step, size), self._pending = self._pending or (None, 0), None
        self._sweep()
        self._manager.reload()
        good = f"the last good step is {self.steps[-1]}" if self.steps else "there is no earlier step"
        reason = _first_line(error)
        free = shutil.disk_usage(self.folder).free
        if "No space left" in str(error) or free < size:
            reason = f"the disk is full: it needs about {size / 1e6:.1f} MB, {free / 1e6:.1f} MB are free"
        return CheckpointError(f"saving step {step} to {self.folder} failed ({reason}); {good}")

    def _sweep(self) -> None:
        """Removes what an interrupted save left behind."""
        for path in self.folder.glob(_LEFTOVERS):
            path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)


def _probe(folder: Path) -> None:
    """Writes and deletes one file: Orbax would fail too, but then hang for five minutes at exit."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"checkpoints cannot be written to {folder}: {reason}") from error


def _from_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" in record.pathname


def _keep_log(record: logging.LogRecord) -> bool:
    return not _from_orbax(record)


def _hush() -> None:
    """Keeps Orbax's log lines from the terminal; everything it has to say comes back as an error."""
    logging.getLogger("absl").addFilter(_keep_log)


def _leaves(tree: Any, name: str) -> dict[str, Any]:
    """Leaf path -> array, in the tree's order."""
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        text = jax.tree_util.keystr(path, simple=True, separator="/")
        for key in path:
            if isinstance(key, jax.tree_util.DictKey) and not isinstance(key.key, str):
                raise ValueError(f"{name} has the dictionary key {key.key!r} in {text}; allowed: strings")
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            raise ValueError(f"{name} has {leaf!r} at {text}; allowed: arrays")
        if text in leaves:
            raise ValueError(f"{name} has two leaves named {text}")
        leaves[text] = leaf
    return leaves


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_host(leaves: dict[str, Any]) -> dict[str, np.ndarray]:
    """Host copies that share no memory with the device: on a CPU, views would, and the caller may donate."""
    arrays = {path: jax.random.key_data(leaf) if _is_key(leaf) else leaf for path, leaf in leaves.items()}
    return {path: np.array(array) for path, array in jax.device_get(arrays).items()}


def _place(array: np.ndarray, leaf: Any, described: dict[str, Any]) -> jax.Array:
    """A verified host array as a device array like `leaf`."""
    # A template that was never committed to a device must not make a restored state that is: jit would compile again.
    sharding = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
    placed = jax.device_put(array, sharding)
    return jax.random.wrap_key_data(placed, impl=described["key"]) if "key" in described else placed


def _describe(leaf: Any, array: np.ndarray) -> dict[str, Any]:
    described = {"dtype": str(leaf.dtype), "shape": list(leaf.shape), "sha256": _digest(array)}
    return {**described, "key": str(jax.random.key_impl(leaf))} if _is_key(leaf) else described


def _digest(array: np.ndarray) -> str:
    """sha256 over dtype, shape and bytes."""
    digest = hashlib.sha256(f"{array.dtype} {array.shape} ".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return digest.hexdigest()


def _sealed(item: dict[str, Any]) -> dict[str, Any]:
    """`item` with the sha256 of its own canonical JSON."""
    text = json.dumps(item, sort_keys=True, allow_nan=False)
    return {**item, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _require_json(record: Any) -> None:
    try:
        same = json.loads(json.dumps(record, allow_nan=False)) == record
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same or not isinstance(record, dict):
        raise ValueError(f"record is {record!r}; allowed: a dictionary of JSON values, with string keys and finite numbers")


def _form(dtype: Any, shape: Any) -> str:
    return f"{dtype}[{', '.join(str(n) for n in shape)}]"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
