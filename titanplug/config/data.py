"""Schemas of data and tokenizers, for the constructors that their ``_target_`` names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING


@dataclass
class PackedDataConfig:
    """What all data modules have.

    Args:
        tokenizer: how text becomes tokens.
        seq_len: tokens a row.
        batch_size: rows in a batch on each data-parallel rank.
        eval_batch_size: the same in validation and test; null: ``batch_size``.
        num_workers: processes that load; 0: the training process does.
        pin_memory: put batches in page-locked memory; null: where there is a GPU.
        seed: of the order of rows.
        cache_dir: folder for trained tokenizers and tokens; null: the user's cache folder.
        document_ids: tell the document of each token, for attention within documents.
        ignore_border_labels: the first token after the end of a document is no target.
    """

    _target_: str = MISSING
    tokenizer: Any = "${tokenizer}"
    seq_len: int = 512
    batch_size: int = 8
    eval_batch_size: int | None = None
    num_workers: int = 0
    pin_memory: bool | None = None
    seed: int = "${seed}"  # type: ignore[assignment]  # resolved by OmegaConf
    cache_dir: str | None = None
    document_ids: bool = False
    ignore_border_labels: bool = False


@dataclass
class TextDataConfig(PackedDataConfig):
    """The shipped State of the Union addresses, or a local file.

    Args:
        path: a .txt, .jsonl, .jsonl.xz or .jsonl.gz file; null: the shipped text.
        text_key: key of the text in JSON lines.
        split_key: key of the split in JSON lines; null: divide by the fractions.
        train_split: value of ``split_key`` for training documents.
        validation_split: the same for validation; null: none.
        test_split: the same for the test; null: none.
        validation_fraction: share of documents (of characters in .txt) for validation.
        test_fraction: the same for the test.
    """

    _target_: str = "titanplug.data.TextDataModule"
    path: str | None = None
    text_key: str = "text"
    split_key: str | None = None
    train_split: str = "train"
    validation_split: str | None = "validation"
    test_split: str | None = "test"
    validation_fraction: float = 0.05
    test_fraction: float = 0.05


@dataclass
class TextFileConfig(TextDataConfig):
    """A local file.

    Args:
        path: a .txt, .jsonl, .jsonl.xz or .jsonl.gz file; it has to be given.
    """

    path: str = MISSING


@dataclass
class HFDataConfig(PackedDataConfig):
    """A dataset of the `datasets` library.

    Args:
        name: a dataset on the hub, a folder, or a format such as json with ``data_files``.
        config_name: configuration of the dataset.
        data_files: local files or addresses, for all splits or by split.
        revision: version of a dataset on the hub.
        streaming: read the training split on the fly and without end.
        text_key: column of the text.
        join_rows_with: put between the rows of a split to make one document; null: each is one.
        train_split: the library's name of the training split.
        validation_split: the same for validation; null: none.
        test_split: the same for the test; null: none.
        max_eval_documents: first documents of validation and test that are taken; null: all.
        shuffle_block: streamed documents that are shuffled at a time; 1: none.
        batches_per_epoch: length of an epoch of a stream, in batches of each data-parallel rank.
        tokenizer_documents: first documents of a stream that a tokenizer is trained on.
        num_shares: shares that a stream is dealt into, times the workers; null: data-parallel ranks.
    """

    _target_: str = "titanplug.data.HFDataModule"
    _convert_: str = "all"
    name: str = MISSING
    config_name: str | None = None
    data_files: Any = None
    revision: str | None = None
    streaming: bool = False
    text_key: str = "text"
    join_rows_with: str | None = None
    train_split: str = "train"
    validation_split: str | None = "validation"
    test_split: str | None = "test"
    max_eval_documents: int | None = None
    shuffle_block: int = 1000
    batches_per_epoch: int = 1000
    tokenizer_documents: int = 10_000
    num_shares: int | None = None


@dataclass
class ByteTokenizerConfig:
    """One token a byte."""

    _target_: str = "titanplug.data.ByteTokenizer"


@dataclass
class BPETokenizerConfig:
    """Byte-level BPE, trained on the training split.

    Args:
        vocab_size: token ids.
        min_frequency: how often a pair must occur to be merged.
    """

    _target_: str = "titanplug.data.BPETokenizer"
    vocab_size: int = 4096
    min_frequency: int = 2


@dataclass
class HFTokenizerConfig:
    """The tokenizer of a Hugging Face model.

    Args:
        path: a tokenizer.json, or a folder that holds one.
        eos_token: the token that ends a document; null: as the files say.
        bos_token: the token that starts a document; null: as the files say.
    """

    _target_: str = "titanplug.data.HFTokenizer"
    path: str = MISSING
    eos_token: str | None = None
    bos_token: str | None = None
