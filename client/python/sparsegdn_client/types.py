"""Requests and results in plain Python; enums are the lower-case words of the wire contract."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Mapping, Sequence

import numpy as np

from sparsegdn_client._stubs import prefill_pb2 as pb

if TYPE_CHECKING:
    from sparsegdn_client.snapshot import Snapshot

BudgetMode = Literal["dense", "retention", "coverage"]
Selector = Literal["beta", "write_norm"]
Solver = Literal["auto", "exact", "block_adjacent"]
LocalTerm = Literal["self", "none"]
SnapshotAt = Literal["before_last", "after_last"]
DType = Literal["fp32", "bf16", "fp8_e4m3", "int32"]
StateLayout = Literal["key_major", "value_major"]
ConvLayout = Literal["four_columns", "three_columns"]


def enum_value(enum: Any, prefix: str, word: str | None) -> int:
    """The number of `word`; 0, the server's default, for None."""
    if word is None:
        return 0
    name = prefix + word.upper()
    if name not in enum.keys():
        wanted = ", ".join(n.removeprefix(prefix).lower() for n in enum.keys()[1:])
        raise ValueError(f"{prefix.rstrip('_').lower()} = {word!r}, must be one of {wanted}")
    return enum.Value(name)


def _check_integer(name: str, value: Any, low: int, high: int) -> None:
    """ValueError that names the argument; protobuf's own names none."""
    if not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name} is {value!r}, must be an integer")
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}, must be from {low} to {high}")


def check_int32(name: str, value: Any) -> None:
    _check_integer(name, value, -(1 << 31), (1 << 31) - 1)


def check_uint32(name: str, value: Any) -> None:
    _check_integer(name, value, 0, (1 << 32) - 1)


def check_int64(name: str, value: Any) -> None:
    if value is not None:
        _check_integer(name, value, -(1 << 63), (1 << 63) - 1)


def enum_word(enum: Any, prefix: str, value: int) -> str:
    """The word of a number; "" for 0, the number itself for one of a newer server."""
    if value == 0:
        return ""
    if value not in enum.values():
        return str(value)
    return enum.Name(value).removeprefix(prefix).lower()


@dataclass(frozen=True)
class Budget:
    """How many recurrent updates are computed. None: the server's default.

    `retention` or `coverage` alone chooses the mode; a field that the mode does not use is an
    error of the server. Shares are in (0, 1].
    """

    mode: BudgetMode | None = None
    retention: float | None = None
    coverage: float | None = None
    min_retention: float | None = None
    max_retention: float | None = None
    keep_first: int | None = None
    keep_last: int | None = None
    selector: Selector | None = None
    solver: Solver | None = None
    local: LocalTerm | None = None

    def to_proto(self) -> Any:
        check_int64("budget.keep_first", self.keep_first)
        check_int64("budget.keep_last", self.keep_last)
        return pb.Budget(
            mode=enum_value(pb.BudgetMode, "BUDGET_MODE_", self.mode),
            selector=enum_value(pb.Selector, "SELECTOR_", self.selector),
            solver=enum_value(pb.Solver, "SOLVER_", self.solver),
            local=enum_value(pb.LocalTerm, "LOCAL_TERM_", self.local),
            retention=self.retention,
            coverage=self.coverage,
            min_retention=self.min_retention,
            max_retention=self.max_retention,
            keep_first=self.keep_first,
            keep_last=self.keep_last,
        )

    @staticmethod
    def from_proto(proto: Any) -> Budget:
        def number(name: str) -> Any:
            return getattr(proto, name) if proto.HasField(name) else None

        return Budget(
            mode=enum_word(pb.BudgetMode, "BUDGET_MODE_", proto.mode) or None,  # type: ignore
            selector=enum_word(pb.Selector, "SELECTOR_", proto.selector) or None,  # type: ignore
            solver=enum_word(pb.Solver, "SOLVER_", proto.solver) or None,  # type: ignore
            local=enum_word(pb.LocalTerm, "LOCAL_TERM_", proto.local) or None,  # type: ignore
            **{
                name: number(name)
                for name in (
                    "retention",
                    "coverage",
                    "min_retention",
                    "max_retention",
                    "keep_first",
                    "keep_last",
                )
            },
        )


DENSE = Budget(mode="dense")


