"""The census: right to the byte, whatever the layout, and refuses what is not sound."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors import safe_open

from services import cli
from services.bench.census import CensusBench
from services.census import names as census_names
from services.census.headers import HeaderParser
from services.census.published import RELEASES, differences
from services.census.reader import take_census
from services.census.report import BlockScales, Census, ExpertCensus, ScaleCensus, Share
from services.census.table import lines
from services.synth.sizes import SynthSizes
from services.synth.writer import write
from shared.core.errors import CheckpointError
from station.model.safetensors_file import SafetensorsFile
from station.model.safetensors_header import HeaderText
from station.model.shard_index import INDEX_FILE, names_by_shard, read_index
from station.model.tensor_table import expert_prefix
from tests.support.tiny_checkpoint import write_tiny_checkpoint

SIZES = SynthSizes(layers=13, experts=12, top_k=2, latent=32, width=48, hidden=32)
EXPERT_BYTES = 3 * (32 * 48 // 2 + 32 * 48 // 16) + 6 * 4
LAYER_SHARD = "model-00003-of-00016.safetensors"  # layer 2
Tensor = tuple[str, str, list[int], bytes]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in the release's layout: 13 layers, 12 experts in each but the first."""
    directory = tmp_path_factory.mktemp("census") / "sound"
    write(directory, SIZES, 1)
    return directory


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    """One to damage."""
    return Path(shutil.copytree(sound, tmp_path / "copy"))


def _write(path: Path, tensors: Sequence[Tensor]) -> None:
    """A safetensors file with the tensors in this very order."""
    rows: dict[str, Any] = {}
    data = b""
    for name, dtype, shape, content in tensors:
        stop = len(data) + len(content)
        rows[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), stop]}
        data += content
    header = json.dumps(rows).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def _one_file(directory: Path, experts: Sequence[int], layer: int = 1) -> Path:
    directory.mkdir()
    tensors = [(f"{expert_prefix(layer, e)}w1.weight", "U8", [2], b"xx") for e in experts]
    _write(directory / "model.safetensors", tensors)
    return directory


def _poke(directory: Path, name: str, value: float) -> None:
    """Overwrite a float32 scalar where it lies."""
    shard = json.loads((directory / INDEX_FILE).read_text())["weight_map"][name]
    file = SafetensorsFile.open(directory / shard)
    entry = file.entries[name]
    file.close()
    with (directory / shard).open("r+b") as handle:
        handle.seek(entry.offset)
        handle.write(np.float32(value).tobytes())


def test_every_figure_is_the_reference_librarys(sound: Path) -> None:
    """Counts and bytes, added up from what safetensors itself says of every tensor."""
    census = take_census(sound)
    tensors: Counter[str] = Counter()
    size: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    for path in sound.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                tensor = file.get_tensor(name)
                group = "vision" if not name.startswith("language_model.") else "text"
                group = "expert" if ".experts." in name else group
                tensors[group] += 1
                size[group] += tensor.nbytes
                dtypes[file.get_slice(name).get_dtype()] += tensor.nbytes
    for group in ("expert", "text", "vision"):
        assert getattr(census, group) == Share(tensors[group], size[group])
    assert census.other == Share(0, 0)
    assert {name: share.bytes for name, share in census.dtypes.items()} == dict(dtypes)
    assert census.tensors == tensors.total()
    assert census.payload_bytes == size.total()
    on_disk = sum(path.stat().st_size for path in sound.glob("*.safetensors"))
    assert census.file_bytes == on_disk == census.payload_bytes + census.header_bytes


def test_experts_are_described(sound: Path) -> None:
    """Layers, experts in each, bytes, tensors and contiguous pieces of each, order, layout."""
    census = take_census(sound)
    experts = census.experts
    assert census.layout == "nvfp4-mixed"
    assert (census.shards, census.indexed) == (16, True)
    assert (experts.experts, experts.layers) == (144, "1-12")
    assert experts.experts_per_layer == {12: 12}
    assert experts.bytes_per_expert == {EXPERT_BYTES: 144}
    assert experts.tensors_per_expert == {12: 144}
    assert experts.reads_per_expert == {3: 144}  # as in the release: U8, E4M3 and F32 lie apart
    assert experts.uniform
    assert experts.order == "lexicographic"
    assert "w2.weight_scale F8_E4M3 [32, 3]" in experts.parts


