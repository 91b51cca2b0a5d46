"""What the tests of faults share: a study of two small groups, the command that trains it, and ways to compare folders."""

import contextlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import tiny

from qkgeom_jax import checkpoint
from qkgeom_jax.cli import grid

HERE = Path(__file__).parent
GROUPS = ["depth1-disjoint_support-none", "depth1-independent-none"]
# Files that an undisturbed run and one that was disturbed must have in common, byte for byte.
RESULTS = (".csv", ".npz", ".md", ".png", ".pdf")


def arguments(corpus, out, *more, inits="disjoint_support,independent", seeds="3,5", **changes):
    """Two groups of two seeds: two epochs of four steps, two steps a chunk."""
    given = ["--depths=1", f"--inits={inits}", f"--seeds={seeds}", f"--corpus={corpus}", f"--out={out}"]
    return [*given, *tiny.flags(**changes), *more]


def train(corpus, out, *more, status=0, **changes):
    """The command in this process."""
    assert grid(arguments(corpus, out, *more, **changes)) == status


def start(moment, corpus, out, *more, **changes):
    """The command in a process of its own, which sends itself signals at a moment (see driver.py)."""
    command = [sys.executable, str(HERE / "driver.py"), moment, *arguments(corpus, out, *more, **changes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def contents(out):
    """The bytes of every result file by its path inside."""
    return {path.relative_to(out): path.read_bytes() for path in sorted(out.rglob("*")) if path.suffix in RESULTS}


def last_states(out):
    """Every array of the newest checkpoint of every group."""
    found = {}
    for group in sorted((out / "groups").iterdir()):
        with contextlib.closing(checkpoint.Checkpoints(group / "checkpoints", read_only=True)) as checkpoints:
            _, _, found[group.name] = checkpoints._read(checkpoints.steps[-1])
    return found


def leftovers(out):
    """Files that only an interruption leaves: hidden ones, Orbax's temporary folders, quarantined ones."""
    return [
        path.relative_to(out)
        for path in out.rglob("*")
        if path.name.startswith(".") or "tmp" in path.name or path.name in ("quarantine", "error.txt")
    ]


def assert_same(out, whole, states=True):
    """`out` ended as the undisturbed `whole` did, bit for bit."""
    here, there = contents(out), contents(whole)
    assert here.keys() == there.keys()
    different = [str(name) for name in here if here[name] != there[name]]
    assert different == []
    if states:
        ours, theirs = last_states(out), last_states(whole)
        for group, arrays in theirs.items():
            assert arrays.keys() == ours[group].keys()
            for name, array in arrays.items():
                np.testing.assert_array_equal(ours[group][name], array, err_msg=f"{group} {name}")


def assert_same_group(out, whole):
    """The same of the second group alone, without its checkpoints."""
    here, there = (contents(place / "groups" / GROUPS[1]) for place in (out, whole))
    assert here == there
