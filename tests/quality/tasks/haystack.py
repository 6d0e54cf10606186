"""The haystack: sentences of a fixed small language, into which a task's pieces are put.

A sentence is a walk of a first-order Markov chain over vocab.FILLER, 7 to 23 tokens, then PERIOD.
The chain is fixed (LANGUAGE_SEED): it is the language that a model learns. All sentences of a
haystack are drawn at once, so 131,072 tokens take milliseconds.

Two kinds:
  markov   nothing but the language: a model needs no memory for it
  phrases  half of the sentences hold one of 16 phrases of 6 tokens that are drawn for this
           haystack alone: they can be predicted only from their earlier occurrences, so that the
           likelihood of the haystack itself depends on the recurrent state
"""

import numpy as np

from tasks import vocab

KINDS = ("markov", "phrases")

LANGUAGE_SEED = 20261201
_SUCCESSORS = 12
_SHORTEST, _LONGEST = 8, 24  # tokens of a sentence, its PERIOD included
_PHRASES, _PHRASE_TOKENS = 16, 6


def _language():
    """(start cumulative [F], successor cumulative [12], successors [F, 12] as offsets)."""
    rng = np.random.default_rng(LANGUAGE_SEED)
    count = len(vocab.FILLER)
    start = 1.0 / (1.0 + rng.permutation(count))
    step = 1.0 / (1.0 + np.arange(_SUCCESSORS))
    successors = np.argsort(rng.random((count, count)), axis=1)[:, :_SUCCESSORS]
    return np.cumsum(start / start.sum()), np.cumsum(step / step.sum()), successors


_START, _STEP, _NEXT = _language()


def _draw(cumulative, uniform):
    return np.minimum(np.searchsorted(cumulative, uniform), len(cumulative) - 1)


def sentences(rng, count, kind="markov"):
    """(tokens int32 [count], starts int64): whole sentences, but the last may be cut short."""
    if kind not in KINDS:
        raise ValueError(f"haystack: {kind!r}, must be one of {', '.join(KINDS)}")
    rows = count // _SHORTEST + 1
    lengths = rng.integers(_SHORTEST, _LONGEST + 1, size=rows)
    rows = int(np.searchsorted(np.cumsum(lengths), count)) + 1
    lengths = lengths[:rows]
    text = np.empty((rows, _LONGEST), np.int64)
    uniform = rng.random((_LONGEST, rows))
    state = _draw(_START, uniform[0])
    for column in range(_LONGEST):
        text[:, column] = state
        if column + 1 < _LONGEST:
            state = _NEXT[state, _draw(_STEP, uniform[column + 1])]
    if kind == "phrases":
        phrases = rng.integers(0, len(vocab.FILLER), size=(_PHRASES, _PHRASE_TOKENS))
        chosen = np.flatnonzero(rng.random(rows) < 0.5)
        text[chosen, 1:1 + _PHRASE_TOKENS] = phrases[rng.integers(0, _PHRASES, size=len(chosen))]
    text += vocab.FILLER.start
    text[np.arange(rows), lengths - 1] = vocab.PERIOD
    tokens = text[np.arange(_LONGEST) < lengths[:, None]][:count].astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return tokens, starts[starts <= count]


def bury(rng, count, pieces, depths, kind="markov"):
    """Body int32 [count]: sentences with `pieces` between them.

    pieces: sequences of ids. depths: for each, in [0, 1], the share of the haystack before it,
    moved back to the start of a sentence; pieces of equal place keep their order.
    """
    flat = [np.asarray(piece, np.int32) for piece in pieces]
    used = sum(len(piece) for piece in flat)
    if used > count:
        raise ValueError(f"body: {count} tokens, must be >= {used}, what the task's pieces take")
    tokens, starts = sentences(rng, count - used, kind)
    places = np.asarray(depths, np.float64) * (count - used)
    places = starts[np.searchsorted(starts, places, side="right") - 1]
    order = np.argsort(places, kind="stable")
    flat = [flat[i] for i in order]
    where = np.repeat(places[order], [len(piece) for piece in flat])
    return np.insert(tokens, where, np.concatenate(flat)) if flat else tokens
