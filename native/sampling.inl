// From logits to tokens: one pass finds the largest logit of each block of 128; every later step reads
// only the blocks whose largest logit can matter.
//
//     top_k 2, blocks of 4    3 1 0 2 │ 9 4 8 1 │ 2 2 7 5 │ 1 0 1 1
//     largest of each         3         9         7         1
//     the 2nd of those is 7: only values ≥ 7 can be among the two largest: 9 8 7, so the floor is 8
//
// Nothing is sorted. Filters give a floor on the value, ties are kept together, and the draw walks
// the kept tokens in the order of their ids; masses are doubles. A row is one thread's, and what is
// not in fp32 is widened block by block, each time it is read.
#include <algorithm>
#include <limits>

#include "exp.h"
#include "pool.h"

namespace headway {
namespace {

constexpr int64_t block_size = 128, logits_each = 32768;
constexpr int64_t unsettled = -1;  // a logit is NaN or infinite, or none is left: for the reference
constexpr float never = -std::numeric_limits<float>::infinity();

// The logits of one row after mask and temperature, in blocks; what is beyond the last is -inf.
struct Row {
    const void* logits;
    Type type;
    int64_t count, blocks;
    float *largest, *order, *candidates;  // of each block; scratch for those; scratch for values
    double* masses;                       // of each block
    float most;
    bool has_nan, edited;  // edited: its values are behind `order`
    float widened[block_size];

