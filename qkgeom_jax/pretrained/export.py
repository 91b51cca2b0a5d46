"""Epochs of our own training as folders that other software loads: GPT-2's layout, one folder a step."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qkgeom_jax import evaluate, results
from qkgeom_jax.config import Config, did_you_mean, override
from qkgeom_jax.corpus import Corpus, CorpusError, load_corpus
from qkgeom_jax.corpus.source import UNKNOWN
from qkgeom_jax.pretrained import own
from qkgeom_jax.pretrained.folder import CONFIG, TOKENIZER
from qkgeom_jax.pretrained.tensors import CheckpointFormatError, safetensors_bytes

WEIGHTS = "model.safetensors"
RECORD = "export.json"
PROBE = "probe-tokens.npy"


def tokenizer_json(vocabulary: Sequence[str]) -> dict[str, Any]:
    """A tokenizer.json of the tokenizers library that gives each character its place in `vocabulary`, others 0."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {c: i for i, c in enumerate(vocabulary)}, "unk_token": UNKNOWN},
    }


def find_group(out: Path, name: str | None) -> Path:
    """A group's folder below a study's, by its name; the only one where no name is given.

    Raises:
      ValueError: no such group, or several and no name.
    """
    folders = {path.parent.name: path.parent for path in sorted(out.glob(f"groups/*/{CONFIG}"))}
    if not folders:
        raise ValueError(f"{out} holds no groups of a study")
    if name is None and len(folders) > 1:
        raise ValueError(f"{out} holds several groups; choose one with --group: {', '.join(folders)}")
    if name is not None and name not in folders:
        hint = did_you_mean(name, folders, f"; there are {', '.join(folders)}")
        raise ValueError(f"{out} has no group {name!r}{hint}")
    return folders[name] if name is not None else next(iter(folders.values()))


def kept_epochs(group: Path) -> dict[int, Path]:
    """The parameter files of a group's folder, by epoch."""
    found = {path: own.EPOCH_FILE.fullmatch(path.name) for path in (group / own.PARAMETERS).glob("*")}
    return {int(match[1]): path for path, match in sorted(found.items()) if match}


def export(
    out: Path,
    to: Path,
    *,
    group: str | None = None,
    seed: int | None = None,
    epochs: Sequence[int] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """Write epochs of one run of a study as checkpoints of GPT-2's layout.

    ``to/step-000125`` and so on hold config.json, model.safetensors and tokenizer.json (a character a token); beside them
    lie the study's own probe windows, on which `measure` gives the grid's metrics, and a record of what this is.

    Args:
      out: the study's folder.
      to: where to write; made as needed.
      group: the group's name, as ``depth4-independent-none``; not needed where there is one.
      seed: by default the group's first.
      epochs: by default every epoch whose parameters were kept.
      say: called with a line about what could not be written.
    Returns:
      The folders, in the order of their steps.
    Raises:
      ValueError: a group, seed or epoch that there is not, a seed that diverged, or another export in `to`.
      OSError: `to` cannot be written.
    Source: ours.
    """
    folder = find_group(Path(out), group)
    config = own.read_group_config(folder / CONFIG)
    seed = config.seeds[0] if seed is None else seed
    if seed not in config.seeds:
        raise ValueError(f"seed is {seed}; {folder.name} has {', '.join(map(str, config.seeds))}")
    kept = kept_epochs(folder)
    wanted = sorted(kept if epochs is None else set(epochs))
    for epoch in wanted:
        if epoch not in kept:
            known = ", ".join(map(str, kept)) or "none"
            raise ValueError(
                f"epoch {epoch} of {folder.name} was not kept (kept: {known}); train with --keep-epochs all"
            )
    if not wanted:
        raise ValueError(f"{folder} holds no parameters yet")
    record = {"study": Path(out).name, "group": folder.name, "seed": seed, "config": config.to_dict()}
    _claim(to / RECORD, record)
    corpus = _corpus(Path(out), config, say)
    written = [_write_epoch(to, config, kept[epoch], epoch, seed, corpus) for epoch in wanted]
    if corpus is not None:
        sized = override(config, vocabulary=len(corpus.vocabulary))
        probe = evaluate.windows(corpus.tokens["validation"], sized.evaluation.probe_tokens, sized.model.context)
        stream = io.BytesIO()
        np.save(stream, probe[:, :-1], allow_pickle=False)
        results.write_bytes(to / PROBE, stream.getvalue())
    return written


def _claim(path: Path, record: dict[str, Any]) -> None:
    """Write the record, unless the folder has that of another run."""
    if path.exists() and results.read_json(path) != record:
        raise ValueError(f"{path.parent} holds the export of another run; choose another folder")
    results.write_json(path, record)


def _corpus(out: Path, config: Config, say: Callable[[str], None]) -> Corpus | None:
    """The corpus that the study was trained on, if it is still to be had."""
    try:
        corpus = load_corpus(config.corpus)
    except CorpusError as error:
        say(f"no {TOKENIZER} and no {PROBE}: {error}")
        return None
    manifest = out / "manifest.json"
    described = results.read_sealed(manifest).get("corpus") if manifest.exists() else None
    known = described.get("sha256") if isinstance(described, dict) else None
    if len(corpus.vocabulary) != config.model.vocabulary or known not in (None, corpus.sha256):
        say(f"no {TOKENIZER} and no {PROBE}: the corpus {corpus.name} is not what the study was trained on")
        return None
    return corpus


def _write_epoch(to: Path, config: Config, path: Path, epoch: int, seed: int, corpus: Corpus | None) -> Path:
    tensors = own.gpt2_tensors(own.read_params(path, config, seed), path)
    if not all(np.isfinite(w).all() for w in tensors.values()):
        raise CheckpointFormatError(f"{path}: seed {seed} diverged; its parameters are not finite")
    folder = to / f"step-{epoch * config.training.steps_per_epoch:06d}"
    results.write_bytes(folder / WEIGHTS, safetensors_bytes(tensors))
    if corpus is not None:
        results.write_json(folder / TOKENIZER, tokenizer_json(corpus.vocabulary))
    # last: a folder without it is no checkpoint yet
    results.write_json(folder / CONFIG, own.gpt2_config(config.model))
    return folder
