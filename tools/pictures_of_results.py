"""Pictures of measured figures."""

from __future__ import annotations

from typing import Any

from svg import BLUE, GREY, INK, RED, Picture

from benchmarks.harness.beside_default import DEFAULT, TORCH, best_of_torch
from benchmarks.harness.figures import time_text
from benchmarks.harness.first_screen_tables import ALONE, cap_of, cells_of

PANELS = {  # where each stands: column and row
    ("host2", "transformer"): (0, 0, "on a host: transformer, 4.7 M parameters"),
    ("host2", "mlp"): (0, 1, "on a host: MLP, 42 M parameters"),
    ("1gbit", "transformer"): (1, 0, "1 Gbit/s: transformer"),
    ("100mbit", "transformer"): (1, 1, "100 Mbit/s: transformer"),
}
WIDTH, HEIGHT, LEFT, BAR = 440, 150, 122, 240


def first_screen(records: list[dict[str, Any]]) -> Picture:
    """Steps of torch DDP with its default and its best buckets, and of dpcore without arguments."""
    drawn = Picture(2 * WIDTH, 2 * HEIGHT + 44)
    for place, model, cell in cells_of(records):
        if (place, model) not in PANELS:
            continue
        column, row, title = PANELS[place, model]
        x, y = WIDTH * column, HEIGHT * row + 12
        best = best_of_torch(cell) or cell[TORCH]
        names = {best["contender"]: f"{cap_of(best)} buckets", TORCH: "torch DDP"}
        shown = dict.fromkeys((TORCH, best["contender"], DEFAULT))
        bars = {names.get(contender, contender): cell[contender] for contender in shown}
        alone = cell[ALONE]["step_s"]
        scale = BAR / max(line["step_s"] for line in bars.values())
        drawn.text(x + 20, y + 22, title, ink=INK)
        for number, (name, line) in enumerate(bars.items()):
            top = y + 36 + 32 * number
            drawn.text(x + LEFT - 8, top + 17, name, "end", BLUE if name == "dpcore" else INK, 13)
            computed = scale * min(alone, line["step_s"])
            drawn.box(x + LEFT, top, computed, 24, GREY)
            drawn.box(x + LEFT + computed, top, scale * line["step_s"] - computed, 24, RED)
            drawn.text(x + LEFT + scale * line["step_s"] + 6, top + 17, time_text(line["step_s"]),
                       size=13)  # fmt: skip
    y = 2 * HEIGHT + 18
    drawn.box(20, y, 14, 14, GREY)
    drawn.text(40, y + 12, "computing alone", size=13)
    drawn.box(160, y, 14, 14, RED)
    drawn.text(
        180, y + 12, "what data parallel training adds; 2 ranks, medians of one run", size=13
    )
    return drawn
