"""The communication that the planner predicts is what a run does: operations and bytes, rank by rank."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from tests.distributed.case import SEQ, Case, Module, Rows, build_trainer
from tests.harness import run_ranks
from titanplug.errors import ConfigError
from titanplug.mesh import ParallelDims
from titanplug.models import TransformerConfig
from titanplug.planner.facts import ElementSizes, Place, StepFacts
from titanplug.planner.traffic import Volume, pipeline_messages, step_traffic
from titanplug.schedules.catalogue import SCHEDULES, build_table
from titanplug.strategy import TitanStrategy

STEP = 2  # the step that is counted: shapes are known, keys agreed upon

# Kind, and the position of the tensors that a rank passes in. Arrivals of messages aren't counted.
OPERATIONS = {
    "_allgather_base_": ("all_gather", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
    "broadcast_": ("broadcast", 0),
    "recv_": None,
}

Counted = dict[tuple[int, ...], dict[str, Volume]]
"""By the ranks of a group: axes with equal ranks share one."""


def empty() -> Counted:
    return defaultdict(lambda: defaultdict(lambda: Volume(0, 0)))


def add(counted: Counted, ranks: tuple[int, ...], kind: str, calls: int, num_bytes: int) -> None:
    before = counted[ranks][kind]
    counted[ranks][kind] = Volume(before.calls + calls, before.num_bytes + num_bytes)


def plain(counted: Counted) -> Counted:
    return {ranks: dict(kinds) for ranks, kinds in counted.items()}


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counted = empty()
        self.steps: list[Counted] = []
        self.is_on = False

    def next_step(self, *_: Any) -> None:
        self.steps.append(plain(self.counted))
        self.counted = empty()
        self.is_on = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        library, name, _ = str(func).split(".")
        if self.is_on and library in ("c10d", "_c10d_functional"):
            self.record(name, args)
        return func(*args, **(kwargs or {}))

    def record(self, name: str, args: Any) -> None:
        operation = OPERATIONS[name]  # a KeyError is an operation that no test has met
        if operation is None:
            return
        kind, position = operation
        given = args[position]
        tensors = [given] if isinstance(given, torch.Tensor) else given
        boxed = next(
            arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg)
        )
        ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed)))
        add(self.counted, ranks, kind, 1, sum(tensor.nbytes for tensor in tensors))


@dataclass(frozen=True)
class Run:
    """A layout and what is run on it."""

    degrees: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    case: Case = field(default_factory=lambda: Case(dtype=torch.float32))
    sizes: ElementSizes = field(default_factory=ElementSizes)
    is_logged: bool = False
    rows: int = 4  # on each data-parallel rank

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees.values())


class Lit(Module):
    """Nothing but the step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


def facts_of(run: Run, strategy: TitanStrategy, model: Any) -> StepFacts:
    options, pipeline = dict(run.options), strategy._laid_out.pipeline
    table, stage_layers = None, ()
    if pipeline is not None:
        schedule = pipeline.options
        table = build_table(
            schedule.schedule, strategy.parallel_dims.pp, options["pp_microbatches"], schedule.chunks
        )
        layers = range(1, 1 + model.num_layers)
        stage_layers = tuple(len(set(bounds) & set(layers)) for bounds in pipeline.bounds)
    switches = {name: value for name, value in options.items() if not name.startswith("pp_")}
    return StepFacts(
        model,
        strategy.parallel_dims,
        run.rows,
        SEQ,
        table,
        stage_layers,
        run.sizes,
        takes_norm=run.case.clip is not None,
        by_targets=run.case.by_targets,
        is_logged=run.is_logged,
        **switches,
    )


def group_ranks(strategy: TitanStrategy, name: Any, world_size: int) -> tuple[int, ...]:
    if name == "world":
        return tuple(range(world_size))
    if name == "tied":
        return tuple(dist.get_process_group_ranks(strategy._laid_out.tied[0][1]))
    return tuple(dist.get_process_group_ranks(strategy.mesh.group(name)))


