"""Metrics of language models as exact sums: the result does not depend on how the data was cut up."""

from titanplug.metrics.language import (
    BitsPerByte,
    MeanLoss,
    Perplexity,
    bits_per_byte,
    perplexity,
    token_nll,
)

__all__ = [
    "BitsPerByte",
    "MeanLoss",
    "Perplexity",
    "bits_per_byte",
    "perplexity",
    "token_nll",
]
