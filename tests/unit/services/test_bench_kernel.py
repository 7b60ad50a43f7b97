"""`k3 bench kernel` on small experts: what is measured, in which memory, and how it is reported."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from services import cli
from services.bench.energy import Meter
from services.bench.kernel_bench import KernelBench
from services.bench.kernel_contenders import ORDERS, Kernel, Memory, kernel_of, our_backends
from services.bench.kernel_laps import Stopwatch, Turn, median_ratio, median_share, take_turns
from services.bench.kernel_records import (
    Rotation,
    cache_bytes,
    error_of,
    expected_rows,
    filled,
    records_that_fit,
    synthetic_activations,
    synthetic_record,
)
from services.bench.kernel_table import kernel_tables
from services.bench.report import Figure, Report, at_least, at_most
from shared.core.errors import ConfigError
from shared.core.record import RecordLayout, RecordOrder
from shared.core.shape import ExpertShape
from shared.kernels.codecs import bf16_float
from shared.kernels.reference import ReferenceKernel

SMALL = ExpertShape(latent=256, width=128)
STRIDE = RecordLayout(SMALL).stride_bytes


def bench(tmp_path: Path, **changed: object) -> KernelBench:
    """A run of a second: small experts, a cache of 1 MB."""
    settings = {
        "arena_bytes": 2_000_000 + 40 * STRIDE,
        "rounds": 2,
        "tokens": (1, 8),
        "backends": ("int16",),
        "cache_dir": tmp_path,
        "shape": SMALL,
        "cache_bytes": 10**6,
        "cpus": 2,
        "meter": lambda: Meter.open(tmp_path),
    }
    return KernelBench(**{**settings, **changed})  # type: ignore[arg-type]


def test_a_run_reports_every_cell_and_what_it_went_without(tmp_path: Path) -> None:
    """Names that others rely on, each back end and order beside the probe, reasons for the rest."""
    said: list[str] = []
    report = bench(tmp_path, say=said.append).run()
    figures = {figure.name: figure for figure in report.figures}

    assert figures["kernel.t1.threads2.share_of_probe"].target == 0.75
    assert figures["kernel.rel_err"].value <= figures["kernel.rel_err"].target == 1e-4
    assert figures["kernel.cosine"].ok
    for order in ("interleaved_4", "row_major"):
        for cell in ("t1.threads1", "t8.threads1", "t1.threads2", "t8.threads2"):
            base = f"kernel.int16_portable.{order}.{cell}"
            assert 0 < figures[f"{base}.gb_per_s"].value <= figures[f"{base}.gb_per_s_best"].value
            assert figures[f"{base}.share_of_probe"].value > 0
            assert figures[f"kernel.read_probe.{cell}.gb_per_s"].value > 0
    for name in ("t1.threads2.vs_ggml", "t8.threads2.vs_ggml", "avx2.vs_ggml_avx2"):
        assert "--peer ggml" in report.skipped[f"kernel.{name}"]
        assert f"kernel.{name}" not in figures
    assert "--peer torch" in report.skipped["kernel.torch_bf16"]
    assert "no RAPL package" in report.skipped["kernel.joules_per_expert"]
    assert any("8 tokens, 2 threads" in line for line in said)
    assert json.loads(report.to_json())["machine"]["records"] >= 40


def test_figures_that_need_what_was_not_measured_are_skipped(tmp_path: Path) -> None:
    """One thread only, and none of the back ends that the headline is about."""
    report = bench(tmp_path, threads=(1,), backends=("bf16",)).run()

    names = {figure.name for figure in report.figures}
    for name in ("t1.threads2.share_of_probe", "rel_err", "cosine"):
        assert f"kernel.{name}" not in names
        assert "not measured" in report.skipped[f"kernel.{name}"]


def test_more_threads_than_cpus_are_no_rate(tmp_path: Path) -> None:
    """Eight threads on two CPUs would count a quarter of their time: left out, or refused."""
    report = bench(tmp_path, threads=(1, 8), tokens=(1,), backends=("int16_portable",)).run()
    assert not any("threads8" in figure.name for figure in report.figures)
    assert "may use 2 CPUs" in report.skipped["kernel.threads8"]
    with pytest.raises(ConfigError, match=r"3 threads need as many CPUs.* give --threads 2"):
        bench(tmp_path, threads=(8, 3)).run()


def test_torch_takes_part_when_asked(tmp_path: Path) -> None:
    """With a share of the probe, after all others."""
    report = bench(
        tmp_path, threads=(1,), tokens=(2,), peers=("torch",), backends=("int16_portable",)
    ).run()

    names = [figure.name for figure in report.figures]
    assert "kernel.torch_bf16.t2.threads1.share_of_probe" in names
    assert "kernel.torch_bf16" not in report.skipped


def test_an_unknown_back_end_is_refused(tmp_path: Path) -> None:
    """Before any memory is taken; the message lists what there is."""
    with pytest.raises(ConfigError, match=r"'int4' is not known: use .*int16_portable"):
        bench(tmp_path, backends=("int4",), arena_bytes=1).run()


@given(
    records=st.integers(8, 60),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=200),
)
def test_no_record_comes_again_before_nearly_all_have(records: int, counts: list[int]) -> None:
    """Whatever the laps: at least `distance_min` other records are read in between."""
    rotation = Rotation(records, 4)
    read: list[int] = []
    for count in counts:
        taken = rotation.take(count)
        assert len(taken) == count
        assert 0 <= taken.start <= taken.stop <= records
        read += taken
    last: dict[int, int] = {}
    for place, record in enumerate(read):
        if record in last:
            assert place - last[record] - 1 >= rotation.distance_min - 1
            assert len(set(read[last[record] + 1 : place])) >= rotation.distance_min - 1
        last[record] = place


def test_the_arena_is_larger_than_any_cache_and_fits() -> None:
    """Twice the cache lies between two uses of a record; too small or too large is refused."""
    sizes = {"arenas": 2, "lap_max": 16, "cache_bytes": 10 * STRIDE}
    records = records_that_fit(60 * STRIDE, STRIDE, **sizes)
    assert records == 60
    assert Rotation(records, 16).distance_min * STRIDE >= 2 * 10 * STRIDE
    with pytest.raises(ConfigError, match="would be read again from the cache"):
        records_that_fit(51 * STRIDE, STRIDE, **sizes)
    with pytest.raises(ConfigError, match=r"2 arenas of 1000000\.0 GB do not fit .* give --bytes"):
        records_that_fit(10**15, STRIDE, **sizes)


def test_an_arena_holds_whole_records_at_different_addresses() -> None:
    """Each row is one of the distinct records."""
    distinct = [synthetic_record(SMALL, seed) for seed in range(2)]
    arena = filled(distinct, STRIDE, 5)
    assert arena.shape == (5, STRIDE)
    for row in range(5):
        assert np.array_equal(arena[row, : len(distinct[0])], distinct[row % 2])


def test_the_expected_rows_are_those_of_the_definition() -> None:
    """Against the reference kernel, which rounds; and a wrong record is far off."""
    record = synthetic_record(SMALL, 3)
    z = synthetic_activations(2, SMALL.latent, 5)
    arena = np.zeros((1, STRIDE), np.uint8)
    arena[0, : len(record)] = record
    rows = np.empty((2, SMALL.latent), np.uint16)
    kernel = ReferenceKernel(SMALL)
    kernel.rows(arena, np.zeros(2, np.int32), np.arange(2, dtype=np.int32), z, rows)

    x = bf16_float(z).astype(np.float64)
    near = error_of(bf16_float(rows), expected_rows(record, SMALL, x))
    far = error_of(bf16_float(rows), expected_rows(synthetic_record(SMALL, 4), SMALL, x))
    silu = error_of(bf16_float(rows), expected_rows(record, SMALL, x, "silu"))
    assert 5e-4 < near.relative_rms < 4e-3
    assert near.cosine > 0.99999
    assert far.relative_rms > 0.5
    assert silu.relative_rms > 4e-3


@pytest.mark.parametrize("order", list(ORDERS))
def test_a_lap_computes_every_token_for_every_record(order: RecordOrder) -> None:
    """A lap that read one record again and again would read a cache."""
    backend = next(one for one in our_backends() if one.name == "int16_portable")
    arena = filled([synthetic_record(SMALL, seed) for seed in range(5)], STRIDE, 40)
    z = synthetic_activations(3, SMALL.latent, 6)
    memory = Memory(arena, Rotation(40, 16), z)
    contender = Kernel(backend, SMALL, order, 2, memory)
    contender.prepare(range(3, 7), 3)()

    out = np.empty((1, SMALL.latent), np.uint16)
    kernel = kernel_of(backend, SMALL, order, 1)
    for pair, row in enumerate(contender.out):
        ids = np.array([3 + pair // 3], np.int32), np.array([pair % 3], np.int32)
        kernel.rows(arena, *ids, z, out)
        assert np.array_equal(row, out[0])
    assert len(contender.out) == 12


class Paced:
    """Says how long it takes instead of taking it: `cpu` and `wall` nanoseconds per record."""

    packed_bytes = 1000

    def __init__(self, name: str, wall: int, cpu: int, clock: list[int]) -> None:
        self.name = name
        self.rotation = Rotation(64, 16)
        self.calls: list[tuple[int, int]] = []
        self._pace = wall, cpu
        self._clock = clock

    def prepare(self, records: range, tokens: int) -> object:
        def action() -> None:
            self.calls.append((len(records), tokens))
            for which in (0, 1):
                self._clock[which] += self._pace[which] * len(records)

        return action


def test_turns_are_paired_with_the_probe_and_rates_are_by_processor_time() -> None:
    """Two threads at 1,000 bytes in 100 ns of processor time are 20 GB/s; slow ones end early."""
    clock = [0, 0]
    probe = Paced("probe", 40, 50, clock)
    quick, slow = Paced("quick", 90, 100, clock), Paced("slow", 500_000_000, 800_000_000, clock)
    contenders: Sequence[Paced] = (quick, slow)

    watch = Stopwatch(lambda: clock[0], lambda: clock[1], None)
    turns: dict[str, list[Turn]] = take_turns(contenders, probe, 4, 5, watch)  # type: ignore[arg-type]

    assert [len(turns[name]) for name in ("quick", "slow")] == [5, 3]
    assert {turn.lap.experts for turn in turns["quick"]} == {16}
    assert {turn.lap.experts for turn in turns["slow"]} == {1}
    assert turns["quick"][0].lap.gb_per_s(2) == pytest.approx(20.0)
    assert turns["quick"][0].lap.wall_gb_per_s == pytest.approx(1000 / 90)
    assert median_share(turns["quick"], 2) == pytest.approx(0.5)
    assert median_ratio(turns["quick"], turns["slow"], 2) == pytest.approx(8_000_000)
    assert {tokens for paced in (probe, quick, slow) for _, tokens in paced.calls} == {4}


def test_energy_is_read_where_the_kernel_tells_it(tmp_path: Path) -> None:
    """Packages only, over the counter's end; unreadable counters and none say why."""
    for name, domain in (("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "core")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(f"{domain}\n")
        (tmp_path / name / "energy_uj").write_text("900\n")
        (tmp_path / name / "max_energy_range_uj").write_text("999\n")
    meter = Meter.open(tmp_path)
    before = meter.read_uj()
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("100\n")
    assert meter.joules(before, meter.read_uj()) == pytest.approx(200e-6)

    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("nothing\n")
    with pytest.raises(ConfigError, match="energy cannot be read"):
        Meter.open(tmp_path)
    with pytest.raises(ConfigError, match="no RAPL package"):
        Meter.open(tmp_path / "nowhere")


def test_the_cache_size_is_that_of_the_largest(tmp_path: Path) -> None:
    """Of one processor; an unknown one counts as large."""
    for index, size in enumerate(("48K", "2048K", "260M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert cache_bytes(tmp_path) == 260 * 2**20
    assert cache_bytes(tmp_path / "nowhere") == 64 * 10**6


def test_the_table_has_a_row_per_back_end_and_a_column_per_number_of_tokens() -> None:
    """Rates with their share and the error; targets below, and no figure twice."""
    base = "kernel.int16_avx2.row_major"
    figures = (
        at_least("kernel.t1.threads2.share_of_probe", 0.5, "fraction", 0.75),
        Figure(f"{base}.t1.threads2.gb_per_s", 20.0, "GB/s"),
        Figure(f"{base}.t1.threads2.share_of_probe", 0.5, "fraction"),
        Figure(f"{base}.t16.threads2.gb_per_s", 5.0, "GB/s"),
        Figure("kernel.ggml.t1.threads2.gb_per_s", 9.0, "GB/s"),
        at_most("kernel.int16_avx2.rel_err", 5e-5, "fraction", 1e-4),
        at_most("kernel.bf16_avx512.rel_err", 5e-3, "fraction", 2e-3),
    )
    out = io.StringIO()
    console = Console(file=out, width=120)
    for table in kernel_tables(Report("kernel", {}, figures, {"kernel.torch_bf16": "not asked"})):
        console.print(table)
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert ["back", "end", "records", "T", "=", "1", "T", "=", "16", "error"] in lines
    assert ["int16_avx2", "row-major", "20.00", "(50%)", "5.00", "5.0e-05"] in lines
    assert ["ggml", "9.00"] in lines
    assert ["kernel.t1.threads2.share_of_probe", "0.5", "fraction", "0.75"] in lines
    assert ["skipped:", "not", "asked"] in lines
    assert out.getvalue().count("share_of_probe") == 1
    # what misses its target is shown by name wherever else it stands
    assert "int16_avx2.rel_err" not in out.getvalue()
    assert "bf16_avx512.rel_err" in out.getvalue()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--tokens", "0"], 2, "from 1 to 64"),
        (["--threads", "x"], 2, "--threads"),
        (["--peer", "mlx"], 2, "--peer"),
        (["--bytes", "1e13"], 78, "do not fit"),
        (["--bytes", "nan"], 2, "--bytes"),
        (["--backend", "int4"], 78, "not known"),
    ],
)
def test_wrong_arguments_are_one_error(
    arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any memory is taken."""
    assert cli.run(["bench", "kernel", *arguments]) == status
    assert said in capsys.readouterr().err
