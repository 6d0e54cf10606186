"""Goal: what frames.parse_response reads by itself equals what the generated class reads.

Method: chunks written by the generated class, by hand in other orders, and by hand against the
rules; the generated class is the judge of all of them. Contents are compared exactly.
"""

import itertools
import os
import random
import unittest

import numpy as np
import xxhash
from google.protobuf.message import DecodeError
from sparsegdn_client import IntegrityError, Snapshot, TensorInfo
from sparsegdn_client._stubs import prefill_pb2 as pb
from sparsegdn_client._stubs import xxh3_64
from sparsegdn_client.assembler import Assembler
from sparsegdn_client.frames import Chunk, parse_response


def chunk_of(message):
    """(tensor, offset, data, hash) of parse_response and whether it read the chunk by itself."""
    got = parse_response(message)
    chunk = got if isinstance(got, Chunk) else got.chunk
    return (chunk.tensor, chunk.byte_offset, bytes(chunk.data), chunk.xxh3_64), got is chunk


def varint(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out + bytes([value]))


def wrap(body):
    return b"\x22" + varint(len(body)) + body


class FramesTest(unittest.TestCase):
    def check(self, message, by_itself):
        expected = pb.PrefillResponse.FromString(message).chunk
        got, alone = chunk_of(message)
        self.assertEqual(got, (expected.tensor, expected.byte_offset, expected.data,
                               expected.xxh3_64))
        self.assertEqual(alone, by_itself)

    def test_chunks_of_the_generated_class(self):
        draw = random.Random(1)
        for tensor in (0, 1, 127, 128, (1 << 32) - 1):
            for offset in (0, 1, 1 << 35, (1 << 64) - 1):
                for size in (0, 1, 300, 70000):
                    chunk = pb.TensorChunk(tensor=tensor, byte_offset=offset,
                                           data=draw.randbytes(size),
                                           xxh3_64=draw.getrandbits(64))
                    self.check(pb.PrefillResponse(chunk=chunk).SerializeToString(), True)

    def test_what_is_left_to_the_generated_class(self):
        data, value = b"\x1a\x03abc", b"\x21" + bytes(range(8))
        for name, message in {
            "empty chunk": wrap(b""),
            "data last, as servers write it": wrap(b"\x08\x05" + value + data),
        }.items():
            with self.subTest(name):
                self.check(message, True)
        for name, message in {
            "a field of a newer server": wrap(data + b"\x28\x01"),
            "data twice": wrap(data + b"\x1a\x01x"),
            "two chunks": wrap(data) + wrap(value),
            "tensor of more than 32 bits": wrap(b"\x08" + varint(1 << 40) + data),
        }.items():
            with self.subTest(name):
                self.check(message, False)

    def test_broken_messages_raise(self):
        good = wrap(b"\x08\x05" + b"\x21" + bytes(range(8)) + b"\x1a\x03abc")
        for message in [good[:size] for size in range(1, len(good))] + [
            wrap(b"\x08" + b"\xff" * 10), wrap(b"\x1a\x7fabc"), wrap(b"\x21abc"), b"\x22\xff"
        ]:
            with self.subTest(message=message), self.assertRaises(DecodeError):
                parse_response(message)

    def test_other_events(self):
        for response in (pb.PrefillResponse(), pb.PrefillResponse(result=pb.Result(digest=7))):
            self.assertEqual(parse_response(response.SerializeToString()), response)

    def test_hashes_taken_on_the_way_are_those_of_whole_tensors(self):
        values = np.random.default_rng(3).standard_normal(96, np.float32)
        info = TensorInfo("layers.0.recurrent_state", "recurrent_state", 0, "fp32", (2, 6, 8),
                          values.nbytes, 9, "key_major")
        whole = Snapshot("m", 9, [info], [values.reshape(info.shape)])
        data = values.tobytes()
        for cuts in ([0, 384], [0, 100, 384], [0, 7, 200, 384]):
            for order in itertools.permutations(zip(cuts, cuts[1:])):
                assembler = Assembler(1 << 20)
                assembler.set_manifest(pb.Manifest(
                    model_identity="m", format_version=1, position=9, tensors=[info.to_proto()],
                    total_bytes=len(data)))
                for begin, end in order:
                    piece = data[begin:end]
                    assembler.add(Chunk(0, begin, memoryview(piece), xxh3_64(piece)))
                with self.subTest(order=order):
                    got = assembler.finish(whole.digest)
                    self.assertEqual(got.hashes, whole.hashes)
                    np.testing.assert_array_equal(got[info.name], whole[info.name])
                with self.assertRaises(IntegrityError):
                    assembler.finish(whole.digest ^ 1)


def available_bytes():
    for line in open("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


class LongLargeTensor(unittest.TestCase):
    PIECE, PIECES = 64 << 20, 65

    @unittest.skipUnless(os.environ.get("TEST_LARGE"), "a ctest of its own, labelled long")
    def test_a_tensor_of_more_than_four_gigabytes(self):
        total = self.PIECE * self.PIECES
        self.assertEqual(total, (1 << 32) + self.PIECE)
        if available_bytes() < total + (1 << 30):
            self.skipTest(f"needs 5.1 GiB of memory, {available_bytes() >> 20} MiB are available")
        tokens = total // (2 * 64 * 4)
        info = TensorInfo("layers.0.key", "key", 0, "fp32", (tokens, 2, 64), total, 0)
        assembler = Assembler(total)
        assembler.set_manifest(pb.Manifest(model_identity="m", format_version=1, position=tokens,
                                           tensors=[info.to_proto()], total_bytes=total))
        piece = np.random.default_rng(5).integers(0, 256, self.PIECE, np.uint8)

        def marked(i):  # no two pieces are equal, so that one in another's place shows
            piece[0] = piece[-1] = i + 1
            return piece.data

        # The last first: beyond 2^32 before anything below it.
        for i in [self.PIECES - 1, *range(self.PIECES - 1)]:
            data = marked(i)
            assembler.add(Chunk(0, i * self.PIECE, data, xxh3_64(data)))
        self.assertEqual(assembler.bytes_done, total)
        running = xxhash.xxh3_64()
        for i in range(self.PIECES):
            running.update(marked(i))
        digest = xxh3_64(running.intdigest().to_bytes(8, "little"))
        got = assembler.finish(digest)["layers.0.key"].reshape(-1).view(np.uint8)
        self.assertEqual(got.nbytes, total)
        for i in range(self.PIECES):
            marked(i)
            self.assertTrue(np.array_equal(got[i * self.PIECE:(i + 1) * self.PIECE], piece), i)


if __name__ == "__main__":
    unittest.main()
