"""``titanplug init``: a small project of your own, copied from a recipe."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path

_EXAMPLES = """\
examples:
  titanplug init my_project                        an app of your own with titanplug's groups
  titanplug init my_project --recipe own_model     a script with a model of your own, without Hydra
  titanplug init --list
"""
DEFAULT = "own_app"


def recipes_folder() -> Path:
    """Where the recipes are: in the installed package or in the checkout."""
    spec = importlib.util.find_spec("titanplug.recipes")
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(__file__).parents[2] / "recipes"


def recipes() -> dict[str, Path]:
    """Folders by name."""
    found = sorted(path.parent for path in recipes_folder().glob("*/README.md"))
    return {folder.name: folder for folder in found}


def title(folder: Path) -> str:
    """The first line of a recipe's README."""
    return (folder / "README.md").read_text().splitlines()[0].lstrip("# ")


def main(arguments: Sequence[str]) -> None:
    """Run the command. Exit code 2 where there is no such recipe, or something would be written over."""
    found = recipes()
    parser = argparse.ArgumentParser(
        prog="titanplug init",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="?", type=Path, help="a new or empty folder")
    parser.add_argument("--recipe", default=DEFAULT, help=f"one of {', '.join(found)}; default: {DEFAULT}")
    parser.add_argument("--list", action="store_true", help="show the recipes")
    given = parser.parse_args(arguments)
    if given.list:
        width = max(map(len, found))
        print("\n".join(f"  {name.ljust(width)}  {title(folder)}" for name, folder in found.items()))
        return
    if given.folder is None:
        parser.error("give the folder of the new project")
    if given.recipe not in found:
        from titanplug.config.checks import suggest

        hint = suggest(given.recipe, list(found))
        parser.error(f"there is no recipe {given.recipe!r}. {hint}Recipes: {', '.join(found)}.")
    if given.folder.exists() and (not given.folder.is_dir() or any(given.folder.iterdir())):
        parser.error(f"{given.folder} is there and isn't empty: nothing is written over. Give a new folder.")
    ignored = shutil.ignore_patterns("__pycache__", "__init__.py", "runs", "outputs", "multirun")
    shutil.copytree(found[given.recipe], given.folder, ignore=ignored, dirs_exist_ok=True)
    print(f"{given.folder}: {title(found[given.recipe])}")
    for path in sorted(given.folder.rglob("*")):
        if path.is_file():
            print(f"  {path.relative_to(given.folder)}")
    print(f"\nNext: cd {given.folder}, and read README.md, which begins with the commands.")