def test_original_layout_is_recognised(tmp_path: Path) -> None:
    """The MXFP4 release: 6 tensors per expert, no second scale."""
    census = take_census(write_tiny_checkpoint(tmp_path / "m", seed=1, layout="mxfp4", experts=12))
    assert census.layout == "mxfp4"
    assert census.experts.tensors_per_expert == {6: 48}
    assert census.scales is None
    assert any("moonshotai/Kimi-K3" in difference for difference in census.differences)


@pytest.mark.parametrize(
    ("experts", "order"),
    [
        ([0, 1, 10, 11, 2, 3], "lexicographic"),
        ([0, 1, 2, 3, 10, 11], "numeric"),
        ([0, 1, 2, 3], "either"),
        ([0, 2, 1], "other"),
    ],
)
def test_order_of_experts(tmp_path: Path, experts: list[int], order: str) -> None:
    """Case B1: what a builder that assumes an order would need to know."""
    assert take_census(_one_file(tmp_path / "m", experts)).experts.order == order


@pytest.mark.parametrize(
    "name",
    [
        "language_model.model.layers.01.block_sparse_moe.experts.0.w1.weight",
        "language_model.model.layers.1.block_sparse_moe.experts.00.w1.weight",
        "language_model.model.layers.1.block_sparse_moe.experts.+0.w1.weight",
        "language_model.model.layers.1.block_sparse_moe.experts.0",
        "language_model.model.layers.1.block_sparse_moe.experts.0.",
        "language_model.model.layers.1.block_sparse_moe.experts.123456.w1.weight",
        "language_model.model.layers..block_sparse_moe.experts.0.w1.weight",
        "language_model.1.block_sparse_moe.experts.0.w1.weight",
        "1.block_sparse_moe.experts.0.w1.weight",
        "vision_tower.1.block_sparse_moe.experts.0.w1.weight",
    ],
)
def test_only_the_releases_names_are_experts(tmp_path: Path, name: str) -> None:
    """Nothing that merely looks like an expert is counted as one, and nothing is lost."""
    directory = _one_file(tmp_path / "m", [3])
    _write(
        directory / "model.safetensors",
        [(f"{expert_prefix(1, 3)}w1.weight", "U8", [2], b"xx"), (name, "U8", [3], b"xxx")],
    )
    census = take_census(directory)
    assert census.expert == Share(1, 2)
    assert census.experts.experts == 1
    rest = (census.text, census.vision, census.other)
    assert sorted(rest, key=lambda share: share.bytes)[2] == Share(1, 3)


def test_layers_that_disagree_have_no_order(tmp_path: Path) -> None:
    """One numeric and one lexicographic layer are neither."""
    directory = _one_file(tmp_path / "m", [])
    tensors = [
        (f"{expert_prefix(layer, expert)}w1.weight", "U8", [1], b"x")
        for layer, experts in ((1, [0, 1, 2, 10]), (2, [0, 1, 10, 2]))
        for expert in experts
    ]
    _write(directory / "model.safetensors", tensors)
    census = take_census(directory)
    assert census.experts.order == "other"
    assert census.experts.layers == "1-2"


@pytest.mark.parametrize("shards", [1, 2, 5, 40, 100])
def test_figures_do_not_depend_on_the_cut(sound: Path, tmp_path: Path, shards: int) -> None:
    """Layers and experts spread over any number of shards add up to the same."""
    sizes = SynthSizes(
        layers=13, experts=12, top_k=2, latent=32, width=48, hidden=32, shards=shards
    )
    write(tmp_path / "m", sizes, 1)
    whole, cut = take_census(sound), take_census(tmp_path / "m")
    assert cut.shards == shards
    # A shard with a few experts of a layer has no order, and one expert alone lies in one piece.
    places = {"order": cut.experts.order, "reads_per_expert": cut.experts.reads_per_expert}
    assert cut.experts == msgspec.structs.replace(whole.experts, **places)
    assert cut.experts.order == ("lexicographic" if shards < 100 else "either")
    assert max(cut.experts.reads_per_expert) == 3
    assert cut.scales == whole.scales
    assert (cut.text, cut.vision, cut.dtypes) == (whole.text, whole.vision, whole.dtypes)


