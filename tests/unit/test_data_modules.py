"""The data module for text: batches, splits, errors, cache, configuration groups."""

import inspect
import json
from pathlib import Path

import hydra
import lightning as L
import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import SequentialSampler

import titanplug.data
from titanplug.data import (
    IGNORED_LABEL,
    BPETokenizer,
    ByteTokenizer,
    HFDataModule,
    HFTokenizer,
    StatefulDataLoader,
    TextDataModule,
)
from titanplug.data.cache import publish_folder, resolve_cache_dir
from titanplug.data.loaders import EpochRandomSampler
from titanplug.errors import ConfigError, TitanplugError

CONF = Path(__file__).parents[2] / "conf"
TEXT = "".join(f"line {i} of a text with — some — more bytes than characters\n" for i in range(60))


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture
def build(tmp_path, text_file):
    def build(tokenizer=None, **options):
        tokenizer = tokenizer or ByteTokenizer()
        defaults = {"path": text_file, "seq_len": 16, "batch_size": 4, "cache_dir": str(tmp_path)}
        return TextDataModule(tokenizer, **(defaults | options))

    return build


def test_batches_have_the_format_and_every_byte_of_evaluation_counts(build):
    datamodule = build(BPETokenizer(300), eval_batch_size=3)
    assert datamodule.vocab_size == 300  # before anything is read
    datamodule.prepare_data()
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    assert isinstance(loader, StatefulDataLoader) and loader.drop_last
    for batch in loader:
        assert {key: tuple(value.shape) for key, value in batch.items()} == {
            "input_ids": (4, 16),
            "labels": (4, 16),
            "target_bytes": (4,),
        }
        assert all(value.dtype == torch.int64 for value in batch.values())
        assert torch.equal(batch["labels"][:, :-1], batch["input_ids"][:, 1:])
    documents = datamodule.read_documents()
    for split, evaluation in (
        ("validation", datamodule.val_dataloader()),
        ("test", datamodule.test_dataloader()),
        ("test", datamodule.predict_dataloader()),
    ):
        assert isinstance(evaluation.sampler, SequentialSampler)
        batches = list(evaluation)
        assert len(batches[0]["labels"]) == 3
        num_bytes = sum(int(batch["target_bytes"].sum()) for batch in batches)
        assert num_bytes == len(documents[split][0].encode())
        labels = torch.cat([batch["labels"].flatten() for batch in batches])
        labels = labels[labels != IGNORED_LABEL].tolist()
        assert datamodule.tokenizer.decode(labels) == documents[split][0]
    train_bytes = len(documents["train"][0].encode())
    num_tokens = len(datamodule.tokenizer.encode(documents["train"][0])) + 2
    assert datamodule.bytes_per_token == train_bytes / num_tokens


def test_only_training_rows_are_shuffled_and_nothing_is_drawn_from_the_global_state(build):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    orders = []
    for seed in (1, 2):
        datamodule = build(seed=seed, batch_size=1, seq_len=100)  # no two rows alike
        datamodule.setup()
        dataset = datamodule.train_dataloader().dataset
        rows = [tuple(dataset[i]["input_ids"].tolist()) for i in range(len(dataset))]
        loader = datamodule.train_dataloader()
        orders.append([rows.index(tuple(batch["input_ids"][0].tolist())) for batch in loader])
        assert orders[-1] == list(EpochRandomSampler(dataset, seed))
        list(datamodule.val_dataloader())
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    assert torch.equal(torch.get_rng_state(), before)


def test_shipped_text_is_the_default(tmp_path):
    datamodule = TextDataModule(ByteTokenizer(), cache_dir=str(tmp_path))
    datamodule.setup("validate")
    num_bytes = sum(int(batch["target_bytes"].sum()) for batch in datamodule.val_dataloader())
    assert num_bytes == 863_919
    assert datamodule.bytes_per_token == 8_921_252 / (8_921_252 + 196)


