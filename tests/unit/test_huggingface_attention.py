"""transformers models through titanplug's attention, on one process: the results of their own."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from titanplug.attention import huggingface
from titanplug.attention.huggingface import sequence_dims, use_attention
from titanplug.attention.mask import TokenMask
from titanplug.errors import ConfigError

VOCAB, BATCH, SEQ = 33, 2, 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
# Every second kind of layer of Qwen3 has a window.
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
KINDS: dict[str, Any] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=8)),
    "qwen3 windows": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=8, **WINDOWS)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=4)),
}
MASK = torch.ones(BATCH, SEQ, dtype=torch.long)
RIGHT, LEFT = MASK.clone(), MASK.clone()
RIGHT[0, 8:] = 0
LEFT[1, :5] = 0
PACKED = torch.tensor([[*range(5), *range(7)], [*range(3), *range(4), *range(5)]])
INPUTS: dict[str, dict[str, Tensor]] = {
    "plain": {},
    "all ones": {"attention_mask": MASK},
    "right": {"attention_mask": RIGHT},
    "left": {"attention_mask": LEFT},
    "left, counted": {"attention_mask": LEFT, "position_ids": (LEFT.cumsum(1) - 1).clamp_min(0)},
    "packed": {"position_ids": PACKED},
    "one row of positions": {"position_ids": torch.arange(SEQ)[None] + 2},
}


def build(kind: str = "llama") -> Any:
    torch.manual_seed(0)
    return KINDS[kind]().double().eval()


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, logits: Tensor, real: Tensor) -> dict[str, Tensor]:
    F.cross_entropy(logits[real], tokens()[real]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_results_of_sdpa(kind: str, inputs: str) -> None:
    model, own = use_attention(build(kind)), build(kind)
    own.set_attn_implementation("sdpa")
    given = INPUTS[inputs]
    real = given.get("attention_mask", MASK).bool()
    logits, expected = model(tokens(), **given).logits, own(tokens(), use_cache=False, **given).logits
    assert (logits - expected)[real].abs().max() < 1e-12
    grads, wanted = gradients(model, logits, real), gradients(own, expected, real)
    assert all((grads[name] - grad).abs().max() < 1e-12 for name, grad in wanted.items())
    assert not huggingface._masks, "masks outlive the model's call"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given_as", ["positions", "documents"])
def test_padded_and_packed(kind: str, given_as: str) -> None:
    """Each document gives what it gives alone; transformers itself doesn't combine the two."""
    model = use_attention(build(kind))
    mask = MASK.clone()
    mask[:, 10:] = 0
    packed = {"position_ids": PACKED}
    if given_as == "documents":
        packed["document_ids"] = (PACKED == 0).cumsum(1) + 7
    logits = model(tokens(), attention_mask=mask, **packed).logits
    for row, start, stop in [(0, 0, 5), (0, 5, 10), (1, 0, 3), (1, 3, 7), (1, 7, 10)]:
        alone = model(tokens()[row : row + 1, start:stop]).logits[0]
        assert (logits[row, start:stop] - alone).abs().max() < 1e-12


