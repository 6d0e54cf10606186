"""The same families as English text, for models with a tokenizer.

A prompt is an instruction, a body that is grown until the tokens fill the length, a question and
the opening of the answer, as in RULER. make() gives ids; lengths count the answer's room too.
"""

import dataclasses
import zlib

import numpy as np

from tasks import prose

TASKS = ("needle_single", "needle_multi_key", "needle_multi_value", "needle_multi_query",
         "variable_tracking", "common_words", "frequent_words", "qa_documents")
_TEXT_EVALUATION = 3  # first word of the seed; see registry.EVALUATION

# What a chat model expects around a question, thinking switched off; see chat= of make().
CHAT = ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


@dataclasses.dataclass(frozen=True)
class TextExample:
    """prompt: text; ids: its tokens; expected: strings that the continuation must hold."""

    family: str
    length: int
    seed: int
    prompt: str
    ids: list
    expected: tuple
    new_tokens: int


@dataclasses.dataclass(frozen=True)
class _Task:
    """instruction, body(size) -> text for size >= 0, question, opening of the answer, answers."""

    instruction: str
    body: object
    question: str
    opening: str
    expected: tuple


def score(example, output):
    """Share of expected strings that stand in the output's text, whatever their case."""
    output = output.lower()
    return sum(item.lower() in output for item in example.expected) / len(example.expected)


def _spread(rng, pieces, ordered=False):
    """body(size): `size` sentences of filler, with pieces at depths drawn once."""
    depths = rng.random(len(pieces))
    if ordered:
        depths.sort()
    filler_seed = int(rng.integers(2**62))

    def body(size):
        text = prose.sentences(np.random.default_rng(filler_seed), size)
        at = [(int(depth * size), 0, i, piece)
              for i, (depth, piece) in enumerate(zip(depths, pieces))]
        lines = sorted(at + [(i, 1, 0, line) for i, line in enumerate(text)])
        return " ".join(line[3] for line in lines)

    return body


def _needles(rng, num_needles=1, num_values=1, num_queries=1):
    keys = prose.pick(rng, prose.KEYS, num_needles)
    values = np.array(prose.numbers(rng, num_needles * num_values)).reshape(num_needles, num_values)
    pieces = [f"One of the special magic numbers for {key} is: {value}."
              for key, row in zip(keys, values) for value in row]
    asked = list(rng.permutation(num_needles)[:num_queries])
    topic = ", ".join(keys[i] for i in asked)
    return _Task("Some special magic numbers are hidden in the text below. Memorize them.",
                 _spread(rng, pieces),
                 f"What are all the special magic numbers for {topic} in the text above?",
                 f"The special magic numbers for {topic} are",
                 tuple(str(value) for i in asked for value in values[i]))


def _variable_tracking(rng, num_chains=2, num_hops=4):
    names = [name.upper() for name in prose.names(rng, num_chains * (num_hops + 1))]
    names = np.array(names).reshape(num_chains, num_hops + 1)
    values = prose.numbers(rng, num_chains)
    # Chains are interleaved but each in order: sort each chain's depths, not all.
    order = np.argsort(np.sort(rng.random(names.shape), axis=1).reshape(-1), kind="stable")
    lines = [f"VAR {chain[0]} = {value}." if hop == 0 else
             f"VAR {chain[hop]} = VAR {chain[hop - 1]}."
             for chain, value in zip(names, values) for hop in range(num_hops + 1)]
    asked = int(rng.integers(num_chains))
    return _Task("Variables are assigned in the text below, also to one another. Track them.",
                 _spread(rng, [lines[i] for i in order], ordered=True),
                 f"Which variables hold the value {values[asked]}?",
                 f"The {num_hops + 1} variables that hold the value {values[asked]} are",
                 tuple(str(name) for name in names[asked]))


def _listed(rng, counts_of, words, instruction, question, opening, expected):
    seed = int(rng.integers(2**62))

    def body(size):
        counts = counts_of(size)
        order = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(words)), counts))
        return " ".join(f"{place}. {words[i]}" for place, i in enumerate(order, 1))

    return _Task(instruction, body, question, opening, tuple(expected))


