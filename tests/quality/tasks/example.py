"""One example of a task: its tokens, where the answers stand, and how an output is scored."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Answer:
    """tokens[start:end] answers the question that ends at start.

    It is made of items of `width` tokens. The order of items does not count in the score, as in
    RULER's recall metrics; the order in the example is the one that models are trained on.
    """

    start: int
    end: int
    width: int

    @property
    def new_tokens(self):
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class Example:
    """tokens int32 [length]: BOS, body, question, answer [, question, answer ...], EOS.

    The prompt of an evaluation is tokens[:answers[0].start]. Where a task has several questions
    over one body, the later ones follow the answer before: tokens[a.end:b.start] is the next
    question. `params` are the family's parameters, `seed` and `length` reproduce it.
    """

    family: str
    length: int
    seed: int
    params: dict
    tokens: np.ndarray
    answers: tuple

    @property
    def prompt(self):
        return self.tokens[:self.answers[0].start]

    def expected(self, index=0):
        """The items of answer `index`, a list of tuples of ids."""
        answer = self.answers[index]
        return _items(self.tokens[answer.start:answer.end], answer.width)

    def question(self, index):
        """What follows answer index - 1 up to answer `index`; for index 0 it ends the prompt."""
        return self.tokens[self.answers[index - 1].end:self.answers[index].start]


def _items(tokens, width):
    tokens = [int(token) for token in tokens]
    return [tuple(tokens[i:i + width]) for i in range(0, len(tokens) - width + 1, width)]


def score(example, outputs):
    """Share of expected items found, in [0, 1].

    outputs: one sequence of generated ids per answer. Of each, only as many tokens count as the
    answer has, so that listing everything is not rewarded; items must stand at whole positions.
    """
    if len(outputs) != len(example.answers):
        raise ValueError(f"outputs: {len(outputs)} sequences, must be {len(example.answers)}")
    found = wanted = 0
    for index, (answer, output) in enumerate(zip(example.answers, outputs)):
        expected = set(example.expected(index))
        found += len(expected & set(_items(list(output)[:answer.new_tokens], answer.width)))
        wanted += len(expected)
    return found / wanted


def score_teacher_forced(example, predicted):
    """Share of items of which every token is predicted from the true tokens before it.

    predicted int [length]: predicted[t] is the most likely token after tokens[:t]. An item that
    greedy decoding gets right after a right prefix is right here too, and a fully right answer is
    the same in both; it costs one pass for all answers.
    """
    hits = []
    for answer in example.answers:
        right = np.asarray(predicted)[answer.start:answer.end] == \
            example.tokens[answer.start:answer.end]
        hits.append(right.reshape(-1, answer.width).all(axis=1))
    return float(np.concatenate(hits).mean())
