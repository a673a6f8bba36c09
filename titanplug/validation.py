"""The cross-checks of a run, all in one place and all reported at once.

The strategy, the command line and the planner call the same functions, wherever possible before any
process starts. What is not known yet (None) is not checked; a later call that knows more checks it.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

from titanplug.errors import ConfigError
from titanplug.mesh import ParallelDims
from titanplug.schedules.catalogue import chunks_per_rank, resolve_schedule, schedule_problems

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
"""What ``Trainer(precision=...)`` may be. bf16-mixed: float32 master weights and gradient reduction."""

CONTEXT_BACKENDS = ("all_gather", "ring", "ulysses", "torch")
"""What ``TitanStrategy(cp_backend=...)`` may be; :mod:`titanplug.attention.backends` says what each can "
"do."""


@dataclass(frozen=True)
class PipelineFacts:
    """What is asked of the pipeline; checked where pp is above 1.

    Args:
        schedule: a schedule, in any spelling.
        num_microbatches: parts of a data-parallel rank's batch; None: chosen by the schedule.
        num_chunks: stages of a rank; None: chosen by the schedule.
        split: for each stage the names of its modules; None: by cost.
        first_weight: cost of the modules before the layers, in layers.
        last_weight: cost of the modules after the layers, in layers.
        reshard_after_forward: whether FSDP shall free parameters between forward and backward.
    """

    schedule: str = "Interleaved1F1B"
    num_microbatches: int | None = None
    num_chunks: int | None = None
    split: tuple[tuple[str, ...], ...] | None = None
    first_weight: float | None = None
    last_weight: float | None = None
    reshard_after_forward: bool | None = None


def sequence_unit(cp: int, *, zigzag: bool, multiple: int = 1) -> int:
    """What divides the length of a sequence that ``cp`` ranks share, after padding.

    Args:
        cp: ranks of the context axis.
        zigzag: each holds an early and a late chunk.
        multiple: what divides a rank's part besides.
    """
    return cp * multiple * (2 if zigzag else 1)


