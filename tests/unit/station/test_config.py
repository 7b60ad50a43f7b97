"""The Station's settings: what is accepted, what is refused, and how clearly."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.core.errors import ConfigError
from shared.core.placement import Placement, balanced
from shared.core.shape import ExpertShape, ModelShape
from station import config
from station.assembly import ring_shape

RIGHT = 'checkpoint = "model"\nplacement = "/etc/k3/placement.json"\n'


def load(folder: Path, text: str) -> config.StationConfig:
    """Settings from a text."""
    path = folder / "station.toml"
    path.write_text(text)
    return config.load(path)


def wide(top_k: int = 16) -> Placement:
    """A placement of a model that chooses `top_k` experts."""
    shape = ModelShape(2, 1, 32, top_k, ExpertShape(latent=64, width=16))
    return balanced("model", shape, [("hbm", "hbm", 1.0), ("spark0", "spark", 1.0)])


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    """Absolute ones stay; defaults are the installed ones."""
    settings = load(tmp_path, RIGHT)

    assert settings.checkpoint == str(tmp_path / "model")
    assert settings.placement == "/etc/k3/placement.json"
    assert settings.http_token_file == ""
    assert load(tmp_path, RIGHT + 'http_token_file = "token"').http_token_file == str(
        tmp_path / "token"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense", "not valid TOML"),
        ("", "checkpoint"),
        (RIGHT + "unknown = 1", "unknown"),
        (RIGHT + r'state_directory = "a\u0000b"', "state_directory"),
        (RIGHT + r'http_token_file = "a\u0000b"', "http_token_file"),
        (RIGHT + "http_port = 70000", "http_port"),
        (RIGHT + 'on_miss = "skip"', "on_miss"),
        (RIGHT + 'kernel = "cuda"', "kernel"),
        (RIGHT + "kernel_threads = 65", "kernel_threads"),
        (RIGHT + "[ring]\nslots = 65", "ring.slots"),
        (RIGHT + "[limits]\nactive = 65", "limits.active"),
        (RIGHT + "[deadline]\nfloor_us = 5000\nceiling_us = 4000", "floor_us"),
        (RIGHT + "[deadline]\nfactor = 0.5", "deadline.factor"),
    ],
)
def test_what_cannot_work_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    """One ConfigError that names file and field, before anything starts."""
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)

    assert "station.toml" in str(error.value)
    assert words in str(error.value)


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    """The remedy is a command."""
    with pytest.raises(ConfigError, match="k3 pod init"):
        config.load(tmp_path / "none.toml")


def test_the_default_ring_holds_what_the_default_limits_allow(tmp_path: Path) -> None:
    """Eight requests of 64 tokens with top-16, all to one node."""
    shape = ring_shape(load(tmp_path, RIGHT), wide())

    assert (shape.slots, shape.latent) == (16, 64)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[limits]\nactive = 9", "18 slots"),
        ("[limits]\nprefill_tokens = 65", "24 slots"),
        ("[ring]\nmax_tokens = 16", "32 slots"),
        ("[ring]\nslots = 15", "ring.slots is 15"),
    ],
)
def test_a_ring_that_busy_requests_would_fill_is_refused(
    tmp_path: Path, text: str, words: str
) -> None:
    """A full ring means "this node is behind"; a healthy pod must not be able to look like that."""
    with pytest.raises(ConfigError, match=words):
        ring_shape(load(tmp_path, RIGHT + text), wide())


def test_a_token_must_fit_a_dispatch(tmp_path: Path) -> None:
    """A token is never cut in two."""
    with pytest.raises(ConfigError, match="a token needs 65"):
        ring_shape(load(tmp_path, RIGHT + "[ring]\nmax_rows = 64"), _model_of_top_k(65))


def _model_of_top_k(top_k: int) -> Placement:
    shape = ModelShape(2, 1, 128, top_k, ExpertShape(latent=64, width=16))
    return balanced("model", shape, [("spark0", "spark", 1.0)])
