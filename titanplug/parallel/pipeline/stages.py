"""A model as the stages of a pipeline: each rank keeps its modules, and a step runs up to a stage's border.

Nothing is traced and no ``forward`` is rewritten. On every rank the whole step of the user runs, with the
real batch, as it is written; only these things differ:

- Modules of other stages are replaced by stand-ins, under the same names, so that names of parameters stay.
- The first module of a stage gets the hidden states that the stage before sent, in place of its first
  argument. Until then stand-ins return placeholders of that shape, whose values (NaN) nothing may use.
- Where the step calls the first module of the next stage, its first argument is what is sent there, and the
  step ends, by an exception that passes through the user's code.

So masks, positions and whatever else a model computes from its arguments are computed on each stage, for
each microbatch, and only hidden states travel. The last stage runs the step to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from titanplug.errors import ConfigError, TitanplugError
from titanplug.parallel.pipeline.split import module_costs, ordered_modules, split_as_given, split_by_cost
from titanplug.plan import PipelineOrder
from titanplug.schedules.actions import stages_of
from titanplug.schedules.catalogue import chunks_per_rank, stage_to_rank


@dataclass(frozen=True)
class PipelineOptions:
    """How a model is cut into stages and in which order they run.

    Args:
        schedule: name of the schedule, as :func:`titanplug.schedules.catalogue.resolve_schedule`
            has it.
        chunks: stages of a rank; None: as the schedule has it.
        split: for each stage the names of its modules; None: by cost.
        first_weight: cost of the modules before the layers, in layers; None: by their parameters.
        last_weight: cost of the modules after the layers, in layers; None: by their parameters.
    """

    schedule: str = "Interleaved1F1B"
    chunks: int | None = None
    split: tuple[tuple[str, ...], ...] | None = None
    first_weight: float | None = None
    last_weight: float | None = None


class StageBorder(BaseException):
    """Ends a step at the border of its stage; no error, so ``except Exception`` lets it pass."""


@dataclass
class TiedParameter:
    """A parameter that modules of two stages share.

    Args:
        name: its name in the one-process model.
        alias: its name on this rank; empty where the rank doesn't hold it.
        ranks: ranks of the ``pp`` axis that hold it.
        source: the one of them whose module has ``name``, and decides on the initial values.
    """

    name: str
    alias: str
    ranks: tuple[int, ...]
    source: int


@dataclass
class PipelineStages:
    """The stages of a model and what of it this rank holds.

    Args:
        names: modules that stages are made of, in the order in which they run.
        bounds: for each stage the positions of its modules.
        stage_to_rank: rank of the ``pp`` axis by stage.
        rank: this rank's.
        parameter_order: names of all parameters of the one-process model, in its order.
        state_names: names of the entries of the one-process model's ``state_dict``.
        tied: parameters that stages on several ranks share.
        options: how the model was cut.
    """

    names: list[str]
    bounds: list[range]
    stage_to_rank: tuple[int, ...]
    rank: int
    parameter_order: list[str]
    state_names: list[str]
    tied: list[TiedParameter]
    options: PipelineOptions
    on_enter: Callable[[int], None] | None = None
    """Called when a later stage's own part of a step begins."""
    on_output: Callable[[Any], None] | None = None
    """Called with what the model's last module returns."""
    _places: list[tuple[nn.Module, str]] = field(default_factory=list, repr=False)
    _own: dict[int, nn.Module] = field(default_factory=dict, repr=False)
    _stand_ins: list[nn.Module] = field(default_factory=list, repr=False)
    _stage: int | None = None
    _received: Tensor | None = None
    _used: int = 0
    _sent: Tensor | None = None
    _placeholders: dict[Any, Tensor] = field(default_factory=dict, repr=False)

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.bounds)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the ``pp`` axis."""
        return max(self.stage_to_rank) + 1

    @property
    def last_rank(self) -> int:
        """The rank that has the last stage."""
        return self.stage_to_rank[-1]

    @property
    def holds_last(self) -> bool:
        """Whether this rank has the last stage, which sees the model's output."""
        return self.rank == self.last_rank

    def modules_of(self, stage: int) -> list[nn.Module]:
        """This rank's modules of one of its stages."""
        return [self._own[position] for position in self.bounds[stage]]

    def parameters_of(self, stage: int) -> list[nn.Parameter]:
        """Parameters of one of this rank's stages, as they are registered now."""
        found: dict[nn.Parameter, None] = {}
        for module in self.modules_of(stage):
            found.update(dict.fromkeys(module.parameters()))
        return list(found)

    def run(self, stage: int, received: Tensor | None, step: Callable[[], Any]) -> Any:
        """Run a step on one stage.

        Args:
            stage: one of this rank's.
            received: the first argument of the stage's first module; None on the first stage.
            step: runs the user's step.

        Returns:
            What the step returned on the last stage; elsewhere the first argument of the next stage's first
            module.

        Raises:
            ConfigError: the step did not call the model, or called it twice, or called its modules in
                another order than the plan's.
        """
        last = stage == self.num_stages - 1
        several = len(self._stages_here) > 1
        if several:
            self._show(stage)
        self._stage, self._received, self._used, self._sent = stage, received, 0, None
        try:
            output = step()
        except StageBorder:
            return self._sent
        finally:
            self._stage = self._received = self._sent = None
            if several:
                self._show_own()
        if not last or not self._used:
            raise ConfigError(
                "the step returned without a call of the model's modules "
                f"{self.names[self.bounds[stage].start]} and following. Under pp every step calls the model "
                "exactly once, on all ranks alike. Remove the condition around the call, or use pp=1."
            )
        return output

    # ---------------------------------------------------------------- while a step runs

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the first module of a stage runs: put in what was received."""
        if self._stage is None:
            return None
        self._used += 1
        if self._used > 1:
            raise ConfigError(
                f"the model is called twice in one step ({self.names[self.bounds[self._stage].start]} ran "
                "before). Under pp a step calls it once: put both inputs into one batch and split the "
                "output, or use pp=1."
            )
        if self._received is None:
            return None
        if self.on_enter is not None:
            self.on_enter(self._stage)
        return _with_first(args, kwargs, self._received)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the model's last module ran."""
        if self._stage is not None and self.on_output is not None:
            self.on_output(output)

    def _stand_in(self, position: int, args: Any, kwargs: Any) -> Tensor:
        """A module that isn't part of the running stage is called."""
        if self._stage is None:
            raise TitanplugError(
                f"{self.names[position]} is on another rank of the pp axis and was called outside of a step. "
                "Use the model in training_step, validation_step, test_step or predict_step only."
            )
        bounds = self.bounds[self._stage]
        if position < bounds.start:
            assert self._received is not None
            return self._placeholder(self._received)
        if position == bounds.stop and self._used:
            hidden = _first_of(args, kwargs)
            if not isinstance(hidden, Tensor):
                raise ConfigError(
                    f"{self.names[position]} got a {type(hidden).__name__} as its first argument. Between "
                    "stages one tensor travels, the first argument of a stage's first module. Let the layers "
                    "take and return hidden states first, or cut elsewhere (pp_split)."
                )
            self._sent = hidden
            raise StageBorder
        ran = self.names[bounds.start] if not self._used else self.names[bounds.stop]
        raise ConfigError(
            f"{self.names[position]} was called before {ran}, which is earlier in the plan's pipeline order. "
            "Correct the order in the plan (first, layers, last) to that of the model's forward."
        )

    def _placeholder(self, like: Tensor) -> Tensor:
        """A tensor of NaN that takes no memory."""
        key = like.shape, like.dtype, like.device
        found = self._placeholders.get(key)
        if found is None:
            if len(self._placeholders) > 64:  # lengths that never come again
                self._placeholders.clear()
            nan = like.detach().new_full((), float("nan"))
            found = self._placeholders[key] = nan.expand(like.shape)
        return found

    @cached_property
    def _stages_here(self) -> list[int]:
        return stages_of(self.stage_to_rank, self.rank)

    def _show(self, stage: int) -> None:
        """Leave only the modules of one stage in their places."""
        for position, module in self._own.items():
            parent, key = self._places[position]
            shown = module if position in self.bounds[stage] else self._stand_ins[position]
            parent._modules[key] = shown

    def _show_own(self) -> None:
        for position, module in self._own.items():
            parent, key = self._places[position]
            parent._modules[key] = module


