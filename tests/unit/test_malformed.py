"""Malformed command lines: each ends with exit code 2 and a message that helps, before anything starts."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from titanplug import train

ROOT = Path(__file__).parents[2]

# A command line, and what its message says.
LINES: dict[str, list[str]] = {
    # names
    "paralelism=fsdp": ["'paralelism'", "Did you mean 'parallelism'?"],
    "parallelism=fdsp": ["parallelism=fdsp: there is no such option", "Did you mean 'fsdp'?"],
    "model=quickstat": ["model=quickstat", "Did you mean 'quickstart'?", "smollm2_135m"],
    "optim=adam": ["optim=adam", "adamw"],
    "precision=fp12": ["precision=fp12", "Options of precision: bf16_mixed, bf16_true, fp32."],
    "experiment=quickstrt": ["Did you mean 'quickstart'?"],
    "logger=tensorbord": ["Did you mean 'tensorboard'?"],
    "hparams_search=grid": ["Options of hparams_search: optuna"],
    "hydra/launcher=titanplugg": ["Did you mean 'titanplug'?"],
    "parallelism.pp_microbatch=4": ["no key 'pp_microbatch'", "Did you mean 'pp_microbatches'?"],
    "+parallelism.pp_microbatch=4": ["no such key", "Did you mean 'pp_microbatches'?"],
    "trainer.max_step=4": ["Did you mean 'max_steps'?"],
    "callbacks.loss_curv=null": ["Did you mean 'loss_curve'?"],
    "-m seed=1,2 hydra.launcher.slot=3": ["Did you mean 'slots'?"],
    "~model": ["model has no value"],
    # syntax
    "optim.lr": ["'optim.lr' can't be read", "An override is KEY=VALUE"],
    "=3": ["An override is KEY=VALUE"],
    "model=[": ["'model=[' can't be read"],
    "+": ["'+' can't be read"],
    "a|b": ["'a|b' can't be read"],
    "optim.lr=1e-3,2e-3": ["--multirun"],
    "--multirunn": ["unrecognized arguments: --multirunn"],
    "--resume": ["--resume goes on with a sweep"],
    # types
    "optim.lr=": ["optim.lr", "Float"],
    "trainer.devices=two": ["trainer.devices=two", "Integer"],
    "model.dim=abc": ["model.dim=abc", "Integer"],
    "test=perhaps": ["test=perhaps"],
    "optim.betas=0.9": ["optim.betas"],
    # ranges
    "optim.lr=-1": ["optim.lr=-1.0: it must be 0 or more"],
    "optim.lr=nan": ["optim.lr=nan"],
    "optim.betas=[0.9,1.0]": ["optim.betas=1.0", "from 0 to below 1"],
    "scheduler.warmup_steps=-5": ["scheduler.warmup_steps=-5"],
    "scheduler.min_ratio=2": ["scheduler.min_ratio=2.0", "from 0 to 1"],
    "data.batch_size=0": ["data.batch_size=0"],
    "data.seq_len=0": ["data.seq_len=0"],
    "trainer.accumulate_grad_batches=0": ["trainer.accumulate_grad_batches=0"],
    "trainer.devices=0": ["trainer.devices=0"],
    "trainer.num_nodes=0": ["trainer.num_nodes=0"],
    "trainer.max_steps=-3": ["trainer.max_steps=-3: it must be -1 or more"],
    "trainer.gradient_clip_val=-1": ["trainer.gradient_clip_val=-1.0"],
    "seed=-1": ["seed=-1", "4294967295"],
    "optim.lr=inf": ["optim.lr=inf: it must be 0 or more"],
    "trainer.val_check_interval=0": ["trainer.val_check_interval=0: it must be above 0"],
    "data.eval_batch_size=0": ["data.eval_batch_size=0"],
    "data.validation_fraction=2": ["data.validation_fraction=2.0", "from 0 to below 1"],
    "tokenizer=byte data.test_fraction=nan": ["data.test_fraction=nan"],
    "trainer.deterministic=sometimes": ["null, false, true, warn"],
    "callbacks.model_checkpoint.mode=mox": ["callbacks.model_checkpoint.mode=mox", "min, max"],
    "callbacks.step_lines=x": ["callbacks.step_lines"],
    "logger.tensorboard=0": ["logger.tensorboard"],
    "name=../x": ["name=../x: it names a folder below paths.runs"],
    # what doesn't fit
    "parallelism.tp=3 trainer.devices=3": ["tp=3 with 4 heads", "Allowed values of tp: 1, 2."],
    "parallelism.dp_shard=2 parallelism.tp=2 trainer.devices=3": ["= 4 for 3 processes"],
    "parallelism=pp parallelism.pp_schedule=1F2B trainer.devices=2": ["'1F2B': there is no such schedule"],
    "trainer.devices=2 parallelism=cp parallelism.cp_backend=rings": ["Did you mean 'ring'?"],
    "global_batch_size=7 trainer.devices=2": ["global_batch_size=7", "The next is 8."],
    "trainer.precision=16-mixed": ["32-true, bf16-mixed, bf16-true"],
    "trainer.accelerator=tpuu": ["auto, cpu, gpu, cuda"],
    "ckpt_path=a resume=auto": ["ckpt_path=a with resume=auto"],
    "resume=nowhere": ["resume=nowhere", "no config.yaml"],
    "tokenizer=hf": ["tokenizer.path has no value"],
    "model=hf": ["model.init_from has no value"],
    "trainer.num_nodes=2 trainer.devices=1": ["every node with torchrun or srun"],
}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "HYDRA_FULL_ERROR", "TITANPLUG_SWEEP_ID"):
        monkeypatch.delenv(name, raising=False)


def run(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Exit code and what was told of a command line; 0 where it would have trained."""
    GlobalHydra.instance().clear()
    monkeypatch.setattr(sys, "argv", ["titanplug train", *line.split()])
    monkeypatch.setattr(train.launch, "run_task", lambda *_, **__: None)
    monkeypatch.setattr(train.launch, "launch_ranks", lambda *_, **__: None)
    monkeypatch.setattr(train, "objective", lambda *_: 0.0)
    code: object = 0
    try:
        train.main()
    except SystemExit as ended:
        code = ended.code
    return code, capsys.readouterr().err


