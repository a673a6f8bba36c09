"""Documents from files: the shipped text, plain text, JSON lines; and their split into three."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import IO, Literal, TypeAlias

from titanplug.errors import ConfigError, TitanplugError

logger = logging.getLogger(__name__)

Split: TypeAlias = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
Documents: TypeAlias = Mapping[Split, Sequence[str]]

SOTU_FILE = "sotu/sotu.jsonl.xz"
SOTU_SHA256 = "b6659d2e073150b960cf9707a92c45eec7c056ef272d2f352ba41e2c460f7478"
TEXT_SUFFIXES = (".txt",)
JSON_LINES_SUFFIXES = (".jsonl", ".jsonl.xz", ".jsonl.gz")


@dataclass(frozen=True)
class JsonLinesFormat:
    """Which keys of a JSON line mean what.

    Attributes:
        text_key: the text of a document.
        split_key: the split that a document belongs to; None divides the documents by fractions.
        split_names: the value under ``split_key`` for each split, None for a split that is not
            there.
    """

    text_key: str = "text"
    split_key: str | None = None
    split_names: Mapping[Split, str | None] = field(default_factory=lambda: {s: s for s in SPLITS})

    def find_split(self, value: str) -> Split | None:
        """The split that a value under ``split_key`` stands for, None if none."""
        return next((split for split in SPLITS if self.split_names[split] == value), None)


@dataclass(frozen=True)
class Fractions:
    """Shares of the documents that are held out; the rest is for training."""

    validation: float = 0.05
    test: float = 0.05

    def list_problems(self) -> list[str]:
        """What is wrong with the numbers, one sentence each."""
        problems = [
            f"{split}_fraction={value}: a fraction is at least 0 and below 1. Give such a number."
            for split, value in (("validation", self.validation), ("test", self.test))
            if not 0 <= value < 1
        ]
        if not problems and self.validation + self.test >= 1:
            problems.append(
                f"validation_fraction={self.validation} and test_fraction={self.test}: their sum "
                "is below 1, the rest is for training. Give smaller fractions."
            )
        return problems


def read_sotu(json_format: JsonLinesFormat) -> Documents:
    """The shipped State of the Union addresses, split as the file says.

    Raises:
        TitanplugError: the file is not the one that was shipped.
    """
    data = (files("titanplug.data") / SOTU_FILE).read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != SOTU_SHA256:
        raise TitanplugError(
            f"The shipped text {SOTU_FILE} has SHA-256 {digest}, not {SOTU_SHA256}: it is damaged "
            "or was changed. Install titanplug again, or give your own text with path=..."
        )
    lines = lzma.decompress(data).decode("utf-8").split("\n")
    return _parse_json_lines(iter(lines), SOTU_FILE, json_format, Fractions())


def read_documents(path: Path, json_format: JsonLinesFormat, fractions: Fractions) -> Documents:
    """Documents of a local file.

    ``.txt`` is one document, cut by ``fractions`` at line ends: beginning for training, then
    validation, then test. ``.jsonl``, ``.jsonl.xz`` and ``.jsonl.gz`` hold a document a line;
    without ``split_key`` they are divided by the hash of their text, so that the same documents are
    held out in every run. Empty documents are left out.

    Args:
        path: the file, in UTF-8.
        json_format: for JSON lines.
        fractions: for files without splits of their own.

    Raises:
        ConfigError: the kind of file is unknown, or the content is not as the arguments say; the
            line is named.
    """
    if path.name.endswith(TEXT_SUFFIXES):
        return _split_text(_read_text(path), fractions)
    if not path.name.endswith(JSON_LINES_SUFFIXES):
        known = ", ".join(TEXT_SUFFIXES + JSON_LINES_SUFFIXES)
        raise ConfigError(
            f"path={str(path)!r}: the name of a text file ends in one of {known}. Rename it, or "
            "read it with the data module for Hugging Face datasets."
        )
    with _open(path) as lines:
        return _parse_json_lines(lines, str(path), json_format, fractions)


def _open(path: Path) -> IO[str]:
    if path.name.endswith(".xz"):
        return lzma.open(path, "rt", encoding="utf-8")
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"path={str(path)!r}: byte {error.start} is not UTF-8. Convert the file to UTF-8."
        ) from error


def _parse_json_lines(
    lines: Iterator[str], name: str, json_format: JsonLinesFormat, fractions: Fractions
) -> Documents:
    by_split: dict[Split, list[str]] = {split: [] for split in SPLITS}
    unsplit: list[str] = []
    unused: dict[str, int] = {}
    for place, entry in _parse_lines(lines, name):
        text = _get_string(entry, json_format.text_key, "text_key", place)
        if not text:
            continue
        if json_format.split_key is None:
            unsplit.append(text)
            continue
        value = _get_string(entry, json_format.split_key, "split_key", place)
        split = json_format.find_split(value)
        if split is None:
            unused[value] = unused.get(value, 0) + 1
        else:
            by_split[split].append(text)
    if unused:
        logger.warning("%s: documents in splits that are not asked for: %s.", name, unused)
    return _divide(unsplit, fractions) if json_format.split_key is None else by_split


def _parse_lines(lines: Iterator[str], name: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Place and content of each line that is not empty."""
    number = 0
    try:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                entry = json.loads(line)
                if not isinstance(entry, dict):
                    raise ConfigError(
                        f"{name}, line {number}: {type(entry).__name__} found where a JSON object "
                        'is expected. Write one object a line, such as {"text": "..."}.'
                    )
                yield f"{name}, line {number}", entry
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{name}, line {number}: not JSON ({error}). Write one JSON object a line."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}, after line {number}: not UTF-8. Convert the file to UTF-8.") from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise ConfigError(
            f"{name}, after line {number}: the compressed file is damaged or cut off ({error}). "
            "Compress or copy it again."
        ) from error


