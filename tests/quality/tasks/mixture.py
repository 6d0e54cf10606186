"""What models are trained on: every task family with varied parameters, at one length a batch."""

import numpy as np

from tasks import registry

# Shares of the examples. Needles carry most: they teach the recall that all others build on.
SHARES = {
    "needle_multi_query": 0.36,
    "needle_multi_key": 0.08,
    "needle_single": 0.04,
    "needle_multi_value": 0.12,
    "variable_tracking": 0.12,
    "common_words": 0.06,
    "frequent_words": 0.06,
    "qa_documents": 0.16,
}
NAMES = tuple(SHARES)
_CUMULATIVE = np.cumsum(list(SHARES.values())) / sum(SHARES.values())
_PHRASES_SHARE = 0.25


def _parameters(rng, task, length, most):
    """Random parameters that fit `length`; the loads of registry.TASKS lie inside their ranges."""
    most = max(2, min(most, length // 24))  # pieces with their filler
    if task == "needle_multi_query":
        count = int(rng.integers(2, most + 1))
        return {"num_needles": count, "num_queries": int(rng.integers(1, min(count, 24) + 1))}
    if task == "needle_multi_key":
        return {"num_needles": int(rng.integers(2, most + 1))}
    if task == "needle_multi_value":
        return {"num_needles": int(rng.integers(1, max(2, most // 4) + 1)),
                "num_values": int(rng.integers(2, 5)), "num_queries": 1}
    if task == "variable_tracking":
        return {"num_chains": int(rng.integers(1, 4)), "num_hops": int(rng.integers(1, 5))}
    if task == "qa_documents":
        facts = int(rng.integers(2, 5))
        count = int(rng.integers(2, max(3, min(most, 10, length // 64)) + 1))
        return {"num_documents": count, "num_facts": facts,
                "num_queries": int(rng.integers(1, min(8, count * facts) + 1))}
    return {}


def sample(seed, step, row, length, most=32, counting=True):
    """Example `row` of training step `step`: a function of its arguments alone.

    most bounds needles, values and documents; without `counting` no words are counted, needles are
    asked instead.
    """
    rng = np.random.default_rng([registry.TRAINING, seed, step, row])
    task = NAMES[min(int(np.searchsorted(_CUMULATIVE, rng.random())), len(NAMES) - 1)]
    if not counting and task in ("common_words", "frequent_words"):
        task = "needle_multi_query"
    params = _parameters(rng, task, length, most)
    if task != "common_words" and rng.random() < _PHRASES_SHARE:
        params["kind"] = "phrases"
    return registry.build(rng, task, length, seed, params)
