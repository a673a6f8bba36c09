"""Tokenizers from files, as Hugging Face models bring them."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from typing_extensions import override

from titanplug.data.subword import TOKENIZER_FILE, SubwordTokenizer
from titanplug.errors import ConfigError


class HFTokenizer(SubwordTokenizer):
    """A tokenizer from a local ``tokenizer.json``, as Hugging Face models bring one.

    Args:
        path: the file, or a folder with ``tokenizer.json`` in it.
        eos_token: the token that ends a document. None takes it from ``tokenizer_config.json`` or
            ``special_tokens_map.json`` beside the file, else the file's only special token.
        bos_token: the token that starts a document. None takes it from the same files; there may be
            none.

    Raises:
        ConfigError: there is no such file, it is none of a tokenizer, or a token is not in it.
    """

    def __init__(self, path: str, eos_token: str | None = None, bos_token: str | None = None) -> None:
        super().__init__()
        file = Path(path).expanduser()
        file = file / TOKENIZER_FILE if file.is_dir() else file
        if not file.is_file():
            raise ConfigError(
                f"tokenizer path={str(path)!r}: there is no file {str(file)!r}. Give the path of a "
                f"{TOKENIZER_FILE} or of a folder that holds one (transformers writes it with "
                "save_pretrained of a fast tokenizer)."
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more special
            raise ConfigError(
                f"tokenizer path={str(path)!r}: {str(file)!r} is no tokenizer file ({error}). "
                f"Give a {TOKENIZER_FILE} of the `tokenizers` library."
            ) from error
        eos_token = eos_token or _read_special_token(file.parent, "eos_token")
        eos_token = eos_token or _only_special_token(backend, file)
        bos_token = bos_token or _read_special_token(file.parent, "bos_token")
        self.eos_id = _require_token(backend, "eos_token", eos_token, file)
        self.bos_id = None
        if bos_token:
            self.bos_id = _require_token(backend, "bos_token", bos_token, file)
        self._vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self._set_backend(backend)

    @property
    @override
    def vocab_size(self) -> int:
        return self._vocab_size


def _read_special_token(folder: Path, role: str) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        token = json.loads(file.read_text("utf-8")).get(role) if file.is_file() else None
        if token is not None:
            return str(token["content"] if isinstance(token, dict) else token)
    return None


def _only_special_token(backend: tokenizers.Tokenizer, file: Path) -> str:
    added = backend.get_added_tokens_decoder().values()
    special = sorted(token.content for token in added if token.special)
    if len(special) != 1:
        raise ConfigError(
            f"eos_token is not given, and {str(file)!r} does not tell which token ends a document. "
            f"Set eos_token to a token of the vocabulary; its special tokens are {special}."
        )
    return special[0]


def _require_token(backend: tokenizers.Tokenizer, role: str, token: str, file: Path) -> int:
    token_id = backend.token_to_id(token)
    if token_id is None:
        raise ConfigError(
            f"{role}={token!r}: {str(file)!r} has no such token. Set {role} to a token of its vocabulary."
        )
    return token_id
