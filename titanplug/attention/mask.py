"""Which tokens a token sees, said once for a whole sequence whatever part of it a rank holds."""

from __future__ import annotations

import torch
from torch import Tensor

from titanplug.errors import ConfigError
from titanplug.parallel.active_sequence import active_sequence


class TokenMask:
    """A rule for which tokens a token sees; the scores of the rest are minus infinity.

    Make one for a forward pass and give it to all layers: they share what is computed from it. A class of its
    own, neither a tensor nor a dataclass, so that FSDP doesn't cast what it holds.

    Args:
        causal: a token sees itself and what is before it in the sequence; else everything.
        window: a token sees this many tokens, itself included; with ``causal`` only. None: no limit.
        document_ids: (B, S) whole numbers, on a rank with a part of the sequence those of its tokens; a token
            sees tokens of its own document only. Padding that nobody shall see is a document, too. None:
            each row is one document.

    Raises:
        ConfigError: a window without ``causal`` or below 1, or document ids that aren't (B, S).
    """

    def __init__(
        self, *, causal: bool = True, window: int | None = None, document_ids: Tensor | None = None
    ) -> None:
        if window is not None and (window < 1 or not causal):
            raise ConfigError(
                f"window={window} with causal={causal}: a sliding window is of 1 token or more, and reaches "
                "back from each token. Use causal=True and a window of at least 1, or window=None."
            )
        if document_ids is not None and document_ids.dim() != 2:
            raise ConfigError(
                f"document_ids has shape {tuple(document_ids.shape)}. It must be (batch, sequence), one "
                "number a token. Expand it to the shape of input_ids."
            )
        self.causal, self.window, self.document_ids = causal, window, document_ids
        self._biases: dict[tuple[object, ...], Tensor] = {}
        self._windows: dict[int | None, TokenMask] = {}
        self.whole_ids = document_ids
        if document_ids is not None:
            active = active_sequence(document_ids.shape[1])
            if active is not None:
                self.whole_ids = active.shards.gather_padded(document_ids, 1)

    @classmethod
    def of_whole(cls, *, causal: bool, window: int | None, whole_ids: Tensor | None) -> TokenMask:
        """A rule with the document ids of the whole padded sequence, (B, S')."""
        mask = cls(causal=causal, window=window)
        mask.document_ids = mask.whole_ids = whole_ids
        return mask

    def with_window(self, window: int | None) -> TokenMask:
        """The same rule with another window, sharing the document ids."""
        if window == self.window:
            return self
        other = self._windows.get(window)
        if other is None:
            other = TokenMask.of_whole(causal=self.causal, window=window, whole_ids=self.whole_ids)
            if not torch.compiler.is_compiling():
                self._windows[window] = other
        return other

    def is_plain(self, length: int) -> bool:
        """Whether it is no more than a causal mask, or none, on sequences of ``length``."""
        return self.document_ids is None and (self.window is None or self.window >= length)

    def first_key(self, query: int) -> int:
        """The first key that the query at position ``query`` may see."""
        return 0 if self.window is None else max(0, query - self.window + 1)

    def bias(
        self, queries: tuple[int, int], keys: tuple[int, int], device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """An additive mask for stretches of the whole sequence, (1 or B, 1, queries, keys).

        0 where a query sees a key and -inf where not. Layers of one forward pass share it: each would turn a
        boolean mask into a new one, and keep it for backward.

        Args:
            queries: start and stop in the whole sequence.
            keys: start and stop in the whole sequence.
            device: where the mask is made.
            dtype: of the mask.
        """
        if torch.compiler.is_compiling():
            return self._build(queries, keys, device, dtype)
        key = (queries, keys, device, dtype)
        if key not in self._biases:
            self._biases[key] = self._build(queries, keys, device, dtype)
        return self._biases[key]

    def _build(
        self, queries: tuple[int, int], keys: tuple[int, int], device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        rows = torch.arange(*queries, device=device)
        distance = rows[:, None] - torch.arange(*keys, device=device)  # query minus key
        seen = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            seen = seen & (distance < self.window)
        if self.whole_ids is not None:
            # Made outside of the model they have no padding, which is of the last document.
            last = self.whole_ids.shape[1] - 1
            of_queries, of_keys = (
                self.whole_ids[:, torch.arange(*stretch, device=device).clamp(max=last)]
                for stretch in (queries, keys)
            )
            seen = seen & (of_queries[:, :, None] == of_keys[:, None, :])  # (B, queries, keys)
        bias = torch.zeros(seen.shape, device=device, dtype=dtype).masked_fill_(~seen, float("-inf"))
        return bias.view(-1, 1, *bias.shape[-2:])
