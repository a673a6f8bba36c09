"""What is checked before a run starts: everything that can be known without starting it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.utils import get_method, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from titanplug.config import SCHEMAS, run
from titanplug.config.layout import AXES, data_ranks
from titanplug.errors import ConfigError, TitanplugError

TRANSFORMER = "titanplug.models.TransformerConfig"
FROM_DIRECTORY = "titanplug.models.config_from_directory"
ROPE_SCALING = "titanplug.models.RopeScaling"
HF_TOKENIZER = "titanplug.data.HFTokenizer"
STRATEGY = "titanplug.strategy.TitanStrategy"
CHOICES = {
    "trainer.accelerator": ("auto", "cpu", "gpu", "cuda"),
    "trainer.gradient_clip_algorithm": (None, "norm", "value"),
    "trainer.profiler": (None, "simple", "advanced", "pytorch"),
    "trainer.deterministic": (None, False, True, "warn"),
    "callbacks.model_checkpoint.mode": (None, "min", "max"),
}
EXTRAS = {
    "titanplug.modules.adamw_8bit": ("torchao", "int8"),
    "lightning.pytorch.loggers.WandbLogger": ("wandb", "wandb"),
    "lightning.pytorch.loggers.MLFlowLogger": ("mlflow", "mlflow"),
}
"""By the start of a ``_target_``: the package that it needs, and the extra that installs it."""


@dataclass(frozen=True)
class Range:
    """Numbers that a key may have.

    Args:
        least: the smallest.
        most: the largest; None: no limit.
        excluded: whether ``most`` itself is out.
        above: whether ``least`` itself is out.
    """

    least: float
    most: float | None = None
    excluded: bool = False
    above: bool = False

    def __contains__(self, value: float) -> bool:
        """Whether a number is one of them; NaN and infinity are none."""
        if not math.isfinite(value) or (self.above and value == self.least):
            return False
        if self.most is None:
            return value >= self.least
        return self.least <= value < self.most if self.excluded else self.least <= value <= self.most

    def __str__(self) -> str:
        if self.above:
            return f"above {self.least}"
        if self.most is None:
            return f"{self.least} or more"
        return f"a number from {self.least} to {'below ' if self.excluded else ''}{self.most}"


_SIZE, _ANY, _PART = Range(1), Range(0), Range(0, 1)
RANGES = {
    "seed": Range(0, 2**32 - 1),
    "global_batch_size": _SIZE,
    "data.batch_size": _SIZE,
    "data.seq_len": _SIZE,
    "data.eval_batch_size": _SIZE,
    "data.validation_fraction": Range(0, 1, excluded=True),
    "data.test_fraction": Range(0, 1, excluded=True),
    "data.max_eval_documents": _ANY,
    "tokenizer.vocab_size": _SIZE,
    "tokenizer.min_frequency": _ANY,
    "data.num_workers": _ANY,
    "optim.lr": _ANY,
    "optim.eps": _ANY,
    "optim.weight_decay": _ANY,
    "optim.betas": Range(0, 1, excluded=True),
    "optim.momentum": _ANY,
    "optim.block_size": _SIZE,
    "scheduler.warmup_steps": _ANY,
    "scheduler.min_ratio": _PART,
    "scheduler.decay_fraction": _PART,
    "trainer.max_steps": Range(-1),
    "trainer.min_steps": _ANY,
    "trainer.max_epochs": Range(-1),
    "trainer.min_epochs": _ANY,
    "trainer.limit_train_batches": _ANY,
    "trainer.limit_val_batches": _ANY,
    "trainer.limit_test_batches": _ANY,
    "trainer.limit_predict_batches": _ANY,
    "trainer.overfit_batches": _ANY,
    "trainer.val_check_interval": Range(0, above=True),
    "trainer.check_val_every_n_epoch": _SIZE,
    "trainer.num_sanity_val_steps": Range(-1),
    "trainer.log_every_n_steps": _ANY,
    "trainer.accumulate_grad_batches": _SIZE,
    "trainer.gradient_clip_val": _ANY,
    "trainer.reload_dataloaders_every_n_epochs": _ANY,
}
"""By key; a list has numbers of the range, null is always allowed."""


@dataclass(frozen=True)
class ResolvedRun:
    """A run that has passed the checks.

    Args:
        config: plain containers, nothing left to resolve.
        devices: processes on each node.
        num_nodes: machines.
    """

    config: dict[str, Any]
    devices: int
    num_nodes: int


def resolve_run(config: DictConfig, run_dir: Path) -> ResolvedRun:
    """Check a composed configuration and resolve it for good.

    Args:
        config: as Hydra composed it.
        run_dir: folder of the run.

    Raises:
        ConfigError: all that is wrong with it, at once.
    """
    config = config.copy()
    config.paths.run_dir = str(run_dir)
    problems = [*_unknown_keys(config), *_wrong_choices(config)]
    _read_model(config, problems)
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = error.full_key
        raise ConfigError(
            [*problems, f"{key} has no value, and a run needs one. Give it: {key}=..."]
        ) from None
    except OmegaConfBaseException as error:
        text = str(error).splitlines()[0]
        raise ConfigError([*problems, f"{error.full_key}: {text}. Correct it."]) from None
    assert isinstance(plain, dict)
    resolved: dict[str, Any] = {str(key): value for key, value in plain.items()}
    if resolved["ckpt_path"] is not None:
        forget_first_weights(resolved)
    problems += [*_out_of_range(resolved), *_not_built(resolved), *_missing_extras("", resolved)]
    devices, nodes = _count_devices(resolved["trainer"], problems), resolved["trainer"]["num_nodes"]
    resolved["trainer"]["devices"] = devices
    _share_global_batch(resolved, problems)
    _check_model(resolved, devices * nodes, problems)
    if problems:
        raise ConfigError(problems)
    return ResolvedRun(resolved, devices, nodes)


def suggest(key: str, known: Sequence[str]) -> str:
    """A hint for a key that isn't known."""
    close = difflib.get_close_matches(key, known, n=1)
    return f"Did you mean {close[0]!r}? " if close else ""


