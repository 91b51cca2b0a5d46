"""Where results came from: versions, device, flags, commit, times, and a digest of every file."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from qkgeom_jax import __version__, results

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy")
# Rewritten while others read, or not results at all.
NOT_DIGESTED = ("manifest.json", "lock")


def git_commit() -> str | None:
    """The commit of the source tree that this package lies in, with "+" where it has changes; None outside one."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        found = [
            subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0].strip() + ("+" if found[1].strip() else "")


def describe_process() -> dict[str, Any]:
    """What this process computes with."""
    import jax  # here, so that digests can be written where results are redrawn, without it

    versions = {"qkgeom_jax": __version__, "python": platform.python_version()}
    versions |= {name: metadata.version(name) for name in PACKAGES}
    device = jax.devices()[0]
    return {
        "versions": versions,
        "device": {"platform": device.platform, "kind": device.device_kind, "count": jax.device_count()},
        "machine": {"system": platform.system(), "machine": platform.machine(), "cpus": os.cpu_count()},
        "flags": {name: os.environ[name] for name in ("XLA_FLAGS", "JAX_PLATFORMS") if name in os.environ},
        "git_commit": git_commit(),
    }


def _digests(out: Path) -> dict[str, str]:
    """sha256 of every result file below `out`; checkpoints carry digests of their own."""
    found = {}
    for path in sorted(out.rglob("*")):
        inside = path.relative_to(out)
        if path.is_file() and "checkpoints" not in inside.parts and not inside.name.startswith(NOT_DIGESTED):
            with path.open("rb") as file:
                found[inside.as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _warnings(groups: dict[str, dict[str, Any]]) -> list[str]:
    """A sentence for each kind of thing that differs between groups."""
    found = []
    for name in ("versions", "device", "flags", "git_commit"):
        values = {str(group.get(name)) for group in groups.values()}
        if len(values) > 1:
            found.append(f"Groups were made with different {name.replace('_', ' ')}: equal bytes are not to be expected.")
    return found


def write_manifest(out: Path, preset: str, corpus: Any) -> None:
    """OUT/manifest.json, from the groups' own manifests; `write_digests` completes it once the report is written."""
    groups = {path.parent.name: results.read_json(path) for path in sorted(out.glob("groups/*/manifest.json"))}
    described = {
        "name": corpus.name,
        "sha256": corpus.sha256,
        "characters": dict(corpus.characters),
        "vocabulary": len(corpus.vocabulary),
        "unknown_share": dict(corpus.unknown_share),
        "notes": list(corpus.notes),
    }
    value = describe_process() | {"preset": preset, "corpus": described, "warnings": _warnings(groups), "groups": groups}
    results.write_json(out / "manifest.json", value)


def write_digests(out: Path) -> None:
    """The sha256 of every result file, added to OUT/manifest.json where there is one."""
    path = out / "manifest.json"
    if path.exists():
        results.write_json(path, results.read_json(path) | {"digests": _digests(out)})
