// The inner loops of attention in matrix tiles: 16 rows over a strip of 64 tokens, see attention.inl.
//
//     scores   q in bf16 [rows][D]        times K [pairs of channels][16 tokens]
//     softmax  a row, as in attention_tile.inl; the weights are rounded to bf16
//     sum      weights [rows][16] in bf16 times V [pairs of tokens][16 channels]
//
// Memory in pairs (KVMemory in table.h) is tiles as it lies; other memory's K and V are brought into
// them once for all rows of a unit: numbers of int8 are exact in bf16. Tokens that are not there are
// zeros in V. Each step adds its 32 channels or 16 tokens to a sum that lies in fp32, first step to
// last, so that what a row computes is fixed by its position alone.
#pragma once
#include "attention_tile.inl"
#include "tiles.inl"

namespace headway {
namespace {

#if !defined(__AMX_BF16__)

inline int64_t query_step(int64_t) { return 0; }
inline int64_t matrix_size(int64_t) { return 0; }

#else

// One thread's memory: K [4][D / 2][16][2], V [4][8][channels][2], numbers of 16 bits.
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

// Where the tiles of each 16 tokens of a strip lie: a pair of channels is `k_step` bytes behind the
// one before, a pair of tokens `v_step`.
struct TileStrip {
    const char *k[strip_vectors], *v[strip_vectors];
    int64_t k_step, v_step;
};

// Sums in 0 and 1; scores multiply 4 by 6 and 7, 32 channels deep, sums of V 5 by 2 and 3, 16
// tokens deep.
class AttentionTiles : public Tiles {
public:
    void set(int rows) {
        if (rows == rows_) return;
        rows_ = rows;
        constexpr int64_t line = tile_bytes, half = line / 2, low = tile_height / 2;
        load({line, line, line, line, line, half, line, line},
             {rows, rows, low, low, rows, rows, tile_height, tile_height});
    }

private:
    int rows_ = 0;
};

// Prefetches one head's next strip while the current one is computed. A core has 16 line-fill buffers,
// and its hardware prefetcher follows each page by itself; so prefetches are interleaved across pages,
// one line of each piece in turn. Tiles that read the L2 cache take line-fill buffers too; so a strip
// goes to the L1 cache, which has room for two (16 KB each with 64 channels).
class Ahead {
public:
    // With many rows the first tile has time enough: four lines at once, into the L2 cache.
    explicit Ahead(bool many) : many_(many), bytes_at_once_(many ? 4 * tile_bytes : tile_bytes) {}

    void clear() {
        count_ = next_ = 0;
        at_ = longest_ = 0;
        spread(1);
    }

    void add(const char* from, int64_t bytes) {
        if (count_ == most_pieces) return;
        pieces_[count_++] = {from, bytes};
        longest_ = std::max(longest_, bytes);
    }

    // What was added is fetched by the next `calls` calls of `fetch`, the same by each:
    //
    //     256 lines by 31 calls     8 8 8 9 8 8 8 9 …     and not 9 by 28 and 4 0 0 at the end
    void spread(int64_t calls) {
        fetches_ = count_ * parts_of(longest_, bytes_at_once_);
        calls_ = calls;
        due_ = 0;
    }

    void fetch() {
        if (at_ < longest_) fetch_due();
    }

    void fetch_all() {
        spread(1);
        fetch();
    }

private:
    static constexpr int most_pieces = 2 * strip_tokens;
    struct Piece {
        const char* from;
        int64_t bytes;
    };

    // Not inlined: of the many calls beside a chunk most find nothing left to fetch.
    __attribute__((noinline)) void fetch_due() {
        for (due_ += fetches_; due_ >= calls_ && at_ < longest_; due_ -= calls_) {
            const Piece& piece = pieces_[next_];
            if (at_ < piece.bytes) {
                if (!many_) prefetch(piece.from + at_);
                for (int64_t line = 0; many_ && line < bytes_at_once_; line += tile_bytes)
                    fetch_later(piece.from + at_ + line);
            }
            if (++next_ < count_) continue;
            next_ = 0;
            at_ += bytes_at_once_;
        }
    }