    // The values of a block, until the next is asked for.
    const float* at(int64_t block) {
        if (edited) return order + blocks + block * block_size;
        const int64_t first = block * block_size, rest = count - first;
        if (type == Type::f32 && rest >= block_size)
            return static_cast<const float*>(logits) + first;
        for (int64_t i = 0; i < block_size; i += lanes) store(widened + i, some(first + i, rest - i));
        return widened;
    }

private:
    Floats some(int64_t first, int64_t rest) const {
        if (rest >= lanes) return floats_at(logits, first, type);
        Floats found = all(never);
        for (int lane = 0; lane < rest; ++lane) found[lane] = number_at(logits, first + lane, type);
        return found;
    }
};

inline int64_t blocks_of(int64_t vocabulary) { return (vocabulary + block_size - 1) / block_size; }

// Per thread: masses, largest, order, then the row after mask and temperature, then candidates.
int64_t sampling_bytes(int64_t vocabulary) {
    return blocks_of(vocabulary) * (8 + 4 + 4 + 2 * 4 * block_size);
}

Row row_of(const void* logits, Type type, int64_t vocabulary, void* scratch) {
    Row row;
    row.logits = logits;
    row.type = type;
    row.edited = false;
    row.count = vocabulary;
    row.blocks = blocks_of(vocabulary);
    row.masses = static_cast<double*>(scratch);
    row.largest = reinterpret_cast<float*>(row.masses + row.blocks);
    row.order = row.largest + row.blocks;
    row.candidates = row.order + row.blocks + row.blocks * block_size;
    return row;
}

// ── one pass ────────────────────────────────────────────────────────────────────────────────

// The logits at `token` that the mask allows, the others -inf; a mask that is too short allows no
// more.
inline Floats allowed_of(Floats values, const uint8_t* allowed, int64_t bytes, int64_t token) {
    int32_t word = 0;
    for (int n = 0; n < lanes / 8; ++n)
        if (token / 8 + n < bytes) word |= int32_t{allowed[token / 8 + n]} << 8 * n;
    Ints bits;
    for (int lane = 0; lane < lanes; ++lane) bits[lane] = 1 << lane;
    return ((Ints{} + word) & bits) != 0 ? values : all(never);
}

inline float largest_of(Floats values) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(bits_of<__m512>(values));
#else
    float most = values[0];
    for (int lane = 1; lane < lanes; ++lane) most = std::max(most, values[lane]);
    return most;
#endif
}

template <Type type, bool edited>
void read_blocks(Row& row, const Draw& draw, int64_t allowed_bytes) {
    float* edits = row.order + row.blocks;
    const bool divides = draw.temperature > 0 && draw.temperature != 1;
    Ints nan = {};
    row.most = never;
    for (int64_t block = 0; block < row.blocks; ++block) {
        const bool whole = (block + 1) * block_size <= row.count;
        const float* last = whole ? nullptr : row.at(block);
        Floats most = all(never);
        for (int64_t i = 0; i < block_size; i += lanes) {
            const int64_t token = block * block_size + i;
            Floats values = whole ? floats_at(row.logits, token, type) : load<Floats>(last + i);
            if constexpr (edited) {
                if (draw.allowed) values = allowed_of(values, draw.allowed, allowed_bytes, token);
                if (divides) values = values / draw.temperature;
                store(edits + token, values);
            }
            nan |= values != values;
            most = values > most ? values : most;
        }
        row.largest[block] = largest_of(most);
        row.most = std::max(row.most, row.largest[block]);
    }
    row.has_nan = false;
    for (int lane = 0; lane < lanes; ++lane) row.has_nan |= nan[lane] != 0;
    row.edited = edited;
}

template <bool edited>
void read_blocks(Row& row, const Draw& draw, int64_t allowed_bytes) {
    if (row.type == Type::f32) read_blocks<Type::f32, edited>(row, draw, allowed_bytes);
    else if (row.type == Type::bf16) read_blocks<Type::bf16, edited>(row, draw, allowed_bytes);
    else read_blocks<Type::f16, edited>(row, draw, allowed_bytes);
}

void read_row(Row& row, const Draw& draw, int64_t allowed_bytes) {
    const bool divides = draw.temperature > 0 && draw.temperature != 1;
    if (draw.allowed || divides) read_blocks<true>(row, draw, allowed_bytes);
    else read_blocks<false>(row, draw, allowed_bytes);
}

// The first token whose logit is the largest.
int64_t likeliest(Row& row) {
    int64_t block = 0;
    while (row.largest[block] != row.most) ++block;
    const float* values = row.at(block);
    int64_t i = 0;
    while (values[i] != row.most) ++i;
    return block * block_size + i;
}

// ── floors ──────────────────────────────────────────────────────────────────────────────────

// Puts the values that `goes_first` in front; how many they are.
template <class First>
int64_t part(float* values, int64_t count, const First& goes_first) {
    int64_t first = 0;
    for (int64_t i = 0; i < count; ++i) {
        const float value = values[i];
        values[i] = values[first];
        values[first] = value;
        first += goes_first(value);
    }
    return first;
}

// The largest value v such that all values ≥ v together weigh at least `need`; the smallest value if
// there is none. Quickselect: partition by a pivot, continue in the part where the sum passes `need`.
template <class Weight>
float floor_of(float* values, int64_t count, double need, const Weight& weigh) {
    double above = 0;
    float pivot = never;
    uint64_t random = 0x9E3779B97F4A7C15u;
    while (count > 0) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        pivot = values[(random >> 33) % static_cast<uint64_t>(count)];
        const int64_t larger = part(values, count, [=](float value) { return value > pivot; });
        const double of_larger = weigh(values, larger);
        if (larger > 0 && above + of_larger >= need) {
            count = larger;
            continue;
        }
        values += larger;
        count -= larger;
        const int64_t equal = part(values, count, [=](float value) { return value == pivot; });
        above += of_larger + weigh(values, 1) * static_cast<double>(equal);
        if (above >= need) return pivot;
        values += equal;
        count -= equal;
    }
    return pivot;
}

struct Number {
    double operator()(const float*, int64_t count) const { return static_cast<double>(count); }
};

// A lower bound of the nth largest logit of the row: the nth largest of the blocks' largest.
float floor_of_blocks(Row& row, int64_t n) {
    if (n > row.blocks) return never;
    std::memcpy(row.order, row.largest, row.blocks * sizeof(float));
    return floor_of(row.order, row.blocks, static_cast<double>(n), Number{});
}

// Copies the logits that reach `floor` to the candidates.
int64_t gather(Row& row, float floor) {
    int64_t found = 0;
    for (int64_t block = 0; block < row.blocks; ++block) {
        if (!(row.largest[block] >= floor)) continue;
        const float* values = row.at(block);
        for (int64_t i = 0; i < block_size; ++i)
            row.candidates[found] = values[i], found += values[i] >= floor;
    }
    return found;
}

float top_k_floor(Row& row, int64_t k) {
    const int64_t found = gather(row, floor_of_blocks(row, k));
    return floor_of(row.candidates, found, static_cast<double>(k), Number{});
}

inline Doubles masses_at(const float* values, double most, double floor) {
    const Doubles x = __builtin_convertvector(load<HalfFloats>(values), Doubles);
    return bits_of<Doubles>(bits_of<Longs>(exponential(x - most)) & (x >= floor));
}

