// The inner loops of attention in matrix tiles: 16 rows over a strip of 64 tokens, see attention.inl.
//
//     scores   q in bf16 [rows][D]        times K [16 tokens][pairs of channels]
//     softmax  a row, as in attention_tile.inl; the weights are rounded to bf16
//     sum      weights [rows][64] in bf16 times V [16 channels][pairs of tokens]
//
// A strip's K and V are brought into tiles once for all rows of a unit: numbers of int8 are exact in
// bf16, and tokens that are not there are zeros. Each step adds its 32 products to a sum that lies in
// fp32, first step to last, so that what a row computes is fixed by its position alone.
#pragma once
#include "attention_tile.inl"
#include "tiles.inl"

namespace headway {
namespace {

#if !defined(__AMX_BF16__)

struct TileShape {};

inline int64_t query_step(int64_t) { return 0; }
inline int64_t matrix_size(int64_t) { return 0; }

#else

// One thread's memory: K [4][D / 2][16][2], V [2][channels / 16][16][16][2], numbers of 16 bits.
struct MatrixRoom {
    char *k, *v, *weights;
    float* scores;
    int64_t depth;  // D in whole steps of 32 channels

    static int64_t depth_of(int64_t head_dim) { return (head_dim + 31) / 32 * 32; }

    MatrixRoom(float* memory, int64_t head_dim) : depth(depth_of(head_dim)) {
        const auto take = [&](int64_t count) {
            char* at = reinterpret_cast<char*>(memory);
            memory += count;
            return at;
        };
        scores = memory;
        take(tile_height * strip_tokens);
        weights = take(tile_height * strip_tokens);
        k = take(depth * strip_tokens / 2);
        v = take(depth * strip_tokens / 2);
    }
};

// In numbers of 32 bits: a row of queries, and the memory of a MatrixRoom.
inline int64_t query_step(int64_t head_dim) { return MatrixRoom::depth_of(head_dim) / 2; }

inline int64_t matrix_size(int64_t head_dim) {
    return (MatrixRoom::depth_of(head_dim) + 2 * tile_height) * strip_tokens;
}

// Whether tiles compute it: queries in bf16, and numbers that are exact in it.
inline bool fits_tiles(const Attention& job) {
    return job.type == Type::bf16 && (job.kv.type == Type::bf16 || job.kv.type == Type::i8);
}

// `lanes` numbers in bf16, in the low halves of words.
template <Type type>
inline Words bf16_words(const char* at) {
    if constexpr (type == Type::bf16) return words_of(load<Halves>(at));
    return bits_of<Words>(floats_at(at, 0, type)) >> 16;
}

template <Type type>
constexpr int64_t size_of_type() { return type == Type::f32 ? 4 : type == Type::i8 ? 1 : 2; }

// Pairs of `lanes` numbers, the first of each in the low half of a word.
template <Type type>
inline Words paired(const char* low, const char* high) {
    return bf16_words<type>(low) | bf16_words<type>(high) << 16;
}

// Channels in pairs; one that is not there is zeros.
template <Type type>
void read_k(const Strip& strip, const Strip& next, bool ahead, int64_t head_dim, int first, int last,
            const MatrixRoom& room) {
    const int64_t pairs = room.depth / 2, whole = head_dim / 2, step = strip.k_step;
    for (int v = first; v < last; ++v) {
        const char* k = strip.k[v];
        const char* later = ahead ? next.k[v] : k;
        char* to = room.k + v * pairs * tile_bytes;
        for (int64_t pair = 0; pair < whole; ++pair, k += 2 * step, later += 2 * step) {
            store(to + pair * tile_bytes, paired<type>(k, k + step));
            fetch_later(later);
            if (step >= tile_bytes) fetch_later(later + step);
        }
        for (int64_t pair = whole; pair < pairs; ++pair)
            store(to + pair * tile_bytes, 2 * pair < head_dim ? bf16_words<type>(k) : Words{});
    }
}

// Tokens in pairs; one that is not there is zeros.
template <Type type>
void read_v(const Strip& strip, int64_t channels, int first, int last, const MatrixRoom& room) {
    constexpr int64_t tile_size = tile_height * tile_bytes, width = size_of_type<type>();
    const int64_t step = channels / lanes * tile_size;
    const int end = (last * lanes + 31) / 32 * 32;
    for (int token = first * lanes / 32 * 32; token < end; token += 2) {
        char* to = room.v + token / 32 * step + token % 32 / 2 * tile_bytes;
        const char *low = strip.v[token], *high = strip.v[token + 1];
        if (token >= strip.begin && token + 1 < strip.end) {
            for (int64_t c = 0; c < channels; c += lanes, to += tile_size)
                store(to, paired<type>(low + c * width, high + c * width));
        } else {
            const bool has_low = token >= strip.begin && token < strip.end;
            const bool has_high = token + 1 >= strip.begin && token + 1 < strip.end;
            for (int64_t c = 0; c < channels; c += lanes, to += tile_size) {
                Words words{};
                if (has_low) words = bf16_words<type>(low + c * width);
                if (has_high) words |= bf16_words<type>(high + c * width) << 16;
                store(to, words);
            }
        }
    }
}

// V of a share of the tokens of the next strip: part `part` of `parts`.
inline void fetch_v(const Strip& next, int64_t bytes, int part, int parts) {
    for (int token = strip_tokens * part / parts; token < strip_tokens * (part + 1) / parts; ++token)
        for (int64_t at = 0; at < bytes; at += tile_bytes) fetch_later(next.v[token] + at);
}

// scores[16][64] of the rows from `q` on, of the vectors of tokens first … last - 1.
inline void score_in_tiles(const MatrixRoom& room, const char* q, int first, int last) {
    const int64_t q_step = 2 * room.depth, block = room.depth / 2 * tile_bytes, line = tile_bytes;
    constexpr int64_t out_step = 4 * strip_tokens;
    char* out = reinterpret_cast<char*>(room.scores);
    const auto two = [&](int v) HEADWAY_INLINE {
        HEADWAY_ZERO_TILE(0);
        HEADWAY_ZERO_TILE(1);
        const char* k = room.k + v * block;
        for (int64_t at = 0; at < q_step; at += tile_bytes, k += tile_height * tile_bytes) {
            HEADWAY_LOAD_TILE(4, q + at, q_step);
            HEADWAY_LOAD_TILE(6, k, line);
            HEADWAY_ADD_BF16(0, 4, 6);
            HEADWAY_LOAD_TILE(7, k + block, line);
            HEADWAY_ADD_BF16(1, 4, 7);
        }
        HEADWAY_STORE_TILE(0, out + v * tile_bytes, out_step);
        HEADWAY_STORE_TILE(1, out + (v + 1) * tile_bytes, out_step);
    };
    for (int v = first / 2 * 2; v < last; v += 2) two(v);
}

// Adds weights[16][64] · V to `sums`, `sum_step` bytes apart.
inline void sum_in_tiles(const MatrixRoom& room, char* sums, int64_t sum_step, int64_t channels,
                         int first, int last) {
    constexpr int64_t weight_step = 2 * strip_tokens, tile_size = tile_height * tile_bytes;
    const int64_t step = channels / lanes * tile_size, line = tile_bytes;
    int64_t c = 0;
    for (; c + 2 * lanes <= channels; c += 2 * lanes) {
        HEADWAY_LOAD_TILE(0, sums + 4 * c, sum_step);
        HEADWAY_LOAD_TILE(1, sums + 4 * c + tile_bytes, sum_step);
        for (int s = first / 2; s < (last + 1) / 2; ++s) {
            const char* v = room.v + s * step + c / lanes * tile_size;
            HEADWAY_LOAD_TILE(4, room.weights + s * tile_bytes, weight_step);
            HEADWAY_LOAD_TILE(6, v, line);
            HEADWAY_ADD_BF16(0, 4, 6);
            HEADWAY_LOAD_TILE(7, v + tile_size, line);
            HEADWAY_ADD_BF16(1, 4, 7);
        }
        HEADWAY_STORE_TILE(0, sums + 4 * c, sum_step);
        HEADWAY_STORE_TILE(1, sums + 4 * c + tile_bytes, sum_step);
    }
    for (; c < channels; c += lanes) {
        HEADWAY_LOAD_TILE(2, sums + 4 * c, sum_step);
        for (int s = first / 2; s < (last + 1) / 2; ++s) {
            HEADWAY_LOAD_TILE(5, room.weights + s * tile_bytes, weight_step);
            HEADWAY_LOAD_TILE(6, room.v + s * step + c / lanes * tile_size, line);
            HEADWAY_ADD_BF16(2, 5, 6);
        }
        HEADWAY_STORE_TILE(2, sums + 4 * c, sum_step);
    }
}

#endif

}  // namespace
}  // namespace headway
