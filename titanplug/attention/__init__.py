"""Attention that gives one result however the sequence is sharded: an interface, masks and backends."""

from titanplug.attention.interface import DotProductAttention, dot_product_attention, token_positions
from titanplug.attention.mask import TokenMask

__all__ = ["DotProductAttention", "TokenMask", "dot_product_attention", "token_positions"]
