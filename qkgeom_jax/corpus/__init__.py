"""Text to token arrays: which corpora there are, and `load_corpus`, which makes any of them ready to train on.

A corpus is found (`builtin`, `wikitext`, `wikipedia`, `files`), read as one UTF-8 text a split, given a character
vocabulary from its training split (`vocabulary`) and encoded once into a memory-mapped array (`cache`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from qkgeom_jax.config import CorpusConfig, did_you_mean
from qkgeom_jax.corpus.builtin import builtin_source
from qkgeom_jax.corpus.cache import Encoded, TokenCache, default_folder, encode, read_record, write_record
from qkgeom_jax.corpus.files import read_path
from qkgeom_jax.corpus.source import SPLITS, Corpus, CorpusError, Source, Texts, combined_sha256
from qkgeom_jax.corpus.wikipedia import wikipedia_source
from qkgeom_jax.corpus.wikitext import ARCHIVES, wikitext_source

__all__ = ["CORPORA", "Corpus", "CorpusError", "load_corpus", "require_windows"]

CORPORA = ("builtin", "wikitext103", "wikitext2", "wikipedia-intros")

# Above this share of unknown characters in a split the user is told.
_NOTABLE_SHARE = 0.01


def load_corpus(
    config: CorpusConfig,
    *,
    cache_dir: str | os.PathLike | None = None,
    progress: Callable[[str], None] | None = None,
) -> Corpus:
    """The named corpus as token ids, from the cache where its text is known there.

    Args:
      config: the corpus (a name of `CORPORA`, a text file or a folder), its data_dir and the minimum count.
      cache_dir: where encoded texts are kept; by default qkgeom_jax in $XDG_CACHE_HOME or ~/.cache. What cannot be
        written there is encoded in memory instead, with a note.
      progress: called with a line about whatever takes long (a download, the first reading).

    Returns:
      A `Corpus`: for each split (train, validation, and test where there is one) token ids as uint8 or uint16.

    Raises:
      CorpusError: whatever is wrong with the corpus, in one sentence.

    Source: ours.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "text.txt").write_text("to be or not to be " * 20)
    >>> corpus = load_corpus(CorpusConfig(corpus=str(folder / "text.txt")), cache_dir=folder)
    >>> corpus.vocabulary
    ('<unk>', ' ', 'b', 'e', 'n', 'o', 'r', 't')
    >>> corpus.characters
    {'train': 323, 'validation': 38, 'test': 19}
    """
    folder = default_folder() if cache_dir is None else Path(cache_dir)
    source = _find(config, folder, progress)
    known = folder / "sources" / f"{source.fingerprint}.json" if folder and source.fingerprint else None
    record = read_record(known) if known else None
    if record is not None:
        with contextlib.suppress(KeyError, TypeError):  # a record of something else
            encoded = TokenCache(folder, record["sha256"], config.minimum_count).load()
            if encoded is not None:
                return _corpus(source.name, record["sha256"], encoded, tuple(record["notes"]))
    if progress:
        progress(f"reading corpus {source.name} (once)")
    texts = source.read()
    sha256 = {split: hashlib.sha256(texts.splits[split]).hexdigest() for split in SPLITS if split in texts.splits}
    encoded, notes = _encode(texts, sha256, config.minimum_count, folder)
    if known and not notes:
        with contextlib.suppress(OSError):
            write_record(known, {"sha256": sha256, "notes": list(texts.notes)})
    return _corpus(source.name, sha256, encoded, (*texts.notes, *notes))


def require_windows(corpus: Corpus, context: int) -> None:
    """Refuses a corpus with less than one window of `context` + 1 tokens to train or to validate on.

    Raises:
      CorpusError: the split, its length and the least length.
    """
    for split in ("train", "validation"):
        if corpus.characters[split] < context + 1:
            raise CorpusError(
                f"the {split} split of {corpus.name!r} has {corpus.characters[split]} characters; a window of context "
                f"{context} needs at least {context + 1}: give a longer text or a smaller --context"
            )


def _find(config: CorpusConfig, folder: Path | None, progress: Callable[[str], None] | None) -> Source:
    """The source that the configuration names."""
    name = config.corpus
    if name in ARCHIVES:
        return wikitext_source(name, config.data_dir, folder, progress=progress)
    if config.data_dir is not None:
        raise CorpusError(f"data_dir is only for {' and '.join(ARCHIVES)}; give a text as --corpus PATH")
    if name == "builtin":
        return builtin_source()
    if name == "wikipedia-intros":
        return wikipedia_source()
    path = Path(os.path.expanduser(name))
    if not os.path.lexists(path):
        hint = did_you_mean(name.lower(), CORPORA)
        raise CorpusError(f"corpus {name!r} is neither one of {', '.join(CORPORA)} nor an existing path{hint}")
    return Source(name, lambda: read_path(path))


def _encode(texts: Texts, sha256: dict[str, str], minimum_count: int, folder: Path | None) -> tuple[Encoded, list[str]]:
    """The encoded texts, from the cache or by way of it, and what there is to say about the cache."""
    if folder is None:
        return encode(texts.splits, minimum_count), ["no cache folder: the text was encoded in memory"]
    cache = TokenCache(folder, sha256, minimum_count)
    encoded = cache.load()
    if encoded is not None:
        return encoded, []
    try:
        cache.store(texts.splits, minimum_count)
        encoded = cache.load()
        reason = "what was written there does not read back"
    except OSError as error:
        reason = error.strerror or str(error)
    if encoded is not None:
        return encoded, []
    note = f"cache folder {str(folder)!r} cannot be used ({reason}): the text was encoded in memory"
    return encode(texts.splits, minimum_count), [note]


def _corpus(name: str, sha256: dict[str, str], encoded: Encoded, notes: tuple[str, ...]) -> Corpus:
    share = {split: encoded.unknown[split] / max(1, tokens.size) for split, tokens in encoded.tokens.items()}
    said = list(notes)
    for split, value in share.items():
        if value > _NOTABLE_SHARE:
            said.append(f"{value:.1%} of the {split} split's characters are outside the vocabulary")
    if len(encoded.vocabulary) == 2:
        said.append(f"the training split has one distinct character, {encoded.vocabulary[1]!r}: nothing to learn")
    return Corpus(
        name=name,
        sha256=combined_sha256(sha256),
        split_sha256=dict(sha256),
        characters={split: int(tokens.size) for split, tokens in encoded.tokens.items()},
        vocabulary=encoded.vocabulary,
        tokens=encoded.tokens,
        unknown_share=share,
        notes=tuple(said),
    )
