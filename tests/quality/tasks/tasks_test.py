"""The token-id tasks: every example is read back by a reader that knows only the vocabulary.

Goal: answers are in the body, unique, scored as documented, and reproducible. Method: oracles
below solve each task from the prompt alone. All values are integers: equality, no tolerance.
"""

import collections
import contextlib
import hashlib
import io
import math
import os
import tempfile
import unittest

import numpy as np

from tasks import example as example_module
from tasks import haystack, mixture, plant, registry, vocab

LENGTHS = (256, 257, 1000, 4096)


def windows(tokens, mark, width):
    """All runs of `width` ids that follow `mark`."""
    return [tuple(tokens[i + 1:i + 1 + width]) for i, token in enumerate(tokens) if token == mark]


def read_needles(tokens, question):
    key = tuple(question[-2:])
    found = [piece[2:] for piece in windows(tokens, vocab.NEEDLE, 4) if piece[:2] == key]
    return found[::-1]


def read_chain(tokens, question):
    value = tuple(question[-2:])
    held = {}
    for i, token in enumerate(tokens):
        if token == vocab.LET:
            held[tokens[i + 3]] = tuple(tokens[i + 1:i + 3])
        elif token == vocab.COPY:
            held[tokens[i + 2]] = held[tokens[i + 1]]
    return [(name,) for name, holds in held.items() if holds == value]


def read_frequencies(tokens, question):
    counts = collections.Counter(token for token in tokens if token in vocab.WORDS)
    top = 5 if question[-1] == vocab.COMMON else 3
    ranked = counts.most_common()
    assert ranked[top - 1][1] > ranked[top][1], "the answer is not unique"
    return [(word,) for word, _ in ranked[:top]]


def read_facts(tokens, question):
    entity, relation = tuple(question[-3:-1]), question[-1]
    current, found = None, []
    for i, token in enumerate(tokens):
        if token == vocab.DOC:
            current = tuple(tokens[i + 1:i + 3])
        elif token == relation and current == entity:
            found.append(tuple(tokens[i + 1:i + 3]))
    return found


def reader(task):
    for prefix, read in (("needle", read_needles), ("variable", read_chain), ("qa", read_facts)):
        if task.startswith(prefix):
            return read
    return read_frequencies


def solve(task, example):
    """Items for each answer, from the prompt and the questions only."""
    prompt = [int(token) for token in example.prompt]
    outputs = []
    for i in range(len(example.answers)):
        question = prompt if i == 0 else [int(token) for token in example.question(i)]
        size = 3 if task.startswith("qa") else 2
        body = prompt[:-size - 1]
        items = reader(task)(body, question[-size:])
        outputs.append([token for item in items for token in item])
    return outputs


class Layout(unittest.TestCase):
    def test_ranges_are_disjoint_and_fill_the_vocabulary(self):
        ranges = [vocab.KEYS, vocab.VALUES, vocab.VARIABLES, vocab.RELATIONS, vocab.WORDS,
                  vocab.FILLER]
        ids = list(range(32)) + [token for part in ranges for token in part]
        self.assertEqual(ids, list(range(vocab.SIZE)))
        marks = [value for name, value in vars(vocab).items()
                 if name.isupper() and isinstance(value, int) and name != "SIZE"]
        self.assertEqual(len(set(marks)), len(marks))
        self.assertLess(max(marks), 32)


