"""What mma.sync alone reaches on the GPU at hand, the ceiling of every rung of `gemm` and `gemm_tuned`: needs nvcc on PATH.

An index, slug or UUID chooses among several GPUs.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow"))

from rungs import clock, gpu, launcher

SOURCE = Path(__file__).with_suffix(".cu")
FLOP = 2 * 16 * 8 * 16
WARPS, MMA_PER_ITERATION, ITERATIONS, LAUNCHES = 8, 32, 20_000, 5


def main(device: str = "auto") -> None:
    chosen = clock.choose(device)
    if chosen is None or chosen.arch is None:
        sys.exit("mma_peak: there is no GPU here that rungs knows: run it on one that config/devices/ describes.")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "mma_peak.cubin"
        subprocess.run(["nvcc", "-std=c++20", "-cubin", f"-arch={chosen.arch}", SOURCE, "-o", cubin], check=True)
        session = gpu.Session(chosen.uuid)
        _library, function = launcher.load_function(cubin, "mma_peak")
        torch, sms = session.torch, session.sms
        sums = torch.zeros(sms * 32 * WARPS, device="cuda")
        cycles = torch.zeros(sms, dtype=torch.int64, device="cuda")
        values = (ctypes.c_uint64(sums.data_ptr()), ctypes.c_uint64(cycles.data_ptr()), ctypes.c_int(ITERATIONS))
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
        print(f"{chosen}, {sms} SMs; {WARPS} warps an SM, m16n8k16 bf16 with fp32 accumulate, operands in registers")
        for _ in range(5):
            start = session.event()
            for _ in range(LAUNCHES):
                stream, address = session.stream.cuda_stream, ctypes.addressof(pointers)
                result = launcher.driver.cuLaunchKernel(function, sms, 1, 1, 32 * WARPS, 1, 1, 0, stream, address, 0)
                launcher.check(result, "Launching mma_peak")
            end = session.event()
            session.wait(end)
            us = session.elapsed_us(start, end) / LAUNCHES
            count, took = ITERATIONS * MMA_PER_ITERATION * WARPS, float(cycles.double().median())
            print(
                f"{4 * took / count:.2f} cycles per mma and scheduler, {FLOP * count / took:.0f} FLOP per cycle and SM,"
                f" {FLOP * count * sms / us / 1e6:.0f} TFLOP/s at {took / us:.0f} MHz"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
