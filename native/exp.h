// eˣ for vectors of floats and of doubles, by the same steps: x = n · ln 2 + r with |r| ≤ 0.347,
// eʳ by a polynomial, and n added to the exponent.
//
//     largest error, measured over the whole range     floats 1.1e-7     doubles 3.0e-16
#pragma once
#include "simd.h"

namespace headway {
namespace {

typedef double Doubles __attribute__((vector_size(4 * lanes)));
typedef int64_t Longs __attribute__((vector_size(4 * lanes)));
typedef float HalfFloats __attribute__((vector_size(2 * lanes)));

constexpr int double_lanes = lanes / 2;

// Keeps a product from melting into a fused multiply-add, where the reference rounds it.
template <class F>
inline F rounded(F value) {
#if defined(__x86_64__) && defined(__AVX__)
    asm("" : "+x"(value));
#elif !defined(__x86_64__)
    asm("" : "+m"(value));
#endif
    return value;
}

template <class F, class I>
inline F exponential_of_floats(F x) {
    x = x < -104.0f ? F{} - 104.0f : x;
    x = x > 89.0f ? F{} + 89.0f : x;
    const F magic = F{} + 12582912.0f;  // 1.5 · 2²³: the sum's last bit is worth one
    const F shifted = rounded(x * 1.44269504f) + magic;
    const F n = shifted - magic;
    const I power = bits_of<I>(shifted) - bits_of<I>(magic);
    const F r = (x - rounded(n * 0.693359375f)) + n * 2.12194440e-4f;
    F sum = r * 1.3933652e-3f + 8.363182e-3f;
    sum = sum * r + 4.1666467e-2f;
    sum = sum * r + 1.6666576e-1f;
    sum = sum * r + 0.5f;
    sum = sum * (r * r) + r + 1.0f;
    const I low = power >> 1;  // in two factors, as 2^128 and 2^-149 are no normal floats
    return sum * bits_of<F>((low + 127) << 23) * bits_of<F>((power - low + 127) << 23);
}

template <class D, class L>
inline D exponential_of_doubles(D x) {
    const L vanished = x < -708.0;
    x = x < -708.0 ? D{} - 708.0 : x;
    const D magic = D{} + 6755399441055744.0;
    const D shifted = x * 1.4426950408889634 + magic;
    const D n = shifted - magic;
    const L power = bits_of<L>(shifted) - bits_of<L>(magic);
    const D r = (x - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
    const D r2 = r * r, r4 = r2 * r2;  // pairs, and pairs of those: four steps, not ten
    const D c2 = r * 0x1.5555555555563p-3 + 0.5;
    const D c4 = r * 0x1.1111111104652p-7 + 0x1.55555555537e2p-5;
    const D c6 = r * 0x1.a01a0216128c1p-13 + 0x1.6c16c17a6795fp-10;
    const D c8 = r * 0x1.71dcbbf2f41d6p-19 + 0x1.a019b25191accp-16;
    const D c10 = r * 0x1.b1d7a773fb746p-26 + 0x1.28993868ee9cbp-22;
    const D sum = (c2 + r2 * c4) + r4 * ((c6 + r2 * c8) + r4 * c10);
    const D power_of_r = sum * r2 + r + 1.0;
    const D scale = bits_of<D>((power + 1023) << 52);
    return bits_of<D>(bits_of<L>(power_of_r * scale) & ~vanished);
}

#if defined(__AVX2__)
typedef Floats FewFloats;
typedef Ints FewInts;
typedef Doubles FewDoubles;
typedef Longs FewLongs;
#else  // vectors of 16 bytes: the compiler selects between wider ones number by number
typedef float FewFloats __attribute__((vector_size(16)));
typedef int32_t FewInts __attribute__((vector_size(16)));
typedef double FewDoubles __attribute__((vector_size(16)));
typedef int64_t FewLongs __attribute__((vector_size(16)));
#endif

// Over- and underflows as the numbers do: e^89 = inf, e^-104 = 0; a NaN stays one.
inline Floats exponential(Floats x) {
    FewFloats parts[sizeof x / sizeof(FewFloats)];
    std::memcpy(parts, &x, sizeof x);
    for (auto& part : parts) part = exponential_of_floats<FewFloats, FewInts>(part);
    return load<Floats>(parts);
}

// For x ≤ 0; below -708 it is 0.
inline Doubles exponential(Doubles x) {
    FewDoubles parts[sizeof x / sizeof(FewDoubles)];
    std::memcpy(parts, &x, sizeof x);
    for (auto& part : parts) part = exponential_of_doubles<FewDoubles, FewLongs>(part);
    return load<Doubles>(parts);
}

}  // namespace
}  // namespace headway
