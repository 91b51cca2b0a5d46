"""A text, and a study of it that nothing disturbed."""

import os

import faulty
import pytest
import tiny


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "letters.txt"
    path.write_text(tiny.text())
    os.environ["XDG_CACHE_HOME"] = str(path.parent / "cache")
    return path


@pytest.fixture(scope="session")
def whole(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    faulty.train(corpus, out)
    return out
