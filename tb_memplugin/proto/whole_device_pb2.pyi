from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class WholeDevice(_message.Message):
    __slots__ = ("device", "moment", "read_at", "is_limit", "parts", "part_bytes")
    device: int
    moment: int
    read_at: int
    is_limit: bool
    parts: _containers.RepeatedScalarFieldContainer[int]
    part_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, device: _Optional[int] = ..., moment: _Optional[int] = ..., read_at: _Optional[int] = ..., is_limit: bool = ..., parts: _Optional[_Iterable[int]] = ..., part_bytes: _Optional[_Iterable[int]] = ...) -> None: ...
