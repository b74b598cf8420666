"""What a compressed file holds, as a stream. A file that ends too early raises EOFError: it is not called read."""

from __future__ import annotations

import gzip
import io
from typing import BinaryIO, Literal, cast

import zstandard

_CHUNK = 64 * 1024
# Four bytes of zstd can stand for 128 KiB: what a piece becomes is held in memory as a whole.
_PIECE = 1024


def unpacked(file: BinaryIO, packing: Literal["", "gz", "zst"]) -> BinaryIO:
    """`file` (buffered) as it was before it was packed; several members or frames are one content."""
    if packing == "gz":
        return cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=file, mode="rb"), _CHUNK))
    if packing == "zst":
        return cast(BinaryIO, io.BufferedReader(_Zstandard(file), _CHUNK))
    return file


class _Zstandard(io.RawIOBase):
    """zstandard's own stream reader takes a file that was cut off for one that has ended."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._ahead, self._left = memoryview(b""), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # the stubs know no common type
        while not self._ahead:
            data = self._left or self._file.read(_PIECE)
            self._left = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("the zstd frame is not whole")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._ahead = memoryview(self._frame.decompress(data))
            if self._frame.eof:
                self._left, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._ahead))
        buffer[:size] = self._ahead[:size]
        self._ahead = self._ahead[size:]
        return size