inline double sum_of(Doubles values) {
    double sum = 0;
    for (int lane = 0; lane < double_lanes; ++lane) sum += values[lane];
    return sum;
}

// The mass of what reaches `floor`, e^(x - most) each, and that of each block.
double mass_of(Row& row, float floor) {
    double total = 0;
    for (int64_t block = 0; block < row.blocks; ++block) {
        row.masses[block] = 0;
        if (!(row.largest[block] >= floor)) continue;
        const float* values = row.at(block);
        Doubles sum = {};
        for (int64_t i = 0; i < block_size; i += double_lanes)
            sum += masses_at(values + i, row.most, floor);
        row.masses[block] = sum_of(sum);
        total += row.masses[block];
    }
    return total;
}

struct Mass {
    double most;
    double operator()(const float* values, int64_t count) const {
        Doubles sum = {};
        int64_t i = 0;
        for (; i + double_lanes <= count; i += double_lanes)
            sum += masses_at(values + i, most, never);
        float rest[double_lanes];
        for (int lane = 0; lane < double_lanes; ++lane)
            rest[lane] = i + lane < count ? values[i + lane] : never;
        return sum_of(sum + masses_at(rest, most, never));
    }
};

// The floor of the smallest set of tokens that holds `need` of the mass that reaches `least`: from
// the likeliest 64 blocks, else from 512, else from all.
float top_p_floor(Row& row, double need, float least) {
    const Mass mass{row.most};
    for (int64_t n = 64;; n *= 8) {
        const float floor = std::max(least, floor_of_blocks(row, n));
        if (floor > least && mass_of(row, floor) < need) continue;
        return floor_of(row.candidates, gather(row, floor), need, mass);
    }
}

// ── the draw ────────────────────────────────────────────────────────────────────────────────

