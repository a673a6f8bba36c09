"""Data from the `datasets` library, by name or from files: in memory, or as a stream."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader
from typing_extensions import override

from titanplug.compat import require_extra
from titanplug.data.datamodule import LoaderOptions, PackedDataModule
from titanplug.data.documents import SPLITS, Documents, Split
from titanplug.data.hf_documents import HFDocuments, get_texts
from titanplug.data.stream import PackedStream
from titanplug.data.stream_loader import StreamDataLoader
from titanplug.data.tokenizers import Tokenizer
from titanplug.data.tokens import build_tokens
from titanplug.errors import ConfigError

# Documents of a stream that the bytes a token are measured on.
SAMPLE_DOCUMENTS = 200


class HFDataModule(PackedDataModule):
    """Packed rows of a dataset of the `datasets` library. Needs the extra ``data``.

    Validation and test splits are held in memory, so that every token counts exactly once. The
    training split is too, unless it is streamed.

    Args:
        tokenizer: of the text.
        name: a dataset on the hub, a folder, or a format such as ``json`` or ``text`` with
            ``data_files``.
        config_name: configuration of the dataset, such as ``wikitext-103-raw-v1``.
        data_files: local files or addresses, for all splits or by split.
        revision: version of a dataset on the hub.
        streaming: read the training split on the fly and without end.
        text_key: column of the text.
        join_rows_with: put between the rows of a split to make one document of it (rows are lines).
            None takes each row as a document. Not for streaming.
        train_split: the library's name of the training split; slices such as ``train[:1%]`` work if
            it is not streamed.
        validation_split: the same for validation, None for no validation.
        test_split: the same for the test, None for no test.
        max_eval_documents: take the first documents of validation and test only; None takes all.
        shuffle_block: streamed documents are shuffled in blocks of this many, files as a whole; 1
            keeps their order.
        batches_per_epoch: length of an epoch of a stream, in batches of each data-parallel rank.
            The next epoch goes on in the stream.
        tokenizer_documents: a tokenizer is trained on the first documents of a stream.
        num_shares: shares that a stream is dealt into, times ``num_workers``; they decide the order of
            rows. None takes the number of data-parallel ranks, so that each reads a share of its own.
            A number lets runs in different layouts read the same rows; see ``StreamDataLoader``.
        seq_len: S, tokens a row.
        batch_size: rows in a batch on each data-parallel rank.
        eval_batch_size: the same in validation and test, None for ``batch_size``.
        num_workers: processes that load. For a stream they also tokenize, each a share of its own.
        pin_memory: whether batches are put in page-locked memory, None for: where there is a GPU.
        seed: of the order of rows, or of documents in a stream.
        cache_dir: folder for trained tokenizers and tokens, None for ``titanplug`` in the user's
            cache folder.
        document_ids: whether batches tell the document of each token, as ``document_ids`` (B, S).
        ignore_border_labels: whether the first token after the end of a document is no target.

    Raises:
        ConfigError: arguments are out of range.
        MissingExtraError: `datasets` is not installed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        name: str,
        config_name: str | None = None,
        data_files: str | Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
        revision: str | None = None,
        streaming: bool = False,
        text_key: str = "text",
        join_rows_with: str | None = None,
        train_split: str = "train",
        validation_split: str | None = "validation",
        test_split: str | None = "test",
        max_eval_documents: int | None = None,
        shuffle_block: int = 1000,
        batches_per_epoch: int = 1000,
        tokenizer_documents: int = 10_000,
        num_shares: int | None = None,
        seq_len: int = 512,
        batch_size: int = 8,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        seed: int = 0,
        cache_dir: str | None = None,
        document_ids: bool = False,
        ignore_border_labels: bool = False,
    ) -> None:
        options = LoaderOptions(
            seq_len=seq_len,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            pin_memory=pin_memory,
            seed=seed,
            document_ids=document_ids,
            ignore_border_labels=ignore_border_labels,
        )
        super().__init__(tokenizer, options, cache_dir)
        require_extra("datasets", "data")
        self.name = name
        self.config_name = config_name
        self.data_files = data_files
        self.revision = revision
        self.streaming = streaming
        self.text_key = text_key
        self.join_rows_with = join_rows_with
        self.split_names: dict[Split, str | None] = {
            "train": train_split,
            "validation": validation_split,
            "test": test_split,
        }
        self.max_eval_documents = max_eval_documents
        self.shuffle_block = shuffle_block
        self.batches_per_epoch = batches_per_epoch
        self.tokenizer_documents = tokenizer_documents
        self.num_shares = num_shares
        self._stream_state: dict[str, Any] | None = None
        if problems := self._list_problems():
            raise ConfigError(problems)

    @override
    def read_documents(self) -> Documents:
        """The documents of the splits that are held in memory.

        Raises:
            ConfigError: the dataset, a split or the column cannot be found.
        """
        splits = [split for split in SPLITS if self.split_names[split] is not None]
        return {split: self._read_split(split) for split in splits if split != "train" or not self.streaming}

    @override
    def read_tokenizer_documents(self, documents: Documents) -> Sequence[str]:
        """The training split, or the first documents of it where it is streamed."""
        if self.streaming:
            return list(islice(self._stream_texts("train"), self.tokenizer_documents))
        return super().read_tokenizer_documents(documents)

    @override
    def require_split(self, split: Split) -> None:
        """Check that a split has documents; a stream shows it only when it is read.

        Raises:
            ConfigError: it has none.
        """
        if not (self.streaming and split == "train"):
            super().require_split(split)

    @property
    @override
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text a token, of a stream in its first documents."""
        return self._stream_bytes_per_token if self.streaming else super().bytes_per_token

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        """Loader of the training rows; its position can be saved."""
        if not self.streaming:
            return super().train_dataloader()
        source = HFDocuments(self._load("train"), self.text_key, self.shuffle_block, self.options.seed)
        stream = PackedStream(source, self.tokenizer, self.row_format)
        stream.set_data_parallel(*self._data_parallel())
        # The length is the loader's own; it does not depend on workers.
        warnings.filterwarnings("ignore", message="Your `IterableDataset` has `__len__` defined")
        loader = StreamDataLoader(
            stream,
            batch_size=self.options.batch_size,
            batches_per_epoch=self.batches_per_epoch,
            num_workers=self.options.num_workers,
            pin_memory=self.options.resolved_pin_memory,
            seed=self.options.seed,
            num_shares=self.num_shares,
        )
        if self._stream_state is not None:
            loader.load_state_dict(self._stream_state)
            self._stream_state = None
        return loader

    @override
    def state_dict(self) -> dict[str, Any]:
        """The identity of the tokenizer, and the position in the stream.

        Lightning keeps the states of loaders, but does not load them where an epoch was complete.
        """
        state = super().state_dict()
        # A strategy may have put a copy of the loader in, so the trainer is asked.
        loader = None if self.trainer is None else self.trainer.train_dataloader
        if isinstance(loader, StreamDataLoader):
            state["stream"] = loader.state_dict()
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check the tokenizer, and go on in the stream where ``state_dict`` was taken.

        Raises:
            ConfigError: the checkpoint was made with another tokenizer.
        """
        super().load_state_dict(state_dict)
        self._stream_state = state_dict.get("stream")

    @cached_property
    def _stream_bytes_per_token(self) -> float:
        texts = list(islice(self._stream_texts("train"), SAMPLE_DOCUMENTS))
        encoded = self.tokenizer.encode_documents(texts)
        return build_tokens(encoded, self.tokenizer).bytes_per_token

    def _list_problems(self) -> list[str]:
        problems = [
            f"{name}={value}: at least 1 is needed. Give 1 or more."
            for name, value in (
                ("max_eval_documents", self.max_eval_documents),
                ("shuffle_block", self.shuffle_block),
                ("batches_per_epoch", self.batches_per_epoch),
                ("tokenizer_documents", self.tokenizer_documents),
                ("num_shares", self.num_shares),
            )
            if value is not None and value < 1
        ]
        if self.streaming and self.join_rows_with is not None:
            problems.append(
                f"join_rows_with={self.join_rows_with!r} with streaming=True: a stream has no end. "
                "Set streaming=False, or join_rows_with=None to take each row as a document."
            )
        return problems

    def _read_split(self, split: Split) -> list[str]:
        limit = None if split == "train" else self.max_eval_documents
        if self.streaming:
            return list(islice(self._stream_texts(split), limit))
        rows = self._load(split)
        rows = rows if limit is None else rows.select(range(min(limit, len(rows))))
        texts = get_texts(rows[:], self.text_key)
        return texts if self.join_rows_with is None else [self.join_rows_with.join(texts)]

    def _stream_texts(self, split: Split) -> Iterator[str]:
        for block in self._load(split).iter(batch_size=100):
            yield from filter(None, get_texts(block, self.text_key))

    def _load(self, split: Split) -> Any:
        """The library's dataset of a split, a ``Dataset`` or an ``IterableDataset``."""
        datasets = require_extra("datasets", "data")
        try:
            return datasets.load_dataset(
                self.name,
                self.config_name,
                data_files=self.data_files,
                revision=self.revision,
                split=self.split_names[split],
                streaming=self.streaming,
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"The dataset name={self.name!r}, config_name={self.config_name!r}, "
                f"data_files={self.data_files!r}, split {self.split_names[split]!r} cannot be "
                f"loaded ({error}). Correct these values; set a split that is not there to None. "
                "Without a network, give local data_files, or a dataset in the library's cache."
            ) from error
