"""The export command: epochs of our own training as folders that transformers loads."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from qkgeom_jax import flags, study


def export(argv: Sequence[str] | None = None) -> int:
    """Write epochs of one run of a study as checkpoints of GPT-2's layout, a folder a step."""
    parser = flags.Parser(prog="export.py", description=export.__doc__)
    parser.add_argument("out", metavar="OUT", help="the study's results folder")
    parser.add_argument("--to", metavar="FOLDER", required=True, help="where the checkpoints go")
    parser.add_argument("--group", metavar="NAME", help="as depth4-independent-none; needed where there are several")
    parser.add_argument(
        "--seed", type=flags.at_least(0), metavar="SEED", help="which run (default: the group's first seed)"
    )
    parser.add_argument("--epochs", type=flags.listed(flags.at_least(0)), metavar="LIST",
                        help="as 0,1,4,8 (default: all whose parameters were kept; see --keep-epochs)")  # fmt: skip
    given = parser.parse_args(argv)
    from qkgeom_jax.pretrained.export import export as write

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    try:
        folders = write(
            Path(given.out), Path(given.to), group=given.group, seed=given.seed, epochs=given.epochs, say=say
        )
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        say(f"{parser.prog}: {error.filename or given.to} cannot be written: {error.strerror}")
        return study.FAILED
    print(*folders, sep="\n")
    return study.DONE
