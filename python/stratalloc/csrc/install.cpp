// Installs the allocator in PyTorch, and passes PyTorch's settings to the library.
#include <c10/util/env.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <sstream>

#include "allocator.h"
#include "host.h"

namespace stratalloc_torch {

namespace {

using c10::CachingAllocator::ConfigTokenizer;

// Returns a configuration string for PyTorch's parser: with PyTorch's spelling of flags, and without
// `backend`, because PyTorch compares that with its current backend.
std::string for_pytorch(const std::string& conf) {
  ConfigTokenizer tokens(conf);
  std::string text;
  for (size_t at = 0; at < tokens.size(); at++) {
    if (tokens[at] != "backend" || (at > 0 && tokens[at - 1] != ",")) {
      text += tokens[at] == "true" ? "True" : tokens[at] == "false" ? "False" : tokens[at];
      continue;
    }
    // Skips the colon, the value and the comma behind it.
    at += at + 3 < tokens.size() && tokens[at + 3] == "," ? 3 : 2;
  }
  return text;
}

// Makes PyTorch's parsers ignore the keys that only the library knows.
void make_keys_known() {
  std::istringstream names(text_of(0, STRATALLOC_TEXT_CONF_KEYS));
  for (std::string name; std::getline(names, name, ',');) {
    Config::getMutableKeys().insert(name);
  }
}

// Makes PyTorch read the environment now, without the key `backend`. PyTorch still uses some settings
// itself, such as those of pinned memory, and reports an invalid string now.
void read_environment() {
  const char* names[] = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"};
  std::vector<std::pair<const char*, std::string>> before;
  auto put_back = [&] {
    for (const auto& [name, value] : before) {
      c10::utils::set_env(name, value.c_str());
    }
  };
  for (const char* name : names) {
    if (auto value = c10::utils::get_env(name)) {
      before.emplace_back(name, *value);
      c10::utils::set_env(name, for_pytorch(*value).c_str());
    }
  }
  try {
    Config::instance();
    CudaConfig::instance();
  } catch (...) {
    put_back();
    throw;
  }
  put_back();
}

// Makes PyTorch read `ALLOC_CONF` as well, for the settings that PyTorch uses itself.
void heed_own_variable() {
  auto conf = c10::utils::get_env("ALLOC_CONF");
  if (!conf) {
    return;
  }
  try {
    Config::instance().parseArgs(for_pytorch(*conf));
    Config::callDeviceConfigParserHook(for_pytorch(*conf));
  } catch (const c10::Error& error) {
    std::fprintf(
        stderr,
        "stratalloc: warning: PyTorch cannot read ALLOC_CONF for its pinned memory: %s\n",
        error.what_without_backtrace());
  }
}

// The settings that PyTorch parses itself, from the last string that both PyTorch and the library
// accepted.
class PytorchHalf {
 public:
  void keep() {
    kept_ = kept_settings();
    last_ = Config::last_allocator_settings();
  }

  // Restores these settings in PyTorch. First sets the keys that keep their values when another string
  // is parsed. Parsing the last accepted string again then sets the other keys.
  void put_back(const ConfigHook& device_keys) {
    std::string changed;
    auto now = kept_settings();
    for (const auto& [key, value] : kept_) {
      bool is_same = std::find(now.begin(), now.end(), std::pair(key, value)) != now.end();
      if (!is_same) {
        changed += (changed.empty() ? "" : ",") + key + ":" + value;
      }
    }
    for (const auto& text : {for_pytorch(changed), for_pytorch(last_)}) {
      Config::instance().parseArgs(text);
      device_keys(text);
    }
  }

 private:
  std::vector<std::pair<std::string, std::string>> kept_;
  std::string last_;
};

// Passes strings that the program gives to PyTorch to the library as well. A string is applied by both
// and on all devices, or not at all.
void heed_settings() {
  auto pytorch = config_hook();
  auto half = std::make_shared<PytorchHalf>();
  half->keep();
  auto hook = [pytorch, half](const std::string& conf) {
    static auto* lock = new std::mutex;
    std::lock_guard<std::mutex> guard(*lock);
    try {
      check(library.check_conf(conf.c_str()));
      pytorch(for_pytorch(conf));
      HostAllocator::get().configure(conf);
      Allocator::get().configure(conf);
    } catch (...) {
      half->put_back(pytorch);
      throw;
    }
    half->keep();
  };
  set_config_hook(hook);
}

// Returns the address at which the library that contains `address` is loaded.
const void* library_of(const void* address) {
  Dl_info info{};
  return dladdr(address, &info) ? info.dli_fbase : nullptr;
}

// Returns true if the allocator is one of PyTorch's own. Their code is in the library that also has the
// pointer to the allocator in use.
bool is_built_in(const torch_cuda::CUDAAllocator* allocator) {
  auto* functions = *reinterpret_cast<const void* const*>(allocator);
  return library_of(functions) == library_of(&torch_cuda::allocator);
}

void install(const char* path) {
  auto* current = torch_cuda::get();
  TORCH_CHECK(!current->initialized(), "CUDA is in use already; install() has to come before its first use");
  TORCH_CHECK(is_built_in(current), "PyTorch has another allocator already: ", current->name());
  auto missing = library.load(path);
  TORCH_CHECK(missing.empty(), missing);
  // From here on `compat:pytorch` means the version of this PyTorch.
  check(library.torch_version(TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR));
  make_keys_known();
  read_environment();
  heed_own_variable();
  // PyTorch allows sharing unless the variable is 0. Any other value counts as 1.
  auto shares = c10::utils::get_env("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC");
  check(library.torch_share_pages(!shares || *shares != "0"));
  heed_settings();
  auto* ours = &Allocator::get();
  torch_cuda::allocator.store(ours);
  // Tries priorities from the lowest up, so that another allocator can still replace this one with a
  // higher one.
  for (int priority = 0; priority < 256; priority++) {
    c10::SetAllocator(c10::DeviceType::CUDA, ours, static_cast<uint8_t>(priority));
    if (c10::GetAllocator(c10::DeviceType::CUDA) == ours) {
      break;
    }
  }
}

// Calls `work`. Returns 0, or 1 with the reason in `error`, cut to `size` bytes.
template <class Work>
int caught(Work work, char* error, size_t size) {
  try {
    work();
    return 0;
  } catch (const c10::Error& failed) {
    std::snprintf(error, size, "%s", failed.what_without_backtrace());
  } catch (const std::exception& failed) {
    std::snprintf(error, size, "%s", failed.what());
  }
  return 1;
}

} // namespace

} // namespace stratalloc_torch

// Returns the version of PyTorch that this object was compiled for. The object fits no other version,
// because PyTorch's class may have other virtual functions there.
extern "C" __attribute__((visibility("default"))) const char* stratalloc_torch_built_for() {
  return TORCH_VERSION;
}

// Installs the library at `path` as PyTorch's allocator. Returns 0, or 1 with the reason in `error`, cut
// to `size` bytes.
extern "C" __attribute__((visibility("default"))) int stratalloc_torch_install(
    const char* path,
    char* error,
    size_t size) {
  return stratalloc_torch::caught([&] { stratalloc_torch::install(path); }, error, size);
}

// Installs the library as PyTorch's host allocator, with a configuration string for it. The function above
// was called before. Returns 0, or 1 with the reason in `error`, cut to `size` bytes.
extern "C" __attribute__((visibility("default"))) int stratalloc_torch_install_pinned(
    const char* conf,
    char* error,
    size_t size) {
  return stratalloc_torch::caught(
      [&] { stratalloc_torch::HostAllocator::get().install(conf); }, error, size);
}
