"""Training and decoding steps of whole models as text."""

from collections.abc import Sequence

from attn_bench.decoding import Decoded
from attn_bench.tables import explained, fitted
from attn_bench.train_step import Step


def step_table(steps: Sequence[Step], width: int | None = None) -> str:
    """Return a line per length and backend: measured, predicted, the difference, and the losses.

    Below it stands why a row is not ``ok``; see `attn_bench.tables.fitted` for `width`.
    """
    body = []
    for each in steps:
        row, measured = each.row, each.row.median_ms
        expected = row.predicted_ms
        times = [""] * 6
        if measured is not None:
            times = [
                f"{measured:.2f}",
                f"{each.tokens_per_second or 0.0:,.0f}",
                "unknown" if each.mfu is None else f"{each.mfu:.1%}",
                "" if row.peak_mib is None else f"{row.peak_mib / 1024:.1f}",
                "" if expected is None else f"{expected:.2f}",
                f"{measured / expected - 1:+.1%}" if expected else "",
            ]
        loss = f"{row.errors['loss']:.1e}" if row.errors else ""
        name = f"{'~' if row.state == 'unstable' else ''}{row.provider}"
        cells = [str(row.case.seqlen_q), str(row.case.batch), name, *times]
        alone = "" if each.attention_ms is None else f"{each.attention_ms:.3f}"
        body.append([*cells, alone, loss, row.state])
    headers = [
        *("n", "batch", "attention", "step ms", "tokens/s", "MFU", "peak GiB"),
        *("predicted ms", "difference", "attention ms per layer", "loss difference", "verdict"),
    ]
    expendable = ["attention ms per layer", "MFU", "batch", "peak GiB", "tokens/s"]
    table = fitted(body, headers, expendable, width, stralign="left")
    return explained(table, [each.row for each in steps])


def decoding_table(found: Sequence[Decoded], width: int | None = None) -> str:
    """Return a line per batch, context and way of decoding, and the reasons as in `step_table`."""
    body = []
    for each in found:
        row, rate = each.row, each.tokens_per_second
        times = [""] * 4
        if row.median_ms is not None:
            times = [
                f"{row.median_ms:.3f}",
                f"{rate or 0.0:,.0f}",
                f"{row.gb_s or 0.0:.4g}",
                "" if row.roofline_share is None else f"{row.roofline_share:.0%}",
            ]
        first = "" if row.first_call_ms is None else f"{row.first_call_ms / 1e3:.1f}"
        name = f"{'~' if row.state == 'unstable' else ''}{row.provider}"
        cells = [str(row.case.batch), str(row.case.seqlen_k), name, *times, first]
        body.append([*cells, row.state])
    headers = [
        *("batch", "context", "attention, decoding", "ms a token", "tokens/s", "GB/s"),
        *("of copy", "first s", "verdict"),
    ]
    table = fitted(body, headers, ["first s", "tokens/s", "GB/s"], width, stralign="left")
    return explained(table, [each.row for each in found])
