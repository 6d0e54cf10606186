#!/usr/bin/env python3
"""Runs the GDN core of libsparsegdn.so on numpy arrays through ctypes, and checks it.

    python3 examples/python_ctypes.py build/release/lib/libsparsegdn.so

Needs numpy only. The structs below mirror kernels/include/sparsegdn/c_api.h.
"""
import ctypes as C
import sys

import numpy as np

F32, DENSE, RETENTION = 0, 0, 1


class Tensor(C.Structure):
    _fields_ = [("data", C.c_void_p), ("dtype", C.c_int32), ("reserved", C.c_int32),
                ("token_stride", C.c_int64), ("head_stride", C.c_int64)]


class Shape(C.Structure):
    _fields_ = [(n, C.c_int32) for n in ("num_k_heads", "num_v_heads", "head_dim_k", "head_dim_v")]


class Sequence(C.Structure):
    _fields_ = ([("first_position", C.c_int64), ("prompt_tokens", C.c_int64)]
                + [(n, C.c_int32) for n in ("mode", "selector", "solver", "local")]
                + [(n, C.c_double) for n in ("retention", "coverage", "min_retention",
                                             "max_retention")]
                + [(n, C.c_int64) for n in ("keep_first", "keep_last", "snapshot_every",
                                            "snapshot_index")]
                + [("initial_slot", C.c_int32), ("final_slot", C.c_int32)])


class ForwardArgs(C.Structure):
    _fields_ = ([("struct_size", C.c_size_t), ("shape", Shape), ("num_tokens", C.c_int64),
                 ("num_seqs", C.c_int32), ("normalize_qk", C.c_int32),
                 ("cu_seqlens", C.c_void_p), ("sequences", C.POINTER(Sequence))]
                + [(n, Tensor) for n in ("q", "k", "v", "log_gate", "beta", "o")]
                + [("scale", C.c_float), ("reserved0", C.c_int32),
                   ("initial_state", C.c_void_p), ("final_state", C.c_void_p)]
                + [(n, C.c_int32) for n in ("initial_slots", "final_slots", "initial_layout",
                                            "final_layout")]
                + [(n, C.c_void_p) for n in ("mask", "mask_out", "selected", "snapshots")]
                + [("snapshot_slots", C.c_int64), ("nonfinite", C.c_void_p),
                   ("status", C.c_void_p), ("workspace", C.c_void_p),
                   ("workspace_bytes", C.c_size_t), ("timings_ns", C.c_void_p)])


class Limits(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("shape", Shape), ("max_tokens", C.c_int64),
                ("max_seqs", C.c_int32), ("dtype", C.c_int32), ("max_retention", C.c_double)]


class Gdn:
    """A CPU backend. forward() takes float32 arrays [T, H, D] and returns (o, state, mask).

    mask: uint8 [T, Hk], the events to keep; None lets the library select.
    """

    def __init__(self, library, threads=0):
        self.lib = C.CDLL(library)
        self.lib.sparsegdn_last_error.restype = C.c_char_p
        self.lib.sparsegdn_version.restype = C.c_char_p
        self.backend = C.c_void_p()
        self.check(self.lib.sparsegdn_create(b"cpu", threads, C.byref(self.backend)))

    def close(self):
        self.lib.sparsegdn_destroy(self.backend)

    def check(self, code):
        if code != 0:
            raise RuntimeError(self.lib.sparsegdn_last_error().decode())

    def forward(self, q, k, v, log_gate, beta, mode, retention=0.29, mask=None):
        tokens, num_k_heads, dim_k = k.shape
        num_v_heads, dim_v = v.shape[1:]
        shape = Shape(num_k_heads, num_v_heads, dim_k, dim_v)
        o = np.empty_like(v)
        state = np.empty((num_v_heads, dim_k, dim_v), np.float32)
        given, mask = mask, np.empty((tokens, num_k_heads), np.uint8)
        cu_seqlens = np.array([0, tokens], np.int32)

        sequence = Sequence()
        self.lib.sparsegdn_sequence_init(C.byref(sequence))
        sequence.prompt_tokens = tokens
        sequence.mode, sequence.retention, sequence.final_slot = mode, retention, 0

        limits = Limits()
        self.lib.sparsegdn_limits_init(C.byref(limits), C.c_size_t(C.sizeof(limits)))
        limits.shape, limits.max_tokens, limits.max_seqs, limits.dtype = shape, tokens, 1, F32
        need = C.c_size_t()
        self.check(self.lib.sparsegdn_workspace_bytes(self.backend, C.byref(limits),
                                                      C.byref(need)))
        workspace = np.empty(need.value + 256, np.uint8)

        args = ForwardArgs()
        self.lib.sparsegdn_forward_args_init(C.byref(args), C.c_size_t(C.sizeof(args)))
        args.shape, args.num_tokens, args.num_seqs = shape, tokens, 1
        args.cu_seqlens = cu_seqlens.ctypes.data
        args.sequences = C.pointer(sequence)
        for name, x in dict(q=q, k=k, v=v, log_gate=log_gate, beta=beta, o=o).items():
            assert x.dtype == np.float32 and x.flags.c_contiguous, name
            dim = x.shape[2] if x.ndim == 3 else 1
            setattr(args, name, Tensor(x.ctypes.data, F32, 0, x.shape[1] * dim, dim))
        args.final_state, args.final_slots = state.ctypes.data, 1
        args.mask_out = mask.ctypes.data
        if given is not None:
            assert given.dtype == np.uint8 and given.shape == mask.shape
            args.mask = given.ctypes.data
        args.workspace = (workspace.ctypes.data + 255) // 256 * 256
        args.workspace_bytes = need.value
        self.check(self.lib.sparsegdn_forward(self.backend, C.byref(args), None))
        return o, state, mask


