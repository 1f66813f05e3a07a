// The parts of CUDA's runtime that the headers for RMM and TensorRT use.
#pragma once
using cudaStream_t = struct CUstream_st*;
#define cudaStreamLegacy (reinterpret_cast<cudaStream_t>(1))
#define cudaStreamPerThread (reinterpret_cast<cudaStream_t>(2))
enum cudaError_t { cudaSuccess = 0 };
inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return cudaSuccess;
}
