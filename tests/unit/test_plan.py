"""Plans are data: found, prefixed, merged, printed and matched without any process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titanplug import (
    ColwiseParallel,
    ParallelPlan,
    PipelineOrder,
    PrepareModuleInput,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
)
from titanplug.errors import ConfigError
from titanplug.parallel.tensor import resolve_styles, validate_styles
from titanplug.plan import matches, modules_matching, repeated_blocks, resolve_plan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)


class Model(nn.Module):
    """Brings no plan."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 5)


PLAN = ParallelPlan(
    tensor={"blocks.*.up": ColwiseParallel(), "head": ColwiseParallel(output="logits")},
    fsdp_units=["blocks.*"],
    pipeline=PipelineOrder(("embedding",), "blocks", ("head",)),
    sequence_dims={"input_ids": 1},
    checkpoint_units=["blocks.*"],
    heads=(4, 2),
)


class PlannedModel(Model):
    def parallel_plan(self) -> ParallelPlan:
        return PLAN


class Holder(nn.Module):
    """Stands for a LightningModule around one model or several."""

    def __init__(self, **models: nn.Module) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(name, model)


# ---------------------------------------------------------------- matching


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("blocks.*.up", "blocks.0.up", True),
        ("blocks.*.up", "blocks.0.inner.up", False),  # "*" is one segment
        ("blocks.*", "blocks.0", True),
        ("blocks.*", "blocks", False),
        ("blocks.[01].up", "blocks.1.up", True),
        ("blocks.[01].up", "blocks.2.up", False),
        ("*.w?", "attention.wq", True),
        ("up", "UP", False),
    ],
)
def test_patterns_match_segment_by_segment(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


def test_matching_modules_come_in_the_order_of_the_model() -> None:
    found = modules_matching(Model(), ["head", "blocks.*.up"], "fsdp_units")
    assert list(found) == ["blocks.0.up", "blocks.1.up", "head"]


def test_patterns_that_match_nothing_are_all_named() -> None:
    with pytest.raises(ConfigError) as error:
        modules_matching(Model(), ["blocks.*", "layers.*", "haed"], "fsdp_units")
    assert len(error.value.problems) == 2
    for problem, pattern in zip(error.value.problems, ["layers.*", "haed"], strict=True):
        assert problem.startswith(f"fsdp_units: the pattern '{pattern}' matches no module of Model")
        assert "embedding, blocks, head" in problem


# ---------------------------------------------------------------- prefix, merge, print


def test_prefix_reaches_every_name() -> None:
    plan = PLAN.prefixed("model")
    assert list(plan.tensor) == ["model.blocks.*.up", "model.head"]
    assert plan.fsdp_units == plan.checkpoint_units == ("model.blocks.*",)
    assert plan.pipeline == PipelineOrder(("model.embedding",), "model.blocks", ("model.head",))
    assert plan.sequence_dims == {"model.input_ids": 1}
    assert plan.heads == (4, 2)
    assert PLAN.prefixed("") is PLAN


def test_prefix_leaves_out_a_missing_pipeline() -> None:
    assert ParallelPlan().prefixed("model").pipeline is None


def test_merged_plans_keep_both() -> None:
    other = ParallelPlan(tensor={"teacher": ReplicateParallel()}, fsdp_units=["teacher"])
    merged = PLAN.merged(other)
    assert merged.tensor == {**PLAN.tensor, "teacher": ReplicateParallel()}
    assert merged.fsdp_units == ("blocks.*", "teacher")
    assert (merged.pipeline, merged.heads) == (PLAN.pipeline, PLAN.heads)
    assert other.merged(PLAN).heads == (4, 2)


def test_tensor_parallel_must_divide_the_heads_of_both_merged_models() -> None:
    merged = PLAN.merged(ParallelPlan(heads=(6, 3)))
    assert merged.heads == (2, 1)


def test_prints_what_it_holds() -> None:
    text = str(PLAN)
    assert "blocks.*.up: ColwiseParallel(" in text
    assert "fsdp_units: ['blocks.*']" in text
    assert "heads: (4, 2)" in text
    assert str(ParallelPlan(fsdp_units=["a"])) == "ParallelPlan\n  fsdp_units: ['a']"


def test_plans_are_compared_by_value() -> None:
    assert PLAN.prefixed("m") == PLAN.prefixed("m")
    assert ParallelPlan(fsdp_units=["a"]) != ParallelPlan(fsdp_units=["b"])


# ---------------------------------------------------------------- resolution


def test_the_given_plan_comes_first_then_the_hook_then_the_model() -> None:
    class WithHook(Holder):
        def configure_parallel_plan(self) -> ParallelPlan:
            return ParallelPlan(fsdp_units=["model.head"])

    given = ParallelPlan(fsdp_units=["model.embedding"])
    module = WithHook(model=PlannedModel())
    assert resolve_plan(module, given) is given
    assert resolve_plan(module).fsdp_units == ["model.head"]
    assert resolve_plan(Holder(model=PlannedModel())) == PLAN.prefixed("model")


def test_a_given_plan_that_is_empty_is_still_the_given_one() -> None:
    given = ParallelPlan()
    assert resolve_plan(Holder(model=PlannedModel()), given) is given


def test_plans_of_several_models_are_merged() -> None:
    plan = resolve_plan(Holder(student=PlannedModel(), teacher=PlannedModel()))
    assert plan.fsdp_units == ("student.blocks.*", "teacher.blocks.*")


def test_a_model_inside_a_model_with_a_plan_is_part_of_that_plan() -> None:
    class Outer(Holder):
        def parallel_plan(self) -> ParallelPlan:
            return ParallelPlan(fsdp_units=["inner"])

    plan = resolve_plan(Holder(model=Outer(inner=PlannedModel())))
    assert plan.fsdp_units == ("model.inner",)


def test_a_module_that_is_the_model_itself() -> None:
    assert resolve_plan(PlannedModel()) == PLAN


def test_repeated_blocks_are_the_default_on_the_data_axes() -> None:
    assert resolve_plan(Holder(model=Model())) == ParallelPlan(
        fsdp_units=["model.blocks.0", "model.blocks.1"]
    )


def test_a_hook_that_returns_none_or_something_else_is_an_error() -> None:
    class Forgot(Holder):
        def configure_parallel_plan(self) -> Any:
            return None

    with pytest.raises(TypeError, match=r"Forgot.configure_parallel_plan\(\)` returned NoneType"):
        resolve_plan(Forgot(model=Model()))


@pytest.mark.parametrize("module", [Holder(model=Model()), Holder(model=Model(), other=nn.Linear(2, 2))])
def test_a_missing_plan_shows_how_to_write_one(module: nn.Module) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_plan(module, needs_tensor=True)
    message = str(error.value)
    for part in ("TitanStrategy(plan=...)", "def configure_parallel_plan(self)", "Use tp=1", "Holder"):
        assert part in message


def test_the_example_in_the_error_is_valid_code() -> None:
    with pytest.raises(ConfigError) as error:
        resolve_plan(Holder(model=Model()), needs_tensor=True)
    code = str(error.value).partition("for example\n\n")[2]
    names: dict[str, Any] = {
        "ParallelPlan": ParallelPlan,
        "ColwiseParallel": ColwiseParallel,
        "RowwiseParallel": RowwiseParallel,
        "SequenceParallel": SequenceParallel,
        "PrepareModuleInput": PrepareModuleInput,
    }
    exec(code, names)
    plan = names["configure_parallel_plan"](None)
    assert isinstance(plan, ParallelPlan) and len(plan.tensor) == 6


def test_a_given_plan_without_styles_is_not_enough_for_tensor_parallel() -> None:
    with pytest.raises(ConfigError, match="tensor"):
        resolve_plan(Holder(model=Model()), ParallelPlan(fsdp_units=["model"]), needs_tensor=True)


# ---------------------------------------------------------------- repeated blocks


def test_repeated_blocks() -> None:
    assert repeated_blocks(Model()) == ["blocks.0", "blocks.1"]
    named = Holder(layers=nn.ModuleDict({"a": Block(), "b": Block()}))
    assert repeated_blocks(named) == ["layers.a", "layers.b"]


def test_a_layer_alone_or_without_children_is_no_block() -> None:
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []
    assert repeated_blocks(Holder(blocks=nn.ModuleList([Block()]))) == []
    assert repeated_blocks(Holder(blocks=nn.ModuleList([nn.Sequential(nn.ReLU())] * 3))) == []


def test_blocks_inside_blocks_are_not_listed_apart() -> None:
    stages = nn.ModuleList([nn.Sequential(Block(), Block()) for _ in range(2)])
    assert repeated_blocks(Holder(stages=stages)) == ["stages.0", "stages.1"]


# ---------------------------------------------------------------- styles against modules


def problems_of(model: nn.Module, tensor: dict[str, Any], tp: int = 2) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        validate_styles(model, resolve_styles(model, ParallelPlan(tensor=tensor)), tp)
    return error.value.problems


COVERED: dict[str, Any] = {
    "embedding": ReplicateParallel(),
    "blocks.*": ReplicateParallel(),
    "head": ColwiseParallel(output="logits"),
}


def test_a_complete_plan_passes() -> None:
    model = Model()
    validate_styles(model, resolve_styles(model, ParallelPlan(tensor=COVERED)), 2)


def test_a_parameter_under_no_style_is_named() -> None:
    problems = problems_of(Model(), {"embedding": RowwiseParallel(), "blocks.*": ReplicateParallel()})
    assert [problem.split(":")[0] for problem in problems] == ["head.weight", "head.bias"]


def test_a_tied_parameter_is_covered_by_one_style() -> None:
    model = Model()
    head = nn.Linear(4, 5, bias=False)
    head.weight = model.embedding.weight
    model.head = head
    validate_styles(model, resolve_styles(model, ParallelPlan(tensor=COVERED)), 2)


def test_styles_that_do_not_fit_their_modules() -> None:
    plan = {**COVERED, "embedding": ColwiseParallel(), "blocks.0.norm": RowwiseParallel()}
    problems = problems_of(Model(), plan)
    assert "embedding: ColwiseParallel is for nn.Linear, and this is Embedding" in problems[0]
    assert "blocks.0.norm: RowwiseParallel is for nn.Linear and nn.Embedding" in problems[1]


def test_features_that_tp_does_not_divide() -> None:
    plan = {**COVERED, "blocks.0.up": ColwiseParallel(), "blocks.0.down": RowwiseParallel()}
    problems = problems_of(Model(), plan, tp=3)
    assert problems[0].startswith("blocks.0.up: out_features=8 with tp=3")
    assert problems[1].startswith("blocks.0.down: in_features=8 with tp=3")
    assert problems[0].endswith("Allowed values of tp: 1, 2, 4, 8.")
    # Logits may have any number of columns: 5 on 3 ranks passed above.
    assert len(problems) == 2


def test_the_last_matching_pattern_holds() -> None:
    plan = ParallelPlan(tensor={"blocks.*.up": ColwiseParallel(), "blocks.1.up": ReplicateParallel()})
    styles = resolve_styles(Model(), plan)
    assert styles["blocks.0.up"] == ColwiseParallel()
    assert styles["blocks.1.up"] == ReplicateParallel()


def test_embeddings_with_special_gradients_are_refused() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, 4, max_norm=1.0)

        def forward(self, ids: Tensor) -> Tensor:
            return torch.as_tensor(self.embedding(ids))

    (problem,) = problems_of(Normed(), {"embedding": RowwiseParallel()})
    assert "max_norm" in problem
