"""Tidy tables on disk: atomic writers, a strict reader, and the study's tables rebuilt from its groups' folders."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import hashlib
import io
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from qkgeom_jax.config import arm_name, from_dict
from qkgeom_jax.reading import read_bytes, require_regular

METRIC_COLUMNS = (
    "attention_entropy", "top_1_mass", "top_5_mass", "attention_gap",
    "cosine_similarity", "column_alignment", "column_alignment_signed",
    "participation_ratio_q", "participation_ratio_k",
    "participation_ratio_q_joint", "participation_ratio_k_joint",
    "participation_ratio_q_uncentred", "participation_ratio_k_uncentred",
    "participation_ratio_q_weight", "participation_ratio_k_weight",
    "effective_rank_q", "effective_rank_k",
    "covariance_trace_q", "covariance_trace_k", "covariance_max_q", "covariance_max_k",
    "covariance_min_q", "covariance_min_k", "covariance_condition_q", "covariance_condition_k",
    "effective_rank_qk", "effective_rank_qk_weight",
    "logit_mean", "logit_std", "logit_variance", "logit_max",
    "activation_norm_q", "activation_norm_k", "activation_norm_residual",
    "frobenius_norm_q", "frobenius_norm_k", "spectral_norm_q", "spectral_norm_k",
)  # fmt: skip

GROUP_LOSS_COLUMNS = ("seed", "epoch", "step", "train_loss", "val_loss")
GROUP_METRIC_COLUMNS = ("seed", "epoch", "step", "layer", *METRIC_COLUMNS)
GROUP_KEY = ("depth", "init", "intervention")
LOSS_COLUMNS = (*GROUP_KEY, *GROUP_LOSS_COLUMNS)
METRIC_TABLE_COLUMNS = (*GROUP_KEY, *GROUP_METRIC_COLUMNS)
RUN_COLUMNS = (
    *GROUP_KEY, "seed", "status", "diverged_step", "final_train_loss", "final_val_loss", "final_alignment",
)  # fmt: skip
STATUSES = ("done", "partial", "failed")

INTEGER_COLUMNS = frozenset({"depth", "seed", "epoch", "step", "layer"})
TEXT_COLUMNS = frozenset({"init", "intervention", "status"})

Table = dict[str, np.ndarray]


def _open_temporary(path: Path) -> BinaryIO:
    """A link of that name would be followed and what it points at be emptied, and a pipe would block: they are removed."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            os.unlink(path)
    return os.fdopen(os.open(path, flags, 0o666), "ab")


@contextlib.contextmanager
def _only_writer(temporary: Path) -> Iterator[BinaryIO]:
    """Open the temporary file of a target, alone: processes that train different groups rebuild the same tables."""
    while True:
        with _open_temporary(temporary) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                current = os.path.samestat(os.fstat(file.fileno()), os.stat(temporary))
            except FileNotFoundError:
                current = False
            if current:  # otherwise the writer before us has renamed the file that we waited for
                yield file
                return


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
    """Replace a file by `data`, whole or not at all.

    The bytes go to ``.NAME.tmp`` in the same folder, reach the disk, and take the target's name. The temporary name
    is fixed, so that what a killed process left behind is used up by the next one. Folders are made as needed.

    Args:
      path: the file to write.
      data: its whole content.

    Raises:
      OSError: the folder cannot be written, or the disk is full. The old file stays, and no temporary one.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with _only_writer(temporary) as file:
        try:
            file.truncate(0)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename is None:  # a full disk names no file
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write UTF-8 text as `write_bytes` does, whatever the locale; line ends stay as they are."""
    # A name from a locale that is no UTF-8 holds lone surrogates; as \udcff they are what JSON reads back, too.
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write a JSON file as `write_bytes` does, keys in the order given.

    Raises:
      ValueError: a value that JSON has no name for (NaN, an infinity).
      TypeError: a value of a type that JSON does not have.
    """
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    write_text(path, text + "\n")


def _cell(value: Any) -> str:
    """A table cell: whole numbers as they are, others to nine digits (exact for float32), nothing for undefined."""
    if value is None:
        return ""
    if isinstance(value, (str, int, np.integer)):
        return str(value)
    return "" if np.isnan(value) else format(float(value), ".9g")


def write_csv(path: str | os.PathLike, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table as `write_bytes` does: numbers to nine digits, an empty cell for None and NaN.

    Args:
      path: the file to write.
      columns: names for the first line.
      rows: text, whole numbers, floating-point numbers or None, as many in a row as there are columns.

    Raises:
      ValueError: a row of another length.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_csv(folder + "/t.csv", ("seed", "val_loss"), [(7, 0.1), (37, None)])
    ...     print(Path(folder, "t.csv").read_text(), read_csv(folder + "/t.csv", ("val_loss",)))
    seed,val_loss
    7,0.1
    37,
     {'val_loss': array([0.1, nan])}
    """
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"{path}: a row has {len(row)} cells, the table {len(columns)} columns")
        writer.writerow([_cell(value) for value in row])
    write_text(path, stream.getvalue())


