"""Strict numerics for every test, and one compile cache for all of them and the processes they start.

`--faults` adds the long variants of tests/faults.
"""

import atexit
import os
import shutil
import tempfile

# Most tests compile the same few programs. Set before JAX is imported, so that child processes share the cache.
_cache = tempfile.mkdtemp(prefix="qkgeom-tests-")
atexit.register(shutil.rmtree, _cache, ignore_errors=True)
os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax  # noqa: E402

# An implicit rank promotion is an error, not a broadcast.
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption("--faults", action="store_true", help="the long variants of tests/faults, too: half an hour")


def pytest_collection_modifyitems(config, items):
    long = [item for item in items if item.get_closest_marker("faults")]
    if long and not config.getoption("--faults"):
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]
