"""Where results came from: versions, device, flags, commit, times, and a digest of every file."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from qkgeom_jax import __version__, integrity, results

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy")
# What groups of one study should have in common.
COMPARED = ("versions", "device", "flags", "git_commit")


@functools.cache  # a process runs the code that it began with
def git_commit() -> str | None:
    """The commit of the source tree that this package lies in, with "+" where it has changes; None outside one."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        found = [
            subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=60, check=True).stdout
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


def _warnings(groups: dict[str, dict[str, Any]]) -> list[str]:
    """A sentence for each kind of thing that differs between groups, and for each group that another process continued."""
    found = []
    for name in COMPARED:
        values = {str(group.get(name)) for group in groups.values()}
        if len(values) > 1:
            found.append(f"Groups were made with different {_words(name)}: equal bytes are not to be expected.")
    for group, made in groups.items():
        before = made.get("earlier")
        earlier = [one for one in before if isinstance(one, dict)] if isinstance(before, list) else []
        if different := [_words(name) for name in COMPARED for one in earlier if one.get(name) != made.get(name)]:
            found.append(
                f"{group} was begun with other {' and '.join(dict.fromkeys(different))} than it ended with: its bytes may "
                "differ from those of an undisturbed run."
            )
    return found


def _words(name: str) -> str:
    return name.replace("_", " ")


def write_group_manifest(folder: Path, seconds: dict[str, float], made_by: list[dict[str, Any]]) -> None:
    """A finished group's manifest.json: what computed it, for how long, and the digest of every file.

    A file that is missing keeps the digest that it had, so that it stays missed.
    """
    path = folder / "manifest.json"
    try:
        known = integrity.known_digests(folder)
    except ValueError:
        known = {}
    value = made_by[-1] | {"earlier": made_by[:-1], "seconds": seconds, "digests": known | integrity.digests(folder)}
    results.write_json(path, results.seal(value))


def write_manifest(out: Path, preset: str, corpus: Any) -> None:
    """OUT/manifest.json, from the groups' own manifests; `report.write_all` adds the digests of what it writes."""
    groups = {path.parent.name: results.read_sealed(path) for path in sorted(out.glob("groups/*/manifest.json"))}
    described = {
        "name": corpus.name,
        "sha256": corpus.sha256,
        "characters": dict(corpus.characters),
        "vocabulary": len(corpus.vocabulary),
        "unknown_share": dict(corpus.unknown_share),
        "notes": list(corpus.notes),
    }
    warnings = _warnings(groups)
    groups = {name: {key: made[key] for key in made if key not in ("digests", "sha256")} for name, made in groups.items()}
    value = describe_process() | {"preset": preset, "corpus": described, "warnings": warnings, "groups": groups}
    results.write_json(out / "manifest.json", results.seal(value))
