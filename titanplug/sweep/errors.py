"""How a sweep can end."""

from __future__ import annotations

import signal

from titanplug.errors import TitanplugError


class JobFailed(TitanplugError):
    """A job of a sweep has failed; the message is its error."""


class SweepStopped(TitanplugError):
    """The sweep was ended by a signal, with all of its jobs.

    Args:
        signum: number of the signal.
        is_saved: whether jobs have saved and can go on.
    """

    def __init__(self, signum: int, is_saved: bool) -> None:
        self.signum = signum
        self.is_saved = is_saved
        super().__init__(f"The sweep was ended by {signal.Signals(signum).name}, with all of its jobs.")


class SweepError(TitanplugError):
    """Jobs of a sweep didn't finish.

    Args:
        text: which, and what to do.
        exit_code: of the command.
    """

    def __init__(self, text: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(text)
