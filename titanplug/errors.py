"""The error classes of titanplug.

A message reads: what was given, the rule, what to do instead.
"""

from __future__ import annotations

from collections.abc import Sequence


class TitanplugError(Exception):
    """Base class of every error that titanplug raises on purpose."""


class ConfigError(TitanplugError, ValueError):
    """A configuration that cannot run; all of its problems are told at once.

    One problem is the whole message, several become a numbered list:

        2 problems in the configuration:
          1. tp=3: ...
          2. dp_shard=0: ...

    Args:
        problems: one problem or several, each a full sentence.

    Attributes:
        problems: the problems, in the order given.

    Raises:
        TypeError: there is no problem to tell.
    """

    problems: tuple[str, ...]

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        if not self.problems:
            raise TypeError("ConfigError got no problems: give at least one, or do not raise.")
        super().__init__(_format_problems(self.problems))


class MissingExtraError(TitanplugError, ImportError):
    """A feature was used whose optional dependencies are not installed."""


def _format_problems(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    lines = [f"{len(problems)} problems in the configuration:"]
    for number, problem in enumerate(problems, start=1):
        lines.append(f"  {number}. " + problem.replace("\n", "\n     "))
    return "\n".join(lines)


class CheckpointError(TitanplugError):
    """A checkpoint can't be written or read."""