class StandIn(nn.Module):
    """Takes the place of a module of another stage; its plain attributes can still be read."""

    def __init__(self, stages: PipelineStages, position: int, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["_titanplug_stages"] = (stages, position)
        own = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        own = {key: value for key, value in own.items() if key not in ("forward", "training")}
        of_class = {
            key: value
            for cls in reversed(type(module).__mro__)
            if not cls.__module__.startswith("torch.nn.modules.module")
            for key, value in vars(cls).items()
            if not key.startswith("_") and not callable(value) and not hasattr(value, "__get__")
        }
        self.__dict__["_titanplug_attributes"] = {**of_class, **own}

    def __getattr__(self, name: str) -> Any:
        attributes = self.__dict__.get("_titanplug_attributes", {})
        if name in attributes:
            return attributes[name]
        stages, position = self.__dict__["_titanplug_stages"]
        raise AttributeError(
            f"{stages.names[position]} is on another rank of the pp axis: its {name!r} isn't here. Leave out "
            "what isn't there (hasattr), or take parameters from `self.named_parameters()`."
        )

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Stands for the module's own."""
        stages, position = self.__dict__["_titanplug_stages"]
        result: Tensor = stages._stand_in(position, args, kwargs)
        return result


def apply_pipeline_split(
    root: nn.Module, order: PipelineOrder | None, num_ranks: int, rank: int, options: PipelineOptions
) -> PipelineStages:
    """Cut ``root`` into stages and keep this rank's modules, in place.

    Args:
        root: the whole module.
        order: from the plan, names relative to ``root``.
        num_ranks: ranks of the ``pp`` axis.
        rank: this rank's position on it.
        options: how to cut.

    Raises:
        ConfigError: the order or the split doesn't fit, or a parameter that trains is in no stage.
    """
    names, layers = ordered_modules(root, order)
    require_covered(root, names)
    chunks = chunks_per_rank(options.schedule, options.chunks)
    ranks = stage_to_rank(options.schedule, num_ranks, chunks)
    if options.split is None:
        costs = module_costs(root, names, layers, options.first_weight, options.last_weight)
        bounds = split_by_cost(costs, layers, len(ranks))
    else:
        bounds = split_as_given(names, options.split, len(ranks))
    parameters = [name for name, _ in root.named_parameters()]
    stages = PipelineStages(
        names,
        bounds,
        ranks,
        rank,
        parameters,
        list(root.state_dict(keep_vars=True)),
        _find_tied(root, names, bounds, ranks, rank, parameters),
        options,
    )
    _prune(root, stages)
    return stages


def _prune(root: nn.Module, stages: PipelineStages) -> None:
    own = {p for stage in stages._stages_here for p in stages.bounds[stage]}
    for position, name in enumerate(stages.names):
        parent_name, _, key = name.rpartition(".")
        parent = root.get_submodule(parent_name)
        module = root.get_submodule(name)
        stages._places.append((parent, key))
        stand_in = StandIn(stages, position, module)
        stages._stand_ins.append(stand_in)
        if position in own:
            stages._own[position] = module
        else:
            parent._modules[key] = stand_in
    for stage in stages._stages_here:
        first = stages._own[stages.bounds[stage].start]
        first.register_forward_pre_hook(stages._enter, with_kwargs=True)
    if stages.holds_last:
        stages._own[len(stages.names) - 1].register_forward_hook(stages._leave)


def enter_stages_first(stages: PipelineStages) -> None:
    """Let what a stage receives be put in before any other hook of its first module sees its input.

    Called when all other hooks (of FSDP, of tensor parallel) are there.
    """
    for stage in stages._stages_here:
        hooks = stages._own[stages.bounds[stage].start]._forward_pre_hooks
        for key, hook in list(hooks.items()):
            if getattr(hook, "__self__", None) is stages:
                hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]