@pytest.mark.parametrize("line", LINES)
def test_a_malformed_line_says_what_to_do(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = run(line, monkeypatch, capsys)
    assert code == 2, told
    assert all(words in told for words in LINES[line]), told
    assert "Traceback" not in told and "hydra.cc" not in told


def test_there_are_enough_of_them() -> None:
    assert len(LINES) >= 30


def test_an_extra_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("titanplug.config.checks.find_spec", lambda name: None)
    for line, extra in (("logger=wandb", "wandb"), ("logger=mlflow", "mlflow"), ("optim=adamw_8bit", "int8")):
        code, told = run(line, monkeypatch, capsys)
        assert code == 2 and f"pip install 'titanplug[{extra}]'" in told


def test_random_changes_of_good_lines_run_or_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never an error that isn't a message."""
    good = [
        "experiment=quickstart optim.lr=1e-3 trainer.devices=2 parallelism=fsdp",
        "model=debug data.seq_len=64 trainer.max_steps=3 callbacks=none logger=csv",
        "parallelism=tp trainer.devices=2 scheduler=wsd scheduler.decay_fraction=0.2 seed=3",
    ]
    assert all(run(line, monkeypatch, capsys) == (0, "") for line in good)
    draw = random.Random(0)
    signs = "=,.[]{}()'\"+~ -_/\\$:0aZ\x07é"
    outcomes = set()
    for _ in range(60):
        characters = list(draw.choice(good))
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(characters))
            kind = draw.choice("rid")
            if kind == "r":
                characters[place] = draw.choice(signs)
            elif kind == "i":
                characters.insert(place, draw.choice(signs))
            else:
                del characters[place]
        code, told = run("".join(characters), monkeypatch, capsys)
        assert code in (0, 2), (characters, told)
        assert code == 0 or told.startswith(("titanplug: ", "usage: ")), told
        outcomes.add(code)
    assert 2 in outcomes


def test_the_command_itself_prints_the_message_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "titanplug.cli", "train", "parallelism=fdsp"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("titanplug: parallelism=fdsp: ") and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
