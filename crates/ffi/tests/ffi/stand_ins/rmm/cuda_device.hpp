#pragma once
namespace rmm {
struct cuda_device_id {
  int id;
  int value() const { return id; }
};
struct cuda_set_device_raii {
  explicit cuda_set_device_raii(cuda_device_id) {}
};
inline cuda_device_id get_current_cuda_device() { return {0}; }
}  // namespace rmm
