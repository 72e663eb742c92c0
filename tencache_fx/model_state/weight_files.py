"""Safetensors files that parameters are read from, in place.

A file begins with the length of its header (8 bytes, little-endian) and the header, JSON text that has of each tensor
its dtype, its shape, and where its bytes begin and end behind the header. The bytes are contiguous, in row-major order.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tencache_fx.errors import OptionError, StoreError
from tencache_fx.runtime.file_io import FileIO

_BLOCK_BYTES = 8 << 20
_MOST_HEADER_BYTES = 100 << 20  # as the safetensors package has it

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

Weights = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A safetensors file, an index of several (`*.safetensors.index.json`), a folder, or several files."""


class WeightFile:
    """One file that is open for reading; that somebody has changed it since is found out. Thread-safe."""

    def __init__(self, path: Path, io: FileIO) -> None:
        self.path = path
        self._io = io
        try:
            self._fd: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise OptionError(f"weights: {path} cannot be opened ({error.strerror}); name a file to read.") from error
        self._stamp = self._stat()

    def __del__(self) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        """Return the size that the file had when it was opened."""
        return self._stamp[0]

    def read(self, view: memoryview, offset: int, label: str) -> None:
        """Read bytes at `offset` into all of `view`; raises `StoreError` if that fails, or the file has changed."""
        if self._fd is None:
            raise StoreError(f"could not read {label} from {self.path}: it was closed with its engine.")
        done = 0
        while done < view.nbytes:
            try:
                moved = self._io.pread(self._fd, view[done : done + _BLOCK_BYTES], offset + done)
            except OSError as error:
                raise self._failure(label, view.nbytes, str(error.strerror or error)) from error
            if not moved:
                raise self._failure(label, view.nbytes, f"the file ends {view.nbytes - done} bytes too soon")
            done += moved
        if (stamp := self._stat()) != self._stamp:
            raise StoreError(
                f"could not read {label} from {self.path}: the file has {stamp[0]} bytes and was changed at "
                f"{stamp[1]} ns; when it was opened it had {self._stamp[0]} bytes, changed at {self._stamp[1]} ns. "
                "Leave weight files as they are while a model reads them."
            )

    def close(self) -> None:
        """Close the file, which nobody may be reading. Idempotent."""
        fd, self._fd = getattr(self, "_fd", None), None
        if fd is not None:
            os.close(fd)

    def _failure(self, label: str, nbytes: int, reason: str) -> StoreError:
        return StoreError(
            f"could not read {nbytes} bytes of {label} from {self.path} ({reason}); check the disk, and run the step "
            "again."
        )

    def _stat(self) -> tuple[int, int]:
        assert self._fd is not None
        stat = os.fstat(self._fd)
        return stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True, slots=True, eq=False)
class WeightSlice:
    """Where the tensor called `name` is in a file."""

    file: WeightFile
    name: str
    offset: int
    nbytes: int
    size: torch.Size
    dtype: torch.dtype

    def read(self, view: memoryview) -> None:
        """Read the bytes into `view`, of that size; raises `StoreError`."""
        self.file.read(view, self.offset, self.name)

    def has(self, memory: Tensor) -> bool:
        """Return whether the bytes are those of `memory`; raises `StoreError` if they cannot be read."""
        block = torch.empty(min(_BLOCK_BYTES, self.nbytes), dtype=torch.uint8, device="cpu")
        for start in range(0, self.nbytes, _BLOCK_BYTES):
            some = memory[start : start + _BLOCK_BYTES]
            self.file.read(_bytes_of(block[: some.numel()]), self.offset + start, self.name)
            if not torch.equal(block[: some.numel()], some):
                return False
        return True

    def fill(self, target: Tensor) -> None:
        """Copy the tensor to `target`, of this size and dtype, on any device and of any strides."""
        if target.device.type == "cpu" and target.is_contiguous():
            found = target
        else:
            found = torch.empty(self.size, dtype=self.dtype, device="cpu")
        self.read(_bytes_of(found))
        if found is not target:
            target.copy_(found)


