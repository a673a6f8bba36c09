"""One checkpoint for all ranks, also where each has looked for it by itself."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer


def load_what_rank_0_found(trainer: Trainer) -> None:
    """Let all ranks load the checkpoint that rank 0 was given, or none if it was given none.

    A script may look for the newest one on every rank, and files appear at different times. Lightning asks
    the strategy only on ranks that have a path, so that one without a path would leave the others waiting.
    """
    connector: Any = trainer._checkpoint_connector

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        given = None if not checkpoint_path else str(checkpoint_path)
        chosen = trainer.strategy.broadcast(given)
        type(connector).resume_start(connector, chosen, weights_only=weights_only)

    connector.resume_start = resume_start
