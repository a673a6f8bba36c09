"""Rows packed from a stream: the tokens, the shares, and that reading goes on where it stopped."""

import copy
import itertools
import json
import random
import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from titanplug.data import ByteTokenizer, PackedStream, RowFormat, StreamDataLoader
from titanplug.data.hf_documents import HFDocuments
from titanplug.data.packing import PackedDataset
from titanplug.data.row_order import RowOrder, RowReader
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
        assert (position.share, position.row) == (0, index + 1)
        stream.seek(RowReader(RowOrder(1, 1, 1), index + 1, 0, 1, 1), {0: position})
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


def share_rows(share, num_shares):
    """The rows of a share, packed beforehand: the documents of many epochs one after the other."""
    mine = TEXTS[share::num_shares]
    epochs = [mine[e % len(mine) :] + mine[: e % len(mine)] for e in range(40)]
    tokens = build_tokens(TOKENIZER.encode_documents(list(itertools.chain(*epochs))), TOKENIZER)
    packed = PackedDataset(tokens, ROW_FORMAT, drop_last=True)
    return (row["input_ids"].tolist() for row in packed)


def run_order(ranks, readers, rows, num_rows):
    """What ranks with a worker for each share read batch by batch: torch takes workers in turn."""
    shares = [share_rows(share, ranks * readers) for share in range(ranks * readers)]
    batches = (
        next(shares[rank * readers + batch % readers])
        for batch in itertools.count()
        for rank in range(ranks)
        for _ in range(rows)
    )
    return list(itertools.islice(batches, num_rows))


def build_ranks(size, num_workers=0, batch_size=2, states=None, **options):
    loaders = [
        build(rank=r, size=size, num_workers=num_workers, batch_size=batch_size, **options)
        for r in range(size)
    ]
    for loader in loaders if states else ():
        loader.load_state_dicts(states)
    return loaders


def read_ranks(loaders, num_batches):
    """Rows of all ranks, batch by batch; loaders go on over epochs."""
    found = []
    while num_batches:
        per_rank = [read(loader, num_batches) for loader in loaders]
        (length,) = {len(batches) for batches in per_rank}
        found += [row for batches in zip(*per_rank, strict=True) for batch in batches for row in batch]
        num_batches -= length
    return found


@pytest.mark.parametrize(
    ("ranks", "num_workers", "rows"), [(1, 0, 2), (2, 0, 3), (3, 0, 1), (2, 2, 2), (1, 2, 3)]
)
def test_the_first_layout_decides_the_order(ranks, num_workers, rows):
    """Each rank and worker reads its own share and opens no other."""
    loaders = build_ranks(ranks, num_workers, rows)
    assert read_ranks(loaders, 12) == run_order(ranks, max(1, num_workers), rows, 12 * ranks * rows)
    if num_workers == 0:
        opened = [{share for share, *_ in loader.dataset.source.reads} for loader in loaders]
        assert opened == [{rank} for rank in range(ranks)]


def test_order_and_counts_of_rows_agree():
    for order in itertools.starmap(RowOrder, itertools.product((1, 2, 3), (1, 2, 3), (1, 2, 4))):
        counts = [0] * order.num_shares
        for row in range(70):
            assert [order.count_rows(share, row) for share in range(order.num_shares)] == counts
            ((share, start, num_rows),) = order.cut(row, row + 1)
            assert (start, num_rows) == (counts[share], 1)
            counts[share] += 1
        single = [next(order.cut(row, row + 1)) for row in range(5, 60)]
        cut = [(share, start + i) for share, start, num_rows in order.cut(5, 60) for i in range(num_rows)]
        assert cut == [(share, start) for share, start, _ in single]
        for start, rank, size, rows in ((0, 0, 1, 1), (3, 1, 2, 3), (7, 2, 3, 2), (8, 1, 4, 4)):
            reader = RowReader(order, start, rank, size, rows)
            seen = {segment.share for batch in range(200) for segment in reader.cut(batch)}
            assert reader.find_shares() == seen


@pytest.mark.parametrize("seed", range(20))
def test_a_run_goes_on_in_any_layout(seed):
    """Interrupted anywhere, again and again: no row twice, none left out, all in the first order."""
    draw = random.Random(seed)
    layouts = [(draw.randint(1, 4), 0, draw.randint(1, 3)) for _ in range(5)]
    if seed == 0:
        layouts = [(2, 0, 2), (4, 0, 2), (1, 0, 3), (3, 0, 1), (2, 0, 2)]
    order = (layouts[0][0], 1, layouts[0][2])
    found, states = [], None
    for size, num_workers, rows in layouts:
        loaders = build_ranks(size, num_workers, rows, states, batches_per_epoch=draw.randint(2, 6))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # all positions are known
            found += read_ranks(loaders, draw.randint(1, 9))
        states = [loader.state_dict() for loader in loaders]
        if draw.random() < 0.3:  # saved again before a batch was read
            loaders = build_ranks(*draw.choice(layouts), states)
            states = [loader.state_dict() for loader in loaders]
        draw.shuffle(states)
    assert found == run_order(*order, len(found))


def test_a_run_goes_on_with_other_workers():
    found, states = [], None
    for size, num_workers, rows in ((2, 2, 2), (1, 0, 3), (2, 1, 1), (1, 2, 4)):
        loaders = build_ranks(size, num_workers, rows, states)
        found += read_ranks(loaders, 3)
        states = [loader.state_dict() for loader in loaders]
    assert found == run_order(2, 2, 2, len(found))


