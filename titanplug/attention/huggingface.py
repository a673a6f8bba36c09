"""Attention of transformers models through titanplug, so that they run on parts of a sequence.

A model's positions and masks are made for the whole sequence, before the model's border cuts it
(:mod:`titanplug.parallel.context`), and its attention layers call :func:`dot_product_attention` by the
registry that transformers has for this.

Letters: B batch, S sequence, H heads, Hkv key-value heads, K and V features of a head.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from titanplug.attention.interface import dot_product_attention
from titanplug.attention.mask import TokenMask
from titanplug.compat import require_extra
from titanplug.errors import ConfigError

NAME = "titanplug"
"""What the attention is called in transformers: ``attn_implementation="titanplug"``."""

ModelT = TypeVar("ModelT", bound=nn.Module)

_ARGUMENTS = ("input_ids", "inputs_embeds", "position_ids", "attention_mask", "document_ids")
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
_REFUSED = {
    "softcap": "soft-capped scores (softcap)",
    "s_aux": "attention sinks (s_aux)",
    "sinks": "attention sinks (sinks)",
    "head_mask": "a mask of heads (head_mask)",
    "position_bias": "a bias of positions (position_bias)",
    "block_mask": "a block mask (block_mask)",
    "block_indices": "sparse attention (block_indices)",
    "output_attentions": "weights of attention as an output (output_attentions)",
}
_masks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Of a tensor that the layers of a forward pass have in common, their masks, as long as it lives: until the
model has returned, or under activation checkpointing its last layer was computed again."""


def use_attention(model: ModelT) -> ModelT:
    """Let a transformers model attend through titanplug, in place.

    Its results stay those of ``sdpa`` (at tokens that are padding they are others, and mean nothing in
    either). What the model is called with says which tokens see each other, in any combination:
    ``attention_mask`` (B, S), where tokens that are not 0 see one another only; ``position_ids`` (B, S) that
    restart, where each stretch is a document; ``document_ids`` (B, S). Where none is passed, all of a row is
    one document and the fast paths of a causal mask are used: whether a mask is all ones isn't looked at,
    since on a GPU the process would wait for it. Leave it out where nothing is padded.

    Args:
        model: a ``PreTrainedModel``; the one that the step calls. Its caches are turned off.

    Returns:
        The model.

    Raises:
        ConfigError: the model has attention that can't be replaced, or layers that mix tokens in other ways.
        MissingExtraError: transformers is not installed.
    """
    transformers = require_extra("transformers", "hf")
    kind = type(model).__name__
    if not isinstance(model, transformers.PreTrainedModel):
        raise ConfigError(
            f"use_attention was given {kind}: it takes a model of transformers (a PreTrainedModel), the one "
            "that the step calls. Models of your own call titanplug.attention.dot_product_attention."
        )
    arguments = inspect.signature(type(model).forward).parameters
    if "position_ids" not in arguments or not any(p.kind is p.VAR_KEYWORD for p in arguments.values()):
        raise ConfigError(
            f"{kind}.forward must take position_ids and further keywords to run on a part of the sequence, "
            f"and takes {', '.join(list(arguments)[1:])}. Use cp=1 and leave use_attention out."
        )
    if model.config.sub_configs:
        raise ConfigError(
            f"{kind} consists of several models ({', '.join(model.config.sub_configs)}), which hand tokens "
            "to one another. Use cp=1 and leave use_attention out, or take the text model alone."
        )
    parts = [part for part in model.modules() if isinstance(part, transformers.PreTrainedModel)]
    layers = {layer for part in parts for layer in getattr(part.config, "layer_types", None) or ()}
    if layers - _ATTENTION_LAYERS:
        raise ConfigError(
            f"{kind} has layers of the kinds {', '.join(sorted(layers - _ATTENTION_LAYERS))}, and only "
            f"{', '.join(sorted(_ATTENTION_LAYERS))} run on parts of a sequence. Use cp=1 and leave "
            "use_attention out."
        )
    _register()
    model.set_attn_implementation(NAME)
    for part in parts:
        if part.config._attn_implementation != NAME:
            raise ConfigError(
                f"The attention of {type(part).__name__} can't be replaced: its code doesn't call "
                "transformers' registry of attention functions. Use cp=1 and leave use_attention out."
            )
        part.config.use_cache = False
    if _prepare not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_prepare, with_kwargs=True)
    return model


