from __future__ import annotations

import pickle

import pytest

from titanplug.errors import ConfigError, MissingExtraError, TitanplugError


def test_one_problem_is_the_message() -> None:
    error = ConfigError("tp=3: 8 heads are not divisible by it.")
    assert str(error) == "tp=3: 8 heads are not divisible by it."
    assert error.problems == ("tp=3: 8 heads are not divisible by it.",)
    assert isinstance(error, ValueError)


def test_several_problems_are_numbered() -> None:
    error = ConfigError(["tp=3: wrong.\nUse 2.", "pp=0: wrong."])
    assert str(error) == (
        "2 problems in the configuration:\n  1. tp=3: wrong.\n     Use 2.\n  2. pp=0: wrong."
    )


def test_no_problem_is_a_programming_error() -> None:
    with pytest.raises(TypeError, match="no problems"):
        ConfigError([])


@pytest.mark.parametrize("problems", ["one", ["one"], ["one", "two"]])
def test_survives_pickling(problems: str | list[str]) -> None:
    error = ConfigError(problems)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert copy.problems == error.problems


def test_every_error_is_a_titanplug_error() -> None:
    assert issubclass(ConfigError, TitanplugError)
    assert issubclass(MissingExtraError, TitanplugError)
    assert issubclass(MissingExtraError, ImportError)
