#!/usr/bin/env python3
"""The Helm chart, through Helm's own library.

    chart_test.py            runs the tests
    chart_test.py --write    writes deploy/k8s/rendered.yaml anew

Helm lints and renders the chart; what comes out obeys the Kubernetes schemas in strict mode (custom
resources of the Prometheus operator have none there: their selectors and rules are checked by
hand); probes, grace period, roll-out and scaling are what docs promise; wrong values are refused.
"""

import json
import re
import sys
import tempfile
import unittest

import deploy_lib as lib
from deploy_lib import DEPLOY

CHART = DEPLOY / "helm" / "sparsegdn"
RENDERED = DEPLOY / "k8s" / "rendered.yaml"
KUBERNETES = ("1.27", "1.30", "1.37")  # the oldest that Chart.yaml admits, one between, the newest
CUSTOM = {"ServiceMonitor", "PrometheusRule"}
HEADER = """# The chart deploy/helm/sparsegdn with its default values, for kubectl apply -n NAMESPACE -f.
# Generated: tests/deploy/chart_test.py --write
"""
EVERYTHING = {
    "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "monitoring"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "monitoring"}},
    "grafanaDashboard": {"enabled": True},
    "tls": {"secretName": "server-cert", "clientCaSecretName": "client-ca"},
    "auth": {"tokensSecretName": "tokens"},
    "redis": {"passwordSecretName": "redis", "passwordSecretKey": "redis-password"},
    "networkPolicy": {"enabled": True, "grpcNamespaces": ["decode", "batch"],
                      "httpNamespaces": ["monitoring"]},
    "unixSocket": {"enabled": True},
    "sharedMemory": {"enabled": True},
    "extraContainers": [{"name": "worker", "image": "registry.example/worker:1", "volumeMounts": [
        {"name": "socket", "mountPath": "/run/sparsegdn"},
        {"name": "shared-memory", "mountPath": "/dev/shm"}]}],
    "model": {"mountPath": "/models/m", "subPath": "9b", "volume": {"hostPath": {"path": "/srv/m"}}},
    "image": {"repository": "registry.example/sparsegdn", "tag": "9", "pullSecrets": [{"name": "s"}]},
    "config": {"limits": {"max_queue_tokens": 4194304}, "budget": {"retention": 0.29},
               "prefix_cache": {"bytes": 1073741824, "redis": "redis://redis:6379"}},
    "extraArgs": ["--log-level=debug"],
    "extraEnv": [{"name": "SPARSEGDN_THREADS", "value": "8"}],
    "extraVolumes": [{"name": "x", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "x", "mountPath": "/x"}],
    "podAnnotations": {"a": "b"}, "podLabels": {"c": "d"}, "nodeSelector": {"gpu": "h200"},
    "priorityClassName": "high", "runtimeClassName": "nvidia", "affinity": {"nodeAffinity": {}},
    "service": {"type": "LoadBalancer", "annotations": {"e": "f"}},
}
VARIANTS = {
    "default": {},
    "everything": EVERYTHING,
    "cpu": {"gpu": {"enabled": False}, "podDisruptionBudget": {"enabled": False},
            "service": {"headless": False}},
    "openshift": {"podSecurityContext": {"fsGroup": None, "fsGroupChangePolicy": None},
                  "auth": {"tokensSecretName": "tokens"}},
    "node": {"unixSocket": {"enabled": True, "volume": {"hostPath": {"path": "/run/sparsegdn"}}},
             "sharedMemory": {"enabled": True, "volume": {"hostPath": {"path": "/dev/shm"}}}},
}
# Each is refused, and the message names the key.
WRONG = {
    "unknown key": ({"replicas": 2}, "replicas"),
    "negative replicas": ({"replicaCount": -1}, "/replicaCount"),
    "text for a switch": ({"gpu": {"enabled": "yes"}}, "/gpu/enabled"),
    "GPU resource without a domain": ({"gpu": {"resourceName": "gpu"}}, "/gpu/resourceName"),
    "unknown server option": ({"config": {"engine": {"slots": 4}}}, "/config/engine"),
    "option the chart owns": ({"config": {"drain_seconds": 5}}, "/config"),
    "model folder in config": ({"config": {"model": {"dir": "/m"}}}, "/config/model"),
    "share above one": ({"config": {"budget": {"retention": 1.5}}}, "/config/budget/retention"),
    "unknown budget mode": ({"config": {"budget": {"mode": "sparse"}}}, "/config/budget/mode"),
    "privileged port": ({"ports": {"grpc": 80}}, "/ports/grpc"),
    "relative mount path": ({"model": {"mountPath": "model"}}, "/model/mountPath"),
    "two volume sources": ({"model": {"volume": {"emptyDir": {}, "hostPath": {"path": "/m"}}}},
                           "/model/volume"),
    "no time to exit": ({"drain": {"exitSeconds": 5}}, "/drain/exitSeconds"),
    "no autoscaling on the CPU": ({"autoscaling": {"targetCPUUtilizationPercentage": 80}},
                                  "/autoscaling"),
    "scrape interval without a unit": ({"serviceMonitor": {"interval": "15"}},
                                       "/serviceMonitor/interval"),
    "positional argument": ({"extraArgs": ["serve"]}, "/extraArgs/0"),
    "tokens in the values": ({"auth": {"tokens": "alice 0123456789abcdef"}}, "/auth"),
    "token file in config": ({"config": {"auth": {"tokens": "/t"}}}, "/config/auth"),
    "Redis password in the values": ({"redis": {"password": "hunter2"}}, "/redis"),
    "Redis password file in config": ({"config": {"prefix_cache": {"redis_password_file": "/p"}}},
                                      "/config/prefix_cache"),
    "namespace by a label": ({"networkPolicy": {"grpcNamespaces": ["team=a"]}},
                             "/networkPolicy/grpcNamespaces/0"),
    "relative socket path": ({"unixSocket": {"mountPath": "run"}}, "/unixSocket/mountPath"),
    "shared memory without a unit": ({"sharedMemory": {"sizeLimit": "8GB"}},
                                     "/sharedMemory/sizeLimit"),
    "group by its name": ({"podSecurityContext": {"fsGroup": "nonroot"}},
                          "/podSecurityContext/fsGroup"),
    "group of root": ({"podSecurityContext": {"fsGroup": 0}}, "/podSecurityContext/fsGroup"),
    "disruption budget of zero": ({"podDisruptionBudget": {"maxUnavailable": 0}},
                                  "/podDisruptionBudget/maxUnavailable"),
}
# Well-typed, but wrong together: a template refuses them.
WRONG_TOGETHER = {
    "client authorities without a certificate": ({"tls": {"clientCaSecretName": "ca"}},
                                                 "tls.secretName"),
    "shared memory without a socket": ({"sharedMemory": {"enabled": True}}, "unixSocket.enabled"),
    "a password without Redis": ({"redis": {"passwordSecretName": "redis"}},
                                 "config.prefix_cache.redis"),
    "more minimal than maximal replicas": (
        {"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 2}}, "maxReplicas"),
    "no model": ({"model": {"existingClaim": ""}}, "model.existingClaim"),
}


def templates(values, path=CHART):
    """Rendered files that are not empty, by template name, NOTES apart."""
    import helm_python as helm
    with helm.Chart.load(path) as chart:
        chart.validate_schema(values)
        rendered = chart.render(values, name="sparsegdn", namespace="default")
    return {name: text.strip() + "\n" for name, text in sorted(rendered.items())
            if text.strip() and not name.endswith("NOTES.txt")}


def objects(values):
    """Rendered objects by (kind, name)."""
    import yaml
    found = {}
    for name, text in templates(values).items():
        for document in yaml.safe_load_all(text):
            key = (document["kind"], document["metadata"]["name"])
            assert key not in found, f"{key} is rendered twice, last by {name}"
            found[key] = document
    return found


def plain_manifest():
    parts = [f"---\n# Source: {name}\n{text}" for name, text in templates({}).items()]
    return HEADER + "".join(parts)


class Chart(unittest.TestCase):

    def test_lint(self):
        import helm_python as helm
        for name, values in VARIANTS.items():
            for version in KUBERNETES:
                with self.subTest(name, kubernetes=version):
                    report = helm.lint(CHART, values, strict=True, namespace="default",
                                       kube_version=f"v{version}.0")
                    self.assertEqual(report["errors"], [])
                    wrong = [m for m in report["messages"]
                             if m["error"] != "icon is recommended"]
                    self.assertEqual(wrong, [])

    def test_kubernetes_schemas(self):
        import kubernetes_validate.utils as kubernetes
        self.assertEqual(KUBERNETES[-1], kubernetes.major_minor(kubernetes.latest_version()))
        for name, values in VARIANTS.items():
            for (kind, _), document in objects(values).items():
                if kind in CUSTOM:
                    continue
                for version in KUBERNETES:
                    with self.subTest(name, kind=kind, kubernetes=version):
                        kubernetes.validate(document, version, strict=True)

    def test_schemas_refuse_a_misspelt_field(self):
        import kubernetes_validate.utils as kubernetes
        deployment = objects({})["Deployment", "sparsegdn"]
        deployment["spec"]["strategy"]["rollingUpdate"]["maxSurges"] = 0
        with self.assertRaisesRegex(kubernetes.ValidationError, "maxSurges"):
            kubernetes.validate(deployment, KUBERNETES[-1], strict=True)

    def test_plain_manifest_is_fresh(self):
        self.assertEqual(RENDERED.read_text(), plain_manifest(),
                         "run tests/deploy/chart_test.py --write")

    def test_package_is_whole(self):
        import helm_python as helm
        # Rules and dashboard are links out of the chart's folder: a package must hold their text.
        with tempfile.TemporaryDirectory() as folder:
            with helm.Chart.load(CHART) as chart:
                package = chart.save(folder)
            self.assertEqual(templates(EVERYTHING, package), templates(EVERYTHING))

    def test_kinds(self):
        base = {"ConfigMap", "Deployment", "PodDisruptionBudget", "Service"}
        self.assertEqual({kind for kind, _ in objects({})}, base)
        self.assertEqual({kind for kind, _ in objects(EVERYTHING)},
                         base | CUSTOM | {"HorizontalPodAutoscaler", "NetworkPolicy"})
        self.assertEqual({kind for kind, _ in objects(VARIANTS["cpu"])},
                         base - {"PodDisruptionBudget"})


class Values(unittest.TestCase):

    def test_wrong_values_are_refused(self):
        for name, (values, where) in WRONG.items():
            with self.subTest(name):
                with self.assertRaises(Exception) as caught:
                    templates(values)
                self.assertIn(where, str(caught.exception))

    def test_values_wrong_together_are_refused(self):
        for name, (values, where) in WRONG_TOGETHER.items():
            with self.subTest(name):
                with self.assertRaises(Exception) as caught:
                    templates(values)
                self.assertIn(where, str(caught.exception))

    def test_every_default_is_in_the_schema(self):
        import yaml
        schema = json.loads((CHART / "values.schema.json").read_text())
        values = yaml.safe_load((CHART / "values.yaml").read_text())
        self.assertEqual(set(values), set(schema["properties"]) - {"global"})


class Pod(unittest.TestCase):

    def setUp(self):
        self.deployment = objects({})["Deployment", "sparsegdn"]["spec"]
        self.pod = self.deployment["template"]["spec"]
        self.server = self.pod["containers"][0]

    def test_probes(self):
        ports = {port["name"]: port["containerPort"] for port in self.server["ports"]}
        self.assertEqual(ports, {"grpc": 8500, "http": 9500})
        for probe, path in (("startupProbe", "/readyz"), ("readinessProbe", "/readyz"),
                            ("livenessProbe", "/livez")):
            self.assertEqual(self.server[probe]["httpGet"], {"path": path, "port": "http"})
        startup = self.server["startupProbe"]
        self.assertGreaterEqual(startup["periodSeconds"] * startup["failureThreshold"], 900)

    def test_grace_period_covers_the_drain(self):
        drain = {"preStopSeconds": 20, "longestPrefillSeconds": 600, "transferSeconds": 90,
                 "exitSeconds": 30}
        rendered = objects({"drain": drain})
        pod = rendered["Deployment", "sparsegdn"]["spec"]["template"]["spec"]
        config = json.loads(rendered["ConfigMap", "sparsegdn"]["data"]["config.json"])
        hook = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        self.assertEqual(hook, ["sleep", "20"])
        self.assertEqual(config["drain_seconds"], 600 + 90)
        self.assertGreater(pod["terminationGracePeriodSeconds"], 20 + config["drain_seconds"])

    def test_rolls_out_without_a_spare_gpu(self):
        self.assertEqual(self.deployment["strategy"]["rollingUpdate"]["maxSurge"], 0)
        self.assertEqual(self.server["resources"]["limits"]["nvidia.com/gpu"], 1)
        cpu = objects(VARIANTS["cpu"])["Deployment", "sparsegdn"]["spec"]["template"]["spec"]
        self.assertNotIn("nvidia.com/gpu", cpu["containers"][0]["resources"]["limits"])

    def test_runs_without_privileges_under_any_uid(self):
        self.assertTrue(self.pod["securityContext"]["runAsNonRoot"])
        self.assertNotIn("runAsUser", self.pod["securityContext"])
        self.assertEqual(self.server["securityContext"], {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]}})
        self.assertFalse(self.pod["automountServiceAccountToken"])
        self.assertFalse(self.pod["enableServiceLinks"])

    def test_new_configuration_rolls_the_pods(self):
        def checksum(values):
            pod = objects(values)["Deployment", "sparsegdn"]["spec"]["template"]
            return pod["metadata"]["annotations"]["checksum/config"]
        changed = {"config": {"limits": {"max_queue_requests": 7}}}
        self.assertNotEqual(checksum({}), checksum(changed))
        self.assertEqual(checksum({}), checksum({"replicaCount": 3}))

    def test_config_file_holds_the_values(self):
        data = objects(EVERYTHING)["ConfigMap", "sparsegdn"]["data"]["config.json"]
        config = json.loads(data)
        self.assertEqual(config["listen"], "0.0.0.0:8500,unix:/run/sparsegdn/grpc.sock")
        self.assertEqual(config["auth"], {"tokens": "/etc/sparsegdn/auth/tokens"})
        self.assertEqual(config["model"], {"backend": "cuda", "dir": "/models/m"})
        self.assertEqual(config["tls"], {"cert": "/etc/sparsegdn/tls/tls.crt",
                                         "key": "/etc/sparsegdn/tls/tls.key",
                                         "client_ca": "/etc/sparsegdn/client-ca/ca.crt"})
        self.assertIn('"max_queue_tokens": 4194304', data)  # not 4.194304e+06
        self.assertEqual(config["budget"], {"retention": 0.29})
        self.assertEqual(config["prefix_cache"], {
            "bytes": 1073741824, "redis": "redis://redis:6379",
            "redis_password_file": "/etc/sparsegdn/redis/password"})

    def test_secrets_are_not_for_everybody(self):
        pod = objects(EVERYTHING)["Deployment", "sparsegdn"]["spec"]["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for name, secret in (("auth", "tokens"), ("tls", "server-cert")):
            self.assertEqual(volumes[name]["secret"],
                             {"secretName": secret, "defaultMode": 0o440})
        self.assertEqual(volumes["redis"]["secret"], {
            "secretName": "redis", "defaultMode": 0o440,
            "items": [{"key": "redis-password", "path": "password"}]})

    def test_the_images_group_reads_the_secrets(self):
        # Without a group of the pod such files belong to root:root, and 0440 shuts the server out.
        user = re.search(r"^USER \d+:(\d+)$", (lib.ROOT / "Dockerfile").read_text(), re.MULTILINE)
        for values in ({}, EVERYTHING):
            context = objects(values)["Deployment", "sparsegdn"]["spec"]["template"]["spec"][
                "securityContext"]
            self.assertEqual(context["fsGroup"], int(user.group(1)))
            self.assertEqual(context["fsGroupChangePolicy"], "OnRootMismatch")

    def test_openshift_may_choose_the_group(self):
        pod = objects(VARIANTS["openshift"])["Deployment", "sparsegdn"]["spec"]["template"]["spec"]
        self.assertEqual(set(pod["securityContext"]), {"runAsNonRoot", "seccompProfile"})

    def test_workers_reach_socket_and_shared_memory(self):
        pod = objects(EVERYTHING)["Deployment", "sparsegdn"]["spec"]["template"]["spec"]
        server, worker = pod["containers"]
        places = {mount["name"]: mount["mountPath"] for mount in server["volumeMounts"]}
        for mount in worker["volumeMounts"]:
            self.assertEqual(places[mount["name"]], mount["mountPath"])
        memory = next(v for v in pod["volumes"] if v["name"] == "shared-memory")
        self.assertEqual(memory["emptyDir"], {"medium": "Memory", "sizeLimit": "8Gi"})

    def test_mounts_have_volumes(self):
        for name, values in VARIANTS.items():
            pod = objects(values)["Deployment", "sparsegdn"]["spec"]["template"]["spec"]
            mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
            with self.subTest(name):
                self.assertEqual(mounts, {volume["name"] for volume in pod["volumes"]})


class Wiring(unittest.TestCase):

    def setUp(self):
        self.all = objects(EVERYTHING)
        self.labels = self.all["Deployment", "sparsegdn"]["spec"]["template"]["metadata"]["labels"]

    def test_selectors_find_the_pods(self):
        for kind, name, key in (("Service", "sparsegdn", "selector"),
                                ("Service", "sparsegdn-headless", "selector"),
                                ("PodDisruptionBudget", "sparsegdn", "selector"),
                                ("NetworkPolicy", "sparsegdn", "podSelector")):
            selector = self.all[kind, name]["spec"][key]
            selector = selector.get("matchLabels", selector)
            self.assertTrue(selector and selector.items() <= self.labels.items(), (kind, name))

    def test_headless_service_lists_ready_servers(self):
        spec = self.all["Service", "sparsegdn-headless"]["spec"]
        self.assertEqual(spec["clusterIP"], "None")
        self.assertFalse(spec["publishNotReadyAddresses"])

    def test_network_policy_keeps_both_ports(self):
        def peers(policy):
            self.assertEqual(policy["spec"]["policyTypes"], ["Ingress"])
            return {rule["ports"][0]["port"]: rule["from"] for rule in policy["spec"]["ingress"]}

        def named(*names):
            return [{"namespaceSelector": {"matchExpressions": [
                {"key": "kubernetes.io/metadata.name", "operator": "In", "values": list(names)}]}}]
        self.assertEqual(peers(self.all["NetworkPolicy", "sparsegdn"]),
                         {8500: named("decode", "batch"), 9500: named("monitoring")})
        # Without names the own namespace alone: an empty or absent `from` would admit everybody.
        own = objects({"networkPolicy": {"enabled": True}, "ports": {"grpc": 1500, "http": 1501}})
        self.assertEqual(peers(own["NetworkPolicy", "sparsegdn"]),
                         {1500: [{"podSelector": {}}], 1501: [{"podSelector": {}}]})

    def test_monitor_scrapes_each_server_once(self):
        monitor = self.all["ServiceMonitor", "sparsegdn"]["spec"]
        wanted = monitor["selector"]["matchLabels"].items()
        chosen = [service for (kind, _), service in self.all.items()
                  if kind == "Service" and wanted <= service["metadata"]["labels"].items()]
        self.assertEqual([service["metadata"]["name"] for service in chosen], ["sparsegdn"])
        self.assertIn(monitor["endpoints"][0]["port"],
                      [port["name"] for port in chosen[0]["spec"]["ports"]])

    def test_rules_survive_the_chart(self):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(self.all["PrometheusRule", "sparsegdn"]["spec"], file)
            file.flush()
            output = lib.run(lib.PROMTOOL, "check", "rules", file.name)
        in_files = sum(text.count("- record:") + text.count("- alert:")
                       for text in (path.read_text() for path in lib.RULE_FILES))
        self.assertIn(f"SUCCESS: {in_files} rules found", output)

    def test_dashboard_survives_the_chart(self):
        data = self.all["ConfigMap", "sparsegdn-dashboard"]["data"]["sparsegdn.json"]
        self.assertEqual(json.loads(data), json.loads(lib.DASHBOARD.read_text()))

    def test_scales_on_the_queue_and_never_on_the_cpu(self):
        scaler = self.all["HorizontalPodAutoscaler", "sparsegdn"]["spec"]
        self.assertEqual(scaler["scaleTargetRef"]["name"], "sparsegdn")
        metrics = {metric["type"]: metric for metric in scaler["metrics"]}
        self.assertEqual(set(metrics), {"Pods", "Object"})
        self.assertEqual(metrics["Pods"]["pods"]["metric"]["name"], "sparsegdn_queue_requests")
        guard = metrics["Object"]["object"]
        self.assertEqual(guard["metric"]["name"], "sparsegdn_queue_wait_p95_seconds")
        self.assertIn(("Service", guard["describedObject"]["name"]), self.all)
        self.assertNotIn("replicas", self.all["Deployment", "sparsegdn"]["spec"])


if __name__ == "__main__":
    lib.need_tools()
    if sys.argv[1:] == ["--write"]:
        RENDERED.parent.mkdir(exist_ok=True)
        RENDERED.write_text(plain_manifest())
    else:
        lib.main()