def test_reading_goes_on_from_the_nearest_position():
    """What was read is not read again: a share is entered where the last reader left it."""
    first = build_ranks(2, batches_per_epoch=30)
    read_ranks(first, 30)
    states = [loader.state_dict() for loader in first]
    (second,) = build_ranks(1, states=states)
    read(second, 2)
    assert {share for share, *_ in second.dataset.source.reads} == {0, 1}
    saved = {p[0]: (p[2], p[3]) for state in states for p in state["positions"]}
    assert min(epoch for epoch, _ in saved.values()) >= 2
    entered = {share: (epoch, position) for share, _, epoch, position in second.dataset.source.reads[:2]}
    assert entered == saved
    # A position behind the state's row is of another moment.
    ahead = copy.deepcopy(states)
    read(first[0], 3)
    ahead[1]["positions"] += first[0].state_dict()["positions"]
    (third,) = build_ranks(1, states=ahead)
    assert read(third, 3) == read(build_ranks(1, states=states)[0], 3)


def test_one_ranks_state_is_enough_but_slower():
    """What Lightning's own strategies keep of several ranks."""
    first = build_ranks(2)
    found = read_ranks(first, 4)
    state = first[0].state_dict()
    second = build_ranks(2)
    for loader in second:
        loader.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = read(second[0], 1)
    with pytest.warns(UserWarning, match=r"no position in 1 of the 2 shares, so 8 rows are read again"):
        rows += read(second[1], 1)
    expected = run_order(2, 1, 2, len(found) + 4)
    assert found + [row for batch in rows for row in batch] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_number_of_shares_makes_the_order_that_of_all_layouts(num_workers):
    layouts = [(1, 8), (2, 4), (4, 2)] if num_workers == 0 else [(1, 4), (2, 2)]
    num_shares = 4 if num_workers == 0 else 2
    orders = []
    for size, rows in layouts:
        loaders = build_ranks(size, num_workers, rows, num_shares=num_shares)
        orders.append(read_ranks(loaders, 8))
        if num_workers == 0:
            opened = [
                share for loader in loaders for share, _, epoch, _ in loader.dataset.source.reads if not epoch
            ]
            assert sorted(opened) == [0, 1, 2, 3], "no share is read twice"
    assert all(order == orders[0] for order in orders)
    states = [loader.state_dict() for loader in loaders]
    (one,) = build_ranks(1, 0, 3, states)  # the order is kept, the number need not be
    found = orders[0] + read_ranks([one], 4)
    rows = layouts[0][1] // num_shares
    assert found == run_order(num_shares, max(1, num_workers), rows, len(found))


@pytest.mark.parametrize("num_files", [1, 4])
@pytest.mark.parametrize("shuffle_block", [1, 3])
def test_shares_of_a_streamed_dataset_are_read_side_by_side(tmp_path, num_files, shuffle_block):
    """The library keeps a dataset's position in the dataset, so shares must not hold the same one."""
    datasets = pytest.importorskip("datasets")
    for file in range(num_files):
        lines = [json.dumps({"text": f"<{file}/{i}>" + "word " * (i % 5)}) for i in range(40 // num_files)]
        (tmp_path / f"{file}.json").write_text("\n".join(lines))
    files = [str(path) for path in sorted(tmp_path.glob("*.json"))]

    def build_ranks(size, states=None):
        loaders = []
        for rank in range(size):
            dataset = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
            source = HFDocuments(dataset, "text", shuffle_block, seed=1)
            stream = PackedStream(source, TOKENIZER, ROW_FORMAT)
            loaders.append(StreamDataLoader(stream, batch_size=4 // size, batches_per_epoch=100))
            loaders[-1].set_data_parallel(rank, size)
            if states:
                loaders[-1].load_state_dicts(states)
        return loaders

    expected = read_ranks(build_ranks(4), 60)
    for first, second in ((5, 9), (23, 17)):  # within an epoch of the shares, and beyond
        ranks = build_ranks(4)
        found = read_ranks(ranks, first)
        ranks = build_ranks(1, [json.loads(json.dumps(rank.state_dict())) for rank in ranks])
        found += read_ranks(ranks, second)
        ranks = build_ranks(2, [json.loads(json.dumps(rank.state_dict())) for rank in ranks])
        found += read_ranks(ranks, 60 - first - second)
        assert found == expected


@pytest.mark.parametrize(
    ("num_shares", "message"),
    [(3, "has 4 rows .batch_size=2 on 2 ranks"), (0, "at least 1"), (-1, "at least 1")],
)
def test_a_number_of_shares_divides_a_batch(num_shares, message):
    loader = build(num_shares=num_shares)
    with pytest.raises(ConfigError, match=message):
        loader.set_data_parallel(1, 2)


def test_states_that_do_not_belong_together_are_refused():
    loaders = build_ranks(2)
    read_ranks(loaders, 2)
    early = loaders[0].state_dict()
    read_ranks(loaders, 1)
    late = [loader.state_dict() for loader in loaders]
    with pytest.raises(ConfigError, match="after 8 rows on data-parallel rank 0, and after 12 on rank 1"):
        build().load_state_dicts([early, late[1]])
    loader = build()
    loader.dataset.row_format = RowFormat(seq_len=9, start_id=256, eos_id=256)
    with pytest.raises(ConfigError, match="saved with seq_len=8, now it is 9"):
        loader.load_state_dicts(late)


def test_copies_of_a_loader_do_not_share_their_position():
    loader = build()
    expected = read(build(), 3)
    for _ in range(2):
        assert read(copy.copy(loader), 3) == expected


def test_an_epoch_that_a_limit_ended_is_not_gone_on_with():
    first = build()
    seen = read(first, 3)
    for begins in (False, True):
        loader = build()
        loader.load_state_dict(first.state_dict())
        if begins:
            loader.begin_epoch()
        rest = read(loader)
        assert len(rest) == (5 if begins else 2)
        assert seen + rest == read(build(batches_per_epoch=3 + len(rest)))


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
