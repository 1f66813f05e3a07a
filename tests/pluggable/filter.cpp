// A library that manages pools as PyTorch's own allocator does: it copies the filter and calls the copy.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

using Stream = void *;
using PoolId = std::pair<unsigned long long, unsigned long long>;

static std::mutex lock;
static std::vector<std::pair<PoolId, std::function<bool(Stream)>>> scopes;
static uintptr_t next_block = 0x100000;

extern "C" {

// The address shows which pool served the request: low addresses belong to the default pool,
// others have the last byte of the pool's id, plus one, in front.
void *pool_alloc(size_t size, int, Stream stream) {
    std::lock_guard<std::mutex> guard(lock);
    uintptr_t found = next_block;
    next_block += (size + 511) / 512 * 512;
    for (auto scope = scopes.rbegin(); scope != scopes.rend(); ++scope)
        if (scope->second(stream)) return (void *)(found + (((scope->first.second & 0xFF) + 1) << 40));
    return (void *)found;
}

void pool_free(void *, size_t, int, Stream) {}

void pool_begin(int, PoolId id, std::function<bool(Stream)> filter) {
    std::lock_guard<std::mutex> guard(lock);
    scopes.emplace_back(id, std::move(filter));
    std::function<bool(Stream)> copy = scopes.back().second;
    scopes.back().second = copy;
}

void pool_end(int, PoolId id) {
    std::lock_guard<std::mutex> guard(lock);
    for (auto scope = scopes.begin(); scope != scopes.end(); ++scope)
        if (scope->first == id) {
            scopes.erase(scope);
            return;
        }
}

void pool_release(int, PoolId) {}
}
