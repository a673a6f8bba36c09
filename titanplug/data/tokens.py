"""A split as one array of tokens, made once and kept in the cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titanplug.data.cache import hash_parts, publish_folder
from titanplug.data.tokenizers import Encoded, IntArray, Tokenizer

CACHE_FORMAT = "tokens 1"


@dataclass(frozen=True)
class Tokens:
    """The documents of a split, one after the other, with a special token between two.

    Where the vocabulary has a token for the start of a document: start, document, eos, start,
    document, eos. Where it has none: eos, document, eos, document, eos. Either way each token of a
    document and the eos after it has a token in front of it from which it can be predicted.

    Attributes:
        ids: (N,) int32.
        num_bytes: (N,) int32, UTF-8 bytes that each token stands for, 0 for special tokens.
        folder: where the arrays are mapped from; None if they are in memory.
    """

    ids: IntArray
    num_bytes: IntArray
    folder: Path | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers of a data loader map the file again, instead of getting a copy of all of it.
        if self.folder is not None:
            return load_tokens, (self.folder,)
        return Tokens, (self.ids, self.num_bytes)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text a token, special tokens counted as tokens."""
        return int(self.num_bytes.sum(dtype=np.int64)) / len(self.ids)


def load_tokens(folder: Path) -> Tokens:
    """Map tokens that ``load_or_build_tokens`` has written; nothing is read yet."""
    ids = np.load(folder / "ids.npy", mmap_mode="r")
    return Tokens(ids, np.load(folder / "num_bytes.npy", mmap_mode="r"), folder)


def load_or_build_tokens(texts: Sequence[str], tokenizer: Tokenizer, cache_dir: Path) -> Tokens:
    """The tokens of documents: from the cache, or made and put there.

    Args:
        texts: the documents of a split, at least one.
        tokenizer: ready to encode.
        cache_dir: the folder is ``tokens/<hash of the documents and the tokenizer>`` in it.

    Raises:
        ConfigError: the cache folder cannot be written to.
    """
    key = hash_parts([CACHE_FORMAT, tokenizer.identity, *texts])[:32]
    folder = cache_dir / "tokens" / key
    if not folder.is_dir():
        tokens = build_tokens(tokenizer.encode_documents(texts), tokenizer)

        def write(aside: Path) -> None:
            np.save(aside / "ids.npy", tokens.ids)
            np.save(aside / "num_bytes.npy", tokens.num_bytes)

        publish_folder(folder, write)
    return load_tokens(folder)


def build_tokens(documents: Iterable[Encoded], tokenizer: Tokenizer) -> Tokens:
    """Put documents one after the other, with special tokens as ``Tokens`` says."""
    blocks = [build_block(document, tokenizer) for document in documents]
    if tokenizer.start_id == tokenizer.eos_id:  # no document follows whose start ends the last one
        blocks.append(_special_tokens(tokenizer.eos_id))
    return Tokens(
        np.concatenate([block.ids for block in blocks]),
        np.concatenate([block.num_bytes for block in blocks]),
    )


def build_block(document: Encoded, tokenizer: Tokenizer) -> Encoded:
    """A document with the special token before it, and the eos after it if that is another one."""
    parts = [_special_tokens(tokenizer.start_id), document]
    if tokenizer.start_id != tokenizer.eos_id:
        parts.append(_special_tokens(tokenizer.eos_id))
    return Encoded(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _special_tokens(token_id: int) -> Encoded:
    return Encoded(np.array([token_id], dtype=np.int32), np.zeros(1, dtype=np.int32))