def recurrence(q, k, v, log_gate, beta, mask):
    """The definition, token by token, in float64."""
    tokens, num_k_heads, dim_k = k.shape
    num_v_heads = v.shape[1]
    pair = np.arange(num_v_heads) // (num_v_heads // num_k_heads)
    state = np.zeros((num_v_heads, dim_k, v.shape[2]))
    o = np.empty(v.shape)
    for t in range(tokens):
        m = mask[t, pair][:, None]
        b = beta[t][:, None].astype(np.float64)
        key, query = k[t, pair].astype(np.float64), q[t, pair].astype(np.float64)
        state *= np.exp(log_gate[t].astype(np.float64))[:, None, None]
        u = m * b * (v[t] - np.einsum("hkv,hk->hv", state, key))
        state += key[:, :, None] * u[:, None, :]
        own = (1 - m) * b * np.einsum("hk,hk->h", query, key)[:, None] * v[t]
        o[t] = dim_k ** -0.5 * (np.einsum("hkv,hk->hv", state, query) + own)
    return o, state


def relative_error(got, want):
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def main():
    rng = np.random.default_rng(0)
    tokens, num_k_heads, num_v_heads, dim = 1000, 2, 4, 64
    q, k = (rng.standard_normal((tokens, num_k_heads, dim), np.float32) for _ in range(2))
    q /= np.linalg.norm(q, axis=2, keepdims=True)
    k /= np.linalg.norm(k, axis=2, keepdims=True)
    v = rng.standard_normal((tokens, num_v_heads, dim), np.float32)
    log_gate = -np.log1p(np.exp(-rng.standard_normal((tokens, num_v_heads), np.float32) - 3))
    beta = 1 / (1 + np.exp(-rng.standard_normal((tokens, num_v_heads), np.float32)))

    gdn = Gdn(sys.argv[1] if len(sys.argv) > 1 else "build/release/lib/libsparsegdn.so")
    print("libsparsegdn", gdn.lib.sparsegdn_version().decode())
    for name, mode in (("dense", DENSE), ("29 %", RETENTION)):
        o, state, mask = gdn.forward(q, k, v, log_gate, beta, mode)
        want_o, want_state = recurrence(q, k, v, log_gate, beta, mask)
        errors = relative_error(o, want_o), relative_error(state, want_state)
        print(f"{name:>6}: {mask.mean():6.1%} of events kept, "
              f"relative error of o {errors[0]:.1e}, of the state {errors[1]:.1e}")
        assert max(errors) < 1e-5
    try:
        gdn.forward(q, k, v, log_gate, beta, RETENTION, retention=1.5)
        raise SystemExit("a retention of 1.5 was accepted")
    except RuntimeError as error:
        print("   1.5:", error)
    gdn.close()


if __name__ == "__main__":
    main()
