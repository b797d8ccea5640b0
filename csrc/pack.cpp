#include "pack.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace tdp {

namespace {

struct Span {
    int64_t begin, end, real, source;
};

// Span q, after checking that it lies inside the packs and the sources.
Span checked_span(const PackRows& rows, int64_t q, int64_t source_size) {
    const int64_t begin = rows.destination[q];
    const int64_t end = q + 1 < rows.count ? rows.destination[q + 1] : rows.num_tokens;
    const int64_t real = rows.length[q], source = rows.source[q];
    if (begin < 0 || end < begin || end > rows.num_tokens || real < 0 || real > end - begin)
        throw std::out_of_range("span " + std::to_string(q) + " of " + std::to_string(real) + " tokens leaves [" +
                                std::to_string(begin) + ", " + std::to_string(end) + ") of " +
                                std::to_string(rows.num_tokens));
    if (real > 0 && (source < 0 || source > source_size - real))
        throw std::out_of_range("span " + std::to_string(q) + " of " + std::to_string(real) + " tokens at " +
                                std::to_string(source) + " leaves the source of " + std::to_string(source_size));
    return {begin, end, real, source};
}

template <typename T>
void convert(const T* from, int64_t n, int64_t* to) {
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<int64_t>(from[i]);
}

// 1 where the token behind a position lies in a span of its sample, else 0; positions without a label are 0 already.
void mask_by_edges(const int64_t* edges, const int64_t* edges_end, int64_t start, int64_t n, float* loss_mask) {
    const int64_t* next = std::upper_bound(edges, edges_end, start + 1);
    for (int64_t i = 0; i < n; ++i) {
        while (next != edges_end && *next <= start + i + 1) ++next;
        if ((next - edges) % 2 == 0) loss_mask[i] = 0.0f;
    }
}

template <typename T>
void pack_as(const PackRows& rows, const PackSources& sources, const PackPads& pads, const PackOutputs& out) {
    const T* tokens = reinterpret_cast<const T*>(sources.tokens);
    if (rows.count ? rows.destination[0] != 0 : rows.num_tokens != 0)
        throw std::out_of_range("the first span must begin at 0");
    for (int64_t q = 0; q < rows.count; ++q) {
        const auto [begin, end, real, source] = checked_span(rows, q, sources.size);
        convert(tokens + source, real, out.tokens + begin);
        int64_t* labels = out.labels + begin;
        float* loss_mask = out.loss_mask + begin;
        if (sources.labels) {
            std::copy_n(sources.labels + source, real, labels);
            for (int64_t i = 0; i < real; ++i) loss_mask[i] = labels[i] != pads.ignore_label ? 1.0f : 0.0f;
        } else {
            const int64_t known = rows.targets[q];
            if (known < 0 || known > real || (known > 0 && source + known >= sources.size))
                throw std::out_of_range("span " + std::to_string(q) + " has " + std::to_string(known) +
                                        " labels, which leave its tokens or the source");
            convert(tokens + source + 1, known, labels);
            std::fill_n(labels + known, real - known, pads.ignore_label);
            std::fill_n(loss_mask, known, 1.0f);
            std::fill_n(loss_mask + known, real - known, 0.0f);
        }
        if (sources.loss_mask) {
            std::copy_n(sources.loss_mask + source, real, loss_mask);
        } else if (sources.loss_edges) {
            const int64_t first = rows.first_edge[q], last = rows.last_edge[q];
            if (first < 0 || last < first || last > sources.num_edges)
                throw std::out_of_range("span " + std::to_string(q) + " has loss edges " + std::to_string(first) +
                                        ".." + std::to_string(last) + " of " + std::to_string(sources.num_edges));
            mask_by_edges(sources.loss_edges + first, sources.loss_edges + last, rows.start[q], real, loss_mask);
        }
        int64_t* positions = out.position_ids + begin;
        const int64_t width = end - begin, start = rows.start[q];
        for (int64_t i = 0; i < width; ++i) positions[i] = start + i;
        if (sources.position_ids) std::copy_n(sources.position_ids + source, real, positions);
        if (pads.zero_positions) std::fill(positions + real, positions + width, int64_t{0});
        std::fill(out.tokens + begin + real, out.tokens + end, pads.token);
        std::fill(labels + real, labels + width, pads.label);
        std::fill(loss_mask + real, loss_mask + width, 0.0f);
        std::fill_n(out.padding_mask + begin, real, false);
        std::fill(out.padding_mask + begin + real, out.padding_mask + end, true);
        std::fill(out.document_id + begin, out.document_id + end, static_cast<int32_t>(rows.entry[q]));
    }
}

}  // namespace

void pack(const PackRows& rows, const PackSources& sources, const PackPads& pads, const PackOutputs& out) {
    switch (sources.dtype_code) {
        case 1: return pack_as<uint8_t>(rows, sources, pads, out);
        case 2: return pack_as<int8_t>(rows, sources, pads, out);
        case 3: return pack_as<int16_t>(rows, sources, pads, out);
        case 4: return pack_as<int32_t>(rows, sources, pads, out);
        case 5: return pack_as<int64_t>(rows, sources, pads, out);
        case 8: return pack_as<uint16_t>(rows, sources, pads, out);
        default:
            throw std::invalid_argument("dtype code " + std::to_string(sources.dtype_code) +
                                        " is not an integer type");
    }
}

void pack_bytes(const PackRows& rows, const unsigned char* source, int64_t source_bytes, int64_t width,
                unsigned char* out) {
    if (width == 0) return;
    for (int64_t q = 0; q < rows.count; ++q) {
        const auto [begin, end, real, at] = checked_span(rows, q, source_bytes / width);
        std::memcpy(out + begin * width, source + at * width, static_cast<size_t>(real * width));
        std::memset(out + (begin + real) * width, 0, static_cast<size_t>((end - begin - real) * width));
    }
}

template <typename T>
void cp_positions(const T* cu_seqlens, int64_t count, int64_t cp_size, int64_t cp_rank, int64_t* out) {
    const int64_t chunks = cp_size > 1 ? 2 * cp_size : 1;
    for (int64_t q = 0; q < count; ++q) {
        const int64_t begin = cu_seqlens[q], length = static_cast<int64_t>(cu_seqlens[q + 1]) - begin;
        if (length < 0) throw std::invalid_argument("cu_seqlens_padded decreases");
        if (length % chunks)
            throw std::invalid_argument("sequence " + std::to_string(q) + " has padded length " +
                                        std::to_string(length) +
                                        ", not a multiple of 2 * cp_size = " + std::to_string(chunks));
        const int64_t chunk = length / chunks;
        const auto run = [&](int64_t number) {
            const int64_t from = begin + number * chunk;
            for (int64_t i = 0; i < chunk; ++i) *out++ = from + i;
        };
        run(cp_rank);
        if (cp_size > 1) run(chunks - 1 - cp_rank);
    }
}

template void cp_positions<int32_t>(const int32_t*, int64_t, int64_t, int64_t, int64_t*);
template void cp_positions<int64_t>(const int64_t*, int64_t, int64_t, int64_t, int64_t*);

}  // namespace tdp
