"""torch's writer and reader of distributed checkpoints, with a checksum of each tensor.

torch notes for every tensor of a rank the file, the offset and the length. The checksums are kept beside
that, in a file of their own, so that a reader without them still reads the directory.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystemBase,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from titanplug.checkpoint.contents import load_plain, require_plain_records
from titanplug.checkpoint.files import CHECKSUMS_FILE, META_FILE, RECORDS_FILE, Place
from titanplug.errors import CheckpointError

REMEDY = "Don't use this checkpoint; load an earlier one, or copy it again from where it is whole."
_DATA_SUFFIX = ".distcp"


class ChecksumStream(io.RawIOBase):
    """A file that is written from its start to its end, with the checksum of what is written."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__()
        self._stream = stream
        self.position = 0
        self.crc32 = 0

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, data: Any) -> int:
        self._stream.write(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        size = memoryview(data).nbytes
        self.position += size
        return size

    @override
    def tell(self) -> int:
        return self.position


@contextmanager
def written(place: Place, path: str) -> Iterator[ChecksumStream]:
    """A new file, on the disk when the block has ended."""
    with place.open(path, "wb") as stream:
        checked = ChecksumStream(stream)
        yield checked
        stream.flush()
        with contextlib.suppress(AttributeError, io.UnsupportedOperation):
            os.fsync(stream.fileno())


@dataclass
class _CheckedInfo(_StorageInfo):
    """What a rank tells of a tensor that it wrote."""

    crc32: int = 0


class ChecksumWriter(FileSystemWriter):
    """Writes a rank's tensors to one file aside, and on rank 0 the rest.

    Args:
        place: of the checkpoint.
        meta: content of ``meta.pt``; used on rank 0 only.
    """

    def __init__(self, place: Place, meta: bytes) -> None:
        super().__init__(place.aside)
        self._place = place
        self._meta = meta
        self.fs = _Files(place)  # type: ignore[assignment]
        self.path = place.aside

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        name = f"{plan.storage_data.prefix}0{_DATA_SUFFIX}"
        results: list[WriteResult] = []
        if plan.items:
            with written(self._place, f"{self.path}/{name}") as stream:
                for item in plan.items:
                    begin, stream.crc32 = stream.position, 0
                    data = planner.resolve_data(item)
                    if item.type == WriteItemType.BYTE_IO:
                        stream.write(cast(io.BytesIO, data).getbuffer())
                    else:
                        torch.save(_alone(cast(Tensor, data)), cast(IO[bytes], stream))
                    length = stream.position - begin
                    info = _CheckedInfo(name, begin, length, crc32=stream.crc32)
                    results.append(WriteResult(item.index, length, info))
        done.set_result(results)
        return done

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, once all have written: what isn't tensors, the records of the tensors, the checksums."""
        parts: dict[str, list[list[int]]] = {}
        metadata.storage_data, metadata.storage_meta = {}, self.storage_meta()
        metadata.version = CURRENT_DCP_VERSION
        for result in (result for of_rank in results for result in of_rank):
            info = cast(_CheckedInfo, result.storage_data)
            parts.setdefault(info.relative_path, []).append([info.offset, info.length, info.crc32])
            plain = _StorageInfo(info.relative_path, info.offset, info.length)
            metadata.storage_data[result.index] = plain
        files = {
            name: self._write_file(name, content)
            for name, content in ((META_FILE, self._meta), (RECORDS_FILE, pickle.dumps(metadata)))
        }
        sums = {name: torch.tensor(rows, dtype=torch.int64) for name, rows in parts.items()}
        self._write_file(CHECKSUMS_FILE, pack_checksums({"files": files, "parts": sums}))

    def _write_file(self, name: str, content: bytes) -> list[int]:
        with written(self._place, f"{self.path}/{name}") as stream:
            stream.write(content)
        return [stream.position, stream.crc32]


class ChecksumReader(FileSystemReader):
    """Reads tensors, each checked against its checksum.

    Args:
        place: of the checkpoint.

    Raises:
        CheckpointError: files are missing, cut off or altered; the first of them is named.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place.name)
        self.fs = _Files(place)  # type: ignore[assignment]
        self.path = place.name
        self._place = place
        path = place.file(CHECKSUMS_FILE)
        try:
            with place.open(path, "rb") as stream:
                sums = unpack_checksums(stream.read(), path)
            self._files: dict[str, list[int]] = sums["files"]
            parts: dict[str, Tensor] = sums["parts"]
            self._parts = {
                (name, begin): crc32 for name, rows in parts.items() for begin, _, crc32 in rows.tolist()
            }
            self._ends = {name: int((rows[:, 0] + rows[:, 1]).max()) for name, rows in parts.items()}
        except (CheckpointError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CheckpointError(f"{path} isn't what was written, the checksums. {REMEDY}") from error

    def require_whole(self) -> None:
        """Check that every file is there and as long as it was written, and the small ones altogether.

        Raises:
            CheckpointError: with the first that isn't.
        """
        sizes = {name: size for name, (size, _) in self._files.items()} | self._ends
        for name, size in sizes.items():
            found = self._place.size_of(name)
            if found != size:
                what = "is missing" if found is None else f"has {found:,} bytes"
                raise CheckpointError(
                    f"{self._place.file(name)} {what}, {size:,} bytes were written. {REMEDY}"
                )
        for name in self._files:
            self.read_file(name)

    def read_file(self, name: str) -> bytes:
        """Content of one of the files that aren't tensors.

        Raises:
            CheckpointError: it isn't what was written.
        """
        with self._place.open(self._place.file(name), "rb") as stream:
            content = stream.read()
        if [len(content), zlib.crc32(content)] != self._files[name]:
            raise CheckpointError(_altered(self._place.file(name)))
        return content

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        content = self.read_file(RECORDS_FILE)
        require_plain_records(content, self._place.file(RECORDS_FILE))
        metadata: Metadata = pickle.loads(content)
        return metadata

    @override
    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        file.seek(sinfo.offset)
        content = file.read(sinfo.length)
        if self._parts.get((sinfo.relative_path, sinfo.offset)) != zlib.crc32(content):
            raise CheckpointError(_altered(self._place.file(sinfo.relative_path)))
        return io.BytesIO(content)


def pack_checksums(sums: dict[str, Any]) -> bytes:
    """The file of the checksums: its own, as 8 hexadecimal digits, and what ``torch.save`` makes of them."""
    buffer = io.BytesIO()
    torch.save(sums, buffer)
    content = buffer.getvalue()
    return b"%08x" % zlib.crc32(content) + content


def unpack_checksums(content: bytes, path: str) -> dict[str, Any]:
    """The reverse of :func:`pack_checksums`.

    Raises:
        ValueError: it isn't what was written.
    """
    own, content = content[:8], content[8:]
    if own != b"%08x" % zlib.crc32(content):
        raise ValueError
    sums: dict[str, Any] = load_plain(io.BytesIO(content), path, weights_only=True)
    return sums


def _altered(file: str) -> str:
    return f"{file} isn't what was written: its checksum differs. {REMEDY}"


def _alone(tensor: Tensor) -> Tensor:
    """The tensor in host memory, without the rest of the storage that it is a part of."""
    tensor = tensor.detach().cpu()
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        tensor = tensor.clone()
    return tensor


class _Files(FileSystemBase):
    """A place as torch's writer and reader want it; they only read by it."""

    def __init__(self, place: Place) -> None:
        self._place = place

    @contextmanager
    @override
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        try:
            stream = self._place.open(str(path), mode)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing. {REMEDY}") from error
        with stream:
            yield stream

    @override
    def concat_path(self, path: Any, suffix: str) -> str:
        return f"{str(path).rstrip('/')}/{suffix}"

    @override
    def init_path(self, path: Any) -> str:
        return str(path)

    @override
    def exists(self, path: Any) -> bool:
        return False  # the directory aside is new

    @override
    def mkdir(self, path: Any) -> None:
        """It is there."""

    @override
    def rename(self, path: Any, new_path: Any) -> None:
        raise NotImplementedError

    @override
    def rm_file(self, path: Any) -> None:
        raise NotImplementedError

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
