"""Runs a schedule on one rank: forwards, backwards and the messages between stages.

The order of everything, messages included, is the table's (:mod:`titanplug.schedules.catalogue`).
Receives are started where the table has them and waited for where the tensor is needed; sends are never
waited for before the end. A microbatch may have any shape: the first time that a stage sees a new one, its
neighbour sends a header with the shape of the hidden states; after that both know it.

Gradients are added up on the parameters; nothing is scaled, the weight of each microbatch is in its loss.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanplug.compat import split_backward
from titanplug.errors import TitanplugError
from titanplug.parallel.local_parameter import graph_leaf, hand_over_gradient
from titanplug.parallel.pipeline.stages import PipelineStages
from titanplug.schedules.catalogue import Action, ScheduleTable, Work
from titanplug.schedules.simulate import TimedAction

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HEADER_LENGTH = 16
_NAMES = {
    Work.FORWARD: "forward",
    Work.BACKWARD: "backward",
    Work.BACKWARD_INPUT: "backward of the input",
    Work.BACKWARD_WEIGHT: "backward of the weights",
}
Key = tuple[int, int]
"""A stage and a microbatch."""


@dataclass(frozen=True)
class HiddenSpec:
    """What travels between two stages for one microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def fits(self, hidden: Tensor) -> bool:
        """Whether a tensor is of this kind."""
        alike = hidden.shape == self.shape and hidden.dtype == self.dtype
        return alike and hidden.requires_grad == self.requires_grad


class PipelineRuntime:
    """One rank's end of the pipeline.

    Args:
        stages: what this rank holds.
        group: process group of the ``pp`` axis.
        device: this rank's device.
    """

    def __init__(self, stages: PipelineStages, group: dist.ProcessGroup, device: torch.device) -> None:
        self._stages = stages
        self._group = group
        self._device = device
        self._ranks = dist.get_process_group_ranks(group)
        self._specs: dict[tuple[int, Hashable], HiddenSpec] = {}
        self._seen: set[Hashable] = set()
        """Shapes for which the model's output has been checked."""
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        self._on_cpu = device.type == "cpu"
        self.timed: list[TimedAction] | None = None
        """Set to a list, each computation is timed into it."""
        # The first messages of a group need all of its ranks on some backends.
        dist.all_reduce(torch.zeros(1, device=device), group=group)

    def run(
        self,
        table: ScheduleTable,
        run_stage: Callable[[int, int, Tensor | None], Tensor],
        signatures: Sequence[Hashable],
        *,
        train: bool,
    ) -> None:
        """Run one batch.

        Args:
            table: the schedule.
            run_stage: ``(stage, microbatch, received) -> output``: the forward of one stage. The output of
                the last stage is its loss as it goes into backward.
            signatures: for each microbatch what the shapes of its hidden states depend on, equal on all
                ranks of the axis.
            train: run backwards, too.

        Raises:
            Exception: what the user's code raised, with a note that names the stage.
        """
        batch = _Batch(self, run_stage, [(signature, train) for signature in signatures], train)
        for action in table.rows[self._stages.rank]:
            try:
                batch.act(action)
                if self.timed is not None and action.work in _NAMES:
                    self.timed.append(
                        TimedAction(
                            action.stage, action.work, action.microbatch, batch.started_s, self._now_s()
                        )
                    )
            except BaseException as error:
                error.add_note(self._where(action))
                raise
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def _where(self, action: Action) -> str:
        stages, bounds = self._stages, self._stages.bounds[action.stage]
        names = stages.names
        return (
            f"In pipeline stage {action.stage} of {stages.num_stages} ({names[bounds.start]} to "
            f"{names[bounds.stop - 1]}) on pp rank {stages.rank}, {_NAMES.get(action.work, 'message')} of "
            f"microbatch {action.microbatch}."
        )

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # only while computations are timed
        return time.perf_counter()

    # ---------------------------------------------------------------- messages

    def send(self, tensor: Tensor, stage: int) -> None:
        """Start to send to the rank of another stage."""
        tensor = tensor.contiguous()
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()  # its tensor may go
        self._sends.append((self._start(dist.isend, tensor, stage), tensor))

    def receive(self, tensor: Tensor, stage: int) -> dist.Work:
        """Start to receive from the rank of another stage."""
        return self._start(dist.irecv, tensor, stage)

    def _start(self, operation: Any, tensor: Tensor, stage: int) -> dist.Work:
        peer = self._ranks[self._stages.stage_to_rank[stage]]
        if self._on_cpu:
            work: dist.Work = operation(tensor, peer, self._group)
            return work
        # On the group's own communicator; a plain send would make one for each pair of ranks.
        works = dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, self._group)])
        return works[0]

    def send_spec(self, stage: int, signature: Hashable, hidden: Tensor) -> None:
        """Tell the next stage what comes, where it can't know it.

        Raises:
            TitanplugError: it expects something else.
        """
        known = self._specs.get((stage, signature))
        if known is not None and known.fits(hidden):
            return
        spec = HiddenSpec(tuple(hidden.shape), hidden.dtype, hidden.requires_grad)
        if known is None:
            self._require_finite(stage, hidden)
            self._specs[stage, signature] = spec
            self.send(_header(spec, self._device), stage + 1)
        else:
            raise TitanplugError(
                f"stage {stage} sends hidden states {spec} where it sent {known} for a batch of the same "
                "shapes. The next stage must know their shape beforehand, so it may depend on the shapes in "
                "the batch only, not on its values. Pad instead of leaving out, or use pp=1."
            )

    def receive_spec(self, stage: int, signature: Hashable) -> HiddenSpec:
        """What the stage before ``stage`` sends for batches of these shapes."""
        known = self._specs.get((stage - 1, signature))
        if known is None:
            header = torch.empty(_HEADER_LENGTH, dtype=torch.int64, device=self._device)
            self.receive(header, stage - 1).wait()
            known = self._specs[stage - 1, signature] = _read_header(header)
        return known

    @contextmanager
    def watch_output(self, stage: int, signature: Hashable) -> Iterator[None]:
        """Check what the model returns on the last stage, for the first batch of these shapes."""
        last = stage == self._stages.num_stages - 1
        if not last or signature in self._seen:
            yield
            return
        self._stages.on_output = partial(self._require_finite, stage)
        try:
            yield
        finally:
            self._stages.on_output = None
        self._seen.add(signature)

    def _require_finite(self, stage: int, hidden: Any) -> None:
        if isinstance(hidden, Tensor) and hidden.isnan().any():
            names, bounds = self._stages.names, self._stages.bounds[stage]
            raise TitanplugError(
                f"what stage {stage} ({names[bounds.start]} to {names[bounds.stop - 1]}) computed is NaN. "
                "Between stages only the first argument of a layer travels; whatever else is used of earlier "
                "modules (a skip connection, a residual sum outside of the layer, a second output) is NaN in "
                "its place, so that nothing is silently wrong. Let the layers pass on one tensor, cut so "
                "that such a connection stays in one stage (pp_split), or use pp=1. If the model itself "
                "gives NaN, pp=1 does so, too."
            )


