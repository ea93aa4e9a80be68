// What lies between the GEMMs of a layer: norms, ropes, gates. fp32 inside, whatever the type.
//
// Numbers are rounded to the type where the reference rounds them. So a 16-bit result differs from
// the reference only where a sum or an exponential, exact to 1e-7, falls on the other side of a
// rounding. Rows are computed independently. Many rows are shared by the threads, a few stay with
// the caller: 8 rows of 896 take 3 µs, waking a thread 25.
#pragma once
#include <algorithm>

#include "exp.h"
#include "pool.h"

namespace headway {
namespace {

constexpr int64_t numbers_each = 32768;  // of one chunk: about 14 µs
constexpr int64_t gate_costs = 8;        // as many as other numbers: an exponential and a quotient

// Calls work(row) for all rows, in chunks of about `numbers_each` numbers.
template <class Work>
void each_row(Pool& pool, int64_t rows, int64_t width, const Work& work) {
    const int64_t each = std::max<int64_t>(1, numbers_each / std::max<int64_t>(1, width));
    pool.run((rows + each - 1) / each, [&](int64_t chunk, int) {
        const int64_t end = std::min(rows, (chunk + 1) * each);
        for (int64_t row = chunk * each; row < end; ++row) work(row);
    });
}

// `count` numbers, the other lanes 0.
template <Type type>
inline Floats some_floats(const void* base, int64_t index, int64_t count) {
    if (count >= lanes) return floats_at(base, index, type);
    Floats found = {};
    for (int64_t lane = 0; lane < count; ++lane) found[lane] = number_at(base, index + lane, type);
    return found;
}

template <Type type>
inline void put_some(void* base, int64_t index, Floats values, int64_t count) {
    if (count >= lanes) {
        put_floats(base, index, values, type);
        return;
    }
    for (int64_t lane = 0; lane < count; ++lane) put_number(base, index + lane, values[lane], type);
}

template <Type type>
inline Floats as_type(Floats values) {
    if constexpr (type == Type::f32) {
        return rounded(values);
    } else if constexpr (type == Type::bf16) {
        return bits_of<Floats>(round_to_bf16(values) & 0xFFFF0000u);
    } else {
        uint16_t narrow[lanes];
        put_floats(narrow, 0, values, type);
        return floats_at(narrow, 0, type);
    }
}

// ── norm ────────────────────────────────────────────────────────────────────────────────────

// Four sums of lanes, then a tree over them: ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)) with 8.
inline float total_of(Floats (&sums)[4]) {
    const Floats all_sums = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float values[lanes];
    store(values, all_sums);
    for (int half = lanes / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) values[lane] += values[lane + half];
    return values[0];
}

template <Type type>
void norm_row(const Norm& job, int64_t row) {
    const int64_t at = row / job.inner * job.outer_stride + row % job.inner * job.inner_stride;
    const int64_t to = row * job.width;
    Floats sums[4] = {};
    for (int64_t begin = 0; begin < job.width; begin += 4 * lanes) {
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) {
            const int64_t i = begin + n * lanes;
            const Floats x = some_floats<type>(job.x, at + i, job.width - i);
            sums[n] += x * x;
        }
    }
    const float mean = total_of(sums) / static_cast<float>(job.width);
    const float scale = 1.0f / std::sqrt(mean + job.eps);
    for (int64_t i = 0; i < job.width; i += lanes) {
        const int64_t count = job.width - i;
        const Floats normed = rounded(some_floats<type>(job.x, at + i, count) * scale);
        const Floats weight = some_floats<type>(job.weight, i, count);
        const Floats y = job.offset != 0 ? normed * rounded(weight + job.offset)
                                         : weight * as_type<type>(normed);
        put_some<type>(job.y, to + i, y, count);
    }
}

void norm(Pool& pool, const Norm& job) {
    each_row(pool, job.rows, job.width, [&](int64_t row) {
        if (job.type == Type::f32) norm_row<Type::f32>(job, row);
        else if (job.type == Type::bf16) norm_row<Type::bf16>(job, row);
        else norm_row<Type::f16>(job, row);
    });
}

// ── rope ────────────────────────────────────────────────────────────────────────────────────

template <Type type>
void rope_token(const Rope& job, int64_t token) {
    const int64_t angle = job.positions ? job.positions[token] : token;
    const float* cosines = job.cosines + angle * job.half;
    const float* sines = job.sines + angle * job.half;
    for (int64_t head = 0; head < job.heads; ++head) {
        const int64_t from = token * job.x_token_stride + head * job.x_head_stride;
        const int64_t to = token * job.y_token_stride + head * job.y_head_stride;
        for (int64_t i = 0; i < job.half; i += lanes) {
            const int64_t count = job.half - i;
            const Floats first = some_floats<type>(job.x, from + i, count);
            const Floats second = some_floats<type>(job.x, from + job.half + i, count);
            const Floats cosine = some_floats<Type::f32>(cosines, i, count);
            const Floats sine = some_floats<Type::f32>(sines, i, count);
            const Floats low = rounded(first * cosine) - rounded(second * sine);
            const Floats high = rounded(second * cosine) + rounded(first * sine);
            put_some<type>(job.y, to + i, low, count);
            put_some<type>(job.y, to + job.half + i, high, count);
        }
        const int64_t left = job.size - 2 * job.half, width = size_of(type);
        if (left > 0)
            std::memmove(static_cast<char*>(job.y) + (to + 2 * job.half) * width,
                         static_cast<const char*>(job.x) + (from + 2 * job.half) * width,
                         left * width);
    }
}

void rope(Pool& pool, const Rope& job) {
    each_row(pool, job.tokens, job.heads * job.size, [&](int64_t token) {
        if (job.type == Type::f32) rope_token<Type::f32>(job, token);
        else if (job.type == Type::bf16) rope_token<Type::bf16>(job, token);
        else rope_token<Type::f16>(job, token);
    });
}

// ── gates ───────────────────────────────────────────────────────────────────────────────────

// x / y, y at least 1; for types of 16 bits right to 1e-7, which is sooner done than a division.
template <Type type>
inline Floats quotient(Floats x, Floats y) {
#if defined(__AVX512F__)
    if constexpr (type != Type::f32) {
        const __m512 divisor = bits_of<__m512>(y);
        const Floats guess = bits_of<Floats>(_mm512_rcp14_ps(divisor));
        const Floats better = guess + guess * (1.0f - y * guess);
        const __mmask16 finite = _mm512_cmp_ps_mask(divisor, _mm512_set1_ps(INFINITY), _CMP_NEQ_UQ);
        return x * bits_of<Floats>(_mm512_maskz_mov_ps(finite, bits_of<__m512>(better)));
    }
#endif
    return x / y;
}

// gelu by its tanh: x / 2 · (1 + tanh(z)) = x / (1 + e^(-2z)), which keeps its digits for x < -3.
template <Type type, Activation activation>
inline Floats activated(Floats x) {
    Floats power = -x;
    if constexpr (activation == Activation::gelu_tanh)
        power = (x + x * x * x * 0.044715f) * -1.5957691216f;
    return quotient<type>(x, exponential(power) + 1.0f);
}

// activation(gate[at …)) · up[at …), `count` numbers at most.
template <Type type, Activation activation>
inline Floats gated_at(const void* gate, const void* up, int64_t at, int64_t count) {
    const Floats x = some_floats<type>(gate, at, count);
    return as_type<type>(activated<type, activation>(x)) * some_floats<type>(up, at, count);
}

// y[to … to + count) = activation(gate[at …)) · up[at …)
template <Type type, Activation activation>
inline void gate_row(const void* gate, const void* up, int64_t at, void* y, int64_t to,
                     int64_t count) {
    int64_t i = 0;
    for (; i + 2 * lanes <= count; i += 2 * lanes)
        put_pair(y, to + i, gated_at<type, activation>(gate, up, at + i, lanes),
                 gated_at<type, activation>(gate, up, at + i + lanes, lanes), type);
    for (; i < count; i += lanes)
        put_some<type>(y, to + i, gated_at<type, activation>(gate, up, at + i, count - i), count - i);
}

template <Type type, Activation activation>
void gate(Pool& pool, const Gated& job) {
    const char* up = static_cast<const char*>(job.x) + job.inner * size_of(type);
    each_row(pool, job.tokens, gate_costs * job.inner, [&](int64_t token) {
        gate_row<type, activation>(job.x, up, token * 2 * job.inner, job.y, token * job.inner,
                                   job.inner);
    });
}

template <Type type>
void gate(Pool& pool, const Gated& job) {
    if (job.activation == Activation::silu) gate<type, Activation::silu>(pool, job);
    else gate<type, Activation::gelu_tanh>(pool, job);
}

void gated(Pool& pool, const Gated& job) {
    if (job.type == Type::f32) gate<Type::f32>(pool, job);
    else if (job.type == Type::bf16) gate<Type::bf16>(pool, job);
    else gate<Type::f16>(pool, job);
}

// Of a GEMM that is to be gated, once all of its outputs are there.
template <class Job>
void gate_outputs(Pool& pool, const Job& job) {
    if (job.gate.to)
        gated(pool, {job.y, job.gate.to, job.tokens, job.outputs / 2, job.type,
                     job.gate.activation});
}

// ── sums ────────────────────────────────────────────────────────────────────────────────────

template <Type type>
void add_row(const Add& job, int64_t token) {
    const int64_t at = token * job.width;
    for (int64_t i = 0; i < job.width; i += lanes) {
        const int64_t count = job.width - i;
        Floats x = some_floats<type>(job.x, at + i, count);
        if (job.factor != 1) x = as_type<type>(x * job.factor);
        if (job.added) x += some_floats<type>(job.added, at + i, count);
        put_some<type>(job.y, at + i, x, count);
    }
}

void add(Pool& pool, const Add& job) {
    each_row(pool, job.tokens, job.width, [&](int64_t token) {
        if (job.type == Type::f32) add_row<Type::f32>(job, token);
        else if (job.type == Type::bf16) add_row<Type::bf16>(job, token);
        else add_row<Type::f16>(job, token);
    });
}

// ── a wider type ────────────────────────────────────────────────────────────────────────────

template <Type type>
void widen_between(const Widen& job, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += lanes)
        put_some<Type::f32>(job.y, i, some_floats<type>(job.x, i, end - i), end - i);
}

