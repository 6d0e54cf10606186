"""What the deploy tests share: paths, unpacked tools, skipping with a reason, PromQL names."""

import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
TOOLS = ROOT / "build" / "tools"
SITE = ROOT / "build" / "deploy-tools"
PROMTOOL = TOOLS / "prometheus" / "usr" / "bin" / "promtool"
PROMETHEUS = TOOLS / "prometheus" / "usr" / "bin" / "prometheus"
RULE_FILES = [DEPLOY / "prometheus" / "recording.yaml", DEPLOY / "prometheus" / "alerts.yaml"]
DASHBOARD = DEPLOY / "grafana" / "sparsegdn.json"
SKIP_CODE = 77

sys.path.insert(0, str(SITE))


def skip(reason):
    """Ends the test as skipped, which ctest and tests/run.sh list with this line."""
    print(f"SKIPPED: {reason}", flush=True)
    sys.exit(SKIP_CODE)


def need_tools():
    """get_tools.sh unpacks them, and has said what could not be had."""
    for what, path in (("promtool", TOOLS / "prometheus"), ("Python packages", SITE)):
        if not (path / ".done").exists():
            skip(f"{what}: {path.relative_to(ROOT)} is not unpacked (tests/deploy/get_tools.sh)")


def run(*command, **options):
    """The output of a command, both streams; AssertionError with it when the command fails."""
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, check=False, **options)
    if done.returncode != 0:
        raise AssertionError(f"{command[0]} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def metric_names(expr):
    """Names of the series that a PromQL expression reads (ours, recorded ones, `up`)."""
    return set(re.findall(r"\b(?:job:)?sparsegdn_\w+(?::\w+)*|\bup\b", expr))


def family(name, families):
    """The exported family that owns a series name: histograms export three series each."""
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    return name if name in families else base if families.get(base) == "histogram" else None


def dashboard_queries(dashboard):
    """(where, PromQL) of every panel, variable and annotation, with Grafana's variables filled in."""
    found = []
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            found.append((f"panel \"{panel['title']}\" {target['refId']}", target["expr"]))
    for annotation in dashboard["annotations"]["list"]:
        found.append((f"annotation {annotation['name']}", annotation["expr"]))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            series = re.fullmatch(r"label_values\((.+), \w+\)", variable["query"]["query"])
            found.append((f"variable {variable['name']}", series.group(1)))
    values = {"$__rate_interval": "1m", "$job": ".*", "$instance": ".*"}
    for where, expr in found:
        for name, value in values.items():
            expr = expr.replace(name, value)
        yield where, expr


def main():
    need_tools()
    unittest.main(verbosity=1)
