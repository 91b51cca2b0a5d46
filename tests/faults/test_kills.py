"""SIGKILL at any moment: the same command ends as if nothing had happened."""

import random

import faulty
import pytest

pytestmark = pytest.mark.slow

# One in each phase, and then at random.
ONE_EACH = ["compile:1:0", "train:3:0", "evaluate:2:0.05", "save:3:0.01", "replace:30:0"]
PHASES = {"start": (1, 4.0), "compile": (3, 0.3), "train": (6, 0.03), "evaluate": (4, 0.05), "save": (6, 0.05),
          "replace": (60, 0.0), "tables": (1, 1.0)}  # fmt: skip


def at_random(seed):
    chosen = random.Random(seed)
    phase = chosen.choice(list(PHASES))
    count, delay = PHASES[phase]
    return f"{phase}:{chosen.randint(1, count)}:{chosen.uniform(0, delay):.3f}"


@pytest.mark.parametrize(
    "moment", [*ONE_EACH, *(pytest.param(at_random(seed), marks=pytest.mark.faults) for seed in range(15))]
)
def test_a_killed_command_ends_with_the_same_bytes(moment, corpus, whole, tmp_path):
    out = tmp_path / "out"
    process = faulty.start(f"{moment}:SIGKILL", corpus, out)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == -9, said
    faulty.train(corpus, out)
    faulty.assert_same(out, whole)
    assert faulty.leftovers(out) == []