def test_an_expert_in_two_shards_is_one_expert(tmp_path: Path) -> None:
    """Its tensors are joined before anything is said about it."""
    directory = tmp_path / "m"
    directory.mkdir()
    parts = [(f"{expert_prefix(1, 0)}w{n}.weight", "U8", [n], b"x" * n) for n in (1, 2, 3)]
    _write(directory / "a.safetensors", parts[:1])
    _write(directory / "b.safetensors", parts[1:])
    shards = {"a.safetensors": parts[:1], "b.safetensors": parts[1:]}
    weight_map = {part[0]: shard for shard, held in shards.items() for part in held}
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    experts = take_census(directory).experts
    assert experts.experts == 1
    assert experts.bytes_per_expert == {6: 1}
    assert experts.tensors_per_expert == {3: 1}
    assert experts.reads_per_expert == {2: 1}
    assert experts.kinds == 1


def test_experts_that_differ_are_counted_by_kind(tmp_path: Path) -> None:
    """Same bytes, another shape: not uniform."""
    directory = _one_file(tmp_path / "m", [])
    shapes = ([4, 1], [2, 2], [4, 1])
    _write(
        directory / "model.safetensors",
        [(f"{expert_prefix(1, n)}w1.weight", "U8", s, b"1234") for n, s in enumerate(shapes)],
    )
    census = take_census(directory)
    assert not census.experts.uniform
    assert census.experts.kinds == 2
    assert census.experts.bytes_per_expert == {4: 3}
    assert census.experts.parts == ("w1.weight U8 [4, 1]",)
    assert census.layout == "experts of several kinds"


def test_unequal_second_scales_are_counted(copy: Path) -> None:
    """Case N5: w1 and w3 of an expert with different weight_scale_2."""
    assert take_census(copy).scales == ScaleCensus(
        scalars=864,
        unequal_w1_w3=0,
        negative=0,
        not_finite=0,
        first_bad=None,
        input_scales=432,
        input_scales_not_one=0,
    )
    for layer, expert in ((2, 11), (9, 0)):
        _poke(copy, f"{expert_prefix(layer, expert)}w3.weight_scale_2", 0.5)
    _poke(copy, f"{expert_prefix(4, 4)}w2.weight_scale_2", 0.25)  # w2 has its own anyway
    _poke(copy, f"{expert_prefix(4, 4)}w2.input_scale", 3.0)
    census = take_census(copy)
    assert census.scales is not None
    assert census.scales.unequal_w1_w3 == 2
    assert census.scales.input_scales_not_one == 1
    assert any("weight_scale_2: 2, " in difference for difference in census.differences)


def test_bad_scales_are_counted_and_the_first_is_named(copy: Path) -> None:
    """Negative, NaN and infinite scalars, wherever they lie."""
    bad = {
        f"{expert_prefix(10, 3)}w1.weight_scale_2": -1.0,
        f"{expert_prefix(3, 10)}w2.input_scale": float("nan"),
        f"{expert_prefix(3, 11)}w2.weight_scale_2": float("inf"),
    }
    for name, value in bad.items():
        _poke(copy, name, value)
    scales = take_census(copy).scales
    assert scales is not None
    assert (scales.negative, scales.not_finite) == (1, 2)
    assert scales.first_bad == f"{expert_prefix(3, 10)}w2.input_scale"


def _poke_byte(directory: Path, name: str, at: int, code: int) -> None:
    shard = json.loads((directory / INDEX_FILE).read_text())["weight_map"][name]
    file = SafetensorsFile.open(directory / shard)
    entry = file.entries[name]
    file.close()
    with (directory / shard).open("r+b") as handle:
        handle.seek(entry.offset + at)
        handle.write(bytes([code]))


