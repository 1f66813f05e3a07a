// A C++ program that calls as PyTorch does: functions loaded from the library by name, pool ids as pairs,
// filters as function objects. STRATALLOC_DEVICE is the kind of device.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

using Stream = void *;
using PoolId = std::pair<unsigned long long, unsigned long long>;

#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            std::fprintf(stderr, "%s:%d: %s; %s\n", __FILE__, __LINE__, #condition, last_error());  \
            std::exit(1);                                                                  \
        }                                                                                  \
    } while (0)

static void *library;
static const char *last_error();

template <class F> static std::function<F> load(const char *name) {
    void *found = dlsym(library, name);
    if (!found) {
        std::fprintf(stderr, "no %s\n", name);
        std::exit(1);
    }
    return reinterpret_cast<F *>(found);
}

static const char *last_error() {
    static char text[2048];
    load<size_t(char *, size_t)>("stratalloc_last_error")(text, sizeof text);
    return text;
}

int main(int argc, char **argv) {
    if (argc != 2 || !(library = dlopen(argv[1], RTLD_NOW))) return 2;
    auto alloc = load<void *(size_t, int, Stream)>("stratalloc_torch_malloc");
    auto free = load<void(void *, size_t, int, Stream)>("stratalloc_torch_free");
    auto init = load<void(int)>("stratalloc_torch_init");
    auto reset = load<void()>("stratalloc_torch_reset");
    auto fraction = load<void(double, int)>("stratalloc_torch_memory_fraction");
    auto base = load<void *(void *, size_t *)>("stratalloc_torch_base_allocation");
    auto record = load<void(void *, Stream)>("stratalloc_torch_record_stream");
    auto begin = load<void(int, PoolId, std::function<bool(Stream)>)>(
        "stratalloc_torch_begin_allocate_to_pool");
    auto end = load<void(int, PoolId)>("stratalloc_torch_end_allocate_to_pool");
    auto release = load<void(int, PoolId)>("stratalloc_torch_release_pool");
    auto handle_of = load<int(int, uint64_t *)>("stratalloc_torch_handle");
    auto destroy = load<int(uint64_t)>("stratalloc_destroy");
    auto json = load<int(uint64_t, uint32_t, char *, size_t, size_t *)>("stratalloc_text_write");
    auto counts = [&](int device, const char *words) {
        uint64_t handle = 0;
        std::vector<char> text(16384);
        CHECK(handle_of(device, &handle) == 0 && handle != 0);
        CHECK(json(handle, 0, text.data(), text.size(), nullptr) == 0);
        return std::strstr(text.data(), words) != nullptr;
    };

    init(2);
    CHECK(alloc(0, 0, nullptr) == nullptr && *last_error() == 0);
    void *a = alloc(3 << 20, 0, nullptr);
    void *b = alloc(64, 1, nullptr);
    CHECK(a && b);
    size_t size = 0;
    CHECK(base(static_cast<char *>(a) + 512, &size) == a && size == 20 << 20);
    CHECK(base(&size, nullptr) == &size);
    record(a, reinterpret_cast<Stream>(16));
    record(b, reinterpret_cast<Stream>(16));
    record(nullptr, nullptr);
    free(a, 3 << 20, 0, nullptr);
    free(b, 64, 1, nullptr);
    free(nullptr, 0, 0, nullptr);
    reset();
    CHECK(counts(0, "\"reserved_bytes.all.current\":0,"));
    CHECK(counts(1, "\"reserved_bytes.all.current\":0,"));
    CHECK(*last_error() != 0); // The call `base(&size, ..)` failed.

    // The filter routes one stream to the pool, for every thread. It is destroyed with its scope.
    const PoolId pool{9, 0};
    auto calls = std::make_shared<std::atomic<int>>(0);
    const Stream routed = reinterpret_cast<Stream>(16);
    begin(0, pool, [calls, routed](Stream stream) { ++*calls; return stream == routed; });
    CHECK(calls.use_count() == 2);
    void *elsewhere = alloc(1024, 0, nullptr);
    std::thread([&] { a = alloc(1024, 0, routed); }).join();
    void *here = alloc(1024, 0, routed);
    CHECK(*calls == 3 && base(a, nullptr) == base(here, nullptr));
    CHECK(base(elsewhere, nullptr) != base(a, nullptr));
    free(elsewhere, 1024, 0, nullptr);
    free(here, 1024, 0, routed);

    // A newer scope of another thread does not get this thread's requests.
    const PoolId another{10, 0};
    std::thread([&] {
        const auto own = std::this_thread::get_id();
        begin(0, another, [own](Stream) { return std::this_thread::get_id() == own; });
    }).join();
    here = alloc(1024, 0, routed);
    CHECK(base(here, nullptr) == base(a, nullptr));
    free(here, 1024, 0, routed);
    end(0, another);
    release(0, another);

    begin(0, pool, [](Stream) { return true; }); // Fails, because a scope is open. That scope stays.
    end(0, pool);
    CHECK(calls.use_count() == 1);
    b = alloc(1024, 0, routed);
    CHECK(a && b && base(a, nullptr) != base(b, nullptr));
    free(a, 1024, 0, nullptr);
    free(b, 1024, 0, nullptr);
    reset();
    CHECK(counts(0, "\"reserved_bytes.all.current\":2097152,"));
    release(0, pool);
    reset();
    CHECK(counts(0, "\"reserved_bytes.all.current\":0,"));

    // Out of memory: returns null, and the message can be read.
    fraction(0.0, 0);
    CHECK(alloc(64, 0, nullptr) == nullptr && std::strstr(last_error(), "out of memory on device 0"));
    fraction(1.0, 0);

    // Calls that PyTorch never makes.
    for (int device : {-1, 128, 1 << 30, -(1 << 30)}) {
        CHECK(alloc(1, device, nullptr) == nullptr);
        free(&size, 1, device, nullptr);
        fraction(0.5, device);
        begin(device, pool, nullptr);
        end(device, pool);
        release(device, pool);
        uint64_t handle = 0;
        CHECK(handle_of(device, &handle) != 0 && handle == 0);
    }
    CHECK(handle_of(0, nullptr) != 0);
    free(&size, 1, 0, nullptr);
    fraction(7.0, 0);
    record(&size, nullptr);
    for (PoolId wild : {PoolId{0, 0}, PoolId{~0ULL, ~0ULL}, PoolId{1, 1}}) {
        end(0, wild);
        release(0, wild);
    }
    begin(0, {0, 0}, nullptr);
    begin(0, {~0ULL, ~0ULL}, nullptr);
    uint64_t handle = 0;
    CHECK(handle_of(0, &handle) == 0 && destroy(handle) != 0);

    std::vector<std::thread> threads;
    for (int number = 0; number < 8; number++)
        threads.emplace_back([&, number] {
            // Up to 20 blocks of each thread stay live, also while other threads have open scopes.
            std::vector<void *> held;
            for (int round = 0; round < 2000; round++) {
                PoolId own{100ULL + number, 0};
                if (round % 100 == 0) begin(2, own, nullptr);
                void *block = alloc(1 + (number * 7919 + round * 613) % 300000, 2, Stream(size_t(number % 3)));
                CHECK(block);
                held.push_back(block);
                if (round % 100 == 50) end(2, own);
                if (round % 100 == 51) release(2, own);
                if (held.size() > 20) {
                    free(held.front(), 0, 2, nullptr);
                    held.erase(held.begin());
                }
            }
            for (void *block : held) free(block, 0, 2, nullptr);
        });
    for (auto &thread : threads) thread.join();
    CHECK(counts(2, "\"allocation.all.current\":0,"));
    reset();
    CHECK(counts(2, "\"reserved_bytes.all.current\":0,"));
    std::puts("good");
    return 0;
}