def require_covered(root: nn.Module, names: Sequence[str]) -> None:
    """Check that every parameter that trains is in a module of the pipeline.

    Raises:
        ConfigError: some aren't; all of them are named.
    """
    named = list(root.named_parameters(remove_duplicate=False))
    # A shared parameter is covered where one of its names is.
    covered = {id(p) for name, p in named if any(name.startswith(f"{module}.") for module in names)}
    problems = [
        f"{name}: this parameter trains and belongs to no module of the plan's pipeline order "
        f"({names[0]} to {names[-1]}), so no pipeline stage would hold it. Under pp all trained parameters "
        "are in the model. Add its module to the order (first, layers or last), freeze it, or use pp=1."
        for name, parameter in named
        if parameter.requires_grad and id(parameter) not in covered
    ]
    if problems:
        raise ConfigError(problems)


def _find_tied(
    root: nn.Module,
    names: list[str],
    bounds: list[range],
    ranks: tuple[int, ...],
    rank: int,
    parameters: list[str],
) -> list[TiedParameter]:
    places: dict[int, list[tuple[int, str]]] = {}
    for stage, positions in enumerate(bounds):
        for position in positions:
            module = root.get_submodule(names[position])
            for key, parameter in module.named_parameters(remove_duplicate=False):
                places.setdefault(id(parameter), []).append((ranks[stage], f"{names[position]}.{key}"))
    tied = []
    for found in places.values():
        holders = sorted({holder for holder, _ in found})
        if len(holders) > 1:
            here = [name for holder, name in found if holder == rank]
            # The first in the order of the module, which needn't be the first that runs.
            source, name = next(place for place in found if place[1] in parameters)
            tied.append(TiedParameter(name, here[0] if here else "", tuple(holders), source))
    return tied


def _first_of(args: Any, kwargs: Any) -> Any:
    if args:
        return args[0]
    return next(iter(kwargs.values()), None)


def _with_first(args: Any, kwargs: Any, value: Tensor) -> tuple[Any, Any]:
    if args:
        return (value, *args[1:]), kwargs
    key = next(iter(kwargs))
    return args, {**kwargs, key: value}