def _unknown_keys(config: DictConfig) -> Iterator[str]:
    """Keys that were added with ``+`` to what has a schema; constructors would refuse them later."""
    schemas = {run.TrainConfig, run.TrainerConfig, run.PathsConfig, run.PrecisionConfig}
    schemas |= {schema for group in SCHEMAS.values() for schema in group.values()}
    for name, node in _nodes("", config):
        schema = OmegaConf.get_type(node)
        if not is_dataclass(schema) or schema not in schemas:
            continue
        known = [item.name for item in fields(schema)]
        for key in map(str, node):
            if key not in known:
                yield (
                    f"{name}{key}: there is no such key. {suggest(key, known)}"
                    f"Keys of {name.rstrip('.') or 'the configuration'}: "
                    f"{', '.join(item for item in known if not item.startswith('_'))}."
                )


def _nodes(prefix: str, config: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    yield prefix, config
    for key in map(str, config):
        if OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, key):
            continue
        child = config[key]
        if isinstance(child, DictConfig):
            yield from _nodes(f"{prefix}{key}.", child)


def _wrong_choices(config: DictConfig) -> list[str]:
    problems = []
    for key, allowed in CHOICES.items():
        value = OmegaConf.select(config, key)
        if value not in allowed:
            shown = ", ".join("null" if item is None else str(item).lower() for item in allowed)
            problems.append(f"{key}={value}: there is no such choice. Choose one of: {shown}.")
    if config.ckpt_path is not None and config.resume is not None:
        problems.append(
            f"ckpt_path={config.ckpt_path} with resume={config.resume}: each of them says where to start. "
            "Give ckpt_path for a new run from that checkpoint, or resume to go on with a run in its folder."
        )
    return problems


def _out_of_range(config: dict[str, Any]) -> Iterator[str]:
    for key, allowed in RANGES.items():
        group, _, name = key.rpartition(".")
        value = ((config[group] or {}) if group else config).get(name)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and number not in allowed:
                yield f"{key}={number}: it must be {allowed}. Give such a number."


