"""The English prose that ships with every Python: pydoc's topics and the standard library's docstrings.

A document is one topic, or all docstrings of one module. The library is alphabetical and uneven, so documents are cut
into passages of some 4,000 characters, at paragraphs, and the passages put in the order of the sha256 of their names
before they are shared out: the splits are alike. A paragraph that has stood before is left out (the topics repeat one
another), so that validation holds no copy of training text.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from qkgeom_jax.corpus.files import TEST_UNTIL, TRAIN_UNTIL, identity
from qkgeom_jax.corpus.source import SPLITS, CorpusError, Source, Texts, fingerprint

# Left out: what distributions package apart from Python itself (so that the text is the same with and without it),
# and encodings, whose files are tables.
_LEFT_OUT = {"distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtle", "turtledemo", "venv"}
_TESTS = {"test", "tests", "__pycache__"}
# Shorter paragraphs ("For example:") may repeat.
_REPEATABLE = 80
_PASSAGE = 4_000
_SMALLEST = 100_000


def builtin_source() -> Source:
    """The running Python's prose, named by the version and the size and time of each file."""
    files = list(_library_files())
    parts = ["builtin 1", sys.version, *(identity(path) for _, path in files)]
    return Source("builtin", lambda: _read(files), fingerprint(parts))


def _library_files() -> Iterator[tuple[str, Path]]:
    """(module, file) of the standard library's pure Python modules, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    for name in sorted(sys.stdlib_module_names - _LEFT_OUT):
        if (root / f"{name}.py").is_file():
            yield name, root / f"{name}.py"
        for folder, folders, files in os.walk(root / name):
            folders[:] = sorted(set(folders) - _TESTS)
            package = ".".join(Path(folder).relative_to(root).parts)
            for file in sorted(files):
                if file.endswith(".py"):
                    yield f"{package}.{file[:-3]}", Path(folder, file)


def _docstrings(node: ast.AST) -> Iterator[str]:
    """The docstrings of a module, its classes and functions, in the order of the source."""
    if text := ast.get_docstring(node):
        yield text
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _docstrings(child)


def _documents(files: list[tuple[str, Path]]) -> dict[str, str]:
    """Name to text; what cannot be read or parsed is left out."""
    documents = {}
    collecting = gc.isenabled()
    gc.disable()  # a third of the parsing time otherwise; syntax trees hold no cycles
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, path in files:
                try:
                    documents[f"module {name}"] = "\n\n".join(_docstrings(ast.parse(path.read_bytes())))
                except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                    continue
    finally:
        if collecting:
            gc.enable()
    try:
        from pydoc_data.topics import topics
    except ImportError:
        topics = {}
    documents.update((f"topic {name}", text) for name, text in topics.items())
    return documents


def _passages(documents: dict[str, str]) -> dict[str, str]:
    """Name to text of the passages, without repetitions."""
    seen: set[str] = set()
    passages: dict[str, str] = {}
    for name, text in sorted(documents.items()):
        number = 0
        for paragraph in text.strip().split("\n\n"):
            words = " ".join(paragraph.split())
            if not words or words in seen:
                continue
            if len(words) >= _REPEATABLE:
                seen.add(words)
            if len(passages.get(f"{name} {number}", "")) >= _PASSAGE:
                number += 1
            passage = f"{name} {number}"
            passages[passage] = passages.get(passage, "") + paragraph.strip("\n") + "\n\n"
    return passages


def _read(files: list[tuple[str, Path]]) -> Texts:
    passages = _passages(_documents(files))
    characters = sum(map(len, passages.values()))
    if characters < _SMALLEST:
        raise CorpusError(
            f"corpus builtin: this Python ships only {characters} characters of documentation (its library's source "
            "files are missing); give a text file as --corpus instead"
        )
    parts: dict[str, list[str]] = {split: [] for split in SPLITS}
    position = 0
    for name in sorted(passages, key=lambda name: hashlib.sha256(name.encode()).digest()):
        middle = (position + len(passages[name]) / 2) / characters
        split = "train" if middle < TRAIN_UNTIL else "test" if middle < TEST_UNTIL else "validation"
        parts[split].append(passages[name])
        position += len(passages[name])
    # A docstring may hold a surrogate, through an escape, which UTF-8 cannot.
    return Texts({split: "".join(part).encode("utf-8", "replace") for split, part in parts.items()})
