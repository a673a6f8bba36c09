from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
SHIPPED = {".py", ".typed", ".yaml", ".xz", ".html", ".css", ".js"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_wheel_holds_code_configuration_and_data(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    expected = set()
    for folder, package in (
        ("titanplug", "titanplug"),
        ("conf", "titanplug/conf"),
        ("recipes", "titanplug/recipes"),
        ("hydra_plugins", "hydra_plugins"),
    ):
        if (ROOT / folder).exists():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
        expected |= {
            f"{package}/{path.relative_to(source / folder).as_posix()}"
            for path in (source / folder).rglob("*")
            if path.suffix in SHIPPED
        }
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path]
    built = subprocess.run([*command, source], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if ".dist-info/" not in name and Path(name).suffix in SHIPPED} == expected
    assert "titanplug/conf/__init__.py" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("conf/", "tests/"))]


def test_constraints_hold_a_version_in_range_for_every_dependency(project: dict[str, Any]) -> None:
    constraints = {
        canonicalize_name(name): Version(version)
        for name, version in re.findall(
            r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE
        )
    }
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    for requirement in (Requirement(line) for group in groups for line in group):
        if requirement.name == project["name"]:
            continue
        version = constraints.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt has no version of {requirement.name}"
        assert version in requirement.specifier, f"{requirement}: constraints.txt has {version}"
