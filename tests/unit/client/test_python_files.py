"""Goal: files of the Python and the C++ client are the same format, verified on reading.

Method: round trips, exact; the C++ tool reads what Python wrote and the other way round
(test_cli.py); every single-byte change of a file must be an error or change nothing.
"""

import json
import os
import random
import resource
import signal
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import numpy as np
from fake_server import make_snapshot
from sparsegdn_client import (
    Result,
    Snapshot,
    SnapshotFileError,
    TensorInfo,
    compute_model_identity,
    float32_to_bf16,
    load_snapshot,
    load_snapshot_file,
    save_snapshot,
)
from sparsegdn_client._stubs import prefill_pb2 as pb
from sparsegdn_client.identity import check_identity

ROOT = Path(__file__).resolve().parents[3]


def mixed_snapshot():
    """Every storage size, an odd one first, one tensor without bytes."""
    arrays = {
        "layers.0.recurrent_state": np.arange(15, dtype=np.uint8).reshape(1, 3, 5),
        "layers.0.recurrent_state_scale": np.ones((1, 3), np.float32),
        "layers.0.conv_state": np.arange(27, dtype=np.uint16).reshape(9, 3),
        "layers.3.key": np.zeros((0, 2, 4), np.float32),
        "top_k_ids": np.array([[3, -1]], np.int32),
    }
    kinds = ["recurrent_state", "recurrent_state_scale", "conv_state", "key", "top_k_ids"]
    dtypes = ["fp8_e4m3", "fp32", "bf16", "fp32", "int32"]
    layers = [0, 0, 0, 3, -1]
    infos = [
        TensorInfo(name, kind, layer, dtype, a.shape, a.nbytes, 0,
                   state_layout="value_major" if kind == "recurrent_state" else "",
                   conv_layout="three_columns" if kind == "conv_state" else "")
        for (name, a), kind, dtype, layer in zip(arrays.items(), kinds, dtypes, layers)
    ]
    return Snapshot("cd" * 32, 7, infos, list(arrays.values()))


def a_result():
    proto = pb.Result(digest=(1 << 64) - 1, next_token=5, snapshot_id="x")
    proto.effective_budget.retention = 0.1
    return Result.from_proto(proto)


class FileTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.path = self.folder / "s.safetensors"

    def assert_same(self, a, b):
        self.assertEqual(a.infos, b.infos)
        self.assertEqual((a.digest, a.position, a.model_identity),
                         (b.digest, b.position, b.model_identity))
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])

    def test_round_trip(self):
        for snapshot in (mixed_snapshot(), make_snapshot([1, 2, 3]), Snapshot("", 0, [], [])):
            save_snapshot(self.path, snapshot, a_result())
            loaded, result = load_snapshot_file(self.path)
            self.assert_same(snapshot, loaded)
            self.assertEqual(result.proto, a_result().proto)
            self.assertEqual([p.name for p in self.folder.iterdir()], [self.path.name])

    def test_is_a_safetensors_file(self):
        save_snapshot(self.path, mixed_snapshot())
        data = self.path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        self.assertEqual(length % 8, 0)
        metadata = header.pop("__metadata__")
        self.assertTrue(all(isinstance(v, str) for v in metadata.values()))
        sizes = {"F32": 4, "I32": 4, "BF16": 2, "F8_E4M3": 1}
        end = 0
        for entry in sorted(header.values(), key=lambda e: e["data_offsets"]):
            self.assertEqual(entry["data_offsets"][0], end)
            self.assertEqual(end % sizes[entry["dtype"]], 0)
            end = entry["data_offsets"][1]
        self.assertEqual(8 + length + end, len(data))

    def test_worked_example_of_the_document(self):
        text = (ROOT / "docs/snapshot_format.md").read_text()
        state = np.array([[[1, 2, 3], [4, 5, 6]]], np.float32)
        conv = float32_to_bf16(np.array([[0, 0, 1, 2]] * 7, np.float32))
        infos = [
            TensorInfo("layers.0.recurrent_state", "recurrent_state", 0, "fp32", (1, 2, 3), 24, 2,
                       state_layout="key_major"),
            TensorInfo("layers.0.conv_state", "conv_state", 0, "bf16", (7, 4), 56, 2,
                       conv_layout="four_columns"),
        ]
        snapshot = Snapshot("0" * 64, 2, infos, [state, conv])
        save_snapshot(self.path, snapshot)
        data = self.path.read_bytes()
        self.assertEqual(len(data), 912)
        metadata = json.loads(data[8:832])["__metadata__"]
        for words in (data[:8].hex(" "), data[832:844].hex(" "), data[844:856].hex(" "),
                      data[856:864].hex(" "), f"`{snapshot.digest:016x}`",
                      f"`{metadata['sparsegdn.metadata_xxh3_64']}`",
                      *(f"`{h:016x}`" for h in snapshot.hashes.values())):
            self.assertIn(words, text)
        self.assertEqual(data[864:], data[856:864] * 6)

    def test_every_byte_change_is_seen_or_harmless(self):
        snapshot = mixed_snapshot()
        save_snapshot(self.path, snapshot, a_result())
        good = self.path.read_bytes()
        chance, seen = random.Random(1), 0
        for i in range(len(good)):
            bad = bytearray(good)
            bad[i] ^= chance.randrange(1, 256)
            self.path.unlink()  # some file systems flush one that is truncated and written again
            self.path.write_bytes(bad)
            try:
                loaded, result = load_snapshot_file(self.path)
            except SnapshotFileError:
                seen += 1
                continue
            self.assert_same(snapshot, loaded)
            self.assertEqual(result.proto, a_result().proto, i)
        self.assertGreater(seen, len(good) * 9 // 10)

    def test_truncated_and_longer(self):
        save_snapshot(self.path, mixed_snapshot())
        good = self.path.read_bytes()
        for bad in [good[:size] for size in range(0, len(good), 7)] + [good + b"x"]:
            self.path.write_bytes(bad)
            with self.assertRaises(SnapshotFileError):
                load_snapshot(self.path)

    def test_other_files(self):
        with self.assertRaises(FileNotFoundError):
            load_snapshot(self.path)
        header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
        self.path.write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
        with self.assertRaises(SnapshotFileError):
            load_snapshot(self.path)

    def test_no_regular_file_is_neither_replaced_nor_waited_for(self):
        pipe, link = self.folder / "pipe", self.folder / "link"
        os.mkfifo(pipe)
        link.symlink_to(pipe)
        for path in (pipe, link):
            with self.assertRaisesRegex(OSError, "no regular file"):
                save_snapshot(path, mixed_snapshot())
            self.assertTrue(path.is_fifo())
            with self.assertRaisesRegex(SnapshotFileError, "not a regular file"):
                load_snapshot(path)
        self.assertTrue(link.is_symlink())
        self.assertEqual(len(list(self.folder.iterdir())), 2)

    def test_failed_write_leaves_the_old_file(self):
        """A child may write 2,048 bytes, then the kernel refuses, as on a full disk."""
        self.check_failed_write()
        with mock.patch.object(os, "O_TMPFILE", 0):  # a file system without unnamed files
            self.check_failed_write()
            save_snapshot(self.path, mixed_snapshot())
        self.assert_same(load_snapshot(self.path), mixed_snapshot())

    def check_failed_write(self):
        self.path.write_bytes(b"old")
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
            code = 1
            try:
                save_snapshot(self.path, make_snapshot(list(range(100))))
            except OSError:
                code = 0
            finally:
                os._exit(code)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        self.assertEqual(self.path.read_bytes(), b"old")
        self.assertEqual([p.name for p in self.folder.iterdir()], [self.path.name])


class IdentityTest(unittest.TestCase):
    """The definition, written out once more for a two-layer model made here."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    CONFIG = {
        "vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1,
        "layer_types": ["full_attention"], "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 4, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 10000000},
    }
    LINES = (
        "attention_head_dim=4\nconv_kernel=4\neps=9.9999999999999995e-07\nhead_dim_k=128\n"
        "head_dim_v=128\nhidden_size=4\nintermediate_size=4\nlayer_types=full_attention\n"
        "num_k_heads=1\nnum_kv_heads=1\nnum_q_heads=2\nnum_v_heads=2\n"
        "partial_rotary_factor=0.25\nrope_theta=10000000\ntie_word_embeddings={tied}\n"
        "vocab_size=8\n"
    )
    LAYER = ("input_layernorm post_attention_layernorm mlp.gate_proj mlp.up_proj mlp.down_proj "
             "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj "
             "self_attn.q_norm self_attn.k_norm").split()

    def write(self, tied, prefix, extra=(), order=1, nested=False):
        names = [f"{prefix}embed_tokens.weight", f"{prefix}norm.weight"]
        names += [f"{prefix}layers.0.{n}.weight" for n in self.LAYER]
        names += ([] if tied else ["lm_head.weight"]) + list(extra)
        header, data = {}, b""
        for name in names[::order]:
            canonical = name.replace("model.language_model.", "model.")
            piece = canonical.encode() + b"!" * (len(canonical) % 2)
            header[name] = {"dtype": "BF16", "shape": [len(piece) // 2],
                            "data_offsets": [len(data), len(data) + len(piece)]}
            data += piece
        text = json.dumps(header).encode()
        self.folder.joinpath("model.safetensors").write_bytes(
            len(text).to_bytes(8, "little") + text + data)
        config = {"text_config": dict(self.CONFIG)} if nested else dict(self.CONFIG)
        config["tie_word_embeddings"] = tied
        self.folder.joinpath("config.json").write_text(json.dumps(config))

    def expected(self, tied, round_a_log=False):
        import hashlib

        names = ["model.embed_tokens.weight", "model.norm.weight"]
        names += [f"model.layers.0.{n}.weight" for n in self.LAYER]
        names += [] if tied else ["lm_head.weight"]
        text = b"sparsegdn-model-identity-1\n"
        text += self.LINES.replace("{tied}", "true" if tied else "false").encode()
        text += b"round_a_log=true\n" if round_a_log else b"round_a_log=false\n"
        for name in sorted(names):
            piece = name.encode() + b"!" * (len(name) % 2)
            text += b"%s\0BF16\0%d\0" % (name.encode(), len(piece) // 2)
            text += len(piece).to_bytes(8, "little") + piece
        return hashlib.sha256(text).hexdigest()

    def test_definition(self):
        for tied in (True, False):
            for nested in (True, False):
                self.write(tied, "model.", nested=nested)
                self.assertEqual(compute_model_identity(self.folder), self.expected(tied))
        self.assertEqual(compute_model_identity(self.folder, round_a_log=True),
                         self.expected(False, round_a_log=True))

    def test_prefix_order_and_foreign_tensors_do_not_matter(self):
        self.write(True, "model.language_model.", order=-1,
                   extra=["mtp.fc.weight", "model.visual.blocks.0.weight", "lm_head.weight"])
        self.assertEqual(compute_model_identity(self.folder), self.expected(True))

    def test_missing_and_repeated_tensors(self):
        self.write(True, "model.")
        path = self.folder / "model.safetensors"
        self.folder.joinpath("second.safetensors").write_bytes(path.read_bytes())
        with self.assertRaisesRegex(ValueError, "comes twice"):
            compute_model_identity(self.folder)
        path.unlink()
        self.folder.joinpath("second.safetensors").unlink()
        with self.assertRaisesRegex(ValueError, "missing"):
            compute_model_identity(self.folder)

    def test_a_snapshot_of_another_model_is_refused(self):
        self.write(True, "model.")
        mine, rounded = self.expected(True), self.expected(True, round_a_log=True)
        for got, expect in [(mine, mine), (mine, self.folder), (mine, str(self.folder)),
                            (rounded, self.folder), (rounded, rounded)]:
            check_identity(got, expect)
        for got, expect in [("ab" * 32, mine), ("ab" * 32, self.folder), (rounded, mine),
                            ("", self.folder), (mine.upper(), mine)]:
            with self.subTest(got=got), self.assertRaisesRegex(ValueError, f"model {got}, must be"):
                check_identity(got, expect)
        with self.assertRaises(OSError):
            check_identity(mine, self.folder / "nowhere")

    def test_bundled_checkpoints_differ(self):
        models = ROOT / "tests/data/models"
        seen = {compute_model_identity(f) for f in models.iterdir() if (f / "config.json").exists()}
        self.assertEqual(len(seen), len([f for f in models.iterdir() if f.is_dir()]))


if __name__ == "__main__":
    unittest.main()
