"""What is known of a training step before it runs, as plain numbers, and what follows for one rank.

Letters: B rows, S tokens in a row, S_local of them on a rank of the context axis, D features.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from titanplug.errors import ConfigError
from titanplug.mesh import ParallelDims
from titanplug.planner.shapes import ModelShape, Weight, block_weights, end_weights
from titanplug.schedules.actions import ScheduleTable
from titanplug.validation import ContextOptions, sequence_unit

ContextBackend: TypeAlias = Literal["all_gather", "ring", "ulysses"]


@dataclass(frozen=True)
class ElementSizes:
    """Bytes of one element; the defaults are those of 32-true.

    Args:
        activation: hidden states between layers.
        gathered: parameters as FSDP gathers them.
        reduced: gradients as FSDP reduces them.
        stored: parameters, and their gradients after the reduction, as the optimizer has them.
    """

    activation: int = 4
    gathered: int = 4
    reduced: int = 4
    stored: int = 4


class Place(NamedTuple):
    """A rank's positions, as far as they make a difference. The first ranks have the largest shards."""

    pp: int = 0
    fsdp: int = 0
    tp: int = 0


@dataclass(frozen=True)
class StepFacts:
    """What decides on the communication of a step.

    Args:
        model: the model.
        dims: degrees, resolved.
        rows: B, rows that a data-parallel rank reads for a step.
        seq_len: S, tokens in a row.
        table: the pipeline's schedule, with its microbatches; None without pipeline.
        stage_layers: for each stage its number of blocks; the first stage has the embeddings, the last the
            final norm and the output layer besides.
        sizes: bytes of an element.
        sequence_parallel: hidden states between blocks are sharded over ``tp``.
        loss_parallel: logits stay sharded over ``tp`` up to the loss.
        reshard_after_forward: FSDP frees a block between forward and backward; never with a pipeline.
        takes_norm: the gradient norm is asked for, as by clipping (p-norms; a maximum is two numbers).
        by_targets: the step returns ``num_targets``, so that the loss is a mean over targets.
        is_logged: the values that the step logs are written.
        cp_backend: how attention sees the keys of other ranks.

    Raises:
        ConfigError: degrees that aren't resolved, or stages that don't fit the model.
    """

    model: ModelShape
    dims: ParallelDims
    rows: int
    seq_len: int
    table: ScheduleTable | None = None
    stage_layers: tuple[int, ...] = ()
    sizes: ElementSizes = field(default_factory=ElementSizes)
    sequence_parallel: bool = True
    loss_parallel: bool = True
    reshard_after_forward: bool = True
    takes_norm: bool = False
    by_targets: bool = False
    is_logged: bool = False
    cp_backend: ContextBackend = "all_gather"

    def __post_init__(self) -> None:
        if -1 in self.dims.degrees.values():
            raise ConfigError(f"{self.dims}: the degrees aren't resolved. Call dims.resolve(world_size).")
        ranks, stages = (1, 1) if self.table is None else (self.table.num_ranks, self.table.num_stages)
        layers = self.stage_layers if self.table is not None else (self.model.num_layers,)
        if ranks != self.dims.pp or len(layers) != stages or sum(layers) != self.model.num_layers:
            raise ConfigError(
                f"table for {ranks} ranks with {stages} stages, stage_layers={layers}, pp={self.dims.pp}, "
                f"{self.model.num_layers} layers: they don't fit. Give the table of pp ranks and, for each "
                "of its stages, the number of its blocks; with pp=1 neither."
            )

    @property
    def shards_sequence(self) -> bool:
        """Whether hidden states between blocks are sharded over ``tp``."""
        return self.sequence_parallel and self.dims.tp > 1

    @cached_property
    def parts(self) -> list[int]:
        """Rows of each microbatch; they differ by one at most."""
        number = 1 if self.table is None else self.table.num_microbatches
        return [share + (i < rest) for share, rest in [divmod(self.rows, number)] for i in range(number)]

    @property
    def local_length(self) -> int:
        """S_local: context parallel pads S so that all ranks have as many tokens.

        They are an early and a late chunk, but for ulysses; tensor parallel shards what is left.
        """
        if self.dims.cp == 1:
            return self.seq_len
        split = self.dims.tp if self.shards_sequence else 1
        zigzag = ContextOptions(self.cp_backend).zigzag
        unit = sequence_unit(self.dims.cp, zigzag=zigzag, multiple=split)
        return -(-self.seq_len // unit) * unit // self.dims.cp

    def hidden_bytes(self, rows: int) -> int:
        """Hidden states of so many rows, (B, S_local, D)."""
        return rows * self.local_length * self.model.dim * self.sizes.activation

    def layers_at(self, place: Place) -> int:
        """Number of blocks that a rank has."""
        if self.table is None:
            return self.model.num_layers
        return sum(self.stage_layers[stage] for stage in self.table.stages_of(place.pp))

    def ends_at(self, place: Place) -> tuple[bool, bool]:
        """Whether a rank has the first stage, and the last."""
        if self.table is None:
            return True, True
        holders = self.table.stage_to_rank
        return holders[0] == place.pp, holders[-1] == place.pp

    def units_at(self, place: Place) -> list[tuple[int, list[Weight]]]:
        """A rank's FSDP units, blocks and what is outside of them: how many alike, and the weights of one."""
        first, last = self.ends_at(place)
        tp, sharded = self.dims.tp, self.shards_sequence
        block = block_weights(self.model, tp, sequence_parallel=sharded)
        ends = end_weights(self.model, tp, place.tp, sequence_parallel=sharded, first=first, last=last)
        return [(self.layers_at(place), block), (1, ends)] if ends else [(self.layers_at(place), block)]
