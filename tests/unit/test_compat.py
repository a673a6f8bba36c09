from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from titanplug import compat
from titanplug.errors import MissingExtraError, TitanplugError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An importable package with a module inside; forgotten after the test."""
    name = "package_for_compat"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("VALUE = 1\n")
    (folder / "inner.py").write_text("import package_for_compat\nVALUE = 2\n")
    (folder / "broken.py").write_text("import a_dependency_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    modules = dict(sys.modules)
    yield name
    for added in set(sys.modules) - set(modules):
        del sys.modules[added]
    assert compat._finder not in sys.meta_path, "a test left a callback waiting"


# -------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("installed", "minimum", "good"),
    [
        ("2.11.0", "2.11", True),
        ("2.13.0+cpu", "2.11", True),
        ("2.11.0.dev20260101", "2.11", True),
        ("3.0.0", "2.11", True),
        ("2.9.1", "2.11", False),  # 9 < 11 as numbers, not as text
        ("1.13.1", "2.11", False),
    ],
)
def test_require_torch(installed: str, minimum: str, good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", lambda _: installed)
    if good:
        compat.require_torch(minimum)
    else:
        with pytest.raises(TitanplugError, match=rf"torch {installed} is installed.*pip install"):
            compat.require_torch(minimum)


def test_require_torch_refuses_what_is_no_version() -> None:
    with pytest.raises(ValueError, match="'new' is not a version"):
        compat.require_torch("new")


# -------------------------------------------------------------------------------------- extras


def test_require_extra_returns_the_module(package: str) -> None:
    assert compat.require_extra(f"{package}.inner", "data").VALUE == 2


@pytest.mark.parametrize("module", ["no_such_package", "no_such_package.inner"])
def test_require_extra_names_the_command(module: str) -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'titanplug\[data\]'") as raised:
        compat.require_extra(module, "data")
    assert raised.value.name == module


def test_require_extra_does_not_hide_a_broken_module(package: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="a_dependency_that_is_missing") as raised:
        compat.require_extra(f"{package}.broken", "data")
    assert not isinstance(raised.value, MissingExtraError)


# -------------------------------------------------------------------------------------- on_import


def test_on_import_runs_at_once_for_an_imported_module() -> None:
    calls: list[str] = []
    compat.on_import("sys", lambda: calls.append("now"))
    assert calls == ["now"]
    assert compat._finder not in sys.meta_path


def test_on_import_runs_after_the_module_has_run_and_once(package: str) -> None:
    seen: list[int] = []
    compat.on_import(package, lambda: seen.append(sys.modules[package].VALUE))
    assert seen == []
    module = importlib.import_module(package)
    importlib.import_module(package)
    importlib.reload(module)
    assert seen == [1]


def test_on_import_waits_for_a_submodule(package: str) -> None:
    calls: list[str] = []
    compat.on_import(f"{package}.inner", lambda: calls.append("first"))
    compat.on_import(f"{package}.inner", lambda: calls.append("second"))
    importlib.import_module(package)
    assert calls == []
    importlib.import_module(f"{package}.inner")
    assert calls == ["first", "second"]


def test_on_import_leaves_the_module_its_own_loader(package: str) -> None:
    compat.on_import(package, lambda: None)
    module = importlib.import_module(package)
    assert module.__spec__ is not None
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__.loader is module.__loader__
    assert files(package).joinpath("inner.py").is_file()


def test_on_import_waits_for_the_first_import_that_succeeds(package: str) -> None:
    calls: list[str] = []
    compat.on_import(f"{package}.broken", lambda: calls.append("imported"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{package}.broken")
    assert calls == []
    folder = Path(importlib.import_module(package).__path__[0])
    (folder / "broken.py").write_text("VALUE = 3  # mended, and longer than before\n")
    importlib.invalidate_caches()
    importlib.import_module(f"{package}.broken")
    assert calls == ["imported"]


def test_on_import_of_a_missing_module_is_an_ordinary_error(package: str) -> None:
    compat.on_import("no_such_package", lambda: None)
    try:
        with pytest.raises(ModuleNotFoundError, match="no_such_package"):
            importlib.import_module("no_such_package")
    finally:
        compat._finder.run_callbacks("no_such_package")


def test_an_error_in_a_callback_fails_the_import(package: str) -> None:
    def fail() -> None:
        raise RuntimeError("callback failed")

    compat.on_import(package, fail)
    with pytest.raises(RuntimeError, match="callback failed"):
        importlib.import_module(package)


def test_an_awaited_module_can_be_run_as_a_script(package: str, tmp_path: Path) -> None:
    (tmp_path / package / "__main__.py").write_text("print('ran')\n")
    code = (
        "import runpy, sys; from titanplug.compat import on_import; "
        f"on_import('{package}.__main__', lambda: None); sys.path.insert(0, {str(tmp_path)!r}); "
        f"runpy.run_module('{package}', run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "ran\n", result.stderr


def test_compat_imports_neither_torch_nor_lightning() -> None:
    code = "import sys, titanplug.compat; print({'torch', 'lightning'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "set()\n", result.stderr


def test_a_process_waits_for_its_last_collective_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many Trainers it has."""
    registered: list[object] = []
    monkeypatch.setattr(compat.atexit, "register", lambda *arguments: registered.append(arguments))
    compat.let_collectives_end_before_exit.cache_clear()
    compat.let_collectives_end_before_exit()
    compat.let_collectives_end_before_exit()
    assert len(registered) == 1
