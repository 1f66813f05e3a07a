#pragma once
#include <new>
#include <string>
namespace rmm {
class bad_alloc : public std::bad_alloc {
 public:
  explicit bad_alloc(std::string text) : text_{text} {}
  char const* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};
class out_of_memory : public bad_alloc {
  using bad_alloc::bad_alloc;
};
}  // namespace rmm
