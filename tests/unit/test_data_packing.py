"""Rows cut from tokens: every token a target once, exact bytes, borders of documents."""

import pickle

import numpy as np
import pytest
import torch

from titanplug.data import BPETokenizer, ByteTokenizer, PackedDataset, RowFormat
from titanplug.data.packing import IGNORED_LABEL, build_row_format
from titanplug.data.tokens import Tokens, build_tokens, load_or_build_tokens

TEXTS = ["abc", "défg", "h"]
EOS = ByteTokenizer.eos_id


class StartingTokenizer(ByteTokenizer):
    """Bytes, with a token of its own for the start of a document."""

    bos_id = 255  # no byte of UTF-8 text


def build(texts, seq_len, tokenizer=None, *, drop_last=False, **options):
    tokenizer = tokenizer or ByteTokenizer()
    tokens = build_tokens(tokenizer.encode_documents(texts), tokenizer)
    options = {"document_ids": False, "ignore_border_labels": False} | options
    row_format = build_row_format(tokenizer, seq_len, **options)
    return PackedDataset(tokens, row_format, drop_last=drop_last)


def join(dataset, key):
    return torch.cat([dataset[i][key] for i in range(len(dataset))]).tolist()


@pytest.mark.parametrize("seq_len", [2, 3, 5, 7, 12, 100])
def test_every_token_is_a_target_once_and_its_bytes_are_counted(seq_len):
    dataset = build(TEXTS, seq_len)
    expected = [*b"abc", EOS, *"défg".encode(), EOS, *b"h", EOS]
    labels = join(dataset, "labels")
    assert [label for label in labels if label != IGNORED_LABEL] == expected
    assert labels[: len(expected)] == expected  # only the end is filled up
    inputs = join(dataset, "input_ids")
    assert inputs[: len(expected)] == [EOS, *expected[:-1]]
    assert set(inputs[len(expected) :]) <= {EOS}
    assert sum(int(dataset[i]["target_bytes"]) for i in range(len(dataset))) == 9
    for i in range(len(dataset)):
        row = dataset[i]
        assert {k: (v.shape, v.dtype) for k, v in row.items()} == {
            "input_ids": ((seq_len,), torch.int64),
            "labels": ((seq_len,), torch.int64),
            "target_bytes": ((), torch.int64),
        }
        counted = [t for t in row["labels"].tolist() if t not in (IGNORED_LABEL, EOS)]
        assert row["target_bytes"] == len(counted)  # a byte a token here


def test_training_leaves_out_the_row_that_is_not_full():
    full, padded = build(TEXTS, 5, drop_last=True), build(TEXTS, 5)
    assert (len(full), len(padded)) == (2, 3)
    assert IGNORED_LABEL not in join(full, "labels")
    assert len(build(TEXTS, 6, drop_last=True)) == len(build(TEXTS, 6)) == 2  # 12 targets
    with pytest.raises(IndexError):
        full[2]


def test_documents_with_a_start_token_get_it_and_keep_their_end():
    dataset = build(TEXTS, 100, StartingTokenizer())
    inputs, labels = join(dataset, "input_ids"), join(dataset, "labels")
    stream = [255, *b"abc", EOS, 255, *"défg".encode(), EOS, 255, *b"h", EOS]
    n = len(stream) - 1
    assert inputs[:n] == stream[:-1] and labels[:n] == stream[1:]
    assert dataset[0]["target_bytes"] == 9


def test_document_ids_count_from_each_start_and_from_0_in_each_row():
    dataset = build(TEXTS, 6, document_ids=True)
    # eos a b c | eos d    é é f g | eos h    The token in front belongs to the document.
    assert dataset[0]["document_ids"].tolist() == [0, 0, 0, 0, 1, 1]
    assert dataset[1]["document_ids"].tolist() == [0, 0, 0, 0, 1, 1]
    dataset = build(TEXTS, 100, StartingTokenizer(), document_ids=True)
    ids = dataset[0]["document_ids"].tolist()
    assert ids[:15] == [0] * 5 + [1] * 7 + [2] * 3
    assert dataset[0]["document_ids"].dtype == torch.int64


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), StartingTokenizer()])
def test_border_labels_are_ignored_on_request(tokenizer):
    plain = build(TEXTS, 100, tokenizer)[0]
    row = build(TEXTS, 100, tokenizer, ignore_border_labels=True)[0]
    after_eos = plain["input_ids"] == EOS
    assert torch.equal(row["input_ids"], plain["input_ids"])
    assert (row["labels"][after_eos] == IGNORED_LABEL).all()
    assert torch.equal(row["labels"][~after_eos], plain["labels"][~after_eos])
    # Without a start token, the first byte of each of the three documents is no target.
    assert row["target_bytes"] == (9 - 3 if tokenizer.bos_id is None else 9)


def test_bytes_of_subwords_are_exact_over_rows(tmp_path):
    text = "the cat sat on the mat — naïve 日本語 🙂. " * 20
    tokenizer = BPETokenizer(vocab_size=280)
    tokenizer.prepare(lambda: [text], tmp_path)
    dataset = build([text, text], 16, tokenizer)
    total = sum(int(dataset[i]["target_bytes"]) for i in range(len(dataset)))
    assert total == 2 * len(text.encode())
    assert len(dataset) * 16 < total  # several bytes a token


def test_tokens_come_from_the_cache_the_second_time(tmp_path, monkeypatch):
    tokenizer = ByteTokenizer()
    built = load_or_build_tokens(TEXTS, tokenizer, tmp_path)
    monkeypatch.setattr(ByteTokenizer, "encode_documents", None)
    cached = load_or_build_tokens(TEXTS, tokenizer, tmp_path)
    assert cached.folder == built.folder
    assert np.array_equal(cached.ids, built.ids)
    assert np.array_equal(cached.num_bytes, built.num_bytes)
    assert cached.bytes_per_token == 9 / 13
    # Other texts, other borders between the same characters, another tokenizer: other tokens.
    monkeypatch.undo()
    others = [
        load_or_build_tokens(["abc", "défg"], tokenizer, tmp_path),
        load_or_build_tokens(["abcd", "éfg", "h"], tokenizer, tmp_path),
    ]
    monkeypatch.setattr(ByteTokenizer, "identity", "another")
    others.append(load_or_build_tokens(TEXTS, tokenizer, tmp_path))
    assert len({t.folder for t in [built, *others]}) == 4


def test_mapped_tokens_travel_to_workers_as_a_path(tmp_path):
    mapped = load_or_build_tokens(["x" * 100_000], ByteTokenizer(), tmp_path)
    data = pickle.dumps(mapped)
    assert len(data) < 1000
    assert np.array_equal(pickle.loads(data).ids, mapped.ids)
    in_memory = Tokens(mapped.ids[:5].copy(), mapped.num_bytes[:5].copy())
    assert np.array_equal(pickle.loads(pickle.dumps(in_memory)).ids, in_memory.ids)


def test_row_format_is_plain_data():
    row_format = RowFormat(seq_len=4, start_id=1, eos_id=0)
    ids, num_bytes = np.array([1, 5, 6], np.int32), np.array([0, 300, 70_000], np.int32)
    row = row_format.build_row(ids, num_bytes)
    assert row["input_ids"].tolist() == [1, 5, 0, 0]
    assert row["labels"].tolist() == [5, 6, -100, -100]
    assert row["target_bytes"] == 70_300
