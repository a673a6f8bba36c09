"""Lightning strategy and what belongs to it; needs lightning."""

from titanplug.strategy.strategy import TitanStrategy

__all__ = ["TitanStrategy"]