class Examples(unittest.TestCase):
    def test_oracle_solves_every_task_from_the_prompt(self):
        for task in registry.TASKS:
            for length in LENGTHS:
                for seed in range(3):
                    with self.subTest(task=task, length=length, seed=seed):
                        example = registry.make(task, length, seed)
                        self.assertEqual(len(example.tokens), length)
                        self.assertEqual(example.tokens.dtype, np.int32)
                        self.assertEqual(example.tokens[0], vocab.BOS)
                        self.assertEqual(example.tokens[-1], vocab.EOS)
                        self.assertEqual(example.answers[-1].end, length - 1)
                        self.assertTrue(((example.tokens > 1) & (example.tokens < vocab.SIZE))
                                        [1:-1].all())
                        outputs = solve(task, example)
                        self.assertEqual([len(output) for output in outputs],
                                         [answer.new_tokens for answer in example.answers])
                        self.assertEqual(example_module.score(example, outputs), 1.0)

    def test_longest(self):
        for task in registry.TASKS:
            example = registry.make(task, registry.MAX_LENGTH, 7)
            self.assertEqual(len(example.tokens), registry.MAX_LENGTH)
            self.assertEqual(example_module.score(example, solve(task, example)), 1.0, task)

    def test_order_of_answers_is_as_documented(self):
        example = registry.make("needle_multi_value", 1000, 1)
        self.assertEqual(solve("needle_multi_value", example)[0],
                         example.tokens[example.answers[0].start:example.answers[0].end].tolist())
        chain = registry.make("variable_tracking", 1000, 1)
        self.assertEqual(solve("variable_tracking", chain)[0],
                         chain.tokens[chain.answers[0].start:chain.answers[0].end].tolist())
        counts = registry.make("frequent_words", 1000, 1)
        self.assertEqual(solve("frequent_words", counts)[0],
                         counts.tokens[counts.answers[0].start:counts.answers[0].end].tolist())

    def test_needles_stand_at_all_depths(self):
        places = []
        for seed in range(40):
            tokens = registry.make("needle_multi_key", 4096, seed).tokens
            places += (np.flatnonzero(tokens == vocab.NEEDLE) / 4096).tolist()
        self.assertEqual(len(places), 40 * 24)
        # 960 uniform draws: a tenth holds 96 +- 9.3, so 50 to 142 is five deviations.
        counts, _ = np.histogram(places, bins=10, range=(0, 1))
        self.assertTrue(((counts > 50) & (counts < 142)).all(), counts)

    def test_reproducible_and_seeded(self):
        for task in registry.TASKS:
            first, again, other = (registry.make(task, 1000, seed).tokens for seed in (5, 5, 6))
            self.assertTrue((first == again).all(), task)
            self.assertFalse((first == other).all(), task)

    def test_tokens_are_those_of_the_published_tables(self):
        """A change of one id changes every figure measured before: then renew docs/quality.md."""
        digest = hashlib.sha256()
        for task in registry.TASKS:
            digest.update(registry.make(task, 2048, 42).tokens.astype("<i4").tobytes())
        for row in range(16):
            digest.update(mixture.sample(1, 2, row, 512).tokens.astype("<i4").tobytes())
        self.assertEqual(digest.hexdigest(),
                         "249edc355dacffb3c3f047f57f110029b88927ac898dc6e93210b053099ab3fe")

    def test_bad_arguments_name_the_field(self):
        rows = [
            ("task", ("needle", 1000, 0), {}),
            ("length", ("needle_single", 255, 0), {}),
            ("length", ("needle_single", 131073, 0), {}),
            ("body", ("needle_multi_key", 256, 0), {"num_needles": 60}),
            ("num_queries", ("needle_single", 256, 0), {"num_queries": 2}),
            ("num_needles", ("needle_single", 256, 0), {"num_needles": 0}),
            ("haystack", ("needle_single", 256, 0), {"kind": "essay"}),
            ("variables", ("variable_tracking", 4096, 0), {"num_chains": 20}),
            ("num_facts", ("qa_documents", 4096, 0), {"num_facts": 9}),
            ("ratio", ("common_words", 4096, 0), {"ratio": 1}),
            ("length", ("common_words", 256, 0), {"ratio": 100}),
            ("density", ("frequent_words", 4096, 0), {"density": 0.9}),
            ("length", ("frequent_words", 256, 0), {"num_frequent": 12}),
        ]
        for field, arguments, params in rows:
            with self.subTest(field=field, arguments=arguments, params=params):
                with self.assertRaisesRegex(ValueError, f"^{field}"):
                    registry.make(*arguments, **params)


