"""Names of parameters without what wrappers add to them, as checkpoints have them."""

from __future__ import annotations

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """A dotted name of the module as its user wrote it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
