"""The paper's interventions: Tables 2 and 5, Figure 4.

    python experiments/interventions.py --interventions all --depths 4 --seeds 7,37,42,105,210

trains each intervention of Table 2 beside its baseline, on the same seeds, batches and initial weights. Your own arm is
`--interventions none,FILE.py:name` (docs/interventions.md); `--clamp-strengths` and `--contraction-factors` add doses. The
same main is installed as `qkgeom-interventions`.
"""

import sys
from pathlib import Path

# From a source tree without an installation, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from qkgeom_jax.cli import interventions  # noqa: E402

if __name__ == "__main__":
    sys.exit(interventions())
