"""LightningModules, and the learning-rate schedules they use."""

from titanplug.modules.language_model import LanguageModel
from titanplug.modules.schedules import constant, cosine, warmup_stable_decay

__all__ = ["LanguageModel", "constant", "cosine", "warmup_stable_decay"]
