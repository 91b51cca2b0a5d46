"""SIGTERM and SIGINT in every phase: status 75, and the same command goes on to the same bytes."""

import faulty
import pytest

pytestmark = pytest.mark.slow

MOMENTS = ["start:1:2", "compile:1:0", "train:3:0", "evaluate:2:0", "save:2:0", "replace:20:0", "tables:1:0", "tables:1:0.5"]
IN_CI = {("train:3:0", "SIGTERM"), ("compile:1:0", "SIGINT"), ("evaluate:2:0", "SIGINT,SIGINT")}
CASES = [
    pytest.param(moment, signals, marks=[] if (moment, signals) in IN_CI else pytest.mark.faults)
    for moment in MOMENTS
    for signals in ("SIGTERM", "SIGINT", "SIGINT,SIGINT")
]


@pytest.mark.parametrize(("moment", "signals"), CASES)
def test_a_signal_ends_with_status_75(moment, signals, corpus, whole, tmp_path):
    out = tmp_path / "out"
    process = faulty.start(f"{moment}:{signals}", corpus, out)
    said, messages = process.communicate(timeout=120)
    assert process.returncode == 75, (said, messages)
    assert messages.endswith("stopped; the same command goes on from here\n") and "Traceback" not in messages
    faulty.train(corpus, out)
    faulty.assert_same(out, whole)
    assert faulty.leftovers(out) == []


def test_a_signal_in_training_saves_the_chunk_that_was_under_way(corpus, tmp_path):
    """Step 6 of 8 lies between two epochs, where nothing would be saved otherwise."""
    process = faulty.start("train:4:0:SIGTERM", corpus, tmp_path, inits="independent")
    process.communicate(timeout=120)
    checkpoints = tmp_path / "groups" / faulty.GROUPS[1] / "checkpoints"
    assert process.returncode == 75 and sorted(path.name for path in checkpoints.iterdir()) == ["4", "6"]
