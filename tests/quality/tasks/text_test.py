"""The text tasks, with a byte tokenizer that needs no package.

Goal: prompts fill the length and hold their answers. Method: the facts are read back from the
prompt with regular expressions. Equality everywhere.
"""

import collections
import re
import unittest

from tasks import text, tokenizer

BYTES = tokenizer.Bytes()


def read(example):
    """Expected strings, found from the prompt alone."""
    prompt, question = example.prompt, example.prompt.rsplit("\n\n", 1)[1]
    if example.family.startswith("needle"):
        topic = re.search(r"numbers for (.*?) in the text", question).group(1).split(", ")
        return [value for key, value in
                re.findall(r"magic numbers for (\S+) is: (\d+)\.", prompt) if key in topic]
    if example.family == "variable_tracking":
        wanted = re.search(r"hold the value (\d+)\?", question).group(1)
        held = {}
        for name, digits, other in re.findall(r"VAR (\w+) = (?:(\d+)|VAR (\w+))\.", prompt):
            held[name] = digits or held[other]
        return [name for name, value in held.items() if value == wanted]
    if example.family == "qa_documents":
        who, what = re.search(r"about (\w+): what is the (.*?)\?", question).groups()
        document = re.search(rf"about {who}\. (.*)", prompt).group(1)
        return [re.search(rf"The {what} is (\w+)\.", document).group(1)]
    counts = collections.Counter(re.findall(r"\d+\. (\w+)", prompt)).most_common()
    top = len(example.expected)
    assert counts[top - 1][1] > counts[top][1], "the answer is not unique"
    return [word for word, _ in counts[:top]]


class Text(unittest.TestCase):
    def check(self, example, tok, length, slack):
        self.assertEqual(set(read(example)), set(example.expected))
        self.assertEqual(tok.encode(example.prompt), example.ids)
        used = len(example.ids) + example.new_tokens
        self.assertLessEqual(used, length)
        self.assertGreater(used, length - slack)
        self.assertEqual(text.score(example, " and ".join(example.expected).upper()), 1.0)
        self.assertEqual(text.score(example, "nothing of it"), 0.0)

    def test_every_task_fills_its_length_and_can_be_answered(self):
        for task in text.TASKS:
            for length in (4096, 16384):
                for seed in (0, 1):
                    with self.subTest(task=task, length=length, seed=seed):
                        example = text.make(task, length, seed, BYTES)
                        # One more round of the word list, or one sentence, would not fit.
                        self.check(example, BYTES, length, 1500 if "words" in task else 120)

    def test_reproducible_and_seeded(self):
        for task in text.TASKS:
            first, again, other = (text.make(task, 4096, seed, BYTES).prompt for seed in (5, 5, 6))
            self.assertEqual(first, again)
            self.assertNotEqual(first, other)

    def test_partial_score(self):
        example = text.make("needle_multi_value", 4096, 0, BYTES)
        self.assertEqual(text.score(example, example.expected[2]), 0.25)

    def test_chat_wraps_the_question(self):
        example = text.make("needle_single", 4096, 0, BYTES, chat=True)
        self.assertTrue(example.prompt.startswith("<|im_start|>user\n"))
        self.assertIn("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nThe special",
                      example.prompt)
        self.assertLessEqual(len(example.ids) + example.new_tokens, 4096)

    def test_bad_arguments_name_the_field(self):
        with self.assertRaisesRegex(ValueError, "^task"):
            text.make("needle", 4096, 0, BYTES)
        with self.assertRaisesRegex(ValueError, "^length: 300, must be >= "):
            text.make("needle_multi_key", 300, 0, BYTES)
        with self.assertRaisesRegex(FileNotFoundError, "^tokenizer"):
            tokenizer.load("/nowhere")


if __name__ == "__main__":
    unittest.main()
