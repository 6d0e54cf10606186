"""Starts that fail, and the time before the model is loaded: clear messages, exit codes, refusals."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

import grpc
from authority import Authority
from harness import (BINARY, MODELS, Details, Server, clean_environment, eventually, prompt,
                     run_to_exit)
from sparsegdn.v1 import prefill_pb2 as pb
from sparsegdn.v1 import prefill_pb2_grpc

LOOPBACK = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
SHARD = "model.safetensors-00001-of-00001.safetensors"


class WrongModel(unittest.TestCase):
    """Exit code 3, the file or field named, nothing written beside the model."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.model = Path(self.folder.name) / "model"
        shutil.copytree(MODELS / "tiny-hybrid", self.model)

    def expect(self, *words: str):
        before = sorted(p.name for p in self.model.glob("*"))
        code, text = run_to_exit("--model", self.model, *LOOPBACK)
        self.assertEqual(code, 3, text)
        for word in words:
            self.assertIn(word, text)
        self.assertEqual(sorted(p.name for p in self.model.glob("*")), before)

    def edit_config(self, **fields):
        path = self.model / "config.json"
        config = json.loads(path.read_text())
        config["text_config"].update(fields)
        path.write_text(json.dumps(config))

    def test_folder_does_not_exist(self):
        shutil.rmtree(self.model)
        self.expect(str(self.model), "No such file or directory")

    def test_config_is_missing(self):
        (self.model / "config.json").unlink()
        self.expect("config.json")

    def test_config_is_not_json(self):
        (self.model / "config.json").write_text("{")
        self.expect("JSON")

    def test_unknown_layer_type(self):
        self.edit_config(layer_types=["linear_attention", "mamba", "linear_attention",
                                      "full_attention"])
        self.expect("layer_types", "mamba")

    def test_shard_is_missing(self):
        (self.model / SHARD).unlink()
        self.expect(SHARD)

    def test_shard_is_truncated(self):
        path = self.model / SHARD
        path.write_bytes(path.read_bytes()[:-1000])
        self.expect(SHARD)

    def test_shard_is_empty(self):
        (self.model / SHARD).write_bytes(b"")
        self.expect(SHARD)

    def test_header_length_is_absurd(self):
        path = self.model / SHARD
        path.write_bytes(struct.pack("<Q", 1 << 62) + path.read_bytes()[8:])
        self.expect(SHARD)

    def test_header_is_garbage(self):
        path = self.model / SHARD
        data = bytearray(path.read_bytes())
        data[8:64] = b"\xff" * 56
        path.write_bytes(data)
        self.expect(SHARD)

    def test_shape_differs_from_the_config(self):
        self.edit_config(intermediate_size=512)
        self.expect("mlp", "512")

    def test_memory_cannot_be_reserved(self):
        limit = 2 << 30
        rows = [(50_000_000, "attention cache"), (60_000_000_000, "61440000000000 bytes for attention cache"),
                (1_000_000_000_000, "kv_tokens")]
        for tokens, word in rows:
            with self.subTest(tokens):
                code, text = run_to_exit(
                    "--model", self.model, *LOOPBACK, "--kv-tokens", tokens,
                    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
                self.assertEqual(code, 3, text)
                self.assertIn(word, text)

    def test_backend_that_is_not_there(self):
        code, text = run_to_exit("--model", self.model, *LOOPBACK, "--backend", "tpu")
        self.assertEqual(code, 2, text)
        self.assertIn("auto|cpu|cuda", text)


class WrongConfiguration(unittest.TestCase):
    def test_faults_are_named(self):
        model = MODELS / "tiny-hybrid"
        rows = [
            ("no model", [], "--model is required"),
            ("unknown flag", ["--model", model, "--modle", "x"], "unknown flag --modle"),
            ("retention 0", ["--model", model, "--default-retention", "0"], "retention"),
            ("retention 1.5", ["--model", model, "--default-retention", "1.5"], "1.5"),
            ("retention NaN", ["--model", model, "--default-retention", "nan"], "nan"),
            ("no port", ["--model", model, "--listen", "localhost"], "--listen"),
            ("no file", ["--model", model, "--config", "/nonexistent.json"], "/nonexistent.json"),
            ("no certificate", ["--model", model, *LOOPBACK, "--tls-cert", "/nonexistent",
                                "--tls-key", "/nonexistent"], "--tls-cert"),
        ]
        for name, args, message in rows:
            with self.subTest(name):
                code, text = run_to_exit(*args)
                self.assertEqual(code, 2, text)
                self.assertIn(message, text)

    def test_files_that_do_not_end_or_begin(self):
        """A pipe without a writer and an endless device, wherever an operator may name a file."""
        with tempfile.TemporaryDirectory() as folder:
            pipe = Path(folder) / "pipe"
            os.mkfifo(pipe)
            for path in (pipe, "/dev/zero", folder):
                for flags in (["--config", path], ["--auth-tokens", path],
                              ["--tls-cert", path, "--tls-key", path], ["--port-file", path],
                              ["--redis", "redis://127.0.0.1:1", "--redis-password-file", path]):
                    with self.subTest(path=path, flag=flags[-2]):
                        code, text = run_to_exit("--model", MODELS / "tiny-hybrid", *LOOPBACK, *flags)
                        self.assertEqual(code, 2, text)
                        self.assertIn(str(path), text)
                        self.assertIn("regular file", text)
            self.assertTrue(pipe.is_fifo())

    def test_bounds_are_told_in_full(self):
        code, text = run_to_exit("--model", MODELS / "tiny-hybrid", "--frame-bytes", "1")
        self.assertEqual(code, 2, text)
        self.assertIn("[4096, 3145728]", text)

    def test_unknown_variable(self):
        code, text = run_to_exit("--model", MODELS / "tiny-hybrid",
                                 env=clean_environment(SPARSEGDN_THREDS="2"))
        self.assertEqual(code, 2)
        self.assertIn("SPARSEGDN_THREDS", text)

    def test_help_and_version_end_well(self):
        for flag in ("--help", "--version"):
            done = subprocess.run([BINARY, flag], capture_output=True, text=True, timeout=10,
                                  env=clean_environment())
            self.assertEqual(done.returncode, 0)
            self.assertIn("sparsegdn-server", done.stdout)

    def test_ports_in_use(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            for flag in ("--listen", "--metrics-listen"):
                with self.subTest(flag):
                    args = dict(zip(LOOPBACK[::2], LOOPBACK[1::2])) | {flag: address}
                    code, text = run_to_exit("--model", MODELS / "tiny-hybrid",
                                             *[x for pair in args.items() for x in pair])
                    self.assertEqual(code, 4, text)
                    self.assertIn(f"{flag} = {address}: Address already in use", text)


def slow_model(folder: Path) -> Path:
    """A model that takes a while to load: its vocabulary is a sparse file of 256 MiB."""
    model = folder / "slow"
    shutil.copytree(MODELS / "tiny-hybrid", model)
    shard = model / SHARD
    data = shard.read_bytes()
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    name = next(n for n in header if n.endswith("embed_tokens.weight"))
    vocab, hidden = 1 << 20, header[name]["shape"][1]
    body = len(data) - 8 - length
    header[name] = {"dtype": "BF16", "shape": [vocab, hidden],
                    "data_offsets": [body, body + vocab * hidden * 2]}
    # What the old embedding occupied stays covered: as a tensor that no model uses.
    old = json.loads(data[8:8 + length])[name]
    header["model.visual.unused"] = old
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(shard, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text + data[8 + length:])
        out.truncate(8 + len(text) + body + vocab * hidden * 2)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.visual.unused"] = SHARD
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["vocab_size"] = vocab
    (model / "config.json").write_text(json.dumps(config))
    return model


class BeforeTheModelIsLoaded(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.model = slow_model(Path(self.folder.name))

    def test_refused_until_serving(self):
        with Server(model=self.model, ready=False) as server:
            error = server.refusal(prompt(10))
            self.assertEqual(error.code(), grpc.StatusCode.UNAVAILABLE)
            self.assertEqual(Details(error).reason, "MODEL_LOADING")
            self.assertGreater(Details(error).retry_seconds, 0)
            self.assertEqual(server.health(), 2)
            self.assertEqual(server.health("sparsegdn.v1.PrefillService"), 2)
            self.assertEqual(server.http("/readyz"), (503, "loading\n"))
            self.assertEqual(server.http("/livez")[0], 200)
            self.assertIsNotNone(eventually(lambda: server.http("/readyz")[0] == 200, 60),
                                 server.log())
            self.assertEqual(server.health("sparsegdn.v1.PrefillService"), 1)
            self.assertTrue(server.prefill(prompt(10)).whole)

    def test_sigterm_ends_the_load(self):
        with Server(model=self.model, ready=False) as server:
            self.assertEqual(server.http("/readyz"), (503, "loading\n"))
            start = time.monotonic()
            self.assertEqual(server.stop(signal.SIGTERM), 0)
            self.assertLess(time.monotonic() - start, 3)


class WithoutABudget(unittest.TestCase):
    def test_the_log_says_what_serves(self):
        """Defaults are read where they act: the line at start holds every field of the budget."""
        with Server() as server:
            lines = eventually(lambda: server.log_lines("serving"), 10)
            self.assertIsNotNone(lines, server.log())
        budgets = [line["default_budget"] for line in lines]
        self.assertEqual(len(budgets), 1)
        for words in ("mode: BUDGET_MODE_RETENTION", "retention: 0.29 ", "selector: SELECTOR_BETA",
                      "local: LOCAL_TERM_SELF", "solver: SOLVER_AUTO", "keep_last: 64"):
            self.assertIn(words, budgets[0] + " ")


class Tls(unittest.TestCase):
    def test_the_tenant_is_the_client_certificates(self):
        with tempfile.TemporaryDirectory() as name:
            authority = Authority(name)
            authority.sign("server", "/CN=localhost", "IP:127.0.0.1")
            clients = {"alice": authority.sign("alice", "/CN=x", "URI:spiffe://t/alice,DNS:common"),
                       "bob": authority.sign("bob", "/CN=x", "URI:spiffe://t/bob,DNS:common"),
                       "carol": authority.sign("carol", "/CN=carol"),
                       "nameless": authority.sign("nameless", "/O=nobody")}
            ca = authority.path("ca.pem")
            with Server("--tls-cert", authority.path("server.pem"),
                        "--tls-key", authority.path("server.key"),
                        "--tls-client-ca", ca) as server:
                stubs = {}
                for who, (key, cert) in clients.items():
                    channel = grpc.secure_channel(
                        f"127.0.0.1:{server.port}",
                        grpc.ssl_channel_credentials(ca.read_bytes(), key, cert),
                        options=[("grpc.use_local_subchannel_pool", 1)])
                    self.addCleanup(channel.close)
                    stubs[who] = prefill_pb2_grpc.PrefillServiceStub(channel)
                self.check_tenants(server, stubs)
                with grpc.secure_channel(f"127.0.0.1:{server.port}", grpc.ssl_channel_credentials(
                        ca.read_bytes())) as channel:  # no certificate at all
                    with self.assertRaises(grpc.RpcError) as caught:
                        prefill_pb2_grpc.PrefillServiceStub(channel).GetModelInfo(
                            pb.GetModelInfoRequest(), timeout=5)
                    self.assertEqual(caught.exception.code(), grpc.StatusCode.UNAVAILABLE)

    def check_tenants(self, server: Server, stubs: dict) -> None:
        for owner, others in [("alice", ["bob", "carol"]), ("carol", ["alice"])]:
            kept = server.prefill(prompt(100, keep_snapshot=pb.Keep(), tenant="bob"),
                                  stub=stubs[owner]).result.snapshot_id
            mine = {"alice": "spiffe://t/alice", "carol": "carol"}[owner]
            for other in others:
                for call in (
                        lambda: server.prefill(prompt(9, resume_from=kept, tenant=mine),
                                               stub=stubs[other]),
                        lambda: stubs[other].ReleaseSnapshot(pb.ReleaseSnapshotRequest(
                            snapshot_id=kept, tenant=mine), timeout=10)):
                    with self.subTest(owner=owner, other=other):
                        with self.assertRaises(grpc.RpcError) as caught:
                            call()
                        self.assertEqual(caught.exception.code(), grpc.StatusCode.NOT_FOUND)
            # The field does not even narrow: only the certificate counts.
            self.assertTrue(server.prefill(prompt(9, resume_from=kept, tenant="bob"),
                                           stub=stubs[owner]).whole)
            stubs[owner].ReleaseSnapshot(pb.ReleaseSnapshotRequest(snapshot_id=kept), timeout=10)
        with self.assertRaises(grpc.RpcError) as caught:
            server.prefill(prompt(9), stub=stubs["nameless"])
        self.assertEqual(caught.exception.code(), grpc.StatusCode.UNAUTHENTICATED)

    def test_server_certificate(self):
        with tempfile.TemporaryDirectory() as name:
            cert, key = f"{name}/cert.pem", f"{name}/key.pem"
            subprocess.run(
                ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                 "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=localhost",
                 "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
                check=True, capture_output=True)
            with Server("--tls-cert", cert, "--tls-key", key) as server:
                credentials = grpc.ssl_channel_credentials(Path(cert).read_bytes())
                with grpc.secure_channel(f"127.0.0.1:{server.port}", credentials) as channel:
                    stub = prefill_pb2_grpc.PrefillServiceStub(channel)
                    info = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
                    self.assertEqual(info.model_name, "tiny-hybrid")
                    self.assertTrue(server.prefill(prompt(100), stub=stub).whole)
                self.assertEqual(server.refusal(prompt(10), timeout=5).code(),
                                 grpc.StatusCode.UNAVAILABLE)


if __name__ == "__main__":
    unittest.main()
