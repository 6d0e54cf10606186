"""RULER's task families over token ids: each function builds body and questions of one example.

A family is family(rng, room, **params) -> (body, questions): `room` is the number of tokens
for body, questions and answers together; questions is a list of (question, answer, width).
Needle, tracking and document pieces have a fixed count whatever the length, so the same load of
memory is asked over a longer text; word lists fill the whole length.
"""

import numpy as np

from tasks import haystack, vocab


def _pairs(rng, ids, count):
    """int32 [count, 2]: distinct pairs of ids of a range."""
    side = len(ids)
    if count > side * side:
        raise ValueError(f"pairs: {count}, must be <= {side * side}")
    code = rng.permutation(side * side)[:count]
    return np.stack([code // side, code % side], axis=1).astype(np.int32) + ids.start


def _some(rng, ids, count, name):
    if count > len(ids):
        raise ValueError(f"{name}: {count}, must be <= {len(ids)}")
    return rng.permutation(len(ids))[:count].astype(np.int32) + ids.start


def _body_tokens(room, questions):
    return room - sum(len(question) + len(answer) for question, answer, _ in questions)


def _positive(**named):
    for name, value in named.items():
        if value < 1:
            raise ValueError(f"{name}: {value}, must be >= 1")


def needles(rng, room, num_needles=1, num_values=1, num_queries=1, kind="markov"):
    """num_needles keys, num_values values each, at random depths; num_queries keys are asked.

    Several values of a key are answered latest first: the order in which a memory that
    overwrites finds them.
    """
    _positive(num_needles=num_needles, num_values=num_values, num_queries=num_queries)
    if num_queries > num_needles:
        raise ValueError(f"num_queries: {num_queries}, must be <= num_needles {num_needles}")
    keys = _pairs(rng, vocab.KEYS, num_needles)
    values = _pairs(rng, vocab.VALUES, num_needles * num_values)
    values = values.reshape(num_needles, num_values, 2)
    depths = np.sort(rng.random((num_needles, num_values)), axis=1)
    pieces = [[vocab.NEEDLE, *key, *value] for key, row in zip(keys, values) for value in row]
    asked = rng.permutation(num_needles)[:num_queries]
    questions = [([vocab.ASK, *keys[i]], values[i, ::-1].reshape(-1), 2) for i in asked]
    body = haystack.bury(rng, _body_tokens(room, questions), pieces, depths.reshape(-1), kind)
    return body, questions


def variable_tracking(rng, room, num_chains=2, num_hops=4, kind="markov"):
    """Chains LET v v x1, COPY x1 x2, ... in order, interleaved; one chain is asked by its value."""
    _positive(num_chains=num_chains, num_hops=num_hops)
    names = _some(rng, vocab.VARIABLES, num_chains * (num_hops + 1), "variables")
    names = names.reshape(num_chains, num_hops + 1)
    values = _pairs(rng, vocab.VALUES, num_chains)
    depths = np.sort(rng.random((num_chains, num_hops + 1)), axis=1)
    pieces = []
    for chain, value in zip(names, values):
        pieces.append([vocab.LET, *value, chain[0]])
        pieces += [[vocab.COPY, chain[i], chain[i + 1]] for i in range(num_hops)]
    asked = int(rng.integers(num_chains))
    questions = [([vocab.TRACE, *values[asked]], names[asked], 1)]
    body = haystack.bury(rng, _body_tokens(room, questions), pieces, depths.reshape(-1), kind)
    return body, questions


def _latest_first(body, chosen, counts):
    """chosen words by count, then by their last place, both descending."""
    last = {int(word): int(np.flatnonzero(body == word)[-1]) for word in chosen}
    return sorted((int(word) for word in chosen), key=lambda w: (-counts[w], -last[w]))


def common_words(rng, room, num_common=5, ratio=10):
    """A shuffled list of WORDS; num_common of them stand `ratio` times as often as the others."""
    _positive(num_common=num_common)
    if ratio < 2:
        raise ValueError(f"ratio: {ratio}, must be >= 2")
    words = _some(rng, vocab.WORDS, len(vocab.WORDS), "words")
    chosen, others = words[:num_common], words[num_common:]
    count = room - 2 - num_common  # LIST and COMMON, and the answer
    each = count // (num_common * ratio + len(others))
    if each < 1:
        raise ValueError(f"length: {count} words, must be >= {num_common * ratio + len(others)}")
    # The remainder goes to the common words evenly, then one each to the first of the others.
    rest = count - each * (num_common * ratio + len(others))
    more, rest = divmod(rest, num_common)
    counts = {int(word): each * ratio + more for word in chosen}
    counts.update({int(word): each for word in others})
    for word in others[:rest]:
        counts[int(word)] += 1
    listed = np.repeat(np.array(list(counts), np.int32), list(counts.values()))
    listed = rng.permutation(listed)
    body = np.concatenate([[vocab.LIST], listed]).astype(np.int32)
    return body, [([vocab.COMMON], _latest_first(listed, chosen, counts), 1)]


def frequent_words(rng, room, num_frequent=3, alpha=2.0, density=0.25, kind="markov"):
    """Coded text: a word takes the place of a quarter of the prose, counts fall as rank^-alpha."""
    _positive(num_frequent=num_frequent)
    if not 0 < density <= 0.5 or alpha < 1:
        raise ValueError(f"density: {density}, alpha: {alpha}, must be in (0, 0.5] and >= 1")
    words = _some(rng, vocab.WORDS, len(vocab.WORDS), "words")
    count = room - 2 - num_frequent
    places = int(count * density)
    share = (1.0 + np.arange(len(words))) ** -alpha
    counts = np.floor(places * share / share.sum()).astype(np.int64)
    counts[0] += places - counts.sum()
    top = counts[:num_frequent + 1]
    if (top[:-1] <= top[1:]).any():
        raise ValueError(f"length: {count} tokens are too few to rank {num_frequent} words")
    text, _ = haystack.sentences(rng, count, kind)
    where = rng.permutation(count)[:places]
    text[where] = np.repeat(words, counts)
    body = np.concatenate([[vocab.CODED], text]).astype(np.int32)
    return body, [([vocab.FREQUENT], words[:num_frequent], 1)]


def documents(rng, room, num_documents=8, num_facts=4, num_queries=1, kind="markov"):
    """Documents DOC k k ... r v v ... r v v ...: a fact belongs to the document it stands in.

    All documents use the same relations, so that both the entity and the relation are needed.
    """
    _positive(num_documents=num_documents, num_facts=num_facts, num_queries=num_queries)
    if num_queries > num_documents * num_facts:
        raise ValueError(f"num_queries: {num_queries}, must be <= {num_documents * num_facts}")
    entities = _pairs(rng, vocab.KEYS, num_documents)
    relations = _some(rng, vocab.RELATIONS, num_facts, "num_facts")
    objects = _pairs(rng, vocab.VALUES, num_documents * num_facts)
    objects = objects.reshape(num_documents, num_facts, 2)
    pieces, depths = [], []
    for i in range(num_documents):
        inside = np.sort(rng.random(num_facts))
        pieces.append([vocab.DOC, *entities[i]])
        depths.append(i / num_documents)
        for fact, depth in zip(rng.permutation(num_facts), inside):
            pieces.append([relations[fact], *objects[i, fact]])
            depths.append((i + depth) / num_documents)
    questions = []
    for code in rng.permutation(num_documents * num_facts)[:num_queries]:
        i, fact = divmod(int(code), num_facts)
        questions.append(([vocab.QUESTION, *entities[i], relations[fact]], objects[i, fact], 2))
    return haystack.bury(rng, _body_tokens(room, questions), pieces, depths, kind), questions
