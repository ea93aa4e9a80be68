// Powers of two and tanh of vectors, within two units in the last place.
#pragma once
#include "simd.h"

namespace headway {
namespace {

constexpr float log2_e = 1.44269504f;

// 2^x for x at most 127; exactly 1 at 0, exactly 0 below -126, and NaN stays NaN.
//
// 2^3.3 = 2^3 · 2^0.3: adding 1.5 · 2^23 rounds 3.3 to 3 and leaves the 3 in the lowest bits.
inline Floats exp2_of(Floats x) {
    const Floats shifted = x + 12582912.0f;
    const Floats rest = x - (shifted - 12582912.0f);
    Floats power = rest * 0.00015461447f + 0.00133908668f;
    power = power * rest + 0.00961805694f;
    power = power * rest + 0.05550356954f;
    power = power * rest + 0.24022650719f;
    power = power * rest + 0.69314718246f;
    power = power * rest + 1.0f;
    const Floats whole = bits_of<Floats>((bits_of<Words>(shifted) << 23) + 0x3F800000u);
    return x < -126.0f ? Floats{} : power * whole;
}

// tanh(x) from y = 2 · log2(e) · x: (1 - t) / (1 + t) with t = 2^-|y|, and the sign of y.
inline Floats tanh_of_log2(Floats y) {
    const Words bits = bits_of<Words>(y), sign = bits & 0x80000000u;
    const Floats t = exp2_of(bits_of<Floats>(bits | 0x80000000u));
    return bits_of<Floats>(bits_of<Words>((1.0f - t) / (1.0f + t)) | sign);
}

}  // namespace
}  // namespace headway