def run_and_predict(rank: int, world_size: int, run: Run) -> tuple[Counted, Counted]:
    strategy, recorder = TitanStrategy(**run.degrees, **run.options), Recorder()
    trainer = build_trainer(
        world_size,
        strategy,
        max_steps=STEP + 2,
        gradient_clip_val=run.case.clip,
        callbacks=[LambdaCallback(on_train_start=recorder.next_step, on_train_batch_end=recorder.next_step)],
        **{"log_every_n_steps": 1 if run.is_logged else 50, **run.case.trainer},
    )
    module = Lit(run.case)
    with recorder:
        trainer.fit(module, DataLoader(Rows(run.case), batch_size=run.rows))
    mesh = strategy.mesh
    place = Place(*(mesh.rank(axis) for axis in ("pp", "fsdp", "tp")))  # type: ignore[arg-type]
    predicted = empty()
    for group, kinds in step_traffic(facts_of(run, strategy, module.model.config), place).items():
        for kind, volume in kinds.items():
            add(predicted, group_ranks(strategy, group, world_size), kind, *volume)
    return recorder.steps[STEP + 1], plain(predicted)


def case(**fields: Any) -> Case:
    # Enough rows for four steps of four rows on up to three data-parallel ranks.
    return Case(**{"dtype": torch.float32, "num_rows": 48, "clip": 0.5, "by_targets": True, **fields})


FAMILY = {"num_kv_heads": 2, "qkv_bias": True, "qk_norm": True}
NO_SWITCHES = {"sequence_parallel": False, "loss_parallel": False}


def pipe(schedule: str, microbatches: int = 4, **options: Any) -> dict[str, Any]:
    return {"pp_schedule": schedule, "pp_microbatches": microbatches, **options}


LAYOUTS: dict[str, Run] = {
    "dp_shard2": Run({"dp_shard": 2}, case=case()),
    "dp_shard2, plain": Run({"dp_shard": 2}, case=case(clip=None, by_targets=False)),
    "dp_shard2, kept gathered": Run({"dp_shard": 2}, {"reshard_after_forward": False}, case()),
    "dp_shard2, logged": Run({"dp_shard": 2}, case=case(), is_logged=True),
    "dp_shard3, padded": Run({"dp_shard": 3}, case=case(tied=True, model=FAMILY)),
    "dp_replicate2": Run({"dp_replicate": 2, "dp_shard": 1}, case=case()),
    "hsdp 2x2": Run({"dp_replicate": 2, "dp_shard": 2}, case=case()),
    "tp2": Run({"tp": 2}, case=case()),
    "tp2, family": Run({"tp": 2}, case=case(tied=True, model=FAMILY)),
    "tp2, no sequence parallel": Run({"tp": 2}, {"sequence_parallel": False}, case(model=FAMILY)),
    "tp2, no loss parallel": Run({"tp": 2}, {"loss_parallel": False}, case()),
    "tp2, neither": Run({"tp": 2}, NO_SWITCHES, case()),
    "dp_shard2 x tp2": Run({"dp_shard": 2, "tp": 2}, case=case(), is_logged=True),
    "dp_shard3 x tp2": Run({"dp_shard": 3, "tp": 2}, case=case(model=FAMILY)),
    "dp_shard2 x tp2, float64": Run(
        {"dp_shard": 2, "tp": 2}, case=case(dtype=torch.float64), sizes=ElementSizes(8, 8, 8, 8)
    ),
    "dp_shard2 x tp2, bf16-mixed": Run(
        {"dp_shard": 2, "tp": 2},
        case=case(trainer={"precision": "bf16-mixed"}),
        sizes=ElementSizes(activation=2, gathered=2, reduced=4, stored=4),
    ),
    "dp_shard2 x tp2, bf16-true": Run(
        {"dp_shard": 2, "tp": 2},
        case=case(trainer={"precision": "bf16-true"}),
        sizes=ElementSizes(activation=2, gathered=2, reduced=4, stored=2),
    ),
    "pp2, 1F1B": Run({"pp": 2}, pipe("1F1B"), case()),
    "pp2, Interleaved1F1B": Run({"pp": 2}, pipe("Interleaved1F1B"), case()),
    "pp2, ZBVZeroBubble, tied": Run({"pp": 2}, pipe("ZBVZeroBubble"), case(tied=True)),
    "pp2, uneven microbatches": Run({"pp": 2}, pipe("GPipe", 3), case()),
    "pp2 x tp2": Run({"pp": 2, "tp": 2}, pipe("Interleaved1F1B"), case(tied=True, model=FAMILY)),
    "pp2 x tp2, split backward": Run({"pp": 2, "tp": 2}, pipe("InterleavedZeroBubble"), case()),
    "pp2 x tp2, neither": Run({"pp": 2, "tp": 2}, pipe("1F1B", **NO_SWITCHES), case()),
    "pp2 x dp_shard2": Run({"pp": 2, "dp_shard": 2}, pipe("1F1B"), case(), is_logged=True),
    "pp2 x dp_shard2, tied": Run({"pp": 2, "dp_shard": 2}, pipe("Interleaved1F1B"), case(tied=True)),
    "pp3 x dp_shard2, tied": Run({"pp": 3, "dp_shard": 2}, pipe("1F1B"), case(tied=True)),
    "cp2": Run({"cp": 2}, case=case()),
    "cp3, padded": Run({"cp": 3}, case=case()),
    "cp2, ring": Run({"cp": 2}, {"cp_backend": "ring"}, case(model=FAMILY)),
    "cp2, ulysses": Run({"cp": 2}, {"cp_backend": "ulysses"}, case(model=FAMILY)),
    "cp2 x dp_shard2": Run({"dp_shard": 2, "cp": 2}, case=case(), is_logged=True),
    "cp2 x dp_shard2, ring, bf16-mixed": Run(
        {"dp_shard": 2, "cp": 2},
        {"cp_backend": "ring"},
        case(trainer={"precision": "bf16-mixed"}),
        ElementSizes(activation=2, gathered=2, reduced=4, stored=4),
    ),
    "cp2 x tp2": Run({"cp": 2, "tp": 2}, case=case(model=FAMILY)),
    "cp2 x tp2, neither": Run({"cp": 2, "tp": 2}, {"cp_backend": "ring", **NO_SWITCHES}, case()),
    "cp2 x pp2": Run({"pp": 2, "cp": 2}, pipe("Interleaved1F1B"), case()),
    "pp2 x dp_shard2 x cp2 x tp2": Run(
        {"pp": 2, "dp_shard": 2, "cp": 2, "tp": 2}, pipe("1F1B"), case(model=FAMILY)
    ),
}


