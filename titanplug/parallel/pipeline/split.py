"""Which modules a pipeline stage has: automatic and given splits of a model's modules in their order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import nn

from titanplug.errors import ConfigError
from titanplug.plan import PipelineOrder, matches

_EXAMPLE = (
    'ParallelPlan(pipeline=PipelineOrder(first=("model.embedding",), layers="model.blocks", '
    'last=("model.norm", "model.head")))'
)


def ordered_modules(root: nn.Module, order: PipelineOrder | None) -> tuple[list[str], list[int]]:
    """Names of the modules that stages are made of, in the order in which they run.

    Args:
        root: what the names of ``order`` are relative to.
        order: from the plan.

    Returns:
        The names, and the positions of the repeated layers among them.

    Raises:
        ConfigError: there is no order, or it names modules that aren't there.
    """
    if order is None:
        raise ConfigError(
            f"pp > 1 needs the order in which the modules of {type(root).__name__} run, and its plan has "
            f"none. Add it to the plan, for example {_EXAMPLE}, or use pp=1."
        )
    modules = dict(root.named_modules())
    problems = [
        f"pipeline: {name!r} is no module of {type(root).__name__}. Its children are "
        f"{', '.join(key for key, _ in root.named_children()) or 'none'}. Correct the plan."
        for name in (*order.first, order.layers, *order.last)
        if name not in modules
    ]
    if problems:
        raise ConfigError(problems)
    layers = [f"{order.layers}.{key}" for key, _ in modules[order.layers].named_children()]
    if not layers:
        raise ConfigError(
            f"pipeline: {order.layers!r} holds no layers. `layers` names the ModuleList, ModuleDict or "
            "Sequential whose children run one after the other. Correct the plan."
        )
    start = len(order.first)
    return [*order.first, *layers, *order.last], list(range(start, start + len(layers)))


def split_by_cost(costs: Sequence[float], layers: Sequence[int], num_stages: int) -> list[range]:
    """Cut a row of modules into contiguous stages with the smallest largest cost, each with a layer.

    Of equally good cuts the one whose stages differ least.

    Args:
        costs: of each module.
        layers: positions of the repeated layers, which are contiguous.
        num_stages: number of stages.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    if len(layers) < num_stages:
        raise ConfigError(
            f"{len(layers)} layers for {num_stages} pipeline stages: each stage has at least one. Lower pp "
            "(or pp_chunks), or take a deeper model."
        )
    total = [0.0, *accumulate(costs)]
    start, end = layers[0], layers[-1] + 1

    # best[j]: (largest cost, sum of squares, cuts) of the stages so far, the last of them ending before j.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(num_stages):
        last = stage == num_stages - 1
        # Behind each cut there must be a layer for every later stage.
        cuts = [len(costs)] if last else range(start + stage + 1, end - (num_stages - stage - 1) + 1)
        found: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for cut in cuts:
            options = []
            for before, (largest, squares, taken) in best.items():
                if before >= cut:
                    continue
                cost = total[cut] - total[before]
                options.append((max(largest, cost), squares + cost * cost, (*taken, cut)))
            if options:
                found[cut] = min(options)
        best = found
    taken = best[len(costs)][2]
    return [range(a, b) for a, b in pairwise(taken)]


def split_as_given(names: Sequence[str], given: Sequence[Sequence[str]], num_stages: int) -> list[range]:
    """The stages that the user lists, checked.

    Args:
        names: the modules in the order in which they run.
        given: for each stage the names of its modules, or patterns; also without the name of the model in
            front.
        num_stages: number of stages.

    Raises:
        ConfigError: the number of stages is another, a name is unknown, a module is in no stage or in two,
            or the order is another. All at once.
    """
    problems: list[str] = []
    if len(given) != num_stages:
        problems.append(
            f"pp_split lists {len(given)} stages, and pp times the chunks of a rank is {num_stages}. List "
            f"{num_stages} stages."
        )
    stages_of: dict[str, list[int]] = {name: [] for name in names}
    for stage, patterns in enumerate(given):
        for pattern in patterns:
            hits = [name for name in names if matches(pattern, name)]
            hits = hits or [name for name in names if matches(pattern, name.partition(".")[2])]
            if not hits:
                problems.append(
                    f"pp_split: {pattern!r} of stage {stage} is none of the plan's modules, which are "
                    f"{', '.join(names)}. Correct it."
                )
            for name in hits:
                stages_of[name].append(stage)
    for name, stages in stages_of.items():
        if not stages:
            problems.append(f"pp_split: {name} is in no stage; every module belongs to exactly one. Add it.")
        elif len(set(stages)) > 1:
            problems.append(
                f"pp_split: {name} is in the stages {', '.join(map(str, stages))}; every module belongs to "
                "exactly one. Keep one of them."
            )
    if problems:
        raise ConfigError(problems)
    order = [stages_of[name][0] for name in names]
    if order != sorted(order) or len(set(order)) != num_stages:
        shown = ", ".join(f"{name} ({stage})" for name, stage in zip(names, order, strict=True))
        raise ConfigError(
            f"pp_split puts the modules into the stages {shown}. Stages follow the order in which modules "
            "run, and none is empty. Move the modules."
        )
    bounds = [order.index(stage) for stage in range(num_stages)]
    return [range(a, b) for a, b in pairwise([*bounds, len(names)])]


def module_costs(
    root: nn.Module,
    names: Sequence[str],
    layers: Sequence[int],
    first_weight: float | None = None,
    last_weight: float | None = None,
) -> list[float]:
    """Cost of each module, in units of a mean layer: what it computes goes with its parameters.

    Args:
        root: holds the modules.
        names: of the modules in their order.
        layers: positions of the repeated layers.
        first_weight: cost of all modules before the layers together; None: by their parameters, at most
            one layer (an embedding only looks up).
        last_weight: cost of all modules after the layers; None: by their parameters.
    """
    sizes = [sum(p.numel() for p in root.get_submodule(name).parameters()) for name in names]
    mean = max(sum(sizes[i] for i in layers) / len(layers), 1.0)
    costs = [size / mean for size in sizes]
    before, after = range(layers[0]), range(layers[-1] + 1, len(names))
    own = sum(costs[i] for i in before)
    _share_out(costs, before, min(own, 1.0) if first_weight is None else first_weight)
    if last_weight is not None:
        _share_out(costs, after, last_weight)
    return costs


def _share_out(costs: list[float], positions: range, total: float) -> None:
    own = sum(costs[i] for i in positions)
    for i in positions:
        costs[i] = total * (costs[i] / own if own else 1 / len(positions))
