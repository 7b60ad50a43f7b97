"""Finding banks by name and reading them by digest, on real files."""

from __future__ import annotations

import os
import resource
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.bank_service.open_banks import IDLE_US, OpenBank, OpenBanks
from services.bank_service.refusal import Refusal
from shared.io.bank_file import BankFile
from tests.unit.bank_service.page_cache import cached_share_dropped, resident_share
from tests.unit.bank_service.world import TestLog, World, build_bank


@pytest.fixture
def log() -> TestLog:
    return TestLog()


@pytest.fixture
def banks(world: World, log: TestLog) -> Iterator[OpenBanks]:
    """The banks of the world's folders, at most two open."""
    found = OpenBanks(world.folders, log.log, open_max=2)
    yield found
    found.close()


def opened(found: OpenBank | Refusal) -> OpenBank:
    """A bank that was found."""
    assert isinstance(found, OpenBank), found
    return found


def code(answer: object) -> str:
    """Why there is none."""
    assert isinstance(answer, Refusal), answer
    return answer.code


def test_a_bank_is_described_and_read_byte_for_byte(world: World, banks: OpenBanks) -> None:
    """Digest and sizes are the file's; ranges of any size give its bytes."""
    path = world.folders[0] / "grace.k3bank"
    bank = opened(banks.find("grace", 0))
    data = path.read_bytes()

    with BankFile.open(path) as file:
        assert (bank.digest, bank.header_bytes) == (file.digest, file.records_offset)
    assert bank.file_bytes == len(data)
    for offset, length in ((0, 1), (4095, 5000), (len(data) - 7, 7), (0, len(data))):
        assert banks.read(bank.digest, offset, length, 0) == data[offset : offset + length]


def test_a_range_beyond_the_end_is_refused(banks: OpenBanks) -> None:
    """Not cut short: a node would wait for the rest."""
    bank = opened(banks.find("grace", 0))

    assert code(banks.read(bank.digest, bank.file_bytes - 1, 2, 0)) == "out_of_range"
    assert code(banks.read(bank.digest, 2**62, 1, 0)) == "out_of_range"


def test_what_is_not_there_is_named(world: World, banks: OpenBanks) -> None:
    """Unknown names and digests: what to do is said."""
    answer = banks.find("nobody", 0)

    assert code(answer) == "bank_unknown"
    assert isinstance(answer, Refusal)
    assert answer.permanent
    assert str(world.folders[1]) in answer.text
    gone = banks.read("0" * 64, 0, 1, 0)
    assert isinstance(gone, Refusal)
    assert (gone.code, gone.permanent) == ("gone", False)


def test_an_unusable_bank_is_looked_for_in_the_next_folder(
    world: World, banks: OpenBanks, log: TestLog
) -> None:
    """A truncated file does not hide the whole one; alone it is refused with its own words."""
    bad = world.folders[0] / "grace.k3bank"
    shutil.copy(bad, world.folders[1] / bad.name)
    whole = bad.stat().st_size
    with bad.open("r+b") as stream:
        stream.truncate(whole - 1)

    assert opened(banks.find("grace", 0)).path == world.folders[1] / bad.name
    assert len(log.events("bank_unusable")) == 1
    (world.folders[1] / bad.name).unlink()
    answer = banks.find("grace", 0)
    assert code(answer) == "bank_invalid"
    assert isinstance(answer, Refusal)
    assert f"truncated: {whole - 1} of {whole} bytes" in answer.text


def test_a_replaced_bank_keeps_its_old_bytes(world: World, banks: OpenBanks) -> None:
    """Who began with the old digest ends with it; who asks by name gets the new one."""
    path = world.folders[0] / "grace.k3bank"
    old = opened(banks.find("grace", 0))
    before = path.read_bytes()
    build_bank(world.folders[0], "grace", policy="other", replace=True)

    new = opened(banks.find("grace", 0))

    assert new.digest != old.digest
    assert banks.read(old.digest, 0, len(before), 0) == before
    assert banks.read(new.digest, 0, new.file_bytes, 0) == path.read_bytes() != before


def test_a_repaired_bank_of_the_same_digest_is_opened_anew(world: World, banks: OpenBanks) -> None:
    """The digest covers the header: bytes that were damaged and built again have the same one."""
    path = world.folders[0] / "grace.k3bank"
    right = path.read_bytes()
    damaged = bytearray(right)
    damaged[-5000] ^= 1
    path.write_bytes(damaged)
    bank = opened(banks.find("grace", 0))
    path.unlink()
    path.write_bytes(right)

    again = opened(banks.find("grace", 0))

    assert again.digest == bank.digest
    assert banks.read(again.digest, 0, len(right), 0) == right
    assert len(banks) == 1


