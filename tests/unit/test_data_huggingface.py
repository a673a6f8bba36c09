"""Data from the datasets library, on local files in the formats of WikiText and C4."""

import gzip
import json
from itertools import islice

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import get_worker_info

from titanplug.data import (
    BPETokenizer,
    ByteTokenizer,
    HFDataModule,
    PackedStream,
    RowFormat,
    StatefulDataLoader,
    StreamDataLoader,
)
from titanplug.data.hf_documents import HFDocuments
from titanplug.errors import ConfigError, MissingExtraError

datasets = pytest.importorskip("datasets")

ARTICLE = " = Title = \n\n The quick — brown fox . \n It jumped . \n\n = = Part = = \n\n The end . \n"


def write_text_files(folder):
    """As WikiText-103 raw: rows are lines of articles."""
    for split, num_articles in (("train", 30), ("validation", 3), ("test", 2)):
        (folder / f"{split}.txt").write_text(ARTICLE * num_articles)
    return {split: str(folder / f"{split}.txt") for split in ("train", "validation", "test")}


def write_c4_files(folder, num_files=4, num_documents=10):
    """As C4: compressed JSON lines with text, timestamp and url, in several files."""
    for number in range(num_files):
        with gzip.open(folder / f"c4-train.{number:05}.json.gz", "wt") as file:
            for i in range(number * num_documents, (number + 1) * num_documents):
                text = f"<{i}>" + "word " * (i % 7)
                file.write(json.dumps({"text": text, "timestamp": "2019", "url": "u"}) + "\n")
    with gzip.open(folder / "c4-validation.json.gz", "wt") as file:
        for i in range(5):
            file.write(json.dumps({"text": f"validation {i}", "timestamp": "2019", "url": "u"}) + "\n")
    return {
        "train": str(folder / "c4-train.*.json.gz"),
        "validation": str(folder / "c4-validation.json.gz"),
    }


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))


def build(tmp_path, tokenizer=None, **options):
    defaults = {"seq_len": 16, "batch_size": 2, "cache_dir": str(tmp_path)}
    return HFDataModule(tokenizer or ByteTokenizer(), **(defaults | options))


def build_stream(tmp_path, tokenizer=None, **options):
    defaults = {
        "name": "json",
        "data_files": write_c4_files(tmp_path),
        "streaming": True,
        "test_split": None,
        "shuffle_block": 4,
        "batches_per_epoch": 6,
    }
    return build(tmp_path, tokenizer, **(defaults | options))


def count_bytes(loader):
    return sum(int(batch["target_bytes"].sum()) for batch in loader)


def test_lines_are_joined_to_the_text_that_they_are(tmp_path):
    datamodule = build(
        tmp_path,
        BPETokenizer(300),
        name="text",
        data_files=write_text_files(tmp_path),
        join_rows_with="\n",
    )
    datamodule.prepare_data()
    datamodule.setup("fit")
    text = (ARTICLE * 3).removesuffix("\n")
    assert datamodule.read_documents()["validation"] == [text]
    assert count_bytes(datamodule.val_dataloader()) == len(text.encode())
    assert isinstance(datamodule.train_dataloader(), StatefulDataLoader)
    assert 1 < datamodule.bytes_per_token < 10


def test_rows_are_documents_and_evaluation_can_be_limited(tmp_path):
    datamodule = build(
        tmp_path,
        name="json",
        data_files=write_c4_files(tmp_path),
        test_split=None,
        max_eval_documents=2,
    )
    datamodule.setup("fit")
    documents = datamodule.read_documents()
    assert {split: len(texts) for split, texts in documents.items()} == {
        "train": 40,
        "validation": 2,
    }
    labels = next(iter(datamodule.val_dataloader()))["labels"]
    assert (labels == ByteTokenizer.eos_id).sum() == 2
    assert count_bytes(datamodule.val_dataloader()) == len("validation 0" * 2)
    assert datamodule.state_dict() == {"tokenizer": ByteTokenizer().identity}
    with pytest.raises(ConfigError, match="test split has no documents"):
        datamodule.setup("test")