class WeightFiles:
    """The tensors of all files that `weights` names, by name.

    Raises `OptionError` for what is no safetensors file, and for a name that is in two files.
    """

    def __init__(self, weights: Weights, io: FileIO | None = None) -> None:
        self.slices: dict[str, WeightSlice] = {}
        self.files: list[WeightFile] = []
        try:
            for path in _paths(weights):
                file = WeightFile(path, FileIO() if io is None else io)
                self.files.append(file)
                for each in _slices(file):
                    if (other := self.slices.setdefault(each.name, each)) is not each:
                        raise OptionError(
                            f"weights: {each.name} is in {other.file.path} and in {path}; name one of them."
                        )
        except BaseException:
            self.close()
            raise

    def find(self, names: Iterable[str], like: Tensor) -> WeightSlice | None:
        """Return the tensor under one of the `names` that a model has for it; None if there is none.

        Raises `OptionError` if its size or dtype is not that of the model's, `like`.
        """
        found = next((self.slices[name] for name in names if name in self.slices), None)
        if found is not None and (found.size, found.dtype) != (like.size(), like.dtype):
            raise OptionError(
                f"weights: {found.name} is {_shown(found.size, found.dtype)} in {found.file.path}, and "
                f"{_shown(like.size(), like.dtype)} in the model; build the model as it was saved, or convert the file."
            )
        return found

    def close(self) -> None:
        """Close all files."""
        for file in self.files:
            file.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of the CPU."""
    elements = tensor.detach().reshape(-1)
    return memoryview(elements.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _shown(size: torch.Size, dtype: torch.dtype) -> str:
    return f"{tuple(size)} of {str(dtype).removeprefix('torch.')}"


def _paths(weights: Weights) -> list[Path]:
    """Return the files that are meant; raises `OptionError` if there is none."""
    if not isinstance(weights, str | os.PathLike):
        return [path for each in weights for path in _paths(each)]
    path = Path(weights)
    if path.is_dir():
        indices = sorted(path.glob("*.safetensors.index.json"))
        if len(indices) > 1:
            raise OptionError(f"weights: {path} has {len(indices)} index files; name one: {indices[0]}.")
        found = _paths(indices[0]) if indices else sorted(path.glob("*.safetensors"))
        if not found:
            raise OptionError(f"weights: there are no safetensors files in {path}; name a folder that has some.")
        return found
    if path.suffix != ".json":
        return [path]
    try:
        names = json.loads(path.read_text())["weight_map"].values()
        return [path.parent / name for name in sorted(set(names))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(f"weights: {path} is no index of safetensors files ({error!r}); name the files.") from error


def _slices(file: WeightFile) -> Iterator[WeightSlice]:
    """Yield the tensors of a file; raises `OptionError` if it has no header of a safetensors file."""
    head = bytearray(8)
    if file.nbytes < len(head):
        raise _no_weights(file, f"it has {file.nbytes} bytes")
    file.read(memoryview(head), 0, "the header")
    (length,) = struct.unpack("<Q", head)
    if length > min(_MOST_HEADER_BYTES, file.nbytes - len(head)):
        raise _no_weights(file, f"its header would have {length} bytes, the file has {file.nbytes}")
    text = bytearray(length)
    if length:
        file.read(memoryview(text), len(head), "the header")
    try:
        header = json.loads(text)
        for name, entry in header.items():
            if name != "__metadata__" and entry["dtype"] in _DTYPES:
                yield _slice(file, name, entry, len(head) + length)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, OptionError):
            raise
        raise _no_weights(file, f"its header cannot be read: {error!r}") from error


def _slice(file: WeightFile, name: str, entry: Mapping[str, Any], begin: int) -> WeightSlice:
    start, stop = entry["data_offsets"]
    size, dtype = torch.Size(entry["shape"]), _DTYPES[entry["dtype"]]
    nbytes = size.numel() * dtype.itemsize
    if not 0 <= start <= stop <= file.nbytes - begin or stop - start != nbytes:
        raise _no_weights(
            file, f"{name} has {nbytes} bytes, and its place is {start} to {stop} of {file.nbytes - begin} bytes"
        )
    return WeightSlice(file=file, name=name, offset=begin + start, nbytes=nbytes, size=size, dtype=dtype)


def _no_weights(file: WeightFile, reason: str) -> OptionError:
    return OptionError(f"weights: {file.path} is no whole safetensors file ({reason}); save or download it again.")
