"""The map-style loader: its order, and that it goes on where it stopped."""

from itertools import chain

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    SequentialSampler,
)

from tests.harness import reference
from titanplug.data import StatefulDataLoader
from titanplug.data.loaders import EpochRandomSampler
from titanplug.errors import ConfigError

NUM_ROWS = 22  # 5 batches of 4 and a rest


class Rows(Dataset):
    def __init__(self, num_rows=NUM_ROWS):
        self.num_rows = num_rows

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        return {"row": torch.tensor(index)}


def build(**options):
    arguments = {"batch_size": 4, "shuffle": True, "drop_last": True, "seed": 3} | options
    return StatefulDataLoader(Rows(), **arguments)


def read(loader, num_batches=None):
    batches = []
    for batch in loader:
        batches.append(batch["row"].tolist())
        if len(batches) == num_batches:
            break
    return batches


def test_order_is_that_of_a_distributed_sampler_whatever_else_is_drawn():
    loader = build(batch_size=1, drop_last=False)
    for epoch in range(3):
        sampler = DistributedSampler(Rows(), num_replicas=1, rank=0, seed=3)
        sampler.set_epoch(epoch)
        torch.rand(epoch + 1)
        assert list(chain(*read(loader))) == list(sampler)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_reading_draws_nothing_from_the_global_state(num_workers):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    read(build(num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("num_workers", "stop"), [*((0, stop) for stop in range(1, 11)), (2, 3), (2, 5)])
def test_a_loader_goes_on_after_each_batch(num_workers, stop):
    whole = build()
    expected = [read(whole) for _ in range(4)]
    assert len(expected[0]) == 5 and expected[0] != expected[1]
    first = build(num_workers=num_workers)
    seen = read(first) if stop > 5 else []
    seen += read(first, stop - len(seen))
    state = first.state_dict()
    resumed = build(num_workers=num_workers)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state or stop % 5 == 0
    assert len(resumed) == 5
    rest = read(resumed)
    assert rest, "an epoch that is over is not begun again"
    assert seen + rest + read(resumed) == list(chain(*expected))[: len(seen) + len(rest) + 5]


def test_persistent_workers_leave_out_the_resumed_batches_only_once():
    first = build()
    seen = read(first, 2)
    resumed = build(num_workers=1, persistent_workers=True)
    resumed.load_state_dict(first.state_dict())
    seen += read(resumed) + read(resumed)
    del resumed
    whole = build()
    assert seen == read(whole) + read(whole)


def test_the_epoch_is_read_when_the_first_batch_is_asked_for():
    expected = build()
    expected.sampler.set_epoch(2)
    loader = build(num_workers=1)
    iterator = iter(loader)
    loader.sampler.set_epoch(2)  # Lightning does it after iter()
    assert next(iterator)["row"].tolist() == read(expected, 1)[0]
    del iterator


def test_the_rest_of_another_epoch_is_left():
    first = build()
    read(first, 2)
    resumed = build()
    resumed.load_state_dict(first.state_dict())
    resumed.sampler.set_epoch(1)  # Lightning's limit_train_batches had ended epoch 0
    whole = build()
    read(whole)
    assert read(resumed) == read(whole)


def shard(rank, size, **options):
    sampler = DistributedSampler(Rows(24), size, rank, shuffle=True, seed=3)
    return StatefulDataLoader(Rows(24), sampler=sampler, drop_last=True, **options)


def test_another_number_of_ranks_goes_on_at_the_same_row():
    two = [shard(rank, 2, batch_size=2) for rank in range(2)]
    for loader in two:
        read(loader, 3)
    states = [loader.state_dict() for loader in two]
    assert (
        states[0]
        == states[1]
        == {
            "epoch": 0,
            "trainer_epoch": 0,
            "num_rows": 12,
            "dataset_rows": 24,
        }
    )
    one = StatefulDataLoader(Rows(24), batch_size=3, shuffle=True, seed=3)
    one.load_state_dict(states[0])
    rest = list(chain(*read(one)))
    four = [shard(rank, 4, batch_size=1) for rank in range(4)]
    for loader in four:
        loader.load_state_dict(states[0])
    parts = [list(chain(*read(loader))) for loader in four]
    assert [row for rows in zip(*parts, strict=True) for row in rows] == rest
    assert len(rest) == 12


def test_positions_that_fit_no_batch_or_other_data_are_refused():
    state = {"epoch": 0, "trainer_epoch": 0, "num_rows": 12, "dataset_rows": 24}
    with pytest.raises(ConfigError, match=r"in data of 24 rows, here are 22"):
        build().load_state_dict(state)
    with pytest.raises(ConfigError, match=r"row 12 .* reads 10 rows \(batch_size=5 on 2 data-"):
        shard(0, 2, batch_size=5).load_state_dict(state)


def test_a_batch_sampler_that_a_strategy_told_where_to_go_on_is_not_skipped_twice():
    class Told(BatchSampler):
        skip, size = 0, 1

        def __iter__(self):
            skip, self.skip = self.skip, 0
            yield from list(super().__iter__())[skip:]

    def put_in(loader):
        told = Told(loader.sampler, 4, True)
        object.__setattr__(loader, "batch_sampler", told)
        return told

    first = build()
    put_in(first)
    seen = read(first, 2)
    resumed = build()
    told = put_in(resumed)
    resumed.load_state_dict(first.state_dict())
    told.skip = 2
    seen += read(resumed, 1)
    assert resumed.state_dict()["num_rows"] == 12
    again = build()
    put_in(again)
    again.load_state_dict(resumed.state_dict())  # by its own state, the strategy silent
    seen += read(again)
    assert seen == read(build())


def test_an_unshuffled_loader_resumes_too():
    first = build(shuffle=False)
    assert isinstance(first.sampler, SequentialSampler)
    seen = read(first, 3)
    resumed = build(shuffle=False)
    resumed.load_state_dict(first.state_dict())
    assert seen + read(resumed) == read(build(shuffle=False))


class Recorder(L.LightningModule):
    """Records the rows it trains on; validates too, which reads another loader in between."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.rows = []

    def training_step(self, batch):
        self.rows.append(batch["row"].tolist())
        return (self.weight * batch["row"].float().mean()).sum()

    def validation_step(self, batch):
        torch.rand(1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder, loader, *, until, ckpt_path=None, callbacks=(), **options):
    module = Recorder()
    arguments = {"limit_val_batches": 1, "max_epochs": -1} | options
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=until,
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **arguments,
    )
    trainer.fit(module, loader, DataLoader(Rows(), batch_size=4), ckpt_path=ckpt_path)
    return module.rows


@pytest.mark.parametrize(("num_workers", "saved"), [(0, 3), (0, 5), (0, 7), (1, 3), (1, 5)])
@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 3}, {"val_check_interval": 2}], ids=str)
def test_lightning_resumes_with_the_next_batch(tmp_path, saved, options, num_workers):
    expected = fit(tmp_path, build(), until=11, **options)
    checkpoint = ModelCheckpoint(
        tmp_path, "{step}", every_n_train_steps=saved, save_top_k=-1, save_weights_only=False
    )
    loader = build(num_workers=num_workers)
    assert fit(tmp_path, loader, until=saved, callbacks=[checkpoint], **options) == expected[:saved]
    path = tmp_path / f"step={saved}.ckpt"
    rest = fit(tmp_path, build(num_workers=num_workers), until=11, ckpt_path=path, **options)
    assert rest == expected[saved:]


@pytest.mark.parametrize("limit", [{}, {"limit_train_batches": 3}], ids=str)
@pytest.mark.parametrize("by_steps", [False, True])
def test_lightning_resumes_after_the_end_of_an_epoch_twice(tmp_path, by_steps, limit):
    epoch = limit.get("limit_train_batches", 5)

    def run(num_epochs, **options):
        ends = {"until": num_epochs * epoch} if by_steps else {"until": -1, "max_epochs": num_epochs}
        return fit(tmp_path, build(num_workers=1), **ends, **options, **limit)

    def save():
        return ModelCheckpoint(tmp_path, "{step}", save_on_train_epoch_end=True, save_top_k=-1)

    expected = run(5)
    assert run(2, callbacks=[save()]) == expected[: 2 * epoch]
    path = tmp_path / f"step={2 * epoch}.ckpt"
    assert run(4, ckpt_path=path, callbacks=[save()]) == expected[2 * epoch : 4 * epoch]
    path = tmp_path / f"step={4 * epoch}.ckpt"
    assert run(5, ckpt_path=path) == expected[4 * epoch :]


class RecordSampler(Callback):
    def on_train_start(self, trainer, module):
        loader = trainer.train_dataloader
        self.types = type(loader), type(loader.sampler)


def test_lightning_puts_its_distributed_sampler_into_the_loader(tmp_path):
    def train():  # in a process of its own: "ddp" leaves variables and a process group behind
        record = RecordSampler()
        L.seed_everything(3, verbose=False)
        rows = fit(tmp_path, build(), until=7, callbacks=[record], strategy="ddp")
        return rows, *record.types

    rows = fit(tmp_path, build(), until=7)
    assert reference(train) == (rows, StatefulDataLoader, DistributedSampler)  # the same order


def test_sampler_has_a_length_and_an_epoch():
    sampler = EpochRandomSampler(Rows(), seed=1)
    assert len(sampler) == NUM_ROWS and sorted(sampler) == list(range(NUM_ROWS))
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
