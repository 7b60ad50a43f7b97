"""A Kimi-K3 checkpoint on disk: its index, its shards, its weights and its expert records.

Owns the mapping from tensor names to bytes, checked against the config before anything is computed,
and the digest that ties banks and placements to the model they were made from. Knows both public
layouts (the MXFP4 original and the NVFP4/FP8 release) and plain floats. Must not know the maths.
All reads are positional, so any thread may call any method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Final

import blake3
import msgspec
import numpy as np
import torch

from shared.core.errors import CheckpointError, LocalProtocolError
from shared.core.record import RecordLayout
from shared.kernels import codecs
from station.model.config import K3Config
from station.model.formats import Format, StoredTensor, stored_tensor
from station.model.safetensors_file import SafetensorsFile, TensorEntry
from station.model.shard_index import INDEX_FILE, SINGLE_FILE, read_index
from station.model.tensor_table import IGNORED_PREFIXES, PREFIX, expected_tensors, expert_prefix

_TORCH_DTYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class Checkpoint:
    """An open checkpoint whose every text tensor was found and fits the config."""

    def __init__(
        self,
        directory: Path,
        config: K3Config,
        files: Mapping[str, SafetensorsFile],
        stored: Mapping[str, StoredTensor],
        closing: ExitStack,
    ) -> None:
        """Use `Checkpoint.open`. `files` maps each stored tensor's name to its shard."""
        self.directory = directory
        self.config = config
        self.layout = RecordLayout(config.expert)
        self._files = files
        self._stored = stored
        self._closing = closing

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Read config, index and all headers, and check them against each other.

        CheckpointError names the file or tensor at fault and the remedy. No weight is read yet.
        """
        config = K3Config.from_file(directory)
        with ExitStack() as stack:
            files = _open_shards(directory, stack)
            entries = {name: file.entries[name] for name, file in files.items()}
            try:
                stored = {
                    expected.name: stored_tensor(expected, entries)
                    for expected in expected_tensors(config)
                }
            except CheckpointError as error:
                raise CheckpointError(f"{directory}: {error}") from error
            _refuse_foreign(directory, entries, stored)
            return cls(directory, config, files, stored, stack.pop_all())

    def close(self) -> None:
        """Release all files; no read may follow."""
        self._closing.close()

    def __enter__(self) -> Checkpoint:
        """Itself; leaving the block closes it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close, whatever happened."""
        self.close()

    @cached_property
    def digest(self) -> str:
        """BLAKE3 (hex) that differs between any two trained models and ignores sharding.

        Over the canonical text_config, the sorted (name, dtype, shape) of all tensors, and the
        bytes of every router bias, of the final norm and of lm_head's first row: cheap at 1.6 TB.
        """
        hasher = blake3.blake3()
        names = sorted(self._files)
        table = [(name, entry.dtype, entry.shape) for name in names for entry in [self._at(name)]]
        for block in (self.config.canonical_json, msgspec.json.encode(table)):
            hasher.update(len(block).to_bytes(8, "little"))
            hasher.update(block)
        norm = f"{PREFIX}model.norm.weight"
        for name in names:
            if name.endswith(".gate.e_score_correction_bias") or name == norm:
                hasher.update(self._files[name].read(self._at(name)))
        head = self._at(f"{PREFIX}lm_head.weight")
        first_row = bytearray(head.length // self.config.vocab_size)
        row = TensorEntry(head.name, head.dtype, head.shape[1:], head.offset, len(first_row))
        self._files[head.name].read_into(row, memoryview(first_row))
        hasher.update(first_row)
        return hasher.hexdigest()

    def tensor(self, name: str) -> torch.Tensor:
        """A stored tensor as it is (full name with prefix): packed, scaled, in its stored dtype."""
        if name not in self._files:
            raise LocalProtocolError(f"{self.directory}: no tensor {name}")
        entry = self._at(name)
        dtype = _TORCH_DTYPES.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(f"tensor {name}: torch has no dtype for {entry.dtype}")
        return torch.frombuffer(self._files[name].read(entry), dtype=dtype).reshape(entry.shape)

    def weight(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor of the model, dequantised, at its logical shape. `name` ends in `.weight` for a
        matrix in every layout. Dequantised in float32 and rounded to `dtype` once."""
        stored = self._stored.get(name)
        if stored is None:
            raise LocalProtocolError(f"{self.directory}: the model has no tensor {name}")
        match stored.format:
            case Format.PLAIN:
                plain = self.tensor(stored.parts[0].name)
                # A_log is zero-padded in the file: only the model's own entries count.
                return plain[: stored.expected.shape[0]].to(dtype)
            case Format.FP8_BLOCK:
                weight, scale = stored.parts
                values = codecs.fp8_block_decode(self._array(weight), self._floats(scale))
            case Format.NVFP4:
                weight, scale, scale_2, _ = stored.parts
                values = codecs.nvfp4_decode(
                    self._array(weight), self._array(scale), np.float32(self._floats(scale_2))
                )
            case Format.MXFP4:
                weight, scale = stored.parts
                values = codecs.mxfp4_decode(self._array(weight), self._array(scale))
        return torch.from_numpy(values).to(dtype)

    def expert_record(self, layer: int, expert: int) -> bytes:
        """One expert as a bank record: the 12 NVFP4 tensors in RecordLayout order.

        NVFP4 bytes are copied as stored; MXFP4 is cast by the closed form that made the release.
        """
        record = bytearray(self.layout.record_bytes)
        self.read_expert_record(layer, expert, memoryview(record))
        return bytes(record)

    def read_expert_record(self, layer: int, expert: int, buffer: memoryview) -> None:
        """As `expert_record`, into a writable byte buffer of exactly `layout.record_bytes`."""
        if len(buffer) != self.layout.record_bytes:
            raise LocalProtocolError(
                f"record buffer of {len(buffer)} bytes, need {self.layout.record_bytes}"
            )
        matrices = self._matrices(layer, expert)
        fields: dict[str, memoryview] = {}
        for field in self.layout.fields:
            fields[field.name] = buffer[field.offset : field.offset + field.length]
        if not _is_nvfp4(matrices):
            self._cast_record(matrices, fields)
            return
        prefix = expert_prefix(layer, expert)
        for file, parts in self._by_file(matrices).items():
            file.read_together([(part, fields[part.name.removeprefix(prefix)]) for part in parts])

    def stored_hash(self, layer: int, expert: int) -> bytes | None:
        """BLAKE3 of an expert's stored tensors: w1, w3, w2, of each the weight, then its scale.

        None when they are the record itself, byte for byte (NVFP4): its hash says it already.
        """
        matrices = self._matrices(layer, expert)
        if _is_nvfp4(matrices):
            return None
        hasher = blake3.blake3()
        for stored in matrices.values():
            for part in stored.parts:
                hasher.update(self._files[part.name].read(part))
        return hasher.digest()

    def position(self, layer: int, expert: int) -> tuple[str, int]:
        """Sort key of an expert's place on disk: shard, then offset of its first weight."""
        first = self._matrices(layer, expert)["w1"].parts[0]
        return self._files[first.name].path.name, first.offset

    def release(self, experts: Sequence[tuple[int, int]]) -> None:
        """Let the page cache forget experts (layer, expert) that are not needed again soon."""
        parts: dict[SafetensorsFile, list[TensorEntry]] = {}
        for layer, expert in experts:
            for file, found in self._by_file(self._matrices(layer, expert)).items():
                parts.setdefault(file, []).extend(found)
        for file, entries in parts.items():
            file.release(entries)

    def _matrices(self, layer: int, expert: int) -> dict[str, StoredTensor]:
        prefix = expert_prefix(layer, expert)
        if f"{prefix}w1.weight" not in self._stored:
            raise LocalProtocolError(f"{self.directory}: no expert {expert} in layer {layer}")
        return {name: self._stored[f"{prefix}{name}.weight"] for name in ("w1", "w3", "w2")}

    def _by_file(
        self, matrices: Mapping[str, StoredTensor]
    ) -> dict[SafetensorsFile, list[TensorEntry]]:
        parts: dict[SafetensorsFile, list[TensorEntry]] = {}
        for stored in matrices.values():
            for part in stored.parts:
                parts.setdefault(self._files[part.name], []).append(part)
        return parts

    def _cast_record(
        self, matrices: Mapping[str, StoredTensor], fields: Mapping[str, memoryview]
    ) -> None:
        if any(matrix.format is not Format.MXFP4 for matrix in matrices.values()):
            raise CheckpointError(
                f"{self.directory}: {matrices['w1'].expected.name} and its siblings mix NVFP4 and "
                "MXFP4; fetch the checkpoint again"
            )
        packed = {name: self._array(matrix.parts[0]) for name, matrix in matrices.items()}
        scales = {name: self._array(matrix.parts[1]) for name, matrix in matrices.items()}
        # One GEMM reads w1 and w3 together, so they share scale_2: the larger exponent wins.
        shared = max(codecs.mxfp4_k_max(scales[name]) for name in ("w1", "w3"))
        for name, k_max in (("w1", shared), ("w3", shared), ("w2", None)):
            weight, scale, scale_2 = codecs.mxfp4_to_nvfp4(packed[name], scales[name], k_max)
            for suffix, value in (
                ("weight", weight),
                ("weight_scale", scale),
                ("weight_scale_2", scale_2),
                ("input_scale", np.float32(1.0)),
            ):
                fields[f"{name}.{suffix}"][:] = value.tobytes()

    def _at(self, name: str) -> TensorEntry:
        return self._files[name].entries[name]

    def _array(self, entry: TensorEntry) -> codecs.U8:
        data = self._files[entry.name].read(entry)
        return np.frombuffer(data, dtype=np.uint8).reshape(entry.shape)

    def _floats(self, entry: TensorEntry) -> codecs.F32:
        data = self._files[entry.name].read(entry)
        return np.frombuffer(data, dtype=np.float32).reshape(entry.shape)


