"""The vocabulary: a tiktoken rank file, Kimi-K3's split pattern and its special tokens.

Owns the mapping between text, bytes and token ids. Must not know the chat format (`chat.py`) or
what a reply looks like (`reply.py`). Facts: Kimi-K3's `tokenization_kimi.py`.

The special tokens start right after the ranks and keep the offsets of the release (163,584 ranks,
so `<|end_of_msg|>` is 163,586 there). A smaller rank file with the same rule is as valid.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import tiktoken

from shared.core.errors import CheckpointError

VOCABULARY_FILE = "tiktoken.model"

RESERVED_TOKENS = 256
"""How many ids after the ranks are special; those without a name are `<|reserved_token_ID|>`."""

SPECIAL_OFFSETS: dict[str, int] = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,
    "[UNK]": 254,
    "[PAD]": 255,
}
"""Name of a special token -> its distance from the first id after the ranks."""

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_LEADING = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"

SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEADING}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEADING}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How text is cut into pieces before byte pairs are merged; the first alternative that fits."""

_CHUNK_CHARS_MAX = 400_000  # tiktoken's regex engine gives up on much longer inputs
_RUN_CHARS_MAX = 25_000  # merging is quadratic in the length of one unbroken piece
_RUNS = re.compile(r"\s+|\S+")


class Tokenizer:
    """A loaded vocabulary. Immutable after construction; safe to share between threads."""

    def __init__(self, ranks: dict[bytes, int]) -> None:
        """Build from `ranks` (token bytes -> id, dense from 0, every single byte present)."""
        base = len(ranks)
        names = {offset: name for name, offset in SPECIAL_OFFSETS.items()}
        specials = {
            names.get(offset, f"<|reserved_token_{base + offset}|>"): base + offset
            for offset in range(RESERVED_TOKENS)
        }
        self._encoding = tiktoken.Encoding(
            "k3", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=specials
        )
        self.text_size = base
        self.vocab_size = base + RESERVED_TOKENS
        self.bos_id = base + SPECIAL_OFFSETS["[BOS]"]
        self.eos_id = base + SPECIAL_OFFSETS["[EOS]"]
        self.end_of_msg_id = base + SPECIAL_OFFSETS["<|end_of_msg|>"]
        self.open_id = base + SPECIAL_OFFSETS["<|open|>"]
        self.close_id = base + SPECIAL_OFFSETS["<|close|>"]
        self.sep_id = base + SPECIAL_OFFSETS["<|sep|>"]

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read `directory/tiktoken.model`; CheckpointError names the file and the bad line."""
        path = directory / VOCABULARY_FILE
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot read the vocabulary ({error.strerror}); "
                "point the checkpoint directory at a complete checkpoint"
            ) from error
        return cls(_parse_ranks(path, lines))

    def encode_text(self, text: str) -> list[int]:
        """Token ids of content: whatever looks like a special token is ordinary text."""
        ids: list[int] = []
        for piece in _pieces(text):
            ids.extend(self._encoding.encode_ordinary(piece))
        return ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of `ids`; a special token gives its name. Ids must be below vocab_size."""
        return self._encoding.decode_bytes(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Whether `token_id` is one of the reserved tokens and so never part of a text."""
        return token_id >= self.text_size


def _parse_ranks(path: Path, lines: Sequence[bytes]) -> dict[bytes, int]:
    """The rank table of a tiktoken file: one `base64 rank` per line, ranks dense from 0.

    Parsed here because tiktoken's own loader copies local files into a cache under the temporary
    directory and would go on serving the old copy after the checkpoint changed.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        encoded, _, rank_text = line.partition(b" ")
        try:
            token, rank = base64.b64decode(encoded, validate=True), int(rank_text)
        except (binascii.Error, ValueError) as error:
            raise CheckpointError(
                f"{path}: line {number} is not '<base64> <rank>'; the file is damaged"
            ) from error
        if rank != len(ranks) or token in ranks or not token:
            raise CheckpointError(
                f"{path}: line {number} has rank {rank}, expected {len(ranks)} and a new token; "
                "the file is damaged, copy it again from its source"
            )
        ranks[token] = rank
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise CheckpointError(
            f"{path}: no token for byte {missing[0]:#04x}; a vocabulary must hold all 256 bytes, "
            "the file is truncated or foreign"
        )
    return ranks


def _pieces(text: str) -> Iterator[str]:
    """`text` cut where the release cuts it: every 400,000 characters, and inside runs of 25,000.

    A run is a stretch of only whitespace or only non-whitespace characters.
    """
    for start in range(0, len(text), _CHUNK_CHARS_MAX):
        chunk = text[start : start + _CHUNK_CHARS_MAX]
        if len(chunk) <= _RUN_CHARS_MAX:
            yield chunk
            continue
        begin = 0
        for run in _RUNS.finditer(chunk):
            for cut in range(run.start() + _RUN_CHARS_MAX, run.end(), _RUN_CHARS_MAX):
                yield chunk[begin:cut]
                begin = cut
        yield chunk[begin:]