def test_a_stream_trains_its_tokenizer_on_its_first_documents(tmp_path, monkeypatch):
    seen = []
    train = BPETokenizer._train
    monkeypatch.setattr(BPETokenizer, "_train", lambda self, texts: seen.append(texts) or train(self, texts))
    datamodule = build_stream(tmp_path, BPETokenizer(280), tokenizer_documents=3, max_eval_documents=2)
    datamodule.prepare_data()
    datamodule.setup("fit")
    assert seen == [["<0>", "<1>word ", "<2>word word "]]
    loader = datamodule.train_dataloader()
    assert isinstance(loader, StreamDataLoader) and len(loader) == 6
    batches = list(loader)
    assert len(batches) == 6
    assert {k: tuple(v.shape) for k, v in batches[0].items()} == {
        "input_ids": (2, 16),
        "labels": (2, 16),
        "target_bytes": (2,),
    }
    assert count_bytes(datamodule.val_dataloader()) == len("validation 0" * 2)
    assert 1 < datamodule.bytes_per_token < 5


@pytest.mark.parametrize("num_shares", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("shuffle_block", [1, 4])
def test_shares_of_a_dataset_are_disjoint_and_hold_everything(tmp_path, num_shares, shuffle_block):
    dataset = datasets.load_dataset(
        "json", data_files=write_c4_files(tmp_path), split="train", streaming=True
    )
    source = HFDocuments(dataset, "text", shuffle_block, seed=1)
    for epoch in range(2):
        shares = [
            [text for text, _ in source.read(share, num_shares, epoch, None)] for share in range(num_shares)
        ]
        ids = [int(text[1 : text.index(">")]) for texts in shares for text in texts]
        assert sorted(ids) == list(range(40))


def test_order_depends_on_seed_and_epoch_and_may_be_kept(tmp_path):
    dataset = datasets.load_dataset(
        "json", data_files=write_c4_files(tmp_path), split="train", streaming=True
    )

    def order(seed, epoch, shuffle_block=4):
        source = HFDocuments(dataset, "text", shuffle_block, seed)
        return [int(t[1 : t.index(">")]) for t, _ in source.read(0, 1, epoch, None)]

    assert order(1, 0, shuffle_block=1) == order(2, 3, shuffle_block=1) == list(range(40))
    orders = [order(seed, epoch) for seed in (1, 2) for epoch in (0, 1)]
    assert len(set(map(tuple, orders))) == 4
    assert order(1, 0) == orders[0]
    assert {o[0] // 10 for o in orders} != {0}, "files are shuffled as a whole"


def test_each_block_has_an_order_of_its_own(tmp_path):
    dataset = datasets.load_dataset(
        "json", data_files=write_c4_files(tmp_path, num_files=1), split="train", streaming=True
    )

    def orders(seed, epoch):
        source = HFDocuments(dataset, "text", 5, seed)
        ids = [int(t[1 : t.index(">")]) for t, _ in source.read(0, 1, epoch, None)]
        assert sorted(ids[:5]) == list(range(5)) and sorted(ids[5:]) == list(range(5, 10))
        return tuple(ids[:5]), tuple(i - 5 for i in ids[5:])

    found = {order for seed in range(3) for epoch in range(3) for order in orders(seed, epoch)}
    assert len(found) >= 14  # of 18 drawn from 120
    for fixed in range(2):  # the seed alone, the epoch alone, the place alone
        assert orders(fixed, 0) != orders(fixed, 1)
        assert orders(0, fixed) != orders(1, fixed)
        assert len(set(orders(fixed, fixed))) == 2


@pytest.mark.parametrize("shuffle_block", [1, 4, 1000])
@pytest.mark.parametrize("num_shares", [1, 3])
def test_reading_goes_on_at_every_document(tmp_path, shuffle_block, num_shares):
    dataset = datasets.load_dataset(
        "json", data_files=write_c4_files(tmp_path), split="train", streaming=True
    )
    source = HFDocuments(dataset, "text", shuffle_block, seed=1)

    def read(epoch, position=None):
        position = json.loads(json.dumps(position))  # plain containers
        found = list(source.read(num_shares - 1, num_shares, epoch, position))
        return [text for text, _ in found], [position for _, position in found]

    for epoch in (0, 2):
        texts, positions = read(epoch)
        for index, position in enumerate(positions):
            texts_after, positions_after = read(epoch, position)
            assert texts_after == texts[index:]
            # And from a place after that, told by the reader that was itself resumed.
            assert (
                read(epoch, positions_after[len(positions_after) // 2])[0]
                == texts_after[len(positions_after) // 2 :]
            )


class Workers(PackedStream):
    """Notes that several workers read."""

    def __iter__(self):
        assert get_worker_info() is not None
        yield from super().__iter__()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_of_files_goes_on_after_each_batch(tmp_path, num_workers):
    data_files = write_c4_files(tmp_path, num_files=3)

    def read(loader, num_batches):
        return [batch["input_ids"].tolist() for batch in islice(loader, num_batches)]

    def loader():
        datamodule = build_stream(
            tmp_path, data_files=data_files, num_workers=num_workers, batches_per_epoch=40
        )
        datamodule.setup("fit")
        return datamodule.train_dataloader()

    expected = read(loader(), 40)
    assert len({json.dumps(batch) for batch in expected}) > 20
    for stop in (1, 7, 30) if num_workers == 0 else (7,):
        first = loader()
        batches = iter(first)
        seen = [next(batches)["input_ids"].tolist() for _ in range(stop)]
        state = json.loads(json.dumps(first.state_dict()))
        batches.close()
        resumed = loader()
        resumed.load_state_dict(state)
        assert seen + read(resumed, 40) == expected


def test_workers_read_disjoint_documents_of_few_files(tmp_path):
    dataset = datasets.load_dataset(
        "json",
        data_files=write_c4_files(tmp_path, num_files=1, num_documents=40),
        split="train",
        streaming=True,
    )
    source = HFDocuments(dataset, "text", 4, seed=1)
    row_format = RowFormat(seq_len=8, start_id=256, eos_id=256)
    found = []
    for rank in range(2):
        stream = Workers(source, ByteTokenizer(), row_format)
        stream.set_data_parallel(rank, 2)
        loader = StreamDataLoader(stream, batch_size=1, batches_per_epoch=64, num_workers=2)
        by_worker = {0: [], 1: []}
        for index, batch in enumerate(loader):
            by_worker[index % 2] += batch["labels"][0].tolist()
        for labels in by_worker.values():
            text = ByteTokenizer().decode([i if i != 256 else 0 for i in labels])
            found.append({part.split(">")[0] for part in text.split("<")[1:] if ">" in part})
    for i, one in enumerate(found):
        for other in found[i + 1 :]:
            assert not one & other
    assert set.union(*found) == {str(i) for i in range(40)}


class Recorder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.batches = []

    def training_step(self, batch):
        self.batches.append(batch["input_ids"].tolist())
        return (self.weight * batch["input_ids"].float().mean()).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-5)


@pytest.mark.parametrize("by_steps", [False, True])
def test_lightning_goes_on_in_the_stream_after_an_epoch(tmp_path, by_steps):
    data_files = write_c4_files(tmp_path)

    def fit(num_epochs, **arguments):
        module = Recorder()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=-1 if by_steps else num_epochs,
            max_steps=6 * num_epochs if by_steps else -1,
            callbacks=[ModelCheckpoint(tmp_path, "{step}", save_on_train_epoch_end=True, save_top_k=-1)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )
        datamodule = build_stream(tmp_path, data_files=data_files)
        trainer.fit(module, datamodule=datamodule, **arguments)
        return module.batches

    expected = fit(4)
    assert len(expected) == 24
    assert fit(4, ckpt_path=tmp_path / "step=12.ckpt") == expected[12:]


def test_wrong_arguments_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        build_stream(
            tmp_path,
            shuffle_block=0,
            batches_per_epoch=0,
            tokenizer_documents=0,
            max_eval_documents=0,
            join_rows_with="",
        )
    assert len(caught.value.problems) == 5
    with pytest.raises(ConfigError, match="seq_len=1"):
        build_stream(tmp_path, seq_len=1)


def test_what_cannot_be_loaded_is_named(tmp_path):
    data_files = write_c4_files(tmp_path)
    with pytest.raises(ConfigError, match="split 'test' cannot be loaded.*set a split.*to None"):
        build(tmp_path, name="json", data_files=data_files).setup("fit")
    with pytest.raises(ConfigError, match=r"nowhere.*cannot be loaded"):
        build(tmp_path, name="json", data_files=str(tmp_path / "nowhere.json")).setup("fit")
    for streaming in (False, True):
        datamodule = build(
            tmp_path,
            name="json",
            data_files=data_files,
            test_split=None,
            text_key="body",
            streaming=streaming,
        )
        with pytest.raises(ConfigError, match=r"text_key='body'.*\['text', 'timestamp', 'url'\]"):
            datamodule.setup("fit")
    (tmp_path / "numbers.json").write_text('{"text": 1}\n')
    with pytest.raises(ConfigError, match="holds int, not only strings"):
        build(
            tmp_path,
            name="json",
            data_files=str(tmp_path / "numbers.json"),
            validation_split=None,
            test_split=None,
        ).setup("fit")


def test_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"titanplug\[data\]"):
        build(tmp_path, name="json")
