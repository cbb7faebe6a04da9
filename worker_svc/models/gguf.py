"""Opens a GGUF file: its metadata, and its tensors as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from worker_svc.errors import ModelLoadError

_MALFORMED: Final = (
    ValueError, IndexError, KeyError, TypeError, OverflowError, NotImplementedError, RecursionError,
)  # fmt: skip
"""What the reader raises on a damaged file, UnicodeDecodeError included."""


class _Reader(GGUFReader):
    """Parses over a plain array: slicing a memmap costs four times as much, and there are 150,000 slices."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        # Past its end an array is empty and not wrong, and a damaged length would be counted to its end.
        if int(offset) + int(count) * np.dtype(dtype).itemsize > self._plain.size:
            raise ValueError("it ends within a value")
        return super()._get(offset, dtype, count, override_order)

    @property  # type: ignore[override] # the base class needs no more than an array
    def data(self) -> np.ndarray[Any, Any]:
        return self._plain

    @data.setter
    def data(self, value: np.ndarray[Any, Any]) -> None:
        self._plain = value.view(np.ndarray)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open file. Weights stay on disk until they are read."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, ReaderTensor]
    """By the names that the file has for them."""

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """Return a tensor, dequantized, in memory of its own.

        Raises:
            ModelLoadError: it cannot be read.
        """
        tensor = self.tensors[name]
        try:
            return np.require(dequantize(tensor.data, tensor.tensor_type), requirements="W")
        except _MALFORMED as error:
            kind = tensor.tensor_type.name
            raise ModelLoadError(f"{self.path}: weight {name} ({kind}) cannot be read: {error}") from error


def open_gguf_file(path: Path) -> GgufFile:
    """Open a GGUF file.

    Raises:
        ModelLoadError: the file is missing, damaged or not a GGUF file.
    """
    try:
        reader = _Reader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        return GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from error
    except _MALFORMED as error:
        raise ModelLoadError(f"{path}: not a whole GGUF file: {error}") from error
