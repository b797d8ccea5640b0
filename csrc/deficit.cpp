#include "deficit.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define TDP_X86 1
#endif

namespace tdp {

namespace {

Largest plain(const double* weights, const double* counts, int64_t padded, double drawn) {
    Largest found{weights[0] * drawn - counts[0], 0};
    for (int64_t i = 1; i < padded; ++i) {
        const double deficit = weights[i] * drawn - counts[i];
        if (deficit > found.deficit) found = {deficit, i};
    }
    return found;
}

#ifdef TDP_X86
// The arrays are taken in blocks: a block's maximum needs no bookkeeping, a new overall maximum is rare, and only the
// block that holds it is searched for the place.
constexpr int64_t kBlock = 8 * kDeficitLanes;

__attribute__((target("avx2"))) Largest avx2(const double* weights, const double* counts, int64_t padded,
                                              double drawn) {
    const __m256d factor = _mm256_set1_pd(drawn);
    const auto deficit = [&](int64_t i) __attribute__((target("avx2"), always_inline)) {
        return _mm256_sub_pd(_mm256_mul_pd(_mm256_loadu_pd(weights + i), factor), _mm256_loadu_pd(counts + i));
    };
    Largest found{0, -1};
    for (int64_t begin = 0; begin < padded; begin += kBlock) {
        const int64_t end = begin + kBlock < padded ? begin + kBlock : padded;
        __m256d a = deficit(begin), b = deficit(begin + 4), c = deficit(begin + 8), d = deficit(begin + 12);
        for (int64_t i = begin + kDeficitLanes; i < end; i += kDeficitLanes) {
            a = _mm256_max_pd(a, deficit(i));
            b = _mm256_max_pd(b, deficit(i + 4));
            c = _mm256_max_pd(c, deficit(i + 8));
            d = _mm256_max_pd(d, deficit(i + 12));
        }
        const __m256d four = _mm256_max_pd(_mm256_max_pd(a, b), _mm256_max_pd(c, d));
        const __m128d two = _mm_max_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
        const double top = _mm_cvtsd_f64(_mm_max_sd(two, _mm_unpackhi_pd(two, two)));
        if (begin == 0 || top > found.deficit) found = {top, begin};
    }
    // Sixteen at a time without a branch, because the place inside them is hard to predict.
    const __m256d top = _mm256_set1_pd(found.deficit);
    for (int64_t i = found.index;; i += kDeficitLanes) {
        unsigned equal = 0;
        for (int v = 0; v < 4; ++v)
            equal |= static_cast<unsigned>(_mm256_movemask_pd(_mm256_cmp_pd(deficit(i + 4 * v), top, _CMP_EQ_OQ)))
                     << (4 * v);
        if (equal) return {found.deficit, i + __builtin_ctz(equal)};
    }
}
#endif

}  // namespace

Largest largest_deficit(const double* weights, const double* counts, int64_t padded, double drawn) {
#ifdef TDP_X86
    static const bool has_avx2 = (__builtin_cpu_init(), __builtin_cpu_supports("avx2"));
    if (has_avx2) return avx2(weights, counts, padded, drawn);
#endif
    return plain(weights, counts, padded, drawn);
}

}  // namespace tdp
