#!/usr/bin/env python3
"""What is deployed, against a running server.

    live_test.py BIN_DIR MODEL_DIR      BIN_DIR holds sparsegdn-server and sparsegdn

The server starts on the configuration file that the chart renders. A real Prometheus scrapes it and
loads our rules while a few prompts run. Then: every series that the rules, the dashboard and the
adapter name is exported; every rule evaluates and no alert fires; every dashboard query returns
numbers. The chart's schema knows exactly the server's options, with the server's bounds.
"""

import json
import math
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.parse
import urllib.request

import deploy_lib as lib
from deploy_lib import DEPLOY

BIN = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "")
MODEL = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else "")
START_SECONDS, SCRAPE_SECONDS = 120, 1
# Options that the chart fills in itself, and the one that names the file.
OWNED = {"listen", "metrics_listen", "port_file", "drain_seconds", "model.dir", "model.backend",
         "tls.cert", "tls.key", "tls.client_ca", "auth.tokens",
         "prefix_cache.redis_password_file"}
STEP_TOKENS = 6144
PROMPTS = [("--dense", 70), ("--retention=0.29", 600), ("--retention=0.1", 3000), ("--keep", 64)]
CONFIGURATION_ERROR, MODEL_ERROR = 2, 3


def environment():
    return {k: v for k, v in os.environ.items() if not k.startswith("SPARSEGDN_")}


def get(url):
    """(status, body)."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def wait_until(what, condition, seconds=START_SECONDS):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s: {what}")


def chart_config(folder, values):
    """Path of the configuration file that the chart renders for these values."""
    import helm_python as helm
    import yaml
    with helm.Chart.load(DEPLOY / "helm/sparsegdn") as chart:
        chart.validate_schema(values)
        text = chart.render(values, name="sparsegdn")["sparsegdn/templates/configmap.yaml"]
    path = pathlib.Path(folder) / "config.json"
    path.write_text(yaml.safe_load(text)["data"]["config.json"])
    return path


class Process:
    """A child that ends with the test; its output is kept for the message of a failure."""

    def __init__(self, folder, name, *command):
        self.log = pathlib.Path(folder) / f"{name}.log"
        with open(self.log, "w") as log:
            self.child = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log,
                                          env=environment())

    def alive(self):
        if self.child.poll() is not None:
            raise AssertionError(f"ended with {self.child.returncode}: {self.log.read_text()}")
        return True

    def stop(self):
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
            try:
                self.child.wait(60)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()
        return self.child.returncode


class Running:
    """The server and a Prometheus that scrapes it."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.server = self.prometheus = None

    def start(self):
        folder = self.folder
        # The CPU image with every part of `config` present.
        config = chart_config(folder, {"gpu": {"enabled": False}, "config": {
            "engine": {"state_slots": 4, "max_batch_tokens": STEP_TOKENS},
            "limits": {"max_queue_tokens": 4194304},
            "budget": {"retention": 0.29}, "model": {"threads": 2}}})
        ports = self.folder / "ports"
        self.server = Process(folder, "server", BIN / "sparsegdn-server", f"--config={config}",
                              f"--model={MODEL}", "--listen=127.0.0.1:0",
                              "--metrics-listen=127.0.0.1:0", f"--port-file={ports}")
        wait_until("port file", lambda: self.server.alive() and ports.exists())
        grpc_port, http_port = ports.read_text().split()
        self.grpc = f"127.0.0.1:{grpc_port}"
        self.http = f"http://127.0.0.1:{http_port}"
        wait_until("ready", lambda: self.server.alive() and get(self.http + "/readyz")[0] == 200)
        self.start_prometheus(f"127.0.0.1:{http_port}")

    def start_prometheus(self, target):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        config = self.folder / "prometheus.json"
        config.write_text(json.dumps({
            "global": {"scrape_interval": f"{SCRAPE_SECONDS}s",
                       "evaluation_interval": f"{SCRAPE_SECONDS}s"},
            "rule_files": [self.hurried(path) for path in lib.RULE_FILES],
            "scrape_configs": [{"job_name": "sparsegdn", "static_configs": [
                {"targets": [target], "labels": {"namespace": "n", "pod": "p", "service": "s"}}]}],
        }))
        self.prometheus = Process(
            self.folder, "prometheus", lib.PROMETHEUS, f"--config.file={config}",
            f"--storage.tsdb.path={self.folder}/tsdb", f"--web.listen-address=127.0.0.1:{port}")
        self.api = f"http://127.0.0.1:{port}/api/v1/"
        wait_until("Prometheus", lambda: self.prometheus.alive() and get(
            f"http://127.0.0.1:{port}/-/ready")[0] == 200)
        wait_until("first scrape", lambda: self.query("up == 1"))

    def hurried(self, path):
        """A copy of a rule file whose groups are evaluated as often as the server is scraped."""
        import yaml
        rules = yaml.safe_load(path.read_text())
        for group in rules["groups"]:
            group.pop("interval", None)
        copy = self.folder / path.name
        copy.write_text(yaml.safe_dump(rules))
        return str(copy)

    def query(self, expr):
        status, body = get(self.api + "query?" + urllib.parse.urlencode({"query": expr}))
        answer = json.loads(body)
        if status != 200:
            raise AssertionError(f"{expr}: {answer['error']}")
        return answer["data"]["result"]

    def load(self):
        """A few prompts; Prometheus has seen the counters before and sees them after."""
        scrapes = "count_over_time(up[10m])"
        for budget, tokens in PROMPTS:
            lib.run(BIN / "sparsegdn", "prefill", f"--server={self.grpc}", "--quiet", budget,
                    input=" ".join(str(1 + i % 97) for i in range(tokens)), env=environment())
        seen = float(self.query(scrapes)[0]["value"][1])
        wait_until("scrapes after the load",
                   lambda: float(self.query(scrapes)[0]["value"][1]) >= seen + 3)

    def families(self):
        """Type of every exported metric, by name."""
        status, body = get(self.http + "/metrics")
        assert status == 200, body
        return dict(re.findall(r"^# TYPE (\S+) (\S+)$", body, re.MULTILINE))

    def stop(self):
        for process in (self.prometheus, self.server):
            if process:
                process.stop()


