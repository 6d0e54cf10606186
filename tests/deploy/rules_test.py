#!/usr/bin/env python3
"""Prometheus rules and the compose file.

promtool accepts the rules and their unit tests pass; no alert is untested and no recording unused
by anything; the Prometheus configuration of deploy/compose is valid; the compose file obeys the
published schema and every file that it mounts exists.
"""

import json
import tempfile
import unittest

import deploy_lib as lib
from deploy_lib import DEPLOY, ROOT

COMPOSE = DEPLOY / "compose"
SCHEMA = (lib.TOOLS / "docker-compose/usr/lib/python3/dist-packages/compose/config"
          / "compose_spec.json")


def load(path):
    import yaml
    return yaml.safe_load(path.read_text())


def rules():
    for path in lib.RULE_FILES:
        for group in load(path)["groups"]:
            yield from group["rules"]


class Rules(unittest.TestCase):

    def test_promtool_accepts_them(self):
        lib.run(lib.PROMTOOL, "check", "rules", "--lint=all", "--lint-fatal", *lib.RULE_FILES)

    def test_unit_tests(self):
        lib.run(lib.PROMTOOL, "test", "rules", ROOT / "tests/deploy/alerts_test.yaml")

    def test_every_alert_fires_and_stays_silent_in_a_unit_test(self):
        fires = set()
        for case in load(ROOT / "tests/deploy/alerts_test.yaml")["tests"]:
            for check in case.get("alert_rule_test", []):
                if check["exp_alerts"]:
                    fires.add(check["alertname"])
        self.assertEqual(fires, {rule["alert"] for rule in rules() if "alert" in rule})

    def test_recorded_series_that_are_read_are_recorded(self):
        recorded = {rule["record"] for rule in rules() if "record" in rule}
        texts = [rule["expr"] for rule in rules()]
        adapter = load(DEPLOY / "prometheus/adapter-values.yaml")["rules"]["custom"]
        texts += [rule["seriesQuery"] for rule in adapter]
        read = {name for text in texts for name in lib.metric_names(text) if ":" in name}
        self.assertLessEqual(read, recorded)

    def test_adapter_serves_what_the_autoscaler_reads(self):
        adapter = load(DEPLOY / "prometheus/adapter-values.yaml")["rules"]["custom"]
        template = (DEPLOY / "helm/sparsegdn/templates/horizontalpodautoscaler.yaml").read_text()
        served = {rule["name"]["as"] for rule in adapter}
        self.assertEqual(served, {line.split()[-1] for line in template.splitlines()
                                  if line.strip().startswith("name: sparsegdn_")})


class Compose(unittest.TestCase):

    def test_prometheus_configuration(self):
        config = load(COMPOSE / "prometheus.yaml")
        with tempfile.TemporaryDirectory() as folder:
            # Inside the container the rules are mounted where the configuration looks for them.
            mounts = load(COMPOSE / "compose.yaml")["services"]["prometheus"]["volumes"]
            inside = [m.split(":")[1] for m in mounts if m.startswith("../prometheus/")]
            self.assertEqual(config["rule_files"], ["/etc/prometheus/rules/*.yaml"])
            self.assertTrue(all(p.startswith("/etc/prometheus/rules/") for p in inside), inside)
            self.assertEqual(len(inside), len(lib.RULE_FILES))
            config["rule_files"] = [str(path) for path in lib.RULE_FILES]
            path = f"{folder}/prometheus.json"
            with open(path, "w") as file:
                json.dump(config, file)
            lib.run(lib.PROMTOOL, "check", "config", path)

    def test_schema(self):
        import jsonschema
        if not SCHEMA.exists():
            self.fail(f"{SCHEMA} is missing: get_tools.sh unpacks it")
        schema = json.loads(SCHEMA.read_text())
        for name in ("compose.yaml", "cuda.yaml"):
            with self.subTest(name):
                errors = jsonschema.Draft7Validator(schema).iter_errors(load(COMPOSE / name))
                self.assertEqual([f"{e.json_path}: {e.message}" for e in errors], [])

    def test_mounted_files_exist(self):
        for name, service in load(COMPOSE / "compose.yaml")["services"].items():
            for mount in service["volumes"]:
                if not mount.startswith((".", "$")):
                    continue
                host = mount.replace("${MODEL_DIR:-", "").replace("}", "").split(":")[0]
                with self.subTest(f"{name}: {host}"):
                    self.assertTrue((COMPOSE / host).exists())

    def test_grafana_finds_its_data_source_and_dashboard(self):
        source = load(COMPOSE / "grafana/datasource.yaml")["datasources"][0]
        variable = json.loads(lib.DASHBOARD.read_text())["templating"]["list"][0]
        self.assertEqual(source["uid"], variable["current"]["value"])
        provider = load(COMPOSE / "grafana/dashboards.yaml")["providers"][0]
        mounts = load(COMPOSE / "compose.yaml")["services"]["grafana"]["volumes"]
        inside = next(m.split(":")[1] for m in mounts if m.startswith("../grafana/"))
        self.assertTrue(inside.startswith(provider["options"]["path"] + "/"), inside)


if __name__ == "__main__":
    lib.main()
