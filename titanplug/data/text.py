"""The data module for local text, the shipped one by default."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import override

from titanplug.data.datamodule import LoaderOptions, PackedDataModule
from titanplug.data.documents import (
    Documents,
    Fractions,
    JsonLinesFormat,
    read_documents,
    read_sotu,
)
from titanplug.data.tokenizers import Tokenizer
from titanplug.errors import ConfigError

SOTU_SPLIT_KEY = "split"


class TextDataModule(PackedDataModule):
    """Packed rows of the shipped State of the Union addresses, or of a local file.

    Args:
        tokenizer: of the text.
        path: a ``.txt``, ``.jsonl``, ``.jsonl.xz`` or ``.jsonl.gz`` file; None for the shipped
            text.
        text_key: key of the text in JSON lines.
        split_key: key of the split in JSON lines. None divides the documents by fractions; for the
            shipped text it means ``split``.
        train_split: value of ``split_key`` for training documents.
        validation_split: the same for validation documents, None for no validation.
        test_split: the same for test documents, None for no test.
        validation_fraction: share of the documents (of the characters in ``.txt``) for validation,
            where no ``split_key`` tells.
        test_fraction: the same for the test.
        seq_len: S, tokens a row.
        batch_size: rows in a batch on each data-parallel rank.
        eval_batch_size: the same in validation and test, None for ``batch_size``.
        num_workers: processes that load; 0 loads in the training process, which is fast here.
        pin_memory: whether batches are put in page-locked memory, None for: where there is a GPU.
        seed: of the order of rows.
        cache_dir: folder for trained tokenizers and tokens, None for ``titanplug`` in the user's
            cache folder.
        document_ids: whether batches tell the document of each token, as ``document_ids`` (B, S).
        ignore_border_labels: whether the first token after the end of a document is no target.

    Raises:
        ConfigError: arguments are out of range, or there is no such file.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        path: str | None = None,
        text_key: str = "text",
        split_key: str | None = None,
        train_split: str = "train",
        validation_split: str | None = "validation",
        test_split: str | None = "test",
        validation_fraction: float = 0.05,
        test_fraction: float = 0.05,
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
        self.path = None if path is None else Path(path).expanduser()
        self.fractions = Fractions(validation_fraction, test_fraction)
        problems = self.fractions.list_problems()
        if self.path is not None and not self.path.is_file():
            problems.append(
                f"path={path!r}: there is no such file (relative to {str(Path.cwd())!r}). Give the "
                "path of a text file, or none for the shipped text."
            )
        if problems:
            raise ConfigError(problems)
        self.json_format = JsonLinesFormat(
            text_key=text_key,
            split_key=SOTU_SPLIT_KEY if path is None and split_key is None else split_key,
            split_names={"train": train_split, "validation": validation_split, "test": test_split},
        )

    @override
    def read_documents(self) -> Documents:
        """The documents of all splits.

        Raises:
            ConfigError: the file is not as the arguments say.
            TitanplugError: the shipped text was changed.
        """
        if self.path is None:
            return read_sotu(self.json_format)
        return read_documents(self.path, self.json_format, self.fractions)
