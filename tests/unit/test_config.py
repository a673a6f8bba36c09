"""The configuration composes, is typed, and tells everything that is wrong with it before a run."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import MISSING as REQUIRED
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import MISSING, DictConfig

from titanplug.config import SCHEMAS, register_schemas, run, run_id
from titanplug.config.checks import EXTRAS, ResolvedRun, resolve_run
from titanplug.config.components import RopeScalingConfig
from titanplug.config.errors import describe_config_error
from titanplug.errors import ConfigError
from titanplug.models import RopeScaling, Transformer, TransformerConfig
from titanplug.models.hf_files import write_directory

CONF = Path(__file__).parents[2] / "conf"
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and "__" not in path.name)
OPTIONS = [
    f"{group}={path.stem}"
    for group in GROUPS
    if group not in ("hydra", "experiment", "debug", "hparams_search")
    for path in sorted((CONF / group).glob("*.yaml"))
    if (group, path.stem) not in {("callbacks", "default"), ("logger", "default")}
]
PRESETS = [
    f"{group}={path.stem}"
    for group in ("experiment", "debug", "hparams_search")
    for path in sorted((CONF / group).glob("*.yaml"))
]
# A value for what has none, so that every option can be resolved.
LARGE = ("model=llama3_1_405b", "data.batch_size=16", "data.seq_len=8192", "tokenizer=byte")
NEEDED = {
    "data=text": ("data.path=a.txt",),
    "data=jsonl": ("data.path=a.jsonl",),
    "tokenizer=hf": ("tokenizer.path=a.json",),
    "parallelism=ddp": ("trainer.devices=2",),
    "parallelism=hsdp": ("trainer.devices=4",),
    "parallelism=fsdp_tp": ("trainer.devices=4",),
    "parallelism=3d": ("trainer.devices=4",),
    "parallelism=4d": ("trainer.devices=8",),
    "parallelism=llama3_8b_8gpus": ("trainer.devices=8", "model=llama3_1_8b"),
    "parallelism=llama3_70b_256gpus": ("trainer.devices=8", "trainer.num_nodes=32", *LARGE),
    "parallelism=llama3_405b_512gpus": ("trainer.devices=8", "trainer.num_nodes=64", *LARGE),
    "experiment=llama3_8b": ("tokenizer.path=a",),
    "experiment=llama3_70b": ("tokenizer.path=a",),
    "experiment=llama3_405b": ("tokenizer.path=a",),
}
LOGGERS = {"wandb": "WandbLogger", "mlflow": "MLFlowLogger"}


HF_CONFIG = TransformerConfig(
    vocab_size=4096,
    dim=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    hidden_dim=24,
    max_seq_len=1024,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 256),
)


def hugging_face_directory(path: Path) -> Path:
    write_directory(path / "hf", HF_CONFIG, Transformer(HF_CONFIG).state_dict())
    return path / "hf"


@pytest.fixture(autouse=True)
def hydra_with_schemas() -> Iterator[None]:
    register_schemas()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield
    GlobalHydra.instance().clear()


def composed(*overrides: str) -> DictConfig:
    return compose("train", overrides=list(overrides))


def resolved(*overrides: str, run_dir: Path = Path("/runs/one")) -> ResolvedRun:
    return resolve_run(composed(*overrides), run_dir)


def problems_of(*overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolved(*overrides)
    return caught.value.problems


def composing_error(*overrides: str) -> str:
    with pytest.raises(HydraException) as caught:
        composed(*overrides)
    return describe_config_error(caught.value)


# --------------------------------------------------------------------------------------
# Composing
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [*OPTIONS, *PRESETS])
def test_every_option_composes_resolves_and_passes_the_checks(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [option, *NEEDED.get(option, ())]
    if option.startswith("parallelism=pp") or option in ("parallelism=tp", "parallelism=cp"):
        overrides.append("trainer.devices=2")
    if option == "model=hf":
        overrides.append(f"model.init_from={hugging_face_directory(tmp_path)}")
    if "tokenizer.path" in str(overrides):
        (tmp_path / "tokenizer").mkdir()
    for package in ("wandb", "mlflow"):  # extras that the tests don't need
        monkeypatch.setitem(EXTRAS, f"lightning.pytorch.loggers.{LOGGERS[package]}", ("torch", package))
    config = resolved(*overrides, "trainer.accelerator=cpu").config
    assert yaml.safe_load(yaml.safe_dump(config)) == config  # plain containers, for the ranks
    assert "${" not in str(config) and "???" not in str(config)


def test_every_file_is_covered() -> None:
    """A new file is composed by the test above, or is one of the few that others are made of."""
    files = {path.relative_to(CONF) for path in CONF.rglob("*.yaml")}
    composed_ones = {Path(*option.split("=")).with_suffix(".yaml") for option in (*OPTIONS, *PRESETS)}
    rest = {str(path) for path in files - composed_ones}
    assert rest == {"train.yaml", "hydra/default.yaml", "callbacks/default.yaml"}
    assert len(files) == 97


def test_every_model_is_typed_whatever_its_file_names() -> None:
    config = composed("model=quickstart", "model.num_kv_heads=1", "model.qk_norm=true")
    assert config.model.num_kv_heads == 1 and config.model.dim == 160


def test_the_folder_of_the_run_reaches_everything_that_writes() -> None:
    config = resolved(run_dir=Path("/runs/x")).config
    assert config["paths"]["run_dir"] == config["trainer"]["default_root_dir"] == "/runs/x"
    assert config["callbacks"]["model_checkpoint"]["dirpath"] == "/runs/x/checkpoints"
    assert config["logger"]["tensorboard"]["save_dir"] == "/runs/x"


def test_one_callback_or_logger_can_be_switched_off() -> None:
    config = resolved("callbacks.loss_curve=null", "logger.tensorboard=null").config
    assert config["callbacks"]["loss_curve"] is None and config["logger"]["tensorboard"] is None


def test_a_model_of_ones_own_needs_no_schema(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("_target_: mine.Model\nlayers: 3\n")
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", overrides=[f"hydra.searchpath=[file://{tmp_path}]", "model=mine"])
    assert resolve_run(config, tmp_path).config["model"] == {"_target_": "mine.Model", "layers": 3}


def test_a_model_is_read_from_its_directory_before_the_run(tmp_path: Path) -> None:
    source = hugging_face_directory(tmp_path)
    overrides = ("model=hf", f"model.init_from={source}", "data.seq_len=512")
    config = resolved(*overrides, "model.max_seq_len=512").config
    model = config["model"]
    assert model["_target_"] == "titanplug.models.TransformerConfig" and model["init_from"] == str(source)
    assert (model["num_layers"], model["max_seq_len"]) == (2, 512)
    assert config["module"]["config"] == model  # what ranks build needs no config.json
    assert instantiate(model, _convert_="all").rope_scaling == HF_CONFIG.rope_scaling

    tp = problems_of(*overrides, "parallelism=tp", "trainer.devices=4", "trainer.accelerator=cpu")
    assert any("tp" in problem and "2 key-value heads" in problem for problem in tp)
    (long,) = problems_of("model=hf", f"model.init_from={source}", "data.seq_len=2048")
    assert "data.seq_len=2048 with model.max_seq_len=1024" in long
    (vocab,) = problems_of(*overrides, "tokenizer.vocab_size=5000")
    assert "tokenizer.vocab_size=5000 with model.vocab_size=4096" in vocab


def test_weights_are_looked_for_before_the_run(tmp_path: Path) -> None:
    (gone,) = problems_of("model=hf", f"model.init_from={tmp_path / 'gone'}")
    assert "gone does not exist" in gone
    (no_value,) = problems_of("model=hf")
    assert "model.init_from has no value" in no_value
    source = hugging_face_directory(tmp_path)
    given = f"model.init_from={source}"
    other = problems_of("model=debug", given)
    assert other[0].startswith("model: dim=64, in init_from=")
    (source / "model.safetensors").unlink()
    (absent,) = problems_of("model=hf", given)
    assert "neither model.safetensors nor model.safetensors.index.json" in absent


def test_a_run_that_goes_on_needs_no_first_weights(tmp_path: Path) -> None:
    source = hugging_face_directory(tmp_path)
    (source / "model.safetensors").unlink()
    config = resolved("model=hf", f"model.init_from={source}", "ckpt_path=a.ckpt").config
    assert config["model"]["init_from"] is None and config["module"]["config"]["init_from"] is None
    config = resolved("model=debug", "model.init_from=/gone", "ckpt_path=a.ckpt").config
    assert config["module"]["config"]["init_from"] is None


# --------------------------------------------------------------------------------------
# Schemas
# --------------------------------------------------------------------------------------

PLAIN = ("_target_", "_partial_", "_convert_")
# What the program passes itself, or what a configuration can't express.
PASSED = {
    "titanplug.strategy.TitanStrategy": {"plan"},
    "titanplug.modules.constant": {"optimizer", "num_steps"},
    "titanplug.modules.cosine": {"optimizer", "num_steps"},
    "titanplug.modules.linear": {"optimizer", "num_steps"},
    "titanplug.modules.adamw_8bit": {"params"},
    "titanplug.modules.warmup_stable_decay": {"optimizer", "num_steps"},
}


def all_schemas() -> list[type]:
    listed = [schema for group in SCHEMAS.values() for schema in group.values()]
    runs = (run.TrainConfig, run.TrainerConfig, run.PathsConfig, run.PrecisionConfig)
    return [*dict.fromkeys([*listed, RopeScalingConfig, *runs])]


def target_of(schema: type) -> Any:
    module, _, name = str(schema._target_).rpartition(".")  # type: ignore[attr-defined]
    return getattr(import_module(module), name)


@pytest.mark.parametrize(
    "schema",
    [schema for schema in all_schemas() if hasattr(schema, "_target_") and schema._target_ != MISSING],
    ids=lambda schema: schema.__name__,
)
def test_a_schema_has_the_names_and_defaults_of_its_target(schema: type) -> None:
    target = target_of(schema)
    parameters = dict(inspect.signature(target).parameters)
    keys = {item.name: item for item in fields(schema) if item.name not in PLAIN}
    takes_any = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    assert takes_any or keys.keys() <= parameters.keys()
    path = schema._target_  # type: ignore[attr-defined]
    if not path.startswith("titanplug."):
        return
    assert parameters.keys() - keys.keys() == PASSED.get(path, set())
    for name, item in keys.items():
        ours, theirs = item.default, parameters[name].default
        if ours in (REQUIRED, MISSING) or (isinstance(ours, str) and ours.startswith("${")):
            continue
        assert ours == theirs, name


@pytest.mark.parametrize("schema", all_schemas(), ids=lambda schema: schema.__name__)
def test_every_key_is_described(schema: type) -> None:
    described: set[str] = set()
    for base in schema.__mro__:
        text = (base.__doc__ or "").partition("Args:")[2]
        described |= {line.split(":")[0].strip() for line in text.splitlines() if ":" in line}
    keys = {item.name for item in fields(schema)} - set(PLAIN)
    assert keys <= described


# --------------------------------------------------------------------------------------
# What is wrong
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainr.devices=2", ["trainr.devices", "Did you mean 'trainer'?", "seed"]),
        ("optim.learning_rate=1", ["'learning_rate'", "optim", "lr, betas"]),
        ("model.num_layer=2", ["'num_layer'", "Did you mean 'num_layers'?"]),
        ("optim.lr=fast", ["optim.lr=fast", "'fast'", "Float"]),
        ("trainer.devices=many", ["trainer.devices=many", "'many'", "Integer"]),
        ("optim=adam", ["optim=adam", "adamw", "sgd"]),
        ("optin=adamw", ["optin", "optim"]),
        ("data.tokenizer", ["data.tokenizer"]),
    ],
)
def test_a_wrong_override_is_named_with_what_is_allowed(override: str, words: list[str]) -> None:
    text = composing_error(override)
    assert all(word in text for word in words), text
    assert "To append" not in text


def test_a_key_that_is_forced_in_is_refused_with_the_keys_there_are() -> None:
    problems = problems_of("+trainer.divices=2", "+optim.lrr=1", "+other=1")
    assert len(problems) == 3
    assert any(p.startswith("trainer.divices: ") and "mean 'devices'" in p for p in problems)
    assert any(p.startswith("optim.lrr: ") and "weight_decay" in p for p in problems)
    assert any(p.startswith("other: ") and "scheduler" in p for p in problems)


def test_all_wrong_values_are_told_at_once() -> None:
    problems = problems_of(
        "trainer.accelerator=cpu",
        "trainer.devices=4",
        "trainer.gradient_clip_algorithm=size",
        "parallelism.dp_shard=3",
        "parallelism.tp=4",
        "precision.name=16-mixed",
        "data.seq_len=514",
        "model.max_seq_len=256",
        "tokenizer.vocab_size=5000",
    )
    told = [
        "trainer.gradient_clip_algorithm=size",
        "dp_shard=3",
        "tp=4 with 4 heads and 2 key-value heads",
        "precision='16-mixed'",
        "seq_len=514 with tp=4",
        "data.seq_len=514 with model.max_seq_len=256",
        "tokenizer.vocab_size=5000 with model.vocab_size=4096",
    ]
    for text in told:
        assert sum(text in problem for problem in problems) == 1, (text, problems)
    assert len(problems) == len(told)


def test_all_gpus_are_counted_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number decides the rows of a rank, and is what the ranks and the status get."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    found = resolved(
        "trainer.devices=-1", "trainer.accelerator=gpu", "global_batch_size=8", "parallelism=fsdp"
    )
    assert found.devices == found.config["trainer"]["devices"] == 4
    assert found.config["data"]["batch_size"] == 2


def test_the_rest_of_the_processes_is_checked_like_a_number() -> None:
    (problem,) = problems_of("trainer.accelerator=cpu", "trainer.devices=4", "parallelism=tp")
    assert "tp=4 with 4 heads and 2 key-value heads" in problem


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data=text"], ["data.path has no value"]),
        (["trainer.devices=0"], ["trainer.devices=0", "1 or more"]),
        (["trainer.devices=-1", "trainer.accelerator=cpu"], ["trainer.devices=-1", "GPU"]),
        (["trainer.num_nodes=0"], ["trainer.num_nodes=0"]),
        (["model.num_heads=5"], ["model.", "num_heads=5", "dim=64"]),
        (["trainer.accelerator=tpu"], ["trainer.accelerator=tpu", "auto, cpu"]),
        (["parallelism.timeout_s=0"], ["timeout_s=0"]),
        (["parallelism.cp_backend=rings"], ["cp_backend='rings'", "Did you mean 'ring'?"]),
        (
            ["parallelism=cp", "trainer.devices=2", "parallelism.cp_pad=false", "data.seq_len=510"],
            ["seq_len=510 with cp=2", "508 or 512"],
        ),
        (["parallelism.pp=2", "parallelism.pp_schedule=2f2b"], ["pp_schedule='2f2b'", "Interleaved1F1B"]),
        (["name=${nowhere}"], ["nowhere"]),
    ],
)
def test_a_run_that_cannot_be(overrides: list[str], words: list[str]) -> None:
    problems = problems_of(*overrides)
    assert any(all(word in problem for word in words) for problem in problems), problems


def test_runs_that_start_together_get_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    ids = set()
    for _ in range(50):
        run_id.cache_clear()
        ids.add(run_id())
        assert run_id() in ids  # one for all of a process
    assert len(ids) > 45
    run_id.cache_clear()
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_STEP_ID", "3")
    assert run_id() == "slurm-17.3.0"
    run_id.cache_clear()


# --------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "titanplug.cli", *arguments],
        cwd=cwd,
        env={"PYTHONPATH": str(CONF.parent), "PATH": "", "HOME": str(cwd)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_wrong_command_line_ends_at_once_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from titanplug.cli import main; sys.argv = ['titanplug', 'train', 'optim=adam']\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'lightning' in sys.modules)"
    )
    env = {"PYTHONPATH": str(CONF.parent), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "2 False False\n"
    assert done.stderr.startswith("titanplug: ") and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_plan_that_does_not_fit_ends_before_any_process(tmp_path: Path) -> None:
    done = command("train", "trainer.accelerator=cpu", "trainer.devices=3", "parallelism.tp=2", cwd=tmp_path)
    assert done.returncode == 2
    assert "tp=2" in done.stderr and "3 processes" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_cfg_and_help_show_and_start_nothing(tmp_path: Path) -> None:
    shown = command("train", "experiment=quickstart", "--cfg", "job", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    config = yaml.safe_load(shown.stdout)
    assert config["model"]["dim"] == 160 and config["trainer"]["devices"] == 2
    helped = command("train", "--help", cwd=tmp_path)
    assert helped.returncode == 0 and "experiment=quickstart" in helped.stdout
    assert "optim: adamw, adamw_8bit, sgd" in helped.stdout and "schema" not in helped.stdout
    assert not list(tmp_path.iterdir())


def test_the_command_says_what_there_is(tmp_path: Path) -> None:
    assert "train" in command(cwd=tmp_path).stdout
    wrong = command("trian", cwd=tmp_path)
    assert wrong.returncode == 2 and "'trian'" in wrong.stderr and "train" in wrong.stderr
