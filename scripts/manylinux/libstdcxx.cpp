// Functions that the headers of GCC 12 call and that libstdc++ of GCC 8 does not have. manylinux_2_28 allows only
// symbols of GCC 8, so the object contains them.
#include <new>
#include <sstream>

namespace std {
void __throw_bad_array_new_length() {
  throw bad_array_new_length();
}
} // namespace std

template std::basic_ostringstream<char>::basic_ostringstream();
#if __cplusplus >= 202002L
template std::string std::basic_ostringstream<char>::str() const&;
template std::basic_stringbuf<char>::basic_stringbuf(std::string&&, std::ios_base::openmode);
template std::string std::basic_stringbuf<char>::str() const&;
template std::string std::basic_stringbuf<char>::str() &&;
template std::basic_istringstream<char>::basic_istringstream(std::string&&, std::ios_base::openmode);
#endif
