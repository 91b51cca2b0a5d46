"""The English prose that ships with every Python: pydoc's topics and the standard library's docstrings.

A document is one topic, or all docstrings of one module. The library is alphabetical, so documents are put in the
order of the sha256 of their names before they are cut into splits at document boundaries; a paragraph that has stood
in an earlier document is left out (the topics repeat one another), so that validation holds no copy of training text.
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

from qkgeom_jax.corpus.source import SPLITS, CorpusError, Source, Texts, fingerprint

# Left out: what distributions package apart from Python itself (so that the text is the same with and without it),
# and encodings, whose files are tables.
_LEFT_OUT = {"distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtle", "turtledemo", "venv"}
_TESTS = {"test", "tests", "__pycache__"}
# Shorter paragraphs ("For example:") may repeat.
_REPEATABLE = 80
_SMALLEST = 100_000


def builtin_source() -> Source:
    """The running Python's prose, named by the version and the size and time of each file."""
    files = list(_library_files())
    return Source("builtin", lambda: _read(files), fingerprint(["builtin 1", sys.version, *map(_identity, files)]))


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


def _identity(entry: tuple[str, Path]) -> tuple:
    name, path = entry
    try:
        status = path.stat()
        return name, str(path), status.st_size, status.st_mtime_ns
    except OSError:
        return name, str(path), None


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
                except (OSError, SyntaxError, ValueError, RecursionError):
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


def _read(files: list[tuple[str, Path]]) -> Texts:
    documents = _documents(files)
    seen: set[str] = set()
    texts = []
    for name in sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest()):
        kept = []
        for paragraph in documents[name].strip().split("\n\n"):
            words = " ".join(paragraph.split())
            if words and words not in seen:
                kept.append(paragraph.strip("\n"))
            if len(words) >= _REPEATABLE:
                seen.add(words)
        if kept:
            texts.append("\n\n".join(kept) + "\n\n")
    characters = sum(map(len, texts))
    if characters < _SMALLEST:
        raise CorpusError(
            f"corpus builtin: this Python ships only {characters} characters of documentation (its library's source "
            "files are missing); give a text file as --corpus instead"
        )
    parts: dict[str, list[str]] = {split: [] for split in SPLITS}
    position = 0
    for text in texts:
        middle = (position + len(text) / 2) / characters
        parts["train" if middle < 0.85 else "test" if middle < 0.90 else "validation"].append(text)
        position += len(text)
    # Surrogates cannot be written as UTF-8; a docstring may hold one through an escape.
    return Texts({split: "".join(part).encode("utf-8", "replace") for split, part in parts.items()})