class Scores(unittest.TestCase):
    def test_partial_order_and_padding(self):
        example = registry.make("needle_multi_value", 1000, 1)
        items = example.expected()
        flat = [token for item in items for token in item]
        swapped = [token for item in items[::-1] for token in item]
        self.assertEqual(example_module.score(example, [swapped]), 1.0)
        self.assertEqual(example_module.score(example, [flat[:4]]), 0.5)
        self.assertEqual(example_module.score(example, [[*items[0]] * 4]), 0.25)
        self.assertEqual(example_module.score(example, [flat[1:] + flat[:1]]), 0.0)
        self.assertEqual(example_module.score(example, [[0] * 8 + flat]), 0.0)
        self.assertEqual(example_module.score(example, [[]]), 0.0)
        with self.assertRaisesRegex(ValueError, "outputs"):
            example_module.score(example, [flat, flat])

    def test_teacher_forced(self):
        example = registry.make("needle_multi_query", 1000, 1)
        predicted = example.tokens.copy()
        self.assertEqual(example_module.score_teacher_forced(example, predicted), 1.0)
        predicted[example.answers[2].start + 1] += 1
        self.assertEqual(example_module.score_teacher_forced(example, predicted), 0.75)
        predicted[:example.answers[0].start] = 0
        self.assertEqual(example_module.score_teacher_forced(example, predicted), 0.75)


class Haystack(unittest.TestCase):
    def test_language_is_markov_with_the_documented_entropy(self):
        tokens, starts = haystack.sentences(np.random.default_rng(0), 200_000)
        self.assertEqual(len(tokens), 200_000)
        self.assertTrue((tokens[starts[1:] - 1] == vocab.PERIOD).all())
        pairs = collections.Counter(zip(tokens[:-1].tolist(), tokens[1:].tolist()))
        inside = {pair: n for pair, n in pairs.items() if vocab.PERIOD not in pair}
        self.assertLessEqual(len(inside), 12 * len(vocab.FILLER))
        from_state = collections.Counter()
        for (state, _), count in inside.items():
            from_state[state] += count
        total = sum(inside.values())
        entropy = -sum(n / total * math.log(n / from_state[pair[0]]) for pair, n in inside.items())
        share = 1 / np.arange(1, 13)
        share /= share.sum()
        # The plug-in estimate is low by about (12 - 1) * 216 / (2 * 187,000) = 0.006.
        self.assertAlmostEqual(entropy, float(-(share * np.log(share)).sum()), delta=0.02)

    def test_phrases_come_back(self):
        tokens, _ = haystack.sentences(np.random.default_rng(1), 4096, "phrases")
        plain, _ = haystack.sentences(np.random.default_rng(1), 4096, "markov")

        def repeated(ids):
            grams = collections.Counter(tuple(ids[i:i + 6]) for i in range(len(ids) - 5))
            return sum(count for count in grams.values() if count >= 4)

        self.assertGreater(repeated(tokens.tolist()), 80)
        self.assertLess(repeated(plain.tolist()), 10)


class Mixture(unittest.TestCase):
    def test_every_family_is_trained_and_solvable(self):
        seen = collections.Counter()
        for length in (256, 512, 2048):
            for row in range(120):
                example = mixture.sample(0, 1, row, length)
                seen[example.family] += 1
                self.assertEqual(len(example.tokens), length)
                self.assertEqual(
                    example_module.score(example, solve(example.family, example)), 1.0)
        self.assertEqual(set(seen), set(mixture.NAMES))
        self.assertEqual(set(mixture.NAMES), set(registry.TASKS) - {"needle_recall"})

    def test_rows_and_steps_differ_and_never_equal_evaluation(self):
        rows = {mixture.sample(0, step, row, 256).tokens.tobytes()
                for step in range(4) for row in range(64)}
        self.assertEqual(len(rows), 256)
        for task in registry.TASKS:
            for seed in range(8):
                self.assertNotIn(registry.make(task, 256, seed).tokens.tobytes(), rows)


class Plant(unittest.TestCase):
    def test_files_hold_a_question_and_its_answer(self):
        with tempfile.TemporaryDirectory() as folder, \
                contextlib.redirect_stdout(io.StringIO()) as printed:
            plant.plant(1000, folder)
            read = {}
            for name in ("prompt", "answer"):
                with open(os.path.join(folder, name + ".txt"), encoding="ascii") as file:
                    read[name] = [int(word) for word in file.read().split()]
        prompt, answer = read["prompt"], read["answer"]
        self.assertEqual(len(prompt), 1000)
        self.assertEqual(prompt[-3], vocab.ASK)
        place = prompt.index(vocab.NEEDLE)
        self.assertEqual(prompt[place + 1:place + 5], prompt[-2:] + answer)
        self.assertIn(f"token {place:,} of 1,000", printed.getvalue())


if __name__ == "__main__":
    unittest.main()