def _common_words(rng, num_common=5, ratio=10, num_others=55):
    words = prose.pick(rng, prose.NOUNS, num_common + num_others)

    def counts(size):
        base = np.array([ratio] * num_common + [1] * num_others)
        return base * (1 + size // base.sum())

    return _listed(rng, counts, words, "Below is a numbered list of words. Some are more common.",
                   f"What are the {num_common} most common words in the list above?",
                   "The most common words are", words[:num_common])


def _frequent_words(rng, num_frequent=3, alpha=2.0, num_words=40):
    words = prose.names(rng, num_words)
    share = (1.0 + np.arange(num_words)) ** -alpha

    def counts(size):
        return np.floor((40 + size) * share / share.sum()).astype(int)

    return _listed(rng, counts, words, "Below is a coded text. Find its most frequent words.",
                   f"What are the {num_frequent} most frequent words in the coded text above?",
                   "The most frequent words are", words[:num_frequent])


def _qa_documents(rng, num_documents=8):
    people = [name.capitalize() for name in prose.names(rng, num_documents)]
    facts = np.array([prose.names(rng, len(prose.RELATIONS)) for _ in people])
    seeds = rng.integers(2**62, size=num_documents)

    def body(size):
        parts = []
        for i, person in enumerate(people):
            lines = [f"The {what} is {fact}." for what, fact in zip(prose.RELATIONS, facts[i])]
            share = size // num_documents + (i < size % num_documents)
            inside = _spread(np.random.default_rng(seeds[i]), lines)(share)
            parts.append(f"Document {i + 1}, about {person}. {inside}")
        return "\n".join(parts)

    i, what = int(rng.integers(num_documents)), int(rng.integers(len(prose.RELATIONS)))
    return _Task("Answer the question from the documents below. Give only the answer.", body,
                 f"In the document about {people[i]}: what is the {prose.RELATIONS[what]}?",
                 f"The {prose.RELATIONS[what]} of {people[i]} is", (str(facts[i, what]),))


_FAMILIES = {
    "needle_single": (_needles, {}),
    "needle_multi_key": (_needles, {"num_needles": 24}),
    "needle_multi_value": (_needles, {"num_needles": 4, "num_values": 4}),
    "needle_multi_query": (_needles, {"num_needles": 8, "num_queries": 4}),
    "variable_tracking": (_variable_tracking, {}),
    "common_words": (_common_words, {}),
    "frequent_words": (_frequent_words, {}),
    "qa_documents": (_qa_documents, {}),
}


def _largest(fits):
    """The largest size >= 0 with fits(size), None without one; fits must fall only once."""
    if not fits(0):
        return None
    high = 1
    while fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def make(task, length, seed, tokenizer, chat=False, **params):
    """TextExample whose ids and room for the answer together take at most `length` tokens.

    The body is the longest that fits. chat wraps the question in CHAT. ValueError when the task's
    pieces alone do not fit.
    """
    if task not in _FAMILIES:
        raise ValueError(f"task: {task!r}, must be one of {', '.join(TASKS)}")
    family, defaults = _FAMILIES[task]
    rng = np.random.default_rng([_TEXT_EVALUATION, zlib.crc32(task.encode()), length, seed])
    built = family(rng, **{**defaults, **params})
    before, after = CHAT if chat else ("", "\n")
    # The answer may be worded: half as many tokens again, and 16.
    new_tokens = 16 + 3 * len(tokenizer.encode(", ".join(built.expected))) // 2

    def prompt(size):
        return (f"{before}{built.instruction}\n\n{built.body(size)}\n\n{built.question}"
                f"{after}{built.opening}")

    size = _largest(lambda size: len(tokenizer.encode(prompt(size))) + new_tokens <= length)
    if size is None:
        least = len(tokenizer.encode(prompt(0))) + new_tokens
        raise ValueError(f"length: {length}, must be >= {least} for {task} with this tokenizer")
    text = prompt(size)
    return TextExample(task, length, seed, text, tokenizer.encode(text), built.expected, new_tokens)
