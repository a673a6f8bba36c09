"""The verbs of the command line that train nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from titanplug import cli
from titanplug.commands import doctor, init, ls


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    """Exit code, output and errors of ``titanplug ...``."""
    code: object = 0
    before, sys.argv = sys.argv, ["titanplug", *arguments]
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        sys.argv = before
    out, errors = capsys.readouterr()
    return code, out, errors


def test_help_names_every_verb_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == 0
    for name, command in cli.COMMANDS.items():
        assert f"  {name}" in out and f"titanplug {command.example}" in out


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name != "train"])
def test_every_verb_tells_more_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, name, "--help")
    assert code == 0 and out.startswith(f"usage: titanplug {name}") and f"titanplug {name} " in out


def test_unknown_verbs_suggest(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = run(capsys, "trian")
    assert code == 2 and "Did you mean 'train'?" in errors and "Commands:" in errors


def test_the_help_is_there_at_once() -> None:
    imported = "import sys; sys.argv = ['titanplug']; from titanplug import cli; cli.main(); "
    done = subprocess.run(
        [sys.executable, "-c", imported + "assert not {'torch', 'hydra', 'lightning'} & set(sys.modules)"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_ls_knows_every_group_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    found = ls.groups(ls.conf_folder())
    code, out, _ = run(capsys, "ls")
    assert code == 0
    for group, options in found.items():
        assert group in out
        for option, path in options.items():
            assert option in out.replace("\n", " ")
            assert len(ls.comment(path)) >= 10, f"{group}/{option} doesn't say what it is"
            _, shown, _ = run(capsys, "ls", f"{group}/{option}")
            assert shown.startswith(f"{group}={option}: ")


def test_ls_shows_type_value_and_meaning_of_each_key(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "ls", "parallelism=hsdp", "--json")
    rows: list[dict[str, str]] = json.loads(out)
    by_key = {row["key"]: row for row in rows}
    assert by_key["parallelism.dp_replicate"] == {
        "key": "parallelism.dp_replicate",
        "type": "int",
        "value": "2",
        "meaning": "copies of the model (HSDP).",
    }
    assert all(row["meaning"] for row in rows)
    _, out, _ = run(capsys, "ls", "logger/tensorboard")
    assert "logger.tensorboard.save_dir" in out


@pytest.mark.parametrize(
    ("given", "told"),
    [("paralelism", "Did you mean 'parallelism'?"), ("optim/adam", "Did you mean 'adamw'?")],
)
def test_ls_suggests(given: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = run(capsys, "ls", given)
    assert code == 2 and told in errors


def test_doctor_finds_this_machine_able(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor", "--json")
    found = {item["what"]: item for item in json.loads(out)}
    assert code == 0
    assert found["torch"]["level"] == found["gloo"]["level"] == "ok"
    assert "2 processes added up" in found["gloo"]["text"]


def test_doctor_tells_what_to_do_and_fails_on_faults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(doctor, "version", lambda name: "0.1" if name == "torch" else "99")
    code, out, _ = run(capsys, "doctor", "--quick")
    assert code == 1
    assert "! torch            0.1 is not " in out and "install a version in that range" in out
    assert "? ranks            WORLD_SIZE are set" in out


def test_doctor_reports_processes_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CHECK_GROUP", "raise SystemExit('no such interface')")
    found = doctor._try_group("gloo", 2)
    assert found.level == "fault" and "no such interface" in found.text and "GLOO_SOCKET_IFNAME" in found.text


def test_init_copies_a_recipe_and_nothing_over_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, folder in init.recipes().items():
        code, out, _ = run(capsys, "init", name, "--recipe", name)
        wanted = {path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}
        assert code == 0 and f"cd {name}" in out
        assert {path.name for path in Path(name).rglob("*") if path.is_file()} == wanted
    code, _, errors = run(capsys, "init", "own_app")
    assert code == 2 and "nothing is written over" in errors
    code, _, errors = run(capsys, "init", "x", "--recipe", "own_ap")
    assert code == 2 and "Did you mean 'own_app'?" in errors and not Path("x").exists()
    _, out, _ = run(capsys, "init", "--list")
    assert all(name in out for name in init.recipes())


def test_the_search_path_gives_other_apps_the_groups(tmp_path: Path) -> None:
    """An app's own option goes before ours of the same name, and an app that wants none has none."""
    app = """
import hydra
@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config): print(dict(config))
main()
"""
    (tmp_path / "app.py").write_text(app)
    (tmp_path / "conf" / "optim").mkdir(parents=True)
    (tmp_path / "conf" / "optim" / "adamw.yaml").write_text("mine: 1\n")
    (tmp_path / "conf" / "config.yaml").write_text("defaults:\n  - optim: adamw\nx: 1\n")

    def printed(*arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "app.py", *arguments, "hydra.run.dir=."],
            cwd=tmp_path,
            env={"PYTHONPATH": str(Path(cli.__file__).parents[1]), "PATH": ""},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = eval(done.stdout)
        return found

    assert printed() == {"optim": {"mine": 1}, "x": 1}
    found = printed("+parallelism=hsdp")["parallelism"]
    assert found["dp_replicate"] == 2 and found["_target_"] == "titanplug.strategy.TitanStrategy"
