"""Evaluation and interventions in fresh processes, in the default environment; benchmarks/stress.py runs many."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks/stress.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--programs=evaluation", "--processes=2"], ["--programs=k_spectrum_clamp,qk_decouple", "--depth=2"]]
)
def test_nothing_hangs(options):
    # The limit is for a hang, not for speed: these machines are shared.
    command = [sys.executable, str(SCRIPT), "--processes=1", "--limit=400", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "4 of 4 finished" in done.stdout, done.stdout + done.stderr
