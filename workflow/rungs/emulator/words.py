"""The modifiers that PTX has: a word that is none of them is an error of the file, whatever the decoder makes of the rest."""

from __future__ import annotations

import re

from rungs.emulator.parser import Instruction

_TEXT = """
    pred b8 b16 b32 b64 b128 u8 u16 u32 u64 s8 s16 s32 s64 f16 f16x2 bf16 bf16x2 tf32 f32 f64 u16x2 s16x2
    e4m3 e5m2 e4m3x2 e5m2x2 e2m1 e2m1x2 e2m3 e2m3x2 e3m2 e3m2x2 ue8m0 ue8m0x2 ue4m3 f32x2 u4 s4 b1 b4x16 b6x16 b6p2x16
    rn rz rm rp rna rni rzi rmi rpi rs ftz sat satfinite relu approx full xorsign abs NaN noftz oob cc
    eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan
    and or xor not popc add min max inc dec cas exch wide shiftamt
    param global shared const local to generic unified volatile relaxed acquire release acq_rel sc weak mmio cta gpu sys
    cluster gl ca cg cs lu cv wb wt nc v2 v4 v8 x1 x2 x4 trans m8n8 sync aligned row col mma_async
    l r clamp wrap f4e b4e rc8 ecl ecr rc16 up down bfly idx all any uni ballot warp red arrive wait read
    init inval expect_tx complete_tx test_wait try_wait parity noComplete pending_count noinc arrive_drop
    async bulk tensor 1d 2d 3d 4d 5d tile im2col im2col_no_offs bulk_group commit_group wait_group wait_all mbarrier
    prefetch prefetchu L1 L2 tensormap fence proxy alias mbarrier_init ptx reduce barrier launch_dependents
    dp2a dp4a sum sp noreturn gather4 scatter4 exclusive fractional range cvt cp_mask
"""
_WORDS = frozenset(_TEXT.split())
_FAMILIES = re.compile(
    r"m\d+n\d+k\d+|(?:L1|L2|level)::\w+(?:::\w+)?|(?:shared|mbarrier|multicast|cluster|async|tile|im2col|proxy|tensormap|sync_restrict)::[\w:]+"
    r"|sp::[\w:]+|kind::\w+|scale_vec::\w+|cta_group::\d|block_scale"
)


def unknown(ins: Instruction) -> str:
    """The first modifier that is no word of PTX, or an empty string."""
    return next((word for word in ins.modifiers if word not in _WORDS and not _FAMILIES.fullmatch(word)), "")
