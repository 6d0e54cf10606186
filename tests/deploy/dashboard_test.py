#!/usr/bin/env python3
"""The Grafana dashboard, without Grafana (Debian and PyPI have none).

Grafana's own typed model reads the file and writes it back unchanged, so no key is misspelt or of
the wrong type; promtool parses every query; panels do not overlap; what operators were promised is
there. live_test.py runs the queries against a real server.
"""

import json
import tempfile
import unittest

import deploy_lib as lib

# One panel for each thing that an operator wants to see, and a series that it must read.
PROMISED = {
    "Requests by code": "sparsegdn_requests_total",
    "Queue depth": "sparsegdn_queue_requests",
    "Queue wait": "sparsegdn_queue_wait_seconds_bucket",
    "Prefill p95 by prompt length": "sparsegdn_prefill_seconds_bucket",
    "Tokens per second": "sparsegdn_batch_tokens_sum",
    "Batch fill": "sparsegdn_max_batch_tokens",
    "Selection overhead": "sparsegdn_selection_seconds_sum",
    "Retention by budget": "sparsegdn_retention_ratio_sum",
    "Cancelled and expired": "sparsegdn_cancelled_total",
    "Wasted tokens": "sparsegdn_wasted_tokens_total",
    "Cache hits": "sparsegdn_cached_tokens_total",
    "Snapshot export": "sparsegdn_snapshot_bytes_total",
    "Free capacity": "sparsegdn_state_slots_free",
    "Redis failures": "sparsegdn_prefix_cache_redis_errors_total",
    "Queue memory": "sparsegdn_queue_bytes",
    "GPU memory": "sparsegdn_device_memory_bytes",
    "Shared memory": "sparsegdn_shared_memory_bytes",
    "Shared memory calls": "sparsegdn_shared_memory_calls_total",
}


def differences(want, got, where=""):
    if isinstance(want, dict) and isinstance(got, dict):
        for key in want:
            if key not in got:
                yield f"{where}/{key} is unknown to Grafana"
            else:
                yield from differences(want[key], got[key], f"{where}/{key}")
    elif isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        for index, (one, other) in enumerate(zip(want, got)):
            yield from differences(one, other, f"{where}[{index}]")
    elif want != got:
        yield f"{where} = {want!r} became {got!r}"


def through_grafanas_model(dashboard):
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard
    plugins.register_default_plugins()
    return json.loads(json.dumps(Dashboard.from_json(dashboard), cls=JSONEncoder))


class DashboardFile(unittest.TestCase):

    def setUp(self):
        self.dashboard = json.loads(lib.DASHBOARD.read_text())
        self.panels = {panel["title"]: panel for panel in self.dashboard["panels"]}

    def test_grafanas_model_keeps_every_key(self):
        found = list(differences(self.dashboard, through_grafanas_model(self.dashboard)))
        self.assertEqual(found, [])

    def test_grafanas_model_drops_a_misspelt_key(self):
        self.dashboard["panels"][1]["fieldConfig"]["defaults"]["units"] = "s"
        found = list(differences(self.dashboard, through_grafanas_model(self.dashboard)))
        self.assertEqual(found, ["/panels[1]/fieldConfig/defaults/units is unknown to Grafana"])

    def test_promised_panels(self):
        for title, series in PROMISED.items():
            with self.subTest(title):
                text = " ".join(target["expr"] for target in self.panels[title]["targets"])
                self.assertIn(series, text)

    def test_queries_parse(self):
        rules = [{"record": f"query:number:{number}", "expr": expr}
                 for number, (_, expr) in enumerate(lib.dashboard_queries(self.dashboard))]
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump({"groups": [{"name": "queries", "rules": rules}]}, file)
            file.flush()
            lib.run(lib.PROMTOOL, "check", "rules", file.name)

    def test_layout(self):
        taken, ids = {}, set()
        for panel in self.dashboard["panels"]:
            self.assertNotIn(panel["id"], ids)
            ids.add(panel["id"])
            box = panel["gridPos"]
            self.assertLessEqual(box["x"] + box["w"], 24, panel["title"])
            for x in range(box["x"], box["x"] + box["w"]):
                for y in range(box["y"], box["y"] + box["h"]):
                    other = taken.setdefault((x, y), panel["title"])
                    self.assertEqual(other, panel["title"], "two panels overlap")

    def test_panels_follow_the_variables(self):
        for panel in self.dashboard["panels"]:
            for target in panel.get("targets", []):
                with self.subTest(panel["title"]):
                    self.assertEqual(target["datasource"]["uid"], "${datasource}")
                    for name in lib.metric_names(target["expr"]):
                        self.assertIn(f'{name}{{job=~"$job",instance=~"$instance"',
                                      target["expr"])
                    self.assertTrue(panel["description"])


if __name__ == "__main__":
    lib.main()
