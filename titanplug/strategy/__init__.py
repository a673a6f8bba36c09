"""Lightning strategy and what belongs to it; needs lightning."""

from titanplug.compat import require_torch

require_torch()  # an older one lacks names that are imported below

from titanplug.strategy.strategy import TitanStrategy  # noqa: E402

__all__ = ["TitanStrategy"]