def sequence_dims(prefix: str = "model") -> dict[str, int | None]:
    """For a plan, the sequence dims of a transformers model that :func:`use_attention` was called on.

    Args:
        prefix: name of the model in the LightningModule.
    """
    return {f"{prefix}.{name}" if prefix else name: 1 for name in _ARGUMENTS}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each attention layer.

    Args:
        module: the layer.
        query: (B, H, S, K).
        key: (B, Hkv, S, K).
        value: (B, Hkv, S, V).
        attention_mask: None; masks are made here.
        dropout: probability of a weight to be dropped.
        scaling: of the scores; None: 1 / sqrt(K).
        sliding_window: a token sees this many tokens, itself included.
        is_causal: None: what the layer says, or True.
        **others: ``document_ids`` (B, S) or None, ``position_ids``, and what else goes down to the layers.

    Returns:
        (B, S, H, V), and no weights.

    Raises:
        ConfigError: something is asked for that titanplug's attention can't do, or the model wasn't called
            through what :func:`use_attention` was given.
    """
    given = {name for name, other in others.items() if other is not None and other is not False}
    refused = [what for name, what in _REFUSED.items() if name in given]
    if attention_mask is not None:
        refused.append("a mask that the model makes itself (attention_mask)")
    if refused:
        raise ConfigError(
            f"{type(module).__name__} asks for {' and '.join(refused)}, which titanplug's attention doesn't "
            'have. Use cp=1 and leave use_attention out, or model.set_attn_implementation("eager").'
        )
    if "document_ids" not in others:
        raise ConfigError(
            f"{type(module).__name__} wasn't told the document_ids. Either the model that use_attention was "
            "given isn't the one that is called (call that one, as a module: its forward alone skips hooks), "
            "or its code doesn't pass keywords down to its attention (use cp=1 and leave use_attention out)."
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask = _mask(others["document_ids"], others.get("position_ids"), bool(causal), sliding_window)
    output = dot_product_attention(query, key, value, mask, dropout_p=dropout, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


def _mask(documents: Tensor | None, positions: Tensor | None, causal: bool, window: int | None) -> TokenMask:
    """The mask of a layer, shared among the layers of a forward pass."""
    of_pass = positions if documents is None else documents
    if of_pass is None or torch.compiler.is_compiling():
        return TokenMask(causal=causal, window=window, document_ids=documents)
    masks: dict[bool, TokenMask] = _masks.setdefault(of_pass, {})
    if causal not in masks:
        # An alias: a mask that held its own key would be held for ever.
        masks[causal] = TokenMask(
            causal=causal, document_ids=None if documents is None else documents.detach()
        )
    return masks[causal].with_window(window)


def _make_no_mask(*_: Any, **options: Any) -> None:
    """What transformers calls for a mask: none, the layers make theirs, unless the model has its own rule."""
    # transformers itself goes without a mask where it allows that: then the rule is causal, or everything.
    plain = options.get("allow_is_causal_skip", True) or options.get("allow_is_bidirectional_skip", False)
    if not plain:
        raise ConfigError(
            "The model has a rule of its own for which tokens see each other (as of images in a text), which "
            "titanplug's attention doesn't have. Use cp=1 and leave use_attention out."
        )


@functools.cache
def _register() -> None:
    transformers = require_extra("transformers", "hf")
    transformers.AttentionInterface.register(NAME, attention)
    transformers.AttentionMaskInterface.register(NAME, _make_no_mask)


def _prepare(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before the model's border, on whole sequences: makes positions and documents explicit."""
    if model.config._attn_implementation != NAME:
        return None  # switched back
    names = list(inspect.signature(type(model).forward).parameters)[1:] if args else []
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tokens = given.get("inputs_embeds") if given.get("input_ids") is None else given["input_ids"]
    if tokens is None:
        return None  # the model says so itself
    _refuse(model, given)
    batch, length = tokens.shape[:2]
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    documents = given.get("document_ids")
    for name, value in (("position_ids", positions), ("attention_mask", mask), ("document_ids", documents)):
        shapes = [(batch, length), (1, length), (length,)] if name == "position_ids" else [(batch, length)]
        if value is not None and (not isinstance(value, Tensor) or tuple(value.shape) not in shapes):
            shown = tuple(value.shape) if isinstance(value, Tensor) else f"type {type(value).__name__}"
            raise ConfigError(
                f"{name} of {shown} given to {type(model).__name__}: titanplug's attention takes "
                f"{(batch, length)}, as of the tokens. In place of a mask of queries and keys pass what it "
                "is made of: attention_mask (padding), position_ids that restart or document_ids."
            )
    if positions is None:
        if not _rope_types(model.config):
            raise ConfigError(
                f"{type(model).__name__} has learned positions, which transformers counts in other ways for "
                "each model. Pass position_ids, for most models torch.arange(S).expand(B, S)."
            )
        positions = torch.arange(length, device=tokens.device)
    elif documents is None:
        documents = _documents(positions.reshape(-1, length)).expand(batch, length)
    if mask is not None:
        real = mask != 0
        documents = real.long() if documents is None else torch.where(real, documents, documents.min() - 1)
    given["position_ids"] = positions.expand(batch, length)
    given["document_ids"] = documents
    # Without a mask transformers looks for documents in the positions, where a process waits for the GPU.
    given["attention_mask"] = torch.ones_like(given["position_ids"]) if mask is None else mask
    return (), given


