"""Rows packed from a stream: the tokens, the shares, and that reading goes on where it stopped."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from titanplug.data import ByteTokenizer, PackedStream, RowFormat, StreamDataLoader
from titanplug.data.packing import PackedDataset
from titanplug.data.tokens import build_tokens
from titanplug.errors import ConfigError, TitanplugError

TOKENIZER = ByteTokenizer()
ROW_FORMAT = RowFormat(seq_len=8, start_id=256, eos_id=256)
TEXTS = [chr(ord("A") + i) * (3 + 7 * i % 23) for i in range(13)]


class ListSource:
    """Documents in a list; each epoch starts one later in it."""

    def __init__(self, texts=TEXTS):
        self.texts = texts
        self.reads = []

    def read(self, share, num_shares, epoch, position):
        self.reads.append((share, num_shares, epoch, position))
        mine = self.texts[share::num_shares]
        turned = mine[epoch % len(mine) :] + mine[: epoch % len(mine)] if mine else []
        start = 0 if position is None else position["index"]
        for index, text in enumerate(turned[start:], start):
            yield text, {"index": index}


def build(texts=TEXTS, rank=0, size=1, **options):
    stream = PackedStream(ListSource(texts), TOKENIZER, ROW_FORMAT)
    stream.set_data_parallel(rank, size)
    return StreamDataLoader(stream, **({"batch_size": 2, "batches_per_epoch": 5} | options))


def read(loader, num_batches=None):
    batches = []
    for batch in loader:
        assert set(batch) == {"input_ids", "labels", "target_bytes"}
        batches.append(batch["input_ids"].tolist())
        if len(batches) == num_batches:
            break
    return batches


def read_epochs(loader, num_epochs):
    return [batch for _ in range(num_epochs) for batch in read(loader)]


def test_rows_are_those_of_packing_and_the_source_is_read_again():
    stream = PackedStream(ListSource(), TOKENIZER, ROW_FORMAT)
    rows = [row for row, _ in zip(iter(stream), range(60), strict=False)]
    second = TEXTS[1:] + TEXTS[:1]
    third = TEXTS[2:] + TEXTS[:2]
    tokens = build_tokens(TOKENIZER.encode_documents(TEXTS + second + third), TOKENIZER)
    packed = PackedDataset(tokens, ROW_FORMAT, drop_last=True)
    assert len(packed) >= 60
    for index, (row, _) in enumerate(rows):
        for key in ("input_ids", "labels", "target_bytes"):
            assert torch.equal(row[key], packed[index][key])


def test_reading_starts_again_at_every_row_exactly():
    stream = PackedStream(ListSource(), TOKENIZER, ROW_FORMAT)
    rows = [pair for pair, _ in zip(iter(stream), range(80), strict=False)]
    assert max(position.epoch for _, position in rows) >= 2
    for index, (_, position) in enumerate(rows[:-3]):
        stream.seek({0: position}, first_worker=0)
        again = iter(stream)
        for row, expected_position in rows[index + 1 : index + 4]:
            found, found_position = next(again)
            assert torch.equal(found["input_ids"], row["input_ids"])
            assert torch.equal(found["labels"], row["labels"])
            assert found_position == expected_position


def letters(batches):
    return {chr(i) for batch in batches for row in batch for i in row if i < 256}


def test_ranks_and_workers_read_disjoint_shares_that_hold_everything():
    found = []
    for rank in range(2):
        loader = build(rank=rank, size=2, num_workers=2, batches_per_epoch=16)
        batches = read(loader)
        by_worker = [letters(batches[worker::2]) for worker in range(2)]
        assert letters(batches) == set.union(*by_worker)
        found += by_worker
    assert sum(map(len, found)) == len(set.union(*found)) == len(TEXTS)


def test_default_is_the_only_rank():
    stream = PackedStream(ListSource(), TOKENIZER, ROW_FORMAT)
    next(iter(stream))
    assert stream.data_parallel == (0, 1)
    assert stream.source.reads == [(0, 1, 0, None)]
    for rank, size in ((1, 1), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError, match="at least 0 and below the size"):
            stream.set_data_parallel(rank, size)


def test_epochs_go_on_in_the_stream():
    batches = read_epochs(build(), 4)
    assert len(batches) == 20
    assert batches == read(build(batches_per_epoch=20))
    cut = build()
    seen = read(cut, 3)  # limit_train_batches
    assert seen + read(cut) == batches[:8]


@pytest.mark.parametrize(
    ("num_workers", "stop"), [*((0, stop) for stop in range(1, 12)), (2, 4), (2, 5), (2, 9)]
)
def test_a_loader_goes_on_after_each_batch(num_workers, stop):
    expected = read_epochs(build(num_workers=num_workers), 4)
    first = build(num_workers=num_workers)
    seen = read_epochs(first, (stop - 1) // 5)
    seen += read(first, stop - len(seen))
    state = first.state_dict()
    resumed = build(num_workers=num_workers)
    resumed.load_state_dict(state)
    while len(seen) < 20:
        seen += read(resumed)
        if len(seen) == 15:  # and once more
            state = resumed.state_dict()
            resumed = build(num_workers=num_workers)
            resumed.load_state_dict(state)
    assert seen == expected


def test_state_is_plain_and_survives_a_safe_load(tmp_path):
    loader = build(num_workers=2)
    read(loader, 3)
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state == loader.state_dict()
    resumed = build(num_workers=2)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state


def test_a_position_of_other_shares_is_refused_with_both_degrees():
    loader = build(rank=1, size=2, num_workers=2)
    read(loader, 1)
    state = loader.state_dict()
    with pytest.raises(ConfigError, match="saved on 2 data-parallel ranks, now there are 4"):
        build(rank=1, size=4, num_workers=2).load_state_dict(state)
    with pytest.raises(ConfigError, match="rank 1 was given to rank 0"):
        build(rank=0, size=2, num_workers=2).load_state_dict(state)
    with pytest.raises(ConfigError, match="with 2 readers a rank, now there are 1.*num_workers to 2"):
        build(rank=1, size=2).load_state_dict(state)
    build(rank=1, size=2, num_workers=2).load_state_dict(state)
    one = build(num_workers=0)
    read(one, 1)
    build(num_workers=1).load_state_dict(one.state_dict())  # one reader as well


def test_a_loader_tells_its_stream_the_coordinate():
    loader = build()
    loader.set_data_parallel(1, 3)
    read(loader, 1)
    assert loader.dataset.source.reads == [(1, 3, 0, None)]


@pytest.mark.parametrize("texts", [[], ["", ""]], ids=["no documents", "empty documents"])
def test_a_share_without_text_is_an_error_not_a_hang(texts):
    with pytest.raises(TitanplugError, match="Share 0 of 1 of the stream holds no text"):
        read(build(texts))


def test_reading_draws_nothing_from_the_global_state():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    read(build())
    assert torch.equal(torch.get_rng_state(), before)


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


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 3}], ids=str)
@pytest.mark.parametrize(("num_workers", "saved"), [(0, 3), (0, 5), (0, 7), (2, 3), (2, 5)])
def test_lightning_resumes_with_the_next_batch(tmp_path, saved, options, num_workers):
    def fit(until, **arguments):
        module = Recorder()
        checkpoint = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=saved, save_top_k=-1)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=until,
            callbacks=[checkpoint],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        trainer.fit(module, build(num_workers=num_workers), **arguments)
        return module.batches

    expected = fit(12)
    assert expected == read(build(num_workers=num_workers, batches_per_epoch=12))
    rest = fit(12, ckpt_path=tmp_path / f"step={saved}.ckpt")
    assert rest == expected[saved:]