def _get_string(entry: Mapping[str, object], key: str, argument: str, place: str) -> str:
    if key not in entry:
        raise ConfigError(
            f"{place}: there is no {key!r}, which {argument} names; the keys are {sorted(entry)}. "
            f"Set {argument} to one of them, or correct the line."
        )
    value = entry[key]
    if not isinstance(value, str):
        raise ConfigError(
            f"{place}: {key!r} is {type(value).__name__}, not a string. Set {argument} to a key "
            "that holds strings, or correct the line."
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{place}: {key!r} holds half of a surrogate pair at character {error.start}, which "
            "UTF-8 cannot write. Correct the line."
        ) from error
    return value


def _divide(texts: list[str], fractions: Fractions) -> Documents:
    """Hold out documents by the hash of their text; the order of those in a split stays."""
    num_validation = _count_held_out(fractions.validation, len(texts))
    num_test = _count_held_out(fractions.test, len(texts))
    by_hash = sorted(range(len(texts)), key=lambda i: (hashlib.sha256(texts[i].encode("utf-8")).digest(), i))
    validation = set(by_hash[:num_validation])
    test = set(by_hash[num_validation : num_validation + num_test])
    return {
        "train": [t for i, t in enumerate(texts) if i not in validation and i not in test],
        "validation": [t for i, t in enumerate(texts) if i in validation],
        "test": [t for i, t in enumerate(texts) if i in test],
    }


def _count_held_out(fraction: float, num_texts: int) -> int:
    return max(1, round(fraction * num_texts)) if fraction > 0 else 0


def _split_text(text: str, fractions: Fractions) -> Documents:
    test = _find_line_start(text, round(len(text) * (1 - fractions.test)))
    validation = _find_line_start(text, round(len(text) * (1 - fractions.test - fractions.validation)))
    parts = (text[:validation], text[validation:test], text[test:])
    return {split: [part] if part else [] for split, part in zip(SPLITS, parts, strict=True)}


def _find_line_start(text: str, position: int) -> int:
    """The last line start up to a position, or the position itself in a text without lines."""
    if position >= len(text):
        return len(text)
    line_start = text.rfind("\n", 0, position) + 1
    return line_start or position
