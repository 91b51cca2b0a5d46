"""Run the evaluation in many fresh processes, each under a time limit: none may hang.

    python benchmarks/stress.py --processes 25

On a two-core machine a jitted program with LAPACK calls in it hangs in most runs; the evaluation has none. Each process
measures an untrained depth-8 model with four seeds in the default environment, on one CPU device and on two virtual
ones. Prints a line a process and exits with 1 if any failed or ran out of time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def evaluate_once(devices: int, depth: int) -> None:
    """What one process does."""
    sys.path.insert(0, str(ROOT))
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from qkgeom_jax import ensemble, evaluate, optim
    from qkgeom_jax.config import PRESETS, override

    config = override(PRESETS["quick"], depth=depth)
    tokens = np.random.default_rng(0).integers(0, config.model.vocabulary, 50_000).astype(np.uint8)
    probes = evaluate.make_probes(tokens, tokens, config)
    programs = ensemble.make_ensemble(config, optim.make_optimizer(config))
    params = programs.initialise(ensemble.make_keys(config.seeds)).params
    mesh = jax.make_mesh((devices,), ("seed",), axis_types=(AxisType.Auto,))
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec("seed")))
    probes = jax.device_put(probes, NamedSharding(mesh, PartitionSpec()))
    # Three times: a race need not show at the first.
    for _ in range(3):
        measured = jax.device_get(programs.measure(params, probes))
    assert np.isfinite(measured.layers["effective_rank_qk"]).all()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=25, help="fresh processes for each number of devices")
    parser.add_argument("--devices", default="1,2", help="numbers of virtual CPU devices")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--limit", type=float, default=60, help="seconds a process may take")
    parser.add_argument("--once", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        evaluate_once(options.once, options.depth)
        return 0
    failed = 0
    for devices in map(int, options.devices.split(",")):
        for number in range(options.processes):
            start = time.monotonic()
            command = [sys.executable, __file__, "--once", str(devices), "--depth", str(options.depth)]
            try:
                outcome = "done" if subprocess.run(command, timeout=options.limit).returncode == 0 else "FAILED"
            except subprocess.TimeoutExpired:
                outcome = "OUT OF TIME"
            failed += outcome != "done"
            seconds = time.monotonic() - start
            print(f"devices {devices}  process {number + 1}/{options.processes}  {outcome}  {seconds:.1f} s", flush=True)
    total = options.processes * len(options.devices.split(","))
    print(f"{total - failed} of {total} finished, Python {sys.version.split()[0]}, {os.cpu_count()} cores")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
