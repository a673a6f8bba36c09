"""Context parallel: a model runs on its rank's part of the sequence, and nobody outside of it notices.

The border is the model's call. On the way in, the arguments that the plan names are cut along the sequence;
on the way out, what has the length of a part stands for the whole (:class:`ShardedSequence`). Inside, only
attention and positions know (:mod:`titanplug.parallel.active_sequence`). A step around the model is computed
alike on all ranks of the axis, on whole batches: targets may be shifted, counted and averaged as on one
process.

Gradients: the loss of each of n ranks counts for 1/n (:mod:`titanplug.strategy.loss_weights`), and gradients
are summed over the axis. Around the model each rank has the n-th part of a gradient; at the border these add
up, and inside each rank has the gradient of its own tokens.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map_only

from titanplug.errors import ConfigError
from titanplug.parallel.active_sequence import ActiveSequence, sequence_active
from titanplug.parallel.collectives import AxisGroup
from titanplug.parallel.random_draws import DrawOnShard
from titanplug.parallel.sequence import SequenceShards
from titanplug.parallel.sequence_output import ShardedSequence
from titanplug.parallel.token_mixing import RefuseTokenMixing
from titanplug.validation import ContextOptions, sequence_unit


@dataclass
class ContextParallelized:
    """What context parallel did to a module.

    Args:
        borders: the models that run on parts of a sequence, by name.
    """

    borders: dict[str, ModelBorder] = field(default_factory=dict)
    _unchecked: set[str] = field(default_factory=set)

    def check_step(self, stages: dist.ProcessGroup, device: torch.device, *, trained: bool) -> None:
        """After a step: what was called for the first time must have computed its attention here.

        Args:
            stages: the ranks of the pipeline, which together hold a model.
            device: where they add up.
            trained: the step returned a loss.

        Raises:
            ConfigError: a model ran and attended to its part of the sequence alone, or a loss came without
                one that ran; on all ranks.
        """
        if not self._unchecked:
            return
        for name in sorted(self._unchecked):
            border = self.borders[name]
            if not border.num_calls:
                continue
            self._unchecked.discard(name)
            if not self._num_attentions(border, stages, device):
                raise ConfigError(
                    f"cp > 1 and {name or 'the module'} never called titanplug's attention, so its tokens "
                    "saw their own part of the sequence only. Call "
                    "titanplug.attention.dot_product_attention in place of scaled_dot_product_attention (for "
                    "transformers: titanplug.attention.huggingface), or use cp=1."
                )
        if trained and len(self._unchecked) == len(self.borders):
            names = ", ".join(name or "the module" for name in self.borders)
            raise ConfigError(
                f"cp > 1 and the step didn't call {names}, whose inputs the plan's sequence_dims cut. Call "
                "the model, or name in sequence_dims the inputs of the module that is called: "
                '{"model.input_ids": 1}.'
            )

    def _num_attentions(self, border: ModelBorder, stages: dist.ProcessGroup, device: torch.device) -> int:
        own = border.num_attentions
        if dist.get_world_size(stages) == 1:
            return own
        total = torch.tensor(own, device=device)
        dist.all_reduce(total, group=stages)
        return int(total)


class ModelBorder:
    """A model's forward on a part of the sequence.

    Args:
        name: of the model.
        module: the model.
        dims: sequence dim of each of its arguments; None: the argument is passed on whole.
        group: the context axis.
        options: the switches.
        multiple: what must divide a rank's part besides.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        dims: Mapping[str, int | None],
        group: AxisGroup,
        options: ContextOptions,
        multiple: int,
    ) -> None:
        self._name, self._dims, self._group, self._options = name, dims, group, options
        self._multiple = multiple
        self._forward: Callable[..., Any] = module.forward
        self._sequences: dict[int, ActiveSequence] = {}
        self._arguments = _positional(module)
        self.num_calls = 0

    @property
    def num_attentions(self) -> int:
        """Calls of attention so far."""
        return sum(sequence.num_attentions for sequence in self._sequences.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output on the whole sequence, of which this rank computes its part."""
        names = self._arguments[: len(args)]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        sequence = self._sequence(self._length(given))
        inputs = {name: self._shard(name, value, sequence.shards) for name, value in given.items()}
        self.num_calls += 1
        with sequence_active(sequence), self._first_call(sequence, inputs):
            output = self._forward(*(inputs.pop(name) for name in names), *args[len(names) :], **inputs)
        return self._whole(output, sequence.shards)

    def _first_call(
        self, sequence: ActiveSequence, inputs: Mapping[str, Any]
    ) -> AbstractContextManager[object]:
        """What looks at the model's first call."""
        if self.num_calls > 1:
            return nullcontext()
        cut = {name: inputs[name] for name in self._dims if isinstance(inputs.get(name), Tensor)}
        # Made here, before anybody looks.
        positions = sequence.shards.positions(next(iter(cut.values())).device)
        has_positions = any(
            "pos" in name.lower() or torch.equal(x.reshape(-1, x.shape[-1])[0], positions)
            for name, x in cut.items()
            if x.numel() and not x.is_floating_point()
        )
        return RefuseTokenMixing(sequence, self._name, has_positions=has_positions)

    def _length(self, given: Mapping[str, Any]) -> int:
        lengths = {}
        for name, dim in self._dims.items():
            value = given.get(name)
            if dim is None or value is None:
                continue
            if not isinstance(value, Tensor) or not -value.ndim <= dim < value.ndim:
                shown = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ConfigError(
                    f"sequence_dims gives {name!r} of {self._name or 'the model'} the sequence dim {dim}, "
                    f"and it is called with {shown}. It must be a tensor that has the dim; where a dict or "
                    "another container is passed, name the arguments of a module inside that gets the "
                    "tensors."
                )
            lengths[name] = value.shape[dim]
        if len(set(lengths.values())) != 1:
            shown = ", ".join(f"{name}: {length}" for name, length in lengths.items()) or "none was passed"
            raise ConfigError(
                f"The arguments of {self._name or 'the model'} that sequence_dims names must have one "
                f"length of the sequence ({shown}). Expand them, or correct the dims in the plan."
            )
        return int(next(iter(lengths.values())))

    def _sequence(self, length: int) -> ActiveSequence:
        known = self._sequences.get(length)
        if known is None:
            options = self._options
            shards = SequenceShards.of(length, self._group, zigzag=options.zigzag, multiple=self._multiple)
            if shards.padded != length and not options.pad:
                unit = sequence_unit(self._group.size, zigzag=options.zigzag, multiple=self._multiple)
                raise ConfigError(
                    f"A sequence of {length} tokens with cp={self._group.size} and cp_pad=False: it must "
                    f"be a multiple of {unit}. Use {shards.padded - unit or unit} or {shards.padded} "
                    "tokens, or cp_pad=True."
                )
            known = self._sequences[length] = ActiveSequence(shards, options.backend)
        return known

    def _shard(self, name: str, value: Any, shards: SequenceShards) -> Any:
        if name in self._dims:
            dim = self._dims[name]
            if dim is None or not isinstance(value, Tensor):
                return value
            whole = value.whole() if isinstance(value, ShardedSequence) else value
            return shards.shard(whole, dim)
        if isinstance(value, Tensor) and shards.length > 1 and shards.length in value.shape[1:]:
            dim = 1 + value.shape[1:].index(shards.length)
            raise ConfigError(
                f"The argument {name!r} of {self._name or 'the model'} has shape {tuple(value.shape)}, of "
                f"which dim {dim} is as long as the sequence, and the plan's sequence_dims doesn't name "
                "it. Add it with its sequence dim, or with None if every rank shall get it whole. Masks "
                "over the sequence can't be cut: pass document_ids or what the mask is made of."
            )
        return value

    def _whole(self, output: Any, shards: SequenceShards) -> Any:
        if isinstance(output, Tensor):
            return self._whole_tensor(output, shards)
        if dataclasses.is_dataclass(output) and not isinstance(output, type | Mapping):
            changed = {
                item.name: self._whole(getattr(output, item.name), shards)
                for item in dataclasses.fields(output)
            }
            return dataclasses.replace(output, **changed)
        return tree_map_only(Tensor, lambda leaf: self._whole_tensor(leaf, shards), output)

    def _whole_tensor(self, leaf: Tensor, shards: SequenceShards) -> Tensor:
        if leaf.ndim < 2 or leaf.shape[1] != shards.local_length:
            what = "a single number (a loss?)" if leaf.ndim == 0 else f"a tensor of shape {tuple(leaf.shape)}"
            raise ConfigError(
                f"{self._name or 'The model'} returned {what} under cp={self._group.size}: it was computed "
                f"from this rank's {shards.local_length} tokens, and only outputs with the sequence as dim 1 "
                "can be put together. Return those (logits, hidden states), and compute losses and pooled "
                "values from them in the step. Caches have to be off (use_cache=False)."
            )
        return ShardedSequence(leaf, shards)


def apply_context_parallel(
    root: nn.Module,
    sequence_dims: Mapping[str, int | None],
    group: AxisGroup,
    options: ContextOptions,
    *,
    multiple: int = 1,
) -> ContextParallelized:
    """Let the models of ``root`` run on parts of the sequence, in place.

    Args:
        root: the module that the names are relative to.
        sequence_dims: sequence dim by ``name of model.name of argument``, as in the plan.
        group: the context axis.
        options: the switches.
        multiple: what must divide a rank's part besides (the tensor axis under sequence parallel).

    Raises:
        ConfigError: a name is that of no module, or an argument that its forward doesn't take.
    """
    result = ContextParallelized()
    for name, dims in models_of(root, sequence_dims).items():
        module = root.get_submodule(name)
        border = ModelBorder(name, module, dims, group, options, multiple)
        module.forward = border
        result.borders[name] = border
        result._unchecked.add(name)
        for inner in _dropouts(module):
            inner.forward = DrawOnShard(inner, group)
    return result


def models_of(root: nn.Module, sequence_dims: Mapping[str, int | None]) -> dict[str, dict[str, int | None]]:
    """By name of a model, the sequence dims of its arguments.

    Raises:
        ConfigError: there are none, or a name is that of no module.
    """
    if not sequence_dims:
        raise ConfigError(
            "cp > 1 needs a plan that says which inputs of the model have a sequence, and that of "
            f"{type(root).__name__} has no sequence_dims. Use cp=1, or return for example "
            'ParallelPlan(sequence_dims={"model.input_ids": 1}) from `configure_parallel_plan`, where the '
            "model calls titanplug.attention.dot_product_attention."
        )
    modules = dict(root.named_modules())
    models: dict[str, dict[str, int | None]] = {}
    problems = []
    for key, dim in sequence_dims.items():
        name, _, argument = key.rpartition(".")
        if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool)):
            problems.append(
                f"sequence_dims: {key!r} is {dim!r}. It is the sequence dim of the argument, a whole "
                "number, or None for an argument that is passed on whole. Correct the plan."
            )
        if name not in modules:
            problems.append(
                f"sequence_dims: {key!r} names the argument {argument!r} of {name!r}, and "
                f"{type(root).__name__} has no such module. Its children are "
                f"{', '.join(child for child, _ in root.named_children()) or 'none'}. Correct the plan."
            )
        models.setdefault(name, {})[argument] = dim
    for name, dims in models.items():
        if name in modules:
            problems += _argument_problems(modules[name], dims)
        inside = [outer for outer in models if name != outer and (not outer or name.startswith(f"{outer}."))]
        if inside:
            problems.append(
                f"sequence_dims names arguments of {name!r} and of {inside[0] or 'the module'!r}, which "
                "holds it: a sequence is cut once. Name those of the outer one alone."
            )
    if problems:
        raise ConfigError(problems)
    return models


def _argument_problems(module: nn.Module, dims: Mapping[str, int | None]) -> list[str]:
    parameters = inspect.signature(module.forward).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return []
    known = [p.name for p in parameters]
    unknown = [key for key in dims if key not in known]
    if not unknown:
        return []
    return [
        f"sequence_dims names {', '.join(map(repr, unknown))}, and {type(module).__name__}.forward takes "
        f"{', '.join(known) or 'no arguments'}. The keys are arguments of the model's forward: what the step "
        "keeps for itself (labels) stays whole, and is no entry. Correct the plan."
    ]


def _positional(module: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]


def _dropouts(module: nn.Module) -> Iterable[nn.Module]:
    """Dropouts draw for each token; what draws for each sample must do so alike on all ranks."""
    return [inner for inner in module.modules() if isinstance(inner, _DropoutNd)]
