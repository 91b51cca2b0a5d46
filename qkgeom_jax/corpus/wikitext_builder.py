"""WikiText as a TFDS dataset. The only module that imports tensorflow_datasets; needs no TensorFlow."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import tensorflow_datasets as tfds

# A record is so many bytes, then on to the end of the line unless that is further than the second number.
_RECORD = 1 << 16
_LINE = 1 << 20
# Records read at a time; one by one costs 130 us each and more.
_AT_ONCE = 256


class Wikitext(tfds.core.GeneratorBasedBuilder):
    """WikiText (Merity et al. 2016), raw: a split's records, joined in order, are its file byte for byte."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, *, splits: Mapping[str, Callable[[], BinaryIO]], **kwargs: Any):
        """`splits` opens each split's raw file; whichever are given are built."""
        self._splits = dict(splits)
        self.sha256: dict[str, str] = {}
        super().__init__(file_format="array_record", **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="English Wikipedia articles rated good or featured, tokenised, with case and rare words kept.",
            homepage="https://wikitext.smerity.com",
            license="CC BY-SA 3.0 and GFDL",
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            # Shuffled records would not join to the text.
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        return {split: self._generate_examples(split) for split in self._splits}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, bytes]]]:
        digest, number = hashlib.sha256(), 0
        with self._splits[split]() as file:
            while block := file.read(_RECORD):
                block += file.readline(_LINE)
                digest.update(block)
                yield number, {"text": block}
                number += 1
        self.sha256[split] = digest.hexdigest()


def build(folder: Path, splits: Mapping[str, Callable[[], BinaryIO]]) -> dict[str, str]:
    """Prepares the dataset in a new folder; returns each split's sha256."""
    builder = Wikitext(splits=splits, data_dir=str(folder))
    # It prints bars and bold lines of its own.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        builder.download_and_prepare()
    return builder.sha256


def read_split(folder: Path, split: str) -> bytes:
    """The text of a split of a prepared dataset."""
    records = tfds.builder_from_directory(str(folder / "wikitext" / "1.0.0")).as_data_source(split=split)
    text = io.BytesIO()
    for start in range(0, len(records), _AT_ONCE):
        batch = records.__getitems__(list(range(start, min(start + _AT_ONCE, len(records)))))
        text.writelines(record["text"] for record in batch)
    return text.getvalue()
