// Functions inside of each other, for the seeds of the target `symbols`:
// c++ -O2 -gdwarf-4 (-gdwarf-5) -shared -nostdlib -fPIC -fno-asynchronous-unwind-tables -Wl,--build-id=none,-z,noseparate-code,--hash-style=gnu

namespace shop {
template <typename T> struct Basket {
    T items[4];
    inline __attribute__((always_inline)) T most() const {
        T best = items[0];
        for (const T &item : items)
            if (item > best)
                best = item;
        return best;
    }
};

static inline __attribute__((always_inline)) int twice(const Basket<int> &basket) { return basket.most() * 2; }
} // namespace shop

extern "C" int outer(const shop::Basket<int> *basket, int rounds) {
    int sum = 0;
    while (rounds-- > 0)
        sum += shop::twice(*basket) ^ rounds;
    return sum;
}

namespace shop {
__attribute__((noinline)) double total(const Basket<double> &basket) { return basket.most() + outer(nullptr, 0); }
} // namespace shop
