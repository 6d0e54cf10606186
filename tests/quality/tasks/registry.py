"""Names and default parameters of the tasks, and make(): one example from name, length, seed."""

import zlib

import numpy as np

from tasks import example, families, vocab

MIN_LENGTH, MAX_LENGTH = 256, 131072

# name -> (family, its parameters). The counterpart in RULER is named in docs/quality.md.
TASKS = {
    "needle_single": (families.needles, {"num_needles": 1}),
    "needle_multi_key": (families.needles, {"num_needles": 24}),
    "needle_multi_value": (families.needles, {"num_needles": 4, "num_values": 4}),
    "needle_multi_query": (families.needles, {"num_needles": 8, "num_queries": 4}),
    "variable_tracking": (families.variable_tracking, {}),
    "common_words": (families.common_words, {}),
    "frequent_words": (families.frequent_words, {}),
    "qa_documents": (families.documents, {}),
    # Not RULER's: the figure of the acceptance table, every one of 24 needles asked.
    "needle_recall": (families.needles, {"num_needles": 24, "num_queries": 24}),
}

# The first word of every seed: examples of different purposes never share a random stream.
EVALUATION, TRAINING = 1, 2


def _check_length(length):
    if not MIN_LENGTH <= length <= MAX_LENGTH:
        raise ValueError(f"length: {length}, must be in [{MIN_LENGTH}, {MAX_LENGTH}]")


def build(rng, task, length, seed, params):
    """Example of exactly `length` tokens, from a generator that the caller has seeded."""
    _check_length(length)
    family, defaults = TASKS[task]
    params = {**defaults, **params}
    body, questions = family(rng, length - 2, **params)
    parts, answers, at = [[vocab.BOS], body], [], 1 + len(body)
    for question, answer, width in questions:
        start = at + len(question)
        at = start + len(answer)
        answers.append(example.Answer(start, at, width))
        parts += [question, answer]
    tokens = np.concatenate([*parts, [vocab.EOS]]).astype(np.int32)
    assert len(tokens) == length
    return example.Example(task, length, seed, params, tokens, tuple(answers))


def make(task, length, seed, **params):
    """The example that (task, length, seed, params) names, the same on every machine.

    task: a key of TASKS. length: 256 to 131072; needle_recall needs 512. seed: >= 0. ValueError
    when a task does not fit its length.
    """
    if task not in TASKS:
        raise ValueError(f"task: {task!r}, must be one of {', '.join(TASKS)}")
    rng = np.random.default_rng([EVALUATION, zlib.crc32(task.encode()), length, seed])
    return build(rng, task, length, seed, params)
