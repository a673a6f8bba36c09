"""``titanplug completion``: let the shell complete verbs, groups, options and keys."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence

_EXAMPLES = """\
examples:
  eval "$(titanplug completion bash)"       in a bash or in ~/.bashrc; for zsh the same, after bashcompinit
  titanplug completion fish | source

Then: titanplug train par<Tab>, titanplug train parallelism=<Tab>, titanplug train optim.<Tab>.
"""
SHELLS = ("bash", "zsh", "fish")
_LINE = "COMP_LINE"


def main(arguments: Sequence[str]) -> None:
    """Run the command: print what the shell is to read."""
    parser = argparse.ArgumentParser(
        prog="titanplug completion",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.add_argument("--uninstall", action="store_true", help="print what ends it again")
    given = parser.parse_args(arguments)
    complete("uninstall" if given.uninstall else "install", given.shell)


def complete(action: str, shell: str) -> None:
    """Do what Hydra's flag ``-sc ACTION=SHELL`` does, for verbs too.

    Args:
        action: install, uninstall or query; with query the command line up to the cursor is in the
            environment variable COMP_LINE.
        shell: bash, zsh or fish.
    """
    if action == "query":
        line = os.environ.get(_LINE, "")
        words = re.split(r"\s+", line.lstrip())
        if len(words) <= 2:
            from titanplug.cli import COMMANDS

            print("\n".join(name for name in COMMANDS if name.startswith(words[-1])))
            return
        if words[1] != "train":
            return  # the shell completes names of files
        os.environ[_LINE] = " ".join([words[0], *words[2:]])  # Hydra knows no verbs
    # The name that the shell completes, also where this is `python -m titanplug.cli`.
    sys.argv = ["titanplug", "-sc", f"{action}={shell}"]
    from titanplug.train import main as train

    train()