def parameters(layouts: dict[str, Run]) -> list[Any]:
    return [
        pytest.param(run, id=name, marks=[pytest.mark.slow] if run.world_size > 8 else [])
        for name, run in layouts.items()
    ]


@pytest.mark.parametrize("run", parameters(LAYOUTS))
def test_a_step_communicates_as_predicted(run: Run) -> None:
    for counted, predicted in run_ranks(run_and_predict, run.world_size, run, init_process_group=False):
        assert counted
        assert predicted == counted


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8)])
def test_messages_of_a_whole_pipeline(schedule: str, pp: int, microbatches: int) -> None:
    table = build_table(schedule, pp, microbatches)
    config = TransformerConfig(33, 16, table.num_stages, 4, 24)
    facts = StepFacts(
        config, ParallelDims(pp=pp, dp_shard=1), microbatches, 10, table, (1,) * table.num_stages
    )
    stays = table.num_stages == 2 * pp and table.stage_to_rank[0] == table.stage_to_rank[-1]
    borders = table.num_stages - 1 - stays  # the turn of a V lies on one rank
    messages = 2 * microbatches * borders
    assert pipeline_messages(facts) == Volume(messages, messages * 10 * 16 * 4)


@pytest.mark.parametrize(
    ("dims", "layers"),
    [(ParallelDims(), ()), (ParallelDims(dp_shard=1, pp=2), ()), (ParallelDims(dp_shard=1, pp=2), (2, 1))],
)
def test_facts_that_do_not_fit_are_refused(dims: ParallelDims, layers: tuple[int, ...]) -> None:
    table = build_table("1F1B", 2, 4) if layers else None
    with pytest.raises(ConfigError):
        StepFacts(TransformerConfig(33, 16, 4, 4, 24), dims, 4, 16, table, layers)


def test_the_example_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "communication.md").read_text()
    code, printed = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL).groups()  # type: ignore[union-attr]
    exec(code, {})
    assert capsys.readouterr().out == printed
