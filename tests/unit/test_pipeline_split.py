"""Which modules a stage gets, and what of a model can't be cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titanplug.errors import ConfigError, TitanplugError
from titanplug.models import Transformer, TransformerConfig
from titanplug.parallel.pipeline.split import module_costs, ordered_modules, split_as_given, split_by_cost
from titanplug.parallel.pipeline.stages import PipelineOptions, apply_pipeline_split, require_covered
from titanplug.plan import PipelineOrder

ORDER = PipelineOrder(("tok_embeddings",), "layers", ("norm", "output"))


def transformer(num_layers: int = 4, **options: Any) -> Transformer:
    config = {"vocab_size": 33, "dim": 8, "num_layers": num_layers, "num_heads": 2, "hidden_dim": 16}
    return Transformer(TransformerConfig(**{**config, **options}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("costs", "num_stages", "expected"),
    [
        ([1, 1, 1, 1, 1, 1], 2, [3, 3]),
        ([1, 1, 1, 1, 1, 1], 4, [2, 1, 1, 2]),  # the ends also hold what isn't a layer
        ([3, 1, 1, 1, 1, 0], 2, [2, 4]),
        ([0, 1, 1, 1, 1, 3], 2, [4, 2]),
        ([9, 1, 1, 1, 1, 9], 2, [3, 3]),
        ([0, 5, 1, 1, 1, 0], 2, [2, 4]),
    ],
)
def test_stages_cost_alike(costs: list[float], num_stages: int, expected: list[int]) -> None:
    stages = split_by_cost(costs, range(1, 5), num_stages)
    assert [len(stage) for stage in stages] == expected
    assert [position for stage in stages for position in stage] == list(range(6))


def test_each_stage_has_a_layer() -> None:
    for num_stages in range(1, 6):
        for heavy in range(7):
            costs = [1.0] * 7
            costs[heavy] = 50.0
            for stage in split_by_cost(costs, range(1, 6), num_stages):
                assert any(1 <= position < 6 for position in stage)
    with pytest.raises(ConfigError, match="5 layers for 6 pipeline stages"):
        split_by_cost([1.0] * 7, range(1, 6), 6)


def test_costs_go_with_parameters() -> None:
    model = transformer()
    names, layers = ordered_modules(model, ORDER)
    assert names == ["tok_embeddings", *(f"layers.{i}" for i in range(4)), "norm", "output"]
    costs = module_costs(model, names, layers)
    layer = sum(p.numel() for p in model.layers["0"].parameters())
    assert costs[1] == 1 and costs[0] == min(1.0, 33 * 8 / layer)
    assert costs[-1] == pytest.approx(33 * 8 / layer)
    weighed = module_costs(model, names, layers, first_weight=2.0, last_weight=3.0)
    assert weighed[0] == 2 and sum(weighed[-2:]) == pytest.approx(3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([["a", "b"]], "lists 1 stages"),
        ([["a", "x"], ["b", "c"]], "'x' of stage 0 is none of"),
        ([["a"], ["c"]], "b is in no stage"),
        ([["a", "b"], ["b", "c"]], "b is in the stages 0, 1"),
        ([["b"], ["a", "c"]], "follow the order"),
        ([["a", "b", "c"], []], "none is empty"),
    ],
)
def test_wrong_splits(given: list[list[str]], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_as_given(["a", "b", "c"], given, 2)
    assert message in str(caught.value)


def test_patterns_with_and_without_the_models_name() -> None:
    names = ["model.in", "model.layers.0", "model.layers.1", "model.out"]
    for first in (["in", "layers.0"], ["model.in", "model.layers.0"], ["*n", "layers.[0]"]):
        assert split_as_given(names, [first, ["layers.1", "out"]], 2) == [range(2), range(2, 4)]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (None, "its plan has none"),
        (PipelineOrder(("embed",), "layers", ("norm",)), "'embed' is no module of Transformer"),
        (PipelineOrder((), "norm", ("output",)), "'norm' holds no layers"),
    ],
)
def test_wrong_orders(order: PipelineOrder | None, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ordered_modules(transformer(), order)
    assert message in str(caught.value)


def test_every_trained_parameter_is_in_a_stage() -> None:
    model = transformer()
    with pytest.raises(ConfigError, match=r"output\.weight: this parameter trains"):
        require_covered(model, ["tok_embeddings", "layers", "norm"])
    model.output.weight.requires_grad_(False)
    require_covered(model, ["tok_embeddings", "layers", "norm"])
    tied = transformer(tie_embeddings=True)  # covered by its other name
    require_covered(tied, ["tok_embeddings", "layers", "norm"])


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_stages_one_after_the_other_are_the_model(schedule: str) -> None:
    """Each rank's model in turn, what travels handed on by hand."""
    torch.manual_seed(0)
    whole = transformer(8).double()
    tokens = torch.randint(0, 33, (3, 5))
    held: list[str] = []
    parts = []
    for rank in range(2):
        model = transformer(8).double()
        model.load_state_dict(whole.state_dict())
        parts.append((model, apply_pipeline_split(model, ORDER, 2, rank, PipelineOptions(schedule))))
        held += [name for name, _ in model.named_parameters()]
    assert sorted(held) == sorted(name for name, _ in whole.named_parameters())
    hidden: Tensor | None = None
    stages = parts[0][1]
    for stage, rank in enumerate(stages.stage_to_rank):
        model, own = parts[rank]
        hidden = own.run(stage, hidden, lambda model=model: model(tokens))
    assert hidden is not None
    torch.testing.assert_close(hidden, whole(tokens), rtol=0, atol=0)


def test_what_is_elsewhere_says_so() -> None:
    model = transformer()
    apply_pipeline_split(model, ORDER, 2, 0, PipelineOptions("1F1B"))
    with pytest.raises(
        TitanplugError, match="on another rank of the pp axis and was called outside of a step"
    ):
        model(torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(AttributeError, match="output is on another rank of the pp axis"):
        _ = model.output.weight
    assert not hasattr(model.norm, "weight")


def test_a_covered_name_is_enough_for_a_shared_parameter() -> None:
    model = transformer(tie_embeddings=True)
    model.extra = nn.Linear(2, 2)  # type: ignore[assignment]
    with pytest.raises(ConfigError) as caught:
        require_covered(model, ["tok_embeddings", "layers", "norm"])
    assert "output.weight" not in str(caught.value) and "extra.weight" in str(caught.value)


class Shuffled(nn.Module):
    """Runs its layers in another order than the plan says."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])
        self.last = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.layers[1](self.last(self.first(x))))


def test_another_order_than_the_plans() -> None:
    model = Shuffled()
    stages = apply_pipeline_split(
        model, PipelineOrder(("first",), "layers", ("last",)), 2, 0, PipelineOptions("1F1B")
    )
    with pytest.raises(ConfigError, match="last was called before layers.1"):
        stages.run(0, None, lambda: model(torch.zeros(1, 2)))
