"""``titanplug consolidate``: one plain file of a checkpoint directory."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

from titanplug.errors import TitanplugError

Result = TypeVar("Result")

_EXAMPLES = """\
examples:
  titanplug consolidate runs/train/last.ckpt weights.pt --weights    torch.load(...), load_state_dict
  titanplug consolidate runs/train/last.ckpt weights.safetensors
  titanplug consolidate runs/train/last.ckpt whole.ckpt              for plain Lightning, with optimizers
"""


def main(arguments: Sequence[str]) -> None:
    """Run the command. Exit code 2 where the checkpoint can't be read."""
    parser = argparse.ArgumentParser(
        prog="titanplug consolidate",
        description="Turn a checkpoint directory, of any layout, into one plain file. Needs one process.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", help="the directory")
    parser.add_argument("file", help="the file to write; one that is there is replaced")
    parser.add_argument(
        "--weights", action="store_true", help="a plain state dict of the model, nothing else"
    )
    parser.add_argument("--average", action="store_true", help="the averaged weights (WeightAverage)")
    given = parser.parse_args(arguments)

    from titanplug.checkpoint.weights import consolidate

    options = {"weights_only": given.weights, "average": given.average}
    output = run_command(parser, lambda: consolidate(given.checkpoint, given.file, **options))
    print(f"{output}: {output.stat().st_size / 2**20:.1f} MiB")


def run_command(parser: argparse.ArgumentParser, work: Callable[[], Result]) -> Result:
    """Do the work of a command; exit code 2 and one message where it can't be done."""
    try:
        return work()
    except (TitanplugError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
