"""Goal: the open loop of `sparsegdn bench` as a user meets it. Method: the built binary against the
server in Python and a page of metrics. TEST_CLI names the binary."""

import http.server
import json
import os
import signal
import subprocess
import threading
import time
import unittest

from fake_server import FakeServer

CLI = os.environ["TEST_CLI"]


class Metrics(http.server.BaseHTTPRequestHandler):
    """A page whose counters grow with every look at it."""

    looks = 0

    def do_GET(self):
        if self.path != "/metrics":
            self.send_error(404)
            return
        Metrics.looks += 1
        n = Metrics.looks
        body = (
            "# HELP sparsegdn_batch_tokens Tokens of a step.\n"
            f'sparsegdn_batch_tokens_bucket{{le="64"}} {2 * n}\n'
            f'sparsegdn_batch_tokens_bucket{{le="+Inf"}} {5 * n}\n'
            f"sparsegdn_batch_tokens_sum {500 * n}\nsparsegdn_batch_tokens_count {5 * n}\n"
            f"sparsegdn_batch_requests_sum {10 * n}\nsparsegdn_batch_requests_count {5 * n}\n"
            "sparsegdn_max_batch_tokens 400\n"
            f"sparsegdn_prompt_tokens_total {400 * n}\nsparsegdn_wasted_tokens_total {50 * n}\n"
        ).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class CliLoadTest(unittest.TestCase):
    def setUp(self):
        self.server = FakeServer()
        self.addCleanup(self.server.__exit__)

    def run_cli(self, *arguments):
        done = subprocess.run(
            [CLI, "bench", "--server", self.server.target, *map(str, arguments)],
            capture_output=True, timeout=60, text=True)
        return done

    def ok(self, *arguments):
        done = self.run_cli(*arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_json(self):
        report = json.loads(self.ok(
            "--rate", 100, "--seconds", 1, "--mix", "8:0.7,16:0.3", "--objective-ms", 10000,
            "--priority-mix", "0:1,3:1", "--warmup", 0, "--json"))
        self.assertEqual(report["loop"], "open")
        self.assertEqual(report["arrivals"], len(self.server.requests))
        self.assertEqual(report["arrivals"], report["completed"])
        self.assertEqual(report["codes"], {"OK": report["completed"]})
        self.assertEqual(report["goodput_tokens_per_second"], report["completed_tokens_per_second"])
        self.assertEqual([g["length"] for g in report["lengths"]], [8, 16])
        for group in report["lengths"]:
            sent = sum(len(r.token_ids) == group["length"] for r in self.server.requests)
            self.assertEqual(group["completed"], sent)
        self.assertEqual([g["priority"] for g in report["priorities"]], [0, 3])
        self.assertEqual({r.priority for r in self.server.requests}, {0, 3})
        for field in ("first_frame_seconds", "snapshot_seconds"):
            p = report["all"][field]
            self.assertTrue(0 < p["p50"] <= p["p90"] <= p["p99"] <= p["max"], p)
        prompts = [tuple(r.token_ids) for r in self.server.requests]
        self.assertEqual(len(set(prompts)), len(prompts))

    def test_a_seed_is_a_load(self):
        def prompts(seed):
            self.server.requests.clear()
            self.ok("--rate", 40, "--seconds", 0.5, "--mix", "8,16", "--seed", seed)
            return sorted(tuple(r.token_ids) for r in self.server.requests)

        self.assertEqual(prompts(7), prompts(7))
        self.assertNotEqual(prompts(7), prompts(8))

    def test_table_with_metrics(self):
        page = http.server.HTTPServer(("127.0.0.1", 0), Metrics)
        threading.Thread(target=page.serve_forever, daemon=True).start()
        self.addCleanup(page.server_close)
        self.addCleanup(page.shutdown)
        url = f"http://127.0.0.1:{page.server_port}"
        load = ("--rate", 20, "--seconds", 0.5, "--mix", "8:1,16:1")
        text = self.ok(*load, "--metrics", f"{url}/metrics", "--step-tokens", 200)
        for words in ("offered", "goodput", "OK ", "not sent 0", "16 tokens", "first frame", "p99",
                      "5 steps of 100.0 tokens and 2.00 requests", "fill 0.500 of 200",
                      "50 wasted"):
            self.assertIn(words, text)
        self.assertIn("fill 0.250 of 400", self.ok(*load, "--metrics", f"{url}/metrics"))
        for code, bad in ((4, f"{url}/none"), (4, "http://127.0.0.1:1/metrics"), (2, "nonsense")):
            with self.subTest(bad):
                self.server.requests.clear()
                done = self.run_cli(*load, "--metrics", bad)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertEqual(self.server.requests, [])  # found before any load

    def test_cancels_deadlines_and_the_bound(self):
        stall = ("--rate", 50, "--seconds", 0.4, "--warmup", 0, "--request-id", "stall", "--json")
        rows = {
            "CANCELLED": ("--cancel-share", 1, "--cancel-ms", 200),
            "DEADLINE_EXCEEDED": ("--deadline-share", 1, "--deadline-ms", 200),
        }
        for code, flags in rows.items():
            with self.subTest(code):
                done = self.run_cli(*stall, *flags, "--max-outstanding", 4)
                report = json.loads(done.stdout)
                self.assertEqual(set(report["codes"]), {code})
                self.assertGreater(report["dropped_by_client"], 0)
                self.assertEqual(report["codes"][code] + report["dropped_by_client"],
                                 report["arrivals"])
                self.assertIsNone(report["all"]["first_frame_seconds"])
                self.assertNotEqual(done.returncode, 0)  # not one completed

    def test_failures_decide_the_exit_code(self):
        for code, name, word in ((4, "full", "RESOURCE_EXHAUSTED"),
                                 (6, "fault:digest_wrong", "DATA_LOSS")):
            with self.subTest(name):
                done = self.run_cli("--rate", 20, "--seconds", 0.3, "--warmup", 0, "--request-id",
                                    name)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(word, done.stdout)

    def test_flags_of_one_loop(self):
        for flags in (["--seconds", 1], ["--mix", "8"], ["--rate", 1, "--lengths", 8]):
            with self.subTest(flags):
                self.assertEqual(self.run_cli(*flags).returncode, 2)
        self.assertEqual(self.server.requests, [])

    def test_interrupt_prints_what_was_seen(self):
        process = subprocess.Popen(
            [CLI, "bench", "--server", self.server.target, "--rate", "50", "--seconds", "600",
             "--mix", "8", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(1000):
            if len(self.server.requests) > 5:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 130)
        report = json.loads(out)
        self.assertTrue(report["interrupted"])
        self.assertGreater(report["completed"], 0)


if __name__ == "__main__":
    unittest.main()
