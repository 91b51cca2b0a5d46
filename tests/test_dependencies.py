"""Who may import whom read from the source and from what a fresh process loads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "qkgeom_jax"
HEAVY = {"jax", "flax", "optax", "orbax", "tensorflow_datasets", "matplotlib"}


def imports(path):
    """Dotted names that a file imports anywhere, those of this package in full."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def own(names):
    """Modules of this package among imported names."""
    return {name.split(".")[1] for name in names if name.startswith("qkgeom_jax.")}


def test_metrics_import_jax_numpy_and_themselves_alone():
    for path in (PACKAGE / "metrics").glob("*.py"):
        names = imports(path)
        assert own(names) <= {"metrics"}
        outside = {name.split(".")[0] for name in names} - {"qkgeom_jax"} - set(sys.stdlib_module_names)
        assert outside <= {"jax", "numpy"}, path


def test_the_model_knows_no_optimizer_and_only_the_ensemble_knows_seeds():
    assert own(imports(PACKAGE / "model.py")) == {"config", "initializers"}
    for name in ("model", "train", "evaluate"):
        assert "ensemble" not in own(imports(PACKAGE / f"{name}.py"))
    assert own(imports(PACKAGE / "optim.py")) <= {"config"}


@pytest.mark.parametrize("name", ["analysis", "tables", "figures", "report", "results", "paper"])
def test_what_reads_results_imports_no_trainer(name):
    names = imports(PACKAGE / f"{name}.py")
    assert not own(names) & {"model", "train", "evaluate", "ensemble", "group", "study", "optim", "metrics", "checkpoint"}
    assert not {n.split(".")[0] for n in names} & (HEAVY - {"matplotlib"})


def test_the_package_never_imports_the_experiments():
    for path in PACKAGE.rglob("*.py"):
        assert not any(name.split(".")[0] == "experiments" for name in imports(path))


@pytest.mark.parametrize(
    "statement",
    ["import qkgeom_jax.cli", "import qkgeom_jax.report", "from qkgeom_jax import flags; flags.resolve('quick', {}, {})"],
)
def test_arguments_and_reports_load_no_jax(statement):
    """So that a wrong flag is answered at once, and results can be redrawn where no JAX is."""
    code = f"import sys; {statement}; print(*sorted({{n.split('.')[0] for n in sys.modules}} & {HEAVY - {'matplotlib'}!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    assert done.stdout.strip() == ""


def test_the_readme_s_test_command_is_the_one_that_continuous_integration_calls():
    command = "pip install -q -e '.[test]' && python -m pytest"
    root = PACKAGE.parent
    assert command in (root / ".ci/run").read_text() and command.replace(" -q", "", 1) in (root / "README.md").read_text()
