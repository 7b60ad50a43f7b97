"""A census for a person to read. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from services.census.report import Census, ScaleCensus, Share

_LABEL_COLUMNS = 26
_GIB = 2**30


def lines(census: Census) -> Iterator[str]:
    """The ledger to the byte, then the experts, then what is not as published."""
    yield census.directory
    index = "index agrees" if census.indexed else "no index"
    yield f"{census.layout}, {census.shards:,} shards, {index}"
    yield ""
    yield from _ledger(census)
    yield ""
    yield from _experts(census)
    yield ""
    if not census.differences:
        yield "as published: no difference"
        return
    yield f"not as published: {len(census.differences)} differences"
    for difference in census.differences:
        yield f"  {difference}"


def _ledger(census: Census) -> Iterator[str]:
    yield f"{'':{_LABEL_COLUMNS}}{'tensors':>11}{'bytes':>20}{'GiB':>12}"
    total = Share(census.tensors, census.payload_bytes)
    shares = {
        "routed experts": census.expert,
        "text without experts": census.text,
        "vision": census.vision,
        "other": census.other,
        "total": total,
    }
    shares |= {f"  of it {dtype}": share for dtype, share in census.dtypes.items()}
    for label, share in shares.items():
        yield (
            f"{label:{_LABEL_COLUMNS}}{share.tensors:>11,}{share.bytes:>20,}"
            f"{share.bytes / _GIB:>12,.2f}"
        )
    yield f"{'headers':{_LABEL_COLUMNS}}{'':11}{census.header_bytes:>20,}"


def _experts(census: Census) -> Iterator[str]:
    experts = census.experts
    if not experts.experts:
        yield _line("routed experts", "none")
        return
    layers = _values(experts.experts_per_layer, "layers")
    yield _line("routed experts", f"{experts.experts:,} in layers {experts.layers}")
    yield _line("per layer", layers)
    yield _line("bytes each", _values(experts.bytes_per_expert, "experts"))
    yield _line("tensors each", _values(experts.tensors_per_expert, "experts"))
    yield _line("scattered reads each", _values(experts.reads_per_expert, "experts"))
    yield _line("uniform", "yes" if experts.uniform else f"no: {experts.kinds} kinds of experts")
    yield _line("order in shards", experts.order)
    if census.scales is not None:
        yield from _scales(census.scales)
    if (blocks := census.block_scales) is not None:
        found = f"{blocks.negative:,} negative, {blocks.nan:,} NaN{_first(blocks.first_bad)}"
        yield _line("block scales", f"{blocks.scales:,} read: {found}")


def _scales(scales: ScaleCensus) -> Iterator[str]:
    yield _line("w1, w3 weight_scale_2", f"differ in {scales.unequal_w1_w3:,} experts")
    found = f"{scales.negative:,} negative, {scales.not_finite:,} not finite"
    yield _line("scale scalars", f"{scales.scalars:,} read: {found}{_first(scales.first_bad)}")
    yield _line(
        "input scales", f"{scales.input_scales:,}, {scales.input_scales_not_one:,} other than 1"
    )


def _first(name: str | None) -> str:
    return f", first {name}" if name else ""


def _values(counts: Mapping[int, int], unit: str) -> str:
    """`896`, or `896 (91 layers), 895 (1 layers)`."""
    if len(counts) == 1:
        return f"{next(iter(counts)):,}"
    shown = [f"{value:,} ({count:,} {unit})" for value, count in list(counts.items())[:6]]
    more = [f"and {len(counts) - len(shown)} more"] if len(counts) > len(shown) else []
    return ", ".join(shown + more)


def _line(label: str, text: str) -> str:
    return f"{label:{_LABEL_COLUMNS}}{text}"
