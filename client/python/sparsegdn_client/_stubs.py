"""The generated messages of the wire contract (proto/sparsegdn), and what they need.

Only messages are generated code; methods are called by their path, so that grpcio's own code
generator and its version do not matter. Output of protoc 3.21 loads with protobuf 3.20 to 7.
"""

try:
    from sparsegdn.rpc import status_pb2
    from sparsegdn.v1 import prefill_pb2
except ImportError as error:  # pragma: no cover - depends on the installation
    raise ImportError(
        f"sparsegdn_client needs the generated modules sparsegdn.v1.prefill_pb2 and "
        f"sparsegdn.rpc.status_pb2, and a protobuf runtime to load them ({error}). Install the "
        f"package with `pip install ./client/python` (needs protoc), or put build/<preset>/python "
        f"of a CMake build on PYTHONPATH."
    ) from error

try:
    import xxhash
except ImportError as error:  # pragma: no cover - depends on the installation
    raise ImportError(
        "sparsegdn_client verifies every byte and needs xxhash: apt install python3-xxhash, or "
        "pip install xxhash"
    ) from error

SERVICE = "/sparsegdn.v1.PrefillService/"


def xxh3_64(data: object) -> int:
    """XXH3-64, seed 0, of anything with a contiguous buffer."""
    return xxhash.xxh3_64_intdigest(data)


RunningHash = xxhash.xxh3_64  # update(data), intdigest()

__all__ = ["SERVICE", "RunningHash", "prefill_pb2", "status_pb2", "xxh3_64"]
