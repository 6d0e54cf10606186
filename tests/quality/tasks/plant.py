"""A prompt with a needle in it, as files, for the quickstart: python3 -m tasks.plant TOKENS FOLDER.

Writes prompt.txt, a haystack of TOKENS ids that ends with the question, and answer.txt, and says in
words what they are.
"""

import os
import sys

import numpy as np

from tasks import registry, vocab

SEED = 1
_AFTER = 3  # two ids of the answer, EOS


def plant(tokens, folder):
    example = registry.make("needle_single", tokens + _AFTER, SEED)
    prompt, answer = example.prompt, [int(i) for i in example.expected()[0]]
    for name, ids in (("prompt", prompt), ("answer", answer)):
        with open(os.path.join(folder, name + ".txt"), "w", encoding="ascii") as file:
            print(*(int(i) for i in ids), file=file)
    place = int(np.flatnonzero(prompt == vocab.NEEDLE)[0])
    key = " ".join(str(int(i)) for i in prompt[-2:])
    value = " ".join(map(str, answer))
    print(f"planted at token {place:,} of {len(prompt):,}: key {key}, value {value}; "
          f"the prompt ends by asking for key {key}")


if __name__ == "__main__":
    plant(int(sys.argv[1]), sys.argv[2])