def test_positional_arguments_and_embeddings() -> None:
    model = use_attention(build())
    expected = model(tokens(), attention_mask=LEFT, position_ids=PACKED).logits
    assert torch.equal(model(tokens(), LEFT, PACKED).logits, expected)
    embedded = model.model.embed_tokens(tokens())
    assert torch.equal(
        model(inputs_embeds=embedded, attention_mask=LEFT, position_ids=PACKED).logits, expected
    )


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("inputs", ["left", "plain"])
def test_layers_share_their_masks(inputs: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One mask for each kind of layer in a pass, also where layers are computed again."""
    built = []
    build_bias = TokenMask._build
    monkeypatch.setattr(TokenMask, "_build", lambda *args: built.append(args) or build_bias(*args))
    model = use_attention(build("qwen3 windows")).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    kinds = 2 if inputs == "left" else 1  # a plain causal mask is none
    for number in (1, 2):
        model(tokens(), **INPUTS[inputs]).logits.sum().backward()
        assert len(built) == number * kinds
    gc.collect()
    assert not huggingface._masks


def test_a_copy_computes_with_its_own_weights() -> None:
    model = use_attention(use_attention(build()))
    assert len(model._forward_pre_hooks) == 1
    assert not model.config.use_cache
    other = copy.deepcopy(model)
    nn.init.zeros_(other.lm_head.weight)
    assert other(tokens()).logits.abs().max() == 0 < model(tokens()).logits.abs().max()


def test_switching_back() -> None:
    model, own = use_attention(build()), build()
    model.set_attn_implementation("sdpa")
    expected = own.generate(tokens(), max_new_tokens=4, do_sample=False, attention_mask=MASK)
    generated = model.generate(tokens(), max_new_tokens=4, do_sample=False, attention_mask=MASK)
    assert torch.equal(generated, expected)


def test_generating_without_a_cache() -> None:
    model, own = use_attention(build()), build()
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": False, "attention_mask": LEFT}
    assert torch.equal(model.generate(tokens(), **options), own.generate(tokens(), **options))
    with pytest.raises(ConfigError, match="was given a cache.*use_cache=False"):
        model.generate(tokens(), max_new_tokens=4, attention_mask=MASK, use_cache=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_mask": torch.ones(BATCH, 1, SEQ, SEQ)}, r"attention_mask of \(2, 1, 12, 12\)"),
        ({"attention_mask": {"full_attention": MASK}}, "attention_mask of type dict"),
        ({"attention_mask": MASK[:, 1:]}, r"attention_mask of \(2, 11\)"),
        ({"position_ids": PACKED.expand(3, -1, -1)}, r"position_ids of \(3, 2, 12\).*takes \(2, 12\)"),
        ({"document_ids": PACKED[0]}, r"document_ids of \(12,\)"),
        ({"cu_seq_lens_q": torch.tensor([0, 5, 12])}, "cu_seq_lens_q without position_ids"),
    ],
)
def test_what_says_it_wrong(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        use_attention(build())(tokens(), **given)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"softcap": 50.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "attention sinks"),
        ({"head_mask": torch.ones(4)}, "head_mask"),
        ({"position_bias": torch.zeros(1, 4, 3, 3), "softcap": 1.0}, "softcap.* and .*position_bias"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "attention_mask"),
        ({"sliding_window": 2, "is_causal": False}, "window=2 with causal=False"),
    ],
)
def test_what_it_cannot_do(asked: dict[str, Any], message: str) -> None:
    heads = torch.zeros(1, 4, 3, 8)
    options = {"attention_mask": None, "document_ids": None, **asked}
    with pytest.raises(ConfigError, match=message):
        huggingface.attention(nn.Identity(), heads, heads, heads, **options)


def test_what_a_layer_says() -> None:
    """Scale, dropout and whether it is causal; shapes as transformers has them."""
    query = torch.rand(1, 4, 3, 8, dtype=torch.float64)
    key, value = query[:, :2] + 1, query[:, 2:, :, :5]
    layer, options = nn.Identity(), {"scaling": 0.7, "dropout": 0.5, "document_ids": None}
    for causal in (True, False):
        torch.manual_seed(5)
        expected = F.scaled_dot_product_attention(
            query, key, value, scale=0.7, dropout_p=0.5, is_causal=causal, enable_gqa=True
        )
        torch.manual_seed(5)
        layer.is_causal = causal
        output, weights = huggingface.attention(layer, query, key, value, None, **options)
        assert torch.equal(output, expected.transpose(1, 2)) and weights is None
        torch.manual_seed(5)
        layer.is_causal = not causal
        output, _ = huggingface.attention(layer, query, key, value, None, is_causal=causal, **options)
        assert torch.equal(output, expected.transpose(1, 2))


def test_models_that_ask_for_what_it_cannot_do() -> None:
    gemma = hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZES, head_dim=8, attn_implementation="eager"))
    with pytest.raises(ConfigError, match="Gemma2Attention asks for soft-capped scores"):
        use_attention(gemma)(tokens())
    gpt = hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None)
    ).eval()
    expected = gpt(tokens(), use_cache=False).logits
    with pytest.raises(ConfigError, match="learned positions.*Pass position_ids"):
        use_attention(gpt)(tokens())
    assert torch.allclose(gpt(tokens(), position_ids=torch.arange(SEQ)).logits, expected, atol=1e-5)
    with pytest.raises(ConfigError, match="BloomForCausalLM.forward must take position_ids"):
        use_attention(hf.BloomForCausalLM(hf.BloomConfig(vocab_size=VOCAB, hidden_size=8, n_layer=1)))
    chunked = hf.Llama4TextConfig(**SIZES, head_dim=8, num_local_experts=2)
    with pytest.raises(ConfigError, match="layers of the kinds chunked_attention"):
        use_attention(hf.Llama4ForCausalLM(chunked))
    with torch.device("meta"):
        texts = hf.LlamaConfig(**SIZES)
        llava = hf.LlavaForConditionalGeneration(
            hf.LlavaConfig(text_config=texts, vision_config=hf.CLIPVisionConfig(num_hidden_layers=1))
        )
    with pytest.raises(ConfigError, match="consists of several models .vision_config, text_config"):
        use_attention(llava)
    with pytest.raises(ConfigError, match="Linear: it takes a model of transformers"):
        use_attention(nn.Linear(2, 2))


def test_a_rule_of_the_models_own() -> None:
    options: dict[str, Any] = {
        "config": use_attention(build()).config,
        "inputs_embeds": torch.zeros(BATCH, SEQ, 8),
        "attention_mask": MASK,
        "cache": None,
    }
    assert hf.masking_utils.create_causal_mask(**options) is None
    assert hf.masking_utils.create_bidirectional_mask(**options) is None
    with pytest.raises(ConfigError, match="rule of its own"):
        hf.masking_utils.create_causal_mask(**options, block_sequence_ids=MASK)
    with pytest.raises(ConfigError, match="rule of its own"):
        hf.masking_utils.create_bidirectional_mask(**options, or_mask_function=lambda *_: MASK.bool())


def test_around_the_hook() -> None:
    """Nothing else makes positions and documents whole, so silence would be wrong."""
    model = use_attention(build())
    with pytest.raises(ConfigError, match="wasn't told the document_ids"):
        model.model(tokens())
    with pytest.raises(ConfigError, match="wasn't told the document_ids"):
        model.forward(tokens())


def test_sequence_dims() -> None:
    assert sequence_dims("net.model")["net.model.document_ids"] == 1
    assert "input_ids" in sequence_dims("")