def _not_built(config: dict[str, Any]) -> Iterator[str]:
    """Values in the place of a part's keys, and a name that leads out of the folder of runs."""
    for group in ("callbacks", "logger"):
        for name, node in (config[group] or {}).items():
            if node is not None and not isinstance(node, dict):
                yield f"{group}.{name}={node}: it is built from keys. Set these, or null to switch it off."
    name = Path(config["name"])
    if not name.parts or name.is_absolute() or ".." in name.parts:
        yield f"name={config['name']}: it names a folder below paths.runs. Give a name, without '..' in it."


def _missing_extras(prefix: str, config: dict[str, Any]) -> Iterator[str]:
    """What has to be installed for the classes that are named."""
    target = str(config.get("_target_", ""))
    for start, (package, extra) in EXTRAS.items():
        if target.startswith(start) and find_spec(package) is None:
            yield (
                f"{prefix.rstrip('.')} needs the package {package}, which isn't installed. Install it with "
                f"pip install 'titanplug[{extra}]'."
            )
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _missing_extras(f"{prefix}{key}.", value)


def _share_global_batch(config: dict[str, Any], problems: list[str]) -> None:
    """Set ``data.batch_size`` so that a step has ``global_batch_size`` rows, whatever the layout."""
    wanted, data = config["global_batch_size"], config["data"]
    if wanted is None or problems:
        return
    if data is None or "batch_size" not in data:
        problems.append(
            f"global_batch_size={wanted}: it sets data.batch_size, and the data has no such key. Leave it "
            "out."
        )
        return
    steps = config["trainer"]["accumulate_grad_batches"]
    shares = data_ranks(config) * steps
    if wanted % shares:
        problems.append(
            f"global_batch_size={wanted} on {shares // steps} data-parallel ranks with "
            f"trainer.accumulate_grad_batches={steps}: it must be a multiple of {shares}. The next is "
            f"{-(-wanted // shares) * shares}."
        )
        return
    data["batch_size"] = wanted // shares


def _count_devices(trainer: dict[str, Any], problems: list[str]) -> int:
    """Processes on each node; what is wrong with their number goes to ``problems``."""
    devices, nodes = trainer["devices"], trainer["num_nodes"]
    if nodes < 1:
        problems.append(f"trainer.num_nodes={nodes}: there is at least 1 machine. Give 1 or more.")
    if devices < 1 and devices != -1:
        problems.append(
            f"trainer.devices={devices}: it is the number of processes on each node. Give 1 or more, "
            "or -1 for one on every GPU."
        )
    gpus = 0
    if trainer["accelerator"] != "cpu":
        import torch

        gpus = torch.cuda.device_count()
    if devices == -1 and not gpus:
        problems.append(
            "trainer.devices=-1: it stands for one process on every GPU, and there is none to use. "
            "Give the number of processes."
        )
    elif gpus and devices > gpus:
        problems.append(
            f"trainer.devices={devices}: this machine has {gpus} GPUs. Give {gpus} or less, or use "
            "trainer.accelerator=cpu."
        )
    return gpus if devices == -1 else int(devices)


def _read_model(config: DictConfig, problems: list[str]) -> None:
    """Put in what stands in a model's directory: ranks and runs that go on don't read its sizes again."""
    model = config.model
    if (
        not isinstance(model, DictConfig)
        or "init_from" not in model
        or OmegaConf.is_missing(model, "init_from")
    ):
        return
    if model.get("_target_") == FROM_DIRECTORY:
        try:
            found = instantiate(model, _convert_="all")
        except Exception as error:
            problems += [f"model: {problem}" for problem in _told(error)]
            return
        fields = asdict(found)
        if fields["rope_scaling"] is not None:
            fields["rope_scaling"]["_target_"] = ROPE_SCALING
        config.model = OmegaConf.create({"_target_": TRANSFORMER, **fields})


def forget_first_weights(config: dict[str, Any]) -> None:
    """Build models without ``init_from``, in place: a checkpoint has the weights, and those may be gone."""
    for value in config.values():
        if isinstance(value, dict):
            if value.get("_target_") == TRANSFORMER:
                value["init_from"] = None
            forget_first_weights(value)


