"""The catalogue of pipeline schedules: one file a family, pure functions, one line each in the registry."""

from __future__ import annotations

from helixpipe.planning.catalogue import Catalogue, NoOptions, Schedule, Shape
from schedules.adapipe import adapipe
from schedules.chimera import chimera
from schedules.gpipe import gpipe, no_pipeline
from schedules.hanayo import hanayo
from schedules.helix import HelixOptions, helix
from schedules.infinipipe import InfinipipeOptions, infinipipe
from schedules.one_f_one_b import InterleavedOptions, interleaved, one_f_one_b
from schedules.seq1f1b import seq1f1b, seq1f1b_interleaved, seq1f1b_zero_bubble, terapipe
from schedules.sppo import SppoOptions, sppo
from schedules.v_shape import v_half, v_min, zbv
from schedules.weipipe import WeipipeOptions, weipipe, weipipe_naive, wzb1, wzb2
from schedules.zero_bubble import ZeroBubbleOptions, zb1p, zb2p, zb_interleaved

__all__ = ["CATALOGUE", "NoOptions", "Schedule", "Shape", "build", "find", "foreign_options"]

# A search for plans tries itself what to recompute, and predicts large steps from small ones: what fills the memory of
# those says nothing of these.
_ORDER_ALONE = (ZeroBubbleOptions(zb_recompute=False),)