@dataclass(frozen=True)
class Outputs:
    """What the snapshot carries. None: the server's default.

    Attributes:
        logits_positions: absolute positions p; row i holds the logits computed from token p,
            which predict token p + 1.
        top_k: 0 for full rows [positions, vocab], else the k largest.
        checkpoint_every: states also at each multiple of it.
        prompt_logprobs_from: log p(token t | tokens before) for every t >= this.
    """

    state: bool | None = None
    conv_state: bool | None = None
    kv: bool | None = None
    state_dtype: DType | None = None
    kv_dtype: DType | None = None
    state_layout: StateLayout | None = None
    conv_layout: ConvLayout | None = None
    checkpoint_every: int = 0
    logits_positions: Sequence[int] = ()
    top_k: int = 0
    prompt_logprobs_from: int | None = None

    def to_proto(self) -> Any:
        check_int64("outputs.checkpoint_every", self.checkpoint_every)
        check_int64("outputs.prompt_logprobs_from", self.prompt_logprobs_from)
        check_uint32("outputs.top_k", self.top_k)
        for index, position in enumerate(self.logits_positions):
            check_int64(f"outputs.logits_positions[{index}]", position)
        proto = pb.Outputs(
            state=self.state,
            conv_state=self.conv_state,
            kv=self.kv,
            state_dtype=enum_value(pb.DType, "DTYPE_", self.state_dtype),
            kv_dtype=enum_value(pb.DType, "DTYPE_", self.kv_dtype),
            state_layout=enum_value(pb.StateLayout, "STATE_LAYOUT_", self.state_layout),
            conv_layout=enum_value(pb.ConvLayout, "CONV_LAYOUT_", self.conv_layout),
            checkpoint_every=self.checkpoint_every,
            prompt_logprobs_from=self.prompt_logprobs_from,
        )
        if self.logits_positions:
            proto.logits.positions.extend(int(p) for p in self.logits_positions)
            proto.logits.top_k = self.top_k
        elif self.top_k:
            raise ValueError("top_k needs logits_positions")
        return proto


NOTHING = Outputs(state=False, conv_state=False, kv=False)


@dataclass(frozen=True)
class Usage:
    """Counts of one call; events are tokens x head pairs x GDN layers."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    events_total: int = 0
    events_selected: int = 0


@dataclass(frozen=True)
class Timings:
    """Seconds, as the server measured them."""

    queue_seconds: float = 0.0
    selection_seconds: float = 0.0
    gdn_core_seconds: float = 0.0
    engine_seconds: float = 0.0
    total_seconds: float = 0.0


@dataclass(frozen=True)
class Result:
    """What the server says beside the snapshot.

    Attributes:
        budget: the effective one.
        retained: per GDN layer, the share of updates computed for each head pair.
        next_token: greedy, with snapshot_at="after_last".
        snapshot_id: names the snapshot the server keeps, or "".
    """

    budget: Budget = field(default_factory=Budget)
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    retained: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    digest: int = 0
    next_token: int | None = None
    snapshot_id: str = ""
    snapshot_position: int = 0
    snapshot_ttl_seconds: int = 0
    proto: Any = field(default=None, repr=False, compare=False)

    @staticmethod
    def from_proto(proto: Any) -> Result:
        def numbers(kind: Any, message: Any) -> Any:
            return kind(**{f.name: getattr(message, f.name) for f in fields(kind)})

        return Result(
            budget=Budget.from_proto(proto.effective_budget),
            usage=numbers(Usage, proto.usage),
            timings=numbers(Timings, proto.timings),
            retained={share.layer: tuple(share.pair_share) for share in proto.retained},
            digest=proto.digest,
            next_token=proto.next_token if proto.HasField("next_token") else None,
            snapshot_id=proto.snapshot_id,
            snapshot_position=proto.snapshot_position,
            snapshot_ttl_seconds=proto.snapshot_ttl_seconds,
            proto=proto,
        )


@dataclass(frozen=True)
class PrefillResult:
    """A verified snapshot and the server's result; seconds as seen by this process."""

    snapshot: Snapshot
    result: Result
    total_seconds: float
    first_chunk_seconds: float | None = None


@dataclass(frozen=True)
class SnapshotRef:
    """A snapshot that the server keeps."""

    snapshot_id: str
    position: int
    bytes: int
    ttl_seconds: int


@dataclass(frozen=True)
class ModelInfo:
    """Identity, shapes, limits and defaults of the resident model; `proto` has every field."""

    model_identity: str
    model_name: str
    format_version: int
    server_version: str
    backend: str
    layers: tuple[str, ...]  # "linear_attention" | "full_attention"
    vocab_size: int
    hidden_size: int
    num_k_heads: int
    num_v_heads: int
    head_dim_k: int
    head_dim_v: int
    conv_channels: int
    num_kv_heads: int
    attention_head_dim: int
    compute_dtype: str
    window: int
    chunk_tokens: int
    default_budget: Budget
    max_context_tokens: int
    round_a_log: bool
    proto: Any = field(default=None, repr=False, compare=False)

    @staticmethod
    def from_proto(proto: Any) -> ModelInfo:
        plain = (
            "model_identity model_name format_version server_version backend vocab_size "
            "hidden_size num_k_heads num_v_heads head_dim_k head_dim_v conv_channels "
            "num_kv_heads attention_head_dim window chunk_tokens round_a_log"
        ).split()
        return ModelInfo(
            layers=tuple(enum_word(pb.LayerKind, "LAYER_KIND_", k) for k in proto.layers),
            compute_dtype=enum_word(pb.DType, "DTYPE_", proto.compute_dtype),
            default_budget=Budget.from_proto(proto.default_budget),
            max_context_tokens=proto.limits.max_context_tokens,
            proto=proto,
            **{name: getattr(proto, name) for name in plain},
        )
