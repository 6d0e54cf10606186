"""Tokenizers for the text tasks, behind one small interface.

A tokenizer is anything with encode(text) -> list of ids (no special tokens added) and
decode(ids) -> text. load(folder) reads a model folder's tokenizer.json with the `tokenizers`
package, or any tokenizer of that folder with `transformers`; neither is needed otherwise.
"""

import importlib.util
import os


class _Tokenizers:
    def __init__(self, path):
        from tokenizers import Tokenizer
        self._tokenizer = Tokenizer.from_file(path)

    def encode(self, text):
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


class _Transformers:
    def __init__(self, folder):
        from transformers import AutoTokenizer
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def encode(self, text):
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids):
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


class Bytes:
    """UTF-8 bytes as ids: needs no package and no file. Ids above 255 decode to nothing."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def missing():
    """Why load() cannot work here, or None."""
    if any(importlib.util.find_spec(name) for name in ("tokenizers", "transformers")):
        return None
    return "neither tokenizers nor transformers is importable"


def load(folder):
    """Tokenizer of a model folder. FileNotFoundError without one, ImportError without a package."""
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"tokenizer: {folder!r}, must be a folder")
    reason = missing()
    if reason:
        raise ImportError(f"tokenizer: {reason}")
    path = os.path.join(folder, "tokenizer.json")
    if os.path.exists(path) and importlib.util.find_spec("tokenizers"):
        return _Tokenizers(path)
    if not importlib.util.find_spec("transformers"):
        raise FileNotFoundError(f"tokenizer: {path!r} is missing, and transformers, which could "
                                "read other formats, is not importable")
    return _Transformers(folder)
