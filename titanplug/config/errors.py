"""What Hydra and OmegaConf say about a configuration, made readable."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from hydra.errors import MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from titanplug.config.checks import suggest


def describe_config_error(error: BaseException) -> str:
    """One message for an error of composing: what was given, the rule, what to do."""
    if isinstance(error, MissingConfigException):
        # Name and options; not where Hydra looked.
        return str(error).split("\nConfig search path")[0].strip()
    lines = [line for line in str(error).splitlines() if not line.startswith("To append to your")]
    cause = error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        lines.append(_describe_unknown_key(cause))
    elif cause is not None:
        lines += [line for line in str(cause).splitlines() if not line.startswith("    ")]
    return "\n".join(lines)


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
