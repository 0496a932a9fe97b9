// Launches that begin before the one ahead of them in the stream has ended. One free function per instruction, as in
// ptx.cuh; sm_90 on.
#pragma once

#include "ptx.cuh"

namespace ptx {

// Until the launch ahead in the stream has ended and its writes are visible. Does nothing without the launch attribute.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Once every CTA has come here or ended, the launch behind this one may begin.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace ptx