void widen(Pool& pool, const Widen& job) {
    pool.run((job.count + numbers_each - 1) / numbers_each, [&](int64_t chunk, int) {
        const int64_t begin = chunk * numbers_each, end = std::min(job.count, begin + numbers_each);
        if (job.type == Type::f32) widen_between<Type::f32>(job, begin, end);
        else if (job.type == Type::bf16) widen_between<Type::bf16>(job, begin, end);
        else widen_between<Type::f16>(job, begin, end);
    });
}

// ── a question ──────────────────────────────────────────────────────────────────────────────

template <Type type>
bool finite_between(const void* x, int64_t begin, int64_t end) {
    Ints bad = {};
    for (int64_t i = begin; i < end; i += lanes) {
        const Floats values = some_floats<type>(x, i, end - i);
        bad |= (bits_of<Ints>(values) & 0x7F800000) == 0x7F800000;
    }
    for (int lane = 0; lane < lanes; ++lane)
        if (bad[lane]) return false;
    return true;
}

// Whether none of `count` numbers is an infinity or NaN.
bool are_finite(Pool& pool, const void* x, int64_t count, Type type) {
    std::atomic<bool> finite{true};
    pool.run((count + numbers_each - 1) / numbers_each, [&](int64_t chunk, int) {
        const int64_t begin = chunk * numbers_each, end = std::min(count, begin + numbers_each);
        if (!(type == Type::f32 ? finite_between<Type::f32>(x, begin, end)
              : type == Type::bf16 ? finite_between<Type::bf16>(x, begin, end)
                                   : finite_between<Type::f16>(x, begin, end)))
            finite.store(false);
    });
    return finite.load();
}

// ── a reading ───────────────────────────────────────────────────────────────────────────────

// The xor of all words, by all threads: what a probe of the memory's speed does.
uint64_t read_words(Pool& pool, const void* base, int64_t bytes) {
    constexpr int64_t least = 1 << 16, most = 1 << 20;
    const int64_t wanted = bytes / (8 * pool.threads()) / least * least;
    const int64_t share = std::clamp(wanted, least, most);
    std::atomic<uint64_t> found{0};
    pool.run((bytes + share - 1) / share, [&](int64_t chunk, int) {
        const char* at = static_cast<const char*>(base) + chunk * share;
        const int64_t size = std::min(share, bytes - chunk * share);
        Words sums[4] = {};
        for (int64_t i = 0; i + int64_t{sizeof sums} <= size; i += sizeof sums) {
            prefetch(at + i + 4096);
            for (int n = 0; n < 4; ++n) sums[n] ^= load<Words>(at + i + n * int{sizeof(Words)});
        }
        const Words both = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
        uint64_t word = 0;
        for (int lane = 0; lane < lanes; ++lane) word ^= both[lane];
        found.fetch_xor(word);
    });
    return found.load();
}

}  // namespace
}  // namespace headway
