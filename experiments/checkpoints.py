"""Checkpoint series: Table 6, Figure 5.

    python experiments/checkpoints.py --plan

says what the paper's six public series would download; without `--plan` they are downloaded and measured, one revision
at a time (`pip install -e '.[checkpoints]'` first). `--model FOLDER` measures your own. The same main is installed as
`qkgeom-checkpoints`.
"""

import sys
from pathlib import Path

# From a source tree without an installation, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from qkgeom_jax.cli_checkpoints import checkpoints  # noqa: E402

if __name__ == "__main__":
    sys.exit(checkpoints())
