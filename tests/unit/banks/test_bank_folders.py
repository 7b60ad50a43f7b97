"""Several target folders, `k3 bank ls`, and what a long run tells while it goes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from services.banks import progress as progress_module
from services.banks.builder import build, journal_path
from services.banks.progress import progress_line, shown_progress
from services.banks.target import choose_target
from services.cli import k3
from shared.core.errors import BankError, CheckpointError
from shared.core.placement import Placement
from shared.io.bank_file import BankFile
from shared.io.partial_file import partial_path
from station.model.checkpoint import Checkpoint
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.unit.banks.conftest import RandomExperts

NAME = "spark0.k3bank"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(k3, ["bank", *(str(argument) for argument in arguments)])


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two empty folders."""
    made = [tmp_path / "a", tmp_path / "b"]
    for folder in made:
        folder.mkdir()
    return made


def test_first_folder_with_room_is_taken(folders: list[Path]) -> None:
    """In the order given; a size no disk has is refused with what each has."""
    assert choose_target(folders, NAME, 1000, replace=False) == folders[0] / NAME
    with pytest.raises(BankError, match=f"{NAME} needs {2**60} bytes, but {folders[0]} has "):
        choose_target(folders, NAME, 2**60, replace=False)
    with pytest.raises(BankError, match="nowhere: cannot use it for banks: No such file"):
        choose_target([*folders, folders[0].parent / "nowhere"], NAME, 1, replace=False)


def test_unsearchable_folder_is_named(
    folders: list[Path], source: RandomExperts, placement: Placement
) -> None:
    """What the system refuses to look into (here a name too long) is one error, not a traceback."""
    name = "x" * 300
    with pytest.raises(BankError, match=f"{folders[0]}: cannot use it for banks: File name too"):
        choose_target(folders, name, 1, replace=False)
    with pytest.raises(BankError, match="cannot write the bank: File name too long"):
        build(source, placement, "spark0", folders[0] / name / NAME)


def test_unfinished_bank_is_continued_where_it_is(folders: list[Path]) -> None:
    """Its records are worth more than the order of folders, whatever room there is."""
    partial_path(folders[1] / NAME).touch()
    assert choose_target(folders, NAME, 2**60, replace=False) == folders[1] / NAME


def test_finished_bank_in_any_folder_is_found(folders: list[Path]) -> None:
    """D7: no second copy is made by accident; a replacement takes the old one's place."""
    (folders[1] / NAME).touch()
    with pytest.raises(BankError, match=f"{folders[1] / NAME}: exists already"):
        choose_target(folders, NAME, 1, replace=False)
    assert choose_target(folders, NAME, 1, replace=True) == folders[1] / NAME


def test_build_into_folders_and_list_them(folders: list[Path], tmp_path: Path) -> None:
    """The node's name is the file's; a second build is refused unless asked to replace."""
    model = write_tiny_checkpoint(tmp_path / "m", seed=1, layers=2, experts=4, latent=32, width=32)
    arguments = [
        "build", "--checkpoint", model, "--split", "plain", "--sparks", "2", "--node", "spark1",
        "--out-dir", folders[0], "--out-dir", folders[1],
    ]  # fmt: skip
    made = run(*arguments)
    assert made.exit_code == 0, made.output
    assert os.listdir(folders[0]) == ["spark1.k3bank"]
    before = (folders[0] / "spark1.k3bank").stat()
    refused = run(*arguments)
    assert refused.exit_code == 78
    assert "exists already" in refused.output
    assert (folders[0] / "spark1.k3bank").stat() == before
    assert run(*arguments, "--replace").exit_code == 0
    assert os.listdir(folders[1]) == []
    with BankFile.open(folders[0] / "spark1.k3bank") as opened:
        assert opened.header.rows == ((1, 2), (1, 3))
        listed = json.loads(run("ls", *folders, "--json").output)
        assert [entry["digest"] for entry in listed] == [opened.digest]


@pytest.mark.parametrize("out", [[], ["--out", "x.k3bank", "--out-dir", "y"]])
def test_exactly_one_kind_of_target(out: list[str]) -> None:
    """A file or folders, before the checkpoint is opened."""
    result = run("build", "--checkpoint", "/nowhere", "--split", "plain", "--node", "spark0", *out)
    assert result.exit_code == 2
    assert "either --out or --out-dir" in result.output


