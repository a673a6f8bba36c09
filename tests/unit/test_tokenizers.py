"""Tokenizers: ids, text back, exact bytes, cache, files, errors."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from titanplug.data import BPETokenizer, ByteTokenizer, HFTokenizer
from titanplug.data import subword as subword_module
from titanplug.errors import ConfigError, TitanplugError

TEXTS = [
    "the cat sat on the mat. The cat sat.\n\nThe end",
    "  naïve café — 日本語 🙂 e\u0301\u2028tail ",
    "a<|endoftext|>b",
    "",
]


@pytest.fixture
def bpe(tmp_path):
    tokenizer = BPETokenizer(vocab_size=300)
    tokenizer.prepare(lambda: TEXTS, tmp_path)
    return tokenizer


def save_hf(backend, path, **config):
    backend.save(str(path / "tokenizer.json"))
    if config:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return str(path)


def build_metaspace():
    """As Llama 2 has it: a space put in front, "▁" for spaces, bytes where there is no token."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False
    )
    backend.train_from_iterator(["the cat sat on the mat. The cat sat."], trainer)
    backend = tokenizers.Tokenizer.from_str(backend.to_str())
    return backend


@pytest.mark.parametrize("text", TEXTS)
def test_byte_and_bpe_give_the_text_back_and_count_its_bytes(bpe, text):
    for tokenizer in (ByteTokenizer(), bpe):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size and i != tokenizer.eos_id for i in ids)
        encoded = tokenizer.encode_documents([text])[0]
        assert encoded.ids.tolist() == ids
        # For each token, not only in sum: the bytes up to any token are that much of the text.
        ends = np.cumsum(encoded.num_bytes)
        for n, end in enumerate(ends, start=1):
            prefix = text.encode()[:end].decode("utf-8", errors="replace")
            assert tokenizer.decode(ids[:n]) == prefix
        assert encoded.num_bytes.sum() == len(text.encode())


def test_byte_tokenizer_is_257_ids_and_decodes_broken_utf8():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (257, 256, None)
    assert tokenizer.start_id == tokenizer.eos_id
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.decode([0xC3, 256, 65]) == "\ufffdA"


def test_documents_and_single_texts_give_the_same_ids(bpe):
    assert [e.ids.tolist() for e in bpe.encode_documents(TEXTS)] == [bpe.encode(t) for t in TEXTS]


def test_long_texts_are_cut_where_a_line_begins(bpe, monkeypatch):
    text = "the cat sat on\n the mat.\n\nThe cat\n" * 50 + "no line " * 50
    whole = bpe.encode_documents([text])[0]
    monkeypatch.setattr(subword_module, "PIECE_CHARS", 100)
    monkeypatch.setattr(subword_module, "MAX_SINGLE_THREAD_CHARS", 10)
    monkeypatch.setattr(subword_module, "BATCH_CHARS", 300)
    pieces = subword_module._split_text(text)
    assert len(pieces) > 10 and "".join(pieces) == text
    assert all(piece[0] != "\n" for piece in pieces) and all(p[-1] == "\n" for p in pieces[:-1])
    first, cut, last = bpe.encode_documents(["a", text, "b"])
    assert bpe.decode(cut.ids.tolist()) == text == bpe.decode(whole.ids.tolist())
    assert cut.num_bytes.sum() == len(text.encode())
    assert first.ids.tolist() == bpe.encode("a") and last.ids.tolist() == bpe.encode("b")


def test_bpe_is_trained_once_for_a_text_and_a_size(tmp_path, monkeypatch):
    trained = []
    train = BPETokenizer._train
    monkeypatch.setattr(BPETokenizer, "_train", lambda self, texts: trained.append(1) or train(self, texts))

    def prepare(texts, **arguments):
        tokenizer = BPETokenizer(**arguments)
        tokenizer.prepare(lambda: texts, tmp_path)
        return tokenizer

    first = prepare(TEXTS, vocab_size=262)
    assert prepare(TEXTS, vocab_size=262).identity == first.identity
    assert len(trained) == 1
    assert prepare(TEXTS, vocab_size=263).identity != first.identity
    assert prepare(["dog dog dog", *TEXTS], vocab_size=262).identity != first.identity
    prepare(["".join(TEXTS)], vocab_size=262)  # the same characters, other documents
    prepare(TEXTS, vocab_size=262, min_frequency=3)
    assert len(trained) == 5
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith(".")], "files left aside"


def test_ranks_that_train_at_the_same_time_agree(tmp_path):
    def prepare(_):
        tokenizer = BPETokenizer(vocab_size=300)
        tokenizer.prepare(lambda: TEXTS, tmp_path)
        return tokenizer.identity, tuple(tokenizer.encode(TEXTS[0]))

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(prepare, range(8)))) == 1


def test_bpe_size_does_not_depend_on_the_text(tmp_path, caplog):
    tokenizer = BPETokenizer(vocab_size=4000)
    assert tokenizer.vocab_size == 4000  # before training
    tokenizer.prepare(lambda: TEXTS, tmp_path)
    assert tokenizer.vocab_size == 4000
    assert "fewer than vocab_size=4000" in caplog.text


