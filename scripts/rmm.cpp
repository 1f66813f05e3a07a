// Uses the resource of stratalloc_rmm.hpp as RMM's programs use a resource, and times an allocation and a free
// of 512 bytes in turn with RMM's pool. Prints the median of each, and that of the rounds' ratios.
//
// Build it with these options, where RMM is the folder of the package librmm and LOGGER that of rapids_logger:
//
//     -std=c++20 -O2 -DLIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE -I crates/ffi/include -I RMM/include
//     -I RMM/include/rapids -I LOGGER/include -lrmm -lrapids_logger -lstratalloc -lcudart

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include <rmm/device_uvector.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/per_device_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>

#include "stratalloc_rmm.hpp"

static_assert(cuda::mr::resource_with<stratalloc::rmm_resource, cuda::mr::device_accessible>);

template <class Resource>
static double pair_ns(Resource& resource, cuda::stream_ref stream) {
  constexpr int count = 200'000;
  auto const start = std::chrono::steady_clock::now();
  for (int i = 0; i < count; ++i) {
    resource.deallocate(stream, resource.allocate(stream, 512, 256), 512, 256);
  }
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / count;
}

static double median(std::vector<double> all) {
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}

int main() {
  cudaStream_t raw;
  if (cudaStreamCreate(&raw) != cudaSuccess) {
    std::printf("no device\n");
    return 1;
  }
  cuda::stream_ref const stream{raw};
  stratalloc::rmm_resource ours;
  rmm::mr::cuda_memory_resource device;
  rmm::mr::pool_memory_resource pool{device, 1 << 20};
  std::vector<double> of_ours, of_pool, ratios;
  for (int round = 0; round < 11; ++round) {
    double const a = pair_ns(ours, stream), b = pair_ns(pool, stream);
    if (round >= 2) {  // The first rounds warm the caches.
      of_ours.push_back(a);
      of_pool.push_back(b);
      ratios.push_back(a / b);
    }
  }
  std::printf("%.0f ns, pool %.0f ns: %.2f of at most 1.0", median(of_ours), median(of_pool), median(ratios));

  rmm::mr::set_current_device_resource(ours);
  {
    rmm::device_uvector<float> values(1000, stream);
    float const one = 1;
    values.set_element(999, one, stream);
    if (values.element(999, stream) != one) {
      std::printf("; wrong value");
      return 1;
    }
  }
  try {
    (void)ours.allocate(stream, std::size_t{1} << 45, 256);
    return 1;
  } catch (rmm::out_of_memory const& error) {
    std::printf("; a request of 32 TiB: %.60s...\n", error.what());
  }
}