def test_interrupted_build_says_that_it_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at the last record; the same command then reads that one only."""
    model = write_tiny_checkpoint(tmp_path / "m", seed=1, layers=2, experts=6, latent=32, width=32)
    out = tmp_path / "spark0.k3bank"
    arguments = [
        "build", "--checkpoint", model, "--split", "plain", "--sparks", "1", "--node", "spark0",
        "--out", out,
    ]  # fmt: skip
    read = Checkpoint.read_expert_record
    asked: list[int] = []

    def interrupted(source: Checkpoint, layer: int, expert: int, buffer: memoryview) -> None:
        asked.append(expert)
        if asked.count(5) == 1 and expert == 5:
            raise KeyboardInterrupt
        read(source, layer, expert, buffer)

    monkeypatch.setattr(Checkpoint, "read_expert_record", interrupted)
    stopped = run(*arguments)
    assert stopped.exit_code == 1  # click's own group; `k3` ends with 130
    assert "interrupted: finished records are kept for the next build" in stopped.output
    assert not out.exists()
    asked.clear()
    asked.append(5)
    resumed = run(*arguments)
    assert resumed.exit_code == 0, resumed.output
    assert "records are there and will be checked" in resumed.output
    assert len(asked) < 1 + 6
    assert run("verify", out, "--source", model).exit_code == 0


class Failing(RandomExperts):
    """Fails at the last row of spark0."""

    def __init__(self, key: tuple[int, int]) -> None:
        self.key = key

    def read_expert_record(self, layer: int, expert: int, buffer: memoryview) -> None:
        if (layer, expert) == self.key:
            raise CheckpointError("damaged")
        super().read_expert_record(layer, expert, buffer)


def test_list_tells_whole_unfinished_and_damaged(bank_path: Path, placement: Placement) -> None:
    """One line each, from headers and journals alone; other files are not banks."""
    folder = bank_path.parent
    late = folder / "late.k3bank"
    with pytest.raises(CheckpointError):
        build(
            Failing(placement.node("spark0").rows[-1]), placement, "spark0", late,
            keep_partial=True, workers=1,
        )  # fmt: skip
    (folder / "broken.k3bank").write_bytes(bank_path.read_bytes()[:-1])
    (folder / "notes.txt").touch()
    (folder / "loop.k3bank").symlink_to("loop.k3bank")
    with BankFile.open(bank_path) as opened:
        digest = opened.digest
    entries = {Path(e["path"]).name: e for e in json.loads(run("ls", folder, "--json").output)}
    assert sorted(entries) == ["broken.k3bank", "late.k3bank.partial", "spark0.k3bank"]
    whole = entries["spark0.k3bank"]
    assert (whole["state"], whole["records"], whole["digest"]) == ("whole", 12, digest)
    assert (whole["node"], whole["tier"], whole["problem"]) == ("spark0", "spark", None)
    late_entry = entries["late.k3bank.partial"]
    assert (late_entry["state"], late_entry["records"]) == ("unfinished", 11)
    assert entries["broken.k3bank"]["state"] == "damaged"
    assert "truncated" in entries["broken.k3bank"]["problem"]
    lines = run("ls", folder).output.splitlines()
    assert len(lines) == 3
    assert "unfinished, 11 records: build or stage the same bank again to go on" in lines[1]
    assert f"12 row-major records for node spark0, digest {digest}" in lines[2]
    journal_path(late).unlink()
    assert "unfinished, 0 records" in run("ls", folder).output


@pytest.mark.parametrize("folder", ["nowhere", "file"])
def test_unreadable_folder_ends_with_78(tmp_path: Path, folder: str) -> None:
    """The path and the reason, in one line."""
    (tmp_path / "file").touch()
    result = run("ls", tmp_path / folder)
    assert result.exit_code == 78
    assert f"{tmp_path / folder}: cannot list banks" in result.output
    assert result.output.count("\n") == 1


def test_progress_has_bytes_rate_and_time_left() -> None:
    """100 of 5,704 K3 records in two seconds."""
    line = progress_line("bank spark0", 18_579_480, done=100, total=5704, elapsed_s=2.0)
    assert line == ("bank spark0: 100 of 5704 records, 1.9 of 106.0 GB, 0.93 GB/s, 112 s left")


def test_log_gets_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal: nothing for short runs, a line per half minute for long ones."""
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    with shown_progress("verify", 10**9) as display:
        for done in range(1, 71):
            now[0] += 1
            display.progress(done, 70)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "verify: 30 of 70 records, 30.0 of 70.0 GB, 1.00 GB/s, 40 s left",
        "verify: 60 of 70 records, 60.0 of 70.0 GB, 1.00 GB/s, 10 s left",
    ]


def test_terminal_gets_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Title, bytes and rate on a terminal, and lines that do not disturb it."""
    monkeypatch.setattr(progress_module.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    with shown_progress("bank spark0", 10**6) as display:
        display.progress(3, 4)
        display.notice("no record was finished for 30.0 s: reading [layer 3]")
    shown = click.unstyle(capsys.readouterr().err)
    assert "bank spark0" in shown
    assert "3.0/4.0 MB" in shown
    assert "reading [layer 3]\n" in shown
