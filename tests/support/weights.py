"""Safetensors files, written without that package."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}


def save_weights(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data, start = b"", 0
    for name, tensor in tensors.items():
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        stop = start + len(raw)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        data, start = data + raw, stop
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path