def test_block_scales_are_read_when_asked(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--scales: every E4M3 scale of every expert, in pieces of any size, and nothing else."""
    monkeypatch.setattr("services.census.block_scales._PIECE_BYTES", 1000)
    seen: list[tuple[int, int]] = []
    scales = 144 * 3 * 32 * 48 // 16
    sound = take_census(copy, lambda done, total: seen.append((done, total)))
    assert sound.block_scales == BlockScales(scales=scales, negative=0, nan=0, first_bad=None)
    assert seen[-1] == (scales, scales)
    for layer, expert, at, code in ((7, 3, 95, 0x81), (7, 3, 5, 0x80), (2, 11, 50, 0x7F)):
        _poke_byte(copy, f"{expert_prefix(layer, expert)}w2.weight_scale", at, code)
    _poke_byte(copy, f"{expert_prefix(12, 0)}w3.weight_scale", 0, 0xFF)
    _poke_byte(copy, f"{expert_prefix(12, 0)}w3.weight", 0, 0xFF)  # any weight byte is right
    first = f"{expert_prefix(2, 11)}w2.weight_scale"
    census = take_census(copy, lambda _done, _total: None)
    assert census.block_scales == BlockScales(scales=scales, negative=2, nan=2, first_bad=first)
    assert any(text.startswith("block scales negative") for text in census.differences)
    assert any(first in line for line in lines(census))


def test_block_scales_of_the_original_layout(tmp_path: Path) -> None:
    """MXFP4 scales are exponents: only 0xFF is no number."""
    directory = write_tiny_checkpoint(tmp_path / "m", seed=1, layout="mxfp4")
    name = f"{expert_prefix(3, 2)}w1.weight_scale"
    _poke_byte(directory, name, 7, 0xFF)
    _poke_byte(directory, f"{expert_prefix(3, 3)}w1.weight_scale", 7, 0x80)
    blocks = take_census(directory, lambda _done, _total: None).block_scales
    assert blocks is not None
    assert (blocks.scales, blocks.negative, blocks.nan) == (32 * 3 * 128 * 4, 0, 1)
    assert blocks.first_bad == name


def test_order_of_the_directory_does_not_matter(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case B2: the file system may list files as it likes."""
    expected = take_census(sound)
    listed = os.listdir(sound)
    for seed in range(3):
        random.Random(seed).shuffle(listed)
        monkeypatch.setattr(os, "listdir", lambda _path: list(listed))
        assert take_census(sound) == expected


def _header(directory: Path, layer: int) -> HeaderText:
    path = directory / f"model-{layer + 1:05d}-of-00016.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return HeaderText(path, data[8 : 8 + length], len(data))


def _told(parser: HeaderParser, header: HeaderText) -> object:
    """Everything a parser says about a header, or its complaint."""
    try:
        parsed = parser.parse(header)
    except CheckpointError as error:
        return str(error)
    ledger = parsed.ledger
    accounts = {layer: part.account for layer, part in ledger.layers.items()}
    starts = {layer: part.start.tolist() for layer, part in ledger.layers.items()}
    return parsed.names_digest, ledger.groups, ledger.dtypes, accounts, starts


def test_a_repeated_header_is_told_as_if_it_were_new(sound: Path) -> None:
    """Layers that differ in their number alone are recognised, with one digit and with two."""
    parser = HeaderParser()
    told = {layer: _told(parser, _header(sound, layer)) for layer in range(13)}
    for layer in range(13):
        assert told[layer] == _told(HeaderParser(), _header(sound, layer))
    assert len({str(entry) for entry in told.values()}) == 13


def test_a_header_that_is_almost_repeated_is_parsed(sound: Path) -> None:
    """One or two bytes of difference anywhere, digits of layer numbers included: what a parser
    says never depends on what it saw before."""
    rng = random.Random(3)
    known, header = _header(sound, 1), _header(sound, 5)
    digits = [i for i, byte in enumerate(header.text) if 48 <= byte <= 57]
    complaints = 0
    for _ in range(300):
        text = bytearray(header.text)
        for _ in range(rng.randint(1, 2)):
            at = rng.choice(digits) if rng.random() < 0.8 else rng.randrange(len(text))
            text[at] = rng.choice(b'0123456789a\\" ')
        changed = HeaderText(header.path, bytes(text), header.file_bytes)
        warm = HeaderParser()
        warm.parse(known)
        told = _told(warm, changed)
        assert told == _told(HeaderParser(), changed)
        complaints += isinstance(told, str)
    assert 50 < complaints < 300


def test_a_repeated_header_of_a_short_file_is_refused(sound: Path) -> None:
    """The size of the file is part of what repeats."""
    parser = HeaderParser()
    parser.parse(_header(sound, 1))
    header = _header(sound, 5)
    with pytest.raises(CheckpointError, match="truncated"):
        parser.parse(HeaderText(header.path, header.text, header.file_bytes - 1))


def _index(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((directory / INDEX_FILE).read_text())
    change(index["weight_map"])
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2))


