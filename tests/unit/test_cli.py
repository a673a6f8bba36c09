"""The verbs of the command line that train nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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


def test_the_help_of_train_imports_no_torch() -> None:
    code = """
import atexit, sys
from titanplug import cli
atexit.register(lambda: print("torch" in sys.modules))
sys.argv = ["titanplug", "train", "--help"]
cli.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "parallelism: " in done.stdout and done.stdout.splitlines()[-1] == "False"


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


@pytest.fixture
def app(tmp_path: Path) -> Callable[..., str]:
    """Runs an app that imports no titanplug, with ``optim=adamw`` and a resolver ``run_id`` of its own."""
    (tmp_path / "app.py").write_text(
        """
import sys, hydra
from omegaconf import OmegaConf
OmegaConf.register_new_resolver("run_id", lambda: "mine")
@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config):
    print(OmegaConf.to_container(config, resolve=True))
    assert not {"torch", "lightning", "titanplug.strategy"} & set(sys.modules)
main()
"""
    )
    (tmp_path / "conf" / "optim").mkdir(parents=True)
    (tmp_path / "conf" / "optim" / "adamw.yaml").write_text("mine: 1\n")
    (tmp_path / "conf" / "config.yaml").write_text("defaults:\n  - optim: adamw\n  - _self_\nx: ${run_id:}\n")

    def printed(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "app.py", *arguments, "hydra.run.dir=."],
            cwd=tmp_path,
            env={"PYTHONPATH": str(Path(cli.__file__).parents[1]), "PATH": ""},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return printed


def test_an_app_that_wants_nothing_of_titanplug_is_left_alone(app: Callable[..., str]) -> None:
    assert eval(app()) == {"optim": {"mine": 1}, "x": "mine"}
    assert "/schema" not in app("--help")


def test_the_search_path_gives_other_apps_the_groups(app: Callable[..., str], tmp_path: Path) -> None:
    found = eval(app("+parallelism=hsdp"))["parallelism"]
    assert found["dp_replicate"] == 2 and found["_target_"] == "titanplug.strategy.TitanStrategy"
    (tmp_path / "conf" / "optim" / "slow.yaml").write_text(
        "defaults:\n  - schema/adamw@_here_\n  - _self_\nlr: 1.0e-6\n"
    )
    found = eval(app("optim=slow"))["optim"]
    assert found["lr"] == 1e-6 and found["_target_"] == "torch.optim.AdamW"


def test_a_shell_completes_verbs_groups_options_and_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(cli.__file__).parents[1]
    program = tmp_path / "titanplug"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={root} exec {sys.executable} -m titanplug.cli "$@"\n')
    program.chmod(0o755)
    script = """
eval "$(titanplug completion bash)"
complete -p titanplug
for COMP_LINE in "titanplug com" "titanplug train par" "titanplug train -m optim=sg" "titanplug ls x"; do
    words=($COMP_LINE); COMP_POINT=${#COMP_LINE}; COMP_CWORD=$((${#words[@]} - 1)); COMPREPLY=()
    hydra_bash_completion
    echo "${COMPREPLY[@]}"
done
"""
    done = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    first, *found = done.stdout.splitlines()
    assert first.endswith("-F hydra_bash_completion titanplug")
    assert found == ["compare completion", "parallelism parallelism.", "optim=sgd", ""]
    assert run(capsys, "-sc")[0] == 2


def test_hydra_finds_the_launcher_and_the_groups_as_installed(tmp_path: Path) -> None:
    """Without the checkout on the path: an installation by `make` must do."""
    app = "import hydra\n@hydra.main(version_base='1.3', config_path=None)\ndef main(c): print(c)\nmain()\n"
    (tmp_path / "app.py").write_text(app)
    for command, found in (
        (["-m", "titanplug.cli", "train", "--cfg", "hydra"], "titanplug_launcher"),
        (["app.py", "+parallelism=hsdp", "hydra/launcher=titanplug", "hydra.run.dir=."], "TitanStrategy"),
    ):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert found in done.stdout


def test_training_needs_no_plugin_to_be_found(tmp_path: Path) -> None:
    """An editable installation by import hooks hides them from Hydra, which looks into folders."""
    code = (
        "import pkgutil, sys; walk = pkgutil.walk_packages; "
        "pkgutil.walk_packages = lambda *a, **k: (m for m in walk(*a, **k) if 'titanplug' not in m.name); "
        "sys.argv = ['titanplug', 'train', '-m', 'seed=0,1', 'trainer.devices=3', 'parallelism.dp_shard=2']; "
        "from titanplug.cli import main; main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2 and "[2/2] #1 refused: seed=1" in done.stdout, done.stdout + done.stderr
