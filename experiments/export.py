"""Our own training as a series of checkpoints that other software loads.

    python experiments/export.py results/grid-quick --group depth4-independent-none --seed 7 --epochs 1,2,4 --to series

writes series/step-000040 and so on, each a GPT-2 folder for `transformers.AutoModelForCausalLM.from_pretrained`, and the
study's probe tokens. A study trained with `--keep-epochs all` has every epoch. The same main is installed as
`qkgeom-export`.
"""

import sys
from pathlib import Path

# From a source tree without an installation, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from qkgeom_jax.cli_export import export  # noqa: E402

if __name__ == "__main__":
    sys.exit(export())
