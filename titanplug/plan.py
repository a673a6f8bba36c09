"""What to do with a model's modules: a plan as plain data, and how the plan of a module is found.

A :class:`ParallelPlan` names modules by patterns and says, for each of the techniques, what happens to
them. It starts nothing and imports no process group, so it can be printed, compared and tested alone.

Names are matched segment by segment with shell wildcards: ``layers.*.attention.wq`` matches
``layers.0.attention.wq`` but not ``layers.0.inner.attention.wq``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

from torch import nn

from titanplug.errors import ConfigError

# --------------------------------------------------------------------------------------
# Tensor-parallel styles, named as torch names them
# --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColwiseParallel:
    """A linear layer split by its output features; rank ``r`` computes the ``r``-th block of them.

    Args:
        input: ``"replicate"``: the input is whole on every rank and its gradient is summed over the
            axis, ``"sequence"``: it is a shard of the sequence and is gathered first, ``"prepared"``: a
            module around this one has :class:`PrepareModuleInput`, which does either for all its
            layers. None (default) means ``"prepared"`` inside such a module, else ``"replicate"``.
        output: ``"shard"`` keeps the block (heads, hidden features), ``"replicate"`` gathers it,
            ``"logits"`` keeps it sharded over the vocabulary where loss parallel is on (an ordinary
            ``cross_entropy`` works on it) and gathers it where it is off.
    """

    input: Literal["replicate", "sequence", "prepared"] | None = None
    output: Literal["shard", "replicate", "logits"] = "shard"


@dataclass(frozen=True)
class RowwiseParallel:
    """A linear layer split by its input features, or an embedding split by its vocabulary.

    The partial results are summed over the axis.

    Args:
        output: ``"sequence"``: each rank keeps its shard of the sequence of the sum (a reduce-scatter),
            ``"replicate"``: every rank keeps the whole sum (an all-reduce).
    """

    output: Literal["sequence", "replicate"] = "replicate"


@dataclass(frozen=True)
class SequenceParallel:
    """A module (a norm, a dropout) that works on its shard of the sequence; its weights are replicated.

    Dropouts in it draw other masks on each rank.

    Paper: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".
    """


@dataclass(frozen=True)
class ReplicateParallel:
    """A module computed alike on every rank of the axis.

    Args:
        partial_grad: True where each rank sees only a part of what the weights act on, as a norm over
            the head dimension whose heads are split; its gradients are then summed over the axis.
    """

    partial_grad: bool = False


@dataclass(frozen=True)
class PrepareModuleInput:
    """Gathers the sequence of one positional input on entry, once for all the layers inside.

    Args:
        index: which positional argument of ``forward``, counted from 0.
    """

    index: int = 0


Style: TypeAlias = (
    ColwiseParallel | RowwiseParallel | SequenceParallel | ReplicateParallel | PrepareModuleInput
)


# --------------------------------------------------------------------------------------
# The plan
# --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PipelineOrder:
    """The order in which a model's children run: ``first``, each of the repeated ``layers``, ``last``."""

    first: tuple[str, ...]
    layers: str
    last: tuple[str, ...]


@dataclass(frozen=True)
class ParallelPlan:
    """What each technique does with which modules.

    Args:
        tensor: tensor-parallel style by pattern of module names.
        fsdp_units: patterns of the modules that are gathered and freed as one unit. What no unit holds
            belongs to the root unit, which is always there.
        pipeline: the order of the children, for pipeline stages.
        sequence_dims: for context parallel, the sequence dim of each argument of the model's forward that has
            one, by ``name of model.name of argument``; None for one that has the sequence's length and is
            passed on whole.
        checkpoint_units: patterns of the modules whose activations can be recomputed.
        heads: ``(query heads, key-value heads)`` that tensor parallel must divide.
    """

    tensor: Mapping[str, Style] = field(default_factory=dict)
    fsdp_units: Sequence[str] = ()
    pipeline: PipelineOrder | None = None
    sequence_dims: Mapping[str, int | None] = field(default_factory=dict)
    checkpoint_units: Sequence[str] = ()
    heads: tuple[int, int] | None = None

    def prefixed(self, prefix: str) -> ParallelPlan:
        """The same plan for a module that is the child ``prefix`` of a larger one."""
        if not prefix:
            return self

        def under(name: str) -> str:
            return f"{prefix}.{name}"

        order = self.pipeline
        return replace(
            self,
            tensor={under(pattern): style for pattern, style in self.tensor.items()},
            fsdp_units=tuple(under(pattern) for pattern in self.fsdp_units),
            checkpoint_units=tuple(under(pattern) for pattern in self.checkpoint_units),
            sequence_dims={under(argument): dim for argument, dim in self.sequence_dims.items()},
            pipeline=order
            and PipelineOrder(
                tuple(map(under, order.first)), under(order.layers), tuple(map(under, order.last))
            ),
        )

    def merged(self, other: ParallelPlan) -> ParallelPlan:
        """Both plans as one, for a module that holds several models (a student and its teacher)."""
        heads = self.heads or other.heads
        if self.heads and other.heads:
            # What divides both numbers of heads divides their greatest common divisor.
            heads = (
                math.gcd(self.heads[0], other.heads[0]),
                math.gcd(self.heads[1], other.heads[1]),
            )
        return ParallelPlan(
            tensor={**self.tensor, **other.tensor},
            fsdp_units=(*self.fsdp_units, *other.fsdp_units),
            pipeline=self.pipeline or other.pipeline,
            sequence_dims={**self.sequence_dims, **other.sequence_dims},
            checkpoint_units=(*self.checkpoint_units, *other.checkpoint_units),
            heads=heads,
        )

    def __str__(self) -> str:
        lines = ["ParallelPlan"]
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Mapping) and value:
                lines += [f"  {item.name}:", *(f"    {key}: {val}" for key, val in value.items())]
            elif value:
                lines.append(f"  {item.name}: {value}")
        return "\n".join(lines)


