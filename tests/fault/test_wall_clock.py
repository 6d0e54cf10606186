"""The wall clock jumps an hour either way under a running call: timers are steady.

WALL_CLOCK_SHIM is a library that moves the server's wall clock alone (wall_clock_shim.cc).
"""

from __future__ import annotations

import json
import os
import tempfile
import unittest
from datetime import datetime
from pathlib import Path

from harness import BINARY, Server, prompt


def first_line(server: Server) -> dict:
    return json.loads(next(x for x in server.log().splitlines() if x.startswith("{")))


def wall(line: dict) -> float:
    return datetime.fromisoformat(line["time"].replace("Z", "+00:00")).timestamp()


class WallClock(unittest.TestCase):
    def test_jumps(self) -> None:
        for seconds in ("3600", "-3600"):
            with self.subTest(seconds), tempfile.TemporaryDirectory() as folder:
                jump = Path(folder) / "jump"
                command = ["env", f"LD_PRELOAD={os.environ['WALL_CLOCK_SHIM']}",
                           f"CLOCK_JUMP_FILE={jump}", f"CLOCK_JUMP_SECONDS={seconds}", BINARY]
                with Server(model="tiny-gdn", command=command) as server:
                    kept = server.prefill(prompt(64, keep_snapshot={"ttl_seconds": 60}))
                    call = server.stub.Prefill(prompt(60000), timeout=60)
                    next(call)
                    jump.touch()
                    last = [event.WhichOneof("event") for event in call][-1]
                    self.assertEqual(last, "result")
                    # The minute of the snapshot, taken before the last token, has not passed.
                    again = prompt(8, resume_from=kept.result.snapshot_id, first_position=63)
                    self.assertTrue(server.prefill(again).whole)
                    # Calls that begin after the jump keep their deadlines too.
                    self.assertTrue(server.prefill(prompt(101), timeout=20).whole)
                    self.assertEqual(server.metric("sparsegdn_expired_in_queue_total"), 0)
                    self.assertLess(server.metric("sparsegdn_queue_wait_seconds_sum"), 60)
                    self.assertGreaterEqual(server.metric("sparsegdn_queue_wait_seconds_sum"), 0)
                    self.assertEqual(server.stop(), 0)
                    moved = wall(server.log_lines("drained")[0]) - wall(first_line(server))
                    self.assertLess(abs(moved - int(seconds)), 120, "the shim must have worked")


if __name__ == "__main__":
    unittest.main()