// Philox4x32-10 of (position, index; seed) as a number in [0, 1), 53 bits; see runtime/philox.py.
double uniform(const Draw& draw) {
    uint32_t x0 = static_cast<uint32_t>(draw.position), x1 = static_cast<uint32_t>(draw.index);
    uint32_t x2 = 0, x3 = 0;
    uint32_t k0 = static_cast<uint32_t>(draw.seed), k1 = static_cast<uint32_t>(draw.seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t{0xD2511F53u} * x0, p1 = uint64_t{0xCD9E8D57u} * x2;
        x0 = static_cast<uint32_t>(p1 >> 32) ^ x1 ^ k0;
        x1 = static_cast<uint32_t>(p1);
        x2 = static_cast<uint32_t>(p0 >> 32) ^ x3 ^ k1;
        x3 = static_cast<uint32_t>(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return static_cast<double>(uint64_t{x0 >> 5} * (1 << 26) + (x1 >> 6)) * 0x1p-53;
}

// The first kept token of `block` at which the cumulative mass passes `target`, or the last kept.
int64_t walk(Row& row, int64_t block, float floor, double passed, double target) {
    const float* values = row.at(block);
    int64_t last = 0;
    for (int64_t i = 0; i < block_size; i += double_lanes) {
        const Doubles masses = masses_at(values + i, row.most, floor);
        for (int lane = 0; lane < double_lanes; ++lane) {
            if (!(masses[lane] > 0)) continue;
            last = i + lane;
            passed += masses[lane];
            if (passed > target) return block * block_size + last;
        }
    }
    return block * block_size + last;
}

int64_t drawn(Row& row, const Draw& draw) {
    float floor = row.most + draw.log_min_p;
    if (draw.top_k > 0 && draw.top_k < row.count)
        floor = std::max(floor, top_k_floor(row, draw.top_k));
    double total = mass_of(row, floor);
    if (draw.top_p < 1) {
        floor = std::max(floor, top_p_floor(row, double{draw.top_p} * total, floor));
        total = mass_of(row, floor);
    }
    const double target = uniform(draw) * total;
    double passed = 0;
    int64_t last = 0;
    for (int64_t block = 0; block < row.blocks; ++block) {
        if (!(row.masses[block] > 0)) continue;
        last = block;
        if (passed + row.masses[block] > target) break;
        passed += row.masses[block];
    }
    return walk(row, last, floor, passed, target);
}

void sample(Pool& pool, const Draw* draws, int64_t rows, int64_t vocabulary, int64_t allowed_bytes,
            void* scratch, int64_t* tokens) {
    const int64_t each = std::max<int64_t>(1, logits_each / vocabulary);
    pool.run((rows + each - 1) / each, [&](int64_t chunk, int thread) {
        char* own = static_cast<char*>(scratch) + thread * sampling_bytes(vocabulary);
        const int64_t end = std::min(rows, (chunk + 1) * each);
        for (int64_t r = chunk * each; r < end; ++r) {
            const bool greedy = draws[r].temperature == 0;
            Row row = row_of(draws[r].logits, draws[r].type, vocabulary, own);
            read_row(row, draws[r], allowed_bytes);
            const bool settled = !row.has_nan && row.most > never && (greedy || row.most < -never);
            tokens[r] = !settled ? unsettled : greedy ? likeliest(row) : drawn(row, draws[r]);
        }
    });
}

// ── log-probabilities ───────────────────────────────────────────────────────────────────────

int64_t rank_of(Row& row, float value) {
    int64_t larger = 0;
    for (int64_t block = 0; block < row.blocks; ++block) {
        if (!(row.largest[block] > value)) continue;
        const float* values = row.at(block);
        Ints found = {};
        for (int64_t i = 0; i < block_size; i += lanes) found -= load<Floats>(values + i) > value;
        for (int lane = 0; lane < lanes; ++lane) larger += found[lane];
    }
    return larger + 1;
}

// log Σ e^x, right to 1e-6: exponentials in fp32, sums of blocks in fp64.
double log_sum_of(Row& row) {
    double total = 0;
    for (int64_t block = 0; block < row.blocks; ++block) {
        const float* values = row.at(block);
        Floats sum = {};
        for (int64_t i = 0; i < block_size; i += lanes)
            sum += exponential(load<Floats>(values + i) - row.most);
        for (int lane = 0; lane < lanes; ++lane) total += sum[lane];
    }
    return row.most + std::log(total);
}

// The `count` likeliest, largest first and of equal ones the lower id, with their logits.
void likeliest_of(Row& row, int64_t count, float* values, int64_t* tokens) {
    const float floor = floor_of_blocks(row, count);
    int64_t found = 0;
    for (int64_t block = 0; block < row.blocks; ++block) {
        if (!(row.largest[block] >= floor)) continue;
        const float* from = row.at(block);
        const int64_t end = std::min(block_size, row.count - block * block_size);
        for (int64_t i = 0; i < end; ++i) {
            if (!(from[i] >= floor) || (found == count && from[i] <= values[count - 1])) continue;
            int64_t place = found < count ? found++ : count - 1;
            for (; place > 0 && values[place - 1] < from[i]; --place) {
                values[place] = values[place - 1];
                tokens[place] = tokens[place - 1];
            }
            values[place] = from[i];
            tokens[place] = block * block_size + i;
        }
    }
}

// Of row r: values[r] = the log-probabilities of tokens[r] and of the `count` likeliest, their ids
// in top_tokens[r]. The rank is 0 where the row is not settled.
void logprobs(Pool& pool, const void* logits, Type type, int64_t rows, int64_t vocabulary,
              const int64_t* tokens, int64_t count, void* scratch, float* values, int64_t* ranks,
              int64_t* top_tokens) {
    const int64_t each = std::max<int64_t>(1, logits_each / vocabulary);
    pool.run((rows + each - 1) / each, [&](int64_t chunk, int thread) {
        char* own = static_cast<char*>(scratch) + thread * sampling_bytes(vocabulary);
        const int64_t end = std::min(rows, (chunk + 1) * each);
        for (int64_t r = chunk * each; r < end; ++r) {
            const char* own_logits = static_cast<const char*>(logits) + r * vocabulary * size_of(type);
            Row row = row_of(own_logits, type, vocabulary, own);
            read_row(row, Draw{}, 0);
            ranks[r] = 0;
            if (row.has_nan || !(row.most > never && row.most < -never)) continue;
            const double total = log_sum_of(row);
            float* to = values + r * (1 + count);
            to[0] = number_at(own_logits, tokens[r], type);
            ranks[r] = rank_of(row, to[0]);
            if (count) likeliest_of(row, count, to + 1, top_tokens + r * count);
            for (int64_t i = 0; i <= count; ++i) to[i] = static_cast<float>(to[i] - total);
        }
    });
}

}  // namespace
}  // namespace headway
