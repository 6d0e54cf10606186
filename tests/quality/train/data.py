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
    """`steps` steps of about `tokens` tokens, of examples of `length` tokens.

    most: no more needles, values or documents than this in an example. stream: above 1, a row is
    one piece of an example `stream` times as long, and goes on from the state that the row ended
    with in the step before; the row's place in its example is staggered, so that in every step
    rows / stream rows reach their questions.
    """

    length: int
    tokens: int
    steps: int
    most: int = 32
    stream: int = 1

    @property
    def rows(self):
        return max(1, self.tokens // self.length)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Curriculum. In a stage 60 % of the steps are its own, the others of a stage before; of a
    stage with streams, the first three of every four steps.

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

    @property
    def stream_rows(self):
        """Rows whose state outlives a step."""
        return max(stage.rows if stage.stream > 1 else 0 for stage in self.stages)


# Few needles first, short and in small steps: recall sets in after some hundred steps, whatever
# their size. 174 M tokens in 4700 steps.
DEFAULT_STAGES = (Stage(256, 16384, 500, most=4), Stage(256, 16384, 1300),
                  Stage(512, 32768, 700), Stage(1024, 32768, 700), Stage(2048, 65536, 500),
                  Stage(4096, 65536, 450), Stage(8192, 65536, 300),
                  Stage(8192, 65536, 250, stream=4))


# After it, with sparse rows (sparsity.py): to 131072 tokens through states.
SPARSE_STAGES = (Stage(2048, 65536, 200), Stage(8192, 65536, 500),
                 Stage(8192, 65536, 500, stream=4), Stage(8192, 65536, 800, stream=16))


def default_plan(steps_scale=1.0, tokens_scale=1.0, gaps=False, stages=None):
    """The plan of the bundled models; the scales multiply every stage's steps and tokens.

    With gaps no streams: attention would need the keys of the pieces before.
    """
    stages = DEFAULT_STAGES if stages is None else stages
    return Plan(tuple(dataclasses.replace(
        stage, tokens=max(stage.length, round(stage.tokens * tokens_scale)),
        steps=max(1, round(stage.steps * steps_scale)), stream=1 if gaps else stage.stream)
        for stage in stages), gaps=gaps)


GOES_ON = -2  # in Batch.carried
STREAM_ROW = 1 << 20  # rows of streams never share a seed with others


@dataclasses.dataclass
class Batch:
    """tokens int16 [B, T]; answers bool [B, T], true where the token belongs to an answer;
    families int8 [B], indices of mixture.NAMES; positions int32 [B, T] or None; carried int16 [B],
    the slot of the state pool that a row starts from, -1 for zeros, GOES_ON for the row's own last
    state, or None for no carried row. streams: the rows' final states are kept for GOES_ON."""

    step: int
    tokens: np.ndarray
    answers: np.ndarray
    families: np.ndarray
    positions: np.ndarray
    carried: np.ndarray
    streams: bool = False


def _stage(plan, step):
    """(index of the stage, step within it)"""
    for index, stage in enumerate(plan.stages):
        if step < stage.steps:
            return index, step
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


def _stream(plan, seed, first, stage, step):
    """The Batch of step `step` of a stage with streams; `first` is the stage's first step."""
    number = step - step // 4  # steps of the stage's own before this one
    tokens, answers, families, carried = [], [], [], []
    for row in range(stage.rows):
        group, piece = divmod(number + row, stage.stream)
        example = mixture.sample(seed, first + group, STREAM_ROW + row,
                                 stage.length * stage.stream, stage.most, counting=False)
        part = slice(piece * stage.length, (piece + 1) * stage.length)
        mask = _answer_mask(example)[part]
        begun = number >= piece  # the row's first pieces lie before the stage: no answer is known
        tokens.append(example.tokens[part])
        answers.append(mask & begun)
        families.append(mixture.NAMES.index(example.family))
        carried.append(GOES_ON if piece and begun else -1)
    return Batch(first + step, np.stack(tokens).astype(np.int16), np.stack(answers),
                 np.array(families, np.int8), None, np.array(carried, np.int16), streams=True)


def _answer_mask(example):
    mask = np.zeros(len(example.tokens), bool)
    for answer in example.answers:
        mask[answer.start:answer.end] = True
    return mask


def batch(plan, seed, step, pool_slots):
    """The Batch of a step."""
    rng = np.random.default_rng([registry.TRAINING, seed, step])
    index, place = _stage(plan, step)
    stage = plan.stages[index]
    if stage.stream > 1 and place % 4 < 3:
        return _stream(plan, seed, step - place, stage, place)
    if index and (stage.stream > 1 or rng.random() >= 0.6):
        stage = plan.stages[int(rng.integers(index))]
    length, rows = stage.length, stage.rows
    examples = [mixture.sample(seed, step, row, length, stage.most) for row in range(rows)]
    tokens = np.stack([example.tokens for example in examples]).astype(np.int16)
    answers = np.stack([_answer_mask(example) for example in examples])
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

    Make it before CUDA is touched: workers are forked. workers = 0 builds batches in place. `plan`
    may be replaced until the first batch is taken.
    """

    def __init__(self, plan, seed, first, pool_slots, workers):
        self.plan, self._seed, self._slots = plan, seed, pool_slots
        self._next = first
        self._ahead = 3 * workers
        self._pending = collections.deque()
        self._pool = multiprocessing.get_context("fork").Pool(workers) if workers else None

    def __iter__(self):
        plan, seed, slots, last = self.plan, self._seed, self._slots, self.plan.steps
        while True:
            while self._pool and self._next < last and len(self._pending) < self._ahead:
                self._pending.append(self._pool.apply_async(batch, (plan, seed, self._next, slots)))
                self._next += 1
            if self._pending:
                yield self._pending.popleft().get(timeout=120)
            elif not self._pool and self._next < last:
                self._next += 1
                yield batch(plan, seed, self._next - 1, slots)
            else:
                return

    def close(self):
        if self._pool:
            self._pool.terminate()
            self._pool.join()