NAME = f"{expert_prefix(2, 7)}w1.weight"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m: m.pop(NAME), rf"{LAYER_SHARD}: holds tensor {NAME}, which the index"),
        (lambda m: m.update({f"{NAME}2": LAYER_SHARD}), rf"{LAYER_SHARD}: tensor {NAME}2 is mis"),
        (lambda m: m.update({NAME: "gone.safetensors"}), "gone.safetensors: is missing"),
        (lambda m: m.update({NAME: "../x.safetensors"}), "'../x.safetensors' is not a plain"),
        (lambda m: m.update({NAME: "a\0.safetensors"}), "is not a plain"),
    ],
    ids=["not listed", "listed only", "missing shard", "path", "nul"],
)
def test_index_must_agree(
    copy: Path, change: Callable[[dict[str, str]], object], complaint: str
) -> None:
    """Every disagreement names the shard, the tensor and the remedy."""
    _index(copy, change)
    with pytest.raises(CheckpointError, match=complaint) as error:
        take_census(copy)
    assert "fetch" in str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b'{"weight_map":[]}',
        b'{"weight_map":{"a":1}}',
        b'{"weight_map":{"a":' + b"[" * 100_000,
        b'{"weight_map":{"a":NaN}}',
        b'{"weight_map":{"a\xff":"b.safetensors"}}',
    ],
    ids=["empty", "no map", "list", "number", "deep", "nan", "not utf-8"],
)
def test_damaged_index_is_refused(copy: Path, content: bytes) -> None:
    """Case B12: one error that names the index."""
    (copy / INDEX_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{INDEX_FILE}: not a safetensors index"):
        take_census(copy)


def test_index_of_any_style_agrees(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spaces, order and names with quotes, commas and line breaks do not confuse the cutting."""
    monkeypatch.setattr("station.model.shard_index._PIECE_BYTES", 50)
    odd = ['x",y', 'x","z":"', "line\nbreak", "\\", "{},:", "é"]
    _write(copy / "odd.safetensors", [(name, "U8", [1], b"x") for name in odd])
    _index(copy, lambda m: m.update(dict.fromkeys(odd, "odd.safetensors")))
    assert take_census(copy).other == Share(6, 6)
    index = json.loads((copy / INDEX_FILE).read_text())
    names = list(index["weight_map"])
    random.Random(1).shuffle(names)
    index = {
        "note": {"weight_map": {"not": "this"}},
        "weight_map": {name: index["weight_map"][name] for name in names},
        "metadata": {"more": {"weight_map": {}}},
    }
    for style in ({"indent": 2}, {"separators": (",", ":")}, {"ensure_ascii": False}):
        (copy / INDEX_FILE).write_text(json.dumps(index, **style))
        assert take_census(copy).other == Share(6, 6)


@pytest.mark.parametrize(
    "text",
    [
        '{"metadata":{},"weight_map":{"a":"x.safetensors","b":"x.safetensors"}}',
        '{"weight_map":{"a":"x.safetensors","b":"x.safetensors"},"metadata":{}}',
        '{"weight_map":{"a":"x.safetensors","b":"x.safetensors"},"metadata":{"weight_map":{}}}',
        '{"m":"\\"weight_map\\":{","weight_map":{"a":"x.safetensors","b":"x.safetensors"}}',
        '{"m":{"weight_map":{"c":"d"}},"weight_map":{"a":"x.safetensors","b":"x.safetensors"}}',
        '{"weight_map":{"c":"d"},"weight_map":{"a":"x.safetensors","b":"x.safetensors"}} ',
    ],
)
def test_the_weight_map_is_found_wherever_it_is(tmp_path: Path, text: str) -> None:
    """Fields around it, before and behind, with the same name in text or deeper, do not count."""
    path = tmp_path / INDEX_FILE
    path.write_text(text)
    assert json.loads(text)["weight_map"] == {"a": "x.safetensors", "b": "x.safetensors"}
    assert names_by_shard(path) == {"x.safetensors": ["a", "b"]}
    assert read_index(path) == {"a": "x.safetensors", "b": "x.safetensors"}


def test_large_index_is_read_beside_the_headers(sound: Path, copy: Path) -> None:
    """A process of its own gives the same digests, and its errors are ours."""
    with census_names.reading(sound / INDEX_FILE, large_bytes=0) as listed:
        assert listed() == census_names.listed_digests(sound / INDEX_FILE)
    (copy / INDEX_FILE).write_bytes(b"{}")
    with (
        census_names.reading(copy / INDEX_FILE, large_bytes=0) as listed,
        pytest.raises(CheckpointError, match="not a safetensors index"),
    ):
        listed()


def test_digests_differ_between_sets_of_names() -> None:
    """Line breaks inside names cannot make two sets look alike; order does not count."""
    sets = [["a", "b"], ["a\nb"], ["a", "b\nc"], ["a\nb", "c"], ["a", "b", "c"], ["a"], [""], []]
    assert len({census_names.names_text(names) for names in sets}) == len(sets)
    assert census_names.names_text(["b", "a"]) == census_names.names_text(["a", "b"])


def test_files_beside_the_index_are_named(copy: Path) -> None:
    """A shard of another revision that was left behind is a difference, not a part."""
    before = take_census(copy)
    _write(copy / "model-old.safetensors", [("x", "U8", [1], b"x")])
    census = take_census(copy)
    assert census.tensors == before.tensors
    assert "file that the index does not list: model-old.safetensors" in census.differences


def _published() -> Census:
    """The release as plan-figures.md has it."""
    release = RELEASES["nvfp4-mixed"]
    expert = Share(989_184, 1_531_543_695_360)
    text, vision = Share(3_156, 77_338_674_496), Share(168, 894_717_952)
    return Census(
        directory="/raid",
        layout="nvfp4-mixed",
        shards=96,
        tensors=release.tensors,
        payload_bytes=1_609_777_087_808,
        header_bytes=0,
        file_bytes=1_609_777_087_808,
        indexed=True,
        expert=expert,
        text=text,
        vision=vision,
        other=Share(0, 0),
        dtypes={},
        experts=ExpertCensus(
            experts=82_432,
            layers="1-92",
            experts_per_layer={896: 92},
            bytes_per_expert={18_579_480: 82_432},
            tensors_per_expert={12: 82_432},
            reads_per_expert={3: 82_432},
            uniform=True,
            kinds=1,
            parts=(),
            order="lexicographic",
        ),
    )


def test_the_published_census_has_no_difference() -> None:
    """Its own parts add up, and nothing is reported."""
    census = _published()
    assert census.expert.bytes + census.text.bytes + census.vision.bytes == census.payload_bytes
    assert census.expert.bytes == 82_432 * 18_579_480
    assert differences(census) == ()
    assert list(lines(census))[-1] == "as published: no difference"


def test_every_difference_is_named(sound: Path) -> None:
    """One line for each figure that is not the published one, with both values."""
    named = take_census(sound).differences
    assert "shards: 16, nvidia/Kimi-K3-NVFP4 has 96" in named
    assert f"bytes per expert: {EXPERT_BYTES:,}, nvidia/Kimi-K3-NVFP4 has 18,579,480" in named
    assert "layers with experts: 1-12, nvidia/Kimi-K3-NVFP4 has 1-92" in named
    assert not [difference for difference in named if difference.startswith("order")]


def test_json_and_table_say_the_same(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` is one object with every field; the table shows the same numbers."""
    assert cli.run(["census", str(sound), "--json"]) == 0
    census = json.loads(capsys.readouterr().out)
    assert census["experts"]["bytes_per_expert"] == {str(EXPERT_BYTES): 144}
    assert cli.run(["census", str(sound)]) == 0
    table = capsys.readouterr().out
    for text in (
        "nvfp4-mixed, 16 shards, index agrees",
        f"{census['payload_bytes']:,}",
        f"{census['text']['bytes']:,}",
        "144 in layers 1-12",
        "lexicographic",
        "differ in 0 experts",
        *census["differences"],
    ):
        assert text in table


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda d: (d / LAYER_SHARD).write_bytes(b"short"), "5 bytes are no safetensors file"),
        (lambda d: (d / LAYER_SHARD).write_bytes(b"\xff" * 100), "does not fit a file of 100"),
        (lambda d: os.truncate(d / LAYER_SHARD, 20_000), "does not fit|truncated"),
        (lambda d: (d / LAYER_SHARD).unlink(), "is missing although the index lists it"),
        (lambda d: (d / INDEX_FILE).unlink(), "16 .safetensors files and no model.safetensors"),
        (lambda d: shutil.rmtree(d), "cannot be read .No such file"),
    ],
    ids=["short", "length", "truncated", "missing", "no index", "nothing"],
)
def test_damage_is_status_78_and_one_line(
    copy: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], object],
    complaint: str,
) -> None:
    """Case B12: name, place and remedy on stderr, nothing on stdout, no traceback."""
    damage(copy)
    assert cli.run(["census", str(copy)]) == 78
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("k3: error[checkpoint_invalid]: ")
    assert said.err.count("\n") == 1
    assert re.search(complaint, said.err)


def test_benchmark_reports_the_named_figure(sound: Path) -> None:
    """`k3 bench census` has its target and both times; both sides count the same tensors."""
    report = CensusBench(sound, runs=1).run()
    figures = {figure.name: figure for figure in report.figures}
    assert figures["census.vs_safetensors"].target == 0.5
    assert figures["census.seconds"].value > 0
    assert figures["census.safetensors_seconds"].value > 0
    assert figures["census.tensors"].value == take_census(sound).tensors
