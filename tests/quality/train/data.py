"""Training batches: pure functions of (plan, seed, step), made by worker processes ahead of time.

Nothing here needs torch, so workers start fast, and a run that resumes at a step sees the batches
that an uninterrupted run would have seen, whatever the number of workers.
"""

import collections
import dataclasses
import multiprocessing

import numpy as np

from tasks import mixture, registry, vocab


@dataclasses.dataclass(frozen=True)
class Stage:
    """`steps` steps of about `tokens` tokens, of examples of at most `length`."""

    length: int
    tokens: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Curriculum. In a stage 60 % of the steps have its length, the others one of those before.

    carry_share: share of steps (from carry_length tokens on) in which half of the rows start from
    states that earlier rows ended with, so that states are trained that have seen more than
    `length` tokens. gaps: half of the rows have up to 3 jumps in their positions, up to 131072 in
    all, so that full attention has met every distance (no use without it).
    """

    stages: tuple
    carry_share: float = 0.3
    carry_length: int = 1024
    gaps: bool = False

    @property
    def steps(self):
        return sum(stage.steps for stage in self.stages)


# 393 M tokens in 4700 steps.
DEFAULT_STAGES = (Stage(256, 65536, 1500), Stage(512, 65536, 800), Stage(1024, 65536, 800),
                  Stage(2048, 98304, 600), Stage(4096, 131072, 500), Stage(8192, 131072, 500))


def default_plan(steps_scale=1.0, tokens_scale=1.0, gaps=False):
    """The plan of the bundled models; the scales multiply every stage's steps and tokens."""
    return Plan(tuple(Stage(stage.length, max(stage.length, round(stage.tokens * tokens_scale)),
                            max(1, round(stage.steps * steps_scale)))
                      for stage in DEFAULT_STAGES), gaps=gaps)


@dataclasses.dataclass
class Batch:
    """tokens int16 [B, T]; answers bool [B, T], true where the token belongs to an answer;
    families int8 [B], indices of mixture.NAMES; positions int32 [B, T] or None; carried int16 [B],
    the slot of the state pool that a row starts from, -1 for zeros, or None for no carried row."""

    step: int
    tokens: np.ndarray
    answers: np.ndarray
    families: np.ndarray
    positions: np.ndarray
    carried: np.ndarray


def _stage(plan, step):
    for index, stage in enumerate(plan.stages):
        if step < stage.steps:
            return index, stage
        step -= stage.steps
    raise ValueError(f"step: beyond the plan's {plan.steps} steps")


def _gapped(rng, rows, length):
    """Positions int32 [rows, length] with jumps in half of the rows."""
    jumps = np.zeros((rows, length), np.int64)
    for row in np.flatnonzero(rng.random(rows) < 0.5):
        count = int(rng.integers(1, 4))
        largest = (registry.MAX_LENGTH - length) / count
        places = rng.integers(1, length, size=count)
        np.add.at(jumps[row], places, np.exp(rng.random(count) * np.log(largest)).astype(np.int64))
    return (np.arange(length) + np.cumsum(jumps, axis=1)).astype(np.int32)


def batch(plan, seed, step, pool_slots):
    """The Batch of a step."""
    rng = np.random.default_rng([registry.TRAINING, seed, step])
    index, stage = _stage(plan, step)
    length = stage.length
    if index and rng.random() >= 0.6:
        length = plan.stages[int(rng.integers(index))].length
    rows = max(1, stage.tokens // length)
    examples = [mixture.sample(seed, step, row, length) for row in range(rows)]
    tokens = np.stack([example.tokens for example in examples]).astype(np.int16)
    answers = np.zeros(tokens.shape, bool)
    for row, example in enumerate(examples):
        for answer in example.answers:
            answers[row, answer.start:answer.end] = True
    families = np.array([mixture.NAMES.index(example.family) for example in examples], np.int8)
    carried = None
    if pool_slots and length >= plan.carry_length and rng.random() < plan.carry_share:
        carried = np.where(rng.random(rows) < 0.5, rng.integers(pool_slots, size=rows), -1)
        carried = carried.astype(np.int16)
        # A carried row goes on with a text: a BOS would teach to forget at BOS instead.
        tokens[carried >= 0, 0] = vocab.PERIOD
    positions = _gapped(rng, rows, length) if plan.gaps else None
    return Batch(step, tokens, answers, families, positions, carried)


class Loader:
    """Iterates over the batches of steps first .. plan.steps - 1, `workers` processes ahead.

    Make it before CUDA is touched: workers are forked. workers = 0 builds batches in place.
    """

    def __init__(self, plan, seed, first, pool_slots, workers):
        self._arguments = (plan, seed, pool_slots)
        self._next, self._last = first, plan.steps
        self._ahead = 3 * workers
        self._pending = collections.deque()
        self._pool = multiprocessing.get_context("fork").Pool(workers) if workers else None

    def __iter__(self):
        plan, seed, slots = self._arguments
        while True:
            while self._pool and self._next < self._last and len(self._pending) < self._ahead:
                self._pending.append(self._pool.apply_async(batch, (plan, seed, self._next, slots)))
                self._next += 1
            if self._pending:
                yield self._pending.popleft().get(timeout=120)
            elif not self._pool and self._next < self._last:
                self._next += 1
                yield batch(plan, seed, self._next - 1, slots)
            else:
                return

    def close(self):
        if self._pool:
            self._pool.terminate()
            self._pool.join()