@dataclass(frozen=True)
class ContextOptions:
    """Switches of context parallel.

    Args:
        backend: how attention communicates: all_gather, ring, ulysses or torch.
        load_balance: each rank holds an early and a late chunk of the sequence, so that causal attention is
            the same work everywhere. None: yes, but for ulysses, which has the whole sequence anyway.
        pad: pad sequences that the ranks can't share evenly; else refuse them.
    """

    backend: str = "all_gather"
    load_balance: bool | None = None
    pad: bool = True

    @property
    def zigzag(self) -> bool:
        """Whether sequences are in zigzag order."""
        return self.backend != "ulysses" if self.load_balance is None else self.load_balance


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run when it is checked; None where it is not known yet.

    Args:
        world_size: number of processes, devices x num_nodes.
        precision: Lightning's name of the precision.
        heads: (query heads, key-value heads) of the model.
        seq_len: tokens in a row of the batch.
        sequence_parallel: whether tensor parallel splits the sequence between blocks.
        batch_size: rows that each data-parallel rank reads for a batch.
        gradient_norm_type: p of the gradient norm.
        timeout_s: seconds that a collective waits for a rank.
        pipeline: what is asked of the pipeline.
        num_layers: repeated layers of the model.
        context: what is asked of context parallel.
    """

    world_size: int | None = None
    precision: str | int | None = None
    heads: tuple[int, int] | None = None
    seq_len: int | None = None
    sequence_parallel: bool = True
    batch_size: int | None = None
    gradient_norm_type: float | str | None = None
    timeout_s: float | None = None
    pipeline: PipelineFacts | None = None
    num_layers: int | None = None
    context: ContextOptions | None = None


def validate_run(
    facts: RunFacts,
    *,
    dp_replicate: int = 1,
    dp_shard: int = -1,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
) -> ParallelDims:
    """Check degrees against each other and against what is known of the run.

    Returns:
        The degrees, resolved where the world size is known.

    Raises:
        ConfigError: one message for each wrong field, all at once.
    """
    problems: list[str] = []
    dims: ParallelDims | None = None
    try:
        dims = ParallelDims(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp)
    except ConfigError as error:
        problems += error.problems
    if dims is not None and facts.world_size is not None:
        try:
            dims = dims.resolve(facts.world_size)
        except ConfigError as error:
            problems += error.problems
    problems += validate_precision(facts.precision)
    # A tp of -1 is known where the rest of the processes is.
    problems += _tensor_problems(*((tp, cp) if dims is None else (dims.tp, dims.cp)), facts)
    problems += _pipeline_problems(pp if dims is None else dims.pp, facts)
    problems += _context_problems(*((cp, tp) if dims is None else (dims.cp, dims.tp)), facts)
    if facts.batch_size is not None and facts.batch_size < 1:
        problems.append(
            f"batch_size={facts.batch_size}: each data-parallel rank reads at least one row. Raise it."
        )
    problems += _norm_problems(facts.gradient_norm_type)
    if facts.timeout_s is not None and not facts.timeout_s > 0:
        problems.append(
            f"timeout_s={facts.timeout_s!r}: a collective waits for some seconds, above 0. Raise it."
        )
    if problems:
        raise ConfigError(problems)
    assert dims is not None
    return dims


def validate_precision(precision: str | int | None) -> list[str]:
    """The problem with a precision, if any; None is not checked."""
    if precision is None or str(precision) in (*PRECISIONS, "32", "bf16"):
        return []
    return [
        f"precision={precision!r}: titanplug trains in {', '.join(PRECISIONS)} (bf16-mixed keeps float32 "
        "master weights and reduces gradients in float32). Choose one of these."
    ]


def _context_problems(cp: int, tp: int, facts: RunFacts) -> list[str]:
    asked = facts.context
    if asked is None:
        return []
    backend = asked.backend
    if backend not in CONTEXT_BACKENDS:
        close = difflib.get_close_matches(str(backend), CONTEXT_BACKENDS, 1, 0.5)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        return [
            f"cp_backend={backend!r}: it is one of {', '.join(CONTEXT_BACKENDS)}. Choose one of these.{hint}"
        ]
    if not isinstance(cp, int) or cp <= 1 or not isinstance(tp, int) or tp < 1:
        return []
    problems = []
    if backend == "ulysses" and facts.heads is not None and any(n % (tp * cp) for n in facts.heads):
        queries, keys = facts.heads
        shared = math.gcd(queries, keys)
        allowed = [str(n) for n in range(1, shared + 1) if shared % (n * tp) == 0]
        problems.append(
            f"cp_backend='ulysses' with cp={cp} x tp={tp}, {queries} heads and {keys} key-value heads: each "
            "rank computes whole heads, so cp x tp must divide both. Allowed values of cp: "
            f"{', '.join(allowed) or 'none'}; or use cp_backend='all_gather' or 'ring'."
        )
    split = tp if facts.sequence_parallel else 1
    unit = sequence_unit(cp, zigzag=asked.zigzag, multiple=split)
    if not asked.pad and facts.seq_len is not None and facts.seq_len % unit:
        lower = facts.seq_len - facts.seq_len % unit
        lengths = " or ".join(str(n) for n in (lower, lower + unit) if n)
        problems.append(
            f"seq_len={facts.seq_len} with cp={cp} and cp_pad=False: the ranks share a sequence evenly, so "
            f"it must be a multiple of {unit}. Use seq_len={lengths}, or cp_pad=True."
        )
    return problems


def _norm_problems(norm_type: float | str | None) -> list[str]:
    try:
        if norm_type is None or float(norm_type) > 0:
            return []
    except ValueError:
        pass  # not a number
    return [
        f"gradient_norm_type={norm_type!r}: it is the p of a p-norm, a number above 0 or 'inf' for the "
        "largest absolute value. The usual one is 2.0."
    ]


def _tensor_problems(tp: int, cp: int, facts: RunFacts) -> list[str]:
    if not isinstance(tp, int) or tp <= 1:
        return []
    problems = []
    if facts.heads is not None and any(heads % tp for heads in facts.heads):
        queries, keys = facts.heads
        shared = math.gcd(queries, keys)
        allowed = [n for n in range(1, shared + 1) if shared % n == 0]
        problems.append(
            f"tp={tp} with {queries} heads and {keys} key-value heads: tp must divide both, since a head "
            f"is never split. Allowed values of tp: {', '.join(map(str, allowed))}."
        )
    # Under context parallel a rank's part is padded to what tp divides.
    if facts.seq_len is not None and facts.sequence_parallel and cp == 1 and facts.seq_len % tp:
        lower = facts.seq_len - facts.seq_len % tp
        allowed = [n for n in (lower, lower + tp) if n]
        problems.append(
            f"seq_len={facts.seq_len} with tp={tp}: sequence parallel splits the sequence over tp, so tp "
            f"must divide it. Use seq_len={' or '.join(map(str, allowed))}, or sequence_parallel=False."
        )
    return problems


def _pipeline_problems(pp: int, facts: RunFacts) -> list[str]:
    asked = facts.pipeline
    if asked is None:
        return []
    try:
        schedule = resolve_schedule(asked.schedule)
    except ConfigError as error:
        named = f"pp_schedule={asked.schedule!r}"
        return [text if text.startswith(named) else f"{named}: {text}" for text in error.problems]
    if not isinstance(pp, int) or pp <= 1:
        return []
    problems = schedule_problems(schedule, pp, asked.num_chunks, asked.num_microbatches)
    for name, weight in (("pp_first_weight", asked.first_weight), ("pp_last_weight", asked.last_weight)):
        if weight is not None and not weight >= 0:
            problems.append(f"{name}={weight!r}: it is a cost in layers, 0 or more. Raise it.")
        if weight is not None and asked.split is not None:
            problems.append(
                f"{name}={weight!r} with pp_split: costs decide only where pp_split isn't given. Leave "
                "one of them out."
            )
    if asked.reshard_after_forward:
        problems.append(
            "reshard_after_forward=True with pp > 1: parameters stay gathered for all microbatches of a "
            "step, or each of them would gather them again. Leave it out, or use pp=1."
        )
    number = asked.num_microbatches
    if number is not None and facts.batch_size is not None and facts.batch_size < number:
        problems.append(
            f"pp_microbatches={number} with batches of {facts.batch_size} rows on each data-parallel rank: a "
            f"microbatch has at least one. Use pp_microbatches={facts.batch_size} or less, or larger batches."
        )
    if not problems and facts.num_layers is not None and asked.split is None:
        stages = pp * chunks_per_rank(schedule, asked.num_chunks)
        if stages > facts.num_layers:
            problems.append(
                f"pp={pp} with {stages // pp} chunks a rank are {stages} stages for {facts.num_layers} "
                f"layers: each stage has at least one. Allowed: pp times chunks up to {facts.num_layers}. "
                "Lower pp or pp_chunks."
            )
    return problems
