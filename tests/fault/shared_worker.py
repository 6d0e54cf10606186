"""A client that test_hand_off.py kills or stops in the middle of a hand-off.

usage: shared_worker.py TARGET; prints the name of the segment once it has mapped it."""

import mmap
import os
import sys

import grpc
from sparsegdn.v1 import prefill_pb2 as pb
from sparsegdn.v1 import prefill_pb2_grpc

stub = prefill_pb2_grpc.PrefillServiceStub(grpc.insecure_channel(sys.argv[1]))
request = pb.PrefillRequest(token_ids=[i % 512 for i in range(200000)], shared_memory=True)
for event in stub.Prefill(request):
    if event.WhichOneof("event") == "manifest":
        shared = event.manifest.shared_memory
        fd = os.open("/dev/shm" + shared.name, os.O_RDONLY)
        mapped = mmap.mmap(fd, shared.bytes, access=mmap.ACCESS_READ)
        print(shared.name, flush=True)
