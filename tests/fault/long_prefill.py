"""A client that test_faults.py kills or stops in the middle of a long prefill.

usage: long_prefill.py HOST:PORT; prints a line for each event."""

import sys

import grpc
from sparsegdn.v1 import prefill_pb2 as pb
from sparsegdn.v1 import prefill_pb2_grpc

stub = prefill_pb2_grpc.PrefillServiceStub(grpc.insecure_channel(sys.argv[1]))
for event in stub.Prefill(pb.PrefillRequest(token_ids=[i % 512 for i in range(200000)])):
    print(event.WhichOneof("event"), flush=True)
