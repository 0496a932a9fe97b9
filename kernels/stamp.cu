// Writes each SM's cycle counter and the global nanosecond timer. Two stamps around a timed sample give the SM clock
// the sample really ran at: cycles over nanoseconds, per SM, matched by %smid.
#include "ptx.cuh"

// out[smid] = {clock64, globaltimer}; an SM that got no block keeps the zeros that the host wrote.
extern "C" __global__ void stamp(ulonglong2* out) { out[ptx::smid()] = {ptx::clock64_now(), ptx::globaltimer()}; }
