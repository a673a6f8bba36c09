"""The command ``titanplug``."""

from __future__ import annotations

import os
import sys

import titanplug

USAGE = """\
usage: titanplug COMMAND [arguments]

4D parallelism for an ordinary LightningModule.

Commands:
  train        train a model:  titanplug train experiment=quickstart
  schedule     compare pipeline schedules:  titanplug schedule --pp 4 --microbatches 8
  compare      compare the loss curves of runs:  titanplug compare runs/a/* runs/b/* --picture both.png
  consolidate  make one plain file of a checkpoint:  titanplug consolidate last.ckpt weights.pt --weights
  import       make a checkpoint of a Hugging Face directory:  titanplug import models/a checkpoints/a
  export       make a Hugging Face directory of a checkpoint:  titanplug export checkpoints/a models/b

titanplug COMMAND --help tells more; titanplug --version the version.
"""


def main() -> None:
    """Run a command. Exit code 2 where there is no such command."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE, end="")
    elif command == "--version":
        print(titanplug.__version__)
    elif command == "train":
        # As with `python -m`, modules in the working directory can be named in `_target_`.
        sys.path.insert(0, os.getcwd())
        sys.argv = [f"{sys.argv[0]} train", *arguments]
        from titanplug.train import main as train

        train()
    elif command == "schedule":
        from titanplug.report.schedules import main as schedule

        schedule(arguments)
    elif command == "compare":
        from titanplug.report.compare import main as compare

        compare(arguments)
    elif command == "consolidate":
        from titanplug.checkpoint.command import main as consolidate

        consolidate(arguments)
    elif command == "import":
        from titanplug.models.hf_commands import import_main

        import_main(arguments)
    elif command == "export":
        from titanplug.models.hf_commands import export_main

        export_main(arguments)
    else:
        print(f"titanplug: there is no command {command!r}.\n\n{USAGE}", end="", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
