"""What a tokenizer is here, and the one that needs no vocabulary: bytes.

A tokenizer also tells how many UTF-8 bytes of the text each token stands for, so that bits per byte
can be computed exactly from the loss on tokens.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

IntArray: TypeAlias = NDArray[np.int32]


class Encoded(NamedTuple):
    """A text as tokens.

    Attributes:
        ids: (N,) int32, the tokens.
        num_bytes: (N,) int32, UTF-8 bytes of the text that each token stands for. They add up to
            the bytes of the text.
    """

    ids: IntArray
    num_bytes: IntArray


class Tokenizer(ABC):
    """Turns text into token ids in ``range(vocab_size)`` and back.

    Attributes:
        eos_id: the token that ends a document.
        bos_id: the token that starts a document, None where the vocabulary has none of its own.
    """

    eos_id: int
    bos_id: int | None

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids; known before any text has been read."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Hash of everything that decides which ids a text gets, special tokens included."""

    @property
    def start_id(self) -> int:
        """The token in front of each document: ``bos_id``, or ``eos_id`` where there is none."""
        return self.eos_id if self.bos_id is None else self.bos_id

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special tokens around it or in it."""
        ids: list[int] = self.encode_documents([text])[0].ids.tolist()
        return ids

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, without special tokens; bytes that are no UTF-8 become U+FFFD."""

    @abstractmethod
    def encode_documents(self, texts: Sequence[str]) -> list[Encoded]:
        """Tokens of each text and the bytes they stand for, without special tokens."""

    def prepare(self, read_documents: Callable[[], Sequence[str]], cache_dir: Path) -> None:  # noqa: B027
        """Make the tokenizer ready to encode; a tokenizer that has to be trained is trained here.

        Training happens where the cache holds no result yet. Ranks that do this at the same time
        are safe, but a data module calls it on one rank of a node first.

        Args:
            read_documents: called for the training documents, only if they are needed.
            cache_dir: folder for results.
        """


class ByteTokenizer(Tokenizer):
    """One token a UTF-8 byte, and one that ends a document: 257 ids."""

    eos_id = 256
    bos_id = None

    @property
    @override
    def vocab_size(self) -> int:
        return 257

    @property
    @override
    def identity(self) -> str:
        return hashlib.sha256(b"utf-8 bytes, eos 256").hexdigest()

    @override
    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < self.eos_id).decode("utf-8", errors="replace")

    @override
    def encode_documents(self, texts: Sequence[str]) -> list[Encoded]:
        encoded = []
        for text in texts:
            ids = np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)
            encoded.append(Encoded(ids, np.ones_like(ids)))
        return encoded