    Piece pieces_[most_pieces];
    const bool many_;
    const int64_t bytes_at_once_;
    int count_ = 0, next_ = 0;
    int64_t at_ = 0, longest_ = 0;
    int64_t fetches_ = 0, calls_ = 1, due_ = 0;
};

// Calls of `fetch` beside each step of scores, row of softmax and step of sums, about as their times
// are.
constexpr int score_fetches = 2, row_fetches = 1, sum_fetches = 2;

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
void read_k(const Strip& strip, int64_t head_dim, int first, int last, const MatrixRoom& room,
            Ahead& ahead) {
    const int64_t pairs = room.depth / 2, whole = head_dim / 2, step = strip.k_step;
    for (int v = first; v < last; ++v) {
        const char* k = strip.k[v];
        char* to = room.k + v * pairs * tile_bytes;
        for (int64_t pair = 0; pair < whole; ++pair, k += 2 * step) {
            store(to + pair * tile_bytes, paired<type>(k, k + step));
            if (pair % 16 == 0) ahead.fetch();
        }
        for (int64_t pair = whole; pair < pairs; ++pair)
            store(to + pair * tile_bytes, 2 * pair < head_dim ? bf16_words<type>(k) : Words{});
    }
}

// Tokens in pairs; one that is not there is zeros.
template <Type type>
void read_v(const Strip& strip, int64_t channels, int first, int last, const MatrixRoom& room,
            Ahead& ahead) {
    constexpr int64_t width = size_of_type<type>();
    for (int token = first * lanes; token < last * lanes; token += 2) {
        char* to = room.v + token / 2 * 4 * channels;
        const char *low = strip.v[token], *high = strip.v[token + 1];
        if (token % 16 == 0) ahead.fetch();
        if (token >= strip.begin && token + 1 < strip.end) {
            for (int64_t c = 0; c < channels; c += lanes)
                store(to + 4 * c, paired<type>(low + c * width, high + c * width));
        } else {
            const bool has_low = token >= strip.begin && token < strip.end;
            const bool has_high = token + 1 >= strip.begin && token + 1 < strip.end;
            for (int64_t c = 0; c < channels; c += lanes) {
                Words words{};
                if (has_low) words = bf16_words<type>(low + c * width);
                if (has_high) words |= bf16_words<type>(high + c * width) << 16;
                store(to + 4 * c, words);
            }
        }
    }
}

// 16 tokens in pairs, of which `begin` … `end` - 1 are there; the others become zeros.
inline void copy_v(const char* from, char* to, int64_t channels, int64_t begin, int64_t end) {
    const auto there = [&](int64_t token) { return token >= begin && token < end; };
    for (int64_t token = 0; token < lanes; token += 2, from += 4 * channels, to += 4 * channels) {
        const uint32_t kept = (there(token) ? 0xFFFF : 0) | (there(token + 1) ? 0xFFFF0000 : 0);
        for (int64_t c = 0; c < channels; c += lanes)
            store(to + 4 * c, load<Words>(from + 4 * c) & kept);
    }
}

// scores[16][64] of the rows from `q` on, of the vectors of tokens first … last - 1.
inline void score_in_tiles(const TileStrip& strip, const MatrixRoom& room, const char* q, int first,
                           int last, Ahead& ahead) {
    const int64_t q_step = 2 * room.depth, k_step = strip.k_step;
    constexpr int64_t out_step = 4 * strip_tokens;
    char* out = reinterpret_cast<char*>(room.scores);
    int v = first;
    for (; v + 2 <= last; v += 2) {
        HEADWAY_ZERO_TILE(0);
        HEADWAY_ZERO_TILE(1);
        const char *one = strip.k[v], *two = strip.k[v + 1];
        for (int64_t at = 0; at < q_step; at += tile_bytes) {
            HEADWAY_LOAD_TILE(4, q + at, q_step);
            HEADWAY_LOAD_TILE(6, one, k_step);
            HEADWAY_ADD_BF16(0, 4, 6);
            HEADWAY_LOAD_TILE(7, two, k_step);
            HEADWAY_ADD_BF16(1, 4, 7);
            for (int i = 0; i < score_fetches; ++i) ahead.fetch();
            one += tile_height * k_step;
            two += tile_height * k_step;
        }
        HEADWAY_STORE_TILE(0, out + v * tile_bytes, out_step);
        HEADWAY_STORE_TILE(1, out + (v + 1) * tile_bytes, out_step);
    }
    if (v == last) return;
    HEADWAY_ZERO_TILE(0);
    const char* one = strip.k[v];
    for (int64_t at = 0; at < q_step; at += tile_bytes, one += tile_height * k_step) {
        HEADWAY_LOAD_TILE(4, q + at, q_step);
        HEADWAY_LOAD_TILE(6, one, k_step);
        HEADWAY_ADD_BF16(0, 4, 6);
    }
    HEADWAY_STORE_TILE(0, out + v * tile_bytes, out_step);
}

// Adds weights[16][64] · V to `sums`, `sum_step` bytes apart.
inline void sum_in_tiles(const TileStrip& strip, const MatrixRoom& room, char* sums,
                         int64_t sum_step, int64_t channels, int first, int last, Ahead& ahead) {
    constexpr int64_t weight_step = 2 * strip_tokens, group_bytes = 2 * lanes;
    const int64_t v_step = strip.v_step;
    int64_t c = 0;
    for (; c + 2 * lanes <= channels; c += 2 * lanes) {
        HEADWAY_LOAD_TILE(0, sums + 4 * c, sum_step);
        HEADWAY_LOAD_TILE(1, sums + 4 * c + tile_bytes, sum_step);
        for (int v = first; v < last; ++v) {
            const char* at = strip.v[v] + 4 * c;
            HEADWAY_LOAD_TILE(5, room.weights + v * group_bytes, weight_step);
            HEADWAY_LOAD_TILE(2, at, v_step);
            HEADWAY_ADD_BF16(0, 5, 2);
            HEADWAY_LOAD_TILE(3, at + tile_bytes, v_step);
            HEADWAY_ADD_BF16(1, 5, 3);
            for (int i = 0; i < sum_fetches; ++i) ahead.fetch();
        }
        HEADWAY_STORE_TILE(0, sums + 4 * c, sum_step);
        HEADWAY_STORE_TILE(1, sums + 4 * c + tile_bytes, sum_step);
    }
    if (c == channels) return;
    HEADWAY_LOAD_TILE(0, sums + 4 * c, sum_step);
    for (int v = first; v < last; ++v) {
        HEADWAY_LOAD_TILE(5, room.weights + v * group_bytes, weight_step);
        HEADWAY_LOAD_TILE(2, strip.v[v] + 4 * c, v_step);
        HEADWAY_ADD_BF16(0, 5, 2);
    }
    HEADWAY_STORE_TILE(0, sums + 4 * c, sum_step);
}

#endif

}  // namespace
}  // namespace headway
