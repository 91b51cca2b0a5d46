"""The export command: epochs of our own training as folders that transformers loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qkgeom_jax import command, flags
from qkgeom_jax.stop import StopSignal
from qkgeom_jax.study import require_writable


def export(argv: Sequence[str] | None = None) -> int:
    """Write epochs of one run of a study as checkpoints of GPT-2's layout, a folder a step."""
    parser = flags.Parser(prog="export.py", description=export.__doc__)
    parser.add_argument("out", type=flags.place, metavar="OUT", help="the study's results folder")
    parser.add_argument("--to", type=flags.place, metavar="FOLDER", required=True, help="where the checkpoints go")
    parser.add_argument("--group", type=flags.place, metavar="NAME",
                        help="as depth4-independent-none; needed where there are several")  # fmt: skip
    parser.add_argument(
        "--seed", type=flags.at_least(0), metavar="SEED", help="which run (default: the group's first seed)"
    )
    parser.add_argument("--epochs", type=flags.listed(flags.at_least(0)), metavar="LIST",
                        help="as 0,1,4,8 (default: all whose parameters were kept; see --keep-epochs)")  # fmt: skip

    def work(_stop: StopSignal) -> int:
        given = parser.parse_args(argv)
        require_writable(Path(given.to).absolute(), "--to")
        from qkgeom_jax.pretrained.export import export as write

        folders = write(
            Path(given.out), Path(given.to), group=given.group, seed=given.seed, epochs=given.epochs, say=command.say
        )
        for folder in folders:
            command.tell(folder)
        return command.DONE

    return command.run(parser, work)
