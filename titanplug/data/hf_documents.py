"""Documents of a streaming dataset of the `datasets` library, in shares, from any position on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from titanplug.compat import require_extra
from titanplug.data.stream import SourcePosition
from titanplug.errors import ConfigError


class HFDocuments:
    """The documents of a streaming dataset, in shares, shuffled block by block.

    A block is read, put in an order that the seed, the epoch and its number decide, and handed out.
    A position is the state of the dataset before the block and a place in it: unlike with a shuffle
    buffer, reading goes on exactly there.

    Args:
        dataset: a ``datasets.IterableDataset``.
        text_key: the column of the text.
        shuffle_block: documents a block; 1 keeps the order of files and documents.
        seed: of the orders of files and of documents in a block, at least 0.
    """

    def __init__(self, dataset: Any, text_key: str, shuffle_block: int, seed: int) -> None:
        self.dataset = dataset
        self.text_key = text_key
        self.shuffle_block = shuffle_block
        self.seed = seed

    def read(
        self, share: int, num_shares: int, epoch: int, position: SourcePosition | None
    ) -> Iterator[tuple[str, SourcePosition]]:
        """As in ``DocumentSource``. Shares are of whole files where their number allows it."""
        number, index, state = 0, 0, None
        if position is not None:
            number, index, state = position["block"], position["index"], position["state"]
        dataset = self._open(share, num_shares, epoch, state)
        # Not iter(dataset): in a worker of a loader, that would cut the share once more.
        for block in dataset.iter(batch_size=self.shuffle_block):
            texts = get_texts(block, self.text_key)
            order: Sequence[int] = range(len(texts))
            if self.shuffle_block > 1:
                generator = np.random.default_rng((self.seed, epoch, number))
                order = generator.permutation(len(texts)).tolist()
            for place in range(index, len(texts)):
                here = {"block": number, "index": place, "state": state}
                yield texts[order[place]], here
            number, index, state = number + 1, 0, dataset.state_dict()

    def _open(self, share: int, num_shares: int, epoch: int, state: Any) -> Any:
        dataset = self.dataset
        if num_shares > 1:
            distributed = require_extra("datasets.distributed", "data")
            dataset = distributed.split_dataset_by_node(dataset, share, num_shares)
        if self.shuffle_block > 1:
            dataset.set_epoch(1 + self.seed + epoch)  # the order of files; 0 would keep it
        dataset.load_state_dict(state)  # None starts at the beginning
        return dataset


def get_texts(columns: Mapping[str, list[Any]], text_key: str) -> list[str]:
    """The column of the text.

    Raises:
        ConfigError: there is no such column, or it holds something else than text.
    """
    if text_key not in columns:
        raise ConfigError(
            f"text_key={text_key!r}: the dataset has no such column; there are: {sorted(columns)}. "
            "Set text_key to the column of the text."
        )
    texts = columns[text_key]
    for text in texts:
        if not isinstance(text, str):
            raise ConfigError(
                f"text_key={text_key!r}: the column holds {type(text).__name__}, not only strings. "
                "Set text_key to a column of text."
            )
    return texts
