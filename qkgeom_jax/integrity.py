"""What lies on disk is what was written: seals, digests, and the check of a whole results folder.

A group's manifest.json has the sha256 of each of its files, OUT/manifest.json that of tables, figures and report; the
manifests and status.json carry a seal, the sha256 of their own content. Checkpoints have digests of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from qkgeom_jax.command import DONE, FAILED, tell
from qkgeom_jax.results import read_sealed, read_status, seal, write_json

# Not results, or sealed, or with digests of their own.
NOT_DIGESTED = {"manifest.json", "status.json", "lock", "error.txt", "checkpoints", "quarantine", "groups"}


def digest(path: Path) -> str:
    """The sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """The sha256 of every result file below `folder`, by its path inside."""
    found = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        hidden = inside.name.startswith(".")
        if path.is_file() and not hidden and inside.parts[0] not in NOT_DIGESTED:
            found[inside.as_posix()] = digest(path)
    return found


def update_manifest(folder: Path, values: Mapping[str, Any], without: Sequence[str] = ()) -> None:
    """Change entries of a folder's manifest.json, and leave some out; the file is made where it is missing."""
    path = folder / "manifest.json"
    value = read_sealed(path) if path.exists() else {}
    write_json(path, seal({name: item for name, item in value.items() if name not in without} | dict(values)))


@contextlib.contextmanager
def digested(out: Path) -> Iterator[None]:
    """A block that rewrites OUT's files; their digests, in its manifest where it has one, are renewed at the end.

    Until then the manifest has none, so that half of the old files beside half of the new is never taken for damage.

    Raises:
      ValueError: a folder of them is a link, and they would be written elsewhere.
    """
    for name in ("tables", "figures"):
        if (out / name).is_symlink():
            raise ValueError(f"{out / name} is a link; what is written there belongs into {out}")
    has_manifest = (out / "manifest.json").exists()
    if has_manifest:
        update_manifest(out, {}, without=["digests"])
    yield
    if has_manifest:
        update_manifest(out, {"digests": digests(out)})


def renew_digest(out: Path, name: str) -> None:
    """The digest, where there is one, of a file that was rewritten on purpose."""
    known = known_digests(out)
    if name in known:
        update_manifest(out, {"digests": known | {name: digest(out / name)}})


def changed(folder: Path, names: Iterable[str] | None = None) -> dict[str, str]:
    """What became of files since the folder's manifest was written: "missing" or "damaged", by name; {} when all is well.

    Args:
      folder: a group's, or OUT.
      names: the files to look at; all that the manifest names by default. A file that it does not name is passed over.
    """
    known, found = known_digests(folder), {}
    for name in known if names is None else known.keys() & set(names):
        file = folder / name
        if not file.is_file():
            found[name] = "missing"
        elif digest(file) != known[name]:
            found[name] = "damaged"
    return dict(sorted(found.items()))


def known_digests(folder: Path) -> dict[str, str]:
    """The digests in a folder's manifest.json, by the names of files inside; {} where it has none.

    Raises:
      ValueError: they are no digests, or one is of a file elsewhere.
    """
    path, home = folder / "manifest.json", folder.resolve()
    known = read_sealed(path).get("digests", {}) if path.exists() else {}
    if not isinstance(known, dict) or any(_leaves(folder, home, name) for name in known):
        raise ValueError(f"{path} is damaged: its digests are not of files beside it")
    return known


def _leaves(folder: Path, home: Path, name: str) -> bool:
    """Whether a name is of something outside the folder, through a link, too: what is damaged may be moved."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name or not name:
        return True
    return not (folder / name).parent.resolve().is_relative_to(home)


def require_unchanged(folder: Path, names: Iterable[str]) -> None:
    """Refuses to go on with files of a group that are not what was written.

    Raises:
      ValueError: names the first file, and the way out.
    """
    for name, state in changed(folder, names).items():
        raise ValueError(
            f"{folder / name} is {state}: it is not what was written; the command that trained it makes it again from the "
            "group's checkpoint"
        )


def verify(out: Path) -> tuple[list[str], list[str]]:
    """Compares a results folder with its digests, checkpoints included. Changes nothing.

    Returns:
      What is wrong, and what could not be compared: a sentence each.
    """
    problems, notes = [], []

    def look(folder: Path) -> bool:
        """Whether the folder's manifest has digests to compare with."""
        try:
            for name, state in changed(folder).items():
                problems.append(f"{folder / name} is {state}")
            path = folder / "manifest.json"
            return path.exists() and "digests" in read_sealed(path)
        except (OSError, ValueError) as error:
            problems.append(str(error))
            return True

    for group in sorted(path for path in (out / "groups").glob("*") if path.is_dir()):
        try:
            status = read_status(group / "status.json")["status"] if (group / "status.json").exists() else "partial"
        except (OSError, ValueError) as error:
            problems.append(str(error))
            continue
        if status != "done":
            notes.append(f"{group.name} is not finished: only its checkpoints were read")
        elif not look(group):
            notes.append(f"{group.name} has no digests: it is from before there were any")
        _verify_checkpoints(group, problems, notes)
    if not look(out):
        notes.append(f"{out} has tables without digests: the last command ended before they were whole; --figures makes them")
    return problems, notes


def print_verification(out: Path) -> int:
    """Say what `verify` found.

    Returns:
      The exit status: 0 all is well, 1 something is not what was written.
    """
    problems, notes = verify(out)
    for line in (*notes, *problems):
        tell(line)
    tell(f"{out}: {len(problems)} problems" if problems else f"{out}: all is as it was written")
    return FAILED if problems else DONE


def _verify_checkpoints(group: Path, problems: list[str], notes: list[str]) -> None:
    folder = group / "checkpoints"
    if not folder.is_dir():
        notes.append(f"{group.name} has no checkpoints")
        return
    from qkgeom_jax.checkpoint import Checkpoints, CheckpointError
    from qkgeom_jax.lock import Lock, LockedError

    try:
        lock = Lock(group / "lock")
    except LockedError as error:
        notes.append(f"its checkpoints were not read: {error}")
        return
    except OSError:  # where nothing can be written, nobody writes
        lock = None
    try:
        checkpoints = Checkpoints(folder, read_only=True)
        problems += checkpoints.verify()
        checkpoints.close()
    except CheckpointError as error:
        problems.append(str(error))
    finally:
        if lock:
            lock.release()
