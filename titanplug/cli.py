"""The command ``titanplug``."""

from __future__ import annotations

import difflib
import os
import sys
from dataclasses import dataclass
from importlib import import_module

import titanplug


@dataclass(frozen=True)
class Command:
    """A verb.

    Args:
        what: it does, in a line.
        example: of its use, without ``titanplug``.
        function: ``"module:function"`` that takes the arguments.
    """

    what: str
    example: str
    function: str


COMMANDS = {
    "train": Command("train a model, or a sweep of them", "train experiment=quickstart", ""),
    "compare": Command(
        "runs and sweeps in one table and picture",
        "compare runs/quickstart/* --picture all.png",
        "titanplug.report.compare:main",
    ),
    "ls": Command("what groups, options and keys there are", "ls parallelism", "titanplug.commands.ls:main"),
    "init": Command(
        "start a project of your own from a recipe", "init my_project", "titanplug.commands.init:main"
    ),
    "doctor": Command("what this machine can do, common faults", "doctor", "titanplug.commands.doctor:main"),
    "completion": Command(
        "let the shell complete commands", "completion bash", "titanplug.commands.completion:main"
    ),
    "schedule": Command(
        "compare pipeline schedules",
        "schedule --pp 4 --microbatches 8",
        "titanplug.report.schedules:main",
    ),
    "consolidate": Command(
        "make one plain file of a checkpoint",
        "consolidate last.ckpt weights.pt --weights",
        "titanplug.checkpoint.command:main",
    ),
    "import": Command(
        "make a checkpoint of a Hugging Face directory",
        "import models/a checkpoints/a",
        "titanplug.models.hf_commands:import_main",
    ),
    "export": Command(
        "make a Hugging Face directory of a checkpoint",
        "export checkpoints/a models/b",
        "titanplug.models.hf_commands:export_main",
    ),
}

COMPLETION = ("-sc", "--shell-completion")
"""Hydra's flags: what the shell was given by ``titanplug completion`` calls ``titanplug -sc query=bash``."""


def usage() -> str:
    """The help text."""
    width = max(map(len, COMMANDS))
    lines = [
        f"  {name.ljust(width)}  {command.what}:  titanplug {command.example}"
        for name, command in COMMANDS.items()
    ]
    return "\n".join(
        [
            "usage: titanplug COMMAND [arguments]",
            "",
            "4D parallelism for an ordinary LightningModule.",
            "",
            "Commands:",
            *lines,
            "",
            "titanplug COMMAND --help tells more; titanplug --version the version.",
        ]
    )


def main() -> None:
    """Run a command. Exit code 2 where there is no such command."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
    elif name == "--version":
        print(titanplug.__version__)
    elif arguments and (name in COMPLETION or arguments[0] in COMPLETION):
        action, _, shell = arguments[-1].partition("=")
        import_module("titanplug.commands.completion").complete(action, shell)
    elif name == "train":
        # As with `python -m`, modules in the working directory can be named in `_target_`.
        sys.path.insert(0, os.getcwd())
        sys.argv = [f"{sys.argv[0]} train", *arguments]
        import_module("titanplug.train").main()
    elif name in COMMANDS:
        module, _, function = COMMANDS[name].function.partition(":")
        getattr(import_module(module), function)(arguments)
    else:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        print(f"titanplug: there is no command {name!r}.{hint}\n\n{usage()}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
