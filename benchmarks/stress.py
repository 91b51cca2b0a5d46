"""Run the evaluation and the interventions in many fresh processes, each under a time limit: none may hang.

    python benchmarks/stress.py --processes 25

On a two-core machine a jitted program with LAPACK calls in it hangs in most runs; these have none. Each process takes
an untrained depth-8 model with four seeds and measures it, or trains it for three steps with an intervention that
decomposes W_K at each, in the default environment, on one CPU device and on two virtual ones. Prints a line a process
and exits with 1 if any failed or ran out of time.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("evaluation", "k_spectrum_clamp", "forced_k_contraction", "qk_decouple")


def run_once(program: str, devices: int, depth: int) -> None:
    """What one process does."""
    sys.path.insert(0, str(ROOT))
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from qkgeom_jax import ensemble, evaluate, optim
    from qkgeom_jax.config import PRESETS, REQUIRED_INIT, override
    from qkgeom_jax.interventions import make_intervention

    name = "none" if program == "evaluation" else program
    config = override(
        PRESETS["quick"], depth=depth, intervention=name, init=REQUIRED_INIT.get(name, "independent"),
        period=1, start_epoch=0, chunk=1,
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, config.model.vocabulary, 50_000).astype(np.uint8)
    programs = ensemble.make_ensemble(config, optim.make_optimizer(config, *make_intervention(name, config)))
    mesh = jax.make_mesh((devices,), ("seed",), axis_types=(AxisType.Auto,))
    per_seed, shared = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("seed",), ()))
    keys = jax.device_put(ensemble.make_keys(config.seeds), per_seed)
    state = jax.device_put(programs.initialise(keys), per_seed)
    # Three times: a race need not show at the first.
    if program == "evaluation":
        probes = jax.device_put(evaluate.make_probes(tokens, tokens, config), shared)
        for _ in range(3):
            measured = jax.device_get(programs.measure(state.params, probes))
        assert np.isfinite(measured.layers["effective_rank_qk"]).all()
    else:
        tokens = jax.device_put(tokens, shared)
        for step in range(3):
            state = programs.advance(state, keys, jax.device_put(np.int32(step), shared), tokens)
        assert np.asarray(state.alive).all()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=25, help="fresh processes for each program and devices")
    parser.add_argument("--devices", default="1,2", help="numbers of virtual CPU devices")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="what to run")
    parser.add_argument("--limit", type=float, default=60, help="seconds a process may take")
    parser.add_argument("--once", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        run_once(options.programs, options.once, options.depth)
        return 0
    failed = total = 0
    for program, devices in itertools.product(options.programs.split(","), map(int, options.devices.split(","))):
        for number in range(options.processes):
            start = time.monotonic()
            own = [f"--programs={program}", f"--once={devices}", f"--depth={options.depth}"]
            command = [sys.executable, __file__, *own]
            try:
                outcome = "done" if subprocess.run(command, timeout=options.limit).returncode == 0 else "FAILED"
            except subprocess.TimeoutExpired:
                outcome = "OUT OF TIME"
            failed += outcome != "done"
            total += 1
            seconds = time.monotonic() - start
            which = f"{program}  devices {devices}  process {number + 1}/{options.processes}"
            print(f"{which}  {outcome}  {seconds:.1f} s", flush=True)
    print(f"{total - failed} of {total} finished, Python {sys.version.split()[0]}, {os.cpu_count()} cores")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