class Live(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.running = Running(cls.folder.name)
        cls.addClassCleanup(cls.running.stop)
        cls.running.start()
        cls.running.load()
        cls.dashboard = json.loads(lib.DASHBOARD.read_text())

    def test_probes_answer(self):
        for path in ("/livez", "/readyz"):
            self.assertEqual(get(self.running.http + path)[0], 200, path)

    def test_every_named_series_is_exported(self):
        import yaml
        families = self.running.families()
        texts = dict(lib.dashboard_queries(self.dashboard))
        recorded = set()
        for path in lib.RULE_FILES:
            for group in yaml.safe_load(path.read_text())["groups"]:
                for rule in group["rules"]:
                    texts[rule.get("alert") or rule["record"]] = rule["expr"]
                    recorded.add(rule.get("record"))
        adapter = yaml.safe_load((DEPLOY / "prometheus/adapter-values.yaml").read_text())
        for rule in adapter["rules"]["custom"]:
            texts["adapter " + rule["name"]["as"]] = rule["seriesQuery"]
        for where, text in texts.items():
            names = lib.metric_names(text)
            self.assertTrue(names, f"{where} reads nothing of ours: {text}")
            for name in names - recorded - {"up"}:
                self.assertTrue(lib.family(name, families), f"{where} reads {name}: not exported")

    def test_dashboard_queries_return_numbers(self):
        for where, expr in lib.dashboard_queries(self.dashboard):
            with self.subTest(where):
                result = self.running.query(expr)
                if where.startswith("annotation"):
                    self.assertEqual(result, [])  # the server is ready
                    continue
                numbers = [float(series["value"][1]) for series in result]
                self.assertTrue(any(math.isfinite(number) for number in numbers),
                                f"{expr} gave {numbers}")

    def test_batch_fill_is_over_the_servers_own_steps(self):
        def value(expr):
            return float(self.running.query(expr)[0]["value"][1])
        self.assertEqual(value("sparsegdn_max_batch_tokens"), STEP_TOKENS)
        # Over the whole run: a rate at its edges is of another moment at each query.
        panel = next(p for p in self.dashboard["panels"] if p["title"] == "Batch fill")
        expr = panel["targets"][0]["expr"].replace("$job", ".*").replace("$instance", ".*")
        fill = value(re.sub(r"rate\((\w+\{[^}]*\})\[\$__rate_interval\]\)", r"\1", expr))
        mean = value("sparsegdn_batch_tokens_sum") / value("sparsegdn_batch_tokens_count")
        self.assertAlmostEqual(fill, mean / STEP_TOKENS)

    def test_rules_evaluate_and_nothing_fires(self):
        def rules():
            groups = json.loads(get(self.running.api + "rules")[1])["data"]["groups"]
            return [rule for group in groups for rule in group["rules"]]
        names = [rule["name"] for rule in rules() if rule["type"] == "recording"]
        try:
            wait_until("every recorded series", lambda: all(map(self.running.query, names)),
                       20)
        except AssertionError:
            self.assertEqual([name for name in names if not self.running.query(name)], [])
        for rule in rules():
            with self.subTest(rule["name"]):
                self.assertEqual(rule["health"], "ok", rule.get("lastError"))
                self.assertEqual(rule.get("state", "inactive"), "inactive", rule.get("alerts"))

    def test_autoscaler_metrics(self):
        depth = self.running.query('sparsegdn_queue_requests{namespace!="",pod!=""}')
        self.assertEqual(float(depth[0]["value"][1]), 0)
        series = 'job:sparsegdn_queue_wait_seconds:p95_rate5m{namespace!="",service!=""}'
        wait_until("the guard", lambda: self.running.query(series), 20)
        guard = self.running.query(series)
        self.assertGreaterEqual(float(guard[0]["value"][1]), 0)


class Options(unittest.TestCase):

    def schema(self):
        """Schema of each leaf of `config`, by dotted path."""
        def walk(node, path):
            for key, child in node["properties"].items():
                here = f"{path}.{key}" if path else key
                if child.get("type") == "object":
                    yield from walk(child, here)
                else:
                    yield here, child
        values = json.loads((DEPLOY / "helm/sparsegdn/values.schema.json").read_text())
        return dict(walk(values["properties"]["config"], ""))

    def start(self, key, value):
        """Exit code and output of the server with one key set and no model to load."""
        document = value
        for part in reversed(key.split(".")):
            document = {part: document}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(document, file)
            file.flush()
            done = subprocess.run(
                [BIN / "sparsegdn-server", f"--config={file.name}", "--model=/nonexistent",
                 "--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0"],
                env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                timeout=60, check=False)
        return done.returncode, done.stdout

    def test_schema_names_the_servers_options(self):
        text = lib.run(BIN / "sparsegdn-server", "--help", env=environment())
        options = set(re.findall(r"\(([a-z_0-9]+(?:\.[a-z_0-9]+)*)\)$", text, re.MULTILINE))
        self.assertIn("limits.max_queue_tokens", options)
        self.assertEqual(set(self.schema()), options - OWNED)

    def test_schema_has_the_servers_bounds(self):
        for key, leaf in self.schema().items():
            # Past 2^53 a step of one is lost in a double.
            for bound, step in (("minimum", -1), ("maximum", max(1, leaf.get("maximum", 0) // 99))):
                if bound not in leaf:
                    continue
                with self.subTest(key, bound=bound):
                    code, output = self.start(key, leaf[bound])
                    self.assertNotIn("wanted a number in", output)
                    code, output = self.start(key, leaf[bound] + step)
                    self.assertEqual(code, CONFIGURATION_ERROR, output)
                    self.assertIn("wanted a number in", output)

    def test_schema_has_the_servers_choices(self):
        for key, leaf in self.schema().items():
            for choice in leaf.get("enum", []):
                with self.subTest(key, choice=choice):
                    code, output = self.start(key, choice)
                    self.assertEqual(code, MODEL_ERROR, output)


if __name__ == "__main__":
    del sys.argv[1:]
    lib.main()