def _open_shards(directory: Path, stack: ExitStack) -> dict[str, SafetensorsFile]:
    """Open every shard; returns the shard of each stored tensor. The index must agree exactly."""
    index = directory / INDEX_FILE
    if not index.exists():
        file = SafetensorsFile.open(directory / SINGLE_FILE)
        stack.callback(file.close)
        return dict.fromkeys(file.entries, file)
    weight_map = read_index(index)
    shards: dict[str, SafetensorsFile] = {}
    for shard in sorted(set(weight_map.values())):
        shards[shard] = SafetensorsFile.open(directory / shard)
        stack.callback(shards[shard].close)
    for shard, file in shards.items():
        for name in file.entries:
            if weight_map.get(name) != shard:
                raise CheckpointError(
                    f"{file.path}: holds tensor {name}, which the index places in "
                    f"{weight_map.get(name, 'no shard')}; fetch index and shards of one revision"
                )
    for name, shard in weight_map.items():
        if name not in shards[shard].entries:
            raise CheckpointError(
                f"{directory / shard}: tensor {name} is missing although the index lists it; "
                "fetch the shard again"
            )
    return {name: shards[shard] for name, shard in weight_map.items()}


def _is_nvfp4(matrices: Mapping[str, StoredTensor]) -> bool:
    return all(matrix.format is Format.NVFP4 for matrix in matrices.values())


def _refuse_foreign(
    directory: Path, entries: Mapping[str, TensorEntry], stored: Mapping[str, StoredTensor]
) -> None:
    """A tensor that nothing reads means that config and weights are of different models."""
    used = {part.name for tensor in stored.values() for part in tensor.parts}
    foreign = [
        name for name in entries if name not in used and not name.startswith(IGNORED_PREFIXES)
    ]
    if foreign:
        raise CheckpointError(
            f"{directory}: {len(foreign)} tensors do not belong to the model of config.json, first "
            f"is {min(foreign)}; fetch the checkpoint again"
        )