def test_rows_can_tell_documents_and_leave_out_borders(build, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": c * 5}) + "\n" for c in "abcdefghijklmnopqrst"))
    datamodule = build(path=str(path), document_ids=True, ignore_border_labels=True, batch_size=1)
    datamodule.setup()
    batch = next(iter(datamodule.train_dataloader()))
    border = batch["input_ids"] == ByteTokenizer.eos_id
    assert batch["document_ids"].max() == 2
    assert (batch["labels"][border] == IGNORED_LABEL).all()


def test_a_second_run_reads_the_cache(build, monkeypatch):
    first = build(BPETokenizer(300))
    first.setup()
    monkeypatch.setattr(BPETokenizer, "_train", None)
    monkeypatch.setattr(BPETokenizer, "encode_documents", None)
    second = build(BPETokenizer(300))
    second.prepare_data()
    second.setup()
    assert second.tokenizer.identity == first.tokenizer.identity
    batches = [next(iter(d.val_dataloader()))["input_ids"] for d in (first, second)]
    assert torch.equal(*batches)


def test_a_faster_process_wins(tmp_path):
    folder = tmp_path / "result"

    def write(name):
        def write(aside):
            (aside / "file").write_text(name)
            if name == "slow":
                publish_folder(folder, write_fast)

        return write

    write_fast = write("fast")
    publish_folder(folder, write("slow"))
    assert (folder / "file").read_text() == "fast"
    assert [p.name for p in tmp_path.iterdir()] == ["result"]

    def fail(aside):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        publish_folder(tmp_path / "other", fail)
    assert [p.name for p in tmp_path.iterdir()] == ["result"]


def test_cache_is_in_the_users_cache_folder_by_default(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert resolve_cache_dir(None) == tmp_path / "titanplug"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert resolve_cache_dir(None) == Path.home() / ".cache" / "titanplug"
    assert resolve_cache_dir("~/x") == Path.home() / "x"


def test_wrong_numbers_are_told_at_once(build):
    with pytest.raises(ConfigError) as caught:
        build(seq_len=1, batch_size=0, eval_batch_size=0, num_workers=-1, seed=-1)
    assert len(caught.value.problems) == 5
    for name in ("seq_len=1", "batch_size=0", "eval_batch_size=0", "num_workers=-1", "seed=-1"):
        assert any(p.startswith(name) for p in caught.value.problems)
    build(seq_len=2, batch_size=1)


def test_wrong_arguments_are_told_before_anything_is_read(build, tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.txt.*there is no such file"):
        build(path=str(tmp_path / "nowhere.txt"))
    with pytest.raises(ConfigError, match=r"validation_fraction=1\.5"):
        build(validation_fraction=1.5)
    with pytest.raises(ConfigError, match=r"tokenizer='bpe'.*Give BPETokenizer\(\)"):
        build("bpe")


def test_use_before_setup_is_named(build):
    for use in (
        lambda d: d.train_dataloader(),
        lambda d: d.val_dataloader(),
        lambda d: d.bytes_per_token,
    ):
        with pytest.raises(TitanplugError, match="not loaded yet. Call setup"):
            use(build())


def test_empty_splits_are_errors_where_they_are_needed(build, tmp_path):
    datamodule = build(validation_fraction=0.0)
    datamodule.setup("fit")
    assert datamodule.val_dataloader() == []
    with pytest.raises(ConfigError, match=r"validation split has no documents; .*\['test', 'train'\]"):
        datamodule.setup("validate")
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a" * 1000, "split": "training"}) + "\n")
    datamodule = build(path=str(path), split_key="split")
    with pytest.raises(ConfigError, match="train split has no documents"):
        datamodule.setup("fit")
    datamodule = build(path=str(path), split_key="split", train_split="training")
    datamodule.setup("fit")
    with pytest.raises(ConfigError, match="test split has no documents"):
        datamodule.setup("test")


def test_too_little_text_for_a_step_is_named(build):
    datamodule = build(seq_len=2000)
    datamodule.setup("fit")
    with pytest.raises(ConfigError, match=r"3\d+ tokens, 1 rows of seq_len=2000: .*batch_size=4 rows"):
        datamodule.train_dataloader()


class Tiny(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen = {"train": 0, "val": 0, "test": 0, "predict": 0}

    def _step(self, stage, batch):
        self.seen[stage] += int(batch["target_bytes"].sum())
        return (self.weight * batch["input_ids"].float().mean()).sum()

    def training_step(self, batch):
        return self._step("train", batch)

    def validation_step(self, batch):
        self._step("val", batch)

    def test_step(self, batch):
        self._step("test", batch)

    def predict_step(self, batch):
        return self._step("predict", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-5)


def build_trainer(folder):
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def test_a_trainer_runs_every_stage_on_it(build, tmp_path):
    datamodule = build(BPETokenizer(300))
    for stage, run in (("val", "validate"), ("test", "test"), ("predict", "predict")):
        module = Tiny()
        getattr(build_trainer(tmp_path), run)(module, datamodule=datamodule)
        split = "validation" if stage == "val" else "test"
        assert module.seen[stage] == len(datamodule.read_documents()[split][0].encode())
    module = Tiny()
    build_trainer(tmp_path).fit(module, datamodule=datamodule)
    assert module.seen["train"] > 0 and module.seen["val"] > 0
    without = build(validation_fraction=0.0)
    module = Tiny()
    build_trainer(tmp_path).fit(module, datamodule=without)
    assert module.seen["train"] > 0 and module.seen["val"] == 0


def test_a_checkpoint_is_refused_with_another_tokenizer(build, tmp_path):
    bpe = BPETokenizer(300)
    trainer = build_trainer(tmp_path)
    trainer.fit(Tiny(), datamodule=build(bpe))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ConfigError, match=r"made with another tokenizer.*HFTokenizer\(path\)"):
        build_trainer(tmp_path).validate(
            Tiny(), datamodule=build(BPETokenizer(290)), ckpt_path=tmp_path / "a.ckpt"
        )
    bpe.save(tmp_path / "tokenizer.json")
    same = HFTokenizer(str(tmp_path / "tokenizer.json"))
    build_trainer(tmp_path).validate(Tiny(), datamodule=build(same), ckpt_path=tmp_path / "a.ckpt")


def compose(**groups):
    """The groups put together as the root configuration does."""
    config = {group: OmegaConf.load(CONF / group / f"{name}.yaml") for group, name in groups.items()}
    for options in config.values():
        options.pop("defaults")  # Hydra's: the schema
    return OmegaConf.create({"seed": 7, **config})


@pytest.mark.parametrize("path", sorted(CONF.glob("data/*.yaml")) + sorted(CONF.glob("tokenizer/*.yaml")))
def test_every_configuration_names_only_arguments_and_has_their_defaults(path):
    config = OmegaConf.load(path)
    target = getattr(titanplug.data, config.pop("_target_").removeprefix("titanplug.data."))
    config.pop("_convert_", None)
    config.pop("defaults")  # Hydra's: the schema
    parameters = inspect.signature(target).parameters
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())
    assert set(config) <= set(parameters)
    required = {name for name, p in parameters.items() if p.default is p.empty}
    assert required <= set(config)


def test_configurations_build_what_they_say(tmp_path, text_file):
    config = compose(data="text", tokenizer="bpe")
    config.data.merge_with({"path": text_file, "cache_dir": str(tmp_path), "batch_size": 2})
    datamodule = hydra.utils.instantiate(config.data)
    assert type(datamodule) is TextDataModule and type(datamodule.tokenizer) is BPETokenizer
    assert datamodule.options.seed == 7 and datamodule.options.batch_size == 2
    datamodule = hydra.utils.instantiate(compose(data="sotu", tokenizer="byte").data)
    assert datamodule.path is None and datamodule.json_format.split_key == "split"
    config = compose(data="jsonl", tokenizer="hf")
    config.data.path = text_file
    config.tokenizer.path = str(tmp_path / "nowhere.json")
    with pytest.raises(Exception, match=r"there is no file '.*nowhere\.json'"):
        hydra.utils.instantiate(config.data)
    for name, streaming in (("hf_wikitext103", False), ("hf_c4", True)):
        datamodule = hydra.utils.instantiate(compose(data=name, tokenizer="byte").data)
        assert type(datamodule) is HFDataModule and datamodule.streaming is streaming
