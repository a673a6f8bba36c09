"""Tokenizers, packed rows with an exact count of bytes, loaders that resume, and data modules.

datamodule = TextDataModule(BPETokenizer(vocab_size=4096), seq_len=512, batch_size=8)
trainer.fit(module, datamodule=datamodule)
"""

from titanplug.data.datamodule import PackedDataModule
from titanplug.data.hf_tokenizer import HFTokenizer
from titanplug.data.huggingface import HFDataModule
from titanplug.data.loaders import StatefulDataLoader
from titanplug.data.packing import IGNORED_LABEL, PackedDataset, RowFormat
from titanplug.data.stream import DocumentSource, PackedStream
from titanplug.data.stream_loader import StreamDataLoader
from titanplug.data.subword import BPETokenizer
from titanplug.data.text import TextDataModule
from titanplug.data.tokenizers import ByteTokenizer, Encoded, Tokenizer

__all__ = [
    "IGNORED_LABEL",
    "BPETokenizer",
    "ByteTokenizer",
    "DocumentSource",
    "Encoded",
    "HFDataModule",
    "HFTokenizer",
    "PackedDataModule",
    "PackedDataset",
    "PackedStream",
    "RowFormat",
    "StatefulDataLoader",
    "StreamDataLoader",
    "TextDataModule",
    "Tokenizer",
]