def _documents(positions: Tensor) -> Tensor:
    """Documents of positions (B, S), told apart as by transformers: where one doesn't follow the last."""
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=1) != 1).cumsum(1)


def _refuse(model: Any, given: dict[str, Any]) -> None:
    from titanplug.parallel.context import ModelBorder

    kind = type(model).__name__
    if given.get("cache") is not None or given.get("past_key_values") is not None:
        raise ConfigError(
            f"{kind} was given a cache, and titanplug's attention has none. Generate with use_cache=False, "
            'or after model.set_attn_implementation("sdpa") on one process.'
        )
    if given.get("cu_seq_lens_q") is not None and given.get("position_ids") is None:
        raise ConfigError(
            f"{kind} was given cu_seq_lens_q without position_ids: titanplug's attention finds packed "
            "documents by position_ids that restart, or document_ids. Pass one of them."
        )
    if not isinstance(vars(model).get("forward"), ModelBorder):
        return
    if given.get("labels") is not None:
        raise ConfigError(
            f"{kind} was given labels under cp > 1, where a rank's call of the model sees a part of the "
            "sequence only. Compute the loss in the step, where logits and labels are whole: "
            "F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())."
        )
    if not isinstance(given.get("logits_to_keep", 0), int) or given.get("logits_to_keep", 0):
        raise ConfigError(
            f"{kind} was given logits_to_keep under cp > 1, which would keep tokens of every rank's part. "
            "Slice the logits in the step."
        )
    dynamic = _rope_types(model.config) & {"dynamic", "longrope"}
    if dynamic:
        raise ConfigError(
            f"{kind} has rotary positions of the type {' and '.join(sorted(dynamic))}, which depend on the "
            "last position of a call: under cp > 1 each rank has another. Use cp=1."
        )


def _rope_types(config: Any) -> set[str]:
    """Kinds of rotary positions, none where positions are learned; one for each kind of layer in some."""
    rope = getattr(config, "rope_parameters", None) or {}
    settings = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return {str(each["rope_type"]) for each in settings if "rope_type" in each}
