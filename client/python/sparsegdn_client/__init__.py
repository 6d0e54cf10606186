"""Client of the SparseGDN prefill service: a prompt goes in, a verified snapshot comes out.

    from sparsegdn_client import Budget, PrefillClient

    with PrefillClient("127.0.0.1:50051") as client:
        done = client.prefill([5, 17, 42], budget=Budget(retention=0.29))
        state = done.snapshot.state(layer=0)      # float32 [Hv, Dk, Dv]
"""

from sparsegdn_client.client import Cancellation, PrefillClient, Progress
from sparsegdn_client.errors import IntegrityError, PrefillError, SnapshotFileError
from sparsegdn_client.files import load_snapshot, load_snapshot_file, save_snapshot
from sparsegdn_client.identity import compute_model_identity
from sparsegdn_client.snapshot import (
    Snapshot,
    TensorInfo,
    bf16_to_float32,
    float32_to_bf16,
    fp8_e4m3_to_float32,
)
from sparsegdn_client.types import (
    Budget,
    ModelInfo,
    Outputs,
    PrefillResult,
    Result,
    SnapshotRef,
    Timings,
    Usage,
)

FORMAT_VERSION = 1

__all__ = [
    "FORMAT_VERSION",
    "Budget",
    "Cancellation",
    "IntegrityError",
    "ModelInfo",
    "Outputs",
    "PrefillClient",
    "PrefillError",
    "PrefillResult",
    "Progress",
    "Result",
    "Snapshot",
    "SnapshotFileError",
    "SnapshotRef",
    "TensorInfo",
    "Timings",
    "Usage",
    "bf16_to_float32",
    "compute_model_identity",
    "float32_to_bf16",
    "fp8_e4m3_to_float32",
    "load_snapshot",
    "load_snapshot_file",
    "save_snapshot",
]