def write_npz(path: str | os.PathLike, arrays: Mapping[str, np.ndarray]) -> None:
    """Write named arrays as `write_bytes` does. Equal arrays give equal bytes: NumPy stamps each member 1980."""
    stream = io.BytesIO()
    np.savez(stream, allow_pickle=False, **{name: arrays[name] for name in sorted(arrays)})
    write_bytes(path, stream.getvalue())


def _read_rows(path: Path, columns: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """The line number and the cells of each row of a file that has at least `columns`."""
    require_regular(path)
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.reader(file, strict=True)
            header, *rows = [(reader.line_num, row) for row in reader] or [(0, [])]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no table in UTF-8: {error}") from error
    names = header[1]
    for column in columns:
        if column not in names:
            raise ValueError(f"{path} has no column {column}")
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{path} has the column {name} twice")
    for line, row in rows:
        if len(row) != len(names):
            raise ValueError(f"{path}, line {line}: {len(row)} cells, expected {len(names)}")
    return [(line, dict(zip(names, row))) for line, row in rows]


def _number(path: Path, line: int, column: str, cell: str) -> int | float:
    """A cell as a number; NaN for an empty one where the column is not of whole numbers."""
    try:
        if column in INTEGER_COLUMNS:
            return int(np.int64(int(cell)))
        return float(cell) if cell else np.nan
    except (ValueError, OverflowError):
        kind = "a whole number" if column in INTEGER_COLUMNS else "a number"
        shown = repr(cell) if len(cell) <= 40 else f"{cell[:40]!r}..."
        raise ValueError(f"{path}, line {line}: {column} is {shown}, expected {kind}") from None


def read_csv(path: str | os.PathLike, columns: Sequence[str]) -> Table:
    """Read named columns of a table.

    Args:
      path: a file as `write_csv` writes it.
      columns: the columns to read; others are left out.

    Returns:
      An array [rows] for each of `columns`, in their order: int64 for depth, seed, epoch, step and layer, text for
      init, intervention and status, else float64 with NaN for an empty cell. No rows give arrays of length 0.

    Raises:
      ValueError: a column is missing or there twice, a row too short or too long, or a cell no number.
      OSError: the file cannot be read.
    """
    path = Path(path)
    rows = _read_rows(path, columns)
    table: Table = {}
    for column in columns:
        if column in TEXT_COLUMNS:
            table[column] = np.array([cells[column] for _, cells in rows], dtype=np.str_)
        else:
            dtype = np.int64 if column in INTEGER_COLUMNS else np.float64
            table[column] = np.array([_number(path, line, column, cells[column]) for line, cells in rows], dtype)
    return table


def select(table: Table, rows: np.ndarray) -> Table:
    """The rows of a table that a boolean mask or an index array [rows] names."""
    return {column: values[rows] for column, values in table.items()}


@dataclass(frozen=True)
class Group:
    """One group's folder: its configuration (as `Config.to_dict` gives it) and how far it has come."""

    folder: Path
    config: dict[str, Any]
    status: str
    epochs_done: int
    diverged: dict[int, int]

    @property
    def key(self) -> tuple[int, str, str]:
        """Depth, initialisation, intervention."""
        return self.config["model"]["depth"], self.config["model"]["init"], arm_name(self.config["intervention"])

    @property
    def seeds(self) -> list[int]:
        return sorted(self.config["seeds"])


def read_json(path: str | os.PathLike) -> Any:
    """Read a JSON file.

    Raises:
      ValueError: the file is no JSON, or not in UTF-8; its name is said.
      OSError: the file cannot be read.
    """
    try:
        return json.loads(read_bytes(path).decode("utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is no JSON file of ours: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error


def seal(value: dict[str, Any]) -> dict[str, Any]:
    """`value` with the sha256 of its own JSON; an old seal is replaced."""
    bare = {name: item for name, item in value.items() if name != "sha256"}
    text = json.dumps(bare, sort_keys=True, allow_nan=False)
    return {**bare, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def read_sealed(path: Path) -> dict[str, Any]:
    """A sealed JSON object; one from before there were seals is taken as it is.

    Raises:
      ValueError: the file is no JSON object, or not what was written.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, expected an object with names")
    try:
        whole = "sha256" not in value or seal(value) == value
    except (RecursionError, ValueError):  # nothing that JSON would have been written for
        whole = False
    if not whole:
        raise ValueError(f"{path} is damaged: its content is not what its seal says")
    return value


def read_status(path: Path) -> dict[str, Any]:
    """A group's status.json: its status, how many epochs are done, and `diverged` as whole numbers.

    Raises:
      ValueError: it is not what `group.status_value` makes.
      OSError: it cannot be read.
    """
    value = read_sealed(path)
    try:
        if value["status"] not in STATUSES:
            raise ValueError(f"status is {value['status']!r}; allowed: {', '.join(STATUSES)}")
        diverged = {int(seed): int(step) for seed, step in value["diverged"].items()}
        return {"status": value["status"], "epochs_done": int(value["epochs_done"]), "diverged": diverged}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} lacks a part: {error!r}") from error
    except (OverflowError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _read_group(folder: Path) -> Group:
    path = folder / "config.json"
    config = read_json(path)
    try:
        config = config | from_dict(config).to_dict()  # whatever a value may not be, it refuses
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    path = folder / "status.json"
    status = read_status(path) if path.exists() else {"status": "partial", "epochs_done": 0, "diverged": {}}
    return Group(folder, config, **status)


def read_groups(out: str | os.PathLike) -> list[Group]:
    """The groups of a study, sorted by depth, initialisation and intervention.

    A folder that has no config.json yet holds nothing and is passed over; one that has no status.json yet is partial.

    Args:
      out: the study's folder.

    Raises:
      ValueError: a file is damaged, or two folders hold the same group.
    """
    folders = sorted(path.parent for path in Path(out).glob("groups/*/config.json"))
    groups: dict[tuple, Group] = {}
    for group in map(_read_group, folders):
        if group.key in groups:
            raise ValueError(f"{group.folder} and {groups[group.key].folder} hold the same group")
        groups[group.key] = group
    return [groups[key] for key in sorted(groups)]


def _group_rows(path: Path, columns: Sequence[str], key: Sequence[str]) -> list[list[str]]:
    """A group's table as text, sorted by the whole numbers in its key columns; none where it is not there yet."""
    if not path.exists():
        return []
    rows = {}
    for line, cells in _read_rows(path, columns):
        values = {c: _number(path, line, c, cells[c]) for c in columns}  # every cell is checked, none is rewritten
        place = tuple(values[column] for column in key)
        if place in rows:
            raise ValueError(f"{path}, line {line}: a second row for {', '.join(key)} = {place}")
        rows[place] = [cells[column] for column in columns]
    return [rows[place] for place in sorted(rows)]


def _last(rows: list[list[str]], columns: Sequence[str], seed: int, column: str) -> float:
    """The mean of a column over a seed's rows at its last epoch; NaN where it has none."""
    seed_at, epoch_at, value_at = columns.index("seed"), columns.index("epoch"), columns.index(column)
    own = [row for row in rows if int(row[seed_at]) == seed]
    last = max((int(row[epoch_at]) for row in own), default=None)
    values = [float(row[value_at] or "nan") for row in own if int(row[epoch_at]) == last]
    return sum(values) / len(values) if values else np.nan


def collect(out: str | os.PathLike) -> list[Group]:
    """Rebuild runs.csv, losses.csv and metrics.csv of a study from its groups' folders.

    Cells are taken over as text, so equal groups give equal bytes. A run's status is its group's, or ``diverged``;
    its final values are those of its last epoch so far, and empty where it diverged.

    Args:
      out: the study's folder.

    Returns:
      The groups, as `read_groups` gives them.

    Raises:
      ValueError: a group's file is damaged; the file, line and column are said.
      OSError: a file cannot be read or written.
    """
    out = Path(out)
    groups = read_groups(out)
    runs, losses, metrics = [], [], []
    for group in groups:
        loss_rows = _group_rows(group.folder / "losses.csv", GROUP_LOSS_COLUMNS, ("seed", "epoch"))
        metric_rows = _group_rows(group.folder / "metrics.csv", GROUP_METRIC_COLUMNS, ("seed", "epoch", "layer"))
        losses += [[*group.key, *row] for row in loss_rows]
        metrics += [[*group.key, *row] for row in metric_rows]
        for seed in group.seeds:
            if seed in group.diverged:
                runs.append([*group.key, seed, "diverged", group.diverged[seed], None, None, None])
                continue
            final = [_last(loss_rows, GROUP_LOSS_COLUMNS, seed, column) for column in ("train_loss", "val_loss")]
            alignment = _last(metric_rows, GROUP_METRIC_COLUMNS, seed, "column_alignment")
            runs.append([*group.key, seed, group.status, None, *final, alignment])
    write_csv(out / "runs.csv", RUN_COLUMNS, runs)
    write_csv(out / "losses.csv", LOSS_COLUMNS, losses)
    write_csv(out / "metrics.csv", METRIC_TABLE_COLUMNS, metrics)
    return groups
