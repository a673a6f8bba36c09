"""Subword tokenizers on the `tokenizers` library, and BPE that is trained on the spot."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from typing_extensions import override

from titanplug.data.cache import hash_parts, publish_folder
from titanplug.data.tokenizers import Encoded, IntArray, Tokenizer
from titanplug.errors import ConfigError, TitanplugError

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
MIN_BPE_VOCAB_SIZE = 257  # 256 bytes and END_OF_TEXT
# Longer texts are encoded in pieces of about this many characters, cut where a line begins.
PIECE_CHARS = 1 << 17
# Up to this many characters are encoded without the library's thread pool, which it does not want
# to use in the workers of a data loader.
MAX_SINGLE_THREAD_CHARS = 1 << 19
# Characters encoded at a time: bounds the memory of the library's result objects.
BATCH_CHARS = 1 << 22


class SubwordTokenizer(Tokenizer):
    """A tokenizer whose work a backend of the `tokenizers` library does.

    The spelling of a special token in a text is ordinary text: it is encoded like any other.
    """

    def __init__(self) -> None:
        self._backend: tokenizers.Tokenizer | None = None
        self._token_bytes: IntArray | None = None
        self._identity = ""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._backend is not None:
            self._backend.encode_special_tokens = True  # the library does not pickle it

    @property
    @override
    def identity(self) -> str:
        self._require_backend()
        return self._identity

    @override
    def decode(self, ids: Sequence[int]) -> str:
        return self._require_backend().decode(list(ids), skip_special_tokens=True)

    @override
    def encode_documents(self, texts: Sequence[str]) -> list[Encoded]:
        pieces_of_texts = [_split_text(text) for text in texts]
        encoded = self._encode_pieces([piece for pieces in pieces_of_texts for piece in pieces])
        return [_concatenate(list(islice(encoded, len(pieces)))) for pieces in pieces_of_texts]

    def save(self, path: str | Path) -> None:
        """Write the vocabulary to a ``tokenizer.json``, which ``HFTokenizer`` reads."""
        self._require_backend().save(str(path))

    def _set_backend(self, backend: tokenizers.Tokenizer) -> None:
        # A file may ask for rows of one length: documents are packed here, not cut or padded.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        self._token_bytes = _count_token_bytes(backend)
        self._identity = hash_parts([backend.to_str(), repr(self.bos_id), repr(self.eos_id)])

    def _require_backend(self) -> tokenizers.Tokenizer:
        if self._backend is None:
            raise TitanplugError(
                f"{type(self).__name__} has no vocabulary yet: it is made from the training text. "
                "Call setup() of the data module, or prepare(...) of the tokenizer, first."
            )
        return self._backend

    def _encode_pieces(self, pieces: list[str]) -> Iterator[Encoded]:
        backend = self._require_backend()
        if sum(map(len, pieces)) <= MAX_SINGLE_THREAD_CHARS:
            for piece in pieces:
                yield self._count_bytes(piece, backend.encode(piece, add_special_tokens=False))
            return
        for batch in _batch_by_chars(pieces):
            results = backend.encode_batch(batch, add_special_tokens=False)
            for piece, result in zip(batch, results, strict=True):
                yield self._count_bytes(piece, result)

    def _count_bytes(self, text: str, result: tokenizers.Encoding) -> Encoded:
        ids = np.array(result.ids, dtype=np.int32)
        if self._token_bytes is not None:
            num_bytes = self._token_bytes[ids]
            if num_bytes.sum() == len(text.encode("utf-8")):
                return Encoded(ids, num_bytes)
        # The text was changed before it was cut (normalised, a space put in front): the library
        # still knows which characters of the original each token came from.
        return Encoded(ids, _count_bytes_by_offsets(text, result.offsets))


class BPETokenizer(SubwordTokenizer):
    """Byte-level BPE, trained on the training split of the text at hand.

    Every text can be encoded. A small text may give fewer tokens than asked for; ``vocab_size``
    stays as given, so that the size of a model never depends on the text.

    Args:
        vocab_size: number of ids: 256 bytes, one that ends a document, and merges.
        min_frequency: how often a pair must occur to be merged.

    Raises:
        ConfigError: an argument is out of range.
    """

    eos_id = 0
    bos_id = None

    def __init__(self, vocab_size: int = 4096, min_frequency: int = 2) -> None:
        super().__init__()
        problems = []
        if vocab_size < MIN_BPE_VOCAB_SIZE:
            problems.append(
                f"vocab_size={vocab_size}: byte-level BPE has 256 ids for the bytes and one for "
                f"{END_OF_TEXT}. Give {MIN_BPE_VOCAB_SIZE} or more."
            )
        if min_frequency < 1:
            problems.append(f"min_frequency={min_frequency}: a merge occurs at least once. Give 1 or more.")
        if problems:
            raise ConfigError(problems)
        self._vocab_size = vocab_size
        self.min_frequency = min_frequency

    @property
    @override
    def vocab_size(self) -> int:
        return self._vocab_size

    @override
    def prepare(self, read_documents: Callable[[], Sequence[str]], cache_dir: Path) -> None:
        """Load the vocabulary trained on these documents from the cache, or train it.

        Raises:
            ConfigError: there is no text to train on, or the cache folder cannot be written to.
        """
        documents = read_documents()
        if not any(documents):
            raise ConfigError(
                "BPETokenizer is trained on the training split, which has no text here. Name the training "
                "split as the data does, or give HFTokenizer(path) a vocabulary made before."
            )
        key = hash_parts(["bpe 1", str(self.min_frequency), *documents])[:16]
        folder = cache_dir / "tokenizers" / f"bpe{self.vocab_size}-{key}"
        if not folder.is_dir():
            backend = self._train(documents)
            publish_folder(folder, lambda aside: backend.save(str(aside / TOKENIZER_FILE)))
        self._set_backend(tokenizers.Tokenizer.from_file(str(folder / TOKENIZER_FILE)))

    def _train(self, documents: Sequence[str]) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            min_frequency=self.min_frequency,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(documents, trainer)
        if backend.get_vocab_size() < self.vocab_size:
            logger.warning(
                "The training text gives %d BPE tokens, fewer than vocab_size=%d: the other ids stay unused.",
                backend.get_vocab_size(),
                self.vocab_size,
            )
        return backend


def _count_token_bytes(backend: tokenizers.Tokenizer) -> IntArray | None:
    """(V,) bytes of each token of a byte-level vocabulary, None for another kind."""
    if not isinstance(backend.decoder, decoders.ByteLevel):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    num_bytes = np.zeros(max(vocabulary.values()) + 1, dtype=np.int32)
    for token, token_id in vocabulary.items():
        num_bytes[token_id] = len(token)  # a character of the spelling stands for a byte
    for token_id, added in backend.get_added_tokens_decoder().items():
        num_bytes[token_id] = len(added.content.encode("utf-8"))  # spelt as it is
    return num_bytes


def _count_bytes_by_offsets(text: str, offsets: list[tuple[int, int]]) -> IntArray:
    """(N,) bytes of a text that its N tokens stand for, by the characters that they cover.

    A character in several tokens counts for the first of them, characters in none for the token
    after them, so that the sum is the length of the text.
    """
    code_points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    char_bytes = 1 + np.searchsorted([0x80, 0x800, 0x10000], code_points, side="right")
    bytes_before = np.concatenate([[0], np.cumsum(char_bytes)])
    ends = np.maximum.accumulate(np.array([end for _, end in offsets], dtype=np.int64))
    ends[-1:] = len(text)
    return np.diff(bytes_before[ends], prepend=0).astype(np.int32)


def _split_text(text: str) -> list[str]:
    pieces, begin = [], 0
    line_start = re.compile(r"(?<=\n)[^\n]")
    while len(text) - begin > 2 * PIECE_CHARS:
        match = line_start.search(text, begin + PIECE_CHARS)
        if match is None:
            break
        pieces.append(text[begin : match.start()])
        begin = match.start()
    return [*pieces, text[begin:]]


def _batch_by_chars(pieces: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    num_chars = 0
    for piece in pieces:
        batch.append(piece)
        num_chars += len(piece)
        if num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _concatenate(parts: list[Encoded]) -> Encoded:
    if len(parts) == 1:
        return parts[0]
    return Encoded(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