_REGISTRY = (
    Schedule("none", no_pipeline, "gradient accumulation, p = 1", bubble="0", memory="1", one_rank=True, default=True),
    Schedule("gpipe", gpipe, "Huang et al., GPipe, 2019", bubble="(p-1)(F+B)", memory="m"),
    Schedule("1f1b", one_f_one_b, "Fan et al., DAPPLE, 2021", bubble="(p-1)(F+B)", memory="min(p-r, m)", default=True),
    Schedule(
        "adapipe",
        adapipe,
        "Sun et al., ASPLOS 2024",
        bubble="at most 1f1b's",
        memory="the limit",
        own_stages=True,
        ragged=False,
        effort=20,
    ),
    Schedule(
        "interleaved-1f1b",
        interleaved,
        "Narayanan et al., SC'21",
        bubble="(p-1)(F+B)/v",
        memory="(2(p-r-1) + (v-1)p + 1)/v",
        options=InterleavedOptions,
        virtual_stages=True,
        default=True,
        units=True,
    ),
    Schedule(
        "chimera", chimera, "Li and Hoefler, SC'21", bubble="(p-2)max(F,B)", memory="at most p", units=True, spread=True
    ),
    Schedule(
        "hanayo",
        hanayo,
        "Liu et al., SC'23",
        bubble="2(p-1)max(F,B)/v",
        memory="min(p, m)",
        zigzag=True,
        virtual_stages=True,
        units=True,
    ),
    Schedule(
        "zb1p",
        zb1p,
        "Qi et al., ICLR 2024 (ZB-H1)",
        bubble="(p-1)(F+I-W)",
        memory="p",
        splits=True,
        options=ZeroBubbleOptions,
        effort=2,
        variants=_ORDER_ALONE,
        units=True,
    ),
    Schedule(
        "zb2p",
        zb2p,
        "Qi et al., ICLR 2024 (ZB-H2)",
        bubble="(p-1)F",
        memory="2p",
        splits=True,
        options=ZeroBubbleOptions,
        effort=2,
        variants=_ORDER_ALONE,
        units=True,
    ),
    Schedule(
        "zbv",
        zbv,
        "Qi et al., ICLR 2024 (ZB-V)",
        bubble="(p-1)F/2",
        memory="p",
        stages=2,
        zigzag=True,
        splits=True,
        options=ZeroBubbleOptions,
        effort=3,
        variants=_ORDER_ALONE,
        units=True,
    ),
    Schedule(
        "v-half",
        v_half,
        "Qi et al., NeurIPS 2024 (V-Half)",
        bubble="at most 3(p-1)F/2",
        memory="p/2 + 1",
        stages=2,
        zigzag=True,
        splits=True,
        options=ZeroBubbleOptions,
        effort=3,
        variants=_ORDER_ALONE,
        units=True,
    ),
    Schedule(
        "v-min",
        v_min,
        "Qi et al., NeurIPS 2024 (V-Min)",
        bubble="at most 2(p-1)F",
        memory="(p+4)/3",
        stages=2,
        zigzag=True,
        splits=True,
        options=ZeroBubbleOptions,
        effort=3,
        variants=_ORDER_ALONE,
        units=True,
    ),
    Schedule(
        "zb-interleaved",
        zb_interleaved,
        "Qi et al., ICLR 2024 (ZB-H1), interleaved",
        bubble="(p-1)(F+I-W)/v",
        memory="(2(p-1) + (v-1)p + 1)/v",
        splits=True,
        options=ZeroBubbleOptions,
        effort=6,
        variants=_ORDER_ALONE,
        virtual_stages=True,
        units=True,
    ),
    Schedule("terapipe", terapipe, "Li et al., ICML 2021", bubble="(p-1)(F+B)/k", memory="m", chunks=True),
    Schedule(
        "seq1f1b",
        seq1f1b,
        "Sun et al., Seq1F1B, 2024",
        bubble="(p-1)(F+B)/k",
        memory="(p-r-1+k)/k",
        chunks=True,
        default=True,
    ),
    Schedule(
        "seq1f1b-interleaved",
        seq1f1b_interleaved,
        "Sun et al., Seq1F1B, 2024",
        bubble="(p-1)(F+B)/(kv)",
        memory="(2(p-r-1) + (v-1)kg + k)/(kv)",
        virtual_stages=True,
        chunks=True,
        default=True,
    ),
    Schedule(
        "seq1f1b-zb",
        seq1f1b_zero_bubble,
        "Sun et al., Seq1F1B, 2024",
        bubble="(p-1)(F+I-W)/k",
        memory="(p-1+k)/k",
        splits=True,
        options=ZeroBubbleOptions,
        effort=2,
        variants=_ORDER_ALONE,
        chunks=True,
    ),
    Schedule(
        "infinipipe",
        infinipipe,
        "Wang et al., InfiniPipe, 2025",
        bubble="(p-1)(F+B)/k",
        memory="(a(p-r-1)+k)/k",
        options=InfinipipeOptions,
        chunks=True,
        splits=True,
        effort=9,
        adapts=InfinipipeOptions.adapts,
        quick=InfinipipeOptions.quick,
    ),
    Schedule(
        "sppo",
        sppo,
        "Chen et al., SPPO, 2025",
        bubble="(p-1)(F+B)/k",
        memory="1 + a(p-r-1)/k",
        options=SppoOptions,
        chunks=True,
        offloads=True,
        variants=(SppoOptions(), SppoOptions(sppo_ahead=1)),
    ),
    Schedule(
        "helix",
        helix,
        "Zhang et al., HelixPipe, 2025",
        bubble="3(p-1)(F-A)p/L",
        memory="m, or 3m/16 recomputed",
        own_stages=True,
        options=HelixOptions,
        effort=6,
        spread=True,
        # What it recomputes is chosen by the search, whose trials would take far longer with the schedule's own choice.
        variants=tuple(
            HelixOptions(helix_folds=folds, helix_ship=ship, helix_recompute=False)
            for folds in (2, 1)
            for ship in ("attention", "qkv")
        ),
        aliases=(
            ("--attention-pipeline", "--pipeline-schedule helix"),
            ("--num-fold", "--helix-folds"),
            ("--transfer-weight", "--helix-ship qkv"),
        ),
    ),
    *(
        Schedule(
            name,
            make,
            f"Lin et al., PPoPP 2025 ({variant})",
            bubble=bubble,
            memory=memory,
            own_stages=True,
            options=WeipipeOptions,
            effort=4,
            spread=True,
        )
        for name, make, variant, bubble, memory in (
            ("weipipe-naive", weipipe_naive, "WeiPipe-Naive", "pt", "p"),
            ("weipipe", weipipe, "WeiPipe-Interleave", "pt", "p"),
            ("wzb1", wzb1, "WZB1", "pt", "3p/2"),
            ("wzb2", wzb2, "WZB2", "(p-1)t", "p"),
        )
    ),
)

CATALOGUE = Catalogue(_REGISTRY)
"""The schedules by their flag values."""

build, find, foreign_options = CATALOGUE.build, CATALOGUE.find, CATALOGUE.foreign_options
