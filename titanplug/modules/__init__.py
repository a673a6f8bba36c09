"""LightningModules, and the learning-rate schedules they use."""

from titanplug.modules.language_model import LanguageModel
from titanplug.modules.optimizers import adamw_8bit
from titanplug.modules.schedules import constant, cosine, linear, warmup_stable_decay

__all__ = ["LanguageModel", "adamw_8bit", "constant", "cosine", "linear", "warmup_stable_decay"]
