"""Training batches: pure functions of (plan, seed, step). No torch; equality everywhere."""

import unittest

import numpy as np

from tasks import mixture, registry, vocab
from train import data

PLAN = data.Plan((data.Stage(256, 2048, 6), data.Stage(512, 2048, 6), data.Stage(1024, 2048, 20)),
                 carry_share=0.5, gaps=True)
SLOTS = 4


def key(batch):
    return tuple(None if part is None else part.tobytes() for part in (
        batch.tokens, batch.answers, batch.families, batch.positions, batch.carried))


class Batches(unittest.TestCase):
    def test_lengths_follow_the_curriculum(self):
        lengths = [data.batch(PLAN, 0, step, SLOTS).tokens.shape for step in range(PLAN.steps)]
        self.assertTrue(all(rows * length == 2048 for rows, length in lengths))
        self.assertEqual({length for _, length in lengths[:6]}, {256})
        self.assertEqual({length for _, length in lengths[6:12]} | {512}, {256, 512})
        self.assertEqual({length for _, length in lengths[12:]}, {256, 512, 1024})
        # 26 steps, each with probability 0.6: 15.6 +- 2.5; four deviations.
        full = sum(length == 512 for _, length in lengths[6:12]) + \
            sum(length == 1024 for _, length in lengths[12:])
        self.assertTrue(6 <= full <= 25, full)
        with self.assertRaisesRegex(ValueError, "^step"):
            data.batch(PLAN, 0, PLAN.steps, SLOTS)

    def test_answers_are_marked(self):
        batch = data.batch(PLAN, 0, 3, SLOTS)
        for row in range(len(batch.tokens)):
            example = mixture.sample(0, 3, row, batch.tokens.shape[1])
            self.assertTrue((batch.tokens[row] == example.tokens).all())
            self.assertEqual(mixture.NAMES[batch.families[row]], example.family)
            wanted = [token for i in range(len(example.answers))
                      for item in example.expected(i) for token in item]
            self.assertEqual(batch.tokens[row][batch.answers[row]].tolist(), wanted)

    def test_carried_rows_lose_their_bos(self):
        found = 0
        for step in range(PLAN.steps):
            batch = data.batch(PLAN, 0, step, SLOTS)
            if batch.carried is None:
                continue
            found += 1
            self.assertEqual(batch.tokens.shape[1], 1024)
            self.assertTrue(((batch.carried >= -1) & (batch.carried < SLOTS)).all())
            first = np.where(batch.carried >= 0, vocab.PERIOD, vocab.BOS)
            self.assertTrue((batch.tokens[:, 0] == first).all())
            self.assertIsNone(data.batch(PLAN, 0, step, 0).carried)
        self.assertGreater(found, 2)

    def test_gaps_keep_order_and_range(self):
        jumps = 0
        for step in range(8):
            positions = data.batch(PLAN, 0, step, SLOTS).positions
            self.assertTrue((positions[:, 0] == 0).all())
            gaps = np.diff(positions, axis=1)
            self.assertTrue((gaps >= 1).all())
            self.assertTrue(((gaps > 1).sum(1) <= 3).all())
            self.assertLess(positions.max(), registry.MAX_LENGTH)
            jumps += (gaps > 1).any(1).sum()
        self.assertGreater(jumps, 10)

    def test_streams_go_on_where_the_row_stopped(self):
        """Glued together, the pieces of a row are one long example, asked at its end."""
        stage = data.Stage(512, 2048, 20, stream=4)
        plan = data.Plan((data.Stage(256, 2048, 3), stage))
        self.assertEqual(plan.stream_rows, 4)
        batches = [data.batch(plan, 0, 3 + step, SLOTS) for step in range(stage.steps)]
        self.assertEqual([batch.streams for batch in batches], [True, True, True, False] * 5)
        own = [batch for batch in batches if batch.streams]
        whole = 0
        for row in range(4):
            for first in range(len(own) - 3):
                if own[first].carried[row] != -1 or (first + row) % 4:
                    continue
                pieces = own[first:first + 4]
                self.assertEqual([int(b.carried[row]) for b in pieces], [-1] + 3 * [data.GOES_ON])
                example = mixture.sample(0, 3 + (first + row) // 4, data.STREAM_ROW + row, 2048,
                                         counting=False)
                glued = np.concatenate([b.tokens[row] for b in pieces])
                self.assertTrue((glued == example.tokens).all())
                mask = np.concatenate([b.answers[row] for b in pieces])
                self.assertEqual(mask.sum(), sum(a.new_tokens for a in example.answers))
                self.assertFalse(mask[:1024].any())
                whole += 1
        self.assertGreater(whole, 8)
        # A row that starts inside its example has not seen what is asked.
        self.assertFalse(own[0].answers[1:].any())
        self.assertTrue(own[3].answers[0].any())

    def test_workers_and_resumption_do_not_change_batches(self):
        whole = [key(data.batch(PLAN, 7, step, SLOTS)) for step in range(PLAN.steps)]
        self.assertEqual(len(set(whole)), PLAN.steps)
        for first, workers in ((0, 0), (5, 0), (9, 2)):
            loader = data.Loader(PLAN, 7, first, SLOTS, workers)
            self.assertEqual([key(batch) for batch in loader], whole[first:])
            loader.close()

    def test_default_plan(self):
        plan = data.default_plan()
        self.assertEqual(max(stage.length for stage in plan.stages), 8192)
        self.assertEqual(plan.steps, 4700)
        self.assertTrue(all(stage.length >= registry.MIN_LENGTH for stage in plan.stages))
        small = data.default_plan(0.01, 0.01)
        self.assertEqual([stage.steps for stage in small.stages], [5, 13, 7, 7, 5, 4, 3, 2])
        self.assertEqual({stage.stream for stage in data.default_plan(gaps=True).stages}, {1})
        self.assertTrue(all(stage.tokens >= stage.length for stage in small.stages))


if __name__ == "__main__":
    unittest.main()
