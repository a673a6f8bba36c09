"""A model of Hugging Face, trained by the command and given back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from titanplug.models import Transformer, TransformerConfig
from titanplug.models.hf_commands import export_checkpoint, import_directory
from titanplug.modules import LanguageModel

ROOT = Path(__file__).parents[2]
TEXT = "\n".join(f"line {n} of a text that is easy to learn" for n in range(300))


def make_model(path: Path) -> None:
    """A small model with its tokenizer, as save_pretrained writes it."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = Qwen3Config(vocab_size=300, tie_word_embeddings=True, eos_token_id=0, **sizes, **heads)
    Qwen3ForCausalLM(config).save_pretrained(path, max_shard_size="20KB")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=["<eos>"], initial_alphabet=letters)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))


def test_from_a_directory_over_a_pipeline_to_a_directory(run_dir: Path) -> None:
    make_model(Path("models/tiny"))
    Path("small.txt").write_text(TEXT)
    import_directory(Path("models/tiny"), Path("checkpoints/tiny"))
    command = (
        "train model=hf model.init_from=checkpoints/tiny tokenizer=hf tokenizer.path=checkpoints/tiny/hf "
        "data=text data.path=small.txt data.cache_dir=cache data.seq_len=32 data.batch_size=4 trainer=cpu "
        "trainer.devices=2 parallelism=pp parallelism.pp_microbatches=4 parallelism.meta_init=true "
        "trainer.max_steps=2 logger=none optim.lr=0.0005 scheduler=none trainer.limit_val_batches=2"
    )
    process = subprocess.run(
        [sys.executable, "-m", "titanplug.cli", *command.split()],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    (run,) = Path("runs/train").iterdir()
    model = yaml.safe_load((run / "config.yaml").read_text())["model"]
    assert (model["num_layers"], model["init_from"]) == (4, "checkpoints/tiny")

    checkpoint = run / "checkpoints" / "last.ckpt"
    export_checkpoint(str(checkpoint), Path("models/trained"), tokenizer=Path("checkpoints/tiny/hf"))
    theirs = AutoModelForCausalLM.from_pretrained("models/trained", attn_implementation="eager").eval()
    assert isinstance(theirs, Qwen3ForCausalLM) and theirs.config.eos_token_id == 0
    assert Path("models/trained/tokenizer.json").exists()
    trained = LanguageModel.load_from_checkpoint(checkpoint)
    assert trained.model is not None
    ids = torch.randint(0, 300, (2, 20))
    with torch.no_grad():
        expected = theirs(ids).logits
        assert (trained.model(ids) - expected).abs().max() < 2e-5 * expected.abs().max()
        first = Transformer(TransformerConfig.from_fields({k: v for k, v in model.items() if k[0] != "_"}))
        moved = (first(ids) - expected).abs().max() / expected.abs().max()
    assert 1e-3 < moved < 0.4  # two steps away from where it began, and not from somewhere else
