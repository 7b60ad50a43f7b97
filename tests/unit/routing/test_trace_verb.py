"""`k3 trace`: the verbs on real files, their JSON and their exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from services import cli
from services.routing import histogram as histograms
from services.routing.file import load, save
from shared.core.errors import TraceError
from tests.support.pod import CHECKPOINT
from tests.unit.routing.traces import meta_of, trace_of

SMALL = ("--tokens", "60", "--requests", "5")
FEW = ("--param", "clusters=8")


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """A recorded trace of four requests."""
    path = tmp_path / "in.k3trace"
    save(path, trace_of([5, 9, 4, 6]), meta_of(trace_of([1])))
    return path


def k3(*arguments: object) -> int:
    """Exit status of one command line."""
    return cli.run(["trace", *map(str, arguments)])


def test_info_says_what_is_in_a_file(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For programs and for people."""
    assert k3("info", trace_file, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["tokens"], told["requests"], told["source"]) == (24, 4, "recorded")
    assert told["digest"] == load([trace_file]).trace.digest

    assert k3("info", trace_file) == 0
    assert "tokens: 24" in capsys.readouterr().out


def test_a_torn_file_is_read_with_a_warning(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its whole blocks are used; the warning is on stderr and in the JSON."""
    trace_file.write_bytes(trace_file.read_bytes() + b"BLK")

    assert k3("info", trace_file, "--json") == 0
    streams = capsys.readouterr()
    assert "warning" in streams.err
    assert "3 bytes" in json.loads(streams.out)["notices"][0]


@pytest.mark.parametrize("verb", ["info", "histogram", "split"])
def test_a_foreign_file_is_one_line_and_78(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """As everywhere: code, file and remedy, no trace of Python."""
    path = tmp_path / "x.k3trace"
    path.write_bytes(b"something else entirely")
    parts = ("--out-a", tmp_path / "a", "--out-b", tmp_path / "b") if verb == "split" else ()

    assert k3(verb, path, *parts) == 78
    error = capsys.readouterr().err
    assert error.startswith(f"k3: error[trace_invalid]: {path}: no trace file")
    assert error.count("\n") == 1


def test_split_writes_two_traces_of_other_requests(
    tmp_path: Path, trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Together they are the whole; the JSON tells both digests."""
    a, b = tmp_path / "a.k3trace", tmp_path / "b.k3trace"

    assert k3("split", trace_file, "--fraction", 0.5, "--out-a", a, "--out-b", b, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    one, other = load([a]).trace, load([b]).trace
    assert (told["a"]["digest"], told["b"]["digest"]) == (one.digest, other.digest)
    assert not set(one.request.tolist()) & set(other.request.tolist())
    assert one.tokens + other.tokens == 24
    assert np.array_equal(load([a, b]).trace.histogram(), load([trace_file]).trace.histogram())


def test_a_histogram_goes_out_and_comes_back_as_a_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """synth -> histogram --out -> synth --fit: sizes and counts follow the histogram."""
    plain, counts, second = tmp_path / "1.k3trace", tmp_path / "h.json", tmp_path / "2.k3trace"
    save(plain, trace_of([600, 600]), meta_of(trace_of([1])))
    assert k3("histogram", plain, "--out", counts) == 0
    assert "14,400 selections by 1,200 tokens, 3 layers x 24 experts" in capsys.readouterr().out

    assert k3("synth", "--out", second, "--fit", counts, *SMALL, *FEW, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["layers"], told["experts"], told["top_k"], told["first_layer"]) == (3, 24, 4, 1)
    assert told["parameters"]["fitted_to"] == load([plain]).trace.digest
    assert load([second]).meta.parameters == told["parameters"]


def test_synth_repeats_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Same arguments, same digest; a parameter changes it and is written into the file."""
    counts = tmp_path / "h.json"
    counts.write_bytes(
        json.dumps(
            {
                "model_digest": "m",
                "trace_digest": "t",
                "first_layer": 1,
                "top_k": 4,
                "tokens": 60,
                "counts": [[10] * 24] * 2,
            }
        ).encode()
    )
    digests = []
    for param in ("clusters=8", "clusters=8", "clusters=6"):
        out = tmp_path / "s.k3trace"
        assert k3("synth", "--out", out, "--fit", counts, *SMALL, "--param", param, "--json") == 0
        digests.append(json.loads(capsys.readouterr().out)["digest"])

    assert digests[0] == digests[1] != digests[2]
    assert load([tmp_path / "s.k3trace"]).meta.parameters["clusters"] == 6


def test_synth_takes_the_sizes_of_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demonstration model's: its pod can be planned with such a trace."""
    out = tmp_path / "s.k3trace"
    assert k3("synth", "--out", out, "--checkpoint", CHECKPOINT, *SMALL, *FEW, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    config = json.loads((CHECKPOINT / "config.json").read_bytes())
    text = config.get("text_config", config)
    assert told["experts"] == text["num_experts"]
    assert told["tokens"] == 60


@pytest.mark.parametrize(
    "arguments",
    [
        ("synth", "--out", "x", "--param", "zipf"),
        ("synth", "--out", "x", "--param", "no_such=1"),
        ("synth", "--out", "x", "--param", "cold_fraction=1.5"),
        ("synth", "--out", "x", "--tokens", "0"),
        ("split", "x", "--fraction", "1.0", "--out-a", "a", "--out-b", "b"),
        ("split", "x", "--fraction", "nan", "--out-a", "a", "--out-b", "b"),
        ("split", "x", "--seed", "-1", "--out-a", "a", "--out-b", "b"),
        ("split", "x", "--out-a", "a", "--out-b", "./a"),
        ("split", "x", "--out-a", "a", "--out-b", "x"),
        ("record", "--out", "x", "--seconds", "nan"),
        ("record", "--out", "x", "--name", "../up"),
        ("record", "--out", "x", "--file-bytes", "10"),
        ("info",),
    ],
)
def test_wrong_usage_is_2(arguments: tuple[str, ...]) -> None:
    """Before any file is touched."""
    assert k3(*arguments) == 2


def test_list_params_shows_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Without any other argument."""
    assert k3("synth", "--list-params") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("zipf_exponent ") and "popularity law" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "not a histogram"),
        (b"\xff\xfe", "not a histogram"),
        (
            b'{"model_digest":"m","trace_digest":"","first_layer":1,"top_k":2,"tokens":1,'
            b'"counts":[[1,2],[3]]}',
            "different numbers",
        ),
        (
            b'{"model_digest":"m","trace_digest":"","first_layer":1,"top_k":2,"tokens":1,'
            b'"counts":[[-1,2]]}',
            "not a histogram",
        ),
        (
            b'{"model_digest":"m","trace_digest":"","first_layer":1,"top_k":2,"tokens":1,'
            b'"counts":[]}',
            "different numbers",
        ),
    ],
)
def test_a_foreign_histogram_is_refused(tmp_path: Path, text: bytes, words: str) -> None:
    """With the file's name."""
    path = tmp_path / "h.json"
    path.write_bytes(text)

    with pytest.raises(TraceError, match=words) as failure:
        histograms.read(path)

    assert str(path) in str(failure.value)


def test_a_file_without_an_end_is_no_histogram() -> None:
    """A device is read up to a bound, not until memory is full."""
    with pytest.raises(TraceError, match="more than 67108864 bytes"):
        histograms.read(Path("/dev/zero"))


def test_no_pod_is_one_line_and_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing listens there; nothing is left behind."""
    assert k3("record", "--url", "http://127.0.0.1:1", "--out", tmp_path / "new") == 1
    assert capsys.readouterr().err.startswith("k3: error[pod_unreachable]: no pod answers")
    assert not (tmp_path / "new").exists()
