"""The Transformer and its parallel plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanplug.errors import ConfigError
from titanplug.models.attention import Attention, SequenceContext
from titanplug.models.config import TransformerConfig
from titanplug.models.layers import Embedding, Linear, RMSNorm
from titanplug.models.rotary import Rotary
from titanplug.parallel.active_sequence import active_sequence
from titanplug.plan import (
    ColwiseParallel,
    ParallelPlan,
    PipelineOrder,
    PrepareModuleInput,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
    Style,
)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): ``w2(silu(w1(x)) * w3(x))``.

    Args:
        config: the model's.
        output_std: standard deviation of the initial weight of ``w2``.
    """

    def __init__(self, config: TransformerConfig, output_std: float) -> None:
        super().__init__()
        self.w1 = Linear(config.dim, config.hidden_dim, init_std=config.init_std)
        self.w2 = Linear(config.hidden_dim, config.dim, init_std=output_std)
        self.w3 = Linear(config.dim, config.hidden_dim, init_std=config.init_std)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream.

    Args:
        config: the model's.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        depth = math.sqrt(2 * config.num_layers) if config.depth_scaled_init else 1.0
        output_std = config.init_std / depth
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, output_std)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config, output_std)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        x = x + self.attention(self.attention_norm(x), context)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Transformer(nn.Module):
    """A decoder-only language model of the Llama, Mistral, Qwen2 or Qwen3 family.

    Built for real it starts with the weights in ``config.init_from``, else with initial weights from
    the global generator; built on the meta device it costs nothing. It has no buffers.

    Args:
        config: sizes and family.

    Raises:
        ConfigError: ``config.init_from`` holds no weights, or those of another model; on the meta device
            too, though nothing but sizes is read then.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.rotary = Rotary(config.head_size, config.rope_theta, config.rope_scaling)
        self.tok_embeddings = Embedding(config.vocab_size, config.dim, init_std=config.init_std)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.num_layers)})
        self.norm = RMSNorm(config.dim, config.norm_eps)
        if config.tie_embeddings:
            with torch.device("meta"):  # its own weight would be thrown away at once
                self.output = Linear(config.dim, config.vocab_size, init_std=config.init_std)
            self.output.weight = self.tok_embeddings.weight
        else:
            self.output = Linear(config.dim, config.vocab_size, init_std=config.init_std)
        weights = self.initial_weights()
        if weights is not None and not self.norm.weight.is_meta:
            with torch.no_grad():
                for name, parameter in self.named_parameters():
                    parameter.copy_(weights[name])

    def initial_weights(self) -> Mapping[str, Tensor] | None:
        """What the weights start from, by their names, each read when it is asked for; None: at random.

        Raises:
            ConfigError: ``config.init_from`` holds no weights, or those of another model.
        """
        if self.config.init_from is None:
            return None
        from titanplug.models.initial_weights import open_weights

        return open_weights(self.config)

    def init_weights(self) -> None:
        """Fills every parameter from the global generator, in the order of the constructor."""
        tied = self.output if self.config.tie_embeddings else None
        for module in self.modules():
            if isinstance(module, Linear | Embedding | RMSNorm) and module is not tied:
                module.init_weights()

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Scores of the next token after each token.

        Args:
            input_ids: (B, S) int64. On a later pipeline stage, whose ``tok_embeddings`` passes its
                input on, the hidden states of the stage before.
            positions: (B, S) int64, where in its text each token stands; None: 0 to S - 1.
            document_ids: (B, S) int64, equal for the tokens of one document; None: one document a
                row. A token sees its own document only, and what is before it there.

        Returns:
            Logits, (B, S, V).

        Raises:
            ConfigError: a sequence longer than ``max_seq_len``; positions or document ids that are
                not (B, S).
        """
        active = active_sequence(input_ids.shape[1])
        length = input_ids.shape[1] if active is None else active.shards.length
        limit = self.config.max_seq_len
        if length > limit:
            raise ConfigError(
                f"input_ids holds sequences of {length} tokens. The model takes at most "
                f"max_seq_len={limit}. Shorten the sequences, or raise max_seq_len."
            )
        context = SequenceContext(self.rotary, positions, document_ids)
        hidden = self.tok_embeddings(input_ids)  # (B, S, D)
        for layer in self.layers.values():
            hidden = layer(hidden, context)
        logits: Tensor = self.output(self.norm(hidden))
        return logits

    def parallel_plan(self) -> ParallelPlan:
        """How the model is split: names are relative to the model."""
        tensor: dict[str, Style] = {
            "tok_embeddings": RowwiseParallel(output="sequence"),
            "layers.*.attention_norm": SequenceParallel(),
            "layers.*.attention": PrepareModuleInput(),
            "layers.*.attention.wq": ColwiseParallel(),
            "layers.*.attention.wk": ColwiseParallel(),
            "layers.*.attention.wv": ColwiseParallel(),
            "layers.*.attention.wo": RowwiseParallel(output="sequence"),
            "layers.*.ffn_norm": SequenceParallel(),
            "layers.*.feed_forward": PrepareModuleInput(),
            "layers.*.feed_forward.w1": ColwiseParallel(),
            "layers.*.feed_forward.w3": ColwiseParallel(),
            "layers.*.feed_forward.w2": RowwiseParallel(output="sequence"),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input="sequence", output="logits"),
        }
        if self.config.qk_norm:
            # A rank norms its own heads only: the gradients of the scale are parts of a sum.
            tensor["layers.*.attention.q_norm"] = ReplicateParallel(partial_grad=True)
            tensor["layers.*.attention.k_norm"] = ReplicateParallel(partial_grad=True)
        return ParallelPlan(
            tensor=tensor,
            fsdp_units=("layers.*",),
            pipeline=PipelineOrder(first=("tok_embeddings",), layers="layers", last=("norm", "output")),
            sequence_dims={"input_ids": 1, "positions": 1, "document_ids": 1},
            checkpoint_units=("layers.*",),
            heads=(self.config.num_heads, self.config.kv_heads),
        )


def num_parameters(config: TransformerConfig) -> int:
    """Number of parameters of a model, a shared one counted once. Nothing is allocated."""
    with torch.device("meta"):
        model = Transformer(replace(config, init_from=None))
    return sum(parameter.numel() for parameter in model.parameters())
