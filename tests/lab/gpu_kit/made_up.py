"""Rows as a run of the kit leaves them."""

from lab.gpu_kit.rows import Figure, KitRow, State

MACHINE = "NVIDIA H200, torch 2.11.0+cu130, CUDA 13.0"


def row(
    step: str, cell: str = "", state: State = "measured", note: str = "", **figures: Figure
) -> KitRow:
    return KitRow(step, cell, state, figures, note, "2026-11-23T08:00:00+00:00", MACHINE)


def done(step: str) -> KitRow:
    return row(step, "", "done", took_s=12.3)


RUN = [
    row("versions", "GPU", value="NVIDIA H200, 140 GiB, 132 multiprocessors, " + "long " * 30),
    row("versions", "python", value="3.12.3"),
    done("versions"),
    row("passes-target", "graphs 500|1 row", pass_ms=5.0, first_ms=600.0),
    row("passes-target", "graphs 500|9 rows", pass_ms=8.1, first_ms=610.0),
    row("passes-target", "fused 500|1 row", pass_ms=9.0, first_ms=20.0),
    done("passes-target"),
    row("passes-drafter", "graphs 200|1 row", pass_ms=8.0, first_ms=401.0),
    row("passes-drafter", "graphs 200|4 rows", pass_ms=7.0, first_ms=399.5),
    row("passes-drafter", "graphs 200|8 rows", "failed", "CUDA out of memory"),
    row("passes-drafter", "fused 200|8 rows", "failed", "CUDA out of memory"),
    row("passes-drafter", "graphs 4000|1 row", pass_ms=200.0, first_ms=410.0),
    row("passes-drafter", "graphs 4000|8 rows", pass_ms=198.0, first_ms=2.5),
    row("passes-drafter", "", "failed", "ended after its 150 s; what was measured is kept"),
    row("texts", "ar cuda:0 T=0.0", tokens_s=166.0, ms_per_token=5.9, first_ms=20.0, texts=8.0),
    row("texts", "sync cuda:0 T=0.0", tokens_s=199.2, speedup=1.2, texts=8.0),
    row("texts-mps", "", "skipped", "nvidia-cuda-mps-control is not installed"),
]
