"""What Hydra and OmegaConf say about a configuration, made readable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue

from titanplug.config.checks import suggest

EXTRA_OPTIONS = {
    "hydra/sweeper/optuna": "optuna",
    "hydra/sweeper/sampler/tpe": "optuna",
    "hydra/launcher/joblib": "joblib",
    "hydra/launcher/submitit_local": "submitit",
    "hydra/launcher/submitit_slurm": "submitit",
}
"""Options that another package brings, with titanplug's extra for it."""

_SEE = "See https://hydra.cc"


def describe_config_error(error: BaseException) -> str:
    """One message for an error of composing: what was given, the rule, what to do."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _describe_unknown_option(str(error.missing_cfg_file), error.options or ())
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has no value, and a run needs one. Give it: {error.full_key}=..."
    text = str(error)
    if isinstance(error, OverrideParseException) and error.override:
        reasons = [line for line in text.splitlines() if not line.startswith(("Error parsing", _SEE))]
        return (
            f"{error.override!r} can't be read ({reasons[0].strip()}). An override is KEY=VALUE; a "
            "value with commas, spaces, brackets or quotes is put into quotes, twice on a command line: "
            "KEY=\"'a, b'\"."
        )
    lines = [line for line in text.splitlines() if not line.startswith(("To append to your", _SEE))]
    cause = error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        lines.append(_describe_unknown_key(cause))
    elif cause is not None:
        lines += [line for line in str(cause).splitlines() if not line.startswith("    ")]
    return "\n".join(lines)


def _describe_unknown_option(path: str, options: Sequence[str]) -> str:
    group, _, option = path.rpartition("/")
    known = [name for name in options if name != "schema"]
    hint = suggest(option, known)
    extra = EXTRA_OPTIONS.get(path)
    if extra is not None:
        hint = f"It comes with pip install 'titanplug[{extra}]'. "
    shown = ", ".join(known) or "none"
    return f"{group}={option}: there is no such option. {hint}Options of {group}: {shown}."


def _describe_unknown_key(error: ConfigKeyError | ConfigAttributeError) -> str:
    key, parent = str(error.key), error.parent_node
    known: list[str] = []
    if is_dataclass(error.object_type):
        known = [item.name for item in fields(error.object_type)]
    elif isinstance(parent, DictConfig):
        known = list(map(str, parent))
    where = str(error.full_key or key).removesuffix(key).rstrip(".") or "the configuration"
    shown = ", ".join(name for name in known if not name.startswith("_"))
    return f"There is no key {key!r} in {where}. {suggest(key, known)}Keys: {shown}."