def test_bpe_is_not_trained_on_nothing(tmp_path):
    for texts in ([], [""]):
        with pytest.raises(ConfigError, match="which has no text here. Name the training split"):
            BPETokenizer().prepare(lambda texts=texts: texts, tmp_path)


def test_a_tokenizer_without_vocabulary_says_so():
    tokenizer = BPETokenizer()
    for use in (lambda: tokenizer.encode("a"), lambda: tokenizer.decode([1])):
        with pytest.raises(TitanplugError, match="no vocabulary yet.*Call setup"):
            use()
    with pytest.raises(TitanplugError, match="no vocabulary yet"):
        _ = tokenizer.identity


def test_a_copy_in_a_worker_takes_special_spellings_as_text_too(bpe):
    copy = pickle.loads(pickle.dumps(bpe))
    assert copy.encode(TEXTS[2]) == bpe.encode(TEXTS[2])
    assert copy.identity == bpe.identity


def test_bad_sizes_are_told_at_once():
    with pytest.raises(ConfigError, match="vocab_size=256.*Give 257") as caught:
        BPETokenizer(vocab_size=256, min_frequency=0)
    assert len(caught.value.problems) == 2
    BPETokenizer(vocab_size=257)


def test_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written to.*Set cache_dir"):
        BPETokenizer(300).prepare(lambda: TEXTS, tmp_path / "file")


def test_saved_bpe_is_the_same_tokenizer_as_a_file(bpe, tmp_path):
    bpe.save(tmp_path / "my.json")
    loaded = HFTokenizer(str(tmp_path / "my.json"))
    assert loaded.identity == bpe.identity
    assert loaded.eos_id == bpe.eos_id and loaded.bos_id is None
    assert [loaded.encode(t) for t in TEXTS] == [bpe.encode(t) for t in TEXTS]


def test_hf_special_tokens_come_from_arguments_or_the_files_beside(tmp_path):
    backend = build_metaspace()
    path = save_hf(backend, tmp_path, eos_token="</s>", bos_token={"content": "<s>"})
    tokenizer = HFTokenizer(path)
    ids = backend.get_vocab()
    assert (tokenizer.eos_id, tokenizer.bos_id) == (ids["</s>"], ids["<s>"])
    assert tokenizer.start_id == tokenizer.bos_id
    assert tokenizer.vocab_size == max(ids.values()) + 1
    other = HFTokenizer(path, eos_token="<s>")
    assert other.eos_id == ids["<s>"] and other.identity != tokenizer.identity
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="does not tell which token ends.*'</s>'"):
        HFTokenizer(path)
    with pytest.raises(ConfigError, match="eos_token='nope'.*no such token"):
        HFTokenizer(path, eos_token="nope")


@pytest.mark.parametrize("text", TEXTS[:3])
def test_bytes_are_exact_where_a_space_is_put_in_front(tmp_path, text):
    tokenizer = HFTokenizer(save_hf(build_metaspace(), tmp_path, eos_token="</s>"))
    encoded = tokenizer.encode_documents([text])[0]
    assert encoded.num_bytes.sum() == len(text.encode())
    assert encoded.num_bytes.min() >= 0


def test_bytes_are_exact_where_the_text_is_normalised(tmp_path):
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.normalizer = normalizers.NFC()  # as Qwen has it: "e" and an accent become one character
    tokenizer = HFTokenizer(save_hf(backend, tmp_path))
    text = "cafe\u0301 e\u0301 cat"
    encoded = tokenizer.encode_documents([text, "plain cat"])
    assert tokenizer.decode(encoded[0].ids.tolist()) != text
    assert encoded[0].num_bytes.sum() == len(text.encode())
    assert encoded[1].num_bytes.sum() == len(b"plain cat")


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ([(0, 1), (1, 2), (2, 5)], [1, 2, 6]),
        ([(0, 0), (0, 1), (1, 2), (1, 2), (3, 4)], [0, 1, 2, 0, 6]),  # é in two tokens, space in none
        ([(1, 2), (0, 1), (2, 4)], [3, 0, 6]),
        ([], []),
    ],
)
def test_bytes_by_offsets_add_up_to_the_text(offsets, expected):
    counted = subword_module._count_bytes_by_offsets("aé 🙂 ", offsets)
    assert counted.tolist() == expected


def test_tokens_added_to_a_byte_level_vocabulary_count_their_own_bytes(bpe, tmp_path, monkeypatch):
    monkeypatch.setattr(subword_module, "_count_bytes_by_offsets", None)
    bpe.save(tmp_path / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens(["größe"])
    tokenizer = HFTokenizer(save_hf(backend, tmp_path))
    encoded = tokenizer.encode_documents(["xgrößey"])[0]
    assert encoded.num_bytes.tolist() == [1, 7, 1]


def test_truncation_and_padding_in_a_file_are_ignored(bpe, tmp_path):
    backend = tokenizers.Tokenizer.from_str(bpe._backend.to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    tokenizer = HFTokenizer(save_hf(backend, tmp_path))
    assert tokenizer.encode(TEXTS[0]) == bpe.encode(TEXTS[0])


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.*there is no file.*Give the path of a tokenizer"):
        HFTokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"there is no file '.*tokenizer\.json'"):
        HFTokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no tokenizer file"):
        HFTokenizer(str(tmp_path))