def _told(error: Exception) -> Sequence[str]:
    """What is wrong, of an error of ``instantiate``: Hydra wraps what a constructor raises."""
    cause = error.__cause__ or error
    return cause.problems if isinstance(cause, ConfigError) else [str(cause)]


def _check_model(config: dict[str, Any], world_size: int, problems: list[str]) -> None:
    """Cross-checks of model, data, precision and layout; what is wrong goes to ``problems``."""
    model = config["model"] or {}
    heads = num_layers = None
    known_wrong = any(problem.startswith("model.") for problem in problems)
    if model.get("_target_") == TRANSFORMER and not known_wrong:
        try:
            transformer = instantiate(model, _convert_="all")
        except Exception as error:
            problems += [f"model.{problem}" for problem in _told(error)]
        else:
            heads = (transformer.num_heads, transformer.kv_heads)
            num_layers = transformer.num_layers
            problems += _data_problems(config, transformer)
            problems += _weights_problems(transformer)
    if (config["parallelism"] or {}).get("_target_") == STRATEGY and world_size > 0:
        _check_layout(config, world_size, heads, num_layers, problems)


def _weights_problems(transformer: Any) -> Sequence[str]:
    """Whether the weights to start from are there and fit; their sizes are read, not the weights."""
    if transformer.init_from is None:
        return ()
    try:
        get_method("titanplug.models.open_weights")(transformer)
    except TitanplugError as error:
        told = error.problems if isinstance(error, ConfigError) else [str(error)]
        return [f"model: {problem}" for problem in told]
    return ()


def _check_layout(
    config: dict[str, Any],
    world_size: int,
    heads: tuple[int, int] | None,
    num_layers: int | None,
    problems: list[str],
) -> None:
    # Here and not above: importing it takes seconds, which a typo must not cost.
    from titanplug.validation import ContextOptions, PipelineFacts, RunFacts, validate_run

    layout, data = config["parallelism"], config["data"] or {}
    facts = RunFacts(
        world_size=world_size,
        precision=config["trainer"]["precision"],
        heads=heads,
        seq_len=data.get("seq_len"),
        sequence_parallel=layout["sequence_parallel"],
        batch_size=data.get("batch_size"),
        gradient_norm_type=layout["gradient_norm_type"],
        timeout_s=layout["timeout_s"],
        num_layers=num_layers,
        pipeline=PipelineFacts(
            layout["pp_schedule"],
            layout["pp_microbatches"],
            layout["pp_chunks"],
            layout["pp_split"],
            layout["pp_first_weight"],
            layout["pp_last_weight"],
            layout["reshard_after_forward"],
        ),
        context=ContextOptions(layout["cp_backend"], layout["cp_load_balance"], layout["cp_pad"]),
    )
    try:
        validate_run(facts, **{axis: layout[axis] for axis in AXES})
    except ConfigError as error:
        problems += error.problems


def _data_problems(config: dict[str, Any], transformer: Any) -> Iterator[str]:
    seq_len = (config["data"] or {}).get("seq_len")
    if isinstance(seq_len, int) and seq_len > transformer.max_seq_len:
        yield (
            f"data.seq_len={seq_len} with model.max_seq_len={transformer.max_seq_len}: a row must "
            "fit into the model. Lower the first or raise the second."
        )
    tokenizer = config["tokenizer"] or {}
    if tokenizer.get("_target_") == HF_TOKENIZER and Path(tokenizer["path"]).expanduser().exists():
        try:
            vocab = instantiate(tokenizer, _convert_="all").vocab_size
        except Exception as error:
            yield from _told(error)
            return
        if vocab > transformer.vocab_size:
            yield (
                f"tokenizer.path={tokenizer['path']} has ids below {vocab}, with model.vocab_size="
                f"{transformer.vocab_size}: the model needs an embedding for every token. Use the model's "
                "own tokenizer, or a model of its vocabulary."
            )
    vocab = tokenizer.get("vocab_size")
    if isinstance(vocab, int) and vocab > transformer.vocab_size:
        yield (
            f"tokenizer.vocab_size={vocab} with model.vocab_size={transformer.vocab_size}: the "
            f"model needs an embedding for every token. Set model.vocab_size={vocab}."
        )
