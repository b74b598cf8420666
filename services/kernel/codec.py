"""Values on the wire: msgpack of a tagged Struct in a zstd frame that states its size and carries a checksum."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec
import zstandard

from services.kernel.errors import Reject

MAX_DECODED_BYTES = 256 * 1024 * 1024
LEVEL = 6

T = TypeVar("T")


def schema_of(message: msgspec.Struct | type[msgspec.Struct]) -> bytes:
    """The value of the `schema` header: the message's tag."""
    return str(message.__struct_config__.tag).encode()


class Encoder:
    """Not for use by two threads at once: the zstd context is reused."""

    def __init__(self, level: int = LEVEL) -> None:
        self._pack = msgspec.msgpack.Encoder().encode
        self._compress = zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=True).compress

    def encode(self, value: msgspec.Struct) -> bytes:
        """The bytes of one message."""
        return self._compress(self._pack(value))


class Decoder(Generic[T]):
    """Decodes one type (a Struct or a union of tagged Structs). Not for use by two threads at once."""

    def __init__(self, type: type[T], max_bytes: int = MAX_DECODED_BYTES) -> None:
        self._unpack = msgspec.msgpack.Decoder(type).decode
        self._decompress = zstandard.ZstdDecompressor()
        self._max_bytes = max_bytes

    def decode(self, data: bytes | None) -> T:
        """The message in `data`. Raises Reject("undecodable") for anything else, without unpacking a bomb."""
        if not data:
            raise Reject("undecodable", "empty value")
        try:
            size = zstandard.get_frame_parameters(data).content_size
            if size == zstandard.CONTENTSIZE_UNKNOWN:
                raise Reject("undecodable", "a zstd frame that does not state its size")
            if size > self._max_bytes:
                raise Reject("undecodable", f"{size} bytes when unpacked, {self._max_bytes} are allowed")
            packed = self._decompress.decompress(data, max_output_size=size, allow_extra_data=False)
            return self._unpack(packed)
        except zstandard.ZstdError as error:
            raise Reject("undecodable", f"not one zstd frame of known size: {error}") from error
        except (msgspec.DecodeError, RecursionError) as error:  # the latter: lists in lists in lists ...
            raise Reject("undecodable", str(error)) from error
