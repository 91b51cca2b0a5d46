"""The paper's grid: Tables 3 and 4, Figures 1 to 3.

    python experiments/grid.py --depths 4,6,8

trains depths x initialisations x seeds on the prose that ships with Python, in minutes; `--preset laptop` is long enough
for queries and keys to part; `--preset paper` is the paper's study, for a GPU. The same main is installed as
`qkgeom-grid`.
"""

import sys
from pathlib import Path

# From a source tree without an installation, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from qkgeom_jax.cli import grid  # noqa: E402

if __name__ == "__main__":
    sys.exit(grid())
