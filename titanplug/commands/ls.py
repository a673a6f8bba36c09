"""``titanplug ls``: the groups of the configuration, their options and keys."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import yaml

from titanplug.config import SCHEMAS
from titanplug.config.checks import suggest

_EXAMPLES = """\
examples:
  titanplug ls                          all groups and their options
  titanplug ls parallelism              the options of one group, and when to choose which
  titanplug ls parallelism/fsdp_tp      the keys of an option: type, value, meaning
  titanplug ls --json
"""
_HIDDEN = ("hydra", "paths")


def conf_folder() -> Path:
    """Where the YAML files are: in the installed package or in the checkout."""
    spec = importlib.util.find_spec("titanplug.conf")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    return Path(__file__).parents[2] / "conf"


def groups(folder: Path) -> dict[str, dict[str, Path]]:
    """Files by group and option."""
    found = {
        item.name: {path.stem: path for path in sorted(item.glob("*.yaml"))}
        for item in sorted(folder.iterdir())
        if item.is_dir() and item.name not in _HIDDEN
    }
    return {name: options for name, options in found.items() if options}


def comment(path: Path) -> str:
    """What a file says of itself in its first lines."""
    lines = []
    for line in path.read_text().splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            lines.append(line.removeprefix("#").strip())
        elif lines:
            break
    return " ".join(lines)


def keys(group: str, path: Path) -> list[dict[str, str]]:
    """Keys of an option: ``key``, ``type``, ``value`` and ``meaning``; of its schema, where it has one."""
    content: dict[str, Any] = yaml.safe_load(path.read_text()) or {}
    found = []
    for item in content.pop("defaults", []):
        match = re.fullmatch(r"schema/(\w+)@(\w+)", item) if isinstance(item, str) else None
        if match is None:
            continue
        name, where = match.groups()
        given = content if where == "_here_" else content.get(where, {})
        prefix = group if where == "_here_" else f"{group}.{where}"
        found += _of_schema(SCHEMAS[group][name], prefix, given or {})
    return found or [
        {"key": key, "type": "", "value": str(value), "meaning": ""} for key, value in _leaves("", content)
    ]


def _of_schema(schema: type, prefix: str, given: Mapping[str, Any]) -> list[dict[str, str]]:
    meanings = _meanings(schema)
    rows = []
    for item in fields(schema):
        if item.name.startswith("_"):
            continue
        default = item.default
        if default is MISSING and item.default_factory is not MISSING:
            default = item.default_factory()
        value = given.get(item.name, default)
        shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        rows.append(
            {
                "key": f"{prefix}.{item.name}",
                "type": str(item.type).replace("None", "null"),
                "value": "(must be given)" if value is MISSING or shown == "???" else shown,
                "meaning": meanings.get(item.name, ""),
            }
        )
    return rows


def _meanings(schema: type) -> dict[str, str]:
    """The descriptions under Args of a docstring, of those it inherits from too."""
    found: dict[str, str] = {}
    for cls in reversed(schema.__mro__):
        text = inspect.cleandoc(cls.__doc__ or "").partition("Args:\n")[2]
        for name, meaning in re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", text, flags=re.MULTILINE):
            found[name] = " ".join(meaning.split())
    return found


def _leaves(prefix: str, node: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in node.items():
        found += _leaves(f"{prefix}{key}.", value) if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


# --------------------------------------------------------------------------------------
# What is printed
# --------------------------------------------------------------------------------------


def _rows(rows: Sequence[tuple[str, str]], width: int) -> str:
    """Two columns, the second wrapped."""
    left = max((len(first) for first, _ in rows), default=0) + 2
    lines = []
    for first, second in rows:
        wrapped = textwrap.wrap(second, max(24, width - left - 2)) or [""]
        lines.append(f"  {first.ljust(left)}{wrapped[0]}")
        lines += [" " * (left + 2) + line for line in wrapped[1:]]
    return "\n".join(line.rstrip() for line in lines)


def main(arguments: Sequence[str]) -> None:
    """Run the command. Exit code 2 where there is no such group or option."""
    parser = argparse.ArgumentParser(
        prog="titanplug ls",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="?", help="a group, or GROUP/OPTION (GROUP=OPTION)")
    parser.add_argument("--json", action="store_true", help="the same for programs")
    given = parser.parse_args(arguments)
    width = shutil.get_terminal_size((110, 24)).columns
    found = groups(conf_folder())
    if given.what is None:
        if given.json:
            _print_json({g: {o: comment(p) for o, p in options.items()} for g, options in found.items()})
            return
        print("Groups and their options; `titanplug ls GROUP` tells more.\n")
        print(_rows([(name, ", ".join(options)) for name, options in found.items()], width))
        return
    group, _, option = given.what.replace("=", "/").partition("/")
    if group not in found:
        parser.error(f"there is no group {group!r}. {suggest(group, list(found))}Groups: {', '.join(found)}.")
    if not option:
        told = {name: comment(path) for name, path in found[group].items()}
        if given.json:
            _print_json(told)
        else:
            print(f"Options of {group}:\n\n{_rows(list(told.items()), width)}")
            example = next(iter(found[group]))
            print(f"\nChoose one with {group}=NAME; `titanplug ls {group}/{example}` shows its keys.")
        return
    if option not in found[group]:
        known = list(found[group])
        hint = suggest(option, known)
        parser.error(f"{group} has no option {option!r}. {hint}Options of {group}: {', '.join(known)}.")
    path = found[group][option]
    rows = keys(group, path)
    if given.json:
        _print_json(rows)
        return
    print(f"{group}={option}: {comment(path)}\n")
    lines = [
        (f"{row['key']}={row['value']}", " ".join(filter(None, (row["meaning"], _typed(row["type"])))))
        for row in rows
    ]
    print(_rows(lines, width))


def _typed(name: str) -> str:
    return f"({name})" if name else ""


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
