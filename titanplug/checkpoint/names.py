"""Checkpoints of a model whose pipeline stages are on several ranks: the same as of the one-process model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from titanplug.errors import CheckpointError
from titanplug.parallel.names import plain_name
from titanplug.parallel.parallelize import Parallelized


class CheckpointNames:
    """Names of the one-process model's parameters, of which this rank may hold some only.

    Args:
        module: the laid-out module.
        layout: how it is laid out; None: it is whole here.
    """

    def __init__(self, module: nn.Module, layout: Parallelized | None = None) -> None:
        self._stages = None if layout is None else layout.pipeline
        self._group = None if layout is None or layout.pipeline is None else layout.mesh.group("pp")
        aliases = {} if self._stages is None else {t.alias: t.name for t in self._stages.tied if t.alias}
        self._aliases = {alias: name for alias, name in aliases.items() if alias != name}
        self._parameters: dict[str, nn.Parameter] = {}
        self._own_names: dict[str, str] = {}
        self._by_id: dict[int, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            own = plain_name(name)
            first = self._by_id.get(id(parameter))
            if first is None:
                first = self._by_id[id(parameter)] = aliases.get(own, own)
                self._parameters[first] = parameter
                self._own_names[first] = own
            if own != first:
                self._aliases[own] = first

    @property
    def aliases(self) -> dict[str, str]:
        """Other names of this rank's shared weights, each with the one that it is saved by."""
        return self._aliases

    @property
    def has_stages(self) -> bool:
        """Whether several ranks hold different parts of the model."""
        return self._group is not None

    def name_of(self, parameter: Tensor) -> str:
        """Name of one of this rank's parameters."""
        return self._by_id[id(parameter)]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by name."""
        return self._parameters

    @property
    def entries(self) -> list[str]:
        """Entries of the whole model's state that other ranks may hold."""
        return [] if self._stages is None else self._stages.state_names

    def with_whole_names(self, values: dict[str, Any]) -> dict[str, Any]:
        """Values by this rank's names of its parameters, by the names of the one-process model."""
        return {name: values[own] for name, own in self._own_names.items() if own in values}

    def with_own_names(self, values: dict[str, Any]) -> dict[str, Any]:
        """The reverse of :meth:`with_whole_names`."""
        return {own: values[name] for name, own in self._own_names.items() if name in values}

    def is_elsewhere(self, name: str) -> bool:
        """Whether a parameter is one of another stage's."""
        stages = self._stages
        return stages is not None and name not in self._parameters and name in stages.parameter_order

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Names in the order of the one-process model, without repetition."""
        found = dict.fromkeys(names)
        if self._stages is None:
            return list(found)
        place = {name: index for index, name in enumerate(self._stages.parameter_order)}
        return sorted(found, key=lambda name: place.get(name, len(place)))

    # ---------------------------------------------------------------- over stages

    def whole_groups(self, groups: list[list[str]]) -> list[list[str]]:
        """An optimizer's groups of names with those of all stages; a collective."""
        if self._group is None:
            return groups
        return self._joined(self._gather(groups))

    def _joined(self, everyone: list[list[list[str]]]) -> list[list[str]]:
        numbers = [len(groups) for groups in everyone]
        if len(set(numbers)) > 1:
            raise CheckpointError(
                f"The optimizers of the pipeline stages have {', '.join(map(str, numbers))} groups of "
                "parameters. Stages have the same groups, some of them empty where a stage has no such "
                "parameter. Don't leave empty groups out in configure_optimizers."
            )
        return [self.in_order(n for own in everyone for n in own[i]) for i in range(numbers[0])]

    def whole_dict(self, own: dict[str, Any]) -> dict[str, Any]:
        """A dict with the entries of all stages; a collective."""
        if self._group is None:
            return own
        return {key: value for part in self._gather(own) for key, value in part.items()}

    def whole_optimizer(self, plain: dict[str, Any]) -> dict[str, Any]:
        """What isn't tensors of an optimizer's state, with the parameters of all stages; a collective."""
        if self._group is None:
            return plain
        everyone = self._gather(plain)
        joined = self._joined([[g["params"] for g in part["param_groups"]] for part in everyone])
        groups = [
            {**group, "params": params} for group, params in zip(plain["param_groups"], joined, strict=True)
        ]
        merged = {
            key: {name: value for part in everyone for name, value in part[key].items()}
            for key in ("values", "tensors")
        }
        return {"param_groups": groups, **merged}

    def own_optimizer(self, plain: dict[str, Any]) -> dict[str, Any]:
        """The part of such a state that is about this rank's parameters."""
        if self._group is None:
            return plain
        groups = [
            {**group, "params": [name for name in group["params"] if not self.is_elsewhere(name)]}
            for group in plain["param_groups"]
        ]
        own = {
            key: {name: value for name, value in plain[key].items() if not self.is_elsewhere(name)}
            for key in ("values", "tensors")
        }
        return {"param_groups": groups, **own}

    def own_counted(self, counted: dict[str, Any], groups: list[list[str]]) -> dict[str, Any]:
        """A state with numbers for names of the whole model, with the numbers of this rank's optimizer.

        Args:
            counted: as torch's optimizers load it, of all stages.
            groups: names of this rank's parameters, by group.
        """
        if self._group is None:
            return counted
        whole = self.whole_groups(groups)
        number = {
            name: n
            for names, group in zip(whole, counted["param_groups"], strict=True)
            for name, n in zip(names, group["params"], strict=True)
        }
        order = [name for names in groups for name in names]
        own = {name: index for index, name in enumerate(order)}
        return {
            "state": {own[n]: counted["state"][number[n]] for n in order if number[n] in counted["state"]},
            "param_groups": [
                {**group, "params": [own[name] for name in names]}
                for group, names in zip(counted["param_groups"], groups, strict=True)
            ],
        }

    def _gather(self, value: Any) -> list[Any]:
        assert self._group is not None
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, value, group=self._group)
        return everyone
