// Stands in for the CUDA runtime under an exported launcher: prints what it is asked to launch, and launches nothing.
// Usage: <program> <kinds of the kernel's parameters: T a tensor map, 8 and 4 bytes> <SMs of each device, comma-separated> M N K ...
// Each shape is launched on each device, in a stream of a number of its own.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include EXPORTED_HEADER

#ifndef EXPORTED_WORKSPACE  // an argument with its comma, where the launch has one
#define EXPORTED_WORKSPACE
#endif

static std::string kinds;
static std::vector<int> sms;
static int current = 0;
static unsigned calls = 0;

static CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* dims,
                       const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave interleave,
                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  const unsigned long long words[16] = {
      reinterpret_cast<unsigned long long>(address), dims[0], dims[1], strides[0], box[0], box[1],
      static_cast<unsigned long long>(swizzle), static_cast<unsigned long long>(promotion),
      rank == 2 && steps[0] == 1 && steps[1] == 1 && type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 &&
          interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE};
  std::memcpy(map, words, sizeof words);
  return CUDA_SUCCESS;
}

extern "C" {

cudaError_t cudaGetDevice(int* device) { return *device = current, cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? sms[device] : attribute == cudaDevAttrComputeCapabilityMajor ? 9 : 0;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int value) {
  std::printf("attribute %d %d\n", static_cast<int>(attribute), value);
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** found, unsigned version, unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool known = !std::strcmp(symbol, "cuTensorMapEncodeTiled") && version == 12000 && flags == cudaEnableDefault;
  *found = known ? reinterpret_cast<void*>(&encode) : nullptr;
  *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void** parameters) {
  unsigned cluster[3] = {1, 1, 1};
  int dependent = 0;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& a = config->attrs[i];
    if (a.id == cudaLaunchAttributeClusterDimension)
      cluster[0] = a.val.clusterDim.x, cluster[1] = a.val.clusterDim.y, cluster[2] = a.val.clusterDim.z;
    else if (a.id == cudaLaunchAttributeProgrammaticStreamSerialization)
      dependent = a.val.programmaticStreamSerializationAllowed;
    else
      std::printf("unknown launch attribute %d\n", static_cast<int>(a.id));
  }
  std::printf("launch %llu  %u %u %u  %u %u %u  %u %u %u  %zu %d ", reinterpret_cast<unsigned long long>(config->stream),
              config->gridDim.x, config->gridDim.y, config->gridDim.z, config->blockDim.x, config->blockDim.y,
              config->blockDim.z, cluster[0], cluster[1], cluster[2], config->dynamicSmemBytes, dependent);
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    unsigned long long words[16] = {};
    std::memcpy(words, parameters[i], kinds[i] == 'T' ? 128 : kinds[i] - '0');
    for (int word = 0; word < (kinds[i] == 'T' ? 9 : 1); ++word) std::printf(" %llu", words[word]);
  }
  std::printf("\n");
  return cudaSuccess;
}

// What a program does to be linked with a kernel.
void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(...) {}
char __cudaInitModule(void**) { return 0; }
cudaError_t __cudaGetKernel(...) { return cudaSuccess; }
cudaError_t __cudaLaunchKernel(...) { return cudaErrorUnknown; }
cudaError_t __cudaPopCallConfiguration(...) { return cudaErrorUnknown; }

}  // extern "C"

template <class T>
static T* at(unsigned long long address) {
  return reinterpret_cast<T*>(address);
}

int main(int count, char** words) {
  kinds = words[1];
  for (char* word = std::strtok(words[2], ","); word; word = std::strtok(nullptr, ",")) sms.push_back(std::atoi(word));
  for (int i = 3; i + 2 < count; i += 3)
    for (current = 0; current < static_cast<int>(sms.size()); ++current) {
      const cudaError_t error =
          rungs::EXPORTED(at<__nv_bfloat16>(1ull << 40), at<__nv_bfloat16>(2ull << 40), at<__nv_bfloat16>(3ull << 40),
                          std::atoll(words[i]), std::atoll(words[i + 1]), std::atoll(words[i + 2]), EXPORTED_WORKSPACE
                          at<CUstream_st>(++calls));
      if (error) std::printf("error %d\n", static_cast<int>(error));
    }
}
