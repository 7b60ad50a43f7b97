"""`k3 bench bank` on one real K3 record: it measures what it says and cleans up."""

from __future__ import annotations

from pathlib import Path

import pytest

from services import cli
from services.bench.bank_bench import BankBench
from shared.core.errors import ConfigError


def test_one_record_is_measured_both_ways(tmp_path: Path) -> None:
    """Cold and warm against cp, with peak memory; nothing is left on the disk."""
    report = BankBench(payload_bytes=1, rounds=1, folder=tmp_path).run()
    figures = {figure.name: figure for figure in report.figures}
    assert figures["bank.payload_bytes"].value == 18_579_480
    for cache in ("cold", "warm"):
        ratio = figures[f"bank.{cache}.vs_cp"]
        rates = [figures[f"bank.{cache}.{side}_gb_per_s"].value for side in ("cp", "build")]
        assert ratio.value == pytest.approx(rates[0] / rates[1])
        assert ratio.target == 1.0
    assert figures["bank.peak_bytes"].value > figures["bank.peak_growth_bytes"].value
    # one worker's record, and not the checkpoint
    assert 18e6 < figures["bank.peak_growth_bytes"].value < 80e6
    assert list(tmp_path.iterdir()) == []


def test_too_large_a_benchmark_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both sizes and the remedy, before anything is written."""
    with pytest.raises(ConfigError, match=r"needs 21250\.0 GB, there are .* give fewer --bytes"):
        BankBench(payload_bytes=10**13, rounds=1, folder=tmp_path).run()
    assert cli.run(["bench", "bank", "--bytes", "1e13", "--dir", str(tmp_path)]) == 78
    assert "there are" in capsys.readouterr().err
    assert cli.run(["bench", "bank", "--dir", str(tmp_path / "no")]) == 78
    assert list(tmp_path.iterdir()) == []
