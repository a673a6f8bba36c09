"""The cross-checks: every wrong field is named, with its value and what is allowed, all at once."""

from __future__ import annotations

from typing import Any

import pytest

from titanplug.errors import ConfigError
from titanplug.mesh import ParallelDims
from titanplug.validation import PRECISIONS, ContextOptions, RunFacts, validate_precision, validate_run


def problems_of(facts: RunFacts, **degrees: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        validate_run(facts, **degrees)
    return error.value.problems


def test_returns_the_resolved_degrees() -> None:
    facts = RunFacts(world_size=8, precision="bf16-mixed", heads=(8, 4), seq_len=16, batch_size=2)
    assert validate_run(facts, tp=2) == ParallelDims(dp_shard=4, tp=2)
    assert validate_run(RunFacts(), tp=2) == ParallelDims(tp=2)  # the world is not known yet


def test_three_wrong_fields_give_three_messages_at_once() -> None:
    facts = RunFacts(world_size=4, precision="16-mixed", batch_size=0)
    problems = problems_of(facts, dp_shard=3, tp=2)
    assert [problem.split("=")[0] for problem in problems] == [
        "pp",  # the product is printed with every degree, from the outermost
        "precision",
        "batch_size",
    ]
    with pytest.raises(ConfigError, match=r"3 problems in the configuration:\n  1\. .*\n  2\. "):
        validate_run(facts, dp_shard=3, tp=2)


def test_context_backends_are_known() -> None:
    (problem,) = problems_of(RunFacts(context=ContextOptions("ulises")), cp=2)
    assert problem.startswith("cp_backend='ulises': it is one of all_gather, ring, ulysses, torch.")
    assert problem.endswith("Did you mean 'ulysses'?")


def test_ulysses_must_divide_the_heads() -> None:
    facts = RunFacts(heads=(8, 4), context=ContextOptions("ulysses"))
    validate_run(facts, cp=4)
    validate_run(facts, cp=2, tp=2)
    (problem,) = problems_of(facts, cp=4, tp=2)
    assert "cp=4 x tp=2, 8 heads and 4 key-value heads" in problem
    assert "Allowed values of cp: 1, 2; or use cp_backend='all_gather' or 'ring'" in problem
    validate_run(RunFacts(heads=(7, 7), context=ContextOptions("ring")), cp=4)
    (rest,) = problems_of(
        RunFacts(world_size=8, heads=(4, 4), context=ContextOptions("ulysses")), dp_shard=1, cp=-1
    )
    assert rest.startswith("cp_backend='ulysses' with cp=8")


def test_lengths_that_do_not_divide_are_padded_or_refused() -> None:
    padded = RunFacts(seq_len=13, context=ContextOptions())
    validate_run(padded, cp=2)
    validate_run(padded, cp=2, tp=2)
    strict = RunFacts(seq_len=13, context=ContextOptions(pad=False))
    (problem,) = problems_of(strict, cp=2, tp=2)
    assert problem.startswith("seq_len=13 with cp=2 and cp_pad=False")
    assert "multiple of 8. Use seq_len=8 or 16, or cp_pad=True" in problem
    validate_run(RunFacts(seq_len=6, context=ContextOptions("ulysses", pad=False)), cp=2)


@pytest.mark.parametrize(
    ("heads", "tp", "allowed"),
    [((4, 2), 4, "1, 2."), ((12, 8), 8, "1, 2, 4."), ((9, 3), 2, "1, 3."), ((7, 7), 2, "1, 7.")],
)
def test_tensor_parallel_must_divide_the_heads(heads: tuple[int, int], tp: int, allowed: str) -> None:
    (problem,) = problems_of(RunFacts(heads=heads), tp=tp)
    assert problem.startswith(f"tp={tp} with {heads[0]} heads and {heads[1]} key-value heads")
    assert problem.endswith(f"Allowed values of tp: {allowed}")


def test_the_rest_is_checked_against_the_heads_too() -> None:
    (problem,) = problems_of(RunFacts(world_size=8, heads=(4, 2)), dp_shard=1, tp=-1)
    assert problem.startswith("tp=8 with 4 heads")


def test_sequence_parallel_must_divide_the_sequence() -> None:
    (problem,) = problems_of(RunFacts(seq_len=15), tp=4)
    assert "seq_len=15 with tp=4" in problem
    assert "seq_len=12 or 16" in problem
    assert validate_run(RunFacts(seq_len=15, sequence_parallel=False), tp=4).tp == 4
    (problem,) = problems_of(RunFacts(seq_len=3), tp=4)
    assert problem.endswith("Use seq_len=4, or sequence_parallel=False.")


@pytest.mark.parametrize("precision", [*PRECISIONS, "32", 32, "bf16", None])
def test_precisions_that_work(precision: Any) -> None:
    assert validate_precision(precision) == []


@pytest.mark.parametrize("precision", ["16-mixed", "16-true", "64-true", 64, 16, "transformer-engine"])
def test_other_precisions_are_refused_with_the_list(precision: Any) -> None:
    (problem,) = validate_precision(precision)
    assert problem.startswith(f"precision={precision!r}: ")
    assert all(name in problem for name in PRECISIONS)
