"""What all data modules do: documents in, batches of packed rows out.

A batch holds ``input_ids`` (B, S) int64, ``labels`` (B, S) int64 already shifted, -100 where there
is no target, and ``target_bytes`` (B,) int64, the UTF-8 bytes that a row's targets stand for. Bits
per byte are the sum of the targets' losses over ln 2 times the sum of ``target_bytes``.

Legend: B rows of a data-parallel rank in a batch, S tokens a row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from titanplug.data.cache import resolve_cache_dir
from titanplug.data.documents import Documents, Split
from titanplug.data.loaders import StatefulDataLoader
from titanplug.data.packing import PackedDataset, Row, RowFormat, build_row_format
from titanplug.data.tokenizers import Tokenizer
from titanplug.data.tokens import Tokens, load_or_build_tokens
from titanplug.errors import ConfigError, TitanplugError

SPLIT_OF_STAGE: dict[str, Split] = {
    "fit": "train",
    "validate": "validation",
    "test": "test",
    "predict": "test",
}


@dataclass(frozen=True)
class LoaderOptions:
    """What every data module's loaders need to know; the data modules document the values.

    Raises:
        ConfigError: values are out of range.
    """

    seq_len: int
    batch_size: int
    eval_batch_size: int | None
    num_workers: int
    pin_memory: bool | None
    seed: int
    document_ids: bool
    ignore_border_labels: bool

    def __post_init__(self) -> None:
        """Check the values."""
        problems = []
        if self.seq_len < 2:
            problems.append(f"seq_len={self.seq_len}: a row has at least 2 tokens. Give 2 or more.")
        for name in ("batch_size", "eval_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"{name}={value}: a batch has at least 1 row. Give 1 or more.")
        if self.num_workers < 0:
            problems.append(
                f"num_workers={self.num_workers}: a number of processes is at least 0. Give 0 to "
                "load in the training process."
            )
        if self.seed < 0:
            problems.append(f"seed={self.seed}: a seed is at least 0. Give 0 or more.")
        if problems:
            raise ConfigError(problems)

    @property
    def resolved_pin_memory(self) -> bool:
        """Whether batches are put into page-locked memory: by default where there is a GPU."""
        return torch.cuda.is_available() if self.pin_memory is None else self.pin_memory


class PackedDataModule(L.LightningDataModule):
    """Base of the data modules.

    Documents are tokenized once, on one rank of a node, into the cache; every rank maps the result.

    Args:
        tokenizer: may still have to be trained; it is, on the training documents.
        options: of the loaders.
        cache_dir: folder for tokenizers and tokens, None for the user's cache folder.
    """

    def __init__(self, tokenizer: Tokenizer, options: LoaderOptions, cache_dir: str | None) -> None:
        super().__init__()
        if not isinstance(tokenizer, Tokenizer):
            raise ConfigError(
                f"tokenizer={tokenizer!r}: a titanplug.data.Tokenizer is needed. Give "
                "BPETokenizer(), ByteTokenizer() or HFTokenizer(path)."
            )
        self.options = options
        self.cache_dir = resolve_cache_dir(cache_dir)
        self._tokenizer = tokenizer
        self._tokens: dict[Split, Tokens] | None = None

    @abstractmethod
    def read_documents(self) -> Documents:
        """The documents of the splits that are tokenized beforehand."""

    def read_tokenizer_documents(self, documents: Documents) -> Sequence[str]:
        """The documents that a tokenizer is trained on, if it has to be."""
        return documents["train"]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; one that has to be trained can encode after ``setup``."""
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        """V, number of token ids; known before ``setup``."""
        return self._tokenizer.vocab_size

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text a token in the training split, special tokens counted as tokens."""
        return self._require_tokens("train").bytes_per_token

    @property
    def row_format(self) -> RowFormat:
        """How tokens become rows."""
        return build_row_format(
            self._tokenizer,
            self.options.seq_len,
            document_ids=self.options.document_ids,
            ignore_border_labels=self.options.ignore_border_labels,
        )

    @override
    def prepare_data(self) -> None:
        """Train the tokenizer and tokenize the documents, where the cache has no result yet."""
        self._load_tokens()

    @override
    def setup(self, stage: str | None = None) -> None:
        """Load what ``prepare_data`` made.

        Args:
            stage: the split that ``fit``, ``validate``, ``test`` or ``predict`` works on must have
                documents.

        Raises:
            ConfigError: it has none, or the data is not as the arguments say.
        """
        self._load_tokens()
        if stage is not None:
            self.require_split(SPLIT_OF_STAGE[stage])

    def require_split(self, split: Split) -> None:
        """Check that a split has documents.

        Raises:
            ConfigError: it has none.
        """
        self._require_tokens(split)

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        """Loader of the training rows; its position can be saved.

        Raises:
            ConfigError: there are too few rows for a single step.
        """
        dataset = PackedDataset(self._require_tokens("train"), self.row_format, drop_last=True)
        options = self.options
        _, size = self._data_parallel()
        if len(dataset) < options.batch_size * size:
            raise ConfigError(
                f"The training split has {len(dataset.tokens)} tokens, {len(dataset)} rows of "
                f"seq_len={options.seq_len}: a step needs batch_size={options.batch_size} rows on "
                f"each of {size} data-parallel ranks. Choose smaller values, or add text."
            )
        return StatefulDataLoader(
            dataset,
            batch_size=options.batch_size,
            shuffle=True,
            seed=options.seed,
            drop_last=True,
            num_workers=options.num_workers,
            pin_memory=options.resolved_pin_memory,
        )

    @override
    def val_dataloader(self) -> DataLoader[Row] | list[Any]:
        """Loader of the validation rows in order, the last one filled up; none without split."""
        return self._build_eval_loader("validation")

    @override
    def test_dataloader(self) -> DataLoader[Row] | list[Any]:
        """Loader of the test rows in order, the last one filled up; none without split."""
        return self._build_eval_loader("test")

    @override
    def predict_dataloader(self) -> DataLoader[Row] | list[Any]:
        """Loader of the test rows in order, the last one filled up; none without split."""
        return self._build_eval_loader("test")

    @override
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the data: the identity of the tokenizer."""
        return {"tokenizer": self._tokenizer.identity}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that the checkpoint was made with this tokenizer.

        Raises:
            ConfigError: it was made with another one, whose ids mean other tokens.
        """
        if state_dict["tokenizer"] != self._tokenizer.identity:
            raise ConfigError(
                f"The checkpoint was made with another tokenizer ({state_dict['tokenizer'][:12]}) "
                f"than this one ({self._tokenizer.identity[:12]}), so its token ids mean other "
                "tokens. Use the tokenizer that it was trained with: save it with tokenizer.save() "
                "and give it as HFTokenizer(path)."
            )

    def _load_tokens(self) -> None:
        if self._tokens is not None:
            return
        documents = self.read_documents()
        self._tokenizer.prepare(lambda: self.read_tokenizer_documents(documents), self.cache_dir)
        self._tokens = {
            split: load_or_build_tokens(texts, self._tokenizer, self.cache_dir)
            for split, texts in documents.items()
            if any(texts)
        }

    def _require_tokens(self, split: Split) -> Tokens:
        if self._tokens is None:
            raise TitanplugError("The data is not loaded yet. Call setup() of the data module first.")
        if split not in self._tokens:
            raise ConfigError(
                f"The {split} split has no documents; there are: {sorted(self._tokens)}. Name the "
                "splits as the data does, set a fraction above 0, or leave this step out."
            )
        return self._tokens[split]

    def _build_eval_loader(self, split: Split) -> DataLoader[Row] | list[Any]:
        if self._tokens is not None and split not in self._tokens:
            return []  # fit without validation
        options = self.options
        return DataLoader(
            PackedDataset(self._require_tokens(split), self.row_format, drop_last=False),
            batch_size=options.eval_batch_size or options.batch_size,
            num_workers=options.num_workers,
            pin_memory=options.resolved_pin_memory,
            # Without one, each evaluation would draw from the global state and change the training.
            generator=torch.Generator().manual_seed(options.seed),
        )

    def _data_parallel(self) -> tuple[int, int]:
        """Data-parallel rank and size, as the trainer's strategy tells for samplers."""
        arguments = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return (0, 1) if arguments is None else (arguments["rank"], arguments["num_replicas"])