def test_a_bank_cut_short_in_place_is_no_short_answer(world: World, banks: OpenBanks) -> None:
    """A read that ends early is refused, whoever wrote into the file."""
    bank = opened(banks.find("grace", 0))
    with bank.path.open("r+b") as stream:
        stream.truncate(bank.file_bytes - 10)

    assert code(banks.read(bank.digest, bank.file_bytes - 20, 20, 0)) == "read_failed"


def test_open_banks_are_bounded(world: World, banks: OpenBanks) -> None:
    """The one that was not read for longest goes; asking for its name opens it again."""
    build_bank(world.folders[1], "spark0", policy="other")
    shutil.move(world.folders[1] / "spark0.k3bank", world.folders[1] / "third.k3bank")
    first, second = opened(banks.find("grace", 0)), opened(banks.find("spark0", 0))
    banks.read(first.digest, 0, 1, 0)

    banks.find("third", 0)

    assert len(banks) == 2
    assert banks.read(first.digest, 0, 8, 0) == b"K3BANK\0\1"
    assert code(banks.read(second.digest, 0, 8, 0)) == "gone"
    assert opened(banks.find("spark0", 0)).digest == second.digest


def test_a_bank_that_was_read_is_not_cached(world: World, banks: OpenBanks) -> None:
    """Also not what the kernel read ahead, in pieces that end anywhere."""
    path = world.folders[0] / "grace.k3bank"
    if cached_share_dropped(path) > 0.1:
        pytest.skip("this file system is nothing but page cache")
    bank = opened(banks.find("grace", 0))
    length = 15 * 4096

    for offset in range(0, bank.file_bytes, length):
        banks.read(bank.digest, offset, min(length, bank.file_bytes - offset), 0)

    assert resident_share(path) < 0.1


def test_readers_never_see_another_file(world: World, log: TestLog) -> None:
    """While banks are opened and closed under them, readers get the right bytes or a refusal."""
    banks = OpenBanks(world.folders, log.log, open_max=1)
    names = ("grace", "spark0")
    digests = {name: opened(banks.find(name, 0)).digest for name in names}
    heads = {name: (world.folders[0] / f"{name}.k3bank").read_bytes()[:256] for name in names}
    stop = threading.Event()

    def read_always(name: str) -> int:
        count = 0
        while not stop.is_set():
            answer = banks.read(digests[name], 0, 256, 0)
            if isinstance(answer, Refusal):
                assert answer.code == "gone"
            else:
                assert answer == heads[name]
                count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read_always, name) for name in 2 * names]
        for _ in range(150):
            for name in names:
                banks.find(name, 0)
        stop.set()
        assert sum(reader.result() for reader in readers) > 0
    banks.close()


def test_a_bank_nobody_reads_frees_its_disk(world: World, banks: OpenBanks) -> None:
    """A replaced bank would else keep its space for as long as the service runs."""
    bank = opened(banks.find("grace", 0))
    banks.read(bank.digest, 0, 1, IDLE_US)

    banks.close_idle(2 * IDLE_US)
    assert len(banks) == 1
    banks.close_idle(2 * IDLE_US + 1)
    assert len(banks) == 0


def test_a_fifo_in_a_banks_place_does_not_hang(world: World, banks: OpenBanks) -> None:
    """It is refused like any other file that is no bank."""
    os.mkfifo(world.folders[1] / "pipe.k3bank")

    assert code(banks.find("pipe", 0)) == "bank_invalid"
    assert Path(world.folders[1] / "pipe.k3bank").exists()


def test_links_in_a_circle_are_named_with_a_remedy(world: World, banks: OpenBanks) -> None:
    """Not the system's own words alone."""
    loop = world.folders[0] / "loop.k3bank"
    loop.symlink_to(loop.name)
    answer = banks.find("loop", 0)

    assert isinstance(answer, Refusal)
    assert (answer.code, answer.permanent) == ("bank_invalid", True)
    assert answer.text.startswith(f"{loop}: cannot look for the bank: Too many levels")


def test_a_file_in_a_folders_place_hides_no_answer(world: World, log: TestLog) -> None:
    """A bank that is in no folder is unknown, whatever else one of the folders is."""
    banks = OpenBanks([world.folders[0] / "grace.k3bank", world.folders[0]], log.log)

    assert code(banks.find("nobody", 0)) == "bank_unknown"
    assert opened(banks.find("spark0", 0)).name == "spark0"
    banks.close()


def test_no_descriptors_now_is_not_a_bad_bank(banks: OpenBanks) -> None:
    """A node must ask again: after a permanent refusal it would stop until a person comes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        answer = banks.find("grace", 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert isinstance(answer, Refusal)
    assert (answer.code, answer.permanent) == ("read_failed", False)
    assert "Too many open files" in answer.text
    assert opened(banks.find("grace", 0)).name == "grace"
