"""The native kernels, called by ctypes: the structures of forward.cpp and draw.cpp, and what holds them."""

from __future__ import annotations

import ctypes

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class Linear(ctypes.Structure):
    _fields_ = [
        ("bits", _INT),
        ("inputs", _INT),
        ("outputs", _INT),
        ("weight", _POINTER),
        ("scale", _POINTER),
        ("bias", _POINTER),
        ("heaviest", ctypes.c_double),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        ("attention_norm", _POINTER),
        ("query_norm", _POINTER),
        ("key_norm", _POINTER),
        ("mlp_norm", _POINTER),
        ("qkv", Linear),
        ("output", Linear),
        ("gate_up", Linear),
        ("down", Linear),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        ("layers", _INT),
        ("hidden", _INT),
        ("intermediate", _INT),
        ("heads", _INT),
        ("key_heads", _INT),
        ("head_size", _INT),
        ("slots", _INT),
        ("positions", _INT),
        ("epsilon", ctypes.c_float),
        ("layer", ctypes.POINTER(Layer)),
        ("final_norm", _POINTER),
        ("head", Linear),
        ("cosines", _POINTER),
        ("sines", _POINTER),
        ("cache", _POINTER),
        ("scratch", _POINTER),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        ("rows", _INT),
        ("hidden", _POINTER),
        ("slots", _POINTER),
        ("at", _POINTER),
        ("draws", _INT),
        ("drawing", _POINTER),
        ("logits", _POINTER),
        ("threads", _INT),
    ]


class Ask(ctypes.Structure):
    _fields_ = [
        ("row", _POINTER),
        ("given", _INT),
        ("seed_low", ctypes.c_uint64),
        ("seed_high", ctypes.c_uint64),
        ("choice", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        ("drawn", ctypes.c_double),
        ("temperature", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("min_p", ctypes.c_double),
        ("top_k", _INT),
        ("repetition", ctypes.c_double),
        ("presence", ctypes.c_double),
        ("frequency", ctypes.c_double),
        ("seen", _INT),
        ("seen_ids", _POINTER),
        ("seen_counts", _POINTER),
        ("biased", _INT),
        ("biased_ids", _POINTER),
        ("biases", _POINTER),
        ("bars_ends", _INT),
        ("mask_bytes", _INT),
        ("mask", ctypes.c_char_p),
        ("shown", _INT),
    ]


class Draw(ctypes.Structure):
    _fields_ = [
        ("ids", _INT),
        ("asks", _INT),
        ("ask", ctypes.POINTER(Ask)),
        ("ends", _INT),
        ("end_ids", _POINTER),
        ("threads", _INT),
        ("most_shown", _INT),
        ("tokens", _POINTER),
        ("logprobs", _POINTER),
        ("shown_ids", _POINTER),
        ("shown_logprobs", _POINTER),
    ]