def matches(pattern: str, name: str) -> bool:
    """Whether a dotted ``name`` matches a dotted ``pattern``, segment by segment."""
    wanted, given = pattern.split("."), name.split(".")
    return len(wanted) == len(given) and all(map(fnmatchcase, given, wanted))


def modules_matching(root: nn.Module, patterns: Sequence[str], what: str) -> dict[str, nn.Module]:
    """The modules under ``root`` that match any pattern, by name, in the order of ``named_modules``.

    Raises:
        ConfigError: a pattern matches no module.
    """
    names = dict(root.named_modules())
    problems, found = [], set()
    for pattern in patterns:
        hits = [name for name in names if matches(pattern, name)]
        if not hits:
            problems.append(
                f"{what}: the pattern {pattern!r} matches no module of {type(root).__name__}. Every "
                f"pattern must match at least one; its children are "
                f"{', '.join(name for name, _ in root.named_children()) or 'none'}. Correct the plan."
            )
        found.update(hits)
    if problems:
        raise ConfigError(problems)
    return {name: module for name, module in names.items() if name in found}


# --------------------------------------------------------------------------------------
# Resolution
# --------------------------------------------------------------------------------------

_EXAMPLE = """\
def configure_parallel_plan(self):
    return ParallelPlan(
        tensor={
            "model.embedding": RowwiseParallel(output="sequence"),
            "model.blocks.*.norm": SequenceParallel(),
            "model.blocks.*.attention": PrepareModuleInput(),
            "model.blocks.*.attention.query": ColwiseParallel(),
            "model.blocks.*.attention.out": RowwiseParallel(output="sequence"),
            "model.head": ColwiseParallel(input="sequence", output="logits"),
        },
        fsdp_units=["model.blocks.*"],
    )"""


def resolve_plan(
    module: nn.Module, given: ParallelPlan | None = None, *, needs_tensor: bool = False
) -> ParallelPlan:
    """The plan of ``module``: the first of

    1. ``given``, the strategy's ``plan`` argument,
    2. ``module.configure_parallel_plan()``,
    3. ``parallel_plan()`` of the models inside (outermost first; several are merged),
    4. where only the data axes are used, one FSDP unit for each repeated block.

    Names in the first two are relative to ``module``, in the third to the model that has the method.

    Raises:
        ConfigError: tensor parallel is asked for and no plan has tensor-parallel styles.
        TypeError: a hook returned something else than a plan.
    """
    plan = given or _plan_of_hook(module) or plan_of_models(module)
    if plan is None:
        plan = ParallelPlan(fsdp_units=repeated_blocks(module))
    if needs_tensor and not plan.tensor:
        raise ConfigError(
            f"tp > 1 needs a tensor-parallel plan, and none was found for {type(module).__name__}: "
            "`TitanStrategy(plan=...)` was not given, the LightningModule has no "
            "`configure_parallel_plan`, and no model in it has `parallel_plan` with `tensor` styles. "
            f"Use tp=1, or write for example\n\n{_EXAMPLE}"
        )
    return plan


def _plan_of_hook(module: nn.Module) -> ParallelPlan | None:
    hook = getattr(module, "configure_parallel_plan", None)
    return None if hook is None else _checked(hook(), f"{type(module).__name__}.configure_parallel_plan")


def plan_of_models(module: nn.Module) -> ParallelPlan | None:
    """The plans of the models inside ``module`` that have ``parallel_plan``, merged; None without any."""
    plan: ParallelPlan | None = None
    owners: list[str] = []
    for name, child in module.named_modules():
        hook = getattr(child, "parallel_plan", None)
        if not callable(hook) or any(name.startswith(f"{owner}.") for owner in owners):
            continue
        owners.append(name)
        own = _checked(hook(), f"{type(child).__name__}.parallel_plan").prefixed(name)
        plan = own if plan is None else plan.merged(own)
    return plan


def _checked(plan: Any, source: str) -> ParallelPlan:
    if not isinstance(plan, ParallelPlan):
        raise TypeError(
            f"`{source}()` returned {type(plan).__name__}; it must return a titanplug.ParallelPlan."
        )
    return plan


def repeated_blocks(module: nn.Module) -> list[str]:
    """Names of the blocks that a model repeats: children with parameters, of one class, two or more in
    one ``ModuleList``, ``ModuleDict`` or ``Sequential``. Blocks inside blocks are not listed apart.
    """
    found: list[str] = []
    for name, container in module.named_modules():
        if any(name == block or name.startswith(f"{block}.") for block in found):
            continue
        if not isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            continue
        blocks: dict[type, list[str]] = {}
        for key, child in container.named_children():
            if next(child.parameters(), None) is not None and len(list(child.children())) > 0:
                blocks.setdefault(type(child), []).append(f"{name}.{key}" if name else key)
        found += [block for same in blocks.values() if len(same) > 1 for block in same]
    return found