class _Batch:
    """One batch on its way through this rank's stages."""

    def __init__(
        self,
        runtime: PipelineRuntime,
        run_stage: Callable[[int, int, Tensor | None], Tensor],
        signatures: Sequence[Hashable],
        train: bool,
    ) -> None:
        self._runtime = runtime
        self._stages = runtime._stages
        self._run_stage = run_stage
        self._signatures = signatures
        self._train = train
        self._inputs: dict[Key, tuple[Tensor, dist.Work | None]] = {}
        self._outputs: dict[Key, Tensor] = {}
        self._graphs: dict[Key, tuple[Tensor | None, Tensor]] = {}
        self._output_grads: dict[Key, tuple[Tensor, dist.Work | None]] = {}
        self._input_grads: dict[Key, Tensor] = {}
        self._weight_work: dict[Key, Any] = {}
        self.started_s = 0.0
        """When the latest computation began, after what it needs had arrived; where they are timed."""
        self._do = {
            Work.FORWARD: self._forward,
            Work.BACKWARD: self._backward,
            Work.BACKWARD_INPUT: self._backward_input,
            Work.BACKWARD_WEIGHT: self._backward_weight,
            Work.SEND_F: self._send_hidden,
            Work.RECV_F: self._receive_hidden,
            Work.SEND_B: self._send_grad,
            Work.RECV_B: self._receive_grad,
        }

    def act(self, action: Action) -> None:
        """Carry out one action of the table."""
        if self._runtime.timed is not None:
            self.started_s = self._runtime._now_s()
        self._do[action.work](action.stage, action.microbatch)

    def _wait(self, work: dist.Work | None) -> None:
        if work is not None:
            work.wait()
            if self._runtime.timed is not None:
                self.started_s = self._runtime._now_s()

    def _is_here(self, stage: int) -> bool:
        return self._stages.stage_to_rank[stage] == self._stages.rank

    # ---------------------------------------------------------------- forward

    def _receive_hidden(self, stage: int, microbatch: int) -> None:
        spec = self._runtime.receive_spec(stage, self._signatures[microbatch])
        hidden = torch.empty(spec.shape, dtype=spec.dtype, device=self._runtime._device)
        self._inputs[stage, microbatch] = hidden, self._runtime.receive(hidden, stage - 1)
        if self._train and spec.requires_grad:
            hidden.requires_grad_()

    def _forward(self, stage: int, microbatch: int) -> None:
        received: Tensor | None = None
        if stage > 0:
            if self._is_here(stage - 1):
                before = self._outputs.pop((stage - 1, microbatch))
                received = before.detach().requires_grad_(self._train and before.requires_grad)
            else:
                received, work = self._inputs.pop((stage, microbatch))
                self._wait(work)
        with self._runtime.watch_output(stage, self._signatures[microbatch]):
            output = self._run_stage(stage, microbatch, received)
        if stage < self._stages.num_stages - 1:
            self._outputs[stage, microbatch] = output
        if self._train:
            self._graphs[stage, microbatch] = received, output

    def _send_hidden(self, stage: int, microbatch: int) -> None:
        hidden = self._outputs.pop((stage, microbatch))
        self._runtime.send_spec(stage, self._signatures[microbatch], hidden)
        self._runtime.send(hidden.detach(), stage + 1)

    # ---------------------------------------------------------------- backward

    def _receive_grad(self, stage: int, microbatch: int) -> None:
        output = self._graphs[stage, microbatch][1]
        if output.requires_grad:
            grad = torch.empty(output.shape, dtype=output.dtype, device=output.device)
            self._output_grads[stage, microbatch] = grad, self._runtime.receive(grad, stage + 1)

    def _output_grad(self, stage: int, microbatch: int) -> Tensor | None:
        """Gradient of a stage's output; None for the loss, and where nothing needs one."""
        if stage == self._stages.num_stages - 1:
            return None
        if self._is_here(stage + 1):
            return self._input_grads.pop((stage + 1, microbatch), None)
        grad, work = self._output_grads.pop((stage, microbatch), (None, None))
        self._wait(work)
        return grad

    def _backward(self, stage: int, microbatch: int) -> None:
        received, output = self._graphs.pop((stage, microbatch))
        grad = self._output_grad(stage, microbatch)
        if output.requires_grad:
            torch.autograd.backward((output,), (grad,))
        self._keep_input_grad(stage, microbatch, received)

    def _backward_input(self, stage: int, microbatch: int) -> None:
        received, output = self._graphs.pop((stage, microbatch))
        grad = self._output_grad(stage, microbatch)
        if received is None or not received.requires_grad or not output.requires_grad:
            # Nobody waits for the gradient of an input: all of it is done with the weights.
            self._weight_work[stage, microbatch] = output, grad
            return
        leaves = [graph_leaf(parameter) for parameter in self._stages.parameters_of(stage)]
        needed = [leaf for leaf in leaves if leaf.requires_grad]
        # torch detaches the output in place, which a view doesn't allow.
        output = output.clone() if output._is_view() else output
        grads = [torch.ones_like(output)] if grad is None else [grad]
        backward_input, _ = split_backward()
        _, groups = backward_input([output], grads, [received], iter(needed))
        self._weight_work[stage, microbatch] = groups
        self._keep_input_grad(stage, microbatch, received)

    def _backward_weight(self, stage: int, microbatch: int) -> None:
        work = self._weight_work.pop((stage, microbatch))
        if isinstance(work, tuple):
            output, grad = work
            if output.requires_grad:
                torch.autograd.backward((output,), (grad,))
            return
        parameters = self._stages.parameters_of(stage)
        leaves = [graph_leaf(parameter) for parameter in parameters]
        _, backward_weight = split_backward()
        backward_weight(iter([leaf for leaf in leaves if leaf.requires_grad]), work)
        for parameter, leaf in zip(parameters, leaves, strict=True):
            hand_over_gradient(parameter, leaf)

    def _keep_input_grad(self, stage: int, microbatch: int, received: Tensor | None) -> None:
        if received is not None and received.requires_grad:
            grad, received.grad = received.grad, None
            self._input_grads[stage, microbatch] = torch.zeros_like(received) if grad is None else grad

    def _send_grad(self, stage: int, microbatch: int) -> None:
        grad = self._input_grads.pop((stage, microbatch), None)
        if grad is not None:
            self._runtime.send(grad.detach(), stage - 1)


def _header(spec: HiddenSpec, device: torch.device) -> Tensor:
    if spec.dtype not in _DTYPES or len(spec.shape) > _HEADER_LENGTH - 3:
        raise TitanplugError(
            f"stages can't send hidden states {spec}: they are floating-point tensors of at most "
            f"{_HEADER_LENGTH - 3} dims. Cut elsewhere (pp_split)."
        )
    numbers = [_DTYPES.index(spec.dtype), int(spec.requires_grad), len(spec.shape), *spec.shape]
    padded = numbers + [0] * (_HEADER_LENGTH - len(numbers))
    return torch.tensor(padded, dtype=torch.int64, device=device)


def _read_header(header: Tensor) -> HiddenSpec:
    dtype, requires_grad, ndim, *shape = header.tolist()
    return HiddenSpec(tuple(shape[:ndim]), _DTYPES[dtype], bool(requires_grad))
