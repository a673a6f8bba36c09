"""torch's writer and reader of distributed checkpoints, with a checksum of each tensor.

torch notes for every tensor of a rank the file, the offset and the length. The checksums are kept beside
that, in a file of their own, so that a reader without them still reads the directory.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystemBase,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from titanplug.checkpoint.contents import load_plain, load_records
from titanplug.checkpoint.files import CHECKSUMS_FILE, META_FILE, RECORDS_FILE, Place
from titanplug.compat import saved_values
from titanplug.errors import CheckpointError

REMEDY = "Don't use this checkpoint; load an earlier one, or copy it again from where it is whole."
_DATA_SUFFIX = ".distcp"
_MASK = 2**63 - 1  # torch's integers have a sign


def checksum_of(content: Any) -> int:
    """XXH3 (Collet 2019), 63 bits of it: finds damage, which is its purpose, at the speed of a copy."""
    return xxhash.xxh3_64_intdigest(content) & _MASK


class ChecksumStream(io.RawIOBase):
    """A file that is written from its start to its end, with the checksum of what is written."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__()
        self._stream = stream
        self.position = 0
        self._hash = xxhash.xxh3_64()

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, data: Any) -> int:
        self._stream.write(data)
        self._hash.update(data)
        size = memoryview(data).nbytes
        self.position += size
        return size

    @override
    def tell(self) -> int:
        return self.position

    def restart_checksum(self) -> None:
        """Count what was written so far no longer."""
        self._hash.reset()

    @property
    def checksum(self) -> int:
        """Of what was written since."""
        return self._hash.intdigest() & _MASK


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

    checksum: int = 0


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
                    begin = stream.position
                    stream.restart_checksum()
                    data = planner.resolve_data(item)
                    if item.type == WriteItemType.BYTE_IO:
                        stream.write(cast(io.BytesIO, data).getbuffer())
                    else:
                        torch.save(_alone(cast(Tensor, data)), cast(IO[bytes], stream))
                    length = stream.position - begin
                    info = _CheckedInfo(name, begin, length, checksum=stream.checksum)
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
            parts.setdefault(info.relative_path, []).append([info.offset, info.length, info.checksum])
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
        return [stream.position, stream.checksum]


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
        self._buffer = bytearray()
        self._metadata: Metadata | None = None
        path = place.file(CHECKSUMS_FILE)
        try:
            with place.open(path, "rb") as stream:
                sums = unpack_checksums(stream.read(), path)
            self._files: dict[str, list[int]] = sums["files"]
            parts: dict[str, Tensor] = sums["parts"]
            self._parts = {
                (name, begin): checksum
                for name, rows in parts.items()
                for begin, _, checksum in rows.tolist()
            }
            self._ends = {name: int((rows[:, 0] + rows[:, 1]).max()) for name, rows in parts.items()}
        except (CheckpointError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CheckpointError(f"{path} isn't what was written, the checksums. {REMEDY}") from error

    def require_whole(self) -> None:
        """Check that every file is there and as long as it was written.

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

    def read_file(self, name: str) -> bytes:
        """Content of one of the files that aren't tensors.

        Raises:
            CheckpointError: it isn't what was written.
        """
        with self._place.open(self._place.file(name), "rb") as stream:
            content = stream.read()
        if [len(content), checksum_of(content)] != self._files[name]:
            raise CheckpointError(_altered(self._place.file(name)))
        return content

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            content = self.read_file(RECORDS_FILE)
            self._metadata = load_records(content, self._place.file(RECORDS_FILE))
        return self._metadata

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Each part goes through one buffer straight to where it is wanted."""
        by_file: dict[str, list[tuple[int, ReadItem]]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            by_file.setdefault(info.relative_path, []).append((info.offset, item))
        for name, items in by_file.items():
            with self.fs.create_stream(self._place.file(name), "rb") as stream:
                for _, item in sorted(items, key=lambda entry: entry[0]):
                    self._read_item(stream, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, stream: Any, item: ReadItem, planner: LoadPlanner) -> None:
        content = self._read_part(stream, self.storage_data[item.storage_index])
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(content))
            return
        saved = self._tensor_in(content, item.storage_index)
        for dim, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            saved = saved.narrow(dim, begin, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(saved)
        planner.commit_tensor(item, target)

    def _read_part(self, stream: Any, info: _StorageInfo) -> memoryview:
        """What was written at one place, checked; it is overwritten by the next one."""
        if len(self._buffer) < info.length:
            self._buffer = bytearray(info.length)
        content = memoryview(self._buffer)[: info.length]
        stream.seek(info.offset)
        num_read = stream.readinto(content)
        expected = self._parts.get((info.relative_path, info.offset))
        if num_read != info.length or expected != checksum_of(content):
            raise CheckpointError(_altered(self._place.file(info.relative_path)))
        return content

    def _tensor_in(self, content: memoryview, index: MetadataIndex) -> Tensor:
        """The tensor that ``torch.save`` wrote, without a copy of its values where they lie plainly."""
        entry = self.read_metadata().state_dict_metadata[index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        chunk = next(chunk for chunk in entry.chunks if index.offset in (None, chunk.offsets))
        values = saved_values(content, chunk.sizes.numel() * entry.properties.dtype.itemsize)
        if values is None:
            loaded: Tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            return loaded
        return torch.frombuffer(values, dtype=entry.properties.dtype).view(chunk.sizes)


def pack_checksums(sums: dict[str, Any]) -> bytes:
    """The file of the checksums: its own, as 16 hexadecimal digits, and what ``torch.save`` makes of them."""
    buffer = io.BytesIO()
    torch.save(sums, buffer)
    content = buffer.getvalue()
    return b"%016x" % checksum_of(content) + content


def unpack_checksums(content: bytes, path: str) -> dict[str, Any]:
    """The reverse of :func:`pack_checksums`.

    Raises:
        ValueError: it isn't what was written.
    """
    own, content = content[:16], content[16:]
    if own != b"%016x" % checksum_of(content):
        raise ValueError
    sums: dict[str, Any] = load_plain(io.BytesIO(content), path, weights_only=True)
    return sums


def _altered(file: str) -> str:
    return f"{file} isn't what was written: its checksum differs. {REMEDY}"


def _alone(tensor: Tensor) -> Tensor:
    """The tensor in host memory, its values in order, without the rest of a storage that it is a part of."""
    tensor = tensor.detach().cpu().contiguous()
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
