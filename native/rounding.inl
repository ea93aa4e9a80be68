// Weights in the type of a checkpoint, rounded to int8 or int4 and packed, in one pass over them.
//
// The numbers are those of runtime/rounding.py, bit for bit. A panel's outputs are rounded into
// memory that stays in the L2 cache, 16 · 4,864 levels are 76 KiB, and are packed from there.
#include <vector>

#include "pool.h"

namespace headway {
namespace {

// The largest number by size; of two as large the negative one, of zeros -0, of NaNs any. Turned by
// one bit, numbers are ordered by size and then by sign.
template <Type type>
float extreme(const void* weight, int64_t first, int64_t end) {
    Words most = Words{} + 1;
    for (int64_t at = first; at < end; at += lanes) {
        const Words bits = bits_of<Words>(floats_before(weight, at, end, type));
        const Words turned = bits << 1 | bits >> 31;
        most = turned > most ? turned : most;
    }
    uint32_t best = 1;
    for (int lane = 0; lane < lanes; ++lane) best = std::max(best, most[lane]);
    return bits_of<float>(best >> 1 | best << 31);
}

// Levels of numbers first … end - 1, which share a scale; returns it. A number without a finite
// quotient becomes 0, and one that is not finite shows in the scale.
template <Type type>
float round_group(const void* weight, int64_t first, int64_t end, bool int4, int8_t* levels) {
    const float least = int4 ? -8 : -127, most = int4 ? 7 : 127;
    const float scale = int4 ? of_f16(to_f16(extreme<type>(weight, first, end) / least))
                             : largest<type>(weight, first, end) / most;
    for (int64_t at = first; at < end; at += lanes, levels += lanes) {
        Floats quotients = floats_before(weight, at, end, type) / scale;
        const Words size = bits_of<Words>(quotients) & 0x7FFFFFFFu;
        quotients = bits_of<Floats>(bits_of<Words>(quotients) &
                                    bits_of<Words>(size < 0x7F800000u));
        quotients = quotients > most ? all(most) : quotients < least ? all(least) : quotients;
        const Bytes bytes = bytes_of(rounded(quotients));
        std::memcpy(levels, &bytes, std::min<int64_t>(lanes, end - at));
    }
    return scale;
}

// A row rotated, and divided by the rotation's size: its product with a rotated row of inputs is as
// before.
template <Type type>
void copy_rotated(const RoundWeight& job, int64_t row, std::vector<float>& copy) {
    copy.resize(job.inputs + lanes);
    rotate_row<type>(job.weight, row * job.inputs, job.inputs, copy.data());
    const float inverse = 1.0f / static_cast<float>(rotation_of(job.inputs));
    for (float& number : copy) number *= inverse;
}

template <Type type>
void round_panels(Pool& pool, const RoundWeight& job) {
    const Layout layout(job.layout);
    const int64_t bytes = panel_bytes(job.inputs, job.layout);
    const int64_t size = layout.group ? layout.group : job.inputs;
    const int64_t groups = (job.inputs + size - 1) / size;
    pool.run((job.outputs + panel_width - 1) / panel_width, [&](int64_t panel, int) {
        const int64_t first = panel * panel_width;
        const int64_t outputs = std::min<int64_t>(panel_width, job.outputs - first);
        std::vector<int8_t> levels(outputs * job.inputs);
        std::vector<uint16_t> scales(outputs * groups);
        std::vector<float> copy;
        for (int64_t row = 0; row < outputs; ++row) {
            int8_t* to = levels.data() + row * job.inputs;
            if (layout.rotated) {
                copy_rotated<type>(job, first + row, copy);
                job.scales[first + row] =
                    round_group<Type::f32>(copy.data(), 0, job.inputs, false, to);
                continue;
            }
            const int64_t begin = (first + row) * job.inputs;
            for (int64_t n = 0; n < groups; ++n) {
                const float scale = round_group<type>(
                    job.weight, begin + n * size, begin + std::min((n + 1) * size, job.inputs),
                    layout.group != 0, to + n * size);
                if (layout.group) scales[row * groups + n] = to_f16(scale);
                else job.scales[first + row] = scale;
            }
        }
        char* to = static_cast<char*>(job.packed) + panel * bytes;
        pack_panel({levels.data(), scales.data(), nullptr, to, outputs, job.inputs, job.layout}, to,
                   0);
    });
}

void round_weight(Pool& pool, const RoundWeight& job) {
    if (job.type == Type::f32) round_panels<Type::f32>(pool, job);
    else if (job.type == Type::bf16) round_panels<Type::bf16>(pool, job);
    else round_panels<Type::f16>(pool, job);
}

}  // namespace
}  // namespace headway
