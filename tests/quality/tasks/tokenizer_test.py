"""The text tasks with a tokenizer folder: a byte-level BPE, trained here on the tasks' own prose.

Needs `tokenizers` (run_tests.py reports the test as skipped without it); the transformers path is
tested where that is importable too, and its absence is said in the output.
"""

import importlib.util
import json
import pathlib
import tempfile
import unittest

import numpy as np

from tasks import prose, text, tokenizer
from tasks import text_test


def train(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    corpus = prose.sentences(np.random.default_rng(0), 2000)
    built.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"], show_progress=False))
    built.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}))


class Folder(text_test.Text):
    """All of text_test again, then what only a folder can show."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        train(pathlib.Path(self.folder.name))

    def test_folder_gives_shorter_prompts_that_read_back(self):
        built = tokenizer.load(self.folder.name)
        for task in text.TASKS:
            with self.subTest(task=task):
                example = text.make(task, 4096, 0, built)
                self.check(example, built, 4096, 800 if "words" in task else 60)
                self.assertEqual(built.decode(example.ids), example.prompt)
                self.assertGreater(len(example.prompt),
                                   len(text.make(task, 4096, 0, tokenizer.Bytes()).prompt))

    def test_transformers_reads_the_same_ids(self):
        if not importlib.util.find_spec("transformers"):
            self.skipTest("transformers is not importable")
        ours = tokenizer.load(self.folder.name)
        theirs = tokenizer._Transformers(self.folder.name)
        prompt = text.make("qa_documents", 4096, 0, ours).prompt
        self.assertEqual(theirs.encode(prompt), ours.encode(prompt))
        self.assertEqual(theirs.decode(theirs.encode(prompt)), prompt)


if __name__ == "__main__":
    unittest.main()
